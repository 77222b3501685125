"""Faults under load, with real processes: what is lost, what is doubled, and does it heal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import pytest

from contracts.types import (
    CandidateSets,
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Trajectory,
    VersionSpan,
)
from sampler_fleet.episodes.agent import EpisodeLimits, run_episode
from sampler_fleet.episodes.base import GeneratedChunk, Generator
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.grading import Grader
from sampler_fleet.episodes.sandbox import SandboxPool
from sampler_fleet.episodes.tasks.generate import generate_tasks
from tests.e2e.fleet_under_load import (
    CHECKPOINT,
    EPISODES,
    TASKS,
    Consumer,
    FleetUnderLoad,
    Tally,
    compare_trajectories,
    make_sessions,
    playing,
    scripted_group,
    tally_of,
)

pytestmark = pytest.mark.e2e

PLACES = 8  # of a sampler
GROUPS = [
    scripted_group("a", capacity=5, max_sessions=PLACES),
    scripted_group("b", capacity=3, max_sessions=PLACES),
]
PARTITIONED = ("a-0", "a-1", "a-far")
SAMPLERS = {f"a-{n}": "a" for n in range(5)} | {f"b-{n}": "b" for n in range(3)}

REAL_EPISODES = {"limits": {"max_turns": 6, "max_format_errors": 3, "max_context_tokens": 1500}}
REAL_SAMPLING = {"max_new_tokens": 64}


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory):
    """Eight scripted samplers in two groups, for scenarios that leave the fleet as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOG_LEVEL", "DEBUG")
        patch.setenv("GRPC_VERBOSITY", "DEBUG")
        fleet = FleetUnderLoad(tmp_path_factory.mktemp("faults") / "fleet", GROUPS)
        try:
            fleet.start([fleet.scripted(name, group) for name, group in SAMPLERS.items()])
            yield fleet
        finally:
            fleet.close()


@pytest.fixture
def fleet(shared_fleet):
    """The shared fleet, whole before and whole again afterwards, by itself."""
    shared_fleet.wait_until(lambda: shared_fleet.ready() == set(SAMPLERS))
    yield shared_fleet
    shared_fleet.wait_until(lambda: shared_fleet.ready() == set(SAMPLERS))


@pytest.fixture
def tell(capsys, request):
    """Prints a scenario's counts, also where output is captured."""

    def say(tally: Tally, counters: Counter[str] | None = None, **more: object) -> None:
        shown = {name: num for name, num in sorted((counters or {}).items()) if num}
        words = [str(tally), *(f"{name}={value}" for name, value in {**shown, **more}.items())]
        with capsys.disabled():
            sys.stdout.write(f"\n{request.node.name}: {' '.join(words)}\n")

    return say


async def test_three_of_eight_samplers_are_killed(fleet, tell):
    before, pids = fleet.counters(), fleet.supervisor.pids()
    sessions = make_sessions("killed", 32, turn_tokens=60)
    victims = ("a-0", "a-3", "b-1")
    async with playing(fleet, sessions):
        await fleet.until(lambda: sum(s.num_received for s in sessions) > 32 * 20)
        for name in victims:
            fleet.kill(name)
    counters = fleet.counters() - before
    await fleet.until(lambda: fleet.ready() == set(SAMPLERS))
    after = fleet.supervisor.pids()
    assert {name for name in SAMPLERS if after[name] != pids[name]} == set(victims)
    tally = tally_of(fleet, sessions)
    tell(tally, counters)
    assert tally.is_sound and tally.tokens == 32 * 180
    assert tally.retried == 0, "failover is the gateway's, not the client's"
    assert counters["failovers"] >= 3


@contextlib.contextmanager
def beside(fleet, name: str, misbehave: str):
    """A ninth sampler, of group a, while the block lasts."""
    fleet.supervisor.start([fleet.scripted(name, "a", misbehave=misbehave)])
    try:
        fleet.wait_until(lambda: name in fleet.ready())
        yield
    finally:
        fleet.supervisor.stop_services([name])
        fleet.wait_until(lambda: name not in fleet.ready())


