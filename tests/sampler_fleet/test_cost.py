"""What samplers cost: dated prices, the meter, and the run file's keys."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.errors import BadInputError
from sampler_fleet.config import FleetConfig, GroupConfig
from sampler_fleet.cost import CostMeter, Price, dollars, price_at

DAY = datetime(2026, 11, 2, tzinfo=UTC).timestamp()
HOUR = 3600.0


def price(per_hour: float, hour: float = 0.0) -> Price:
    since = datetime.fromtimestamp(DAY + hour * HOUR, UTC)
    return Price(per_hour=per_hour, since=since, source="a test")


def test_the_newest_price_in_force_holds_whatever_the_order():
    prices = [price(3.0, 10), price(1.0, 0), price(2.0, 5)]
    assert price_at(prices, DAY - 1) is None
    found = [price_at(prices, DAY + hour * HOUR) for hour in (0, 4.9, 5, 9.9, 10, 99)]
    assert [p.per_hour for p in found if p] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_dollars_over_a_change_of_price_by_hand():
    prices = [price(2.0), price(5.0, 3)]
    # 2 GPUs: 2 hours at $2, then 1.5 hours at $5
    assert dollars(prices, DAY + HOUR, DAY + 4.5 * HOUR, 2) == pytest.approx(2 * (4 + 7.5))


def test_a_time_before_the_first_price_is_refused_not_free():
    with pytest.raises(BadInputError, match="a price in force on 2026-11-01"):
        dollars([price(2.0)], DAY - HOUR, DAY + HOUR, 1)
    with pytest.raises(BadInputError, match="since never"):
        dollars([], DAY, DAY + HOUR, 1)


@given(
    prices=st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 40)), max_size=5),
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), min_size=1, max_size=12),
)
def test_readings_in_between_change_nothing(prices, steps):
    table = [price(1.0), *(price(per_hour, hour) for per_hour, hour in prices)]
    often, once = CostMeter({"g": table}), CostMeter({"g": table})
    now, parts, gpu_hours = DAY, [], 0.0
    before = None
    for (hours, num), (_, held) in zip(steps, [(0, 0), *steps], strict=False):
        gpu_hours += held * hours
        now += hours * HOUR
        for meter in (often, once):
            meter.hold("g", num, now)
        reading = often.read(now)["g"]
        parts.append((reading if before is None else reading - before).dollars)
        before = reading
    total = once.read(now)["g"]
    assert math.isclose(total.gpu_hours, gpu_hours, rel_tol=1e-9, abs_tol=1e-6)
    assert total.dollars is not None
    assert math.isclose(math.fsum(parts), total.dollars, rel_tol=1e-9, abs_tol=1e-6)


def test_a_group_without_a_price_has_hours_and_no_dollars():
    meter = CostMeter({})
    meter.hold("g", 4, DAY)
    cost = meter.read(DAY + HOUR)["g"]
    assert cost.gpu_hours == pytest.approx(4.0)
    assert cost.dollars is None
    assert (cost - cost).dollars is None


def group(**changes):
    return {"name": "a", "accelerator": "H200", "weight_format": "bf16"} | changes


def test_the_groups_own_price_goes_before_the_accelerators():
    table = {"H200": [{"per_hour": 4.54, "since": "2026-05-01", "source": "a list"}]}
    own = [{"per_hour": 3.0, "since": "2026-06-01T12:00:00+02:00", "source": "a contract"}]
    fleet = FleetConfig.model_validate(
        {"groups": [group(), group(name="b", price_per_hour=own)], "prices": table}
    )
    per_hour = [[p.per_hour for p in fleet.prices_of(g)] for g in fleet.groups]
    assert per_hour == [[4.54], [3.0]]
    assert fleet.groups[1].price_per_hour[0].since == datetime(2026, 6, 1, 10, tzinfo=UTC)
    again = FleetConfig.model_validate(json.loads(fleet.model_dump_json()))
    assert again == fleet, "the run's record says the same"


def test_without_bounds_a_group_has_its_samplers_and_no_price():
    default = GroupConfig.model_validate(group(samplers=3))
    assert default.bounds == (3, 3)
    assert default.price_per_hour == ()
    assert default.num_accelerators == 1
    assert GroupConfig.model_validate(group(samplers=3, max_samplers=9)).bounds == (3, 9)


@pytest.mark.parametrize(
    "bad",
    [
        {"samplers": 3, "min_samplers": 4},
        {"samplers": 3, "max_samplers": 2},
        {"num_accelerators": 0},
        *(
            {"price_per_hour": [{"per_hour": 1.0, "since": "2026-01-01", "source": "s"} | change]}
            for change in ({"per_hour": -1.0}, {"source": ""}, {"since": "soon"}, {"sinc": 1})
        ),
    ],
)
def test_bad_group_keys_are_refused(bad):
    with pytest.raises(ValidationError):
        GroupConfig.model_validate(group(**bad))


def test_two_prices_of_one_moment_are_refused():
    twice = [
        {"per_hour": per_hour, "since": since, "source": "s"}
        for per_hour, since in ((1.0, "2026-01-01"), (2.0, "2026-01-01T01:00:00+01:00"))
    ]
    for bad in (
        {"groups": [group(price_per_hour=twice)]},
        {"groups": [group()], "prices": {"H200": twice}},
    ):
        with pytest.raises(ValidationError, match="not 2 since 2026-01-01 00:00"):
            FleetConfig.model_validate(bad)


def test_prices_of_an_accelerator_that_nobody_has_are_refused_where_a_group_has_none():
    one = [{"per_hour": 1.0, "since": "2026-01-01", "source": "s"}]
    with pytest.raises(ValidationError, match="not H20, while H200 has none"):
        FleetConfig.model_validate({"groups": [group()], "prices": {"H20": one}})
    inherited = {"groups": [group()], "prices": {"H200": one, "H100": one}}
    assert FleetConfig.model_validate(inherited).prices.keys() == {"H200", "H100"}
