"""The processes of `benchmarks.fleet`: a real gateway, and samplers without engines.

Owns what runs in them and the orders they take. Must not judge what they measure.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from benchmarks.wire import VERSION, VOCAB, make_completion, parts_of, trajectory_of
from contracts import codec
from contracts.credentials import Credentials
from contracts.pb import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from contracts.rpc import aio_channel, start_server
from contracts.types import (
    Completion,
    GenerateRequest,
    KvFormat,
    SamplerInfo,
    SamplingParams,
    Trajectory,
    WeightFormat,
)
from sampler_fleet.config import EpisodesConfig, FleetConfig
from sampler_fleet.episodes.base import Task
from sampler_fleet.fingerprint import CheckpointIdentity
from sampler_fleet.fleet import Fleet
from sampler_fleet.gateway import add_services
from sampler_fleet.producer import Producer
from sampler_fleet.spool import Spool

SHARES = {  # the published fleet's capacities, in percent
    "b300": 28,
    "b200": 19,
    "h200-fp8": 19,
    "h100-fp8": 9,
    "h100": 9,
    "h200": 9,
    "a100": 3,
    "rtx": 3,
}
IDENTITY = CheckpointIdentity(
    model_fingerprint="model", tokenizer_fingerprint="tokenizer", vocab_size=VOCAB
)
MAX_SESSIONS = 32
EXPONENT = 1.8  # of candidate counts: five on average, half of the tokens have one
PROMPT, REPLY = 512, 256  # tokens of an episode
IN_FLIGHT = 256
STREAMS = 200
GROUP_SIZE = 8
GROUPS_AHEAD = 16  # of the trainer: what it is given at the end was not made long before
TIMEOUT_S = 120.0


def fleet_config() -> FleetConfig:
    return FleetConfig.model_validate(
        {
            "groups": [
                {
                    "name": name,
                    "weight_format": "bf16",
                    "capacity": share,
                    "max_sessions": MAX_SESSIONS,
                }
                for name, share in SHARES.items()
            ],
            "assemble_seconds": 0.0,
        }
    )


def sampler_info(index: int) -> SamplerInfo:
    """Each hundred samplers or so are divided like the shares."""
    names = [name for name, share in SHARES.items() for _ in range(share)]
    return SamplerInfo(
        sampler_id=f"sampler-{index:03d}",
        group=names[index % len(names)],
        accelerator="none",
        weight_format=WeightFormat.BF16,
        kv_format=KvFormat.FP8,
        max_sessions=MAX_SESSIONS,
        model_fingerprint=IDENTITY.model_fingerprint,
        tokenizer_fingerprint=IDENTITY.tokenizer_fingerprint,
        version=VERSION,
    )


def request_of(name: str, num_new: int) -> GenerateRequest:
    """The only turn of a session."""
    return GenerateRequest(
        request_id=name,
        session_id=name,
        tokens=np.arange(1, PROMPT + 1, dtype=np.int32),
        sampling=SamplingParams(top_p=0.97, top_k=64, max_new_tokens=num_new),
        ends_session=True,
    )


async def timed(work: Awaitable[None]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def in_flight(one: Callable[[str], Awaitable[None]], names: Iterator[str]) -> None:
    """`IN_FLIGHT` of them at any time."""

    async def worker() -> None:
        for name in names:
            await one(name)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


# The gateway.


async def one_turn(fleet: Fleet, task: Task, *, session_id: str) -> Trajectory:
    """An episode without a sandbox."""
    request = request_of(session_id, REPLY)
    chunks = [chunk async for chunk in fleet.generate(request)]
    record = trajectory_of(
        request.tokens, Completion.concatenate([chunk.completion for chunk in chunks])
    )
    return replace(
        record,
        task_id=task.task_id,
        session_id=session_id,
        group=chunks[0].group,
        sampler_ids=tuple(dict.fromkeys(chunk.sampler_id for chunk in chunks)),
    )


def serve(orders: Connection, folder: Path) -> None:
    asyncio.run(_serve(orders, folder))


async def _serve(orders: Connection, folder: Path) -> None:
    """A gateway that does what it is told and answers with what that took."""
    fleet = Fleet(fleet_config(), IDENTITY)
    spool = Spool(folder / "groups.sqlite")
    task = Task(
        task_id="task", split="train", template="none", issue="", tree={}, hidden_tests={},
        fail_to_pass=(), pass_to_pass=(),
    )  # fmt: skip

    def run_episode(task: Task, *, session_id: str, **_: Any) -> Awaitable[Trajectory]:
        return one_turn(fleet, task, session_id=session_id)

    producer = Producer(
        EpisodesConfig(group_size=GROUP_SIZE, max_concurrent=IN_FLIGHT, queue_groups=GROUPS_AHEAD),
        tasks={"train": [task], "heldout": []},
        sampling=SamplingParams(),
        run_episode=run_episode,
        open_session=fleet.session,
        spool=spool,
    )
    server, port = await start_server(
        "127.0.0.1:0",
        Credentials(),
        lambda server: add_services(server, fleet=fleet, spool=spool, producer=producer),
    )
    jobs = [asyncio.create_task(fleet.keep_leases())]
    orders.send(port)
    while (order := await asyncio.to_thread(orders.recv))[0] != "stop":
        match order:
            case ("joined",):
                orders.send(sum(len(fleet.registry.ready(group)) for group in SHARES))
            case ("cpu",):
                orders.send(time.process_time())
            case ("tokens",):
                orders.send(fleet.num_tokens.total())
            case ("sessions", num):
                orders.send(await timed(_sessions(fleet, num)))
            case ("produce",):
                jobs.append(asyncio.create_task(producer.run()))
    for job in jobs:
        job.cancel()
    fleet.stop()
    spool.stop()
    await server.stop(None)
    spool.close()


async def _sessions(fleet: Fleet, num: int) -> None:
    """One-turn sessions through the Generator port."""

    async def one(name: str) -> None:
        async for _ in fleet.generate(request_of(name, 1)):
            pass

    await in_flight(one, (f"port-{time.time_ns()}-{i}" for i in range(num)))


# The samplers, and who asks: in one process, so that a chunk leaves and arrives by one clock.


class Samplers:
    """Each has a connection of its own, and answers every request with the same chunks."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.chunks: list[rollout_pb2.CompletionChunk] = []
        self.interval_s = 0.0  # from chunk to chunk
        self.sent_at: dict[tuple[str, int], float] = {}  # by request and number of the chunk
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, num: int) -> None:
        for index in range(num):
            self._spawn(self._join(index))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def paced(self, name: str) -> AsyncIterator[rollout_pb2.CompletionChunk]:
        """Chunks at their times, each noted as it leaves."""
        start = time.perf_counter()
        for index, chunk in enumerate(self.chunks):
            if self.interval_s:
                await asyncio.sleep(max(0.0, start + index * self.interval_s - time.perf_counter()))
                self.sent_at[name, index] = time.perf_counter()
            yield chunk

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, index: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            call: Any = fleet_pb2_grpc.FleetStub(channel).Join()
            register = codec.sampler_to_pb(sampler_info(index))
            await call.write(fleet_pb2.SamplerMessage(register=register))
            writing = asyncio.Lock()
            async for message in call:
                match message.WhichOneof("kind"):
                    case "welcome":
                        interval_s = message.welcome.heartbeat_seconds
                        self._spawn(self._beat(call, writing, interval_s))
                    case "generate":
                        self._spawn(self._reply(call, writing, message.generate.request_id))

    async def _beat(self, call: Any, writing: asyncio.Lock, interval_s: float) -> None:
        beat = fleet_pb2.SamplerMessage(heartbeat=fleet_pb2.Heartbeat(version=VERSION))
        while True:
            await asyncio.sleep(interval_s)
            async with writing:
                await call.write(beat)

    async def _reply(self, call: Any, writing: asyncio.Lock, request_id: str) -> None:
        async for chunk in self.paced(request_id.partition("~")[0]):
            delta = fleet_pb2.Delta(request_id=request_id, chunk=chunk)
            async with writing:
                await call.write(fleet_pb2.SamplerMessage(delta=delta))


