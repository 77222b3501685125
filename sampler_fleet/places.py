"""Who waits for a place on a sampler, and who gets it.

Owns the queue in front of the fleet: first come first served, the wait for a fleet that assembles,
the grace of a session whose group is away. Which place it is, `router.py` decides. Must not know
how a turn is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from contracts.errors import BadInputError, RetryError
from contracts.types import Purpose
from sampler_fleet.config import FleetConfig, GroupConfig
from sampler_fleet.registry import Registry
from sampler_fleet.router import Route, Router, Wait


@dataclass(frozen=True, kw_only=True)
class Target:
    """Samplers a group is to have, and how many its provider holds; None: it does not say."""

    num: int
    num_held: int | None = None


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
        self._change = asyncio.Event()
        self._entrance = {purpose: asyncio.Lock() for purpose in Purpose}  # fair
        self.num_waiting: Counter[Purpose] = Counter()  # sessions without a place yet

    @property
    def seconds(self) -> float:
        """Since the fleet began."""
        return self._clock() - self._started

    def changed(self) -> None:
        """A place is free, or who may serve has changed."""
        self._change.set()
        self._change = asyncio.Event()

    def check(self, purpose: Purpose) -> None:
        """BadInputError unless some group serves this purpose."""
        if not self._config.shares(purpose):
            raise BadInputError(
                f"purpose {purpose}", expected="a sampler group that serves it", found="none"
            )

    async def take(self, session_id: str, *, purpose: Purpose, min_version: int) -> Route:
        """A place for a session that is to begin; waits as long as it takes.

        After a start of the gateway nobody gets one before every group is there (for up to
        `assemble_seconds`), so that the first samplers to join don't get everything.
        """
        with self._waiting(purpose):
            await self._assembled(purpose, min_version)
            return await self._admit(session_id, purpose=purpose, min_version=min_version)

    async def turn(
        self,
        session_id: str,
        *,
        purpose: Purpose,
        min_version: int,
        avoid: Collection[str] = (),
    ) -> Route:
        """The place for a session's turn, elsewhere in its group if its sampler can't serve it.

        Samplers to `avoid` serve it only where no other can. Raises RetryError when nobody in its
        group could for `grace_seconds`.
        """
        grace_s = self._config.grace_seconds
        if self._router.place(session_id) is None:
            with self._waiting(purpose):
                return await self._admit(
                    session_id, purpose=purpose, min_version=min_version, grace_s=grace_s
                )
        deadline = self._clock() + grace_s
        while True:
            decision = self._decide(session_id, purpose, min_version, avoid)
            if isinstance(decision, Route):
                return decision
            await self._patiently(session_id, decision, deadline)

    @contextlib.contextmanager
    def _waiting(self, purpose: Purpose) -> Iterator[None]:
        self.num_waiting[purpose] += 1
        try:
            yield
        finally:
            self.num_waiting[purpose] -= 1

    async def _assembled(self, purpose: Purpose, min_version: int) -> None:
        """Every group that is to have samplers has one that is ready, or patience is over."""
        while (patience := self._config.assemble_seconds - self.seconds) > 0:
            if all(
                any(s.version >= min_version for s in self._registry.ready(group.name))
                for group in self._config.groups
                if group.purpose == purpose and self._num_wanted(group)
            ):
                return
            await self._until_changed(patience)

    def _num_wanted(self, group: GroupConfig) -> int:
        target = self._targets.get(group.name)
        return target.num if target else group.samplers

    async def _admit(
        self,
        session_id: str,
        *,
        purpose: Purpose,
        min_version: int,
        grace_s: float | None = None,
    ) -> Route:
        """A place for a session that has none.

        Who comes first gets the first place that is free. Who waits for a version that few have, or
        nobody, lets others pass; the latter for up to `grace_s` (None: as long as it takes). Raises
        RetryError.
        """
        deadline = None if grace_s is None else self._clock() + grace_s
        while True:
            async with self._entrance[purpose]:
                while True:
                    decision = self._decide(session_id, purpose, min_version)
                    if isinstance(decision, Route):
                        return decision
                    if not decision.is_full or self._others_may_pass(purpose, min_version):
                        break
                    await self._until_changed(None)
            await self._patiently(session_id, decision, None if decision.is_full else deadline)

    def _decide(
        self, session_id: str, purpose: Purpose, min_version: int, avoid: Collection[str] = ()
    ) -> Route | Wait:
        return self._router.route(
            session_id,
            self._registry,
            purpose=purpose,
            min_version=min_version,
            now=self._clock(),
            avoid=avoid,
        )

    def _others_may_pass(self, purpose: Purpose, min_version: int) -> bool:
        """Whether some sampler is of use to sessions that are content with an older version."""
        return any(
            sampler.version < min_version
            for group in self._config.groups
            if group.purpose == purpose
            for sampler in self._registry.ready(group.name)
        )

    async def _patiently(self, session_id: str, wait: Wait, deadline: float | None) -> None:
        """Until the next change; RetryError once the deadline has passed."""
        left = None if deadline is None else deadline - self._clock()
        if left is not None and left <= 0:
            raise RetryError(f"session {session_id}: {wait.reason}")
        await self._until_changed(left)

    async def _until_changed(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