@pytest.mark.parametrize(
    ("misbehave", "counter"),
    [("stall", "samplers_stalled"), ("nan", "records_refused"), ("old-spans", "records_refused")],
)
async def test_a_sick_sampler_is_replaced(fleet, tell, misbehave, counter):
    """It sends nothing more; it sends a log-prob of NaN; it says the new version, and draws from
    the old one."""
    name = f"a-{misbehave}"
    before = fleet.counters()
    with beside(fleet, name, misbehave):
        sick = fleet.supervisor.pids()[name]
        version = fleet.publish()
        await fleet.until(lambda: fleet.ready(version=version) == {*SAMPLERS, name})
        sessions = make_sessions(misbehave, 32, min_version=version)
        async with playing(fleet, sessions):
            pass
        await fleet.until(lambda: name in fleet.ready())
        assert fleet.supervisor.pids()[name] != sick, "another process"
    counters = fleet.counters() - before
    tally = tally_of(fleet, sessions)
    tell(tally, counters)
    assert tally.is_sound and tally.tokens == 32 * 120 and tally.retried == 0
    assert counters[counter] == 1, "one process, whatever it was serving"
    assert counters["failovers"] >= 1
    versions = {span.version for s in sessions for chunk in s.chunks for span in chunk.spans}
    assert versions == {version}


async def test_a_sampler_with_another_model_is_refused(fleet, tell):
    before = fleet.counters()
    service = fleet.scripted("a-other", "a", misbehave="another-model")
    sessions = make_sessions("other", 16)
    async with playing(fleet, sessions):
        ended = await asyncio.to_thread(
            subprocess.run, service.command, capture_output=True, text=True, timeout=30
        )
    assert ended.returncode == 2
    assert "model fingerprint: expected" in ended.stderr and fleet.token not in ended.stderr
    status = fleet.client.status()
    assert {s.register.sampler_id for s in status.samplers} >= set(SAMPLERS)
    assert "a-other" not in {s.register.sampler_id for s in status.samplers}
    tally = tally_of(fleet, sessions)
    tell(tally, fleet.counters() - before, refused=1)
    assert tally.is_sound and tally.retried == 0


async def test_a_sampler_with_an_old_version_gets_nothing_that_wants_a_new_one(fleet, tell):
    before = fleet.counters()
    with beside(fleet, "a-old", "old-version"):
        old, version = fleet.version, fleet.publish()
        await fleet.until(lambda: fleet.ready(version=version) == set(SAMPLERS))
        strict = make_sessions("new", 24, min_version=version)
        easy = make_sessions("any", 24)
        async with playing(fleet, [*strict, *easy]):
            pass
    drawn = [
        Counter(span.version for s in kind for chunk in s.chunks for span in chunk.spans)
        for kind in (strict, easy)
    ]
    assert drawn[0].keys() == {version}
    assert drawn[1].keys() == {old, version}, "it serves who takes any"
    tally = tally_of(fleet, [*strict, *easy])
    tell(tally, fleet.counters() - before)
    assert tally.is_sound and tally.retried == 0


async def test_ten_times_the_sessions_at_once(fleet, tell):
    """Beyond all places: who finds none waits for one, and nobody is turned away."""
    before = fleet.counters()
    usual = make_sessions("usual", 30, num_turns=6, turn_tokens=24)
    burst = make_sessions("burst", 300, num_turns=2, turn_tokens=16)
    fullest, longest_queue = Counter(), 0
    async with playing(fleet, usual):
        await fleet.until(lambda: sum(s.num_received for s in usual) > 200)
        async with playing(fleet, burst):
            while not all(session.done for session in burst):
                status = await asyncio.to_thread(fleet.client.status)
                longest_queue = max(longest_queue, status.demand.num_queued)
                for sampler in status.samplers:
                    name = sampler.register.sampler_id
                    fullest[name] = max(fullest[name], sampler.num_sessions)
                await asyncio.sleep(0.1)
    counters = fleet.counters() - before
    tally = tally_of(fleet, [*usual, *burst])
    tell(tally, counters, longest_queue=longest_queue, most_on_one_sampler=max(fullest.values()))
    assert tally.is_sound and tally.retried == 0
    assert tally.tokens == 30 * 144 + 300 * 32
    assert longest_queue > 100 and max(fullest.values()) == PLACES
    assert counters["failovers"] == counters["samplers_stalled"] == 0


