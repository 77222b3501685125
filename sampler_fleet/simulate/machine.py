"""A simulated sampler's engine, and the sessions on it.

Owns how fast sessions advance and which ends next. Must not know of groups, routing or prices.

Sessions on one engine share it evenly, so all advance by the same number of tokens: an engine
counts the tokens that one session has made since the engine began (`emitted`), and a session ends
when that count reaches the one it was given when it came. Likewise for tokens times policy version.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass
class Session:
    """`size` episodes of a prompt in lockstep: one attempt, wherever it runs.

    `made` and `weighted` are tokens and tokens times version of finished stays, per episode.
    `work`: trajectories in progress when it started, completed ones that wait among them.
    `waits_until`: how long it has patience for a sampler of its group, once it has none.
    """

    session_id: str
    prompt: int
    size: int
    num_tokens: float  # per episode
    started: float = 0.0
    work: float = 0.0
    num_attempts: int = 1
    made: float = 0.0
    weighted: float = 0.0
    waits_until: float = 0.0

    @property
    def mean_version(self) -> float:
        return self.weighted / self.made


class Machine:
    """One engine. `stamp` changes whenever the next ending does."""

    def __init__(self, *, tokens_per_second: float, places: int, now: float) -> None:
        self._rate = tokens_per_second
        self.places = places
        self._now = now
        self._emitted = 0.0
        self._weighted = 0.0
        self._ends: list[tuple[float, int, Session, float, float]] = []
        self._num_ever = 0
        self.stamp = 0

    def __len__(self) -> int:
        return len(self._ends)

    def advance(self, now: float, version: int) -> None:
        """Makes the tokens up to `now`, all of them from `version`."""
        if self._ends and now > self._now:
            step = self._speed() * (now - self._now)
            self._emitted += step
            self._weighted += step * version
        self._now = now

    def add(self, session: Session) -> None:
        """Takes a session; `advance` came before."""
        self._num_ever += 1
        self.stamp += 1
        left = session.num_tokens - session.made
        heapq.heappush(
            self._ends,
            (self._emitted + left, self._num_ever, session, self._emitted, self._weighted),
        )

    def next_end(self) -> float | None:
        """When the next session ends if nothing changes."""
        if not self._ends:
            return None
        return self._now + max(0.0, self._ends[0][0] - self._emitted) / self._speed()

    def pop(self) -> Session:
        """The session that ends now, with all its tokens made."""
        self.stamp += 1
        _, _, session, _, weighted = heapq.heappop(self._ends)
        session.weighted += self._weighted - weighted
        session.made = session.num_tokens
        return session

    def evict(self) -> list[Session]:
        """All sessions with what they have made so far, in the order they came."""
        self.stamp += 1
        sessions = []
        for _, _, session, emitted, weighted in sorted(self._ends, key=lambda end: end[1]):
            session.made = min(session.num_tokens, session.made + self._emitted - emitted)
            session.weighted += self._weighted - weighted
            sessions.append(session)
        self._ends.clear()
        return sessions

    def _speed(self) -> float:
        return self._rate * min(1.0, self.places / len(self._ends))
