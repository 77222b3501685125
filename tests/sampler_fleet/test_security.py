"""Who may call what, and what a stranger's or a broken peer's bytes can do: every call of every
service, as the generated descriptors have them, over a real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import logging
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from contracts import codec, rpc
from contracts.credentials import Credentials, Token
from contracts.errors import ConflictError
from contracts.logs import log_to_stderr
from contracts.pb import (
    fleet_pb2,
    fleet_pb2_grpc,
    rollout_pb2,
    weights_pb2,
    weights_pb2_grpc,
)
from contracts.runfile import validate_section
from sampler_fleet.gateway import add_services
from tests.contracts.certificates import make_certificates, tls
from tests.sampler_fleet.fakes import (
    TOKEN,
    Harness,
    collect,
    completion,
    make_request,
    make_trajectory,
    running_gateway,
    token_at,
)
from weight_sync.config import WeightsConfig
from weight_sync.service import WeightService
from weight_sync.store import VersionStore

SAMPLERS, TRAINERS = "a-token-of-the-samplers", "a-token-of-the-trainer"
ROLES = {"sampler": SAMPLERS, "trainer": TRAINERS, "all": TOKEN}
EXPECTED = [token_at(position) for position in range(3, 15)]
FUZZ_S = 12.0
Code = grpc.StatusCode
TOO_LATE = "Internal error from Core"  # of this side's gRPC: a refusal was faster than a write


@dataclass(frozen=True)
class Call:
    """One RPC: `/package.Service/Method` and the message it takes."""

    path: str
    message: type[Message]
    takes_stream: bool

    def __str__(self) -> str:
        return self.path


CALLS = [
    Call(
        f"/{service.full_name}/{method.name}",
        GetMessageClass(method.input_type),
        method.client_streaming,
    )
    for module in (fleet_pb2, rollout_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
BY_NAME = {call.path.removeprefix("/"): call for call in CALLS}
each_call = pytest.mark.parametrize("call", CALLS, ids=str)

# What a role may do, said a second time: a change of the table is to be a decision.
ALLOWED = {
    "sampler": {
        "fleet.v1.Fleet/Join",
        "weights.v1.Weights/Watch",
        "weights.v1.Weights/Chain",
        "weights.v1.Weights/Fetch",
    },
    "trainer": {
        "fleet.v1.Fleet/Status",
        "fleet.v1.Fleet/ReportUpdate",
        "rollout.v1.Rollout/Generate",
        "rollout.v1.Rollout/EndSession",
        "rollout.v1.Rollout/StreamGroups",
        "rollout.v1.Rollout/AckGroups",
        "rollout.v1.Rollout/Watch",
        "rollout.v1.Rollout/Evaluate",
        "weights.v1.Weights/Publish",
        "weights.v1.Weights/Status",
    },
    "all": set(BY_NAME),
}


@pytest.fixture(autouse=True)
def no_token_is_said(caplog) -> object:
    """Fails a test whose logs, at any level, hold a token."""
    caplog.set_level(logging.DEBUG)
    yield
    said = "\n".join(record.getMessage() for record in caplog.get_records("call"))
    assert not [token for token in ROLES.values() if token in said]


async def a_good_episode(task, *, session_id, **_):
    return make_trajectory(session_id, task_id=task.task_id)


@contextlib.asynccontextmanager
async def all_services(
    directory: Path, credentials: Credentials | None = None, *, host: str = "127.0.0.1", **config
) -> AsyncIterator[tuple[Harness, str]]:
    """A gateway and its harness, and the address where all three services of a run answer."""
    (directory / "tokens").write_text(f"sampler {SAMPLERS}\ntrainer {TRAINERS}\n{TOKEN}\n")
    credentials = credentials or Credentials(token=Token(file=directory / "tokens"))
    async with running_gateway(directory, run_episode=a_good_episode, **config) as gateway:
        store = VersionStore(directory / "weights")
        weights = WeightService(store, validate_section(WeightsConfig, "weights", {}))

        def add(server: grpc.aio.Server) -> None:
            add_services(
                server, fleet=gateway.fleet, spool=gateway.spool, producer=gateway.producer
            )
            weights_pb2_grpc.add_WeightsServicer_to_server(weights, server)

        server, port = await rpc.start_server(f"{host}:0", credentials, add)
        weights.start()
        try:
            yield gateway, f"{host}:{port}"
        finally:
            await weights.close()
            await server.stop(None)
            store.close()


@contextlib.asynccontextmanager
async def raw_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that adds nothing and lets messages of any size out."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def answer(
    channel: grpc.aio.Channel,
    call: Call,
    messages: Iterable[bytes] = (b"",),
    *,
    metadata=(),
    timeout_s: float = 5.0,
) -> tuple[grpc.StatusCode, str]:
    """The status that bytes get; a call that takes one message gets the first."""
    code, details = Code.UNKNOWN, TOO_LATE
    while details == TOO_LATE:
        if call.takes_stream:
            started = channel.stream_stream(call.path)(
                iter(list(messages)), metadata=metadata, timeout=timeout_s
            )
        else:
            started = channel.unary_stream(call.path)(
                next(iter(messages)), metadata=metadata, timeout=timeout_s
            )
        with contextlib.suppress(grpc.RpcError):
            async for _ in started:
                pass
        code, details = await started.code(), await started.details() or ""
    return code, details


@each_call
async def test_a_call_without_this_servers_token_is_refused(tmp_path, call):
    async with all_services(tmp_path) as (_, address), raw_channel(address) as channel:
        for given in (
            (),
            bearer(""),
            bearer("another-token-altogether"),
            bearer(TOKEN[:-1]),
            bearer(TOKEN + " "),
            bearer(f"sampler {SAMPLERS}"),
            (("authorization", TOKEN),),
            (("authorization", f"Basic {TOKEN}"),),
            (("Authorization-".lower(), f"Bearer {TOKEN}"),),
        ):
            code, details = await answer(channel, call, metadata=given)
            assert code == Code.UNAUTHENTICATED, (given, code, details)
            assert TOKEN not in details


@each_call
async def test_a_role_may_call_what_stands_in_the_table_only(tmp_path, call):
    name = call.path.removeprefix("/")
    async with all_services(tmp_path) as (_, address), raw_channel(address) as channel:
        for role, token in ROLES.items():
            code, details = await answer(channel, call, metadata=bearer(token), timeout_s=0.4)
            assert code != Code.UNAUTHENTICATED
            refused = code == Code.PERMISSION_DENIED
            assert refused == (name not in ALLOWED[role]), (role, code, details)
            assert not refused or (call.path in details and role in details)


async def test_a_stolen_samplers_token_reads_and_changes_nothing(tmp_path):
    async with all_services(tmp_path) as (gateway, address), raw_channel(address) as channel:
        await gateway.start_ready_sampler("big-0")
        await gateway.spool.append("a", [make_trajectory("a")])
        header = weights_pb2.PublishHeader(
            version=1, files=[weights_pb2.FileEntry(name="config.json")]
        )
        for name, message in (
            ("rollout.v1.Rollout/StreamGroups", rollout_pb2.StreamGroupsRequest()),
            ("rollout.v1.Rollout/AckGroups", rollout_pb2.AckGroupsRequest(sequence=1, taken=1)),
            ("rollout.v1.Rollout/Generate", codec.generate_to_pb(make_request())),
            ("weights.v1.Weights/Publish", weights_pb2.PublishRequest(header=header)),
            ("fleet.v1.Fleet/DrainSampler", fleet_pb2.DrainRequest(sampler_id="big-0")),
            ("fleet.v1.Fleet/Status", fleet_pb2.StatusRequest()),
        ):
            code, details = await answer(
                channel, BY_NAME[name], [message.SerializeToString()], metadata=bearer(SAMPLERS)
            )
            assert code == Code.PERMISSION_DENIED, (name, details)
        assert gateway.spool.count() == 1 and gateway.producer.backlog == 1
        assert gateway.phase("big-0") == "ready"
        status = weights_pb2_grpc.WeightsStub(channel).Status(
            weights_pb2.StatusRequest(), metadata=bearer(TOKEN)
        )
        assert (await status).latest_version == 0


@each_call
async def test_another_ca_and_plain_text_get_no_answer(authorities, tmp_path, call):
    ours, others = authorities
    credentials = Credentials(token=Token(TOKEN), tls=tls(ours, "gateway", ca=False))
    async with all_services(tmp_path, credentials, host="localhost") as (_, address):
        for ca in (others, None):
            client = Credentials(token=Token(TOKEN), tls=tls(ca) if ca else None)
            async with rpc.aio_channel(address, client, add_token=False) as channel:
                code, details = await answer(channel, call, metadata=bearer(TOKEN))
                assert code == Code.UNAVAILABLE, (code, details)
        async with rpc.aio_channel(address, Credentials(tls=tls(ours))) as channel:
            code, details = await answer(channel, call)
            assert code == Code.UNAUTHENTICATED, details


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> tuple[Path, Path]:
    """Certificates of two CAs under the same names."""
    place = tmp_path_factory.mktemp("tls")
    return make_certificates(place / "ours"), make_certificates(place / "others")


async def test_messages_beyond_the_limit_are_refused(tmp_path):
    large = b"\0" * (rpc.MAX_MESSAGE_BYTES + 1)
    async with all_services(tmp_path) as (gateway, address), raw_channel(address) as channel:
        await gateway.start_ready_sampler("big-0")
        for call in CALLS:
            code, details = await answer(channel, call, [large], timeout_s=20)
            assert code == Code.UNAUTHENTICATED, (call, details)
            code, details = await answer(
                channel, call, [large], metadata=bearer(TOKEN), timeout_s=20
            )
            assert code == Code.RESOURCE_EXHAUSTED, (call, code, details)
        assert (await collect(gateway.fleet, make_request()))[0].tokens.tolist() == EXPECTED


# Peers that passed, and then send what they must not.


def registration(gateway: Harness, sampler_id: str, **changes: object) -> fleet_pb2.Register:
    """A registration that the gateway would take; big-0 is there."""
    known = gateway.fleet.registry.get("big-0")
    assert known is not None
    message = codec.sampler_to_pb(dataclasses.replace(known.info, sampler_id=sampler_id))
    for field, value in changes.items():
        setattr(message, field, value)
    return message


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


# Bytes of chance.


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few changed, cut, doubled or added."""
    kept = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randint(0, len(kept))
        match chance.randrange(5):
            case 0 if place < len(kept):
                kept[place] ^= 1 << chance.randrange(8)
            case 1:
                kept[place:place] = chance.randbytes(chance.randint(1, 9))
            case 2:
                del kept[place : place + chance.randint(1, 9)]
            case 3:
                kept += kept[place:]
            case _ if place < len(kept):
                kept[place] = chance.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(kept)


