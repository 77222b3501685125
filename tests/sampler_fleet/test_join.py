"""The sampler's side: versions before joining and in flight, reconnection, leaving."""

from __future__ import annotations

import asyncio

import pytest

from contracts.errors import BadInputError, DirtyProcessError
from sampler_fleet.gateway import FleetServicer
from tests.sampler_fleet.fakes import FakeEngine, collect, make_request, running_gateway


async def test_it_registers_only_once_a_version_is_loaded(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = gateway.start_sampler("big-0", version=0)  # nothing published yet
        await asyncio.sleep(0.1)
        assert gateway.phase("big-0") == "absent"
        member.weights.publish(4)
        await gateway.until(lambda: gateway.phase("big-0") == "ready")
        assert gateway.fleet.registry.get("big-0").version == 4


async def test_versions_are_applied_while_a_request_runs_and_the_newest_wins(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0", version=1)
        proceed = asyncio.Event()

        async def wait(request, index):
            if index == 1:
                await proceed.wait()

        member.engine.before_chunk = wait
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: gateway.fleet.num_tokens["big"] == 4)
        member.weights.hold = asyncio.Event()
        member.weights.publish(2)
        await gateway.until(lambda: 2 in member.weights.fetched)
        for version in (3, 4, 5):  # announced while 2 is being fetched
            member.weights.publish(version)
            await asyncio.sleep(0)
        member.weights.hold.set()
        await gateway.until(lambda: gateway.fleet.registry.get("big-0").version == 5)
        proceed.set()
        whole, _ = await asyncio.wait_for(turn, 10)
        assert [(s.version, s.start, s.end) for s in whole.spans] == [(1, 0, 4), (5, 4, 12)]
        assert member.engine.loaded == [1, 2, 5]
        switch = gateway.fleet.registry.get("big-0").switch
        assert switch.pause_s == 0.25, "what the engine said"
        assert switch.load_s > 0


async def test_a_later_version_that_does_not_load_leaves_the_old_one_serving(tmp_path, caplog):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0", version=1)
        member.engine.load_error = BadInputError("checkpoint", expected="x", found="y")
        member.weights.publish(2)
        await gateway.until(lambda: any("stays unused" in r.message for r in caplog.records))
        whole, _ = await collect(gateway.fleet, make_request())
        assert [span.version for span in whole.spans] == [1]
        member.engine.load_error = None
        member.weights.publish(3)
        await gateway.until(lambda: gateway.fleet.registry.get("big-0").version == 3)


async def test_a_later_version_that_does_not_convert_is_skipped(tmp_path, caplog):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0", version=1)
        member.weights.watch_error = BadInputError("tensor x", expected="finite", found="nan")
        member.weights.publish(2)
        await gateway.until(lambda: any("stays unused" in r.message for r in caplog.records))
        member.weights.publish(3)
        await gateway.until(lambda: gateway.fleet.registry.get("big-0").version == 3)
        assert member.engine.loaded == [1, 3]


async def test_a_first_version_that_does_not_load_is_an_error(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        engine = FakeEngine()
        engine.load_error = BadInputError("checkpoint", expected="x", found="y")
        member = gateway.start_sampler("big-0", engine=engine)
        with pytest.raises(BadInputError, match="checkpoint: expected x"):
            await asyncio.wait_for(member.task, 5)


@pytest.mark.parametrize("where", ["load", "generate"])
async def test_a_dirty_engine_ends_the_process_and_its_turns_go_on_elsewhere(tmp_path, where):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0", version=1)
        error = DirtyProcessError("no longer knows what it serves")
        failing = asyncio.Event()

        async def fail(request, index):
            if index == 1:
                await gateway.until(
                    lambda: gateway.fleet.num_tokens["big"]
                )  # the first has arrived
                failing.set()
                if where == "generate":
                    raise error
                await asyncio.Event().wait()

        member.engine.before_chunk = fail
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await failing.wait()
        if where == "load":
            member.engine.load_error = error
            member.weights.publish(2)
        with pytest.raises(DirtyProcessError):
            await asyncio.wait_for(member.task, 5)
        await gateway.start_ready_sampler("big-1")
        whole, samplers = await asyncio.wait_for(turn, 10)
        assert (len(whole), samplers) == (12, ["big-0", "big-1"])


async def test_leaving_without_a_gateway_does_not_hang(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        await gateway.stop_gateway()
        await asyncio.sleep(0.05)
        member.agent.leave("SIGTERM")
        await asyncio.wait_for(member.task, 5)
        await gateway.start_gateway()


async def test_leaving_before_the_first_version_does_not_hang(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = gateway.start_sampler("big-0", version=0)
        await asyncio.sleep(0.02)
        member.agent.leave("SIGTERM")
        await asyncio.wait_for(member.task, 5)


async def test_leaving_finishes_what_runs_and_hands_over_the_rest(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        proceed = asyncio.Event()

        async def wait(request, index):
            if index == 1:
                await proceed.wait()

        member.engine.before_chunk = wait
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: gateway.fleet.num_tokens["big"] == 4)
        member.agent.leave("SIGTERM")
        await gateway.until(lambda: gateway.phase("big-0") == "draining")
        second = await gateway.start_ready_sampler("big-1")
        assert len((await collect(gateway.fleet, make_request("t")))[0]) == 12
        assert len(second.engine.requests) == 1
        proceed.set()
        whole, samplers = await asyncio.wait_for(turn, 10)
        assert (len(whole), samplers) == (12, ["big-0"])
        await asyncio.wait_for(member.task, 5)


async def test_a_taken_id_is_waited_for(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        first = await gateway.start_ready_sampler("big-0")
        second = gateway.start_sampler("big-0", version=2)
        await asyncio.sleep(0.15)
        assert not second.task.done()
        assert gateway.fleet.registry.get("big-0").version == 1
        await first.kill()
        await gateway.until(lambda: gateway.fleet.registry.get("big-0").version == 2)


async def test_chunks_that_are_ready_together_travel_together(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        everybody, arrived = asyncio.Event(), 0

        async def together(request, index):
            nonlocal arrived
            arrived += index == 0
            if arrived == 8:
                everybody.set()
            await everybody.wait()

        member.engine.before_chunk = together
        taken: list[tuple[str, int]] = []
        take = FleetServicer._take

        def note(self, message, link):
            kind = message.WhichOneof("kind")
            if kind in ("delta", "deltas"):
                taken.append((kind, len(message.deltas.deltas) or 1))
            take(self, message, link)

        FleetServicer._take = note
        try:
            turns = [collect(gateway.fleet, make_request(f"s{i}")) for i in range(8)]
            wholes = [whole for whole, _ in await asyncio.gather(*turns)]
        finally:
            FleetServicer._take = take
        assert all(whole.tokens.tolist() == wholes[0].tokens.tolist() for whole in wholes)
        assert sum(num for _, num in taken) == 24
        assert len(taken) < 16, taken
