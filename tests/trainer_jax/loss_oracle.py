"""The estimator by brute force: numpy, one token at a time, over the whole vocabulary.

Deliberately shares nothing with the implementation: the sampler's distribution is written out over
the whole vocabulary, ratios are formed, and expectations are sums over all tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Arm:
    importance: str
    center: bool | Literal["drawn"]
    replay: bool
    low: float = 0.5
    high: float = 2.0


ARMS = [
    Arm(importance=importance, center=center, replay=replay)
    for importance in ("none", "masked", "truncated")
    for center in (False, True)
    for replay in (False, True)
]


def softmax(z):
    e = np.exp(z - np.max(z))
    return e / e.sum()


def weight(ratio, arm: Arm) -> float:
    if arm.importance == "none":
        return 1.0
    if arm.importance == "truncated":
        return min(ratio, arm.high)
    return ratio if arm.low <= ratio <= arm.high else 0.0


def policy(z, support, arm: Arm):
    """p over the whole vocabulary, 0 outside the support under replay."""
    if not arm.replay:
        return softmax(z)
    p = np.zeros(len(z))
    p[support] = softmax(z[support])
    return p


def sampler(p, support, q_support, arm: Arm):
    """q over the whole vocabulary: recorded on the support, proportional to p on the tail."""
    q = np.zeros(len(p))
    q[support] = q_support
    tail = np.setdiff1d(np.arange(len(p)), support)
    if arm.replay or not len(tail):
        return q
    q[tail] = p[tail] * max(1 - sum(q_support), 0) / p[tail].sum()
    return q


def estimate(z, a, support, q_support, q_a, arm: Arm):
    """Gradient with respect to the logits of one token's term at advantage 1, [V]."""
    V = len(z)
    p = policy(z, support, arm)
    q = sampler(p, support, q_support, arm)
    score = np.eye(V) - p[None, :]  # row v: dlogp(v)/dz
    g = weight(p[a] / q_a, arm) * score[a]
    if arm.center:
        for v in range(V):
            if q[v] > 0:
                g = g - q[v] * weight(p[v] / q[v], arm) * score[v]
    return g


def wrong_estimate(z, a, support, q_support, q_a, arm: Arm):
    """The tempting one: the weight outside the expectation, w(a) * (e_a - q). It drifts."""
    p = policy(z, support, arm)
    q = sampler(p, support, q_support, arm)
    return weight(p[a] / q_a, arm) * (np.eye(len(z))[a] - q)


def kl(p, q) -> float:
    return sum(qv * math.log(qv / pv) for pv, qv in zip(p, q, strict=True) if qv > 0)
