"""A sampler for fault tests: the real agent around a scripted engine, as a process of its own.

Owns the script: what is sampled is a function of the session and the position alone, and a token's
log-prob says the position it was sampled for. So whoever reads a record knows whether it is the one
that was made, and for which place, whichever samplers made it.

Owns the misbehaviours too. Those of an engine are the first process's: the one that takes its place
is sound.

    python -m tests.e2e.scripted_sampler --config RUN --gateway HOST:PORT ... --misbehave nan
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from contracts.credentials import read_credentials
from contracts.errors import EXIT_DIRTY, DirtyProcessError, exits_politely
from contracts.logs import log_to_stderr
from contracts.types import (
    CandidateSets,
    Completion,
    Fetched,
    FinishReason,
    GenerateRequest,
    Manifest,
    VersionSpan,
)
from sampler_fleet.config import read_settings
from sampler_fleet.engines.base import Engine, EngineLoad
from sampler_fleet.join import Patience, SamplerAgent, Weights
from sampler_fleet.process import run_until_stopped
from weight_sync.client import WeightClient

MISBEHAVIOURS = ("stall", "nan", "old-spans", "old-version", "another-model")
STEP = 4096  # log-probs are exact multiples of its inverse


def script(session_id: str, start: int, num: int, vocab_size: int) -> Completion:
    """What is sampled at positions start .. start + num: no spans, not finished.

    One to three candidates, the token first; all log-probs exact in float32.
    """
    positions = np.arange(start, start + num, dtype=np.uint64)
    mixed = positions * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(zlib.crc32(session_id.encode()))
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    tokens = ((mixed >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int64)
    counts = 1 + (mixed >> np.uint64(20)).astype(np.int64) % 3
    logp = -(positions.astype(np.float32) + 1) / STEP
    owner = np.repeat(np.arange(num), counts)
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Completion(
        tokens=tokens.astype(np.int32),
        sampler_logp=logp,
        candidates=CandidateSets.from_counts(
            counts,
            ((tokens[owner] + rank) % vocab_size).astype(np.int32),
            (logp[owner] - rank).astype(np.float32),
        ),
        spans=(),
        finish_reason=None,
    )


def positions_of(sampler_logp: np.ndarray) -> np.ndarray:
    """The positions that tokens were sampled for, int64 [T]."""
    return np.rint(-sampler_logp.astype(np.float64) * STEP).astype(np.int64) - 1


class ScriptedEngine(Engine):
    """Writes the script at `tokens_per_second` per request, in chunks of `chunk_tokens`."""

    def __init__(
        self, *, tokens_per_second: float, chunk_tokens: int, misbehaviour: str | None
    ) -> None:
        self._pause_s = chunk_tokens / tokens_per_second
        self._chunk_tokens = chunk_tokens
        self._misbehaviour = misbehaviour
        self._num_running = 0
        self._vocab_size = 0
        self._version = self._first_version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def weights_checksum(self) -> str:
        return "of the script"

    async def load(self, directory: Path, manifest: Manifest) -> float:
        self._vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
        self._version = manifest.version
        self._first_version = self._first_version or manifest.version
        return 0.0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        position = len(request.tokens)
        end = position + request.sampling.max_new_tokens
        self._num_running += 1
        try:
            while position < end:
                await asyncio.sleep(self._pause_s)
                chunk = self._next(request, position, min(self._chunk_tokens, end - position))
                position += len(chunk)
                stopped = int(chunk.tokens[-1]) in request.sampling.stop_token_ids
                reason = FinishReason.STOP if stopped else None
                reason = FinishReason.LENGTH if position == end and not stopped else reason
                yield dataclasses.replace(chunk, finish_reason=reason)
                if stopped:
                    return
                if self._misbehaviour == "stall":
                    await asyncio.Event().wait()
        finally:
            self._num_running -= 1

    def _next(self, request: GenerateRequest, position: int, num: int) -> Completion:
        """The next chunk, up to and with the first stop token."""
        chunk = script(request.session_id, position, num, self._vocab_size)
        stops = np.isin(chunk.tokens, request.sampling.stop_token_ids)
        if stops.any():
            num = int(np.argmax(stops)) + 1
            chunk = script(request.session_id, position, num, self._vocab_size)
        version = self._version
        if self._misbehaviour == "old-spans":
            version = self._first_version
        logp = chunk.sampler_logp
        if self._misbehaviour == "nan" and position > len(request.tokens):
            logp = np.where(np.arange(num) == num - 1, np.float32(np.nan), logp)
        return dataclasses.replace(
            chunk,
            sampler_logp=logp,
            spans=(VersionSpan(version=version, start=0, end=num),),
        )

    async def abort(self, request_id: str) -> None:
        raise AssertionError("the agent closes the iterator instead")

    def end_session(self, session_id: str) -> None:
        pass

    def load_now(self) -> EngineLoad:
        return EngineLoad(
            num_running=self._num_running,
            num_waiting=0,
            tokens_per_second=self._num_running * self._chunk_tokens / self._pause_s,
            kv_used_fraction=0.0,
        )

    async def close(self) -> None:
        pass


class OddWeights(Weights):
    """The weight service, as a sampler sees it that stays at its first version, or whose
    checkpoint is another model's."""

    def __init__(self, client: WeightClient, misbehaviour: str, place: Path) -> None:
        self._client = client
        self._misbehaviour = misbehaviour
        self._place = place

    async def watch(self, after: int) -> AsyncIterator[Manifest]:
        async for manifest in self._client.watch(after):
            if after and self._misbehaviour == "old-version":
                await asyncio.Event().wait()
            after = manifest.version
            yield manifest

    async def fetch(self, manifest: Manifest) -> Fetched:
        fetched = await self._client.fetch(manifest)
        if self._misbehaviour != "another-model":
            return fetched
        directory = self._place / "another-model"
        shutil.copytree(fetched.directory, directory, dirs_exist_ok=True)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 99}))
        return dataclasses.replace(fetched, directory=directory)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for option in ("--config", "--token-file", "--state-dir"):
        parser.add_argument(option, type=Path, required=True)
    for option in ("--gateway", "--weights", "--group", "--sampler-id"):
        parser.add_argument(option, required=True)
    parser.add_argument("--tokens-per-second", type=float, default=100.0)
    parser.add_argument("--chunk-tokens", type=int, default=4)
    parser.add_argument("--misbehave", choices=MISBEHAVIOURS)
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    fleet = read_settings(arguments.config).fleet
    group = fleet.group(arguments.group)
    credentials = read_credentials(arguments.token_file)
    client = WeightClient(
        arguments.weights, credentials, group.weight_format, arguments.state_dir / "weights"
    )
    odd = arguments.misbehave in ("old-version", "another-model")
    misbehaved = arguments.state_dir / "misbehaved"
    is_first = not misbehaved.exists()
    misbehaved.parent.mkdir(parents=True, exist_ok=True)
    misbehaved.touch()
    agent = SamplerAgent(
        sampler_id=arguments.sampler_id,
        group=group,
        engine=ScriptedEngine(
            tokens_per_second=arguments.tokens_per_second,
            chunk_tokens=arguments.chunk_tokens,
            misbehaviour=arguments.misbehave if is_first else None,
        ),
        weights=OddWeights(client, arguments.misbehave, arguments.state_dir) if odd else client,
        gateway=arguments.gateway,
        credentials=credentials,
        patience=Patience(drain=fleet.drain_seconds),
    )
    try:
        await run_until_stopped(agent.run(), lambda: agent.leave("it was told to stop"))
    finally:
        await client.close()


@exits_politely
def main() -> int:
    arguments = _arguments()
    log_to_stderr(arguments.sampler_id)
    try:
        asyncio.run(_serve(arguments))
    except DirtyProcessError:
        return EXIT_DIRTY
    return 0


if __name__ == "__main__":
    main()
