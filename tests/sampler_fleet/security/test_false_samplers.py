"""Peers that passed, and then send what they must not."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.message import Message

from contracts import codec, rpc
from contracts.errors import ConflictError
from contracts.logs import log_to_stderr
from contracts.pb import (
    fleet_pb2,
    fleet_pb2_grpc,
    rollout_pb2,
    weights_pb2,
)
from tests.sampler_fleet.fakes import (
    TOKEN,
    collect,
    completion,
    make_request,
    running_gateway,
)
from tests.sampler_fleet.security.calls import (
    BY_NAME,
    EXPECTED,
    Code,
    all_services,
    answer,
    bearer,
    raw_channel,
    registration,
)


def delta(request_id: str, tokens: list[int]) -> fleet_pb2.SamplerMessage:
    chunk = codec.chunk_to_pb(completion(tokens, version=1, reason=None))
    return fleet_pb2.SamplerMessage(delta=fleet_pb2.Delta(request_id=request_id, chunk=chunk))


async def test_a_sampler_cannot_answer_for_another(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        good = await gateway.start_ready_sampler("big-0")
        resume = asyncio.Event()

        async def wait(request, index):
            if index == 1:
                await resume.wait()

        good.engine.before_chunk = wait
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: gateway.fleet.num_tokens["big"] == 4)
        (request,) = good.engine.requests
        evil = fleet_pb2_grpc.FleetStub(channel).Join()
        register = registration(gateway, "small-0", group="small")
        await evil.write(fleet_pb2.SamplerMessage(register=register))
        await gateway.until(lambda: gateway.phase("small-0") == "ready")
        failed = fleet_pb2.RequestFailed(request_id=request.request_id, bad_request=True)
        for message in (
            delta(request.request_id, [9, 9]),
            fleet_pb2.SamplerMessage(failed=failed),
            fleet_pb2.SamplerMessage(heartbeat=fleet_pb2.Heartbeat(version=9)),
            fleet_pb2.SamplerMessage(leaving=fleet_pb2.Leaving(reason="big-0")),
        ):
            await evil.write(message)
        await gateway.until(lambda: gateway.phase("small-0") == "draining")
        assert gateway.phase("big-0") == "ready"
        assert [s.version for s in gateway.fleet.registry if s.sampler_id == "big-0"] == [1]
        resume.set()
        whole, samplers = await asyncio.wait_for(turn, 10)
        assert (whole.tokens.tolist(), samplers) == (EXPECTED, ["big-0"])
        assert gateway.fleet.counters["failovers"] == 0

        second = fleet_pb2_grpc.FleetStub(channel).Join()
        register = registration(gateway, "big-0")
        await second.write(fleet_pb2.SamplerMessage(register=register))
        with pytest.raises(ConflictError, match="a live sampler under it"), rpc.calling("gateway"):
            await second.read()
        assert len((await collect(gateway.fleet, make_request("t")))[0]) == 12


@pytest.fixture
def log_lines() -> Iterator[Callable[[], list[str]]]:
    """What a process that logs as the gateway does has written until now."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    log_to_stderr("gateway")
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(written := io.StringIO())
    yield lambda: written.getvalue().split("\n")[:-1]
    root.handlers[:] = handlers
    root.setLevel(level)


def assert_sound(lines: list[str]) -> None:
    """Lines of ours alone, none of them flooded."""
    assert lines
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\dT\S+Z \w+ gateway \S+: ", line), ascii(line)
        assert line.isprintable() and len(line) < 2000, ascii(line[:400])


LINE_BREAKS = "big-9\n2026-01-01T00:00:00Z info gateway: all is well"
BAD_NAMES = [LINE_BREAKS, "a\r", "a\x1b[2J", "a\0b", "a\u2028b", "a\x85b", "x" * (1 << 20)]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name[:12]))
async def test_names_that_break_a_log_are_refused(tmp_path, log_lines, name):
    async with all_services(tmp_path) as (gateway, address), raw_channel(address) as channel:
        await gateway.start_ready_sampler("big-0")
        generate = codec.generate_to_pb(make_request())
        for path, message in (
            ("fleet.v1.Fleet/Join", registration(gateway, name)),
            ("fleet.v1.Fleet/Join", registration(gateway, "big-1", group=name)),
            ("fleet.v1.Fleet/Join", registration(gateway, "big-1", accelerator=name)),
            ("fleet.v1.Fleet/Join", registration(gateway, "big-1", weight_format=name)),
            ("fleet.v1.Fleet/Join", registration(gateway, "big-1", model_fingerprint=name)),
            ("fleet.v1.Fleet/DrainSampler", fleet_pb2.DrainRequest(sampler_id=name)),
            ("rollout.v1.Rollout/Evaluate", rollout_pb2.EvaluateRequest(split=name)),
            ("rollout.v1.Rollout/Generate", changed(generate, request_id=name)),
            ("rollout.v1.Rollout/Generate", changed(generate, session_id=name)),
            ("rollout.v1.Rollout/Generate", changed(generate, purpose=name)),
            ("weights.v1.Weights/Watch", weights_pb2.WatchRequest(format=name)),
            ("weights.v1.Weights/Fetch", weights_pb2.FetchRequest(version=1, format=name)),
        ):
            if isinstance(message, fleet_pb2.Register):
                message = fleet_pb2.SamplerMessage(register=message)
            code, details = await answer(
                channel,
                BY_NAME[path],
                [message.SerializeToString()],
                metadata=bearer(TOKEN),
                timeout_s=2.0,
            )
            assert code == Code.INVALID_ARGUMENT, (path, code, details[:300])
        assert [s.sampler_id for s in gateway.fleet.registry] == ["big-0"]
        assert gateway.phase("big-0") == "ready"
        assert_sound(log_lines())


def changed(message: Message, **fields: object) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    for field, value in fields.items():
        setattr(copy, field, value)
    return copy


async def test_a_sampler_with_words_of_its_own_cannot_write_log_lines(tmp_path, log_lines):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        await gateway.start_ready_sampler("big-0")
        for message in (
            fleet_pb2.SamplerMessage(leaving=fleet_pb2.Leaving(reason=LINE_BREAKS)),
            fleet_pb2.SamplerMessage(
                delta=fleet_pb2.Delta(
                    request_id="x",
                    chunk=rollout_pb2.CompletionChunk(finish_reason=LINE_BREAKS * 10_000),
                )
            ),
        ):
            call = fleet_pb2_grpc.FleetStub(channel).Join()
            await call.write(fleet_pb2.SamplerMessage(register=registration(gateway, "big-1")))
            assert (await call.read()).WhichOneof("kind") == "welcome"
            await call.write(message)
            await call.done_writing()
            with contextlib.suppress(grpc.RpcError):
                async for _ in call:
                    pass
            await gateway.until(lambda: gateway.phase("big-1") == "lost")
        assert_sound(log_lines())