async def test_the_gateway_is_killed(fleet, tell):
    """Twice, with sessions and episodes in flight and a trainer that takes groups."""
    consumer = Consumer(fleet)
    pids = fleet.supervisor.pids()
    try:
        sessions = make_sessions("gateway", 16, turn_tokens=80)
        async with playing(fleet, sessions):
            for kill in (1, 2):
                await fleet.until(
                    lambda kill=kill: sum(s.num_received for s in sessions) > kill * 16 * 40
                )
                fleet.kill("gateway")
                await fleet.until(lambda: fleet.ready() == set(SAMPLERS))
        num = len(consumer.groups)
        await fleet.until(lambda: len(consumer.groups) >= num + 4)
    finally:
        consumer.close()
    after = fleet.supervisor.pids()
    assert [name for name in pids if pids[name] != after[name]] == ["gateway"]
    tally = tally_of(fleet, sessions)
    assert tally.tokens == 16 * 240 and tally.retried >= 16, "a client goes on from its buffer"
    tally.add(consumer.tally())
    tally.add(compare_trajectories(consumer.groups.values(), fleet.vocab_size))
    tell(tally, fleet.counters(), reconnects=consumer.num_reconnects)
    assert tally.is_sound and consumer.num_reconnects >= 2


async def test_the_trajectory_service_and_its_consumer_are_killed(fleet, tell):
    """Whichever of the two ends, and when: each group is delivered until it is acknowledged."""
    consumer = Consumer(fleet, ack_every=4)
    try:
        for victim in ("both", "consumer", "service"):
            num = len(consumer.groups)
            await fleet.until(
                lambda num=num: (
                    len(consumer.groups) >= num + 2 and consumer.taken > fleet.acknowledged + 1
                )
            )
            if victim != "consumer":
                fleet.kill("gateway")
            if victim != "service":
                consumer.crash()
        num = len(consumer.groups)
        await fleet.until(lambda: len(consumer.groups) >= num + 4)
    finally:
        consumer.close()
    tally = consumer.tally()
    tally.add(compare_trajectories(consumer.groups.values(), fleet.vocab_size))
    tell(tally, fleet.counters(), redelivered=consumer.num_redelivered)
    assert tally.is_sound and consumer.num_redelivered > 0


async def test_a_slow_consumer(fleet, tell):
    """A trainer that takes a group now and then: production waits for it, and loses nothing."""
    consumer = Consumer(fleet, pause_s=1.0)
    most_ahead, was_paused = 0, False
    # a prompt starts with room for it, and then each episode may be the last of its own group
    bound = EPISODES["queue_groups"] - 1 + EPISODES["max_concurrent"]
    try:
        await fleet.until(lambda: len(consumer.groups) >= 5)  # what others left behind
        while len(consumer.groups) < 12:
            status = await asyncio.to_thread(fleet.client.status)
            most_ahead = max(most_ahead, status.last_sequence - consumer.taken)
            was_paused |= status.episodes_in_flight == 0
            await asyncio.sleep(0.1)
        consumer.pause_s = 0.0
        num = len(consumer.groups)
        await fleet.until(lambda: len(consumer.groups) >= num + 6)
    finally:
        consumer.close()
    tally = consumer.tally()
    tally.add(compare_trajectories(consumer.groups.values(), fleet.vocab_size))
    tell(tally, fleet.counters(), most_ahead=most_ahead, bound=bound)
    assert tally.is_sound and was_paused
    assert most_ahead <= bound


