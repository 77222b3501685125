"""The three signs of collapse, each told once."""

from __future__ import annotations

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
