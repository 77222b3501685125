"""Which sampler serves a turn: sessions to groups by capacity, then to the least-loaded sampler.

Owns the sessions' places and the groups' credit. Pure: no clock, no I/O; `decide` is a function of
what it is given. Must not know how a turn is sent.

A session is given to a group once and stays in it. Which group is the chairman assignment problem:
group i with share s_i should have n * s_i of the first n sessions. Largest-deficit-first can fall
behind by more than one session; R. Tijdeman's rule ("The chairman assignment problem", Discrete
Mathematics 32, 1980) never differs by more than 1 - 1/(2k - 2) with k groups.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from contracts.types import Purpose
from sampler_fleet.registry import Registry, Sampler, SamplerPhase

MAX_ENTRIES = 8  # of a ranking, per sampler


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


class Ranking:
    """The ready samplers of a group, least loaded first, as sessions come and go.

    The smallest part of its sessions taken comes first; ties go by what runs, then by id. A heap
    holds an entry for every load a sampler has had since; what is out of date is dropped when it
    surfaces.
    """

    def __init__(self, samplers: Sequence[Sampler], num_sessions: Mapping[str, int]) -> None:
        """`num_sessions` is by sampler and changes; `changed` is to be told."""
        self.samplers = samplers
        self._by_id = {sampler.sampler_id: sampler for sampler in samplers}
        self._num_sessions = num_sessions
        self._heap: list[tuple[float, int, str]] = []
        self._rebuild()

    def changed(self, sampler_id: str) -> None:
        """Its number of sessions is another one."""
        sampler = self._by_id.get(sampler_id)
        if sampler is None:
            return
        heapq.heappush(self._heap, self._entry(sampler))
        if len(self._heap) > MAX_ENTRIES * len(self.samplers):
            self._rebuild()

    def first(
        self,
        *,
        min_version: int,
        kv_limit: float = math.inf,
        room: bool = False,
        avoid: Collection[str] = (),
    ) -> Sampler | None:
        """The least loaded sampler of that version or newer, none of those to `avoid`; with `room`,
        one with room for another session: fewer than it serves well, and less of its KV cache in
        use than `kv_limit`."""
        passed = []
        found = None
        while self._heap and found is None:
            entry = self._heap[0]
            sampler = self._by_id[entry[2]]
            if entry != self._entry(sampler):
                heapq.heappop(self._heap)
            elif room and entry[0] >= 1:  # so are all that follow
                break
            elif (
                sampler.version < min_version
                or sampler.sampler_id in avoid
                or (
                    # where nobody is, what fills the cache is of no session's: it will be evicted
                    room and entry[0] > 0 and sampler.load.kv_used_fraction >= kv_limit
                )
            ):
                passed.append(heapq.heappop(self._heap))
            else:
                found = sampler
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def _entry(self, sampler: Sampler) -> tuple[float, int, str]:
        sampler_id = sampler.info.sampler_id
        taken = self._num_sessions.get(sampler_id, 0) / sampler.info.max_sessions
        return taken, sampler.load.num_running, sampler_id

    def _rebuild(self) -> None:
        self._heap = [self._entry(sampler) for sampler in self.samplers]
        heapq.heapify(self._heap)


def decide(
    *,
    held: Route | None,
    best: Mapping[str, Sampler | None],
    shares: Mapping[str, float],
    credit: Mapping[str, float],
    loading: Collection[str] = (),
) -> tuple[Route | Wait, Mapping[str, float]]:
    """Where a session's next turn runs, and the groups' credit after that.

    `held` is the place the session has, None for a new one. `best` holds for each group with a
    sampler that is ready, and new enough, the one that would serve the turn; None where it has no
    room for a new session. One that has a place is served in any case: what it has made so far must
    not be lost. A new session waits for one of the groups `loading` a version that is new enough if
    its turn is that group's: else those that load fastest would serve more than their share.
    """
    if held is not None:
        chosen = best.get(held.group)
        if chosen is None:
            return Wait(reason=f"no sampler of group {held.group} is ready"), credit
        return Route(group=held.group, sampler_id=chosen.sampler_id), credit
    if not best and not loading:
        return Wait(reason=f"none of the groups {', '.join(shares)} has a ready sampler"), credit
    roomy = {group: sampler for group, sampler in best.items() if sampler and shares[group]}
    awaited = [group for group in loading if shares[group]]
    if not roomy and not awaited:
        return Wait(reason="every place is taken", is_full=True), credit
    group, after = pick_group(credit, shares, [*roomy, *awaited])
    if group in awaited:
        return Wait(reason=f"group {group} has not loaded the version that is wanted"), credit
    return Route(group=group, sampler_id=roomy[group].sampler_id), after


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
        self._rankings: dict[str, Ranking] = {}  # by group
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
        avoid: Collection[str] = (),
        waits_for_share: bool = False,
    ) -> Route | Wait:
        """Decides, and remembers the place a session got.

        A session leaves a sampler to `avoid`, if another of its group can serve it. One that
        `waits_for_share` does so while its group has samplers that are only too old.
        """
        shares = self.shares.get(purpose, {})
        if not shares:
            return Wait(reason=f"no group has the purpose {purpose}")
        held = self._places.get(session_id)
        best = (
            self._best_again(held, registry, min_version, avoid)
            if held
            else self._best(shares, registry, min_version)
        )
        loading = [
            group
            for group in shares
            if waits_for_share and group not in best and registry.ready(group)
        ]
        decision, credit = decide(
            held=held, best=best, shares=shares, credit=self._credit[purpose], loading=loading
        )
        if isinstance(decision, Route):
            self._credit[purpose] = credit
            if held != decision:
                self._place(session_id, held, decision)
            self._used_at[session_id] = now
        return decision

    def _best_again(
        self, held: Route, registry: Registry, min_version: int, avoid: Collection[str]
    ) -> dict[str, Sampler | None]:
        """The sampler that has the session, else another of its group."""
        sampler = registry.get(held.sampler_id)
        if sampler and not (
            sampler.info.group == held.group
            and sampler.phase == SamplerPhase.READY
            and sampler.version >= min_version
        ):
            sampler = None
        if sampler is None or sampler.sampler_id in avoid:
            ranking = self._ranking(held.group, registry)
            other = ranking.first(min_version=min_version, avoid=avoid)
            sampler = other or sampler or ranking.first(min_version=min_version)
        return {held.group: sampler}

    def _best(
        self, groups: Iterable[str], registry: Registry, min_version: int
    ) -> dict[str, Sampler | None]:
        """For a session without a place."""
        best: dict[str, Sampler | None] = {}
        for group in groups:
            ranking = self._ranking(group, registry)
            sampler = ranking.first(min_version=min_version, kv_limit=self._kv_limit, room=True)
            if sampler or ranking.first(min_version=min_version):
                best[group] = sampler
        return best

    def _ranking(self, group: str, registry: Registry) -> Ranking:
        samplers = registry.ready(group)
        ranking = self._rankings.get(group)
        if ranking is None or ranking.samplers is not samplers:  # one of them changed
            ranking = self._rankings[group] = Ranking(samplers, self.num_sessions)
        return ranking

    def place(self, session_id: str) -> Route | None:
        return self._places.get(session_id)

    def end(self, session_id: str) -> Route | None:
        """Forgets a session and returns the place it had."""
        held = self._places.pop(session_id, None)
        self._used_at.pop(session_id, None)
        if held:
            self._leave(held)
        return held

    def touch(self, session_id: str, now: float) -> None:
        """The session was at work until now."""
        if session_id in self._used_at:
            self._used_at[session_id] = now

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
        self._changed(route)

    def _leave(self, held: Route) -> None:
        self.num_sessions[held.sampler_id] -= 1
        if self.num_sessions[held.sampler_id] <= 0:
            del self.num_sessions[held.sampler_id]
        self._changed(held)

    def _changed(self, route: Route) -> None:
        if ranking := self._rankings.get(route.group):
            ranking.changed(route.sampler_id)
