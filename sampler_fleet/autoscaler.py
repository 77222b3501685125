"""How many samplers each group should have now.

Owns the decision and what it remembers between decisions. Pure: no I/O, no clock; `decide` is a
function of what it is given, `Autoscaler` keeps its memory, as `Router` does for routing. Must not
know how a sampler is started or stopped: `autoscaler_loop.py` tells a provider.

Two steps. How many sessions are wanted at once is the smallest of

    demand     those that run + those that would start if there were a place
    feed       session_seconds * (taken_per_second + (backlog_target - backlog) / horizon),
               Little's law: as many as end as fast as the trainer takes them
    freshness  work * staleness_limit / staleness - backlog, Little's law again: staleness grows
               with the work in progress, sessions and backlog, that a trajectory found at its start

and the cheapest places for them are filled first, by the price of one session's place. What is
given up goes by the most demand of lately: a pause is not the end of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from contracts.types import Purpose
from sampler_fleet.config import AutoscalerConfig, FleetConfig, GroupConfig
from sampler_fleet.cost import price_at


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the producer and the trainer say. None: not known yet."""

    num_queued: int  # sessions that would start now if there were a place
    backlog: float  # trajectories completed and not trained on, of an update under way its rest
    taken_per_second: float | None = None  # trajectories, by a trainer that never waits
    session_seconds: float | None = None  # mean of the sessions that ended lately
    staleness: float | None = None  # of the last update's tokens, mean, in versions
    work: float | None = None  # sessions and backlog when its trajectories started, mean


@dataclass(frozen=True, kw_only=True)
class SeenSampler:
    """A sampler as the registry and the router know it.

    One that drains or is lost is not ready, and may have sessions that wait for another.
    """

    num_sessions: int
    kv_used_fraction: float = 0.0
    is_ready: bool = True  # takes turns now


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """One group as the autoscaler sees it. Times are in the seconds of `now`."""

    name: str
    min_samplers: int
    max_samplers: int
    max_sessions: int  # of one sampler
    price: float | None  # dollars per sampler and hour, now; None is dearer than any
    num_target: int  # samplers asked for
    num_ready: int
    num_sessions: int = 0  # also of samplers that are not ready
    kv_used_fraction: float = 0.0  # mean over its ready samplers, from 0 to 1
    changed_at: float = -math.inf  # when the target last changed
    short_since: float | None = None  # since when fewer are ready than asked for

    def places(self, kv_limit: float) -> float:
        """Sessions that one sampler serves well, fewer when those it has fill its KV cache."""
        return self.max_sessions * min(1.0, kv_limit / max(self.kv_used_fraction, 1e-9))


@dataclass(frozen=True, kw_only=True)
class FleetState:
    """The groups in the run file's order, and the demand."""

    groups: tuple[GroupState, ...]
    demand: Demand
    most_demanded: int = 0  # sessions that ran or were queued at some moment lately

    @property
    def num_demanded(self) -> int:
        """Sessions that run, and those that would start if there were a place."""
        return sum(group.num_sessions for group in self.groups) + self.demand.num_queued


def sessions_wanted(state: FleetState, config: AutoscalerConfig, *, num_demanded: int) -> float:
    """How many sessions should run at once; the module docstring has the formula.

    `num_demanded` is the demand, of now or of lately. What is not a number limits nothing.
    """
    demand = state.demand
    wanted = float(num_demanded)
    if demand.taken_per_second is not None and demand.session_seconds is not None:
        missing = (config.backlog_target - demand.backlog) / config.horizon_seconds
        wanted = min(wanted, demand.session_seconds * (demand.taken_per_second + missing))
    limit = config.staleness_limit
    if limit is not None and demand.work is not None and demand.staleness:
        fresh = demand.work * limit / max(demand.staleness, 1e-9)
        wanted = min(wanted, fresh - demand.backlog)
    return max(wanted, 0.0)


def decide(state: FleetState, config: AutoscalerConfig, now: float) -> dict[str, int]:
    """Samplers each group should have.

    What is added starts before what it replaces goes: a group gives up samplers only while the
    ready ones that remain have places for the sessions wanted and the headroom. A group with
    sessions keeps one sampler, since a session stays in its group. One that waits for samplers it
    asked for gives up none for `start_seconds`. Bounds go before all else.
    """
    wanted = sessions_wanted(state, config, num_demanded=state.num_demanded)
    most = max(state.num_demanded, state.most_demanded)
    lately = sessions_wanted(state, config, num_demanded=most)
    places = {group.name: group.places(config.kv_limit) for group in state.groups}
    overdue = {group.name for group in state.groups if _is_overdue(group, config, now)}
    by_price = sorted(state.groups, key=lambda group: _price_of_place(group, places[group.name]))
    bounds = {g.name: _bounds(g, config, now, is_overdue=g.name in overdue) for g in state.groups}

    def counted(group: GroupState, num: int) -> float:
        """Places that many samplers can be expected to have soon."""
        sure = min(num, group.num_ready) if group.name in overdue else num
        return sure * places[group.name]

    targets = {name: low for name, (low, _) in bounds.items()}
    missing = wanted - sum(counted(group, targets[group.name]) for group in by_price)
    for group in by_price:
        low, high = bounds[group.name]
        if missing <= 1e-9:
            break
        num = math.ceil(missing / places[group.name] - 1e-9)
        targets[group.name] = high if group.name in overdue else min(high, low + num)
        missing -= counted(group, targets[group.name]) - counted(group, low)
    spare = sum(g.num_ready * places[g.name] for g in by_price) - lately * (1 + config.headroom)
    for group in reversed(by_price):  # the dearest goes first
        low, high = bounds[group.name]
        can_go = max(0, math.floor(spare / places[group.name] + 1e-9))
        kept = min(group.num_target, group.num_ready - can_go, high)
        targets[group.name] = max(targets[group.name], kept)
        spare -= max(0, group.num_ready - targets[group.name]) * places[group.name]
    return {group.name: targets[group.name] for group in state.groups}


