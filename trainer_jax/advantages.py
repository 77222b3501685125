"""Group-relative advantages.

Owns the baseline and the scale of a prompt's rewards. Must not look at tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contracts.errors import BadInputError
from contracts.types import TrajectoryGroup
from trainer_jax.records import check_reward

EPSILON = 1e-6


def group_advantages(rewards: Sequence[float | None], *, normalize: bool) -> np.ndarray:
    """A_i = R_i - mean, divided by (std + 1e-6) when `normalize`; float32 [G].

    A trajectory without a reward (a failure of the infrastructure) has no say in the mean and gets
    0, as does every member of a group whose rewards are equal. std is the population's.

    Raises:
        BadInputError: a reward that is not finite.
    """
    scored = np.array([reward is not None for reward in rewards], bool)
    values = np.array([reward if reward is not None else 0.0 for reward in rewards], np.float64)
    if not np.isfinite(values).all():
        raise BadInputError("rewards of a group", expected="finite numbers", found=list(rewards))
    if not scored.any() or np.ptp(values[scored]) == 0:
        return np.zeros(len(values), np.float32)
    advantages = np.where(scored, values - values[scored].mean(), 0.0)
    if normalize:
        advantages /= values[scored].std() + EPSILON
    return advantages.astype(np.float32)


def has_signal(group: TrajectoryGroup) -> bool:
    """Whether the rewards of a group differ, so that its advantages are not all 0."""
    return len({t.reward for t in group.trajectories if t.reward is not None}) > 1


def advantages_of(groups: Sequence[TrajectoryGroup], *, normalize: bool) -> list[np.ndarray]:
    """One array [G] per group, in the order of its trajectories.

    Raises:
        BadInputError: a reward that is not finite, with its sampler and trajectory.
    """
    for group in groups:
        for trajectory in group.trajectories:
            check_reward(trajectory)
    return [
        group_advantages([t.reward for t in group.trajectories], normalize=normalize)
        for group in groups
    ]
