"""The autoscaler's process: asks the gateway, lets `autoscaler.py` decide, tells the providers.

Owns the rhythm and what happens when the gateway or a provider is away: the targets stay, and it
is asked again. Must not decide, nor know how a sampler is started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import grpc

from contracts import rpc
from contracts.errors import RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc
from sampler_fleet.autoscaler import Autoscaler, Demand, ReadySampler
from sampler_fleet.config import FleetConfig
from sampler_fleet.live_settings import LiveSettings
from sampler_fleet.providers.base import Provider
from sampler_fleet.registry import SamplerPhase

log = logging.getLogger(__name__)

RETRY_S = 1.0  # after the gateway was away


class AutoscalerLoop:
    """Resizes the groups of a fleet until cancelled, then drains what the providers hold."""

    def __init__(
        self,
        settings: LiveSettings,
        providers: Mapping[str, Provider],
        *,
        channel: grpc.aio.Channel,
        gateway: str,
        clock: Callable[[], float] = time.monotonic,
        clock_utc: Callable[[], float] = time.time,
    ) -> None:
        """`providers` are by the name that groups have in the run file; `gateway` is where the
        channel leads."""
        self._settings = settings
        self._providers = providers
        self._gateway = fleet_pb2_grpc.FleetStub(channel)
        self._address = gateway
        self._clock = clock
        self._clock_utc = clock_utc
        self._autoscaler = Autoscaler(settings.autoscaler, settings.fleet.groups)
        self._is_away = False
        self._has_begun = False

    async def run(self) -> None:
        """Steps every `every_seconds`, and sooner while the gateway is away.

        Raises:
            BadInputError, AuthError, DirtyProcessError: what no later step would mend.
        """
        try:
            while True:
                answered = await self.step()
                every = self._settings.autoscaler.every_seconds
                await asyncio.sleep(every if answered else min(every, RETRY_S))
        finally:
            for provider in self._providers.values():
                await provider.close()

    async def step(self) -> bool:
        """Decides once and tells everybody; False if the gateway did not answer."""
        self._settings.follow()
        try:
            with rpc.calling(self._address):
                status = await self._gateway.Status(
                    fleet_pb2.StatusRequest(), timeout=rpc.DEADLINE_S
                )
        except RetryError as error:
            if not self._is_away:
                log.warning("the targets stay as they are: %s", error)
            self._is_away = True
            return False
        self._is_away = False
        if not self._has_begun:
            self._resume(status)
        self._autoscaler.config = self._settings.autoscaler
        changed = self._autoscaler.step(
            fleet=self._settings.fleet,
            ready=ready_samplers(status, self._settings.fleet),
            demand=demand_from_pb(status.demand),
            now=self._clock(),
            now_utc=self._clock_utc(),
        )
        for group, num in changed.items():
            log.info("group %s: %d samplers wanted", group, num)
        await self._report([await self._scale(group) for group in self._autoscaler.targets])
        return True

    def _resume(self, status: fleet_pb2.StatusReply) -> None:
        """Goes on from the targets that the gateway heard of last, of an autoscaler before this."""
        self._has_begun = True
        self._autoscaler.targets |= {
            group.group: group.num_target
            for group in status.groups
            if group.HasField("num_target") and group.group in self._autoscaler.targets
        }

    async def _scale(self, name: str) -> fleet_pb2.GroupTarget:
        """Tells a group's provider its target, again and again; what came of it."""
        num, held = self._autoscaler.targets[name], None
        provider = self._providers[self._settings.fleet.group(name).provider]
        try:
            await provider.scale(name, num)
            held = await provider.num_held(name)
        except RetryError as error:
            log.warning("group %s is to have %d samplers, not yet: %s", name, num, error)
        return fleet_pb2.GroupTarget(group=name, num_target=num, num_held=held)

    async def _report(self, targets: list[fleet_pb2.GroupTarget]) -> None:
        request = fleet_pb2.ReportTargetsRequest(targets=targets)
        try:
            with rpc.calling(self._address):
                await self._gateway.ReportTargets(request, timeout=rpc.DEADLINE_S)
        except RetryError as error:
            log.warning("the targets were not reported: %s", error)


def ready_samplers(
    status: fleet_pb2.StatusReply, fleet: FleetConfig
) -> dict[str, list[ReadySampler]]:
    """The samplers that take turns, by group of the run file."""
    ready: dict[str, list[ReadySampler]] = {group.name: [] for group in fleet.groups}
    for sampler in status.samplers:
        if sampler.state == SamplerPhase.READY and sampler.register.group in ready:
            ready[sampler.register.group].append(
                ReadySampler(
                    num_sessions=sampler.num_sessions,
                    kv_used_fraction=sampler.heartbeat.kv_used_fraction,
                )
            )
    return ready


def demand_from_pb(message: fleet_pb2.Demand) -> Demand:
    """What the gateway knows of the producer and the trainer; what is unset isn't known yet."""
    optional = ("taken_per_second", "session_seconds", "staleness", "work")
    return Demand(
        num_queued=message.num_queued,
        backlog=message.backlog,
        **{name: getattr(message, name) for name in optional if message.HasField(name)},
    )