@contextlib.contextmanager
def elsewhere(*names: str, subnet: str = "10.231.77"):
    """A network namespace for each name, at the end of a cable of its own.

    Yields the host's address at the first cable, the prefix of each name's commands, and what cuts
    a cable ("down") or mends it ("up").
    """
    program = shutil.which("ip")
    if os.geteuid() or program is None:
        pytest.skip("network namespaces need root and iproute2")

    def ip(*arguments: str) -> None:
        subprocess.run((program, *arguments), check=True, capture_output=True, timeout=10)

    spaces = {name: f"faults-{os.getpid()}-{number}" for number, name in enumerate(names)}
    cables = {name: f"ft{os.getpid() % 100_000}h{number}" for number, name in enumerate(names)}
    try:
        for number, name in enumerate(names):
            space, here = spaces[name], cables[name]
            there = here.replace("h", "n")
            try:
                ip("netns", "add", space)
                ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", space)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
            ip("addr", "add", f"{subnet}.{4 * number + 1}/30", "dev", here)
            ip("link", "set", here, "up")
            ip("-n", space, "addr", "add", f"{subnet}.{4 * number + 2}/30", "dev", there)
            ip("-n", space, "link", "set", there, "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "route", "add", "default", "via", f"{subnet}.{4 * number + 1}")
        prefixes = {name: (program, "netns", "exec", space) for name, space in spaces.items()}

        def switch(name: str, state: str) -> None:
            ip("link", "set", cables[name], state)

        yield f"{subnet}.1", prefixes, switch
    finally:
        for space in spaces.values():
            subprocess.run((program, "netns", "del", space), capture_output=True, timeout=10)


async def test_a_partition_of_thirty_seconds(tmp_path, tell):
    """One of three samplers is cut off in mid-turn for longer than its lease, then comes back: the
    same process, and what it sent before is too late."""
    with elsewhere("a-far") as (host, prefixes, switch):
        groups, clocks = [scripted_group("a", capacity=1)], {"stall_seconds": 60.0}
        fleet = FleetUnderLoad(tmp_path / "fleet", groups, clocks=clocks, host=host)
        try:
            fleet.start(
                [fleet.scripted(name, "a", prefix=prefixes.get(name, ())) for name in PARTITIONED]
            )
            pids = fleet.supervisor.pids()
            sessions = make_sessions("cut", 18, num_turns=4, turn_tokens=60)
            late = make_sessions("late", 12)
            async with playing(fleet, sessions):
                await fleet.until(lambda: sum(s.num_received for s in sessions) > 18 * 20)
                switch("a-far", "down")
                cut = time.monotonic()
                await fleet.until(lambda: fleet.ready() == {"a-0", "a-1"}, timeout_s=25)
            async with playing(fleet, late):
                pass
            await asyncio.sleep(max(0.0, 30 - (time.monotonic() - cut)))
            await fleet.until(lambda: fleet.ready() == {"a-0", "a-1"}, timeout_s=5)
            switch("a-far", "up")
            await fleet.until(lambda: fleet.ready() == set(PARTITIONED), timeout_s=60)
            back_s = time.monotonic() - cut - 30
            again = make_sessions("again", 18)
            async with playing(fleet, again):
                pass
            assert fleet.supervisor.pids() == pids, "nothing was restarted"
            tally, counters = tally_of(fleet, [*sessions, *late, *again]), fleet.counters()
            tell(tally, counters, back_after_s=round(back_s, 1))
            assert tally.is_sound and tally.retried == 0
            assert tally.tokens == 18 * 240 + 12 * 120 + 18 * 120
            assert counters["leases_expired"] == 1 and counters["failovers"] >= 1
        finally:
            fleet.close()


class Replay(Generator):
    """Answers an episode's turns with the tokens that one recorded drew."""

    def __init__(self, trajectory: Trajectory, stop_token_ids: tuple[int, ...]) -> None:
        edges = np.flatnonzero(np.diff(trajectory.loss_mask.astype(np.int8), prepend=0, append=0))
        self._turns = [trajectory.tokens[start:end] for start, end in edges.reshape(-1, 2)]
        self._stop_token_ids = stop_token_ids

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedChunk]:
        tokens = self._turns.pop(0)
        stopped = int(tokens[-1]) in self._stop_token_ids
        yield GeneratedChunk(
            completion=Completion(
                tokens=tokens,
                sampler_logp=np.zeros(len(tokens), np.float32),
                candidates=CandidateSets.from_counts(
                    np.ones(len(tokens), np.int64), tokens, np.zeros(len(tokens), np.float32)
                ),
                spans=(VersionSpan(version=1, start=0, end=len(tokens)),),
                finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            ),
            group="",
            sampler_id="",
        )

    async def end_session(self, session_id: str) -> None:
        assert not self._turns, "every recorded turn was asked for"


