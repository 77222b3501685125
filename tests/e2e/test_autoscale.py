"""The autoscaler with everything real: gateway, weight service, samplers as its own processes.

The trainer is played by the test, which takes groups or leaves them: that is the demand.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from contracts.credentials import Credentials, Token
from contracts.pb import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from contracts.rpc import sync_channel
from trainer_jax.metrics import read_metrics

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "demo-checkpoint"
TOKEN = "a-token-for-tests-only"
RUN_FILE = """
[autoscaler]
every_seconds = 0.3
cooldown_up_seconds = 0.0
cooldown_down_seconds = 1.0
headroom = 0.0
[sampling]
top_p = 0.97
top_k = 64
max_new_tokens = 48
[episodes]
group_size = 2
max_concurrent = 8
queue_groups = 4
[episodes.limits]
max_turns = 4
max_context_tokens = 1000
[tasks]
num_train = 8
num_heldout = 4
[fleet]
max_context_tokens = 1024
lease_seconds = 4.0
drain_seconds = 10.0
measure_seconds = 0.0
assemble_seconds = 0.0
[[fleet.groups]]
name = "a"
weight_format = "bf16"
max_sessions = 4
samplers = 0
min_samplers = 0
max_samplers = 2
[[fleet.groups.price_per_hour]]
per_hour = 1.0
since = 2026-01-01
source = "a test"
[[fleet.groups]]
name = "b"
weight_format = "bf16"
max_sessions = 4
samplers = 0
min_samplers = 0
max_samplers = 1
[[fleet.groups.price_per_hour]]
per_hour = 2.0
since = 2026-01-01
source = "a test"
"""


@dataclass
class Seen:
    """One look at a group: what is asked for, what is there."""

    target: int | None
    held: int | None
    ready: int


@dataclass
class Fleet:
    """The processes, and what the gateway says of them."""

    directory: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    looks: list[dict[str, Seen]] = field(default_factory=list)
    gateway: str = ""
    weights: str = ""

    def __post_init__(self) -> None:
        (self.directory / "run.toml").write_text(RUN_FILE)
        (self.directory / "token").write_text(TOKEN)
        self.weights = self.serve(
            "weights", "weight_sync", "--store", str(self.directory / "store")
        )
        self.run("weight_sync", "publish", str(CHECKPOINT), "--version", "1")
        options = ("--checkpoint", str(CHECKPOINT), "--weights", self.weights)
        state = ("--state-dir", str(self.directory / "gateway"))
        self.gateway = self.serve("gateway", "sampler_fleet", *options, *state)
        self.channel = sync_channel(self.gateway, Credentials(token=Token(TOKEN)))
        self.start_autoscaler()

    def serve(self, name: str, package: str, *options: str) -> str:
        """Starts a server; its address once it listens."""
        port = self.directory / f"{name}.port"
        listen = ("--listen", "127.0.0.1:0", "--port-file", str(port))
        self.start(name, package, "serve", *listen, "--config", self.run_file, *options)
        self.until(port.exists)
        return f"127.0.0.1:{port.read_text().strip()}"

    @property
    def run_file(self) -> str:
        return str(self.directory / "run.toml")

    @property
    def token(self) -> tuple[str, str]:
        return ("--token-file", str(self.directory / "token"))

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", *arguments, *self.token]
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def run(self, *arguments: str) -> None:
        command = [sys.executable, "-m", *arguments, "--address", self.weights, *self.token]
        subprocess.run(command, cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)

    def start_autoscaler(self) -> None:
        addresses = ("--gateway", self.gateway, "--weights", self.weights)
        place = ("--config", self.run_file, "--state-dir", str(self.directory / "samplers"))
        self.start("autoscaler", "sampler_fleet", "autoscale", *addresses, *place)

    def samplers(self) -> dict[str, psutil.Process]:
        """The autoscaler's sampler processes by id."""
        found = {}
        for child in psutil.Process(self.processes["autoscaler"].pid).children():
            try:
                line = child.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # it ended between the two looks
            if "--sampler-id" in line:
                found[line[line.index("--sampler-id") + 1]] = child
        return found

    def status(self) -> fleet_pb2.StatusReply:
        stub = fleet_pb2_grpc.FleetStub(self.channel)
        reply = stub.Status(fleet_pb2.StatusRequest(), timeout=10.0)
        self.looks.append(
            {
                group.group: Seen(
                    target=group.num_target if group.HasField("num_target") else None,
                    held=group.num_held if group.HasField("num_held") else None,
                    ready=sum(
                        s.register.group == group.group and s.state == "ready"
                        for s in reply.samplers
                    ),
                )
                for group in reply.groups
            }
        )
        return reply

    def look(self) -> dict[str, Seen]:
        self.status()
        return self.looks[-1]

    def take(self) -> None:
        """Plays the trainer: takes what is there, and so makes room for more."""
        newest = self.status().last_sequence
        rollout_pb2_grpc.RolloutStub(self.channel).AckGroups(
            rollout_pb2.AckGroupsRequest(sequence=newest, taken=newest), timeout=10.0
        )

    def edit(self, old: str, new: str) -> None:
        path = self.directory / "run.toml"
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))

    def until(self, condition: Callable[[], object], timeout_s: float = 150.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not dead and time.monotonic() < deadline, (
                f"{dead or 'not in time'}\n{self.logs()}"
            )
            time.sleep(0.1)

    def logs(self) -> str:
        files = [*self.directory.glob("*.log"), *self.directory.glob("samplers/logs/*.log")]
        looks = "\n".join(map(str, self.looks[-3:]))
        return "\n".join(f"== {f.name}\n{f.read_text()[-2000:]}" for f in files) + f"\n{looks}"

    def close(self) -> None:
        self.channel.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def fleet(tmp_path: Path):
    fleet = Fleet(tmp_path)
    yield fleet
    left = fleet.samplers().values() if "autoscaler" in fleet.processes else ()
    fleet.close()
    assert not psutil.wait_procs(left, timeout=10)[1]


def test_samplers_follow_demand_bounds_and_losses(fleet):
    # from zero: eight sessions wait, the cheaper group has places for all of them
    fleet.until(lambda: fleet.look()["a"].target == 2)
    fleet.until(lambda: fleet.look()["a"].ready)
    assert fleet.samplers().keys() <= {"a-0", "a-1"}
    # to zero: four groups are complete and nobody takes them
    fleet.until(lambda: fleet.status().groups_ready >= 4)
    fleet.until(lambda: all(seen == Seen(0, 0, 0) for seen in fleet.look().values()))
    assert not fleet.samplers()
    # and back
    fleet.take()
    fleet.until(lambda: fleet.look()["a"].ready)
    assert fleet.samplers().keys() <= {"a-0", "a-1"}, "numbers are used again"
    assert all(
        seen["a"].target in (None, 0, 1, 2) and seen["b"].target in (None, 0)
        for seen in fleet.looks
    )

    # other bounds in mid-run: a wrong edit changes nothing, a right one holds at once
    fleet.edit('name = "b"', 'name = "c"')
    autoscaler_log = fleet.directory / "autoscaler.log"
    fleet.until(lambda: "fleet.groups: expected a, b" in autoscaler_log.read_text())
    fleet.edit('name = "c"', 'name = "b"')
    bounds = "samplers = {0}\nmin_samplers = {0}\nmax_samplers = 1"
    fleet.edit(bounds.format(0), bounds.format(1))
    fleet.until(lambda: fleet.look()["b"].ready == 1)
    assert fleet.look()["b"] == Seen(1, 1, 1)

    # a sampler that is killed comes back without anybody's doing
    killed = fleet.samplers()["b-0"]
    killed.kill()
    fleet.until(lambda: fleet.look()["b"].ready == 0)
    fleet.until(lambda: fleet.look()["b"].ready == 1)
    assert fleet.samplers()["b-0"].pid != killed.pid
    assert fleet.look()["b"].target == 1

    # the end of the autoscaler is the end of its samplers, after what they run
    fleet.take()
    held = list(fleet.samplers().values())
    autoscaler = fleet.processes.pop("autoscaler")
    autoscaler.send_signal(signal.SIGTERM)
    assert autoscaler.wait(timeout=40) == 0, fleet.logs()
    assert not psutil.wait_procs(held, timeout=1)[1]
    log = (fleet.directory / "gateway.log").read_text()
    assert "sampler b-0 drains: it was told to stop" in log
    assert not fleet.status().counters["episodes_failed"]


def test_a_run_with_an_autoscaler_leaves_nothing_when_killed_and_resumes(run):
    settings = ("--set", "autoscaler.every_seconds=0.5", "--set", "evaluation.before=false")
    settings += ("--set", "train.updates=4")
    run.start(*settings)
    run.until(lambda: (run.directory / "checkpoints" / "2").exists())
    run.until_step(3)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    names = {line.split("--sampler-id ")[1].split()[0] for line in map(_line, processes) if line}
    assert names == {"b200-nvfp4-0", "h100-fp8-0", "eval-0"}
    run.seen += processes
    run.signal(signal.SIGKILL)
    run.wait()
    assert not run.leftovers()

    run.start(*settings, "--resume")
    status, output = run.wait()
    assert status == 0, output + run.logs()
    assert [record["step"] for record in read_metrics(run.directory)] == [1, 2, 3, 4]
    summary = run.summary()
    assert summary["status"] == "finished" and set(summary["groups"]) == {"b200-nvfp4", "h100-fp8"}
    assert summary["heldout"]["after"]["missing_samples"] == 0


def _line(process: psutil.Process) -> str:
    """The command line of a sampler, "" of anything else."""
    try:
        line = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    return line if "--sampler-id" in line else ""
