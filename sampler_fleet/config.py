"""The fleet's sections of a run file: [fleet], [sampling], [episodes], [tasks].

Owns their models, defaults and cross-checks. Must not import an engine: the gateway reads these.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from contracts.errors import BadInputError
from contracts.runfile import Section, read_resolved, validate_section
from contracts.types import KvFormat, Purpose, SamplingParams, WeightFormat
from sampler_fleet.cost import Price
from sampler_fleet.episodes.agent import EpisodeLimits
from sampler_fleet.episodes.grading import GradingLimits
from sampler_fleet.episodes.sandbox import SandboxLimits


class SglangConfig(Section):
    """Where a sampler with `engine = "sglang"` finds its server; each needs one of its own."""

    address: str = ""  # http://HOST:PORT of one that runs; empty: the sampler starts one
    python: str = ""  # of the environment that has SGLang; empty: the sampler's own
    arguments: tuple[str, ...] = ()  # launch flags, which win over those of the table


class GroupConfig(Section):
    """One sampler group: samplers alike in accelerator, precision and kernels.

    `capacity` is relative: a group's share of the sessions of its purpose is its capacity over
    the sum of those. `split_k` is the reduction order of the embedded engine's kernels.
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
    num_accelerators: int = Field(default=1, ge=1)  # of one sampler
    price_per_hour: tuple[Price, ...] = ()
    max_sessions: int = Field(default=16, ge=1)
    capacity: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    split_k: int = Field(default=1, ge=1)
    engine: Literal["embedded", "sglang"] = "embedded"
    sglang: SglangConfig = SglangConfig()

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
    prices: dict[str, tuple[Price, ...]] = Field(default={})  # by accelerator
    max_context_tokens: int = Field(default=4096, ge=16)
    heartbeat_seconds: float = Field(default=1.0, gt=0)
    lease_seconds: float = Field(default=15.0, gt=0)  # without a heartbeat: lost
    assemble_seconds: float = Field(default=60.0, ge=0)  # wait this long for all groups at start
    grace_seconds: float = Field(default=60.0, ge=0)  # a session whose group is away waits so long
    stall_seconds: float = Field(default=300.0, gt=0)  # a running request without a new token
    drain_seconds: float = Field(default=30.0, ge=0)  # to finish what runs before leaving
    session_idle_seconds: float = Field(default=3600.0, gt=0)  # then its place is given up
    max_failovers: int = Field(default=4, ge=0)  # per turn

    @model_validator(mode="after")
    def _consistent(self) -> FleetConfig:
        doubled = [name for name, num in Counter(g.name for g in self.groups).items() if num > 1]
        if doubled:
            raise ValueError(f"group names that differ from each other, not {doubled[0]!r} twice")
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("lease_seconds of at least two heartbeats")
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

    def shares(self, purpose: Purpose) -> dict[str, float]:
        """Each group's exact share of the sessions of a purpose; they sum to 1."""
        groups = [group for group in self.groups if group.purpose == purpose]
        total = sum(group.capacity for group in groups)
        return {group.name: group.capacity / total for group in groups}


class SamplingConfig(Section):
    """[sampling]: how training episodes draw tokens. Stop tokens come from the chat format."""

    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: int = Field(default=128, ge=1)
    num_candidates: int = Field(default=64, ge=1)

    def params(self) -> SamplingParams:
        return SamplingParams(**self.model_dump())


class EpisodesConfig(Section):
    """[episodes]: how many run at once, how they are grouped, and when production pauses."""

    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxLimits = SandboxLimits()
    grading: GradingLimits = GradingLimits()
    group_size: int = Field(default=8, ge=2)  # G, samples per prompt
    max_concurrent: int = Field(default=32, ge=1)
    max_concurrent_evaluation: int = Field(default=32, ge=1)
    queue_groups: int = Field(default=16, ge=1)  # completed, not yet taken by the trainer
    max_retries: int = Field(default=3, ge=0)  # of an episode lost to the infrastructure
    num_sandboxes: int = Field(default=0, ge=0)  # at once; 0: as many as episodes run at once
    num_graders: int = Field(default=2, ge=1)  # sandboxes that grade, at once


class TasksConfig(Section):
    """[tasks]: the generated coding tasks of both splits."""

    num_train: int = Field(default=512, ge=1)
    num_heldout: int = Field(default=64, ge=1)
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fleet's sections of one run, validated."""

    fleet: FleetConfig
    sampling: SamplingConfig
    episodes: EpisodesConfig
    tasks: TasksConfig

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Resolved sections as JSON values."""
        return {
            "fleet": self.fleet.model_dump(mode="json"),
            "sampling": self.sampling.model_dump(mode="json"),
            "episodes": self.episodes.model_dump(mode="json"),
            "tasks": self.tasks.model_dump(mode="json"),
        }


def read_settings(path: str | Path) -> Settings:
    """The fleet's sections of a run file or run record; BadInputError on the first thing wrong."""
    sections = read_resolved(path)
    settings = Settings(
        fleet=validate_section(FleetConfig, "fleet", sections.get("fleet", {})),
        sampling=validate_section(SamplingConfig, "sampling", sections.get("sampling", {})),
        episodes=validate_section(EpisodesConfig, "episodes", sections.get("episodes", {})),
        tasks=validate_section(TasksConfig, "tasks", sections.get("tasks", {})),
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
