"""The fleet's sections of a run file: [fleet], [sampling], [episodes], [tasks], [autoscaler].

Owns their models, defaults and cross-checks. Must not import an engine: the gateway reads these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from contracts.errors import BadInputError
from contracts.runfile import Section, read_resolved, validate_section
from contracts.types import KvFormat, Purpose, SamplingParams, WeightFormat
from sampler_fleet.cost import Price, Prices
from sampler_fleet.episodes.agent import AgentConfig, EpisodeLimits
from sampler_fleet.episodes.base import Environment
from sampler_fleet.episodes.containers.launch import SandboxConfig
from sampler_fleet.episodes.grading import GradingLimits
from sampler_fleet.providers.modal_config import ModalConfig, ModalGroupConfig


class SglangConfig(Section):
    """Where a sampler with `engine = "sglang"` finds its server; each needs one of its own."""

    address: str = ""  # http://HOST:PORT of one that runs; empty: the sampler starts one
    python: str = ""  # of the environment that has SGLang; empty: the sampler's own
    arguments: tuple[str, ...] = ()  # launch flags, which win over those of the table


class GroupConfig(Section):
    """One sampler group: samplers alike in accelerator, precision and kernels.

    `capacity` is relative: a group's share of the sessions of its purpose is its capacity over
    the sum of those. "measured" takes the tokens/s its ready samplers can draw, which follows
    samplers that come and go; all groups of a purpose or none. `split_k` is the reduction order of
    the embedded engine's kernels.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    purpose: Purpose = Purpose.TRAIN
    accelerator: str = "cpu"
    weight_format: WeightFormat
    kv_format: KvFormat = KvFormat.FP8
    activation_format: Literal["none", "fp8", "nvfp4"] = "none"
    samplers: int = Field(default=1, ge=0)
    min_samplers: int | None = Field(default=None, ge=0)
    max_samplers: int | None = Field(default=None, ge=0)
    provider: Literal["local", "modal"] = "local"  # who starts and stops its samplers
    num_accelerators: int = Field(default=1, ge=1)  # of one sampler
    price_per_hour: Prices = ()
    max_sessions: int = Field(default=16, ge=1)
    capacity: float | Literal["measured"] = 1.0
    split_k: int = Field(default=1, ge=1)
    engine: Literal["embedded", "sglang"] = "embedded"
    sglang: SglangConfig = SglangConfig()
    modal: ModalGroupConfig = ModalGroupConfig()

    @field_validator("capacity", mode="before")
    @classmethod
    def _is_positive(cls, capacity: object) -> object:
        is_number = isinstance(capacity, int | float) and 0 < capacity < math.inf
        if not is_number and capacity != "measured":
            raise ValueError('a number above 0, or "measured"')
        return capacity

    @model_validator(mode="after")
    def _in_bounds(self) -> GroupConfig:
        low, high = self.bounds
        if not low <= self.samplers <= high:
            raise ValueError("min_samplers <= samplers <= max_samplers")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most samplers."""
        low, high = self.min_samplers, self.max_samplers
        return (
            self.samplers if low is None else low,
            self.samplers if high is None else high,
        )


class FleetConfig(Section):
    """[fleet]: the groups, and how long anybody waits for anybody."""

    groups: tuple[GroupConfig, ...] = Field(min_length=1)
    prices: dict[str, Prices] = Field(default={})  # by accelerator
    modal: ModalConfig = ModalConfig()
    max_context_tokens: int = Field(default=4096, ge=16)
    heartbeat_seconds: float = Field(default=1.0, gt=0)
    lease_seconds: float = Field(default=15.0, gt=0)  # without a heartbeat: lost
    assemble_seconds: float = Field(default=60.0, ge=0)  # wait this long for all groups at start
    grace_seconds: float = Field(default=60.0, ge=0)  # a session whose group is away waits so long
    stall_seconds: float = Field(default=300.0, gt=0)  # a running request without a new token
    drain_seconds: float = Field(default=30.0, ge=0)  # to finish what runs before leaving
    session_idle_seconds: float = Field(default=3600.0, gt=0)  # then its place is given up
    measure_seconds: float = Field(default=0.5, ge=0)  # a sampler's tokens/s, before it joins
    kv_limit: float = Field(default=0.95, gt=0, le=1)  # a fuller KV cache gets no new session
    max_failovers: int = Field(default=4, ge=0)  # per turn

    @model_validator(mode="after")
    def _consistent(self) -> FleetConfig:
        doubled = [name for name, num in Counter(g.name for g in self.groups).items() if num > 1]
        if doubled:
            raise ValueError(f"group names that differ from each other, not {doubled[0]!r} twice")
        for purpose in Purpose:
            capacities = [g.capacity for g in self.groups if g.purpose == purpose]
            if 0 < capacities.count("measured") < len(capacities):
                raise ValueError(f"capacity measured in all {purpose} groups or in none")
            if "measured" in capacities and not self.measure_seconds:
                raise ValueError("measure_seconds above 0 where capacity is measured")
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("lease_seconds of at least two heartbeats")
        unpriced = [group.accelerator for group in self.groups if not self.prices_of(group)]
        unused = self.prices.keys() - {group.accelerator for group in self.groups}
        if unpriced and unused:  # a name may be misspelt; a base file's further prices do no harm
            raise ValueError(
                f"prices of accelerators that a group has, not {min(unused)}, "
                f"while {min(unpriced)} has none"
            )
        return self

    def group(self, name: str) -> GroupConfig:
        """The group of that name; BadInputError names the known ones."""
        for group in self.groups:
            if group.name == name:
                return group
        raise BadInputError(
            "sampler group", expected=f"one of {', '.join(g.name for g in self.groups)}", found=name
        )

    def prices_of(self, group: GroupConfig) -> tuple[Price, ...]:
        """Dated prices of one accelerator of a group; none if nobody gave any."""
        return group.price_per_hour or self.prices.get(group.accelerator, ())

    def shares(
        self, purpose: Purpose, measured: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Each group's exact share of the sessions of a purpose; they sum to 1.

        `measured` holds tokens/s by group, for groups whose capacity is measured; until anybody
        can draw any, all are alike.
        """
        groups = [group for group in self.groups if group.purpose == purpose]
        capacities = {
            group.name: (measured or {}).get(group.name, 0.0)
            if group.capacity == "measured"
            else group.capacity
            for group in groups
        }
        if not any(capacities.values()):
            capacities = dict.fromkeys(capacities, 1.0)
        total = sum(capacities.values())
        return {name: capacity / total for name, capacity in capacities.items()}


