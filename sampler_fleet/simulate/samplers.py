"""The simulated samplers of all groups behind the real registry and the real router.

Owns starting, draining and losing samplers, the sessions on them, and the meter. It stands where a
provider and the sampler processes stand in a run. Must not know prompts or the trainer.

A session whose sampler goes moves at once, with its tokens, to the sampler of its group that the
router names. If its group has none it waits for `grace_seconds`, and is then lost.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.types import Purpose, SamplerInfo
from sampler_fleet.cost import CostMeter, Price
from sampler_fleet.registry import Registry
from sampler_fleet.router import Route, Router
from sampler_fleet.simulate.machine import Machine, Session
from sampler_fleet.simulate.scenario import Scenario
from sampler_fleet.simulate.timeline import Timeline

FINGERPRINT = "simulated"
TRAINER = "trainer"  # the trainer's account beside the groups'


class _Level:
    """A number over time and its integral."""

    def __init__(self) -> None:
        self.value = 0
        self._area = 0.0
        self._since = 0.0

    def add(self, change: int, now: float) -> None:
        self._area += self.value * (now - self._since)
        self._since = now
        self.value += change

    def area(self, now: float) -> float:
        return self._area + self.value * (now - self._since)


@dataclass(eq=False)
class _Start:
    """A sampler that is asked for and not ready; billed from when the provider has one."""

    name: str
    is_billed: bool = False


@dataclass
class Pool:
    """One group: samplers asked for, and levels in sessions."""

    target: int
    starting: dict[str, _Start]
    busy: _Level  # places taken
    places: _Level  # places of ready samplers
    waiting: dict[str, Session]  # their group has no sampler
    machine_rng: random.Random
    available_at: float = 0.0
    num_billed: int = 0


class Samplers:
    """All samplers. `on_end` gets sessions that ended, `on_lost` those the fleet gave up;
    `on_room` hears that there may be places again."""

    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        *,
        on_end: Callable[[Session], None],
        on_lost: Callable[[Session], None],
        on_room: Callable[[], None],
    ) -> None:
        self._scenario = scenario
        self._timeline = timeline
        self._on_end, self._on_lost, self._on_room = on_end, on_lost, on_room
        fleet = scenario.fleet
        self._groups = {group.name: group for group in fleet.groups}
        self.registry = Registry(
            fleet.groups,
            model_fingerprint=FINGERPRINT,
            tokenizer_fingerprint=FINGERPRINT,
            lease_seconds=math.inf,
        )
        self.router = Router({Purpose.TRAIN: fleet.shares(Purpose.TRAIN)})
        prices: dict[str, Sequence[Price]] = {g.name: fleet.prices_of(g) for g in fleet.groups}
        prices[TRAINER] = fleet.prices.get(scenario.trainer.accelerator, ())
        self.meter = CostMeter(prices)
        for group in self._groups:
            self.meter.hold(group, 0, scenario.start_utc)
        self.meter.hold(TRAINER, scenario.trainer.num_accelerators, scenario.start_utc)
        self.version = 1
        self.num_free = 0  # places
        self.counts: Counter[str] = Counter()
        self.pools = {
            name: Pool(
                target=0,
                starting={},
                busy=_Level(),
                places=_Level(),
                waiting={},
                machine_rng=random.Random(f"{scenario.config.seed}/machines/{name}"),
            )
            for name in self._groups
        }
        self._machines: dict[str, Machine] = {}

    @property
    def now_utc(self) -> float:
        return self._scenario.start_utc + self._timeline.now

    def num_ready(self, group: str) -> int:
        return len(self.registry.ready(group))

    # What the provider is asked.

    def scale(self, group: str, num: int) -> None:
        """Asks for so many samplers of a group."""
        pool = self.pools[group]
        pool.target = num
        self._replace_missing(group)
        while len(pool.starting) + self.num_ready(group) > num:
            if pool.starting:
                self._cancel(group, max(pool.starting))
            else:
                emptiest = min(
                    self.registry.ready(group),
                    key=lambda s: (self.router.num_sessions[s.sampler_id], s.sampler_id),
                )
                self.counts["samplers_drained"] += 1
                self.registry.drain(emptiest.sampler_id, "scaled down")
                self._remove(group, emptiest.sampler_id)

    def preempt(self, group: str, share: float) -> None:
        """The provider takes a share of a group's ready samplers away, the first by name."""
        names = sorted(sampler.sampler_id for sampler in self.registry.ready(group))
        for name in names[: math.ceil(share * len(names) - 1e-9)]:
            self._preempt(group, name, self._machines[name])

    def withhold(self, group: str, until: float) -> None:
        """The provider has no more samplers for a group until then."""
        self.pools[group].available_at = until

    def _replace_missing(self, group: str) -> None:
        pool = self.pools[group]
        taken = {s.sampler_id for s in self.registry.ready(group)} | set(pool.starting)
        free = (f"{group}-{i:04d}" for i in range(len(taken) + pool.target))
        free = (name for name in free if name not in taken)
        for _ in range(pool.target - len(taken)):
            name = next(free)
            start = pool.starting[name] = _Start(name)
            begin = max(self._timeline.now, pool.available_at)
            self._timeline.at(begin, self._boot, group, start)

    def _boot(self, group: str, start: _Start) -> None:
        """The provider has the machine; it loads the weights, and is billed."""
        pool, now = self.pools[group], self._timeline.now
        if pool.starting.get(start.name) is not start:
            return  # cancelled
        if pool.available_at > now:  # sold out while it waited
            self._timeline.at(pool.available_at, self._boot, group, start)
            return
        start.is_billed = True
        self._bill(group, 1)
        machine = self._scenario.machines[group]
        spread = pool.machine_rng.lognormvariate(0.0, machine.start_sigma)
        self._timeline.at(now + machine.start_seconds * spread, self._join, group, start)

    def _cancel(self, group: str, name: str) -> None:
        if self.pools[group].starting.pop(name).is_billed:
            self._bill(group, -1)

    def _bill(self, group: str, change: int) -> None:
        pool = self.pools[group]
        pool.num_billed += change
        self.meter.hold(group, pool.num_billed * self._groups[group].num_accelerators, self.now_utc)

    # What samplers do.

    def _join(self, group: str, start: _Start) -> None:
        pool, config, name = self.pools[group], self._groups[group], start.name
        if pool.starting.get(name) is not start:
            return  # cancelled
        del pool.starting[name]
        places = config.max_sessions // self._scenario.workload.lockstep
        info = SamplerInfo(
            sampler_id=name,
            group=group,
            accelerator=config.accelerator,
            weight_format=config.weight_format,
            kv_format=config.kv_format,
            max_sessions=places,
            model_fingerprint=FINGERPRINT,
            tokenizer_fingerprint=FINGERPRINT,
            version=self.version,
        )
        now = self._timeline.now
        self.registry.register(info, now)
        behaviour = self._scenario.machines[group]
        machine = Machine(tokens_per_second=behaviour.tokens_per_second, places=places, now=now)
        self._machines[name] = machine
        pool.places.add(places, now)
        self.num_free += places
        self.counts["samplers_joined"] += 1
        if behaviour.preemptions_per_day:
            lives = pool.machine_rng.expovariate(behaviour.preemptions_per_day / 86400)
            self._timeline.at(now + lives, self._preempt, group, name, machine)
        for session in list(pool.waiting.values()):
            del pool.waiting[session.session_id]
            self.place(session)
        self._on_room()

    def _preempt(self, group: str, name: str, machine: Machine) -> None:
        if self._machines.get(name) is not machine:
            return  # it went before
        self.counts["preemptions"] += 1
        self._remove(group, name)
        self._replace_missing(group)

    def _remove(self, group: str, name: str) -> None:
        """A sampler is gone; its sessions move."""
        now, pool, machine = self._timeline.now, self.pools[group], self._machines.pop(name)
        machine.advance(now, self.version)
        self.registry.lose(name, "gone")
        pool.busy.add(-min(len(machine), machine.places), now)
        pool.places.add(-machine.places, now)
        self.num_free -= max(0, machine.places - len(machine))
        self._bill(group, -1)
        for session in machine.evict():
            self.counts["failovers"] += 1
            self.place(session)

    # What sessions do.

    def place(self, session: Session) -> None:
        """Routes a session, new or moved, and runs it where the router says."""
        route = self.router.route(
            session.session_id,
            self.registry,
            purpose=Purpose.TRAIN,
            min_version=0,
            now=self._timeline.now,
        )
        if isinstance(route, Route):
            self._run(session, route)
            return
        held = self.router.place(session.session_id)
        assert held is not None, "a new session is placed only where there is room"
        self.pools[held.group].waiting[session.session_id] = session
        patience = self._timeline.now + self._scenario.fleet.grace_seconds
        self._timeline.at(patience, self._give_up, held.group, session, patience)
        session.waits_until = patience

    def _run(self, session: Session, route: Route) -> None:
        now, machine = self._timeline.now, self._machines[route.sampler_id]
        machine.advance(now, self.version)
        if len(machine) < machine.places:
            self.num_free -= 1
            self.pools[route.group].busy.add(1, now)
        machine.add(session)
        self._announce(route, machine)

    def _announce(self, route: Route, machine: Machine) -> None:
        if (ends_at := machine.next_end()) is not None:
            self._timeline.at(ends_at, self._ended, route, machine, machine.stamp)

    def _ended(self, route: Route, machine: Machine, stamp: int) -> None:
        if machine.stamp != stamp:
            return  # something changed since this was announced
        machine.advance(self._timeline.now, self.version)
        session = machine.pop()
        if len(machine) < machine.places:
            self.num_free += 1
            self.pools[route.group].busy.add(-1, self._timeline.now)
        self.router.end(session.session_id)
        self._announce(route, machine)
        self._on_end(session)

    def _give_up(self, group: str, session: Session, patience: float) -> None:
        waiting = self.pools[group].waiting
        if session.session_id not in waiting or session.waits_until != patience:
            return
        del waiting[session.session_id]
        self.router.end(session.session_id)
        self._on_lost(session)

    def switch(self, version: int) -> None:
        """Every sampler goes on with this version."""
        for machine in self._machines.values():
            machine.advance(self._timeline.now, self.version)
        self.version = max(self.version, version)
