"""The three signs of collapse, each told once."""

from __future__ import annotations

import math

import pytest

from trainer_jax.collapse import CollapseLimits, CollapseWatch, Sign, is_collapsed, observe

LIMITS = CollapseLimits(window=4)


def watch(curve):
    """(update, sign) of every alarm, and the final watch; a curve of (reward, kl, share)."""
    state, told = CollapseWatch(), []
    for step, (reward, kl, share) in enumerate(curve):
        state, alarms = observe(
            state, LIMITS, reward=reward, kl=kl, format_error_ending_share=share
        )
        told += [(step, alarm.sign) for alarm in alarms]
        assert all(alarm.sentence for alarm in alarms)
    return told, state


def test_a_healthy_run_is_quiet():
    curve = [(0.4 + 0.01 * i, 0.01 + 0.0004 * i, 0.05) for i in range(40)]
    told, state = watch(curve)
    assert told == [] and not is_collapsed(state)


@pytest.mark.parametrize(
    ("late", "sign"),
    [
        ((0.3, 0.01, 0.1), Sign.REWARD_FALLING),
        ((0.6, 0.05, 0.1), Sign.KL_RISING),
        ((0.6, 0.01, 0.9), Sign.FORMAT_ERRORS),
    ],
)
def test_each_sign_is_told_once(late, sign):
    told, state = watch([(0.6, 0.01, 0.1)] * 10 + [late] * 10)
    assert [found for _, found in told] == [sign]
    assert 10 <= told[0][0] < 14
    assert state.active == {sign} and not is_collapsed(state)


@pytest.mark.parametrize(
    ("good", "bad"), [(-0.2, -0.95), (0.1, -0.9), (-0.9, -1.4), (0.6, 0.44), (0.0, -0.5)]
)
def test_rewards_of_any_sign_fall(good, bad):
    told, _ = watch([(good, 0.01, 0.1)] * 8 + [(bad, 0.01, 0.1)] * 8)
    assert [sign for _, sign in told] == [Sign.REWARD_FALLING]


@pytest.mark.parametrize(
    ("good", "bad"), [(-0.9, -1.0), (0.6, 0.46), (-0.8, -0.2), (0.0, 0.0), (-0.5, -0.5)]
)
def test_rewards_that_hold_are_quiet(good, bad):
    assert watch([(good, 0.01, 0.1)] * 8 + [(bad, 0.01, 0.1)] * 8)[0] == []


def test_a_kl_of_rounding_has_no_multiples():
    for early in (0.0, 1e-9):
        assert watch([(0.5, early, 0.0)] * 8 + [(0.5, 1e-4, 0.0)] * 8)[0] == []
        told, _ = watch([(0.5, early, 0.0)] * 8 + [(0.5, 0.01, 0.0)] * 8)
        assert [sign for _, sign in told] == [Sign.KL_RISING]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_alarms_and_sets_no_level(bad):
    healthy = (0.5, 0.01, 0.0)
    told, state = watch([(0.5, bad, 0.0)] + [healthy] * 12 + [(0.5, 1.0, 0.0)] * 4)
    assert told == [(3, Sign.KL_RISING), (13, Sign.KL_RISING)]
    assert state.early_kl == pytest.approx(0.01)
    told, state = watch([healthy] * 8 + [(0.5, bad, 0.0)] * 8)
    assert told == [(8, Sign.KL_RISING)] and state.active == {Sign.KL_RISING}


def test_a_sign_that_went_away_is_told_again():
    good, bad = (0.6, 0.01, 0.1), (0.6, 0.05, 0.1)
    told, _ = watch([good] * 8 + [bad] * 8 + [good] * 8 + [bad] * 8)
    assert [sign for _, sign in told] == [Sign.KL_RISING] * 2


def test_two_signs_are_a_collapse():
    told, state = watch([(0.6, 0.01, 0.1)] * 8 + [(0.1, 0.2, 0.1)] * 8)
    assert {sign for _, sign in told} == {Sign.KL_RISING, Sign.REWARD_FALLING}
    assert is_collapsed(state)


def test_nothing_is_said_before_the_first_window():
    told, state = watch([(0.6, 0.01, 1.0)] * 3)
    assert told == [] and not state.active
    assert watch([(0.0, 0.0, 0.0)] * 20)[0] == [], "no reward yet is not a fall"
