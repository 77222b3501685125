"""Which sampler serves a turn: sessions to groups by capacity, then to the least-loaded sampler.

Owns the sessions' places and the groups' credit. Pure: no clock, no I/O; `decide` is a function of
what it is given. Must not know how a turn is sent.

A session is given to a group once and stays in it. Which group is the chairman assignment problem:
group i with share s_i should have n * s_i of the first n sessions. Largest-deficit-first can fall
behind by more than one session; R. Tijdeman's rule ("The chairman assignment problem", Discrete
Mathematics 32, 1980) never differs by more than 1 - 1/(2k - 2) with k groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from contracts.types import Purpose
from sampler_fleet.registry import Registry, Sampler


@dataclass(frozen=True, kw_only=True)
class Route:
    """This sampler serves the turn."""

    group: str
    sampler_id: str


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nobody can serve it now; `is_full`: those who could have no place left."""

    reason: str
    is_full: bool = False


def pick_group(
    credit: Mapping[str, float], shares: Mapping[str, float], available: Collection[str]
) -> tuple[str, dict[str, float]]:
    """The group of the next session and every group's credit after it.

    Credit is the sessions a group is behind its exact share (negative: ahead); it sums to zero.
    What groups that are not available are owed goes to the others in proportion to their shares,
    so a group that returns is not flooded with what it missed.
    """
    total = sum(shares[group] for group in available)
    part = {group: shares[group] / total for group in shares if group in available}
    owed = sum(credit.get(group, 0.0) for group in shares if group not in available)
    after = {group: credit.get(group, 0.0) + part[group] * (1 + owed) for group in part}
    threshold = 1 / max(2 * len(part) - 2, 1)
    eligible = [group for group in part if after[group] >= threshold - 1e-9]
    eligible = eligible or [max(part, key=after.__getitem__)]  # only while credit is far off
    chosen = min(eligible, key=lambda group: (1 - threshold - after[group]) / part[group])
    after[chosen] -= 1
    return chosen, after


def least_loaded(samplers: Sequence[Sampler], num_sessions: Mapping[str, int]) -> Sampler:
    """The sampler with the smallest part of its sessions taken; ties by what runs, then by id."""
    return min(
        samplers,
        key=lambda s: (
            num_sessions.get(s.sampler_id, 0) / s.info.max_sessions,
            s.load.num_running,
            s.sampler_id,
        ),
    )


def _has_room(sampler: Sampler, num_sessions: int, kv_limit: float) -> bool:
    if num_sessions == 0:  # what fills its cache is of no session's: it will be evicted
        return True
    return num_sessions < sampler.info.max_sessions and sampler.load.kv_used_fraction < kv_limit


def decide(
    *,
    held: Route | None,
    ready: Mapping[str, Sequence[Sampler]],
    num_sessions: Mapping[str, int],
    shares: Mapping[str, float],
    credit: Mapping[str, float],
    kv_limit: float = 1.0,
) -> tuple[Route | Wait, Mapping[str, float]]:
    """Where a session's next turn runs, and the groups' credit after that.

    `held` is the place the session has, None for a new one. `ready` holds per group the samplers
    that may serve the turn: ready, and new enough. A new session needs a sampler with room: fewer
    sessions than it serves well, and less of its KV cache in use than `kv_limit`. One that has a
    place is served in any case: what it has made so far must not be lost.
    """
    if held is not None:
        samplers = ready.get(held.group, ())
        if any(sampler.sampler_id == held.sampler_id for sampler in samplers):
            return held, credit
        if not samplers:
            return Wait(reason=f"no sampler of group {held.group} is ready"), credit
        chosen = least_loaded(samplers, num_sessions)
        return Route(group=held.group, sampler_id=chosen.sampler_id), credit
    if not any(ready.get(group) for group in shares):
        return Wait(reason=f"none of the groups {', '.join(shares)} has a ready sampler"), credit
    roomy = {
        group: [
            s
            for s in ready.get(group, ())
            if _has_room(s, num_sessions.get(s.sampler_id, 0), kv_limit)
        ]
        for group, share in shares.items()
        if share
    }
    available = [group for group, samplers in roomy.items() if samplers]
    if not available:
        return Wait(reason="every place is taken", is_full=True), credit
    group, after = pick_group(credit, shares, available)
    chosen = least_loaded(roomy[group], num_sessions)
    return Route(group=group, sampler_id=chosen.sampler_id), after


class Router:
    """Remembers each session's place and applies `decide`."""

    def __init__(
        self, shares: Mapping[Purpose, Mapping[str, float]], *, kv_limit: float = 1.0
    ) -> None:
        self.shares = dict(shares)  # may change in mid-run; the credit stays
        self._kv_limit = kv_limit
        self._credit: dict[Purpose, Mapping[str, float]] = {purpose: {} for purpose in shares}
        self._places: dict[str, Route] = {}
        self._used_at: dict[str, float] = {}
        self.num_sessions: Counter[str] = Counter()  # by sampler, now
        self.num_routed: Counter[str] = Counter()  # sessions by group, ever

    def route(
        self,
        session_id: str,
        registry: Registry,
        *,
        purpose: Purpose,
        min_version: int,
        now: float,
    ) -> Route | Wait:
        """Decides, and remembers the place a session got."""
        shares = self.shares.get(purpose, {})
        if not shares:
            return Wait(reason=f"no group has the purpose {purpose}")
        held = self._places.get(session_id)
        decision, credit = decide(
            held=held,
            ready={
                group: [s for s in registry.ready(group) if s.version >= min_version]
                for group in ((held.group,) if held else shares)
            },
            num_sessions=self.num_sessions,
            shares=shares,
            credit=self._credit[purpose],
            kv_limit=self._kv_limit,
        )
        if isinstance(decision, Route):
            self._credit[purpose] = credit
            if held != decision:
                self._place(session_id, held, decision)
            self._used_at[session_id] = now
        return decision

    def place(self, session_id: str) -> Route | None:
        return self._places.get(session_id)

    def end(self, session_id: str) -> Route | None:
        """Forgets a session and returns the place it had."""
        held = self._places.pop(session_id, None)
        self._used_at.pop(session_id, None)
        if held:
            self._leave(held)
        return held

    def idle(self, before: float) -> Iterator[str]:
        """Sessions that took no turn since `before`."""
        yield from [name for name, used_at in self._used_at.items() if used_at < before]

    def _place(self, session_id: str, held: Route | None, route: Route) -> None:
        if held:
            self._leave(held)
        else:
            self.num_routed[route.group] += 1
        self._places[session_id] = route
        self.num_sessions[route.sampler_id] += 1

    def _leave(self, held: Route) -> None:
        self.num_sessions[held.sampler_id] -= 1
        if self.num_sessions[held.sampler_id] <= 0:
            del self.num_sessions[held.sampler_id]
