"""A fleet of real processes under a load whose every token can be checked.

Owns the weight service, the gateway and the samplers of a test (kept running by the supervisor that
keeps a local run's), the clients that drive sessions and the consumer that stands for the trainer,
and the tally of what they received. Owns no scenario.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from contracts import codec, rpc
from contracts.credentials import read_credentials
from contracts.errors import RetryError
from contracts.pb import rollout_pb2_grpc
from contracts.runfile import write_resolved
from contracts.supervisor import Service, Supervisor
from contracts.types import (
    CandidateSets,
    Completion,
    Ending,
    GenerateRequest,
    SamplingParams,
    TrajectoryGroup,
)
from sampler_fleet.fingerprint import identify_checkpoint
from tests.e2e.scripted_sampler import positions_of, script
from trainer_jax.local import Addresses, gateway_service, local_addresses, weights_service
from trainer_jax.rollouts import GroupStream, RolloutClient
from weight_sync.client import publish

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "demo-checkpoint"
NICE = {"gateway": 0, "sampler": 0, "weights": 0}
PROMPT = (1, 2, 3)
# Clocks short enough for a test; the faults are as they are.
CLOCKS = {
    "heartbeat_seconds": 0.25,
    "lease_seconds": 10.0,
    "stall_seconds": 8.0,
    "grace_seconds": 60.0,
    "assemble_seconds": 20.0,
    "drain_seconds": 2.0,
    "session_idle_seconds": 60.0,
}
EPISODES = {
    "group_size": 2,
    "max_concurrent": 4,
    "queue_groups": 3,
    "num_sandboxes": 4,
    "limits": {"max_turns": 2, "max_format_errors": 2, "max_context_tokens": 1500},
}

TASKS = {"num_train": 64, "num_heldout": 4}


def scripted_group(name: str, *, capacity: float, max_sessions: int = 32) -> dict[str, Any]:
    return {
        "name": name,
        "weight_format": "bf16",
        "capacity": capacity,
        "max_sessions": max_sessions,
    }


class FleetUnderLoad:
    """The processes of one fleet, from `start` to `close`."""

    def __init__(
        self,
        directory: Path,
        groups: Sequence[dict[str, Any]],
        *,
        episodes: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        clocks: dict[str, float] | None = None,
        host: str = "",
    ) -> None:
        """`host` is where samplers elsewhere dial; the services then listen on all addresses."""
        directory.mkdir(parents=True)
        self.directory = directory
        sections = {
            "fleet": {
                "max_context_tokens": 1500,
                **CLOCKS,
                **(clocks or {}),
                "groups": list(groups),
            },
            "sampling": {"top_p": 0.97, "top_k": 64, "max_new_tokens": 24, **(sampling or {})},
            "episodes": {**EPISODES, **(episodes or {})},
            "tasks": TASKS,
        }
        write_resolved(directory / "config.json", sections)
        self.addresses = local_addresses(directory)
        self.remote = _moved(self.addresses, host) if host else self.addresses
        self._listen = _moved(self.addresses, "0.0.0.0") if host else self.addresses
        assert self.addresses.token_file is not None, "local_addresses makes one"
        self.token = self.addresses.token_file.read_text().strip()
        self.credentials = read_credentials(self.addresses.token_file)
        self.vocab_size = identify_checkpoint(CHECKPOINT).vocab_size
        self.version = 0  # the newest published
        self.acknowledged = 0  # by the consumers there were
        self.said: list[str] = []  # what the supervisor had to say
        self.supervisor = Supervisor(directory, nice=NICE, on_restart=self.said.append)
        self.client = RolloutClient(self.addresses.gateway, self.credentials)

    def start(self, samplers: Sequence[Service]) -> None:
        """Everything, with version 1 published; returns when all samplers are ready."""
        gateway = gateway_service(self.directory, self._listen, CHECKPOINT)
        self.supervisor.start([weights_service(self.directory, self._listen), gateway])
        self.publish()
        self.supervisor.start(samplers)
        names = {service.name for service in samplers}
        self.wait_until(lambda: names <= self.ready(), timeout_s=150)

    def close(self) -> None:
        """Ends every process, and refuses a token in any of their logs."""
        self.client.close()
        self.supervisor.stop()
        assert self.token not in self.logs()

    def logs(self) -> str:
        files = sorted((self.directory / "logs").glob("*.log"))
        assert files
        return "\n".join(file.read_text(errors="replace") for file in files)

    def scripted(
        self,
        name: str,
        group: str,
        *,
        misbehave: str = "",
        tokens_per_second: float = 100.0,
        prefix: Sequence[str] = (),
    ) -> Service:
        """A scripted sampler; `prefix` is a command that runs its command elsewhere."""
        program = (*prefix, sys.executable, "-m", "tests.e2e.scripted_sampler")
        pace = ("--tokens-per-second", str(tokens_per_second))
        options = (*pace, *(("--misbehave", misbehave) if misbehave else ()))
        addresses = self.remote if prefix else self.addresses
        return self._sampler(name, group, addresses, (*program, *options))

    def embedded(self, name: str, group: str) -> Service:
        """A sampler as users have it."""
        program = (sys.executable, "-m", "sampler_fleet", "join")
        return self._sampler(name, group, self.addresses, program)

    def _sampler(
        self, name: str, group: str, addresses: Addresses, program: Sequence[str]
    ) -> Service:
        return Service(
            name=name,
            kind="sampler",
            command=(
                *program,
                *("--config", str(self.directory / "config.json")),
                *("--token-file", str(addresses.token_file)),
                *("--state-dir", str(self.directory / "samplers" / name)),
                *("--gateway", addresses.gateway, "--weights", addresses.weights),
                *("--group", group, "--sampler-id", name),
            ),
        )

    def publish(self) -> int:
        """The next version, of the same weights."""
        self.version += 1
        publish(self.addresses.weights, self.credentials, CHECKPOINT, self.version, patience_s=30.0)
        return self.version

    def kill(self, name: str) -> int:
        """kill -9, and the process id it had."""
        pid = self.supervisor.pids()[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def ready(self, *, version: int = 0) -> set[str]:
        """Samplers that take turns, with at least that version; none while the gateway is away."""
        try:
            status = self.client.status(timeout_s=2.0)
        except RetryError:
            return set()
        return {
            sampler.register.sampler_id
            for sampler in status.samplers
            if sampler.state == "ready" and sampler.heartbeat.version >= version
        }

    def counters(self) -> Counter[str]:
        """Of the gateway that runs now."""
        return Counter(dict(self.client.status().counters))

    def wait_until(self, condition: Callable[[], object], *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.supervisor.check()
            assert time.monotonic() < deadline, self.logs()[-6000:]
            time.sleep(0.05)

    async def until(self, condition: Callable[[], object], *, timeout_s: float = 60.0) -> None:
        """As `wait_until`, with the loop free."""
        await asyncio.to_thread(self.wait_until, condition, timeout_s=timeout_s)

    def channel(self) -> grpc.aio.Channel:
        return rpc.aio_channel(self.addresses.gateway, self.credentials)


def _moved(addresses: Addresses, host: str) -> Addresses:
    """The same ports on another host."""
    gateway, weights = (
        f"{host}:{address.rpartition(':')[2]}" for address in (addresses.gateway, addresses.weights)
    )
    return dataclasses.replace(addresses, gateway=gateway, weights=weights)


# What was received, against the script.


@dataclass
class Tally:
    """Counts of a scenario; what must not be is counted as such."""

    sessions: int = 0
    groups: int = 0
    tokens: int = 0
    retried: int = 0  # turns that a client began again from its buffer
    lost: int = 0  # tokens that were sampled for nobody, or trajectories that never came
    doubled: int = 0
    wrong: int = 0  # records or rewards other than those made

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def is_sound(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items())


def compare(session_id: str, positions: np.ndarray, received: Completion, vocab_size: int) -> Tally:
    """A session's records against the script; `positions` [T] are where its tokens stand."""
    num = len(received)
    claimed = positions_of(received.sampler_logp)
    seen = Counter(claimed.tolist())
    tally = Tally(
        sessions=1,
        tokens=num,
        lost=len(set(positions.tolist()) - seen.keys()),
        doubled=sum(times - 1 for times in seen.values()),
    )
    start = int(positions[0]) if num else 0
    end = int(positions[-1]) + 1 if num else 0
    whole = script(session_id, start, end - start, vocab_size)
    rows = positions - start
    expected = CandidateSets.from_counts(
        whole.candidates.counts[rows],
        *(
            np.concatenate(
                [
                    part[whole.candidates.offsets[row] : whole.candidates.offsets[row + 1]]
                    for row in rows
                ]
                or [part[:0]]
            )
            for part in (whole.candidates.ids, whole.candidates.logp)
        ),
    )
    tally.wrong = sum(
        not np.array_equal(found, wanted)
        for found, wanted in (
            (received.tokens, whole.tokens[rows]),
            (received.sampler_logp, whole.sampler_logp[rows]),
            (received.candidates.counts, expected.counts),
            (received.candidates.ids, expected.ids),
            (received.candidates.logp, expected.logp),
        )
    )
    return tally