def _bounds(
    group: GroupState, config: AutoscalerConfig, now: float, *, is_overdue: bool
) -> tuple[int, int]:
    """The fewest and the most samplers this decision may give a group."""
    since = now - group.changed_at
    low = max(group.min_samplers, 1 if group.num_sessions else 0)
    if since < config.cooldown_down_seconds or _is_starting(group, config, now):
        low = max(low, group.num_target)
    low = min(low, group.max_samplers)
    high = group.max_samplers
    if since < config.cooldown_up_seconds or is_overdue:
        high = min(high, group.num_target)
    return low, max(low, high)


def _is_overdue(group: GroupState, config: AutoscalerConfig, now: float) -> bool:
    return group.short_since is not None and now - group.short_since > config.start_seconds


def _is_starting(group: GroupState, config: AutoscalerConfig, now: float) -> bool:
    """Samplers that were asked for may be on their way still, or on their way back."""
    if group.short_since is None:
        return False
    return now - max(group.short_since, group.changed_at) <= config.start_seconds


def _price_of_place(group: GroupState, places: float) -> tuple[bool, float]:
    """Dollars per session and hour; groups without a price come last, in the file's order."""
    return (group.price is None, (group.price or 0.0) / places)


class Autoscaler:
    """Applies `decide` and remembers what it goes by: each group's target, when it changed and
    since when it is short, and the demand of the last `cooldown_down_seconds`."""

    def __init__(
        self, config: AutoscalerConfig, groups: Sequence[GroupConfig], *, now: float
    ) -> None:
        """Cooldowns count from `now`: what was before isn't known."""
        self.config = config
        self.targets = {group.name: group.samplers for group in groups}
        self._changed_at = dict.fromkeys(self.targets, now)
        self._short_since: dict[str, float] = {}
        self._demanded: deque[tuple[float, int]] = deque()  # when, sessions

    def step(
        self,
        *,
        fleet: FleetConfig,
        samplers: Mapping[str, Sequence[SeenSampler]],
        demand: Demand,
        now: float,
        now_utc: float,
    ) -> dict[str, int]:
        """The groups whose target changed, and the new one.

        `fleet` may differ from the last step's in bounds and prices. `samplers` is by group. Prices
        are dated: they are looked up at `now_utc`, POSIX seconds. Demand is for training: groups
        of another purpose have `samplers`, as the run file says.
        """
        groups = [group for group in fleet.groups if group.purpose == Purpose.TRAIN]
        ready = {g.name: [s for s in samplers[g.name] if s.is_ready] for g in groups}
        self._note_shortage({name: len(found) for name, found in ready.items()}, now)
        states = []
        for group in groups:
            price = price_at(fleet.prices_of(group), now_utc)
            low, high = group.bounds
            states.append(
                GroupState(
                    name=group.name,
                    min_samplers=low,
                    max_samplers=high,
                    max_sessions=group.max_sessions,
                    price=price.per_hour * group.num_accelerators if price else None,
                    num_target=self.targets[group.name],
                    num_ready=len(ready[group.name]),
                    num_sessions=sum(sampler.num_sessions for sampler in samplers[group.name]),
                    kv_used_fraction=_mean_kv(ready[group.name]),
                    changed_at=self._changed_at[group.name],
                    short_since=self._short_since.get(group.name),
                )
            )
        state = FleetState(groups=tuple(states), demand=demand)
        state = replace(state, most_demanded=self._most_demanded(state.num_demanded, now))
        decided = decide(state, self.config, now)
        decided |= {g.name: g.samplers for g in fleet.groups if g.purpose != Purpose.TRAIN}
        changed = {name: num for name, num in decided.items() if num != self.targets[name]}
        self.targets |= changed
        self._changed_at |= dict.fromkeys(changed, now)
        return changed

    def be_patient(self) -> None:
        """The gateway started anew and knows nobody yet: samplers have `start_seconds` from the
        next step on to be back."""
        self._short_since.clear()

    def _note_shortage(self, num_ready: Mapping[str, int], now: float) -> None:
        for name, num in num_ready.items():
            if num >= self.targets[name]:
                self._short_since.pop(name, None)
            else:
                self._short_since.setdefault(name, now)

    def _most_demanded(self, num: int, now: float) -> int:
        """The most sessions demanded within `cooldown_down_seconds`; `num` are those of now."""
        self._demanded.append((now, num))
        while now - self._demanded[0][0] > self.config.cooldown_down_seconds:
            self._demanded.popleft()
        return max(num for _, num in self._demanded)


def _mean_kv(samplers: Collection[SeenSampler]) -> float:
    """Of the readings that are numbers, each as a part from 0 to 1; 0 without any."""
    read = [s.kv_used_fraction for s in samplers if math.isfinite(s.kv_used_fraction)]
    return sum(min(max(kv, 0.0), 1.0) for kv in read) / len(read) if read else 0.0
