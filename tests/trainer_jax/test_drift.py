"""Drift, deterministically: what must stay where it is, and what must move."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer_jax.drift import ERROR, GRPO, IS, LR, MIS, START, STEPS, TIS, drift
from tests.trainer_jax.loss_oracle import kl, softmax


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(
    ("weight", "center"),
    [(IS, False), (GRPO, True), (MIS, True), (TIS, True)],
    ids=["is", "sc", "sc+mis", "sc+tis"],
)
def test_corrected_arms_stay(weight, center, replay, advantage):
    assert drift(weight, center=center, replay=replay, advantage=advantage).max() < 1e-6


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("weight", [GRPO, MIS, TIS], ids=["grpo", "mis", "tis"])
def test_uncorrected_arms_move(weight, replay, advantage):
    assert drift(weight, center=False, replay=replay, advantage=advantage)[-1] > 0.02


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_wrong_centering_moves(advantage):
    moved = drift(MIS, center="drawn", replay=True, advantage=advantage)
    assert moved[-1] > 0.02


def test_a_kink_is_a_token_that_crosses_a_bound():
    """What docs/images/drift.png says of the bends of `grpo+mis`."""
    start = np.asarray(START, float)
    logits, kept, moved = start, [], []
    for _ in range(STEPS):
        p, q = softmax(logits), softmax(logits + np.asarray(ERROR, float))
        kept.append((p / q >= MIS["ratio_low"]) & (p / q <= MIS["ratio_high"]))
        weighted = np.where(kept[-1], p, 0)
        logits = logits - LR * (weighted - weighted.sum() * p)  # A = -1
        moved.append(kl(softmax(logits), softmax(start)))
    curve = drift(MIS, center=False, replay=False, advantage=-1.0)
    np.testing.assert_allclose(curve, moved, rtol=1e-3, atol=1e-6)
    is_kink = np.abs(np.diff(curve, 2)) > 0.02
    crossed = np.any(np.diff(kept, axis=0), axis=1)[1:]
    assert is_kink.sum() == 3 and crossed[is_kink].all()
