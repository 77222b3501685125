"""What one client, or a pause of the gateway itself, must not do to the others of a fleet."""

from __future__ import annotations

import asyncio
import time

import pytest

from contracts import codec
from contracts.pb import rollout_pb2_grpc
from tests.sampler_fleet.fakes import (
    FakeEngine,
    collect,
    make_request,
    running_gateway,
    token_at,
)


def expected(num: int) -> list[int]:
    return [token_at(position) for position in range(3, 3 + num)]


async def test_a_request_asked_again_under_its_id_gets_nothing_of_the_first(tmp_path):
    """A client that gave up asks again, on the sampler that still has chunks of the first on the
    way."""
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        first = gateway.fleet.generate(make_request())
        assert (await anext(first)).completion.tokens.tolist() == expected(4)
        closing = asyncio.create_task(first.aclose())
        whole, _ = await asyncio.wait_for(collect(gateway.fleet, make_request()), 5)
        await closing
        assert whole.tokens.tolist() == expected(12)
        assert len({request.request_id for request in member.engine.requests}) == 2


async def test_two_requests_of_one_id_at_once_are_two_requests(tmp_path):
    async with running_gateway(tmp_path, stall_seconds=1.0) as gateway:
        await gateway.start_ready_sampler("big-0")
        turns = [collect(gateway.fleet, make_request()) for _ in range(2)]
        for whole, _ in await asyncio.wait_for(asyncio.gather(*turns), 8):
            assert whole.tokens.tolist() == expected(12)
        assert gateway.fleet.counters["samplers_stalled"] == 0


async def test_a_client_that_reads_nothing_for_long_does_not_cost_a_sampler(tmp_path):
    async with running_gateway(tmp_path, stall_seconds=0.5) as gateway, gateway.channel() as c:
        await gateway.start_ready_sampler("big-0", engine=FakeEngine(chunk_tokens=512))
        request = make_request(num_tokens=400_000)
        call = rollout_pb2_grpc.RolloutStub(c).Generate(codec.generate_to_pb(request))
        received = codec.chunk_from_pb(await call.read()).tokens.tolist()
        await asyncio.sleep(1.5)  # beyond the window of the transport: the gateway can't write
        assert gateway.fleet.num_tokens["big"] < 400_000
        assert len((await collect(gateway.fleet, make_request("t")))[0]) == 12
        async for message in call:
            received += codec.chunk_from_pb(message).tokens.tolist()
        assert received == expected(400_000)
        assert gateway.phase("big-0") == "ready"
        assert gateway.fleet.counters["failovers"] == 0


@pytest.mark.parametrize(("lease_s", "stall_s"), [(0.4, 10.0), (10.0, 0.4)])
async def test_a_pause_of_the_gateway_is_not_the_samplers_silence(tmp_path, lease_s, stall_s):
    """The machine stood still: what the samplers said meanwhile is yet to be read."""
    async with running_gateway(tmp_path, lease_seconds=lease_s, stall_seconds=stall_s) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        paused = False

        async def pause(request, index):
            nonlocal paused
            if index == 1 and not paused:
                paused = True
                time.sleep(1.0)  # the whole loop, gateway and all

        member.engine.before_chunk = pause
        whole, samplers = await asyncio.wait_for(collect(gateway.fleet, make_request()), 10)
        assert paused and (whole.tokens.tolist(), samplers) == (expected(12), ["big-0"])
        await asyncio.sleep(0.1)
        assert gateway.phase("big-0") == "ready"
        assert (
            not {"failovers", "leases_expired", "samplers_stalled"} & gateway.fleet.counters.keys()
        )


async def test_a_sampler_that_stalls_is_expelled_once(tmp_path):
    async with running_gateway(tmp_path, stall_seconds=0.3) as gateway:
        member = await gateway.start_ready_sampler("big-0")

        async def hang(request, index):
            await asyncio.Event().wait()

        member.engine.before_chunk = hang
        turns = [asyncio.create_task(collect(gateway.fleet, make_request(name))) for name in "abcd"]
        await gateway.until(lambda: gateway.phase("big-0") == "lost")
        await gateway.start_ready_sampler("big-1")
        for turn in turns:
            assert (await asyncio.wait_for(turn, 10))[0].tokens.tolist() == expected(12)
        assert gateway.fleet.counters["samplers_stalled"] == 1
        assert gateway.fleet.counters["failovers"] == 4
