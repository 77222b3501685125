"""Scenario files: a fleet as in a run file, and what the world does to it.

Owns the sections' models and reading, with `base = "other.toml"` for what two scenarios share.
[fleet], [episodes] are a run file's own sections. Must not simulate.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from contracts.errors import BadInputError
from contracts.runfile import Section, validate_section
from contracts.types import Purpose
from sampler_fleet.config import AutoscalerConfig, EpisodesConfig, FleetConfig, GroupConfig
from sampler_fleet.cost import Price

DEFAULT_MACHINE = "default"


class ScenarioConfig(Section):
    """[scenario]: what it is called and how long it lasts."""

    name: str = Field(min_length=1)
    days: float = Field(gt=0, le=366)
    start: datetime  # UTC where it names no zone; prices are looked up by it
    seed: int = Field(default=0, ge=0)
    num_samples: int = Field(default=400, ge=2)  # points of the curves over time

    @field_validator("start")
    @classmethod
    def _in_utc(cls, start: datetime) -> datetime:
        return start.astimezone(UTC) if start.tzinfo else start.replace(tzinfo=UTC)


class WorkloadConfig(Section):
    """[workload]: how long episodes are. Lengths are log-normal.

    `lockstep` episodes of a prompt share one simulated session: they start and end together on one
    sampler. It makes large fleets cheap to simulate and must divide group_size and the sessions.
    """

    tokens_median: float = Field(gt=0)  # sampled tokens of an episode
    tokens_sigma: float = Field(default=0.0, ge=0, le=3)
    growth_per_day: float = Field(default=0.0, gt=-1)  # of the median
    lockstep: int = Field(default=1, ge=1)


class MachineConfig(Section):
    """[machines.GROUP], or [machines.default]: how a group's samplers behave.

    `tokens_per_second` is what one session makes per second of its life, tools and prefill
    included, while its sampler has at most `max_sessions`; beyond them the sessions share.
    """

    tokens_per_second: float | None = Field(default=None, gt=0)
    start_seconds: float | None = Field(default=None, ge=0)  # median, from asked for to serving
    start_sigma: float | None = Field(default=None, ge=0, le=3)
    preemptions_per_day: float | None = Field(default=None, ge=0)  # of one sampler


class TrainerConfig(Section):
    """[trainer]: an update takes `overhead_seconds` and its tokens over `tokens_per_second`."""

    prompts_per_update: int = Field(ge=1)
    overhead_seconds: float = Field(ge=0)
    tokens_per_second: float = Field(gt=0)
    sync_seconds: float = Field(default=0.0, ge=0)  # from an update to samplers that use it
    accelerator: str = ""
    num_accelerators: int = Field(default=0, ge=0)


class EventConfig(Section):
    """[[events]]: what happens once, `at_hours` after the start.

    `preempt` takes `share` of the ready samplers at once; `unavailable`: for `hours` no sampler
    starts; `bounds` sets min_samplers and max_samplers; `pause` stops the trainer for `hours`.
    Without `groups` it concerns all.
    """

    kind: Literal["preempt", "unavailable", "bounds", "pause"]
    at_hours: float = Field(ge=0)
    groups: tuple[str, ...] = ()
    share: float = Field(default=1.0, gt=0, le=1)
    hours: float = Field(default=0.0, ge=0)
    min_samplers: int | None = Field(default=None, ge=0)
    max_samplers: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _can_happen(self) -> EventConfig:
        low, high = self.min_samplers, self.max_samplers
        if low is not None and high is not None and low > high:
            raise ValueError("min_samplers <= max_samplers")
        if self.kind in ("unavailable", "pause") and not self.hours:
            raise ValueError(f"hours above 0 where kind is {self.kind!r}, not hours = 0")
        return self


class Machine(Section):
    """A group's machine, resolved."""

    tokens_per_second: float
    start_seconds: float = 0.0
    start_sigma: float = 0.0
    preemptions_per_day: float = 0.0


