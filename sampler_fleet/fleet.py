"""The gateway's core: turns go out to samplers, checked records come back, and survive a loss.

Owns the links to connected samplers, the Generator port of episodes, who waits for a place, and
what happens when a sampler dies, stalls or sends a record the loss cannot use. Routing is decided
in `router.py`, admission of samplers in `registry.py`. Must not know the wire format: the servicer
converts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

import numpy as np

from contracts.errors import BadInputError, DirtyProcessError, RetryError, check_name
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
from sampler_fleet.awake import AwakeClock
from sampler_fleet.config import FleetConfig
from sampler_fleet.cost import Cost
from sampler_fleet.engines.base import EngineLoad
from sampler_fleet.episodes.base import GeneratedChunk
from sampler_fleet.fingerprint import CheckpointIdentity
from sampler_fleet.link import Drain, EndSession, Expel, Link, SamplerGoneError, Turn
from sampler_fleet.metering import Metering
from sampler_fleet.places import Places, Target
from sampler_fleet.registry import Registry, SamplerPhase, measured_capacities
from sampler_fleet.router import Router

log = logging.getLogger(__name__)


MAX_FAILURES = 8  # requests in a row that a sampler could not serve, then it is expelled
BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0  # before the same sampler is tried again


class Fleet:
    """All samplers as one Generator. Everything runs on one event loop."""

    def __init__(
        self,
        config: FleetConfig,
        identity: CheckpointIdentity,
        *,
        metering: Metering | None = None,
        clock: Callable[[], float] = time.monotonic,
        clock_utc: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.registry = Registry(
            config.groups,
            model_fingerprint=identity.model_fingerprint,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            lease_seconds=config.lease_seconds,
        )
        self.router = Router(
            {purpose: config.shares(purpose) for purpose in Purpose}, kv_limit=config.kv_limit
        )
        self.metering = metering or Metering(config, clock_utc())
        self.targets: dict[str, Target] = {}  # by group, as the autoscaler says
        self.problems: dict[str, str] = {}  # why an edit of the run file is left out, and by whom
        self.counters: Counter[str] = Counter()
        self.num_tokens: Counter[str] = Counter()  # sampled, by group
        self._vocab_size = identity.vocab_size
        self._clock = clock
        self._clock_utc = clock_utc
        # of the samplers' silence; `keep_leases` reads it twice a heartbeat
        self._awake = AwakeClock(clock, longest_s=config.heartbeat_seconds)
        self._serials = itertools.count()
        self._links: dict[str, Link] = {}
        self.places = Places(config, self.registry, self.router, targets=self.targets, clock=clock)
        self._turns: Counter[str] = Counter()  # under way, by session
        self._own: set[str] = set()  # sessions of our own episodes

    # What samplers do.

    def join(self, info: SamplerInfo) -> Link:
        """Admits a sampler; raises as `Registry.register` does."""
        self.registry.register(info, self._awake())
        link = self._links[info.sampler_id] = Link(info.sampler_id)
        log.info("sampler %s joined %s with version %d", link.sampler_id, info.group, info.version)
        self._members_changed()
        return link

    def leave(self, link: Link, reason: str) -> None:
        """The stream of a sampler ended."""
        link.close(None)
        if self._links.get(link.sampler_id) is link:
            del self._links[link.sampler_id]
            self.registry.lose(link.sampler_id, reason)
            log.info("sampler %s left: %s", link.sampler_id, reason)
            self._members_changed()

    def heartbeat(
        self, link: Link, *, version: int, load: EngineLoad, switch: Switch | None = None
    ) -> None:
        known = self.registry.get(link.sampler_id)
        self.registry.heartbeat(
            link.sampler_id, version=version, load=load, now=self._awake(), switch=switch
        )
        if known and (
            known.version != version
            or load.kv_used_fraction < self.config.kv_limit <= known.load.kv_used_fraction
        ):
            self.places.changed()
        if known and known.switch != switch:
            for sampler_id, odd in self.registry.odd_weights(known.info.group):
                self.expel(self._links[sampler_id], "weights_refused", DirtyProcessError(odd))

    def drain(self, sampler_id: str, reason: str) -> None:
        """No new turns for a sampler; it leaves when it has finished what runs."""
        self.registry.drain(sampler_id, reason)
        log.info("sampler %s drains: %s", sampler_id, reason)
        if link := self._links.get(sampler_id):
            link.send(Drain(reason=reason))
        self._members_changed()

    def expel(self, link: Link, counter: str, error: Exception) -> None:
        """Ends the stream of a sampler that can't be believed; its process is to be replaced."""
        if link.closed:  # another of its turns said so
            return
        self.counters[counter] += 1
        log.error("sampler %s expelled (%s): %s", link.sampler_id, counter, error)
        link.close(DirtyProcessError(str(error)), last=Expel(reason=str(error)))
        self.leave(link, str(error))

    def failed(self, link: Link, request_id: str, error: Exception) -> None:
        """A sampler says that it could not serve a request. One that serves none goes: it would
        be the least loaded, and get them all."""
        sampler = self.registry.get(link.sampler_id)
        if sampler and sampler.phase == SamplerPhase.READY:
            link.num_failures += 1
        link.deliver(request_id, error)
        if link.num_failures >= MAX_FAILURES:
            self.expel(
                link,
                "samplers_failing",
                DirtyProcessError(f"{link.num_failures} requests in a row failed; last: {error}"),
            )

    def stop(self) -> None:
        """The gateway ends: samplers are told to come back."""
        for link in tuple(self._links.values()):
            link.close(RetryError("the gateway stops"))

    async def keep_leases(self) -> None:
        """Runs for as long as the gateway does: expires leases and abandoned sessions, and keeps
        the account of costs, once in a lease: a gateway that is killed loses no more of it."""
        write_at = self._clock()
        while True:
            await asyncio.sleep(self.config.heartbeat_seconds / 2)
            now = self._clock()
            for sampler_id in self.registry.expire(self._awake()):
                self.counters["leases_expired"] += 1
                log.warning("sampler %s lost: no heartbeat", sampler_id)
                if link := self._links.get(sampler_id):
                    link.close(RetryError("the lease expired; register again"))
                    self.leave(link, "no heartbeat")
            for session_id in self.router.idle(now - self.config.session_idle_seconds):
                if not self._turns[session_id]:
                    await self.end_session(session_id)
            self._update_shares()
            if now >= write_at:
                write_at = now + self.config.lease_seconds
                state = self.metering.state(self._clock_utc())
                await asyncio.to_thread(self.metering.write, state)

    def set_targets(self, targets: Mapping[str, Target]) -> None:
        """What the autoscaler wants; BadInputError names a group that does not exist."""
        for name in targets:
            self.config.group(name)
        self.targets |= targets
        self._members_changed()

    def costs(self) -> dict[str, Cost]:
        """What each group has cost since the run began."""
        return self.metering.read(self._clock_utc())

    # What episodes do.

    @contextlib.asynccontextmanager
    async def session(
        self, session_id: str, *, purpose: Purpose, min_version: int = 0
    ) -> AsyncIterator[None]:
        """A place for a session, as long as the block lasts; waits for one, first come first
        served.

        After a start of the gateway nobody gets one before every group is there (for up to
        `assemble_seconds`), so that the first samplers to join don't get everything.

        Raises:
            BadInputError: no group serves this purpose.
        """
        self.places.check(purpose)
        self._own.add(session_id)
        try:
            await self.places.take(session_id, purpose=purpose, min_version=min_version)
            yield
        finally:
            self._own.discard(session_id)
            await self.end_session(session_id)

    def is_own(self, session_id: str) -> bool:
        """Whether the session is of an episode of this gateway, and nobody else's."""
        return session_id in self._own

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GeneratedChunk, None]:
        """Streams checked chunks; a sampler's loss in mid-turn is continued in its group.

        Raises:
            BadInputError: the request itself is at fault.
            RetryError: nobody in its group could finish it in time.
        """
        self._check_request(request)
        turn, avoid = Turn(request, self._serials), set[str]()
        self._turns[request.session_id] += 1
        try:
            for attempt in range(self.config.max_failovers + 1):
                route = await self.places.turn(
                    request.session_id,
                    purpose=request.purpose,
                    min_version=request.min_version,
                    avoid=avoid,
                )
                if route.sampler_id in avoid:  # the only one there is
                    await asyncio.sleep(min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S))
                link = self._links.get(route.sampler_id)
                if link is None:  # it left meanwhile
                    continue
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
                    self._turn_done(request)
                    return
                except SamplerGoneError as error:
                    avoid.add(route.sampler_id)
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
                    self._turn_done(request)
                    return
            raise RetryError(
                f"request {request.request_id}: {self.config.max_failovers + 1} samplers could not "
                "finish it"
            )
        finally:
            self._turn_over(request.session_id)
            if request.ends_session:
                await self.end_session(request.session_id)  # unless it has ended well

    def _turn_over(self, session_id: str) -> None:
        self.router.touch(session_id, self._clock())
        self._turns[session_id] -= 1
        if not self._turns[session_id]:
            del self._turns[session_id]

    def _turn_done(self, request: GenerateRequest) -> None:
        self.counters["turns_completed"] += 1
        if request.ends_session and self.router.end(request.session_id):
            self.places.changed()  # a place is free; the sampler was told with the request

    async def end_session(self, session_id: str) -> None:
        """Frees the session's place and its KV cache."""
        held = self.router.end(session_id)
        if held is None:
            return
        if link := self._links.get(held.sampler_id):
            link.send(EndSession(session_id=session_id))
        self.places.changed()  # a place is free

    def _check_request(self, request: GenerateRequest) -> None:
        """Refuses what no sampler could serve, so that none is blamed for it."""
        check_name("request id", request.request_id)
        check_name("session id", request.session_id)
        self.places.check(request.purpose)
        tokens, most = request.tokens, self.config.max_context_tokens - 1
        rule = f"request {request.request_id}"
        if len(tokens) > most:
            raise BadInputError(rule, expected=f"at most {most} tokens", found=len(tokens))
        if not len(tokens) or int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise BadInputError(
                rule,
                expected=f"tokens from 0 to {self._vocab_size - 1}, at least one",
                found=f"{len(tokens)} tokens"
                + (f" from {int(tokens.min())} to {int(tokens.max())}" if len(tokens) else ""),
            )

    async def _receive(
        self, link: Link, inbox: asyncio.Queue[Completion | Exception], turn: Turn
    ) -> AsyncGenerator[Completion, None]:
        """The checked chunks of one request on one sampler, up to its last.

        Raises SamplerGoneError when it ends early; an unusable record or silence expels the
        sampler first. Tokens of a chunk that was refused are not kept.
        """
        while True:
            item = await self._next_item(link, inbox)
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
            if item.finish_reason is not None:
                link.num_failures = 0
            yield item
            if item.finish_reason is not None:
                return

    async def _next_item(
        self, link: Link, inbox: asyncio.Queue[Completion | Exception]
    ) -> Completion | Exception:
        """What the sampler sends next; its silence expels it, and raises SamplerGoneError."""
        stall_s = self.config.stall_seconds
        deadline = self._awake() + stall_s
        while (left := deadline - self._awake()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await inbox.get()
        error = RetryError(f"no token for {stall_s:g} s")
        self.expel(link, "samplers_stalled", error)
        raise SamplerGoneError(f"sampler {link.sampler_id}: {error}")

    def _check_record(self, completion: Completion, sampler_id: str, turn: Turn) -> None:
        check_completion(
            completion,
            sampler_id=sampler_id,
            truncates=turn.truncates,
            num_given=turn.num_tokens,
        )
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
        newest = max((span.version for span in completion.spans), default=0)
        self.registry.check_version(rule, newest)
        for name, ids in (("tokens", completion.tokens), ("candidates", completion.candidates.ids)):
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size):
                raise BadInputError(
                    rule,
                    expected=f"{name} from 0 to {self._vocab_size - 1}",
                    found=f"{int(ids.min())} to {int(ids.max())}",
                )

    def _members_changed(self) -> None:
        """Samplers came, went or are asked for: who may serve, who gets what, and who bills."""
        held = {name: target.num_held for name, target in self.targets.items()}
        self.metering.hold(
            self.registry,
            {name: num for name, num in held.items() if num is not None},
            self._clock_utc(),
        )
        self._update_shares()
        self.places.changed()

    def _update_shares(self) -> None:
        """Where capacity is measured, shares follow what the ready samplers can draw."""
        for purpose in Purpose:
            groups = [g for g in self.config.groups if g.purpose == purpose]
            if any(group.capacity == "measured" for group in groups):
                measured = measured_capacities(
                    {g.name: self.registry.ready(g.name) for g in groups}
                )
                self.router.shares[purpose] = self.config.shares(purpose, measured)


def _empty(reason: FinishReason) -> Completion:
    return Completion(
        tokens=np.zeros(0, np.int32),
        sampler_logp=np.zeros(0, np.float32),
        candidates=CandidateSets.empty(),
        spans=(),
        finish_reason=reason,
    )
