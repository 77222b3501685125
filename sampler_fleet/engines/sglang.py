"""The engine port in front of a real SGLang server, 0.5.23: one that runs, or one it starts.

Owns the streams, the order of a switch of weights and its verification. What the server's JSON
means is in `sglang_wire.py`, how it is started in `launch.py`. Must not import SGLang: the server
has a process, and mostly an environment, of its own.

The server's prefix cache outlives a switch, so that running requests and sessions go on with the
KV cache they have. A session that begins later must not find what other weights computed: every
request carries a key of the weights under which its session began, and only equal keys share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from contracts.errors import BadInputError, DirtyProcessError, RetryError
from contracts.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    WeightFormat,
)
from sampler_fleet.engines import sglang_wire as wire
from sampler_fleet.engines.base import EngineLoad, check_request
from sampler_fleet.engines.checkpoint import Checkpoint
from sampler_fleet.engines.launch import LocalServer
from sampler_fleet.engines.sampling import stream_seed
from sampler_fleet.engines.sglang_http import SglangHttp
from sampler_fleet.engines.sglang_weights import (
    Checksums,
    check_has_place,
    check_same_tensors,
    wrong_modules,
)

log = logging.getLogger(__name__)

_UPDATE_S = 1800.0  # reading a large checkpoint from a slow disk
_PROBE_S = 600.0  # an attached server may have no place for one more request at once
_CLOSE_S = 5.0  # for aborted requests to end by themselves
_RATE_WINDOW_SECONDS = 5.0
_PROBE_TOKENS = 32
_NOTHING = Completion.concatenate([])


@dataclass
class _Session:
    cache_key: str
    num_tokens: int = 0  # of its buffer, as far as computed
    num_routed: int = 0  # of its buffer, whose experts were sent


@dataclass
class _Run:
    """A request at the server, under an id of the engine's own: an id may be used again."""

    request: GenerateRequest
    session: _Session
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    response: aiohttp.ClientResponse | None = None
    num_tokens: int = 0  # received
    routed_start: int = 0  # first token whose experts are asked for
    aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _Limits:
    """What the server says of itself."""

    max_support: int
    num_cache_tokens: int
    label_lag: int  # see `sglang_wire.Labels`


