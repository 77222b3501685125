"""Strangers: what stands for a value is like it and is not it; answers that are alike are found."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampler_fleet.episodes.strangers import (
    NUM_WORLDS,
    far,
    is_proven,
    look_alike,
    near,
    shuffled,
)

numbers = st.integers() | st.integers(-(10**400), 10**400) | st.floats(allow_nan=False)
scalars = st.booleans() | numbers | st.text() | st.binary()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.lists(inner).map(tuple))


@given(values, st.integers(0, NUM_WORLDS - 1))
def test_a_look_alike_is_another_value_of_its_type(value, world):
    other = look_alike(value, world)
    assert type(other) is type(value)
    assert other != value
    assert look_alike(value, world) == other, "the same each time"


def test_look_alikes_can_not_be_told():
    assert [look_alike(12.5, world) for world in range(3)] == [35.0, 58.6, 70.1]
    for value in (0, 12, -12.5, "a1", ("tea", 12), {"tea"}, {"tea": 1}, None):
        others = [look_alike(value, world) for world in range(NUM_WORLDS)]
        assert all(one != two for n, one in enumerate(others) for two in others[:n])


def test_no_difference_stays():
    for one, two in ((7, 2), (12, 9), (5, 6)):
        for world in range(NUM_WORLDS):
            assert look_alike(one, world) - look_alike(two, world) != one - two


def test_things_that_are_not_plain_stay():
    thing = object()
    assert all(look_alike(thing, world) is thing for world in range(NUM_WORLDS))
    assert far(thing) == [] == far([thing]) == far(())


def test_what_is_far_is_in_no_range():
    for value in (3, 2.5, (1, 2)):
        below, above = far(value)
        assert below < value < above
        assert type(below) is type(above) is type(value)
    assert type(far("a")[0]) is str and type(far(b"a")[0]) is bytes


def test_the_order_of_asking_can_not_be_foreseen():
    first = {shuffled(10)[0] for _ in range(400)}
    assert first == set(range(10))
    assert sorted(shuffled(10)) == list(range(10))


@pytest.mark.parametrize(
    ("verb", "answer", "others", "proven"),
    [
        ("sub", 0.0, [0.0] * 9, False),
        ("sub", 0.0, [1e-9] * 9, False),  # a lie a little less plain
        ("sub", 0.0, [1.0] * 9, True),
        ("abs", 2, [2] + [3] * 8, True),  # |5 - 3| is |5 - 7|
        ("abs", 2, [2, 2] + [3] * 7, False),
        ("mod", 0, [0] * 8 + [1], True),
        ("mod", 0, [0] * 9, False),
        ("bool", True, [True] * 9, True),
        ("bool", False, [False] * 9, False),
        ("len", 0, [0] * 9, False),
        ("str", "0.0", ["0.0"] * 9, False),
        ("str", "0.0", ["1.0"] * 9, True),
        ("sub", 0, [10**400] * 9, True),
        ("sub", 0, [math.inf, math.nan] * 4 + [""], True),
    ],
)
def test_answers_that_are_alike(verb, answer, others, proven):
    assert is_proven(verb, answer, [(other, 1e-4) for other in others]) is proven


def test_how_far_apart_answers_must_be():
    assert near("sub", 12.5, 35.0, 0.0) == pytest.approx(4.75e-3)
    assert near("abs", None, None, 4.75e-3) == 4.75e-3
    assert near("sub", 10**400, 1, 0.0) < 1e30
    assert near("mod", 10**9, 10**8, 0.0) == 0.0