class _Sections(Section):
    """A whole scenario file."""

    scenario: ScenarioConfig
    fleet: FleetConfig
    episodes: EpisodesConfig
    workload: WorkloadConfig
    machines: dict[str, MachineConfig]
    trainer: TrainerConfig
    autoscaler: AutoscalerConfig | None = None
    events: tuple[EventConfig, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> _Sections:
        groups = {group.name: group for group in self.fleet.groups}
        if others := [g.name for g in self.fleet.groups if g.purpose != Purpose.TRAIN]:
            raise BadInputError(
                "scenario, fleet.groups", expected="training groups only", found=others[0]
            )
        if self.autoscaler is None and any(event.kind == "bounds" for event in self.events):
            raise BadInputError(
                "scenario, events", expected="[autoscaler], which keeps to bounds", found="none"
            )
        named = {name for event in self.events for name in event.groups}
        for rule, names in (
            ("machines", set(self.machines) - {DEFAULT_MACHINE}),
            ("events.groups", named),
        ):
            if unknown := sorted(names - set(groups)):
                raise BadInputError(
                    f"scenario, {rule}", expected=f"a group ({', '.join(groups)})", found=unknown[0]
                )
        for group in self.fleet.groups:
            _check_divides(self.workload.lockstep, group.max_sessions, f"{group.name} max_sessions")
        _check_divides(self.workload.lockstep, self.episodes.group_size, "episodes.group_size")
        if self.episodes.queue_groups < self.trainer.prompts_per_update:
            raise BadInputError(
                "scenario, episodes.queue_groups",
                expected=f"at least trainer.prompts_per_update, {self.trainer.prompts_per_update}",
                found=self.episodes.queue_groups,
            )
        return self


def _check_divides(lockstep: int, number: int, what: str) -> None:
    if number % lockstep:
        raise BadInputError(
            "scenario, workload.lockstep", expected=f"a divisor of {what}, {number}", found=lockstep
        )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario, checked. `machines` and `prices` are by group."""

    config: ScenarioConfig
    fleet: FleetConfig
    episodes: EpisodesConfig
    workload: WorkloadConfig
    machines: dict[str, Machine]
    trainer: TrainerConfig
    autoscaler: AutoscalerConfig | None
    events: tuple[EventConfig, ...]

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def end_s(self) -> float:
        return self.config.days * 86400

    @property
    def start_utc(self) -> float:
        """POSIX seconds of the scenario's second 0."""
        return self.config.start.timestamp()


def read_scenario(path: str | Path) -> Scenario:
    """A scenario file over its base.

    Raises:
        BadInputError: the first thing wrong, in one sentence.
        FileNotFoundError: no such file.
    """
    data = _read(Path(path), ())
    try:
        return make_scenario(data)
    except BadInputError as error:
        rule = error.rule.removeprefix("run file, scenario file.").removeprefix("run file, ")
        rule = rule.removeprefix("scenario, ")
        raise BadInputError(
            f"scenario {path}, {rule}", expected=error.expected, found=error.found
        ) from None


def make_scenario(data: dict[str, Any]) -> Scenario:
    """The sections as TOML gives them, checked; raises BadInputError."""
    sections = validate_section(_Sections, "scenario file", data)
    fleet = sections.fleet
    first = sections.scenario.start
    for group in fleet.groups:
        _check_priced(fleet.prices_of(group), f"fleet.prices.{group.accelerator}", first)
    trainer = sections.trainer
    if trainer.num_accelerators:
        table = fleet.prices.get(trainer.accelerator, ())
        _check_priced(table, f"fleet.prices.{trainer.accelerator}", first)
    return Scenario(
        config=sections.scenario,
        fleet=fleet,
        episodes=sections.episodes,
        workload=sections.workload,
        machines={group.name: _machine(sections.machines, group) for group in fleet.groups},
        trainer=trainer,
        autoscaler=sections.autoscaler,
        events=sections.events,
    )


def _check_priced(prices: tuple[Price, ...], where: str, start: datetime) -> None:
    if not any(price.since <= start for price in prices):
        raise BadInputError(
            f"scenario, {where}",
            expected=f"a price in force on {start.date()}",
            found="none" if not prices else f"the first since {prices[0].since.date()}",
        )


def _machine(machines: dict[str, MachineConfig], group: GroupConfig) -> Machine:
    """The group's own keys over the default's."""
    merged: dict[str, Any] = {}
    for name in (DEFAULT_MACHINE, group.name):
        if name in machines:
            merged |= machines[name].model_dump(exclude_none=True)
    return validate_section(Machine, f"machines.{group.name}", merged)


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's tables over those of its base."""
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(f"scenario {path}", expected="valid TOML", found=str(error)) from None
    name = data.pop("base", None)
    if name is None:
        return data
    if not isinstance(name, str) or path.resolve() in seen:
        raise BadInputError(
            f"scenario {path}, base",
            expected="the name of a scenario file that is not built on this one",
            found=repr(name),
        )
    return _over(_read(path.parent / name, (*seen, path.resolve())), data)


def _over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged; anything else, lists of tables too, takes the place of the base's."""
    merged = dict(base)
    for key, value in changes.items():
        known = base.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            value = _over(known, value)
        merged[key] = value
    return merged