@dataclass
class Session:
    """A client of Rollout.Generate: keeps its buffer, and goes on from it whatever happened."""

    session_id: str
    num_turns: int
    turn_tokens: int
    min_version: int = 0
    chunks: list[Completion] = field(default_factory=list)
    num_retried: int = 0
    done: bool = False

    @property
    def num_received(self) -> int:
        return sum(map(len, self.chunks))

    async def play(self, channel: grpc.aio.Channel) -> None:
        stub = rollout_pb2_grpc.RolloutStub(channel)
        for turn in range(1, self.num_turns + 1):
            while missing := turn * self.turn_tokens - self.num_received:
                try:
                    with rpc.calling("gateway"):
                        await self._turn(stub, turn, missing)
                except RetryError:
                    self.num_retried += 1
                    await asyncio.sleep(0.5)
        self.done = True

    async def _turn(self, stub: Any, turn: int, missing: int) -> None:
        sampled = Completion.concatenate(self.chunks).tokens
        request = GenerateRequest(
            request_id=f"{self.session_id}/{turn}",
            session_id=self.session_id,
            tokens=np.concatenate([np.array(PROMPT, np.int32), sampled]),
            sampling=SamplingParams(top_p=0.97, max_new_tokens=missing),
            min_version=self.min_version,
            ends_session=turn == self.num_turns,
        )
        async for message in stub.Generate(codec.generate_to_pb(request)):
            self.chunks.append(codec.chunk_from_pb(message))

    def tally(self, vocab_size: int) -> Tally:
        whole = Completion.concatenate(self.chunks)
        positions = np.arange(len(PROMPT), len(PROMPT) + self.num_turns * self.turn_tokens)
        if len(whole) != len(positions):  # lost and doubled are told all the same
            seen = Counter(positions_of(whole.sampler_logp).tolist())
            lost = len(set(positions.tolist()) - seen.keys())
            doubled = seen.total() - len(seen)
            return Tally(sessions=1, tokens=len(whole), lost=lost, doubled=doubled)
        tally = compare(self.session_id, positions, whole, vocab_size)
        tally.retried = self.num_retried
        return tally


