"""`python -m sampler_fleet status`: the gateway's Status as tables.

Owns the layout. Must not compute what the gateway doesn't report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
from google.protobuf import json_format
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from contracts import rpc
from contracts.credentials import Credentials
from contracts.errors import RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc

_PHASE_STYLE = {"ready": "green", "draining": "yellow", "lost": "red"}


def group_table(reply: fleet_pb2.StatusReply) -> Table:
    """Groups: their share by capacity beside what they really got."""
    routed: dict[str, int] = {}
    for group in reply.groups:
        routed[group.purpose] = routed.get(group.purpose, 0) + group.sessions_routed
    ready: dict[str, int] = {}
    for sampler in reply.samplers:
        name = sampler.register.group
        ready[name] = ready.get(name, 0) + (sampler.state == "ready")
    table = Table(title="groups", expand=True)
    for column in ("group", "purpose"):
        table.add_column(column)
    for column in (
        *("ready", "share", "got", "sessions", "tokens", "tokens/s"),
        *("KL", "out of band", "GPU-h", "$"),
    ):
        table.add_column(column, justify="right")
    for group in reply.groups:
        total = routed[group.purpose]
        table.add_row(
            group.group,
            group.purpose,
            str(ready.get(group.group, 0))
            + (f"/{group.num_target}" if group.HasField("num_target") else ""),
            f"{group.capacity_share:.1%}",
            f"{group.sessions_routed / total:.1%}" if total else "-",
            str(group.sessions_routed),
            str(group.tokens_sampled),
            f"{group.tokens_per_second:.0f}",
            f"{group.update.kl:.5f}" if group.update.HasField("kl") else "-",
            f"{group.update.share_out_of_band:.2%}"
            if group.update.HasField("share_out_of_band")
            else "-",
            f"{group.cost.gpu_hours:.2f}",
            f"{group.cost.dollars:,.2f}" if group.cost.HasField("dollars") else "-",
        )
    return table


def sampler_table(reply: fleet_pb2.StatusReply) -> Table:
    """One row per sampler that ever joined this gateway."""
    table = Table(title="samplers", expand=True)
    for column in ("sampler", "group", "accelerator", "weights", "KV"):
        table.add_column(column)
    for column in ("version", "switch", "sessions", "running", "waiting", "KV used", "tokens/s"):
        table.add_column(column, justify="right")
    table.add_column("state")
    for sampler in reply.samplers:
        info, beat = sampler.register, sampler.heartbeat
        table.add_row(
            info.sampler_id,
            info.group,
            info.accelerator,
            info.weight_format,
            info.kv_format,
            str(beat.version),
            _took(beat.switch) if beat.HasField("switch") else "",
            f"{sampler.num_sessions}/{info.max_sessions}",
            str(beat.num_running),
            str(beat.num_waiting),
            f"{beat.kv_used_fraction:.0%}",
            f"{beat.tokens_per_second:.0f}",
            Text(sampler.state, style=_PHASE_STYLE.get(sampler.state, "")),
        )
    return table


def _took(switch: fleet_pb2.Switch) -> str:
    """What the switch to its version cost a sampler."""
    how = "delta" if switch.base_version else "full"
    seconds = (
        switch.fetch_seconds + switch.apply_seconds + switch.verify_seconds + switch.load_seconds
    )
    return f"{how} {switch.num_bytes / 1e6:.1f} MB, {seconds:.1f} s"


def render(reply: fleet_pb2.StatusReply) -> Group:
    """The whole view."""
    counters = "  ".join(f"{name} {reply.counters[name]}" for name in sorted(reply.counters))
    update = reply.update
    trained = "no update yet"
    if reply.HasField("update"):
        trained = f"update {update.step} made version {update.version}"
        if update.HasField("staleness"):
            trained += f" from tokens {update.staleness:.1f} versions old"
    return Group(
        group_table(reply),
        sampler_table(reply),
        Text(
            f"{trained}  episodes in flight {reply.episodes_in_flight}  "
            f"waiting for a place {reply.demand.num_queued}  "
            f"groups not acknowledged {reply.groups_ready}  newest group {reply.last_sequence}"
        ),
        *(Text(f"! {alarm}", style="bold red") for alarm in reply.alarms),
        Text(counters or "no counters yet", style="dim"),
    )


def fetch(channel: grpc.Channel, address: str) -> fleet_pb2.StatusReply:
    """The gateway's status; raises as `contracts.rpc.calling` does."""
    with rpc.calling(address):
        return fleet_pb2_grpc.FleetStub(channel).Status(
            fleet_pb2.StatusRequest(), timeout=rpc.DEADLINE_S
        )


def show(
    address: str,
    credentials: Credentials,
    *,
    every_seconds: float,
    console: Console,
    as_json: bool = False,
) -> None:
    """Prints the status once, or until interrupted where the console is a terminal."""
    with rpc.sync_channel(address, credentials) as channel:
        reply = fetch(channel, address)
        if as_json:
            fields = json_format.MessageToDict(reply, preserving_proto_field_name=True)
            console.print_json(data=fields)
            return
        if not console.is_terminal or every_seconds <= 0:
            console.print(render(reply))
            return
        with Live(render(reply), console=console, auto_refresh=False, screen=True) as live:
            for _ in _ticks(every_seconds):
                try:
                    reply, news = fetch(channel, address), Text("")
                except RetryError as error:
                    news = Text(f"! no news: {error}", style="bold red")
                live.update(Group(render(reply), news), refresh=True)


def _ticks(seconds: float) -> Iterator[None]:
    while True:
        time.sleep(seconds)
        yield