class SglangEngine:
    """An `Engine` (see `base.py`) in another process.

    Args:
        server: address of a server that runs, which stays afterwards and serves nobody else; or a
            server to start with the first weights and to end with this engine.
        weight_format: the only one it loads.
        max_context_tokens: longer buffers are refused, replies end there.
        seed: for requests without a seed of their own. Seeds count only where the server runs with
            `--enable-deterministic-inference`.
        chunk_tokens: a stream delivers at least this often.
        returns_routed_experts: whether requests may ask for them; the server has to be started
            with `--enable-return-routed-experts`. They come with a reply's last chunk.
    """

    def __init__(
        self,
        server: str | LocalServer,
        *,
        weight_format: WeightFormat,
        max_context_tokens: int,
        seed: int = 0,
        chunk_tokens: int = 8,
        returns_routed_experts: bool = False,
    ) -> None:
        self._server = server
        self._weight_format = weight_format
        self._max_context = max_context_tokens
        self._seed = seed
        self._chunk_tokens = chunk_tokens
        self._returns_routed_experts = returns_routed_experts
        self._routing: wire.Routing | None = None  # of the weights, where it is returned
        self._http: SglangHttp | None = None
        self._limits = _Limits(max_support=0, num_cache_tokens=1, label_lag=0)
        self._num_vocab = 0
        self._manifest: Manifest | None = None  # of the weights that are served
        self._held: Checksums = ()
        self._versions: set[int] = set()  # labels that the server may use
        self._cache_key = uuid.uuid4().hex  # of sessions that begin now
        self._sessions: dict[str, _Session] = {}
        self._runs: dict[str, _Run] = {}
        self._rate: deque[tuple[float, int]] = deque(maxlen=4096)
        self._load_lock = asyncio.Lock()
        self._weights_checksum = ""
        self._aborts: set[asyncio.Task[None]] = set()
        self._failure = ""  # why the process is to be replaced
        self._closed = False

    # --- the port -----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._manifest.version if self._manifest else 0

    @property
    def weights_checksum(self) -> str:
        return self._weights_checksum

    async def load(self, directory: Path, manifest: Manifest) -> float:
        async with self._load_lock:
            self._check_alive()
            num_vocab = await asyncio.to_thread(self._check_files, Path(directory), manifest)
            started = await self._connect(Path(directory), manifest)
            held = self._held or await self._checksums()
            check_has_place(manifest, held)
            before, self._held = self._manifest, held
            self._versions.add(manifest.version)
            try:
                pause_s = 0.0 if started else await self._switch(Path(directory), manifest)
                self._manifest, self._num_vocab = manifest, num_vocab
                await self._verify(before)
            except (DirtyProcessError, RetryError) as error:
                raise self._fail(f"version {manifest.version}: {error}") from error
            log.info(
                "version %d (%s): decoding paused for %.3f s",
                manifest.version,
                manifest.format,
                pause_s,
            )
            return pause_s

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        self._check(request)
        session = self._sessions.setdefault(request.session_id, _Session(self._cache_key))
        run = self._runs[request.request_id] = _Run(request, session)
        finished = False
        try:
            async with contextlib.aclosing(self._chunks(run)) as chunks:
                async for chunk in chunks:
                    finished = chunk.finish_reason is not None
                    yield chunk
        finally:
            del self._runs[request.request_id]
            run.ended.set()
            if not finished:
                self._abort_soon(run)

    async def abort(self, request_id: str) -> None:
        if run := self._runs.get(request_id):
            await self._abort(run)

    def end_session(self, session_id: str) -> None:
        """The server's cache drops what nobody uses by itself, the least recently used first."""
        self._sessions.pop(session_id, None)

    def load_now(self) -> EngineLoad:
        """KV in use is what all open sessions would fill; prefixes that they share count twice."""
        since = time.monotonic() - _RATE_WINDOW_SECONDS
        num_tokens = sum(count for when, count in self._rate if when >= since)
        num_running = sum(1 for run in self._runs.values() if run.num_tokens)
        num_cached = sum(session.num_tokens for session in self._sessions.values())
        return EngineLoad(
            num_running=num_running,
            num_waiting=len(self._runs) - num_running,
            tokens_per_second=num_tokens / _RATE_WINDOW_SECONDS,
            kv_used_fraction=min(1.0, num_cached / self._limits.num_cache_tokens),
        )

    async def close(self) -> None:
        """Ends all requests with `abort`, and the server if this engine started it."""
        self._closed = True
        runs = list(self._runs.values())
        await asyncio.gather(*(self._abort(run) for run in runs))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*(run.ended.wait() for run in runs), *self._aborts)
        for task in self._aborts:
            task.cancel()
        if self._http is not None:
            await self._http.close()
        if isinstance(self._server, LocalServer):
            await self._server.stop()

    # --- checks -------------------------------------------------------------------------------

    @property
    def _api(self) -> SglangHttp:
        assert self._http is not None, "load has connected"
        return self._http

    def _check_alive(self) -> None:
        if self._failure:
            raise DirtyProcessError(self._failure)
        if self._closed:
            raise RetryError("the engine is closed")

    def _check(self, request: GenerateRequest) -> None:
        self._check_alive()
        check_request(
            request,
            version=self.version,
            running=self._runs,
            max_context=self._max_context,
            vocab_size=self._num_vocab,
        )
        if request.sampling.return_routed_experts and not self._returns_routed_experts:
            raise BadInputError(
                f"request {request.request_id}, return_routed_experts",
                expected="false, or a run with sampling.return_routed_experts",
                found=True,
            )

    def _check_files(self, directory: Path, manifest: Manifest) -> int:
        """Refuses what the server would take without a word; returns the vocabulary's size.

        Every byte is read and compared with its checksum, one file at a time, which also brings
        the files into memory before decoding has to wait for them.
        """
        if manifest.format != self._weight_format:
            raise BadInputError(
                "format of the weights", expected=self._weight_format, found=manifest.format
            )
        if manifest.version < 1:
            raise BadInputError("version", expected="at least 1", found=manifest.version)
        if self._manifest is not None:
            check_same_tensors(self._manifest, manifest)
        config: dict[str, Any] = {}
        for file in sorted({tensor.file for tensor in manifest.tensors}):
            tensors = tuple(tensor for tensor in manifest.tensors if tensor.file == file)
            config = Checkpoint.read(directory, replace(manifest, tensors=tensors)).config
        if not isinstance(num_vocab := config.get("vocab_size"), int):
            raise BadInputError(
                f"config.json of version {manifest.version}",
                expected="a vocab_size",
                found=num_vocab,
            )
        if self._returns_routed_experts:
            self._routing = wire.Routing.of(config)
        return num_vocab

    # --- the switch of weights ----------------------------------------------------------------

    async def _connect(self, directory: Path, manifest: Manifest) -> bool:
        """The first time: reaches the server. True if it was started with these very weights."""
        if self._http is not None:
            return False
        address, started = self._server, False
        if isinstance(address, LocalServer):
            try:
                await address.start(directory, manifest.version)
            except DirtyProcessError as error:
                raise self._fail(str(error)) from error
            address, started = address.address, True
        http = self._http = SglangHttp(address)
        try:
            self._limits = self._limits_of(await http.get("/server_info"))
        except (BadInputError, RetryError):
            self._http = None
            await http.close()
            raise
        return started

    def _limits_of(self, info: wire.Json) -> _Limits:
        """Raises BadInputError if the server was started in a way that does not fit."""
        wanted = ["incremental_streaming_output", "skip_tokenizer_init"]
        if self._returns_routed_experts:
            wanted.append("enable_return_routed_experts")
        for name in wanted:
            if info.get(name) is not True:
                flag = f"--{name.replace('_', '-')}"
                raise BadInputError("SGLang server", expected=f"started with {flag}", found="not")
        if info["max_req_input_len"] < self._max_context:
            raise BadInputError(
                "SGLang server",
                expected=f"room for {self._max_context} tokens",
                found=f"max_req_input_len {info['max_req_input_len']}",
            )
        return _Limits(
            max_support=info["sampling_mask_max_tokens"],
            num_cache_tokens=info["max_total_num_tokens"],
            label_lag=0 if info["disable_overlap_schedule"] else 1,
        )

    async def _switch(self, directory: Path, manifest: Manifest) -> float:
        """Seconds for which nothing was decoded. Whatever goes wrong here leaves it paused."""
        start = time.perf_counter()
        await self._api.post("/pause_generation", {"mode": "in_place"})
        update = {
            "model_path": str(directory.resolve()),
            "weight_version": str(manifest.version),
            "flush_cache": False,  # it would fail while requests run, with the weights changed
        }
        self._cache_key = uuid.uuid4().hex
        reply = await self._api.post("/update_weights_from_disk", update, timeout_s=_UPDATE_S)
        if not reply.get("success"):
            raise DirtyProcessError(f"SGLang's update failed: {reply.get('message')}")
        await self._api.post("/continue_generation", {})
        return time.perf_counter() - start

    async def _verify(self, before: Manifest | None) -> None:
        """Raises DirtyProcessError unless the server holds this version, which came after that."""
        manifest, held = self._manifest, self._held
        assert manifest is not None, "set by load"
        label = (await self._api.get("/model_info"))["weight_version"]
        if label != str(manifest.version):
            raise DirtyProcessError(f"SGLang serves {label!r} after the update")
        self._held = await self._checksums()
        wrong = wrong_modules(before, manifest, held, self._held) if before else []
        if wrong:
            raise DirtyProcessError(
                f"{len(wrong)} modules changed in the server but not in the checkpoint, or the "
                f"other way round; first {wrong[0]}"
            )
        probe = await self._api.post("/generate", self._probe(), timeout_s=_PROBE_S)
        entries = probe["meta_info"]["input_token_logprobs"][1:]
        values = [math.nan if entry[0] is None else entry[0] for entry in entries]
        if not values or not all(math.isfinite(value) for value in values):
            raise DirtyProcessError("the log-probs of a known prompt are not finite")
        log.info("known prompt: mean log-prob %.4f", sum(values) / len(values))

    def _probe(self) -> wire.Json:
        """A prompt that is always the same, computed anew each time."""
        return {
            "rid": uuid.uuid4().hex,
            "input_ids": list(range(1, 1 + _PROBE_TOKENS)),
            "extra_key": uuid.uuid4().hex,
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0},
        }

    async def _checksums(self) -> Checksums:
        reply = await self._api.post(
            "/weights_checker", {"action": "checksum"}, timeout_s=_UPDATE_S
        )
        if not reply.get("success"):
            raise DirtyProcessError(f"SGLang has no checksums: {reply.get('message')}")
        self._weights_checksum = str(reply.get("per_engine_checksum") or "")
        return tuple(rank["checksums"] for rank in reply["ranks"])

    # --- requests -----------------------------------------------------------------------------

    async def _chunks(self, run: _Run) -> AsyncGenerator[Completion, None]:
        """Parts of at least `chunk_tokens`, and the last one, however the reply ends."""
        parts: list[Completion] = []
        labels = wire.Labels(self._limits.label_lag)
        try:
            async with contextlib.aclosing(self._replies(run)) as replies:
                async for reply in replies:
                    part = wire.read_reply(
                        reply, labels=labels, truncates=run.request.sampling.truncates
                    )
                    part = self._with_routing(run, part, reply)
                    self._note(run, part)
                    parts.append(part)
                    if part.finish_reason or sum(map(len, parts)) >= self._chunk_tokens:
                        yield Completion.concatenate(parts)
                        parts.clear()
                    if part.finish_reason:
                        if labels.num_corrected:
                            name, num = run.request.request_id, labels.num_corrected
                            log.warning("%s: %d tokens went out with a later version", name, num)
                        return
            error = RetryError("SGLang ended a reply without saying why")
        except DirtyProcessError as failure:
            raise self._fail(str(failure)) from failure
        except RetryError as failure:
            error = failure
        if self._failure:
            raise DirtyProcessError(self._failure) from error
        if run.aborted or self._closed:
            yield replace(
                Completion.concatenate([*parts, _NOTHING]), finish_reason=FinishReason.ABORT
            )
            return
        if isinstance(self._server, LocalServer) and self._server.ended:
            raise self._fail("SGLang has ended") from error
        raise error

    def _with_routing(self, run: _Run, part: Completion, reply: wire.Json) -> Completion:
        """The part with the experts that its event tells of, if the request asked for them."""
        if self._routing is None or not run.request.sampling.return_routed_experts:
            return part
        routed = self._routing.read(reply["meta_info"], run.routed_start)
        if routed:
            run.session.num_routed = routed[-1].end
        return replace(part, routed_experts=routed)

    def _note(self, run: _Run, part: Completion) -> None:
        """Counts the part. Raises DirtyProcessError if other weights than ours made it."""
        for span in part.spans:
            if span.version not in self._versions:
                raise DirtyProcessError(f"SGLang serves version {span.version}, which is not ours")
        self._rate.append((time.monotonic(), len(part)))
        run.num_tokens += len(part)
        run.session.num_tokens = len(run.request.tokens) + run.num_tokens

    async def _replies(self, run: _Run) -> AsyncGenerator[wire.Json, None]:
        """The server's JSON, event by event; one alone where the reply is short enough."""
        request = run.request
        num_new = min(request.sampling.max_new_tokens, self._max_context - len(request.tokens))
        stream = request.sampling.truncates or num_new > self._chunk_tokens
        body = wire.request_body(
            request,
            rid=run.rid,
            cache_key=run.session.cache_key,
            seed=stream_seed(request.sampling.seed, request.session_id, self._seed),
            num_new=num_new,
            num_vocab=self._num_vocab,
            max_support=self._limits.max_support,
            stream=stream,
        )
        if request.sampling.return_routed_experts:
            if len(request.tokens) >= run.session.num_tokens:  # what earlier turns sent stays true
                run.routed_start = run.session.num_routed
            body |= wire.routing_fields(run.routed_start)
        async with self._api.stream("/generate", body) as run.response:
            if not stream:
                yield await run.response.json()
                return
            async for reply in wire.events(run.response.content.iter_any()):
                yield reply

    async def _abort(self, run: _Run) -> None:
        run.aborted = True
        try:
            await self._api.post("/abort_request", {"rid": run.rid})
        except RetryError as error:
            log.warning("abort of %s: %s", run.request.request_id, error)

    def _abort_soon(self, run: _Run) -> None:
        """Without waiting: the caller may be on its way out."""
        if not self._closed:
            task = asyncio.get_running_loop().create_task(self._abort(run))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def _fail(self, reason: str) -> DirtyProcessError:
        """From here on every call and every stream gets the same answer."""
        self._failure = self._failure or reason
        for run in self._runs.values():
            if run.response is not None:
                run.response.close()
        return DirtyProcessError(self._failure)