class SamplingConfig(Section):
    """[sampling]: how training episodes draw tokens. Stop tokens come from the chat format."""

    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: int = Field(default=128, ge=1)
    num_candidates: int = Field(default=64, ge=1)
    return_routed_experts: bool = False  # and the trainer sends tokens to the same experts

    def params(self) -> SamplingParams:
        return SamplingParams(**self.model_dump())


class EpisodesConfig(Section):
    """[episodes]: how many run at once, how they are grouped, and when production pauses."""

    agent: AgentConfig = AgentConfig()
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxConfig = SandboxConfig()
    grading: GradingLimits = GradingLimits()
    group_size: int = Field(default=8, ge=2)  # G, samples per prompt
    max_concurrent: int = Field(default=32, ge=1)
    max_concurrent_evaluation: int = Field(default=32, ge=1)
    queue_groups: int = Field(default=16, ge=1)  # completed, not yet taken by the trainer
    max_retries: int = Field(default=3, ge=0)  # of an episode lost to the infrastructure
    num_sandboxes: int = Field(default=0, ge=0)  # at once; 0: as many as episodes run at once
    num_graders: int = Field(default=2, ge=1)  # sandboxes that grade, at once


class TasksConfig(Section):
    """[tasks]: the tasks of both splits, generated or from a source (docs/tasks.md).

    `environment` says of what kind generated tasks are: faulty code in a sandbox, or a
    place on a grid to walk to (`episodes/grid.py`), which no sandbox is needed for.

    With a source, `num_train` and `num_heldout` are the most that are taken of it. Subset files
    have one id per line; a split without one has all tasks that are not in the other's, but those
    that say they are of the other split.
    """

    num_train: int = Field(default=512, ge=1)
    num_heldout: int = Field(default=64, ge=1)
    seed: int = Field(default=0, ge=0)
    environment: Environment = "code"
    source: str = ""  # directory of tasks in the local format; empty: they are generated
    heldout_share: float = Field(default=0.2, ge=0, lt=1)  # of tasks that name no split
    ids: str = ""  # subset file: only these tasks of the source count
    train_ids: str = ""  # subset file
    heldout_ids: str = ""  # subset file

    @model_validator(mode="after")
    def _subsets_of_a_source(self) -> TasksConfig:
        if not self.source and (self.ids or self.train_ids or self.heldout_ids):
            raise ValueError("a source that ids, train_ids and heldout_ids are of")
        if self.source and self.environment != "code":
            raise ValueError("a source only in the environment of code")
        return self


