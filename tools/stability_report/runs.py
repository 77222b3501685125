"""The results of a sweep as its report needs them: by scale, arm and run, with smoothed series.

Owns the reading of results beside what was declared. Must not judge, format or draw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError
from trainer_jax.sweep import Arm, PlannedRun, SweepConfig, planned_runs

EARLY_WINDOWS = 2  # what "at the start" is; also the length of a smoothing mean


@dataclass(frozen=True)
class Run:
    """A finished run: its head line and its windows, as `trainer_jax.sweep_results` writes them."""

    head: Mapping[str, Any]
    windows: Sequence[Mapping[str, Any]]

    @property
    def pair(self) -> tuple[int, str]:
        """What it shares with the run of another fleet that it is compared with."""
        return self.head["seed"], self.head["warm_start"]

    def series(self, name: str) -> list[tuple[int, float]]:
        """The last update of each window that has a finite value, and the value."""
        return [
            (window["last"], value)
            for window in self.windows
            if (value := window.get(name)) is not None and math.isfinite(value)
        ]

    def smoothed(self, name: str) -> list[float]:
        """Means of each two successive windows, by their updates; of the only one if it is one."""
        known = [
            (window[name], window["last"] - window["first"] + 1)
            for window in self.windows
            if window.get(name) is not None and not math.isnan(window[name])
        ]
        if len(known) == 1:
            return [known[0][0]]
        return [(a * n + b * m) / (n + m) for (a, n), (b, m) in pairwise(known)]

    def pass_at(self, k: int, when: str) -> float | None:
        return (self.head["evaluation"][when] or {}).get(f"pass_at_{k}")

    def pass_interval(self, k: int, when: str) -> tuple[float, float] | None:
        """Over tasks, of this run alone."""
        return (self.head["evaluation"][when] or {}).get(f"pass_at_{k}_interval")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What was declared of a scale and the runs that are finished, in the order declared."""

    name: str
    declared: Sequence[PlannedRun]
    runs: Sequence[Run]

    @cached_property
    def arms(self) -> list[Arm]:
        """In the order declared."""
        return list({run.arm.name: run.arm for run in self.declared}.values())

    def runs_of(self, arm: Arm) -> list[Run]:
        return [run for run in self.runs if run.head["label"] == arm.name]

    def num_declared(self, arm: Arm) -> int:
        return sum(run.arm.name == arm.name for run in self.declared)

    @property
    def twins(self) -> list[tuple[Arm, Arm]]:
        """Arms on the mixed fleet with the same loss on the homogeneous one."""
        return [
            (mixed, other)
            for mixed in self.arms
            for other in self.arms
            if (mixed.fleet, other.fleet) == ("mixed", "homogeneous") and mixed.arm == other.arm
        ]

    @property
    def is_like_published(self) -> bool:
        """Whether the published run's values may stand beside: it was asynchronous."""
        return self.declared[0].sections["train"].get("staleness_limit") != 0

    @property
    def prices(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(accelerator, price) of all fleets."""
        found: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for run in self.declared:
            for accelerator, rows in run.sections["fleet"].get("prices", {}).items():
                found |= {json.dumps([accelerator, row]): (accelerator, row) for row in rows}
        return list(found.values())


def paired(runs: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Those of the same seed and warm start."""
    by_pair = {run.pair: run for run in others}
    return [(run, by_pair[run.pair]) for run in runs if run.pair in by_pair]


def read_scales(sweep: SweepConfig, results: Path) -> list[Scale]:
    """Every scale of a sweep, with what `results` holds of it.

    Raises:
        BadInputError: results of a run that was not declared, or not so; no such file.
    """
    scales = []
    for name in sweep.scales:
        declared = planned_runs(sweep, name)
        found = {
            run.head["run"]: run for run in map(_read, sorted((results / name).glob("*.jsonl")))
        }
        digests = {run.name: run.digest for run in declared}
        for run_name, run in found.items():
            if run.head["digest"] != digests.get(run_name):
                raise BadInputError(
                    f"results of {run_name}",
                    expected=f"digest {digests.get(run_name)}, of the run as it is declared"
                    if run_name in digests
                    else f"a run that scale {name} declares",
                    found=run.head["digest"],
                )
        runs = [found[run.name] for run in declared if run.name in found]
        scales.append(Scale(name=name, declared=declared, runs=runs))
    return scales


def _read(path: Path) -> Run:
    try:
        head, *windows = map(json.loads, path.read_text().splitlines())
        for key in ("run", "label", "digest", "evaluation", "signs", "groups", "cost"):
            head[key]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"results {path}", expected="a head and windows, as a sweep writes", found=repr(error)
        ) from None
    return Run(head, windows)
