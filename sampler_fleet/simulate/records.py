"""What a simulation leaves: one record per update, samples over time, counts, and their summary.

Owns these values and how they become JSON. Must not simulate or draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sampler_fleet.cost import Cost

SETTLED_FROM = 0.1  # of the updates: the summary leaves out the cold start


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update of the trainer. `costs` is what was spent since the last one, by group."""

    version: int  # that it made
    ended_s: float
    waited_s: float  # for trajectories
    num_trajectories: int
    num_tokens: float
    staleness_mean: float  # over tokens, in versions
    staleness_max: float  # over trajectories, of their mean
    costs: dict[str, Cost]
    prompts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The fleet at a moment; utilization is of the time since the last sample, None without
    samplers."""

    at_s: float
    num_ready: dict[str, int]
    num_sessions: dict[str, int]  # episodes in places
    utilization: dict[str, float | None]
    overall_utilization: float | None
    backlog: int  # trajectories completed and not taken


@dataclass(frozen=True, kw_only=True)
class Result:
    """One scenario, lived through. `utilization` is the mean over time and places."""

    name: str
    groups: tuple[str, ...]
    days: float
    updates: tuple[Update, ...]
    samples: tuple[Sample, ...]
    counts: dict[str, int]
    utilization: dict[str, float | None]
    overall_utilization: float | None
    totals: dict[str, Cost]  # until the end, the trainer's among them
    trainer: str  # the name of its account

    @property
    def settled(self) -> tuple[Update, ...]:
        """The updates after the cold start."""
        return self.updates[int(len(self.updates) * SETTLED_FROM) :]


def sampler_dollars(update: Update, trainer: str) -> float:
    """What the samplers cost for an update."""
    return sum(cost.dollars or 0.0 for name, cost in update.costs.items() if name != trainer)


def summarize(result: Result) -> dict[str, Any]:
    """The numbers of one scenario. Means per update leave out the first tenth of the updates."""
    settled, trainer = result.settled, result.trainer
    num = max(len(settled), 1)
    hours = (settled[-1].ended_s - settled[0].ended_s) / 3600 if len(settled) > 1 else None
    samplers = _mean([sampler_dollars(update, trainer) for update in settled])
    training = _mean([_dollars(update, trainer) for update in settled])
    return {
        "name": result.name,
        "days": result.days,
        "updates": len(result.updates),
        "updates_per_hour": (len(settled) - 1) / hours if hours else None,
        "trainer_wait_share": _wait_share(result),
        "utilization": result.overall_utilization,
        "staleness_mean": _mean([u.staleness_mean for u in settled]),
        "staleness_p99": _quantile([u.staleness_max for u in settled], 0.99),
        "mean_samplers": _mean([float(sum(s.num_ready.values())) for s in result.samples]),
        "per_update": {
            "sampler_dollars": samplers,
            "trainer_dollars": training,
            "gpu_hours": _mean(
                [sum(c.gpu_hours for n, c in u.costs.items() if n != trainer) for u in settled]
            ),
        },
        "dollars_per_million_tokens": (
            1e6 * sum(sampler_dollars(u, trainer) for u in settled)
            / sum(u.num_tokens for u in settled)
            if settled
            else None
        ),
        "groups": {
            name: {
                "utilization": result.utilization[name],
                "mean_samplers": _mean([float(s.num_ready[name]) for s in result.samples]),
                "gpu_hours_per_update": sum(u.costs[name].gpu_hours for u in settled) / num,
                "dollars_per_update": sum(u.costs[name].dollars or 0.0 for u in settled) / num,
            }
            for name in result.groups
        },
        "total_dollars": sum(cost.dollars or 0.0 for cost in result.totals.values()),
        "counts": result.counts,
    }  # fmt: skip


def _wait_share(result: Result) -> float | None:
    """The part of the time that the trainer waited for trajectories, after the cold start."""
    settled = result.settled
    if len(settled) < 2:
        return None
    return sum(u.waited_s for u in settled[1:]) / (settled[-1].ended_s - settled[0].ended_s)


def _dollars(update: Update, account: str) -> float:
    return update.costs[account].dollars or 0.0


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _quantile(values: list[float], q: float) -> float | None:
    return float(np.quantile(values, q)) if values else None
