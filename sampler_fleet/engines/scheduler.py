"""Which tokens the next step computes, and what each session's KV cache holds.

Owns sessions, their slots, waiting and running requests, prefix reuse, eviction and the record of
what was sampled. Must not compute: the engine runs the segments that `schedule` returns and gives
the drawn tokens back. Not thread-safe; the engine's worker is its only user.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from contracts.routed import RoutedExperts
from contracts.types import (
    CandidateSets,
    Completion,
    FinishReason,
    GenerateRequest,
    VersionSpan,
)
from sampler_fleet.engines.model import Segment


@dataclass(kw_only=True)
class Session:
    """A slot of the KV cache: `tokens[:num_cached]` are the tokens whose keys it holds."""

    session_id: str
    slot: int
    tokens: np.ndarray  # int32 [max context]
    num_cached: int = 0
    last_used: int = 0
    busy: bool = False
    ended: bool = False


@dataclass(kw_only=True)
class Running:
    """A request that runs: its buffer is the session's, `num_tokens` long and growing."""

    request: GenerateRequest
    session: Session
    seed: int
    stop_token_ids: frozenset[int]
    num_tokens: int
    num_generated: int = 0
    record: Record = field(default_factory=lambda: Record())

    @property
    def num_pending(self) -> int:
        """Tokens in the buffer whose keys are not cached; 1 while decoding."""
        return self.num_tokens - self.session.num_cached

    def append(self, token: int, max_context: int) -> FinishReason | None:
        """Takes the token drawn; says whether it was the last."""
        self.num_generated += 1
        if token in self.stop_token_ids:
            return FinishReason.STOP
        sampling = self.request.sampling
        if self.num_generated >= sampling.max_new_tokens or self.num_tokens + 1 >= max_context:
            return FinishReason.LENGTH
        self.session.tokens[self.num_tokens] = token
        self.num_tokens += 1
        return None


@dataclass(kw_only=True)
class Record:
    """What was sampled, and where tokens were routed, since the last chunk."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    candidate_logp: list[np.ndarray] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: list[RoutedExperts] = field(default_factory=list)  # only if asked for

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, finish_reason: FinishReason | None) -> Completion:
        """The record as a chunk; it starts anew."""
        spans, start = [], 0
        for version, run in itertools.groupby(self.versions):
            end = start + len(list(run))
            spans.append(VersionSpan(version=version, start=start, end=end))
            start = end
        candidates = (
            CandidateSets.from_counts(
                np.array([len(ids) for ids in self.ids], np.int64),
                np.concatenate(self.ids),
                np.concatenate(self.candidate_logp),
            )
            if self.tokens
            else CandidateSets.empty()
        )
        chunk = Completion(
            tokens=np.array(self.tokens, np.int32),
            sampler_logp=np.array(self.logp, np.float32),
            candidates=candidates,
            spans=tuple(spans),
            finish_reason=finish_reason,
            routed_experts=RoutedExperts.join(self.routed_experts),
        )
        columns = (self.tokens, self.logp, self.ids, self.candidate_logp, self.versions)
        for column in (*columns, self.routed_experts):
            column.clear()
        return chunk


class Scheduler:
    """First come, first served; every step decodes all running sequences and prefills some tokens.

    A request waits until its session has a slot and no other request. A session keeps its slot
    between requests until it ends or, least recently used first, another session needs the slot.
    """

    def __init__(self, *, num_slots: int, max_context: int, prefill_tokens: int) -> None:
        self.num_slots = num_slots
        self.max_context = max_context
        self.running: list[Running] = []
        self.waiting: deque[tuple[GenerateRequest, int]] = deque()
        self._prefill_tokens = prefill_tokens
        self._sessions: dict[str, Session] = {}
        self._free_slots = list(range(num_slots))[::-1]
        self._clock = itertools.count(1)

    @property
    def num_cached(self) -> int:
        """Tokens in the KV cache, of running and idle sessions."""
        return sum(session.num_cached for session in tuple(self._sessions.values()))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: GenerateRequest, seed: int) -> None:
        self.waiting.append((request, seed))

    def abort(self, request_id: str) -> tuple[GenerateRequest, Record] | None:
        """Takes the request out, running or waiting, with what it sampled; None if unknown."""
        for sequence in self.running:
            if sequence.request.request_id == request_id:
                self.finish([sequence])
                return sequence.request, sequence.record
        for entry in self.waiting:
            if entry[0].request_id == request_id:
                self.waiting.remove(entry)
                return entry[0], Record()
        return None

    def end_session(self, session_id: str) -> None:
        """Frees the session's slot, at the latest when its request is done."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.ended = True
            if not session.busy:
                self._free(session)

    def schedule(self) -> list[tuple[Running, Segment]]:
        """Admits what fits, then picks the tokens of the next step."""
        self._admit()
        work, budget = [], self._prefill_tokens
        for sequence in self.running:
            count = sequence.num_pending
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                start = sequence.session.num_cached
                tokens = sequence.session.tokens[start : start + count]
                segment = Segment(slot=sequence.session.slot, start=start, tokens=tokens)
                work.append((sequence, segment))
        return work

    def computed(self, work: Iterable[tuple[Running, Segment]]) -> list[int]:
        """Marks the segments' keys as cached; says which of them end their buffer."""
        complete = []
        for index, (sequence, segment) in enumerate(work):
            sequence.session.num_cached += len(segment.tokens)
            if not sequence.num_pending:
                complete.append(index)
        return complete

    def finish(self, sequences: Iterable[Running]) -> None:
        """Ends requests; their sessions keep the KV cache unless they have ended, too."""
        for sequence in sequences:
            self.running.remove(sequence)
            sequence.session.busy = False
            sequence.session.last_used = next(self._clock)
            if sequence.session.ended:
                self._free(sequence.session)

    def _admit(self) -> None:
        kept: deque[tuple[GenerateRequest, int]] = deque()
        while self.waiting:
            request, seed = self.waiting.popleft()
            session = self._open(request.session_id)
            if session is None:
                kept.append((request, seed))
                continue
            num_tokens = len(request.tokens)
            cached = session.tokens[: min(session.num_cached, num_tokens - 1)]
            differs = cached != request.tokens[: len(cached)]
            # at least the last token is computed: its logits are wanted
            session.num_cached = int(differs.argmax()) if differs.any() else len(cached)
            session.tokens[:num_tokens] = request.tokens
            session.busy, session.ended = True, False
            self.running.append(
                Running(
                    request=request,
                    session=session,
                    seed=seed,
                    stop_token_ids=frozenset(request.sampling.stop_token_ids),
                    num_tokens=num_tokens,
                )
            )
        self.waiting = kept

    def _open(self, session_id: str) -> Session | None:
        """The session with a slot, or None while it is busy or every slot is."""
        session = self._sessions.get(session_id)
        if session is not None:
            return None if session.busy else session
        if not self._free_slots:
            idle = [session for session in self._sessions.values() if not session.busy]
            if not idle:
                return None
            self._free(min(idle, key=lambda session: session.last_used))
        session = Session(
            session_id=session_id,
            slot=self._free_slots.pop(),
            tokens=np.zeros(self.max_context, np.int32),
        )
        self._sessions[session_id] = session
        return session

    def _free(self, session: Session) -> None:
        del self._sessions[session.session_id]
        self._free_slots.append(session.slot)
