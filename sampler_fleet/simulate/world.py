"""The event loop of a scenario: producer and trainer over the simulated samplers.

Owns prompts and their trajectories from start to update, and what is recorded. The producer starts
episodes as `producer.py` does (`max_concurrent`, `queue_groups`, retries), but only while there is
a place for them. Routing, admission and scaling are the run's own code. Must not draw.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sampler_fleet.autoscaler import Autoscaler, Demand, SeenSampler
from sampler_fleet.config import FleetConfig
from sampler_fleet.cost import Cost
from sampler_fleet.simulate.machine import Session
from sampler_fleet.simulate.records import Result, Sample, Update
from sampler_fleet.simulate.samplers import TRAINER, Samplers
from sampler_fleet.simulate.scenario import EventConfig, Scenario
from sampler_fleet.simulate.timeline import Timeline


@dataclass
class _Prompt:
    """The sessions of a prompt as they end."""

    number: int
    num_open: int
    ended: list[tuple[Session, float]] = field(default_factory=list)  # and their seconds

    @property
    def num_trajectories(self) -> int:
        return sum(session.size for session, _ in self.ended)


class World:
    """One scenario; `run` lives through it once."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._fleet = scenario.fleet  # as events change it
        self._timeline = Timeline()
        self._samplers = Samplers(
            scenario,
            self._timeline,
            on_end=self._session_ended,
            on_lost=self._session_lost,
            on_room=self._start_sessions,
        )
        self._counts: Counter[str] = Counter()
        self._lengths = random.Random(f"{scenario.config.seed}/lengths")
        self._prompts: dict[int, _Prompt] = {}  # with open sessions
        self._to_start: deque[Session] = deque()
        self._num_in_flight = 0  # episodes that have a slot, as the producer counts them
        self._queue: deque[_Prompt] = deque()  # completed, not taken
        self._num_queued = 0  # trajectories in it
        self._version = 1
        self._batch: list[_Prompt] | None = None  # in the update under way
        self._batch_ends = 0.0
        self._waits_since = 0.0
        self._paused_until = 0.0
        self._facts: dict[str, float] = {}  # of the last update, for the autoscaler
        self._updates: list[Update] = []
        self._samples: list[Sample] = []
        self._last_areas: dict[str, tuple[float, float]] = {}
        self._last_costs: dict[str, Cost] = {}
        self._autoscaler = (
            Autoscaler(scenario.autoscaler, scenario.fleet.groups, now=0.0)
            if scenario.autoscaler
            else None
        )

    def run(self) -> Result:
        scenario, samplers, timeline = self._scenario, self._samplers, self._timeline
        for event in scenario.events:
            timeline.at(event.at_hours * 3600, self._happen, event)
        for group in scenario.fleet.groups:
            samplers.scale(group.name, group.samplers)
        if self._autoscaler:
            timeline.at(0.0, self._autoscale)
        num = scenario.config.num_samples
        for index in range(1, num + 1):
            timeline.at(scenario.end_s * index / num, self._sample)
        timeline.run(scenario.end_s)
        return self._result()

    # The producer.

    def _start_sessions(self) -> None:
        while self._samplers.num_free > 0 and (session := self._next_session()):
            self._samplers.place(session)

    def _next_session(self) -> Session | None:
        """The next session to start, if the producer starts one now."""
        episodes, lockstep = self._scenario.episodes, self._scenario.workload.lockstep
        if not self._to_start:
            if self._num_in_flight + lockstep > episodes.max_concurrent:
                return None
            if len(self._queue) >= episodes.queue_groups:
                return None
            self._draw_prompt()
        if self._to_start[0].num_attempts == 1:
            if self._num_in_flight + lockstep > episodes.max_concurrent:
                return None
            self._num_in_flight += lockstep
        session = self._to_start.popleft()
        session.started = self._timeline.now
        session.work = self._num_in_flight + self._backlog()
        return session

    def _draw_prompt(self) -> None:
        """The next prompt's sessions, the same lengths in every fleet of one seed."""
        workload, now = self._scenario.workload, self._timeline.now
        number = self._counts["prompts_started"]
        self._counts["prompts_started"] += 1
        num = self._scenario.episodes.group_size // workload.lockstep
        self._prompts[number] = _Prompt(number=number, num_open=num)
        median = workload.tokens_median * (1 + workload.growth_per_day) ** (now / 86400)
        for sample in range(num):
            spread = self._lengths.lognormvariate(0.0, workload.tokens_sigma)
            self._to_start.append(
                Session(
                    session_id=f"train.{number}.{sample}.0",
                    prompt=number,
                    size=workload.lockstep,
                    num_tokens=max(1.0, median * spread),
                )
            )

    def _session_ended(self, session: Session) -> None:
        self._num_in_flight -= session.size
        self._counts["trajectories_completed"] += session.size
        prompt = self._prompts[session.prompt]
        prompt.ended.append((session, self._timeline.now - session.started))
        self._close(prompt)
        self._start_sessions()

    def _session_lost(self, session: Session) -> None:
        """The infrastructure lost it: again from the start, or given up."""
        self._counts["tokens_lost"] += round(session.made * session.size)
        if session.num_attempts > self._scenario.episodes.max_retries:
            self._num_in_flight -= session.size
            self._counts["trajectories_failed"] += session.size
            self._close(self._prompts[session.prompt])
        else:
            self._counts["trajectories_retried"] += session.size
            attempts = session.num_attempts
            self._to_start.appendleft(
                Session(
                    session_id=f"{session.session_id.rpartition('.')[0]}.{attempts}",
                    prompt=session.prompt,
                    size=session.size,
                    num_tokens=session.num_tokens,
                    num_attempts=attempts + 1,
                )
            )
        self._start_sessions()

    def _close(self, prompt: _Prompt) -> None:
        """A prompt that has no open session is complete, or dropped as in the producer."""
        prompt.num_open -= 1
        if prompt.num_open:
            return
        del self._prompts[prompt.number]
        if prompt.num_trajectories < 2:
            self._counts["trajectories_dropped"] += prompt.num_trajectories
            return
        self._queue.append(prompt)
        self._num_queued += prompt.num_trajectories
        self._train()

    # The trainer.

    def _train(self) -> None:
        """Starts an update if the trainer is free and has a batch."""
        num, now = self._scenario.trainer.prompts_per_update, self._timeline.now
        if self._batch is not None or len(self._queue) < num or now < self._paused_until:
            return
        self._batch = batch = [self._queue.popleft() for _ in range(num)]
        self._num_queued -= sum(prompt.num_trajectories for prompt in batch)
        config, num_tokens = self._scenario.trainer, sum(s.num_tokens * s.size for s in _of(batch))
        seconds = config.overhead_seconds + num_tokens / config.tokens_per_second
        self._batch_ends = now + seconds
        self._timeline.at(self._batch_ends, self._updated, now - self._waits_since, seconds)
        self._start_sessions()

    def _updated(self, waited_s: float, seconds: float) -> None:
        batch, now = self._batch, self._timeline.now
        assert batch is not None, "an update has a batch"
        sessions = _of(batch)
        num_tokens = sum(s.num_tokens * s.size for s in sessions)
        num_trajectories = sum(session.size for session in sessions)
        ages = [self._version - session.mean_version for session in sessions]
        aged = sum(age * s.num_tokens * s.size for age, s in zip(ages, sessions, strict=True))
        self._version += 1
        costs = self._samplers.meter.read(self._samplers.now_utc)
        nothing = Cost(gpu_hours=0.0, dollars=0.0)
        self._updates.append(
            Update(
                version=self._version,
                ended_s=now,
                waited_s=waited_s,
                num_trajectories=num_trajectories,
                num_tokens=num_tokens,
                staleness_mean=aged / num_tokens,
                staleness_max=max(ages),
                costs={n: c - self._last_costs.get(n, nothing) for n, c in costs.items()},
                prompts=tuple(prompt.number for prompt in batch),
            )
        )
        self._last_costs = costs
        ended = [seconds * s.size for prompt in batch for s, seconds in prompt.ended]
        self._facts = {
            "taken_per_second": num_trajectories / seconds,
            "session_seconds": sum(ended) / num_trajectories,
            "staleness": aged / num_tokens,
            "work": sum(s.work * s.size for s in sessions) / num_trajectories,
        }
        self._counts["trajectories_trained"] += num_trajectories
        self._batch, self._waits_since = None, now
        sync = self._scenario.trainer.sync_seconds
        self._timeline.at(now + sync, self._samplers.switch, self._version)
        self._train()

    # The autoscaler.

    def _autoscale(self) -> None:
        autoscaler, samplers = self._autoscaler, self._samplers
        assert autoscaler is not None, "only scenarios with one get here"
        lockstep, num_sessions = self._scenario.workload.lockstep, samplers.router.num_sessions
        changed = autoscaler.step(
            fleet=self._fleet,
            samplers={
                group.name: [
                    SeenSampler(
                        num_sessions=num_sessions[s.sampler_id] * lockstep,
                        kv_used_fraction=s.load.kv_used_fraction,
                    )
                    for s in samplers.registry.ready(group.name)
                ]
                for group in self._fleet.groups
            },
            demand=self._demand(),
            now=self._timeline.now,
            now_utc=samplers.now_utc,
        )
        for group, num in changed.items():
            self._counts["targets_changed"] += 1
            samplers.scale(group, num)
        self._timeline.at(self._timeline.now + autoscaler.config.every_seconds, self._autoscale)

    def _demand(self) -> Demand:
        episodes = self._scenario.episodes
        queued = sum(session.size for session in self._to_start)
        if len(self._queue) < episodes.queue_groups:
            retried = sum(s.size for s in self._to_start if s.num_attempts > 1)
            queued = episodes.max_concurrent - self._num_in_flight + retried
        return Demand(num_queued=queued, backlog=self._backlog(), **self._facts)

    def _backlog(self) -> float:
        """Trajectories completed and not trained on; an update under way has its rest."""
        if not self._batch:
            return self._num_queued
        rest = (self._batch_ends - self._timeline.now) * self._facts.get("taken_per_second", 0.0)
        return self._num_queued + rest

    # What the world does, and what is seen of it.

    def _happen(self, event: EventConfig) -> None:
        now = self._timeline.now
        for group in event.groups or [group.name for group in self._fleet.groups]:
            match event.kind:
                case "preempt":
                    self._samplers.preempt(group, event.share)
                case "unavailable":
                    self._samplers.withhold(group, now + event.hours * 3600)
                case "bounds":
                    self._fleet = _with_bounds(self._fleet, group, event)
        if event.kind == "pause":
            self._paused_until = now + event.hours * 3600
            self._timeline.at(self._paused_until, self._resume)

    def _resume(self) -> None:
        self._waits_since = max(self._waits_since, self._timeline.now)
        self._train()

    def _sample(self) -> None:
        now = self._timeline.now
        areas = {
            name: (pool.busy.area(now), pool.places.area(now))
            for name, pool in self._samplers.pools.items()
        }
        before = self._last_areas or dict.fromkeys(areas, (0.0, 0.0))
        parts = {n: (b - before[n][0], p - before[n][1]) for n, (b, p) in areas.items()}
        self._last_areas = areas
        lockstep = self._scenario.workload.lockstep
        self._samples.append(
            Sample(
                at_s=now,
                num_ready={name: self._samplers.num_ready(name) for name in areas},
                num_sessions={
                    name: pool.busy.value * lockstep for name, pool in self._samplers.pools.items()
                },
                utilization={name: _ratio([part]) for name, part in parts.items()},
                overall_utilization=_ratio(parts.values()),
                backlog=self._num_queued,
            )
        )

    def _result(self) -> Result:
        episodes, lockstep = self._scenario.episodes, self._scenario.workload.lockstep
        open_prompts = self._prompts.values()
        counts = {
            **self._counts,
            **self._samplers.counts,
            "trajectories_started": self._counts["prompts_started"] * episodes.group_size,
            "trajectories_open": sum(prompt.num_open for prompt in open_prompts) * lockstep,
            "trajectories_in_open_prompts": sum(p.num_trajectories for p in open_prompts),
            "trajectories_in_update": sum(session.size for session in _of(self._batch or [])),
            "trajectories_queued": self._num_queued,
            "events": self._timeline.num_events,
        }
        return Result(
            name=self._scenario.name,
            groups=tuple(group.name for group in self._fleet.groups),
            days=self._scenario.config.days,
            updates=tuple(self._updates),
            samples=tuple(self._samples),
            counts=dict(sorted(counts.items())),
            utilization={name: _ratio([area]) for name, area in self._last_areas.items()},
            overall_utilization=_ratio(self._last_areas.values()),
            totals=self._samplers.meter.read(self._samplers.now_utc),
            trainer=TRAINER,
        )


def simulate(scenario: Scenario) -> Result:
    """Lives through a scenario; the same file and seed give the same result."""
    return World(scenario).run()


def _of(prompts: Sequence[_Prompt]) -> list[Session]:
    return [session for prompt in prompts for session, _ in prompt.ended]


def _with_bounds(fleet: FleetConfig, name: str, event: EventConfig) -> FleetConfig:
    """The fleet with a group's bounds changed where the event says so."""
    bounds = {"min_samplers": event.min_samplers, "max_samplers": event.max_samplers}
    changes = {key: value for key, value in bounds.items() if value is not None}
    groups = [g.model_copy(update=changes) if g.name == name else g for g in fleet.groups]
    return fleet.model_copy(update={"groups": tuple(groups)})


def _ratio(parts: Iterable[tuple[float, float]]) -> float | None:
    """Busy over places, of (busy, places) areas together."""
    busy, places = (sum(column) for column in zip(*parts, strict=True))
    return busy / places if places else None
