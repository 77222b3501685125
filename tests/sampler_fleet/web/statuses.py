"""Statuses of a mixed fleet at one moment of a run, for tests of what shows them.

Owns made-up numbers that grow with time; asserts nothing.
"""

from __future__ import annotations

import math

from contracts.pb import fleet_pb2

GROUPS = (  # name, accelerator, weight format, share, samplers
    ("b300-nvfp4", "B300", "nvfp4", 0.30, 3),
    ("h200-fp8", "H200", "fp8-block", 0.35, 4),
    ("h100-fp8", "H100", "fp8-block", 0.20, 3),
    ("a100-bf16", "A100", "bf16", 0.15, 2),
)
ALARM = "Group h100-fp8 has been short of its target by 1 sampler for 15 min."
HOSTILE = '<img src=x onerror="document.title=1">'


def make_sampler(
    sampler_id: str, group: str, *, t: float = 0, version: int = 41, state: str = "ready"
) -> fleet_pb2.SamplerState:
    """One sampler, `t` seconds into the run."""
    name, accelerator, weight_format, *_ = next(g for g in GROUPS if g[0] == group)
    wave = 0.5 + 0.5 * math.sin(t / 7 + len(sampler_id) + ord(sampler_id[-1]))
    running = 0 if state == "lost" else round(20 + 12 * wave)
    return fleet_pb2.SamplerState(
        register=fleet_pb2.Register(
            sampler_id=sampler_id,
            group=name,
            accelerator=accelerator,
            weight_format=weight_format,
            kv_format="fp8",
            max_sessions=32,
        ),
        heartbeat=fleet_pb2.Heartbeat(
            num_running=running,
            num_waiting=2 if wave > 0.9 else 0,
            version=version,
            tokens_per_second=40.0 * running,
            kv_used_fraction=0.35 + 0.5 * wave,
            switch=fleet_pb2.Switch(
                base_version=version - 1,
                num_bytes=412_000_000,
                fetch_seconds=1.9,
                apply_seconds=2.2,
                verify_seconds=0.6,
                load_seconds=1.4,
                pause_seconds=0.21,
            ),
        ),
        state=state,
        num_sessions=0 if state == "lost" else min(32, running + 3),
    )


def make_status(t: float = 0, *, num_samplers: int = 12, alarms: tuple[str, ...] = ()):
    """A fleet `t` seconds into the run, with an update every 30 s.

    Of each group the second sampler is a version behind; of the third group one drains, and one is
    lost.
    """
    version, scale = 41 + int(t) // 30, num_samplers / 12
    reply = fleet_pb2.StatusReply(
        episodes_in_flight=round(300 + 5 * t) % 1400,
        groups_ready=6 + int(t) % 5,
        counters={
            "episodes_completed": 51_200 + int(9 * t),
            "episodes_failed": 31,
            "failovers": 17,
            "leases_expired": 4,
        },
        last_sequence=6_412 + int(t),
        demand=fleet_pb2.Demand(num_queued=12, backlog=88.0, session_seconds=604.0),
        update=fleet_pb2.UpdateReport(
            step=version - 1,
            version=version,
            seconds=512.0,
            update_seconds=361.0,
            staleness=2.74,
            kl=0.00183,
            share_out_of_band=0.0121,
            reward=0.4137,
        ),
        alarms=alarms,
        seconds=8_000 + t,
    )
    for i, (name, _, _, share, num) in enumerate(GROUPS):
        for k in range(round(num * scale)):
            state = {(2, 0): "draining", (2, 2): "lost"}.get((i, k), "ready")
            sampler = make_sampler(
                f"{name}-{k}", name, t=t + 2 * i, version=version - (k == 1), state=state
            )
            reply.samplers.append(sampler)
        update = fleet_pb2.GroupUpdate(
            group=name,
            num_trajectories=64,
            num_tokens=1_900_000,
            kl=0.0008 * (i + 1),
            share_out_of_band=0.004 * (i + 1),
        )
        reply.groups.append(
            fleet_pb2.GroupState(
                group=name,
                purpose="train",
                capacity_share=share,
                sessions_routed=int(20_000 * share) + i,
                tokens_sampled=int(4.1e9 * share + 9_000 * t),
                tokens_per_second=sum(
                    s.heartbeat.tokens_per_second
                    for s in reply.samplers
                    if s.register.group == name
                ),
                cost=fleet_pb2.Cost(
                    gpu_hours=700 * share + t / 60,
                    dollars=None if name == "a100-bf16" else 3100 * share + t / 20,
                ),
                num_target=round(num * scale),
                num_held=round(num * scale),
                update=update,
            )
        )
    return reply
