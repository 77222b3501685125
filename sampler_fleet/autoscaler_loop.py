"""The autoscaler's process: asks the gateway, lets `autoscaler.py` decide, tells the providers.

Owns the rhythm, and what happens when the gateway is away or starts anew, or a provider is away or
refuses a group: the targets stay, and it is asked again. Must not decide, nor know how a sampler is
started.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping

import grpc

from contracts import rpc
from contracts.errors import BadInputError, DirtyProcessError, RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc
from sampler_fleet.autoscaler import Autoscaler, Demand, SeenSampler
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
        self._autoscaler: Autoscaler | None = None  # from the gateway's first answer on
        self._answered_at = -math.inf
        self._is_away = False
        self._had_samplers = False  # some sampler has taken turns
        self._refusals: dict[str, BadInputError | DirtyProcessError] = {}  # by group

    async def run(self) -> None:
        """Steps every `every_seconds`, and sooner while the gateway is away.

        Raises:
            AuthError: the gateway refuses its token.
            BadInputError: nobody could start a sampler of any group yet.
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
        now, settings = self._clock(), self._settings
        samplers = samplers_from_pb(status, settings.fleet)
        if self._autoscaler is None:
            self._autoscaler = await self._begin(status, samplers, now)
        elif status.seconds < now - self._answered_at:  # it is younger than its last answer
            log.warning("the gateway started anew: its samplers have time to come back")
            self._autoscaler.be_patient()
        self._answered_at = now
        self._had_samplers |= any(s.is_ready for group in samplers.values() for s in group)
        self._autoscaler.config = settings.autoscaler
        changed = self._autoscaler.step(
            fleet=settings.fleet,
            samplers=samplers,
            demand=demand_from_pb(status.demand),
            now=now,
            now_utc=self._clock_utc(),
        )
        for group, num in changed.items():
            log.info("group %s: %d samplers wanted", group, num)
        targets = self._autoscaler.targets
        await self._report([await self._scale(*target) for target in targets.items()])
        self._check_start(targets)
        return True

    async def _begin(
        self,
        status: fleet_pb2.StatusReply,
        samplers: Mapping[str, list[SeenSampler]],
        now: float,
    ) -> Autoscaler:
        """Goes on from the targets that the gateway heard of last, of an autoscaler before this.

        Where it heard of none (it may be as new), what is there stays as well, for the cooldown.
        """
        fleet = self._settings.fleet
        autoscaler = Autoscaler(self._settings.autoscaler, fleet.groups, now=now)
        told = {g.group: g.num_target for g in status.groups if g.HasField("num_target")}
        for name, num in autoscaler.targets.items():
            if name in told:
                autoscaler.targets[name] = told[name]
                continue
            held = 0
            try:
                held = await self._provider(name).num_held(name)
            except (RetryError, BadInputError, DirtyProcessError) as error:
                log.warning("group %s: what its provider holds isn't known: %s", name, error)
            num_ready = sum(sampler.is_ready for sampler in samplers[name])
            autoscaler.targets[name] = max(num, num_ready, held or 0)
        return autoscaler

    def _provider(self, group: str) -> Provider:
        return self._providers[self._settings.fleet.group(group).provider]

    async def _scale(self, name: str, num: int) -> fleet_pb2.GroupTarget:
        """Tells a group's provider its target, again and again; what came of it.

        A group that is refused keeps no other waiting.
        """
        held, problem = None, ""
        provider = self._provider(name)
        try:
            await provider.scale(name, num)
            held = await provider.num_held(name)
        except RetryError as error:
            problem = str(error)
            log.warning("group %s is to have %d samplers, not yet: %s", name, num, error)
        except (BadInputError, DirtyProcessError) as error:
            problem = str(error)
            if problem != str(self._refusals.get(name)):
                log.error("group %s gets no samplers and is asked for again: %s", name, error)
            self._refusals[name] = error
        else:
            self._refusals.pop(name, None)
        return fleet_pb2.GroupTarget(group=name, num_target=num, num_held=held, problem=problem)

    def _check_start(self, targets: Mapping[str, int]) -> None:
        """A fleet that never had a sampler and is refused every one won't come by waiting."""
        wanted = [name for name, num in targets.items() if num]
        if self._had_samplers or not wanted:
            return
        errors = [self._refusals.get(name) for name in wanted]
        if all(isinstance(error, BadInputError) for error in errors) and errors[0]:
            raise errors[0]

    async def _report(self, targets: list[fleet_pb2.GroupTarget]) -> None:
        problem = self._settings.problem
        request = fleet_pb2.ReportTargetsRequest(targets=targets, problem=problem)
        try:
            with rpc.calling(self._address):
                await self._gateway.ReportTargets(request, timeout=rpc.DEADLINE_S)
        except RetryError as error:
            log.warning("the targets were not reported: %s", error)


def samplers_from_pb(
    status: fleet_pb2.StatusReply, fleet: FleetConfig
) -> dict[str, list[SeenSampler]]:
    """The samplers that the gateway knows, lost ones too, by group of the run file."""
    seen: dict[str, list[SeenSampler]] = {group.name: [] for group in fleet.groups}
    for sampler in status.samplers:
        if sampler.register.group in seen:
            seen[sampler.register.group].append(
                SeenSampler(
                    num_sessions=sampler.num_sessions,
                    kv_used_fraction=sampler.heartbeat.kv_used_fraction,
                    is_ready=sampler.state == SamplerPhase.READY,
                )
            )
    return seen


def demand_from_pb(message: fleet_pb2.Demand) -> Demand:
    """What the gateway knows of the producer and the trainer; what is unset isn't known yet."""
    optional = ("taken_per_second", "session_seconds", "staleness", "work")
    return Demand(
        num_queued=message.num_queued,
        backlog=message.backlog,
        **{name: getattr(message, name) for name in optional if message.HasField(name)},
    )
