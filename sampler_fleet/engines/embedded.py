"""The embedded engine: Qwen3-MoE and Mixtral in PyTorch behind the engine port, for CPUs.

Owns the worker thread, the streams and the switch of weights. Must not know the fleet, and does no
numerics of its own. One worker runs `schedule -> run -> postprocess`; everything else reaches it as
a command that it executes between two steps, so the state needs no locks.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from contracts.errors import BadInputError, DirtyProcessError, RetryError
from contracts.routed import RoutedExperts
from contracts.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    KvFormat,
    Manifest,
    SamplingParams,
    WeightFormat,
)
from sampler_fleet.engines import kernels
from sampler_fleet.engines.base import EngineLoad, check_request
from sampler_fleet.engines.checkpoint import Checkpoint
from sampler_fleet.engines.model import MixtureModel, Segment, StepBatch
from sampler_fleet.engines.precision import ActivationFormat, KvCache, Precision
from sampler_fleet.engines.sampling import Draw, draw, stream_seed, uniforms
from sampler_fleet.engines.scheduler import Record, Running, Scheduler

log = logging.getLogger(__name__)

_PREFILL_TOKENS = 256  # per step, so that a long prompt does not stall those that decode
_RATE_WINDOW_SECONDS = 5.0
_WEIGHTS_FOR = {  # activations are quantized only together with weights of the same format
    ActivationFormat.FP8: WeightFormat.FP8_BLOCK,
    ActivationFormat.NVFP4: WeightFormat.NVFP4,
}


_Item = Completion | Exception


def _compile(model: MixtureModel) -> None:
    """Runs everything once, so that no request waits for a compiler.

    One process at a time: the others then find what it compiled on the disk.
    """
    cache = model.new_cache(num_slots=2, max_context=2)
    tokens = np.zeros(2, np.int32)
    batch = StepBatch.of(
        [Segment(slot=0, start=0, tokens=tokens[:1]), Segment(slot=1, start=0, tokens=tokens)]
    )
    with open(kernels.__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        logits = torch.zeros_like(model.logits(model.hidden_states(batch, cache)))
        draw(logits, [SamplingParams(top_k=1)] * len(logits), np.zeros(len(logits)))


def _record_routing(
    work: Sequence[tuple[Running, Segment]], batch: StepBatch, routed_NxLxR: np.ndarray
) -> None:
    """Hands the experts of a step's tokens to the requests that asked for them."""
    for (sequence, segment), last in zip(work, batch.last_rows.tolist(), strict=True):
        if sequence.request.sampling.return_routed_experts:
            ids = routed_NxLxR[last + 1 - len(segment.tokens) : last + 1]
            sequence.record.routed_experts.append(RoutedExperts(start=segment.start, ids=ids))


