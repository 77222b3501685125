"""The gateway's core: turns go out to samplers, checked records come back, and survive a loss.

Owns the links to connected samplers, the Generator port of episodes, and what happens when a
sampler dies, stalls or sends a record the loss cannot use. Routing is decided in `router.py`,
admission in `registry.py`. Must not know the wire format: the servicer converts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from contracts.errors import BadInputError, DirtyProcessError, RetryError
from contracts.types import (
    CandidateSets,
    Completion,
    FinishReason,
    GenerateRequest,
    Purpose,
    SamplerInfo,
    Switch,
    check_completion,
)
from sampler_fleet.config import FleetConfig
from sampler_fleet.engines.base import EngineLoad
from sampler_fleet.episodes.base import GeneratedChunk
from sampler_fleet.fingerprint import CheckpointIdentity
from sampler_fleet.registry import Registry
from sampler_fleet.router import Route, Router

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Abort:
    request_id: str


@dataclass(frozen=True, kw_only=True)
class EndSession:
    session_id: str


@dataclass(frozen=True, kw_only=True)
class Drain:
    reason: str


@dataclass(frozen=True, kw_only=True)
class Expel:
    reason: str


Command = GenerateRequest | Abort | EndSession | Drain | Expel


class SamplerGoneError(RetryError):
    """The sampler cannot finish this request; another one continues it."""


class Link:
    """One connected sampler: commands out, records in, until it is closed with a reason."""

    def __init__(self, sampler_id: str) -> None:
        self.sampler_id = sampler_id
        self.error: Exception | None = None
        self._commands: asyncio.Queue[Command | None] = asyncio.Queue()
        self._inboxes: dict[str, asyncio.Queue[Completion | Exception]] = {}
        self.closed = False

    def send(self, command: Command) -> None:
        if not self.closed:
            self._commands.put_nowait(command)

    async def next_command(self) -> Command | None:
        """The next command to write; None once the link is closed."""
        return await self._commands.get()

    @contextlib.contextmanager
    def request(self, request: GenerateRequest) -> Iterator[asyncio.Queue[Completion | Exception]]:
        """Sends a request and yields its inbox; aborts it unless its last chunk was taken."""
        inbox: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        self._inboxes[request.request_id] = inbox
        self.send(request)
        if self.closed:
            inbox.put_nowait(SamplerGoneError(f"sampler {self.sampler_id} left"))
        try:
            yield inbox
        finally:
            if self._inboxes.pop(request.request_id, None):
                self.send(Abort(request_id=request.request_id))

    def deliver(self, request_id: str, item: Completion | Exception) -> None:
        """Hands a chunk or a failure to its request; one nobody waits for any more is dropped."""
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return
        if isinstance(item, Exception) or item.finish_reason is not None:
            del self._inboxes[request_id]  # the sampler is done with it: nothing to abort
        inbox.put_nowait(item)

    def close(self, error: Exception | None, *, last: Command | None = None) -> None:
        """Ends the link after one `last` command; requests in flight on it go elsewhere."""
        if self.closed:
            return
        self.closed = True
        self.error = error
        for inbox in self._inboxes.values():
            inbox.put_nowait(SamplerGoneError(f"sampler {self.sampler_id}: {error or 'it left'}"))
        self._inboxes.clear()
        while not self._commands.empty():
            self._commands.get_nowait()
        for command in (last, None) if last else (None,):
            self._commands.put_nowait(command)


class _Turn:
    """One reply as it grows, over the samplers that contribute to it."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._tokens = [request.tokens]
        self._num_attempts = 0
        self.num_sampled = 0
        self.truncates = request.sampling.truncates
        self.min_version = request.min_version

    @property
    def num_remaining(self) -> int:
        return self._request.sampling.max_new_tokens - self.num_sampled

    def next_request(self) -> GenerateRequest:
        """The request that continues the grown buffer, under an id of its own.

        Its seed differs, so that a continuation doesn't draw with the numbers already used.
        """
        attempt = self._num_attempts
        self._num_attempts += 1
        sampling = self._request.sampling
        return dataclasses.replace(
            self._request,
            request_id=f"{self._request.request_id}~{attempt}",
            tokens=np.concatenate(self._tokens) if self.num_sampled else self._request.tokens,
            sampling=dataclasses.replace(
                sampling,
                max_new_tokens=self.num_remaining,
                seed=(sampling.seed + attempt * 0x9E3779B97F4A7C15) % 2**64,
            ),
        )

    def extend(self, completion: Completion) -> None:
        if len(completion):
            self._tokens.append(completion.tokens)
            self.num_sampled += len(completion)

    def ending(self) -> FinishReason | None:
        """Why the reply is over although its last chunk was lost, if it is."""
        if self.num_sampled and int(self._tokens[-1][-1]) in self._request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_remaining <= 0 else None