class AutoscalerConfig(Section):
    """[autoscaler]: how the autoscaler reacts; without it groups keep `samplers`.

    Times are in seconds, the backlog in trajectories.
    """

    every_seconds: float = Field(default=30.0, gt=0)
    cooldown_up_seconds: float = Field(default=60.0, ge=0)  # after a group's last change
    cooldown_down_seconds: float = Field(default=600.0, ge=0)
    start_seconds: float = Field(default=900.0, gt=0)  # a group short for longer isn't counted on
    headroom: float = Field(default=0.1, ge=0)  # places beyond those wanted before any is given up
    backlog_target: float = Field(default=1280.0, ge=0)  # above an update's, or the trainer waits
    horizon_seconds: float = Field(default=1800.0, gt=0)  # to bring the backlog there
    staleness_limit: float | None = Field(default=None, gt=0)  # mean, in versions
    kv_limit: float = Field(default=0.9, gt=0, le=1)  # a fuller KV cache takes fewer sessions


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fleet's sections of one run, validated."""

    fleet: FleetConfig
    sampling: SamplingConfig
    episodes: EpisodesConfig
    tasks: TasksConfig
    autoscaler: AutoscalerConfig | None  # None: the fleet's size is fixed

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Resolved sections as JSON values."""
        sections: dict[str, Section] = {
            "fleet": self.fleet,
            "sampling": self.sampling,
            "episodes": self.episodes,
            "tasks": self.tasks,
        }
        if self.autoscaler:
            sections["autoscaler"] = self.autoscaler
        return {name: section.model_dump(mode="json") for name, section in sections.items()}


def read_settings(path: str | Path) -> Settings:
    """The fleet's sections of a run file or run record; BadInputError on the first thing wrong."""
    sections = read_resolved(path)
    settings = Settings(
        fleet=validate_section(FleetConfig, "fleet", sections.get("fleet", {})),
        sampling=validate_section(SamplingConfig, "sampling", sections.get("sampling", {})),
        episodes=validate_section(EpisodesConfig, "episodes", sections.get("episodes", {})),
        tasks=validate_section(TasksConfig, "tasks", sections.get("tasks", {})),
        autoscaler=validate_section(AutoscalerConfig, "autoscaler", sections["autoscaler"])
        if "autoscaler" in sections
        else None,
    )
    if not settings.fleet.shares(Purpose.TRAIN):
        raise BadInputError(
            "run file, fleet.groups",
            expected=f"a group with purpose {Purpose.TRAIN}",
            found="evaluation groups only",
        )
    longest = settings.episodes.limits.max_context_tokens
    if settings.fleet.max_context_tokens < longest:
        raise BadInputError(
            "run file, fleet.max_context_tokens",
            expected=f"at least episodes.limits.max_context_tokens, {longest}",
            found=settings.fleet.max_context_tokens,
        )
    return settings
