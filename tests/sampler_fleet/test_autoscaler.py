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
    SeenSampler,
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
        num_sessions=draw(st.integers(0, 500)),
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
    lambda groups, demand, most: FleetState(
        groups=tuple(groups), demand=demand, most_demanded=most
    ),
    st.integers(1, 5).flatmap(lambda n: st.tuples(*[groups(f"g{i}") for i in range(n)])),
    demands,
    st.integers(0, 3000),
)
configs = st.builds(
    AutoscalerConfig,
    staleness_limit=st.none() | st.floats(0.5, 10),
    headroom=st.floats(0, 0.5),
)


@given(fleet=fleets, config=configs)
@settings(max_examples=400)
def test_never_below_the_minimum_or_above_the_maximum(fleet, config):
    decided = decide(fleet, config, NOW)
    assert list(decided) == [g.name for g in fleet.groups]
    for g in fleet.groups:
        assert g.min_samplers <= decided[g.name] <= g.max_samplers


@given(fleet=fleets, config=configs)
@settings(max_examples=400)
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
@settings(max_examples=600)
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


@given(fleet=fleets, config=configs)
@settings(max_examples=400)
def test_samplers_on_their_way_are_not_given_up(fleet, config):
    decided = decide(fleet, config, NOW)
    for g in fleet.groups:
        asked_at = max(g.short_since or -math.inf, g.changed_at)
        if g.num_ready < g.num_target and NOW - asked_at <= config.start_seconds:
            assert decided[g.name] >= min(g.num_target, g.max_samplers)


def test_what_is_given_up_goes_by_the_most_demand_of_lately():
    paused = group(num_target=4, num_ready=4)
    assert decide(replace(state(paused), most_demanded=25), CONFIG, NOW) == {"a": 3}
    assert decide(replace(state(paused), most_demanded=0), CONFIG, NOW) == {"a": 0}
    grown = replace(state(group(num_target=1, num_ready=1)), most_demanded=90)
    assert decide(grown, CONFIG, NOW) == {"a": 1}, "the past asks for nothing"


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
    found = sessions_wanted(fleet, config, num_demanded=fleet.num_demanded)
    assert found == pytest.approx(wanted)


def fleet_of(**training) -> FleetConfig:
    a = {"name": "a", "weight_format": "bf16", "samplers": 1, "max_sessions": 10} | training
    evaluation = {"name": "e", "weight_format": "bf16", "purpose": "evaluate", "samplers": 2}
    return FleetConfig.model_validate({"groups": [a, evaluation]})


class Stepper:
    """An autoscaler of a group "a" and what it is told; its cooldowns began at 0."""

    def __init__(self, config: AutoscalerConfig = CONFIG, **training) -> None:
        self.fleet = fleet_of(**{"min_samplers": 0, "max_samplers": 5} | training)
        self.autoscaler = Autoscaler(config, self.fleet.groups, now=0.0)
        self.samplers: list[SeenSampler] = []

    def ready(self, *num_sessions: int) -> None:
        self.samplers = [SeenSampler(num_sessions=num) for num in num_sessions]

    def step(self, now: float, **demand) -> dict[str, int]:
        return self.autoscaler.step(
            fleet=self.fleet,
            samplers={"a": self.samplers, "e": []},
            demand=replace(QUIET, **demand),
            now=now,
            now_utc=0.0,
        )


def test_a_group_grows_at_once_and_shrinks_after_the_cooldown():
    a = Stepper()
    assert a.step(60.0, num_queued=31) == {"a": 4}
    a.ready(10, 0, 0, 0)
    assert a.step(659.0) == {}, "the cooldown is not over"
    assert a.step(660.0) == {}, "31 were queued 600 s before"
    assert a.step(661.0) == {"a": 2}, "of its ten sessions one may be the first of more"
    a.ready(0, 0)
    assert a.step(1260.0) == {} == a.step(1261.0)
    assert a.step(1262.0) == {"a": 0}


def test_the_start_counts_as_a_change():
    a = Stepper(samplers=3)
    a.ready(0, 0, 0)
    assert a.step(0.0, num_queued=50) == {} == a.step(59.0, num_queued=50)
    assert a.step(60.0, num_queued=50) == {"a": 5}
    idle = Stepper(samplers=3)
    idle.ready(0, 0, 0)
    assert idle.step(0.0) == {} == idle.step(599.0)
    assert idle.step(600.0) == {"a": 0}


def test_samplers_that_take_long_to_start_are_waited_for():
    a = Stepper(AutoscalerConfig(cooldown_down_seconds=0.0), samplers=3)
    assert a.step(0.0) == {} == a.step(900.0)
    assert a.step(901.0) == {"a": 0}, "they never came"


def test_samplers_that_a_new_gateway_does_not_know_yet_are_waited_for():
    a = Stepper(samplers=3)
    a.ready(5, 5)
    a.step(0.0)
    a.ready()
    a.autoscaler.be_patient()  # one was missing for long
    assert a.step(10_000.0) == {} == a.step(10_900.0)
    a.ready(0, 0, 0)
    assert a.step(10_901.0) == {"a": 0}, "all are back, and nobody wants them"


def test_the_sessions_of_a_lost_sampler_keep_one():
    a = Stepper(AutoscalerConfig(start_seconds=1.0), samplers=1)
    a.ready(8)
    assert a.step(0.0) == {}
    a.samplers = [replace(a.samplers[0], is_ready=False)]
    assert a.step(10_000.0) == {} == a.step(20_000.0)
    a.ready()
    assert a.step(30_000.0) == {"a": 0}


def test_a_pause_shorter_than_the_cooldown_is_not_the_end_of_the_demand():
    config = AutoscalerConfig(cooldown_up_seconds=0.0, cooldown_down_seconds=10.0, headroom=0.0)
    a = Stepper(config, max_samplers=2)
    targets = []
    for second in range(60):
        a.ready(*[0] * a.autoscaler.targets["a"])
        a.step(float(second), num_queued=20 if second % 12 < 6 else 0)
        targets.append(a.autoscaler.targets["a"])
    assert targets == [2] * 60


anything = st.floats() | st.none()


@given(
    kv=st.lists(st.floats(), max_size=3),
    facts=st.tuples(anything, anything, anything, anything),
    backlog=st.floats(),
    num_queued=st.integers(-10, 2**31 - 1),
)
def test_any_reading_is_survived(kv, facts, backlog, num_queued):
    a = Stepper(AutoscalerConfig(cooldown_up_seconds=0.0, staleness_limit=4.0))
    a.samplers = [SeenSampler(num_sessions=1, kv_used_fraction=used) for used in kv]
    names = ("taken_per_second", "session_seconds", "staleness", "work")
    a.step(0.0, num_queued=num_queued, backlog=backlog, **dict(zip(names, facts, strict=True)))
    assert 0 <= a.autoscaler.targets["a"] <= 5


def test_an_evaluation_group_has_the_samplers_of_the_run_file_whatever_is_queued():
    autoscaler = Autoscaler(AutoscalerConfig(), fleet_of().groups, now=-60.0)
    demand = Demand(num_queued=1000, backlog=0)
    for evaluators in (2, 3, 0):
        fleet = fleet_of(max_samplers=4)
        groups = [g.model_copy(update={"samplers": evaluators}) for g in fleet.groups[1:]]
        fleet = fleet.model_copy(update={"groups": (fleet.groups[0], *groups)})
        samplers = {"a": [], "e": []}
        autoscaler.step(fleet=fleet, samplers=samplers, demand=demand, now=0.0, now_utc=0.0)
        assert autoscaler.targets == {"a": 4, "e": evaluators}