async def replayed(trajectory: Trajectory) -> Trajectory:
    """The same tokens through an episode of this process: what reward do they earn?"""
    chat, sandboxes = ChatFormat.load(CHECKPOINT), SandboxPool(2)
    tasks = {task.task_id: task for task in generate_tasks("train", TASKS["num_train"], 0)}
    try:
        return await run_episode(
            tasks[trajectory.task_id],
            session_id=trajectory.session_id,
            generator=Replay(trajectory, chat.stop_token_ids),
            chat=chat,
            sandboxes=sandboxes,
            grader=Grader(sandboxes),
            limits=EpisodeLimits(**REAL_EPISODES["limits"]),
            sampling=SamplingParams(max_new_tokens=REAL_SAMPLING["max_new_tokens"]),
        )
    finally:
        await sandboxes.close()


async def test_a_real_engine_is_killed_in_the_middle_of_real_episodes(tmp_path, tell):
    """Two groups of embedded engines in two precisions; what they submitted is graded a second
    time."""
    fleet = FleetUnderLoad(
        tmp_path / "fleet",
        [
            scripted_group("whole", capacity=2) | {"samplers": 2},
            scripted_group("coarse", capacity=1) | {"weight_format": "fp8-block"},
        ],
        episodes=REAL_EPISODES,
        sampling=REAL_SAMPLING,
    )
    consumer = None
    try:
        fleet.start(
            [fleet.embedded(f"whole-{n}", "whole") for n in range(2)]
            + [fleet.embedded("coarse-0", "coarse")]
        )
        consumer = Consumer(fleet)
        await fleet.until(lambda: len(consumer.groups) >= 1, timeout_s=60)
        fleet.kill("whole-0")
        fleet.kill("coarse-0")
        num = len(consumer.groups)

        def both_groups_came_again() -> bool:
            later = [
                t.group
                for n in range(num + 2, len(consumer.groups) + 1)
                for t in consumer.groups[n].trajectories
            ]
            return {"whole", "coarse"} <= set(later)

        await fleet.until(both_groups_came_again, timeout_s=120)
        await fleet.until(lambda: len(fleet.ready()) == 3)
        counters = fleet.counters()
    finally:
        if consumer is not None:
            consumer.close()
        fleet.close()
    tally, rewards = consumer.tally(), Counter()
    trajectories = [t for group in consumer.groups.values() for t in group.trajectories]
    tally.sessions = len(trajectories)
    for trajectory in trajectories:
        assert trajectory.reward is not None and not trajectory.failure
        assert {name.split("-")[0] for name in trajectory.sampler_ids} == {trajectory.group}
        tally.tokens += len(trajectory.sampler_logp)
        rewards[trajectory.reward] += 1
        again = await replayed(trajectory)
        tally.wrong += (again.reward, again.ending) != (trajectory.reward, trajectory.ending)
        tally.wrong += not np.array_equal(
            again.tokens[again.loss_mask], trajectory.tokens[trajectory.loss_mask]
        )
    tell(tally, counters, rewards=dict(rewards))
    assert tally.is_sound and counters["failovers"] >= 1
