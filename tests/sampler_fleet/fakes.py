"""Fakes behind the fleet's ports, and a gateway on port 0 with samplers that really dial out.

Owns no assertion. The engine is a function of positions, so that a continued turn can be compared
with an undisturbed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from contracts.rpc import aio_channel, start_server
from contracts.types import (
    CandidateSets,
    Completion,
    Ending,
    Fetched,
    FinishReason,
    GenerateRequest,
    Manifest,
    Purpose,
    SamplingParams,
    Trajectory,
    VersionSpan,
)
from sampler_fleet.config import EpisodesConfig, FleetConfig
from sampler_fleet.engines.base import Engine, EngineLoad
from sampler_fleet.episodes.base import Task
from sampler_fleet.fingerprint import identify_checkpoint
from sampler_fleet.fleet import Fleet
from sampler_fleet.gateway import add_services
from sampler_fleet.join import Patience, SamplerAgent, Weights
from sampler_fleet.producer import Producer
from sampler_fleet.spool import Spool

TOKEN = "a-token-for-tests-only"
VOCAB = 100
HALF = np.float32(math.log(0.5))


def token_at(position: int) -> int:
    """What the fake engine writes at a buffer position; never the stop token 0."""
    return 1 + (position * 37 + 11) % (VOCAB - 1)


def completion(tokens: list[int], *, version: int, reason: FinishReason | None) -> Completion:
    """A well-formed record: each token one of two candidates of equal probability."""
    num = len(tokens)
    ids = np.array([[t, (t + 1) % VOCAB] for t in tokens], np.int32).reshape(-1)
    return Completion(
        tokens=np.array(tokens, np.int32),
        sampler_logp=np.full(num, HALF),
        candidates=CandidateSets.from_counts(np.full(num, 2), ids, np.full(2 * num, HALF)),
        spans=(VersionSpan(version=version, start=0, end=num),) if num else (),
        finish_reason=reason,
    )


class FakeEngine(Engine):
    """Writes `token_at` in chunks of `chunk_tokens`.

    `before_chunk(request, index)` is awaited before each chunk: a test waits, kills or counts
    there. `distort` changes a chunk on its way out.
    """

    def __init__(self, *, chunk_tokens: int = 4) -> None:
        self.chunk_tokens = chunk_tokens
        self.before_chunk: Callable[[GenerateRequest, int], object] | None = None
        self.distort: Callable[[Completion], Completion] = lambda chunk: chunk
        self.load_error: Exception | None = None
        self.checksum = "right"
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []
        self.loaded: list[int] = []
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def weights_checksum(self) -> str:
        return self.checksum

    async def load(self, directory: Path, manifest: Manifest) -> float:
        if self.load_error:
            raise self.load_error
        self._version = manifest.version
        self.loaded.append(manifest.version)
        return 0.25

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        self.requests.append(request)
        start, most = len(request.tokens), request.sampling.max_new_tokens
        finished = False
        try:
            for index, first in enumerate(range(0, most, self.chunk_tokens)):
                await asyncio.sleep(0)
                if self.before_chunk:
                    await self.before_chunk(request, index)
                last = min(first + self.chunk_tokens, most)
                tokens = [token_at(start + t) for t in range(first, last)]
                finished = last == most
                reason = FinishReason.LENGTH if finished else None
                yield self.distort(completion(tokens, version=self._version, reason=reason))
        finally:
            if not finished:
                self.aborted.append(request.request_id)

    async def abort(self, request_id: str) -> None:
        raise AssertionError("the sampler closes the iterator instead")

    def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)

    def load_now(self) -> EngineLoad:
        return EngineLoad(
            num_running=0, num_waiting=0, tokens_per_second=8.0, kv_used_fraction=0.25
        )

    async def close(self) -> None:
        pass


class FakeWeights(Weights):
    """Versions that a test publishes; every directory is the same checkpoint."""

    def __init__(self, directory: Path, version: int = 1) -> None:
        self._directory = directory
        self._version = version
        self._published = asyncio.Event()
        self.fetched: list[int] = []
        self.watch_error: Exception | None = None  # raised once, instead of the next version
        self.hold: asyncio.Event | None = None  # fetches wait for it

    def publish(self, version: int) -> None:
        self._version = version
        self._published.set()
        self._published = asyncio.Event()

    async def watch(self, after: int) -> AsyncIterator[Manifest]:
        while True:
            published = self._published
            if self._version > after:
                if error := self.watch_error:
                    self.watch_error = None
                    self._version = after
                    raise error
                after = self._version
                yield Manifest(version=after, format="bf16")
            await published.wait()

    async def fetch(self, manifest: Manifest) -> Fetched:
        self.fetched.append(manifest.version)
        if self.hold:
            await self.hold.wait()
        return Fetched(directory=self._directory)


def make_checkpoint(directory: Path, **config: object) -> Path:
    """A checkpoint directory as far as fingerprints look."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 8} | config
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def make_fleet_config(**changes: object) -> FleetConfig:
    """Two training groups (3 : 1) and one evaluation group, with short waits."""
    groups = [
        {"name": "big", "weight_format": "bf16", "capacity": 3, "max_sessions": 64},
        {"name": "small", "weight_format": "bf16", "capacity": 1, "max_sessions": 64},
        {"name": "eval", "weight_format": "bf16", "kv_format": "bf16", "purpose": "evaluate"},
    ]
    values = {
        "groups": groups,
        "heartbeat_seconds": 0.05,
        "lease_seconds": 2.0,
        "assemble_seconds": 0.0,
        "grace_seconds": 0.5,
        "stall_seconds": 10.0,
    }
    return FleetConfig.model_validate(values | changes)