class _Direct(rollout_pb2_grpc.RolloutServicer):
    """The same messages with no gateway between."""

    def __init__(self, samplers: Samplers) -> None:
        self._samplers = samplers

    async def Generate(self, request, context):
        async for chunk in self._samplers.paced(request.request_id):
            await context.write(chunk)


def sample(orders: Connection, address: str, num_samplers: int) -> None:
    asyncio.run(_sample(orders, address, num_samplers))


async def _sample(orders: Connection, address: str, num_samplers: int) -> None:
    samplers = Samplers(address)
    samplers.start(num_samplers)
    server, port = await start_server(
        "127.0.0.1:0",
        Credentials(),
        lambda server: rollout_pb2_grpc.add_RolloutServicer_to_server(_Direct(samplers), server),
    )
    addresses = {"gateway": address, "direct": f"127.0.0.1:{port}"}
    while (order := await asyncio.to_thread(orders.recv))[0] != "stop":
        match order:
            case ("reply", num_tokens, chunk_tokens, interval_s):
                whole = make_completion(np.random.default_rng(0), num_tokens, EXPONENT)
                samplers.chunks = [codec.chunk_to_pb(p) for p in parts_of(whole, chunk_tokens)]
                samplers.interval_s = interval_s
                orders.send(len(samplers.chunks))
            case ("cpu",):
                orders.send(time.process_time())
            case ("sessions", num):
                orders.send(await timed(_calls(address, num)))
            case ("latency", way, num_tokens):
                orders.send(await _latencies(addresses[way], samplers, num_tokens))
    samplers.stop()
    await server.stop(None)