class Fleet:
    """All samplers as one Generator. Everything runs on one event loop."""

    def __init__(
        self,
        config: FleetConfig,
        identity: CheckpointIdentity,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.registry = Registry(
            config.groups,
            model_fingerprint=identity.model_fingerprint,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            lease_seconds=config.lease_seconds,
        )
        self.router = Router({purpose: config.shares(purpose) for purpose in Purpose})
        self.counters: Counter[str] = Counter()
        self.num_tokens: Counter[str] = Counter()  # sampled, by group
        self._vocab_size = identity.vocab_size
        self._clock = clock
        self._started = clock()
        self._links: dict[str, Link] = {}
        self._change = asyncio.Event()

    # What samplers do.

    def join(self, info: SamplerInfo) -> Link:
        """Admits a sampler; raises as `Registry.register` does."""
        self.registry.register(info, self._clock())
        link = self._links[info.sampler_id] = Link(info.sampler_id)
        log.info("sampler %s joined %s with version %d", link.sampler_id, info.group, info.version)
        self._notify()
        return link

    def leave(self, link: Link, reason: str) -> None:
        """The stream of a sampler ended."""
        link.close(None)
        if self._links.get(link.sampler_id) is link:
            del self._links[link.sampler_id]
            self.registry.lose(link.sampler_id, reason)
            log.info("sampler %s left: %s", link.sampler_id, reason)
            self._notify()

    def heartbeat(
        self, link: Link, *, version: int, load: EngineLoad, switch: Switch | None = None
    ) -> None:
        known = self.registry.get(link.sampler_id)
        self.registry.heartbeat(
            link.sampler_id, version=version, load=load, now=self._clock(), switch=switch
        )
        if known and known.version != version:
            self._notify()

    def drain(self, sampler_id: str, reason: str) -> None:
        """No new turns for a sampler; it leaves when it has finished what runs."""
        self.registry.drain(sampler_id, reason)
        log.info("sampler %s drains: %s", sampler_id, reason)
        if link := self._links.get(sampler_id):
            link.send(Drain(reason=reason))
        self._notify()

    def expel(self, link: Link, counter: str, error: Exception) -> None:
        """Ends the stream of a sampler that can't be believed; its process is to be replaced."""
        self.counters[counter] += 1
        log.error("sampler %s expelled (%s): %s", link.sampler_id, counter, error)
        link.close(DirtyProcessError(str(error)), last=Expel(reason=str(error)))
        self.leave(link, str(error))

    def stop(self) -> None:
        """The gateway ends: samplers are told to come back."""
        for link in tuple(self._links.values()):
            link.close(RetryError("the gateway stops"))

    async def keep_leases(self) -> None:
        """Runs for as long as the gateway does: expires leases and abandoned sessions."""
        while True:
            await asyncio.sleep(self.config.heartbeat_seconds / 2)
            now = self._clock()
            for sampler_id in self.registry.expire(now):
                self.counters["leases_expired"] += 1
                log.warning("sampler %s lost: no heartbeat", sampler_id)
                if link := self._links.get(sampler_id):
                    link.close(RetryError("the lease expired; register again"))
                    self.leave(link, "no heartbeat")
            for session_id in self.router.idle(now - self.config.session_idle_seconds):
                await self.end_session(session_id)

    # What episodes do.

    async def wait_until_ready(self, purpose: Purpose, *, min_version: int = 0) -> None:
        """Returns when a session of this purpose can start.

        After a start of the gateway it waits for every group (up to `assemble_seconds`), so that
        the first samplers to join don't get everything.
        """
        shares = self.config.shares(purpose)
        if not shares:
            raise BadInputError(
                f"purpose {purpose}", expected="a sampler group that serves it", found="none"
            )
        while True:
            ready = [
                group
                for group in shares
                if any(s.version >= min_version for s in self.registry.ready(group))
            ]
            patience = self._started + self.config.assemble_seconds - self._clock()
            if len(ready) == len(shares) or (ready and patience <= 0):
                return
            await self._changed(patience if ready else None)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GeneratedChunk, None]:
        """Streams checked chunks; a sampler's loss in mid-turn is continued in its group.

        Raises:
            BadInputError: the request itself is at fault.
            RetryError: nobody in its group could finish it in time.
        """
        self._check_request(request)
        turn = _Turn(request)
        for _ in range(self.config.max_failovers + 1):
            route = await self._route(request)
            link = self._links[route.sampler_id]
            try:
                with link.request(turn.next_request()) as inbox:
                    async with contextlib.aclosing(self._receive(link, inbox, turn)) as chunks:
                        async for completion in chunks:
                            self.num_tokens[route.group] += len(completion)
                            yield GeneratedChunk(
                                completion=completion,
                                group=route.group,
                                sampler_id=route.sampler_id,
                            )
                self.counters["turns_completed"] += 1
                return
            except SamplerGoneError as error:
                self.counters["failovers"] += 1
                log.warning(
                    "request %s continues after %d tokens: %s",
                    request.request_id,
                    turn.num_sampled,
                    error,
                )
            if reason := turn.ending():
                yield GeneratedChunk(
                    completion=_empty(reason), group=route.group, sampler_id=route.sampler_id
                )
                self.counters["turns_completed"] += 1
                return
        raise RetryError(
            f"request {request.request_id}: {self.config.max_failovers + 1} samplers could not "
            "finish it"
        )

    async def end_session(self, session_id: str) -> None:
        """Frees the session's place and its KV cache."""
        held = self.router.end(session_id)
        if held and (link := self._links.get(held.sampler_id)):
            link.send(EndSession(session_id=session_id))

    def _check_request(self, request: GenerateRequest) -> None:
        tokens = request.tokens
        if not len(tokens) or int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise BadInputError(
                f"request {request.request_id}",
                expected=f"tokens from 0 to {self._vocab_size - 1}, at least one",
                found=f"{len(tokens)} tokens"
                + (f" from {int(tokens.min())} to {int(tokens.max())}" if len(tokens) else ""),
            )

    async def _route(self, request: GenerateRequest) -> Route:
        """A place for the turn; waits out the grace period when there is none."""
        deadline = None
        while True:
            now = self._clock()
            decision = self.router.route(
                request.session_id,
                self.registry,
                purpose=request.purpose,
                min_version=request.min_version,
                now=now,
            )
            if isinstance(decision, Route):
                return decision
            deadline = now + self.config.grace_seconds if deadline is None else deadline
            if now >= deadline:
                raise RetryError(f"session {request.session_id}: {decision.reason}")
            await self._changed(deadline - now)

    async def _receive(
        self, link: Link, inbox: asyncio.Queue[Completion | Exception], turn: _Turn
    ) -> AsyncGenerator[Completion, None]:
        """The checked chunks of one request on one sampler, up to its last.

        Raises SamplerGoneError when it ends early; an unusable record or silence expels the
        sampler first. Tokens of a chunk that was refused are not kept.
        """
        while True:
            try:
                async with asyncio.timeout(self.config.stall_seconds):
                    item = await inbox.get()
            except TimeoutError:
                error = RetryError(f"no token for {self.config.stall_seconds:g} s")
                self.expel(link, "samplers_stalled", error)
                raise SamplerGoneError(f"sampler {link.sampler_id}: {error}") from None
            if isinstance(item, Exception):
                raise item
            try:
                self._check_record(item, link.sampler_id, turn)
            except BadInputError as error:
                self.expel(link, "records_refused", error)
                raise SamplerGoneError(str(error)) from None
            turn.extend(item)
            if item.finish_reason == FinishReason.ABORT:
                if len(item):
                    yield dataclasses.replace(item, finish_reason=None)
                raise SamplerGoneError(f"sampler {link.sampler_id} gave the request up")
            yield item
            if item.finish_reason is not None:
                return

    def _check_record(self, completion: Completion, sampler_id: str, turn: _Turn) -> None:
        check_completion(completion, sampler_id=sampler_id, truncates=turn.truncates)
        rule = f"record from sampler {sampler_id}"
        if len(completion) > turn.num_remaining:
            raise BadInputError(
                rule, expected=f"at most {turn.num_remaining} more tokens", found=len(completion)
            )
        oldest = min((span.version for span in completion.spans), default=turn.min_version)
        if oldest < turn.min_version:
            raise BadInputError(
                rule, expected=f"version {turn.min_version} or newer, as asked", found=oldest
            )
        for name, ids in (("tokens", completion.tokens), ("candidates", completion.candidates.ids)):
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size):
                raise BadInputError(
                    rule,
                    expected=f"{name} from 0 to {self._vocab_size - 1}",
                    found=f"{int(ids.min())} to {int(ids.max())}",
                )

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _changed(self, timeout_s: float | None) -> None:
        """Returns after the next change of the registry, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()


def _empty(reason: FinishReason) -> Completion:
    return Completion(
        tokens=np.zeros(0, np.int32),
        sampler_logp=np.zeros(0, np.float32),
        candidates=CandidateSets.empty(),
        spans=(),
        finish_reason=reason,
    )