class EmbeddedEngine:
    """An `Engine` (see `base.py`) in this process.

    Args:
        kv_format, activation_format, split_k: how the group computes, see `precision.py`.
        max_sessions: slots of the KV cache: sessions that run, and idle ones that keep their cache.
        max_context_tokens: length of a slot; longer buffers are refused, replies end there.
        seed: for requests without a seed of their own.
        num_threads: of PyTorch, process-wide.
        chunk_tokens: a stream delivers at least this often.
        exact: float32 throughout, to compare with another implementation.
    """

    def __init__(  # noqa: PLR0913 (the settings of an engine)
        self,
        *,
        kv_format: KvFormat | str,
        activation_format: ActivationFormat | str,
        split_k: int,
        max_sessions: int,
        max_context_tokens: int,
        seed: int = 0,
        num_threads: int = 1,
        chunk_tokens: int = 8,
        exact: bool = False,
    ) -> None:
        for name, value in (
            ("max_sessions", max_sessions),
            ("max_context_tokens", max_context_tokens),
            ("num_threads", num_threads),
            ("chunk_tokens", chunk_tokens),
        ):
            if value < 1:
                raise BadInputError(name, expected="at least 1", found=value)
        for name, value, formats in (
            ("kv_format", kv_format, KvFormat),
            ("activation_format", activation_format, ActivationFormat),
        ):
            if value not in set(formats):
                raise BadInputError(name, expected=", ".join(formats), found=value)
        torch.set_num_threads(num_threads)
        self._precision = Precision(
            kv_format=KvFormat(kv_format),
            activation_format=ActivationFormat(activation_format),
            split_k=split_k,
            exact=exact,
        )
        self._seed = seed
        self._chunk_tokens = chunk_tokens
        self._scheduler = Scheduler(
            num_slots=max_sessions,
            max_context=max_context_tokens,
            prefill_tokens=_PREFILL_TOKENS,
        )
        self._model: MixtureModel | None = None
        self._cache: KvCache | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that calls us
        self._streams: dict[str, tuple[GenerateRequest, asyncio.Queue[_Item]]] = {}
        self._failure: DirtyProcessError | None = None
        self._closed = False
        self._rate: deque[tuple[float, int]] = deque(maxlen=4096)
        self._load_lock = asyncio.Lock()
        self._weights_checksum = ""
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="engine", daemon=True)
        self._worker.start()

    # --- the port, called from the event loop -------------------------------------------------

    @property
    def version(self) -> int:
        model = self._model
        return model.version if model else 0

    @property
    def weights_checksum(self) -> str:
        return self._weights_checksum

    async def load(self, directory: Path, manifest: Manifest) -> float:
        async with self._load_lock:
            self._check_alive()
            began = time.monotonic()
            checkpoint, model = await asyncio.to_thread(self._prepare, Path(directory), manifest)
            prepared = time.monotonic()
            self._loop, switched = asyncio.get_running_loop(), asyncio.Event()
            pause_seconds = 0.0

            def switch() -> None:
                nonlocal pause_seconds
                start = time.perf_counter()
                if self._cache is None:
                    self._cache = model.new_cache(
                        num_slots=self._scheduler.num_slots,
                        max_context=self._scheduler.max_context,
                    )
                self._model = model
                pause_seconds = time.perf_counter() - start
                self._call(switched.set)

            self._commands.put(switch)
            self._check_alive()
            await switched.wait()
            if wrong := await asyncio.to_thread(checkpoint.mismatches):
                self._fail(f"version {manifest.version} changed in memory: {wrong[0]}")
            self._check_alive()
            self._weights_checksum = checkpoint.checksum
            log.info(
                "version %d (%s): prepared in %.3f s, decoding paused for %.6f s",
                manifest.version,
                manifest.format,
                prepared - began,
                pause_seconds,
            )
            return pause_seconds

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        self._check(request)
        self._loop = asyncio.get_running_loop()
        stream: asyncio.Queue[_Item] = asyncio.Queue()
        self._streams[request.request_id] = (request, stream)
        seed = stream_seed(request.sampling.seed, request.session_id, self._seed)
        finished = False
        try:
            # a worker that stops from here on tells the stream; one that has stopped is seen here
            self._check_alive()
            self._commands.put(lambda: self._scheduler.add(request, seed))
            while not finished:
                chunk = await stream.get()
                if isinstance(chunk, Exception):
                    raise chunk
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            del self._streams[request.request_id]
            if not finished:
                self._commands.put(lambda: self._abort(request.request_id))

    async def abort(self, request_id: str) -> None:
        self._commands.put(lambda: self._abort(request_id))

    def end_session(self, session_id: str) -> None:
        self._commands.put(lambda: self._scheduler.end_session(session_id))

    def load_now(self) -> EngineLoad:
        since = time.monotonic() - _RATE_WINDOW_SECONDS
        num_tokens = sum(count for when, count in tuple(self._rate) if when >= since)
        scheduler = self._scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            tokens_per_second=num_tokens / _RATE_WINDOW_SECONDS,
            kv_used_fraction=scheduler.num_cached / (scheduler.num_slots * scheduler.max_context),
        )

    async def close(self) -> None:
        """Ends all requests with `abort` and the worker with them."""
        self._commands.put(self._stop)
        await asyncio.to_thread(self._worker.join)

    # --- checks and preparation, off the step path --------------------------------------------

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RetryError("the engine is closed")

    def _check(self, request: GenerateRequest) -> None:
        self._check_alive()
        model = self._model
        check_request(
            request,
            version=model.version if model else 0,
            running=self._streams,
            max_context=self._scheduler.max_context,
            vocab_size=model.config.vocab_size if model else 0,
        )

    def _prepare(self, directory: Path, manifest: Manifest) -> tuple[Checkpoint, MixtureModel]:
        """Reads, checks and decodes new weights beside those that serve."""
        needs = _WEIGHTS_FOR.get(self._precision.activation_format, manifest.format)
        if manifest.format != needs:
            raise BadInputError(
                f"weights for {self._precision.activation_format} activations",
                expected=needs,
                found=manifest.format,
            )
        if manifest.version < 1:
            raise BadInputError("version", expected="at least 1", found=manifest.version)
        checkpoint = Checkpoint.read(directory, manifest)
        with torch.inference_mode():
            model = MixtureModel(checkpoint, self._precision)
            if self._model is None:
                _compile(model)
        if self._model is not None and model.config != self._model.config:
            raise BadInputError(
                f"architecture of version {manifest.version}",
                expected=self._model.config,
                found=model.config,
            )
        return checkpoint, model

    # --- the worker ---------------------------------------------------------------------------

    def _work(self) -> None:
        with torch.inference_mode():
            try:
                while not self._closed:
                    self._run_commands()
                    if not self._closed and self._scheduler.has_work:
                        self._step()
            except Exception as error:
                log.exception("the engine's worker failed")
                self._fail(f"the engine's worker failed: {error!r}")
            while not self._commands.empty():  # a load may wait for its switch
                self._commands.get_nowait()()

    def _run_commands(self) -> None:
        """All commands at hand; waits for one when there is nothing else to do."""
        if not self._scheduler.has_work:
            self._commands.get()()
        while not self._closed:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _step(self) -> None:
        model, cache = self._model, self._cache
        assert model is not None and cache is not None
        work = self._scheduler.schedule()
        batch = StepBatch.of([segment for _, segment in work])
        wants_routing = any(s.request.sampling.return_routed_experts for s, _ in work)
        routed_NxLxR = model.new_routing(len(batch.tokens_N)) if wants_routing else None
        hidden = model.hidden_states(batch, cache, routed_NxLxR)
        if routed_NxLxR is not None:
            _record_routing(work, batch, routed_NxLxR)
        complete = self._scheduler.computed(work)
        if not complete:
            return
        sequences = [work[index][0] for index in complete]
        logits = model.logits(hidden[torch.from_numpy(batch.last_rows[complete])])
        if not math.isfinite(logits.sum().item()):  # one that isn't spoils the sum
            raise FloatingPointError(f"version {model.version} gives logits that are not finite")
        drawn = draw(
            logits,
            [sequence.request.sampling for sequence in sequences],
            uniforms(
                np.array([sequence.seed for sequence in sequences], np.uint64),
                np.array([sequence.num_tokens for sequence in sequences]),
            ),
        )
        self._postprocess(sequences, drawn, model.version)

    def _postprocess(self, sequences: list[Running], drawn: Draw, version: int) -> None:
        finished, chunks = [], []
        columns = zip(
            sequences,
            drawn.tokens_B.tolist(),
            drawn.logp_B.tolist(),
            drawn.counts_B.tolist(),
            drawn.ids_BxC,
            drawn.logp_BxC,
            strict=True,
        )
        for sequence, token, logp, count, ids, candidate_logp in columns:
            record = sequence.record
            record.tokens.append(token)
            record.logp.append(logp)
            record.ids.append(ids[:count])
            record.candidate_logp.append(candidate_logp[:count])
            record.versions.append(version)
            reason = sequence.append(token, self._scheduler.max_context)
            if reason is not None:
                finished.append(sequence)
            if reason is not None or len(record) >= self._chunk_tokens:
                chunks.append((sequence.request, record.take(reason)))
        self._scheduler.finish(finished)  # first, so that a client finds its session free
        self._deliver(chunks)
        self._rate.append((time.monotonic(), len(sequences)))

    def _deliver(self, items: Sequence[tuple[GenerateRequest, _Item]]) -> None:
        """Hands items to the streams of their requests, waking the event loop once."""

        def put() -> None:
            for request, item in items:
                wanted, stream = self._streams.get(request.request_id, (None, None))
                if stream is not None and wanted is request:  # an id may be used again
                    stream.put_nowait(item)

        if items:
            self._call(put)

    def _call(self, action: Callable[[], object]) -> None:
        """Has the event loop do it."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            log.debug("the event loop has closed: nobody listens")

    def _abort(self, request_id: str) -> bool:
        """Whether the request was known."""
        found = self._scheduler.abort(request_id)
        if found is None:
            return False
        request, record = found
        self._deliver([(request, record.take(FinishReason.ABORT))])
        return True

    def _stop(self) -> None:
        self._closed = True
        for request, _ in tuple(self._streams.values()):
            if not self._abort(request.request_id):
                self._deliver([(request, Record().take(FinishReason.ABORT))])

    def _fail(self, reason: str) -> None:
        """From here on every call and every stream gets the same answer."""
        self._failure = DirtyProcessError(reason)
        self._deliver([(request, self._failure) for request, _ in tuple(self._streams.values())])
        self._closed = True
        self._commands.put(lambda: None)  # wakes a worker that waits