async def _calls(address: str, num: int) -> None:
    """One-turn sessions through `Rollout.Generate`."""
    async with aio_channel(address) as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)

        async def one(name: str) -> None:
            async for _ in stub.Generate(codec.generate_to_pb(request_of(name, 1))):
                pass

        await in_flight(one, (f"call-{time.time_ns()}-{i}" for i in range(num)))


async def _latencies(address: str, samplers: Samplers, num_tokens: int) -> list[float]:
    """Seconds from leaving to arrival of each chunk of `STREAMS` replies, whose beginnings are
    spread over one interval."""
    samplers.sent_at.clear()
    latencies: list[float] = []
    async with aio_channel(address) as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)

        async def one(number: int) -> None:
            await asyncio.sleep(samplers.interval_s * number / STREAMS)
            name = f"stream-{time.time_ns()}-{number}"
            index = 0
            async for _ in stub.Generate(codec.generate_to_pb(request_of(name, num_tokens))):
                latencies.append(time.perf_counter() - samplers.sent_at[name, index])
                index += 1
            assert index == len(samplers.chunks)

        await asyncio.gather(*(one(number) for number in range(STREAMS)))
    return latencies


# How they are told.


class Process:
    """A process that takes orders and answers some of them."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._orders, other = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(other, *arguments), daemon=True)
        self._process.start()
        other.close()

    def tell(self, *order: Any) -> None:
        self._orders.send(order)

    def hear(self) -> Any:
        if not self._orders.poll(TIMEOUT_S):
            raise SystemExit(f"no answer in {TIMEOUT_S:g} s")
        return self._orders.recv()

    def ask(self, *order: Any) -> Any:
        self.tell(*order)
        return self.hear()

    def stop(self) -> None:
        if self._process.is_alive():
            self.tell("stop")
            self._process.join(10)
        self._process.kill()


@contextmanager
def running(num_samplers: int, folder: Path) -> Iterator[tuple[Process, Process, str]]:
    """The gateway, its samplers once all have joined, and its address."""
    folder.mkdir()
    gateway = Process(serve, folder)
    try:
        address = f"127.0.0.1:{gateway.hear()}"
        samplers = Process(sample, address, num_samplers)
        try:
            patience = time.monotonic() + TIMEOUT_S
            while (num := gateway.ask("joined")) < num_samplers:
                if time.monotonic() > patience:
                    raise SystemExit(f"{num} of {num_samplers} samplers joined")
                time.sleep(0.5)
            yield gateway, samplers, address
        finally:
            samplers.stop()
    finally:
        gateway.stop()
