"""Drift, deterministically: what must stay where it is, and what must move."""

from __future__ import annotations

import pytest

from tests.trainer_jax.drift import GRPO, IS, MIS, TIS, drift


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
    moved = drift(MIS, center=True, replay=True, advantage=advantage, wrong=True)
    assert moved[-1] > 0.02