def filled(kind: type[Message]) -> Message:
    """A message with something in each of its plain fields."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, bool | int | float | str | bytes):
            setattr(message, field.name, type(value)(1))
    return message


def samples(gateway: Harness, name: str) -> dict[str, list[Message]]:
    """Messages that are right, by call; those of a stream in the order they go out."""
    request = dataclasses.replace(make_request(f"fuzz-{name}"), ends_session=True)
    register = registration(gateway, name, group="eval", kv_format="bf16")
    beat = fleet_pb2.Heartbeat(version=1, switch=fleet_pb2.Switch(num_bytes=1))
    good = completion([1, 2, 3], version=1, reason=None)
    entry = weights_pb2.FileEntry(name="config.json", num_bytes=2, checksum="0" * 32)
    header = weights_pb2.PublishHeader(version=1, files=[entry])
    sampling = codec.sampling_to_pb(request.sampling)
    report = fleet_pb2.UpdateReport(
        step=1, version=1, groups=[fleet_pb2.GroupUpdate(group="big", kl=0.1)], alarms=["a"]
    )
    return {
        "fleet.v1.Fleet/Join": [
            fleet_pb2.SamplerMessage(register=register),
            fleet_pb2.SamplerMessage(heartbeat=beat),
            # of the request that another sampler is serving
            fleet_pb2.SamplerMessage(
                delta=fleet_pb2.Delta(request_id="s/0~0", chunk=codec.chunk_to_pb(good))
            ),
            fleet_pb2.SamplerMessage(
                failed=fleet_pb2.RequestFailed(request_id="s/0~0", reason="r", bad_request=True)
            ),
            fleet_pb2.SamplerMessage(leaving=fleet_pb2.Leaving(reason="r")),
        ],
        "fleet.v1.Fleet/Status": [fleet_pb2.StatusRequest()],
        "fleet.v1.Fleet/DrainSampler": [fleet_pb2.DrainRequest(sampler_id="nobody-of-that-name")],
        "fleet.v1.Fleet/ReportUpdate": [report],
        "fleet.v1.Fleet/ReportTargets": [
            fleet_pb2.ReportTargetsRequest(
                targets=[fleet_pb2.GroupTarget(group="big", num_target=1, num_held=1)]
            )
        ],
        "rollout.v1.Rollout/Generate": [codec.generate_to_pb(request)],
        "rollout.v1.Rollout/EndSession": [
            BY_NAME["rollout.v1.Rollout/EndSession"].message(session_id="fuzz")
        ],
        "rollout.v1.Rollout/StreamGroups": [rollout_pb2.StreamGroupsRequest(after=1, zstd=True)],
        "rollout.v1.Rollout/AckGroups": [rollout_pb2.AckGroupsRequest(sequence=1, taken=1)],
        "rollout.v1.Rollout/Watch": [rollout_pb2.WatchRequest(every_seconds=0.1)],
        "rollout.v1.Rollout/Evaluate": [
            rollout_pb2.EvaluateRequest(
                split="heldout", num_tasks=1, num_samples=1, sampling=sampling
            )
        ],
        "weights.v1.Weights/Publish": [
            weights_pb2.PublishRequest(header=header),
            weights_pb2.PublishRequest(data=b"{}"),
        ],
        "weights.v1.Weights/Watch": [weights_pb2.WatchRequest(format="bf16")],
        "weights.v1.Weights/Fetch": [
            weights_pb2.FetchRequest(version=1, format="bf16", file="config.json", offset=1)
        ],
        "weights.v1.Weights/Chain": [weights_pb2.ChainRequest(format="bf16", have=1, want=2)],
        "weights.v1.Weights/Status": [weights_pb2.StatusRequest()],
    }


async def test_bytes_of_chance_disturb_nobody(tmp_path, capsys):
    chance = random.Random(20260101)
    codes: Counter[grpc.StatusCode] = Counter()
    async with all_services(tmp_path, grace_seconds=0.1, stall_seconds=60.0) as (
        gateway,
        address,
    ):
        good = await gateway.start_ready_sampler("big-0")
        await gateway.spool.append("a", [make_trajectory("a")])
        paused = asyncio.Event()

        async def wait(request, index):
            if request.session_id == "s" and index == 1:
                await paused.wait()

        good.engine.before_chunk = wait
        longest = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: gateway.fleet.num_tokens["big"] == 4)

        async def attack(number: int) -> None:
            """One call with one of its messages mutated, or with noise alone."""
            call = CALLS[number % len(CALLS)]
            known = samples(gateway, f"fuzz-{number}")
            right = known.get(call.path.removeprefix("/"), [filled(call.message)])
            messages = [message.SerializeToString() for message in right]
            place = chance.randrange(len(messages))
            noise = chance.random() < 0.2
            messages[place] = (
                chance.randbytes(chance.randint(1, 300))
                if noise
                else mutated(messages[place], chance)
            )
            async with raw_channel(address) as channel:
                code, details = await answer(
                    channel, call, messages, metadata=bearer(TOKEN), timeout_s=0.3
                )
            codes[code] += 1
            assert TOKEN not in details

        async def attack_until(deadline: float, start: int) -> None:
            number = start
            while time.monotonic() < deadline:
                await attack(number)
                number += 8

        async def use() -> int:
            """Turns of others, meanwhile: big-0 serves them."""
            turns = 0
            while not paused.is_set():
                request = dataclasses.replace(make_request(f"user-{turns}"), ends_session=True)
                whole, samplers = await asyncio.wait_for(collect(gateway.fleet, request), 10)
                assert samplers == ["big-0"] and whole.tokens.tolist() == EXPECTED
                turns += 1
                await asyncio.sleep(0.05)
            return turns

        deadline = time.monotonic() + FUZZ_S
        users = asyncio.create_task(use())
        await asyncio.gather(*(attack_until(deadline, start) for start in range(8)))
        paused.set()
        whole, samplers = await asyncio.wait_for(longest, 10)
        assert (whole.tokens.tolist(), samplers) == (EXPECTED, ["big-0"])
        turns = await users
        assert gateway.phase("big-0") == "ready"
        assert gateway.spool.last_sequence == 1
        with capsys.disabled():
            said = ", ".join(f"{code.name} {num}" for code, num in codes.most_common())
            sys.stdout.write(f"\nfuzz: {codes.total()} calls, {turns} turns beside them: {said}\n")
        assert codes.total() > 100 and turns > 10
        assert codes.keys() >= {Code.INVALID_ARGUMENT}
