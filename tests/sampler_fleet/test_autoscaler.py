"""Properties of the scaling decision, and the shell that carries it out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sampler_fleet.autoscaler import (
    Autoscaler,
    Demand,
    FleetState,
    GroupState,
    ReadySampler,
    decide,
    sessions_wanted,
)
from sampler_fleet.config import AutoscalerConfig, FleetConfig

CONFIG = AutoscalerConfig()
NOW = 10_000.0
QUIET = Demand(num_queued=0, backlog=0)


def group(name="a", **changes) -> GroupState:
    settled = {"min_samplers": 0, "max_samplers": 100, "max_sessions": 10, "price": 1.0}
    return GroupState(**({"name": name, "num_target": 0, "num_ready": 0} | settled | changes))


def state(*groups: GroupState, **demand) -> FleetState:
    return FleetState(groups=groups, demand=replace(QUIET, **demand))


@st.composite
def groups(draw, name):
    low = draw(st.integers(0, 5))
    high = draw(st.integers(low, 20))
    target = draw(st.integers(0, 25))
    ready = draw(st.integers(0, 25))
    return GroupState(
        name=name,
        min_samplers=low,
        max_samplers=high,
        max_sessions=draw(st.integers(1, 48)),
        price=draw(st.none() | st.floats(0, 20)),
        num_target=target,
        num_ready=ready,
        num_sessions=draw(st.integers(0, 500)) if ready else 0,
        kv_used_fraction=draw(st.floats(0, 1)),
        changed_at=NOW - draw(st.sampled_from([0.0, 30.0, 100.0, 5000.0, math.inf])),
        short_since=NOW - draw(st.sampled_from([1.0, 5000.0])) if ready < target else None,
    )


demands = st.builds(
    Demand,
    num_queued=st.integers(0, 3000),
    backlog=st.floats(0, 4000),
    taken_per_second=st.none() | st.floats(0.01, 10),
    session_seconds=st.none() | st.floats(1, 2000),
    staleness=st.none() | st.floats(0, 20),
    work=st.none() | st.floats(0, 5000),
)
fleets = st.builds(
    lambda groups, demand: FleetState(groups=tuple(groups), demand=demand),
    st.integers(1, 5).flatmap(lambda n: st.tuples(*[groups(f"g{i}") for i in range(n)])),
    demands,
)
configs = st.builds(
    AutoscalerConfig,
    staleness_limit=st.none() | st.floats(0.5, 10),
    headroom=st.floats(0, 0.5),
)


@given(fleet=fleets, config=configs)
@settings(max_examples=400, deadline=None)
def test_never_below_the_minimum_or_above_the_maximum(fleet, config):
    decided = decide(fleet, config, NOW)
    assert list(decided) == [g.name for g in fleet.groups]
    for g in fleet.groups:
        assert g.min_samplers <= decided[g.name] <= g.max_samplers


@given(fleet=fleets, config=configs)
@settings(max_examples=400, deadline=None)
def test_a_group_rests_after_a_change(fleet, config):
    decided = decide(fleet, config, NOW)
    for g in fleet.groups:
        if not g.min_samplers <= g.num_target <= g.max_samplers:
            continue  # bounds go before all else
        if NOW - g.changed_at < config.cooldown_down_seconds:
            assert decided[g.name] >= g.num_target
        if NOW - g.changed_at < config.cooldown_up_seconds and not (
            g.num_sessions and g.num_target == 0
        ):
            assert decided[g.name] <= g.num_target


@given(fleet=fleets, config=configs, more=st.integers(1, 1000))
@settings(max_examples=600, deadline=None)
def test_more_queued_sessions_never_mean_fewer_samplers_in_any_group(fleet, config, more):
    demand = replace(fleet.demand, num_queued=fleet.demand.num_queued + more)
    before = decide(fleet, config, NOW)
    after = decide(replace(fleet, demand=demand), config, NOW)
    assert all(after[name] >= before[name] for name in before)


@given(
    wanted=st.integers(0, 2000),
    prices=st.tuples(st.floats(0, 20), st.floats(0, 20)),
    places=st.integers(1, 48),
    most=st.integers(1, 30),
)
def test_of_two_groups_that_differ_in_price_the_cheaper_is_filled_first(
    wanted, prices, places, most
):
    assume(prices[0] != prices[1])
    both = [
        group(name, price=price, max_sessions=places, max_samplers=most)
        for name, price in zip("ab", prices, strict=True)
    ]
    decided = decide(state(*both, num_queued=wanted), CONFIG, NOW)
    cheap, dear = ("a", "b") if prices[0] < prices[1] else ("b", "a")
    assert decided[cheap] == min(most, math.ceil(wanted / places))
    assert decided[dear] == min(most, math.ceil(wanted / places) - decided[cheap])


def test_the_price_counts_per_session_and_a_group_without_one_comes_last():
    decided = decide(
        state(
            group("unpriced", price=None),
            group("small", price=3.95, max_sessions=16),
            group("large", price=7.10, max_sessions=48, max_samplers=2),
            num_queued=96 + 32,
        ),
        CONFIG,
        NOW,
    )
    assert decided == {"unpriced": 0, "small": 2, "large": 2}


def test_to_zero_when_nothing_runs_or_waits_and_back_at_once():
    idle = group(num_target=3, num_ready=3)
    assert decide(state(idle), CONFIG, NOW) == {"a": 0}
    assert decide(state(replace(idle, num_sessions=1)), CONFIG, NOW) == {"a": 1}
    gone = group(changed_at=NOW - CONFIG.cooldown_up_seconds)
    assert decide(state(gone, num_queued=1), CONFIG, NOW) == {"a": 1}


def test_dear_samplers_stay_until_the_cheap_ones_that_replace_them_are_ready():
    dear = group("dear", price=9.0, num_target=4, num_ready=4, num_sessions=40)
    cheap = group("cheap", price=1.0)
    assert decide(state(dear, cheap), CONFIG, NOW) == {"dear": 4, "cheap": 3}
    starting = replace(cheap, num_target=4)
    assert decide(state(dear, starting), CONFIG, NOW)["dear"] == 4
    ready = replace(cheap, num_target=4, num_ready=4)
    assert decide(state(dear, ready), CONFIG, NOW)["dear"] == 1, "its sessions keep one"


def test_a_group_whose_samplers_never_come_is_not_counted_on():
    sold_out = group("cheap", num_target=4, price=1.0, short_since=NOW - CONFIG.start_seconds)
    dear = group("dear", price=9.0)
    assert decide(state(sold_out, dear, num_queued=40), CONFIG, NOW) == {"cheap": 4, "dear": 0}
    late = decide(state(sold_out, dear, num_queued=40), CONFIG, NOW + 1)
    assert late == {"cheap": 4, "dear": 4}, "still asked for, but others start"


def test_a_full_kv_cache_asks_for_more_samplers():
    full = group(num_target=4, num_ready=4, num_sessions=40, kv_used_fraction=0.6)
    assert decide(state(full), CONFIG, NOW) == {"a": 4}
    assert decide(state(replace(full, kv_used_fraction=1.0)), CONFIG, NOW) == {"a": 5}


def test_new_bounds_hold_at_once():
    busy = group(num_target=4, num_ready=4, num_sessions=40, changed_at=NOW)
    assert decide(state(replace(busy, max_samplers=2)), CONFIG, NOW) == {"a": 2}
    assert decide(state(replace(busy, min_samplers=7)), CONFIG, NOW) == {"a": 7}


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        ({"num_queued": 60}, 100),
        # 100 s * (0.5 + (1280 - 1280) / 1800) = 50
        (
            {"num_queued": 60, "taken_per_second": 0.5, "session_seconds": 100.0, "backlog": 1280},
            50,
        ),
        # 100 s * (0.5 + (1280 - 380) / 1800) = 100 of 100
        (
            {"num_queued": 90, "taken_per_second": 0.5, "session_seconds": 100.0, "backlog": 380},
            100,
        ),
        # a backlog far above its target: nothing is wanted, not less than nothing
        ({"taken_per_second": 0.5, "session_seconds": 100.0, "backlog": 9000}, 0),
        # 100 * 4 / 5 - 60 = 20
        ({"num_queued": 60, "backlog": 60, "staleness": 5.0, "work": 100}, 20),
        # 100 * 4 / 2 - 60 = 140 of 100
        ({"num_queued": 60, "backlog": 60, "staleness": 2.0, "work": 100}, 100),
    ],
)
def test_sessions_wanted_by_hand(demand, wanted):
    config = AutoscalerConfig(staleness_limit=4.0)
    fleet = state(group(num_target=4, num_ready=4, num_sessions=40), **demand)
    assert sessions_wanted(fleet, config) == pytest.approx(wanted)


def fleet_of(**training) -> FleetConfig:
    a = {"name": "a", "weight_format": "bf16", "samplers": 1, "max_sessions": 10} | training
    evaluation = {"name": "e", "weight_format": "bf16", "purpose": "evaluate", "samplers": 2}
    return FleetConfig.model_validate({"groups": [a, evaluation]})


def test_a_group_grows_at_once_and_shrinks_after_the_cooldown():
    fleet = fleet_of(min_samplers=0, max_samplers=5)
    autoscaler = Autoscaler(AutoscalerConfig(), fleet.groups)
    ready: dict[str, list[ReadySampler]] = {"a": [], "e": []}

    def step(now: float, num_queued: int = 0) -> dict[str, int]:
        demand = Demand(num_queued=num_queued, backlog=0)
        return autoscaler.step(fleet=fleet, ready=ready, demand=demand, now=now, now_utc=0.0)

    assert step(0.0, num_queued=31) == {"a": 4}
    ready["a"] = [ReadySampler(num_sessions=10, kv_used_fraction=0.1)] * 4
    assert step(599.0, num_queued=0) == {}, "the cooldown is not over"
    ready["a"] = [ReadySampler(num_sessions=num, kv_used_fraction=0.1) for num in (1, 0, 0, 0)]
    assert step(600.0) == {"a": 1}, "its session keeps one"
    ready["a"] = [ReadySampler(num_sessions=0, kv_used_fraction=0.0)]
    assert step(1200.0) == {"a": 0}


def test_an_evaluation_group_has_the_samplers_of_the_run_file_whatever_is_queued():
    autoscaler = Autoscaler(AutoscalerConfig(), fleet_of().groups)
    demand = Demand(num_queued=1000, backlog=0)
    for evaluators in (2, 3, 0):
        fleet = fleet_of(max_samplers=4)
        groups = [g.model_copy(update={"samplers": evaluators}) for g in fleet.groups[1:]]
        fleet = fleet.model_copy(update={"groups": (fleet.groups[0], *groups)})
        autoscaler.step(fleet=fleet, ready={"a": [], "e": []}, demand=demand, now=0.0, now_utc=0.0)
        assert autoscaler.targets == {"a": 4, "e": evaluators}
