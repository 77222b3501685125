"""Means with intervals, and a test of equivalence, from a handful of runs.

Owns what is made of Student's t. Must not know what a run is.
A run counts as one value: runs of one arm differ in seed and warm start, and an interval over them
covers what both do, the sampling of episodes included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

MARGIN = 0.05  # of pass@k: less than this is called no difference; fixed before the runs
LEVEL = 0.05  # of the test of equivalence


@dataclass(frozen=True, kw_only=True)
class Interval:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Two one-sided t tests. `interval` is the 1 - 2 LEVEL one of the mean difference: it lies
    within the margin exactly where `p` is below LEVEL."""

    num: int
    interval: Interval
    p: float


def interval_of(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Of the mean of at least two values, by Student's t."""
    mean, error = statistics.fmean(values), _standard_error(values)
    width = float(stdtrit(len(values) - 1, (1 + level) / 2)) * error
    return Interval(mean=mean, low=mean - width, high=mean + width)


def equivalence(differences: Sequence[float], *, margin: float = MARGIN) -> Equivalence:
    """Whether the mean of at least two paired differences lies within +-`margin`."""
    interval = interval_of(differences, level=1 - 2 * LEVEL)
    error, df = _standard_error(differences), len(differences) - 1
    if error:
        nearest = min(interval.mean + margin, margin - interval.mean)
        p = float(stdtr(df, -nearest / error))
    else:
        p = 0.0 if abs(interval.mean) < margin else 1.0
    return Equivalence(num=len(differences), interval=interval, p=p)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
