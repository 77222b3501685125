"""Who gets a place and when: first come first served, KV pressure, versions, measured capacity."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from contracts import codec, rpc
from contracts.errors import BadInputError, RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from contracts.types import KvFormat, Purpose, SamplerInfo, WeightFormat
from sampler_fleet.config import FleetConfig
from sampler_fleet.engines.base import EngineLoad
from sampler_fleet.measure import measure
from sampler_fleet.places import Places, Target
from sampler_fleet.registry import Registry
from sampler_fleet.router import Route, Router
from tests.sampler_fleet.fakes import (
    FakeEngine,
    collect,
    make_request,
    make_trajectory,
    running_gateway,
)

ONE_PLACE = [
    {"name": "big", "weight_format": "bf16", "max_sessions": 1},
    {"name": "small", "weight_format": "bf16", "samplers": 0},
]


class Sessions:
    """Sessions that take a place and keep it until they are told to end."""

    def __init__(self, fleet) -> None:
        self._fleet = fleet
        self.in_order: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, **kw) -> asyncio.Task[None]:
        self._ends[name] = asyncio.Event()

        async def live() -> None:
            async with self._fleet.session(name, purpose=Purpose.TRAIN, **kw):
                self.in_order.append(name)
                await self._ends[name].wait()

        self._tasks[name] = asyncio.create_task(live())
        return self._tasks[name]

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class CountingRouter(Router):
    num_decisions = 0

    def route(self, *args, **kw):
        self.num_decisions += 1
        return super().route(*args, **kw)


class Queue:
    """The queue alone, with a clock that the test sets."""

    def __init__(self, **config: object) -> None:
        groups = [
            {"name": "big", "weight_format": "bf16", "max_sessions": 1},
            {"name": "eval", "weight_format": "bf16", "purpose": "evaluate", "max_sessions": 999},
        ]
        self.now = 0.0
        self.config = fleet = FleetConfig.model_validate(
            {"groups": groups, "assemble_seconds": 0.0} | config
        )
        self.registry = Registry(
            fleet.groups, model_fingerprint="m", tokenizer_fingerprint="t", lease_seconds=1e9
        )
        self.router = CountingRouter({purpose: fleet.shares(purpose) for purpose in Purpose})
        self.places = Places(fleet, self.registry, self.router, targets={}, clock=lambda: self.now)

    def join(self, group: str, *, version: int = 1) -> None:
        info = SamplerInfo(
            sampler_id=f"{group}-0",
            group=group,
            accelerator="cpu",
            weight_format=WeightFormat.BF16,
            kv_format=KvFormat.FP8,
            max_sessions=self.config.group(group).max_sessions,
            model_fingerprint="m",
            tokenizer_fingerprint="t",
            version=version,
        )
        self.registry.register(info, self.now)
        self.places.changed()

    def lose(self, sampler_id: str) -> None:
        self.registry.lose(sampler_id, "killed")
        self.places.changed()

    def take(self, name: str, purpose: Purpose = Purpose.TRAIN) -> asyncio.Task[Route]:
        return asyncio.create_task(self.places.take(name, purpose=purpose, min_version=0))

    def turn(self, name: str, purpose: Purpose = Purpose.TRAIN) -> asyncio.Task[Route]:
        return asyncio.create_task(self.places.turn(name, purpose=purpose, min_version=0))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("begun", [False, True])
async def test_who_waits_for_a_group_without_samplers_is_not_woken_by_others(begun):
    queue = Queue()
    queue.join("big")
    names = [f"e{index}" for index in range(300)]
    if begun:
        queue.join("eval")
        await asyncio.gather(*(queue.take(name, Purpose.EVALUATE) for name in names))
        queue.lose("eval-0")
    start = queue.turn if begun else queue.take
    waiting = [start(name, Purpose.EVALUATE) for name in names]
    await settle()
    queue.router.num_decisions = 0
    for index in range(100):
        await queue.take(f"t{index}")
        queue.router.end(f"t{index}")
        queue.places.changed()
        await settle()
    assert queue.router.num_decisions <= 5 * 100, "not one per session that waits"
    queue.join("eval")
    assert {route.group for route in await asyncio.gather(*waiting)} == {"eval"}


async def test_only_the_first_of_those_that_wait_is_woken_by_a_free_place():
    queue = Queue()
    queue.join("big")
    await queue.take("s")
    waiting = [queue.take(f"t{index}") for index in range(300)]
    await settle()
    queue.router.num_decisions = 0
    queue.router.end("s")
    queue.places.changed()
    await settle()
    assert [task.done() for task in waiting] == [True] + [False] * 299
    assert queue.places.num_waiting == {Purpose.TRAIN: 299}
    assert queue.router.num_decisions <= 5
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not queue.places.num_waiting


async def test_a_place_goes_to_the_next_when_its_session_gives_up_as_it_gets_it():
    queue = Queue()
    queue.join("big")
    await queue.take("s")
    first, second = queue.turn("first"), queue.turn("second")
    await settle()
    queue.router.end("s")
    queue.places.changed()
    first.cancel()
    assert (await second).sampler_id == "big-0"
    assert first.cancelled() and queue.router.place("first") is None


async def test_grace_is_for_a_group_that_is_away_and_not_for_one_that_is_full():
    queue = Queue(grace_seconds=0.05)
    queue.join("big")
    await queue.take("s")
    turn = queue.turn("t")
    await asyncio.sleep(0.02)
    queue.now = 9.0
    await asyncio.sleep(0.1)
    assert not turn.done(), "every place is taken"
    queue.lose("big-0")
    with pytest.raises(RetryError, match="none of the groups big has a ready sampler"):
        await turn


async def test_who_comes_first_gets_the_first_place_that_is_free(tmp_path):
    async with running_gateway(tmp_path, groups=ONE_PLACE) as gateway:
        sessions = Sessions(gateway.fleet)
        names = [f"s{index}" for index in range(20)]
        for name in names:
            sessions.start(name)
        await asyncio.sleep(0)
        assert gateway.fleet.places.num_waiting[Purpose.TRAIN] == 20
        await gateway.start_ready_sampler("big-0")
        sessions.start("given up").cancel()
        for index, name in enumerate(names):
            await gateway.until(lambda n=index + 1: len(sessions.in_order) == n)
            assert gateway.fleet.router.num_sessions["big-0"] == 1, "never more than it has room"
            await sessions.end(name)
        assert sessions.in_order == names
        assert not gateway.fleet.router.num_sessions
        await sessions.close()


async def test_a_burst_from_outside_waits_its_turn_and_all_of_it_is_served(tmp_path):
    async with running_gateway(tmp_path, groups=ONE_PLACE, grace_seconds=0.05) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        most = running = 0

        async def count(request, index):
            nonlocal most, running
            running += index == 0
            most = max(most, running)
            await asyncio.sleep(0.002)
            running -= index == 2

        member.engine.before_chunk = count
        async with gateway.channel() as channel:
            stub = rollout_pb2_grpc.RolloutStub(channel)

            async def one(index: int) -> int:
                request = dataclasses.replace(make_request(f"s{index}"), ends_session=True)
                chunks = stub.Generate(codec.generate_to_pb(request))
                return sum([len(codec.chunk_from_pb(chunk)) async for chunk in chunks])

            assert await asyncio.gather(*map(one, range(40))) == [12] * 40
        assert most == 1, "waiting for a place costs no grace, and no engine is overrun"
        assert not gateway.fleet.router.num_sessions
        await gateway.until(
            lambda: sorted(member.engine.ended) == sorted(f"s{i}" for i in range(40))
        )


async def test_a_session_from_outside_is_ended_by_its_client(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        await collect(gateway.fleet, make_request("s"))
        assert gateway.fleet.router.place("s")
        async with gateway.channel() as channel:
            request = rollout_pb2.EndSessionRequest(session_id="s")
            await rollout_pb2_grpc.RolloutStub(channel).EndSession(request)
        assert gateway.fleet.router.place("s") is None
        await gateway.until(lambda: member.engine.ended == ["s"])


async def test_a_last_turn_that_its_client_gives_up_frees_the_place(tmp_path):
    async with running_gateway(tmp_path, groups=ONE_PLACE) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        member.engine.before_chunk = lambda request, index: asyncio.sleep(3600 * index)
        request = dataclasses.replace(make_request("s"), ends_session=True)
        chunks = gateway.fleet.generate(request)
        assert len((await anext(chunks)).completion) == 4
        await chunks.aclose()
        assert gateway.fleet.router.place("s") is None
        await gateway.until(lambda: member.engine.aborted and member.engine.ended == ["s"])


async def test_a_full_kv_cache_gets_no_new_session_and_loses_none(tmp_path):
    async with running_gateway(tmp_path, kv_limit=0.5) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        used = 0.25
        member.engine.load_now = lambda: EngineLoad(
            num_running=1, num_waiting=0, tokens_per_second=8.0, kv_used_fraction=used
        )
        sessions = Sessions(gateway.fleet)
        sessions.start("first")
        await gateway.until(lambda: sessions.in_order == ["first"])
        used = 0.6
        await gateway.until(
            lambda: (
                (known := gateway.fleet.registry.get("big-0")) and known.load.kv_used_fraction > 0.5
            )
        )
        sessions.start("second")
        await asyncio.sleep(0.1)
        assert sessions.in_order == ["first"]
        whole, _ = await collect(gateway.fleet, make_request("first"))
        assert len(whole) == 12, "a session that has its place is served"
        used = 0.4
        await gateway.until(lambda: sessions.in_order == ["first", "second"])
        await sessions.close()


async def test_who_waits_for_a_version_lets_others_pass(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        sessions = Sessions(gateway.fleet)
        sessions.start("newer", min_version=2)
        await asyncio.sleep(0.02)
        sessions.start("any")
        await gateway.until(lambda: sessions.in_order == ["any"])
        member.weights.publish(2)
        await gateway.until(lambda: sessions.in_order == ["any", "newer"])
        await sessions.close()
        with pytest.raises(RetryError, match="none of the groups"):
            await collect(gateway.fleet, make_request("t", min_version=9))


async def test_a_group_that_does_not_load_a_version_is_waited_for_only_so_long():
    groups = [{"name": name, "weight_format": "bf16"} for name in ("big", "slow")]
    queue = Queue(groups=groups, grace_seconds=30.0)
    queue.join("slow")
    queue.join("big", version=2)
    taken = [
        asyncio.create_task(queue.places.take(name, purpose=Purpose.TRAIN, min_version=2))
        for name in "ab"
    ]
    await settle()
    assert [task.done() for task in taken] == [True, False], "the second is the slow group's"
    queue.now = 31.0
    queue.places.changed()
    await settle()
    assert [task.result().group for task in taken] == ["big", "big"]


async def test_who_waits_for_a_version_that_is_full_lets_others_pass(tmp_path):
    groups = [{"name": "big", "weight_format": "bf16", "max_sessions": 1, "samplers": 2}]
    async with running_gateway(tmp_path, groups=groups) as gateway:
        await gateway.start_ready_sampler("big-0", version=1)
        await gateway.start_ready_sampler("big-1", version=2)
        sessions = Sessions(gateway.fleet)
        for name in ("newer", "newer too"):
            sessions.start(name, min_version=2)
        await gateway.until(lambda: sessions.in_order == ["newer"])
        sessions.start("any")
        await gateway.until(lambda: sessions.in_order == ["newer", "any"])
        await sessions.end("newer")
        await gateway.until(lambda: sessions.in_order == ["newer", "any", "newer too"])
        await sessions.close()


async def test_a_group_that_is_at_zero_is_not_waited_for(tmp_path):
    async with running_gateway(tmp_path, assemble_seconds=30.0) as gateway:
        await gateway.start_ready_sampler("big-0")
        sessions = Sessions(gateway.fleet)
        sessions.start("s")
        await asyncio.sleep(0.05)
        assert sessions.in_order == [], "small-0 is to come"
        gateway.fleet.set_targets({"small": Target(num=0)})
        await gateway.until(lambda: sessions.in_order == ["s"])
        await sessions.close()


async def test_a_long_turn_is_no_idle_session(tmp_path):
    async with running_gateway(tmp_path, session_idle_seconds=0.05) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        member.engine.before_chunk = lambda request, index: asyncio.sleep(0.1)
        whole, _ = await collect(gateway.fleet, make_request("s"))
        assert len(whole) == 12
        assert member.engine.ended == []
        await gateway.until(lambda: member.engine.ended == ["s"])


async def test_a_group_that_does_not_say_what_it_can_gets_what_others_draw(tmp_path):
    groups = [
        {"name": name, "weight_format": "bf16", "capacity": "measured", "max_sessions": most}
        for name, most in (("big", 4), ("small", 2))
    ]
    async with running_gateway(tmp_path, groups=groups) as gateway:
        await gateway.start_ready_sampler("big-0", tokens_per_second=400.0)
        await gateway.start_ready_sampler("small-0", "small")
        assert gateway.fleet.router.shares[Purpose.TRAIN] == {
            "big": pytest.approx(2 / 3),
            "small": pytest.approx(1 / 3),
        }


async def test_no_group_serves_that_purpose(tmp_path):
    groups = [{"name": "big", "weight_format": "bf16"}]
    async with running_gateway(tmp_path, groups=groups) as gateway:
        with pytest.raises(BadInputError, match="expected a sampler group that serves it"):
            async with gateway.fleet.session("s", purpose=Purpose.EVALUATE):
                pass


async def test_shares_follow_what_samplers_can_draw(tmp_path):
    groups = [
        {"name": name, "weight_format": "bf16", "capacity": "measured", "max_sessions": 100}
        for name in ("big", "small")
    ]
    async with running_gateway(tmp_path, groups=groups) as gateway:
        fleet = gateway.fleet
        assert fleet.router.shares[Purpose.TRAIN] == {"big": 0.5, "small": 0.5}, "nobody knows yet"
        await gateway.start_ready_sampler("big-0", tokens_per_second=300.0)
        await gateway.start_ready_sampler("big-1", tokens_per_second=300.0)
        await gateway.start_ready_sampler("small-0", "small", tokens_per_second=200.0)
        assert fleet.router.shares[Purpose.TRAIN] == {"big": 0.75, "small": 0.25}
        sessions = Sessions(fleet)
        for index in range(40):
            sessions.start(f"s{index}")
        await gateway.until(lambda: len(sessions.in_order) == 40)
        assert dict(fleet.router.num_routed) == {"big": 30, "small": 10}
        await gateway.members["big-1"].kill()
        await gateway.until(lambda: gateway.phase("big-1") == "lost")
        assert fleet.router.shares[Purpose.TRAIN] == {"big": 0.6, "small": 0.4}
        await sessions.close()


def test_capacity_is_measured_everywhere_or_nowhere():
    groups = [
        {"name": "a", "weight_format": "bf16", "capacity": "measured"},
        {"name": "b", "weight_format": "bf16", "capacity": 2},
    ]
    with pytest.raises(ValueError, match="measured in all train groups or in none"):
        FleetConfig.model_validate({"groups": groups})


async def test_what_an_engine_draws_is_measured_and_leaves_nothing_behind():
    engine = FakeEngine(chunk_tokens=4)

    async def pace(request, index):
        await asyncio.sleep(0.01)

    engine.before_chunk = pace
    rate = await measure(engine, num_sessions=3, seconds=0.3)
    assert 100 < rate < 3 * 4 / 0.01 + 100, "3 sessions of 4 tokens per 10 ms, and a busy machine"
    assert len(engine.requests) == len(engine.aborted) == 3
    assert sorted(engine.ended) == ["measure.0", "measure.1", "measure.2"]


async def test_an_engine_that_refuses_is_not_measured():
    engine = FakeEngine()

    async def refuse(request, index):
        raise RetryError("no weights have been loaded yet")

    engine.before_chunk = refuse
    assert await measure(engine, num_sessions=2, seconds=0.1) == 0.0


async def test_a_gateway_tells_how_far_production_is(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)
        call = stub.Watch(rollout_pb2.WatchRequest(every_seconds=0.02))
        assert (await call.read()).last_sequence == 0
        await gateway.spool.append("t", [make_trajectory("a"), make_trajectory("b")])
        progress = await call.read()
        assert (progress.last_sequence, progress.groups_ready) == (1, 1)
        call.cancel()
        with pytest.raises(BadInputError, match="every_seconds"), rpc.calling("gateway"):
            await stub.Watch(rollout_pb2.WatchRequest(every_seconds=-1)).read()


async def test_reports_and_targets_show_in_the_status(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        status = await stub.Status(fleet_pb2.StatusRequest())
        assert not status.HasField("update")
        assert "group big: none of its 1 samplers is ready" in status.alarms
        big = fleet_pb2.GroupUpdate(group="big", num_trajectories=12, num_tokens=99, kl=0.25)
        report = fleet_pb2.UpdateReport(
            step=3, version=4, seconds=10.0, update_seconds=4.0, num_taken=16, staleness=1.5,
            groups=[big], alarms=["kl 9 is above 1"],
        )  # fmt: skip
        await stub.ReportUpdate(report)
        await stub.ReportTargets(
            fleet_pb2.ReportTargetsRequest(
                targets=[
                    fleet_pb2.GroupTarget(group="big", num_target=0, num_held=0),
                    fleet_pb2.GroupTarget(group="small", num_target=5, problem="no such GPU"),
                ],
                problem="an edit is left out",
            )
        )
        status = await stub.Status(fleet_pb2.StatusRequest())
        assert status.update == report
        assert status.demand.taken_per_second == 4.0
        assert status.demand.staleness == 1.5
        groups = {group.group: group for group in status.groups}
        assert groups["big"].update.kl == 0.25
        assert (groups["big"].num_target, groups["big"].num_held) == (0, 0)
        assert groups["small"].num_target == 5
        assert not groups["small"].HasField("num_held")
        assert list(status.alarms) == [
            "kl 9 is above 1",
            "an edit is left out",
            "group small is not at 5 samplers: no such GPU",
            "group small: none of its 5 samplers is ready",
            "group eval: none of its 1 samplers is ready",
        ]
        unknown = fleet_pb2.ReportTargetsRequest(targets=[fleet_pb2.GroupTarget(group="x")])
        with pytest.raises(BadInputError, match="one of big, small, eval"), rpc.calling("gateway"):
            await stub.ReportTargets(unknown)
