"""The thin shell around the autoscaler: reads the fleet, lets it decide, tells the provider.

Owns the rhythm, and the numbers a provider has yet to accept. Must not decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from contracts.errors import RetryError
from sampler_fleet.autoscaler import Autoscaler, Demand
from sampler_fleet.config import FleetConfig
from sampler_fleet.providers.base import Provider
from sampler_fleet.registry import Registry

log = logging.getLogger(__name__)


class AutoscalerLoop:
    """Resizes the groups of a fleet until cancelled.

    `read_config` is asked at every step, so bounds and prices may change in mid-run.
    """

    def __init__(
        self,
        autoscaler: Autoscaler,
        provider: Provider,
        *,
        registry: Registry,
        num_sessions: Mapping[str, int],
        read_config: Callable[[], FleetConfig],
        read_demand: Callable[[], Demand],
        clock: Callable[[], float] = time.monotonic,
        clock_utc: Callable[[], float] = time.time,
    ) -> None:
        self._autoscaler = autoscaler
        self._provider = provider
        self._registry = registry
        self._num_sessions = num_sessions
        self._read_config = read_config
        self._read_demand = read_demand
        self._clock = clock
        self._clock_utc = clock_utc
        self._unsent: dict[str, int] = dict(autoscaler.targets)

    async def run(self) -> None:
        """Steps for as long as the gateway runs."""
        while True:
            await self.step()
            await asyncio.sleep(self._autoscaler.config.every_seconds)

    async def step(self) -> None:
        """Decides once; the provider hears of every target that changed or that it refused."""
        changed = self._autoscaler.step(
            fleet=self._read_config(),
            registry=self._registry,
            num_sessions=self._num_sessions,
            demand=self._read_demand(),
            now=self._clock(),
            now_utc=self._clock_utc(),
        )
        self._unsent |= changed
        for group, num in tuple(self._unsent.items()):
            try:
                await self._provider.scale(group, num)
            except RetryError as error:
                log.warning("group %s is to have %d samplers, not yet: %s", group, num, error)
            else:
                del self._unsent[group]
                log.info("group %s: %d samplers asked for", group, num)