def make_task(name: str, split: str = "train") -> Task:
    return Task(
        task_id=name,
        split=split,
        template="t",
        issue="",
        tree={},
        hidden_tests={},
        fail_to_pass=(),
        pass_to_pass=(),
    )


def make_trajectory(session_id: str, *, task_id: str = "task", reward: float | None = 1.0):
    """A finished episode of 3 prompt tokens and 2 sampled ones."""
    record = completion([5, 6], version=3, reason=FinishReason.STOP)
    return Trajectory(
        task_id=task_id,
        session_id=session_id,
        group="big",
        sampler_ids=("big-0",),
        tokens=np.array([1, 2, 3, 5, 6], np.int32),
        loss_mask=np.array([0, 0, 0, 1, 1], bool),
        sampler_logp=record.sampler_logp,
        candidates=record.candidates,
        spans=(VersionSpan(version=3, start=3, end=5),),
        reward=reward,
        ending=Ending.SUBMITTED if reward is not None else Ending.FAILURE,
        failure="" if reward is not None else "lost",
    )


def make_request(
    session_id: str = "s",
    *,
    num_tokens: int = 12,
    prompt: tuple[int, ...] = (1, 2, 3),
    min_version: int = 0,
    purpose: Purpose = Purpose.TRAIN,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{session_id}/0",
        session_id=session_id,
        tokens=np.array(prompt, np.int32),
        sampling=SamplingParams(top_p=0.9, max_new_tokens=num_tokens, stop_token_ids=(0,)),
        min_version=min_version,
        purpose=purpose,
    )


@dataclass
class Member:
    """A sampler of the harness."""

    agent: SamplerAgent
    engine: FakeEngine
    weights: FakeWeights
    task: asyncio.Task[None]

    async def kill(self) -> None:
        """Ends it without a word, as kill -9 does."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Harness:
    """A gateway and its samplers, all in this process, talking over loopback."""

    directory: Path
    config: FleetConfig
    run_episode: Callable[..., object] | None = None
    vocab_size: int = VOCAB
    port: int = 0
    members: dict[str, Member] = field(default_factory=dict)

    async def start_gateway(self) -> None:
        checkpoint = make_checkpoint(self.directory / "checkpoint", vocab_size=self.vocab_size)
        self.fleet = Fleet(self.config, identify_checkpoint(checkpoint))
        self.spool = Spool(self.directory / "state" / "groups.sqlite")
        self.producer = Producer(
            EpisodesConfig(group_size=2, max_concurrent=4, queue_groups=2),
            tasks={
                "train": [make_task(f"t{i}") for i in range(5)],
                "heldout": [make_task(f"h{i}", "heldout") for i in range(3)],
            },
            sampling=SamplingParams(),
            run_episode=self.run_episode,
            open_session=self.fleet.session,
            spool=self.spool,
            retry_seconds=0.0,
        )

        def add(server) -> None:
            add_services(server, fleet=self.fleet, spool=self.spool, producer=self.producer)

        self.server, self.port = await start_server(f"127.0.0.1:{self.port}", TOKEN, add)
        self._leases = asyncio.create_task(self.fleet.keep_leases())

    async def stop_gateway(self) -> None:
        self._leases.cancel()
        self.fleet.stop()
        self.spool.stop()
        await self.server.stop(None)
        self.spool.close()

    def start_sampler(
        self,
        sampler_id: str,
        group: str = "big",
        *,
        version: int = 1,
        engine: FakeEngine | None = None,
        token: str = TOKEN,
        tokens_per_second: float = 0.0,
        **config: object,
    ) -> Member:
        """Starts one; `config` changes its checkpoint's config.json."""
        engine = engine or FakeEngine()
        weights = FakeWeights(
            make_checkpoint(
                self.directory / f"weights-{sampler_id}",
                **({"vocab_size": self.vocab_size} | config),
            ),
            version,
        )
        agent = SamplerAgent(
            sampler_id=sampler_id,
            group=self.config.group(group),
            engine=engine,
            weights=weights,
            gateway=f"127.0.0.1:{self.port}",
            credentials=token,
            patience=Patience(backoff=0.02, max_backoff=0.1, drain=5.0, close=2.0),
        )
        agent._tokens_per_second = tokens_per_second  # as if it had been measured
        member = Member(agent, engine, weights, asyncio.create_task(agent.run()))
        self.members[sampler_id] = member
        return member

    async def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Waits for what another task is about to do."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    def phase(self, sampler_id: str) -> str:
        sampler = self.fleet.registry.get(sampler_id)
        return sampler.phase if sampler else "absent"

    async def start_ready_sampler(self, sampler_id: str, group: str = "big", **kw) -> Member:
        member = self.start_sampler(sampler_id, group, **kw)
        await self.until(lambda: self.phase(sampler_id) == "ready" or member.task.done())
        if member.task.done():
            await member.task
        return member

    def channel(self):
        return aio_channel(f"127.0.0.1:{self.port}", TOKEN)


@contextlib.asynccontextmanager
async def running_gateway(
    directory: Path, *, run_episode=None, vocab_size: int = VOCAB, **config: object
) -> AsyncIterator[Harness]:
    harness = Harness(directory, make_fleet_config(**config), run_episode, vocab_size)
    await harness.start_gateway()
    try:
        yield harness
    finally:
        for member in harness.members.values():
            await member.kill()
        await harness.stop_gateway()


async def collect(fleet: Fleet, request: GenerateRequest):
    """The whole turn: joined completion, and the samplers in the order they contributed."""
    parts, samplers = [], []
    async for chunk in fleet.generate(request):
        parts.append(chunk.completion)
        if chunk.sampler_id not in samplers:
            samplers.append(chunk.sampler_id)
    return Completion.concatenate(parts), samplers
