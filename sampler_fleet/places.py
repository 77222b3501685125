"""Who waits for a place on a sampler, and who gets it.

Owns the queue in front of the fleet: first come first served, the wait for a fleet that assembles,
the grace of a session whose group is away. Which place it is, `router.py` decides. Must not know
how a turn is sent.

Whatever changes hands out places at once, in the order of the queue. Nobody else is woken: hundreds
that wait for a group without samplers cost nothing while others come and go.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from contracts.errors import BadInputError, RetryError
from contracts.types import Purpose
from sampler_fleet.config import FleetConfig, GroupConfig
from sampler_fleet.registry import Registry
from sampler_fleet.router import Route, Router, Wait


@dataclass(frozen=True, kw_only=True)
class Target:
    """Samplers a group is to have, and how many its provider holds; None: it does not say.

    `problem` is why it does not get them, in a sentence.
    """

    num: int
    num_held: int | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Waiter:
    """A session in the queue. Times are in seconds of the clock."""

    session_id: str
    purpose: Purpose
    min_version: int
    avoid: Collection[str] = ()
    assembles_until: float = -math.inf  # it waits for all groups that long
    shares_until: float = -math.inf  # nor does it pass by a group that still loads its version
    give_up_at: float = math.inf  # unless every place is taken
    place: asyncio.Future[Route] = field(default_factory=asyncio.Future)


class Places:
    """The places of a fleet. Everything runs on one event loop; times are in seconds of `clock`."""

    def __init__(
        self,
        config: FleetConfig,
        registry: Registry,
        router: Router,
        *,
        targets: Mapping[str, Target],
        clock: Callable[[], float],
    ) -> None:
        """`targets` is by group, as the autoscaler says, and changes."""
        self._config = config
        self._registry = registry
        self._router = router
        self._targets = targets
        self._clock = clock
        self._started = clock()
        self._queue: dict[_Waiter, Hashable] = {}  # in the order they came, each with its line

    @property
    def seconds(self) -> float:
        """Since the fleet began."""
        return self._clock() - self._started

    @property
    def num_waiting(self) -> Counter[Purpose]:
        """Sessions without a place yet."""
        place = self._router.place
        return Counter(w.purpose for w in self._queue if place(w.session_id) is None)

    def check(self, purpose: Purpose) -> None:
        """BadInputError unless some group serves this purpose."""
        if not self._config.shares(purpose):
            raise BadInputError(
                f"purpose {purpose}", expected="a sampler group that serves it", found="none"
            )

    async def take(self, session_id: str, *, purpose: Purpose, min_version: int) -> Route:
        """A place for a session that is to begin; waits as long as it takes.

        After a start of the gateway nobody gets one before every group is there (for up to
        `assemble_seconds`), so that the first samplers to join don't get everything. For the same
        reason it waits up to `grace_seconds` for a group whose turn it is to load `min_version`.
        """
        waiter = _Waiter(
            session_id=session_id,
            purpose=purpose,
            min_version=min_version,
            assembles_until=self._started + self._config.assemble_seconds,
            shares_until=self._clock() + self._config.grace_seconds,
        )
        return await self._wait(waiter, look_again_at=(waiter.assembles_until, waiter.shares_until))

    async def turn(
        self,
        session_id: str,
        *,
        purpose: Purpose,
        min_version: int,
        avoid: Collection[str] = (),
    ) -> Route:
        """The place for a session's turn, elsewhere in its group if its sampler can't serve it.

        Samplers to `avoid` serve it only where no other can. A session without a place waits for
        one. Raises RetryError when nobody could serve it for `grace_seconds`.
        """
        waiter = _Waiter(
            session_id=session_id,
            purpose=purpose,
            min_version=min_version,
            avoid=avoid,
            give_up_at=self._clock() + self._config.grace_seconds,
        )
        if self._router.place(session_id):  # it takes nobody's place
            decision = self._decide(waiter)
            if isinstance(decision, Route):
                return decision
        return await self._wait(waiter, look_again_at=(waiter.give_up_at,))

    def changed(self) -> None:
        """A place is free, or who may serve has changed: who can be served now, is.

        Who comes first gets the first place that is free. Who waits for a version that few have, or
        nobody, lets others pass.
        """
        now = self._clock()
        waits: dict[Hashable, Wait] = {}  # of the first in each line: those behind it wait too
        for waiter, line in self._queue.items():
            wait = waits.get(line)
            if waiter.place.done() or (wait and now < waiter.give_up_at):
                continue
            decision = wait or self._decide(waiter)
            if isinstance(decision, Route):
                waiter.place.set_result(decision)
                continue
            waits[self._line(waiter)] = decision
            if now >= waiter.give_up_at and not decision.is_full:
                error = RetryError(f"session {waiter.session_id}: {decision.reason}")
                waiter.place.set_exception(error)

    def _line(self, waiter: _Waiter) -> Hashable:
        """Who stands in one line can be served by the same samplers. A session whose other turn got
        a place meanwhile changes lines."""
        held = self._router.place(waiter.session_id)
        group = held.group if held else None
        return waiter.assembles_until, group, waiter.purpose, waiter.min_version

    async def _wait(self, waiter: _Waiter, *, look_again_at: Iterable[float]) -> Route:
        """Its place, when its turn has come. Raises RetryError once it is to give up.

        At `look_again_at` something changes for it by time alone.
        """
        held, place = self._router.place(waiter.session_id), waiter.place
        self._queue[waiter] = self._line(waiter)
        try:
            self.changed()
            for then in sorted(look_again_at):
                while not place.done() and (left := then - self._clock()) > 0:
                    await asyncio.wait({place}, timeout=left)
                if not place.done():
                    self.changed()
            return await place
        except asyncio.CancelledError:
            was_given = place.done() and not place.cancelled() and not place.exception()
            if held is None and was_given:  # at this very moment, and won't use it
                self._router.end(waiter.session_id)
                self.changed()
            raise
        finally:
            del self._queue[waiter]

    def _decide(self, waiter: _Waiter) -> Route | Wait:
        if self._clock() < waiter.assembles_until and not self._is_assembled(waiter):
            return Wait(reason="the fleet assembles")
        return self._router.route(
            waiter.session_id,
            self._registry,
            purpose=waiter.purpose,
            min_version=waiter.min_version,
            now=self._clock(),
            avoid=waiter.avoid,
            waits_for_share=self._clock() < waiter.shares_until,
        )

    def _is_assembled(self, waiter: _Waiter) -> bool:
        """Every group that is to have samplers has one that is ready."""
        return all(
            any(s.version >= waiter.min_version for s in self._registry.ready(group.name))
            for group in self._config.groups
            if group.purpose == waiter.purpose and self._num_wanted(group)
        )

    def _num_wanted(self, group: GroupConfig) -> int:
        target = self._targets.get(group.name)
        return target.num if target else group.samplers