@contextlib.asynccontextmanager
async def playing(fleet: FleetUnderLoad, sessions: Iterable[Session]):
    """Sessions that run meanwhile; leaving waits for them all."""
    async with fleet.channel() as channel, asyncio.TaskGroup() as tasks:
        for session in sessions:
            tasks.create_task(session.play(channel))
        yield


def make_sessions(
    name: str, num: int, *, num_turns: int = 3, turn_tokens: int = 40, min_version: int = 0
) -> list[Session]:
    return [
        Session(
            session_id=f"{name}-{number}",
            num_turns=num_turns,
            turn_tokens=turn_tokens,
            min_version=min_version,
        )
        for number in range(num)
    ]


def tally_of(fleet: FleetUnderLoad, sessions: Iterable[Session]) -> Tally:
    total = Tally()
    for session in sessions:
        total.add(session.tally(fleet.vocab_size))
    return total


# The trainer's place.


class Consumer:
    """Takes groups in order, keeps them, and acknowledges those it could not lose any more.

    Killed and started again, as a trainer is, it goes on from what it acknowledged last; so does
    the next consumer of the same fleet.
    """

    def __init__(self, fleet: FleetUnderLoad, *, ack_every: int = 3, pause_s: float = 0.0) -> None:
        """It takes `pause_s` over each group."""
        self._fleet = fleet
        self._ack_every = ack_every
        self.pause_s = pause_s
        self._first = fleet.acknowledged + 1
        self.taken = fleet.acknowledged
        self.groups: dict[int, TrajectoryGroup] = {}
        self.num_redelivered = 0
        self.num_changed = 0  # groups that came again and were others
        self.num_reconnects = 0
        self.order: list[int] = []  # of sequences, since the last start
        self._start()

    def _start(self) -> None:
        self.order.clear()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def crash(self) -> None:
        """All that was not acknowledged is asked for again."""
        self.close()
        self._start()

    def _run(self) -> None:
        client = RolloutClient(self._fleet.addresses.gateway, self._fleet.credentials)
        stream = GroupStream(client, cursor=self._fleet.acknowledged)
        try:
            while not self._stopped.is_set():
                group = stream.get(0.1)
                if group is not None:
                    self._take(group)
                    with contextlib.suppress(RetryError):  # the next one says it again
                        client.acknowledge(durable=self._fleet.acknowledged, taken=group.sequence)
                    self._stopped.wait(self.pause_s)
        finally:
            self.num_reconnects += stream.num_reconnects
            stream.close()
            client.close()

    def _take(self, group: TrajectoryGroup) -> None:
        known = self.groups.setdefault(group.sequence, group)
        if known is not group:
            self.num_redelivered += 1
            self.num_changed += _bytes(known) != _bytes(group)
        self.order.append(group.sequence)
        self.taken = group.sequence
        if group.sequence % self._ack_every == 0:
            self._fleet.acknowledged = group.sequence

    def tally(self) -> Tally:
        """Groups and trajectories against what must be: nothing missing, nothing twice."""
        total = Tally(groups=len(self.groups))
        sequences = sorted(self.groups)
        newest = max(sequences, default=0)
        total.lost += len(set(range(self._first, newest + 1)) - set(sequences))
        total.doubled += len(self.order) - len(set(self.order))
        total.wrong += self.num_changed + (self.order != sorted(self.order))
        sessions = Counter(t.session_id for g in self.groups.values() for t in g.trajectories)
        total.doubled += sessions.total() - len(sessions)
        return total


def compare_trajectories(groups: Iterable[TrajectoryGroup], vocab_size: int) -> Tally:
    """The records of scripted samplers, as the trainer gets them, and rewards that can be.

    The script submits nothing: a reward other than 0 is wrong.
    """
    total = Tally()
    for group in groups:
        for trajectory in group.trajectories:
            positions = np.flatnonzero(trajectory.loss_mask)
            received = Completion(
                tokens=trajectory.tokens[positions],
                sampler_logp=trajectory.sampler_logp,
                candidates=trajectory.candidates,
                spans=(),
                finish_reason=None,
            )
            total.add(compare(trajectory.session_id, positions, received, vocab_size))
            total.wrong += trajectory.reward != 0.0 or trajectory.ending == Ending.FAILURE
            total.wrong += any(
                not name.startswith(f"{trajectory.group}-") for name in trajectory.sampler_ids
            )
    return total


def _bytes(group: TrajectoryGroup) -> bytes:
    return codec.group_to_pb(group).SerializeToString(deterministic=True)
