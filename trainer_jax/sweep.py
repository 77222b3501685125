"""A sweep as it is declared before it runs: arms, fleets, seeds, warm starts, and their runs.

Owns the sweep file and the run record of each run. Must not start anything
(`trainer_jax.sweep_run`) nor read what came out (`trainer_jax.sweep_results`).
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from contracts.errors import BadInputError
from contracts.runfile import Section, read_run_file, validate_section

Sections = dict[str, dict[str, Any]]


class Arm(Section):
    """One line of a scale: a loss on a fleet, and what else it sets, by `section.key`."""

    arm: str
    fleet: str
    label: str = ""  # "": arm and fleet
    set: dict[str, Any] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the report writes it."""
        return self.label or f"{self.arm} {self.fleet}"


class Scale(Section):
    """[scales.<name>]: the fleets, each as a run file, and what is varied.

    `set` holds for all runs. They come in the order of seeds, then warm starts, then arms, so that
    a sweep that is cut short has whole comparisons.
    """

    fleets: dict[str, Path]
    set: dict[str, Any] = Field(default_factory=dict)
    warm_starts: tuple[Path, ...] = ()  # checkpoints; none: the run files'
    seeds: tuple[int, ...] = Field(min_length=1)
    arms: tuple[Arm, ...] = Field(min_length=1)
    smoke: dict[str, Any] = Field(default_factory=dict)  # what --smoke sets, by section.key

    @model_validator(mode="after")
    def _consistent(self) -> Scale:
        for arm in self.arms:
            if arm.fleet not in self.fleets:
                raise ValueError(f"arms on a fleet of {', '.join(self.fleets)}, not {arm.fleet!r}")
        doubled = [name for name, num in Counter(a.name for a in self.arms).items() if num > 1]
        if doubled:
            raise ValueError(f"arms that differ in name, not {doubled[0]!r} twice")
        return self


class SweepConfig(Section):
    """A sweep file."""

    directory: Path  # of the runs
    results: Path  # what is kept of them
    scales: dict[str, Scale]


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a sweep. `sections` is its run record but for the directory."""

    name: str
    scale: str
    arm: Arm
    seed: int
    warm_start: str
    sections: Sections

    @property
    def digest(self) -> str:
        """Of everything that was declared about the run."""
        return hashlib.sha256(json.dumps(self.sections, sort_keys=True).encode()).hexdigest()[:16]


def read_sweep(path: Path) -> SweepConfig:
    """A sweep file; its paths are relative to the working directory, as in run files.

    Raises:
        BadInputError: not such a file.
        FileNotFoundError: no such file.
    """
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(f"sweep file {path}", expected="valid TOML", found=str(error)) from None
    return validate_section(SweepConfig, "sweep", data)


def planned_runs(sweep: SweepConfig, scale: str, *, smoke: bool = False) -> list[PlannedRun]:
    """The runs of a scale in the order they are made; with `smoke`, one per arm, cut short.

    Raises:
        BadInputError: no such scale; a bad run file.
    """
    if scale not in sweep.scales:
        raise BadInputError("--scale", expected=", ".join(sweep.scales), found=scale)
    config = sweep.scales[scale]
    fleets = {name: read_run_file(path) for name, path in config.fleets.items()}
    if smoke:
        seeds, starts = config.seeds[:1], config.warm_starts[:1]
        config = config.model_copy(update={"seeds": seeds, "warm_starts": starts})
    return list(_runs(scale, config, fleets, smoke=smoke))


def _runs(
    scale: str, config: Scale, fleets: Mapping[str, Sections], *, smoke: bool
) -> Iterator[PlannedRun]:
    first = next(iter(fleets.values()))
    warm_starts = config.warm_starts or (Path(first["model"]["checkpoint"]),)
    for seed in config.seeds:
        for warm_start in warm_starts:
            for arm in config.arms:
                sections = copy.deepcopy(fleets[arm.fleet])
                name = _slug(f"{arm.name} {warm_start.name} seed {seed}")
                sections["run"] |= {"name": name, "seed": seed}
                sections["model"]["checkpoint"] = str(warm_start)
                sections.setdefault("loss", {})["arm"] = arm.arm
                sections.setdefault("tasks", {})["seed"] = seed
                smaller = config.smoke if smoke else {}
                for key, value in {**config.set, **arm.set, **smaller}.items():
                    _assign(sections, key, value)
                yield PlannedRun(
                    name=name,
                    scale=scale,
                    arm=arm,
                    seed=seed,
                    warm_start=warm_start.name,
                    sections=sections,
                )


def _assign(sections: Sections, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    if not name:
        raise BadInputError("sweep file, set", expected="section.key", found=key)
    sections.setdefault(section, {})[name] = value


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def record_of(run: PlannedRun, directory: Path) -> Mapping[str, Any]:
    """The run record to train with, in a directory of its own."""
    return {**run.sections, "run": {**run.sections["run"], "directory": str(directory)}}
