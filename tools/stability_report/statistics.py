"""Means with intervals, and a test of equivalence, from a handful of runs.

Owns Student's t for whole degrees of freedom and what is made of it. Must not know what a run is.
A run counts as one value: runs of one arm differ in seed and warm start, and an interval over them
covers what both do, the sampling of episodes included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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


def t_cdf(t: float, df: int) -> float:
    """Student's distribution function (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = df % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0 if df == 1 else term
    for k in range(2 + is_odd, df - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return (1 + inside) / 2


def t_quantile(p: float, df: int) -> float:
    """Where `t_cdf` is `p`, by bisection over the angle."""
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if t_cdf(math.sqrt(df) * math.tan(middle), df) < p:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan((low + high) / 2)


def interval_of(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Of the mean of at least two values, by Student's t."""
    mean, error = statistics.fmean(values), _standard_error(values)
    width = t_quantile((1 + level) / 2, len(values) - 1) * error
    return Interval(mean=mean, low=mean - width, high=mean + width)


def equivalence(differences: Sequence[float], *, margin: float = MARGIN) -> Equivalence:
    """Whether the mean of at least two paired differences lies within +-`margin`."""
    interval = interval_of(differences, level=1 - 2 * LEVEL)
    error, df = _standard_error(differences), len(differences) - 1
    if error:
        p = max(
            t_cdf(-(interval.mean + margin) / error, df),
            t_cdf((interval.mean - margin) / error, df),
        )
    else:
        p = 0.0 if abs(interval.mean) < margin else 1.0
    return Equivalence(num=len(differences), interval=interval, p=p)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
