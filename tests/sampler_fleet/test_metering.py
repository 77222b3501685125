"""The account of a live fleet: who holds what, prices of samplers' own, restarts of the gateway."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from contracts.errors import BadInputError
from contracts.types import KvFormat, SamplerInfo, WeightFormat
from sampler_fleet.config import FleetConfig
from sampler_fleet.metering import Metering
from sampler_fleet.registry import IDLE, Sampler, SamplerPhase

START = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
HOUR = 3600.0
CONFIG = {
    "groups": [
        {"name": "a", "weight_format": "bf16", "accelerator": "H100", "num_accelerators": 8},
        {"name": "b", "weight_format": "bf16", "accelerator": "unpriced"},
    ],
    "prices": {"H100": [{"per_hour": 2.0, "since": "2026-10-01T00:00:00Z", "source": "a list"}]},
}


def sampler(name: str, *, phase=SamplerPhase.READY, price: float | None = None) -> Sampler:
    info = SamplerInfo(
        sampler_id=name,
        group=name[0],
        accelerator="",
        weight_format=WeightFormat.BF16,
        kv_format=KvFormat.FP8,
        max_sessions=1,
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        version=1,
        price_per_hour=price,
    )
    return Sampler(info=info, phase=phase, version=1, load=IDLE, lease_until=0.0)


def metering(path=None, now: float = START, **changes) -> Metering:
    return Metering(FleetConfig.model_validate(CONFIG | changes), now, path)


def test_live_samplers_and_those_that_still_load_are_paid_for():
    meter = metering()
    lost = sampler("a9", phase=SamplerPhase.LOST)
    drains = sampler("a1", phase=SamplerPhase.DRAINING)
    meter.hold([sampler("a0"), drains, lost], {"a": 3}, START)
    meter.hold([], {}, START + HOUR)
    cost = meter.read(START + 2 * HOUR)["a"]
    assert cost.gpu_hours == pytest.approx(3 * 8)
    assert cost.dollars == pytest.approx(3 * 8 * 2.0)


def test_a_group_without_a_price_has_hours_and_no_dollars():
    meter = metering()
    assert meter.read(START)["b"].dollars == 0.0, "nothing held costs nothing"
    meter.hold([sampler("b0")], {}, START)
    cost = meter.read(START + HOUR)["b"]
    assert (cost.gpu_hours, cost.dollars) == (pytest.approx(1.0), None)


def test_a_sampler_may_know_its_price_better():
    meter = metering()
    meter.hold([sampler("a0"), sampler("a1", price=4.0)], {}, START)
    cost = meter.read(START + HOUR)["a"]
    assert cost.gpu_hours == pytest.approx(16)
    assert cost.dollars == pytest.approx(8 * 2.0 + 4.0), "4 $ are for all its accelerators"


def test_the_account_goes_on_over_a_restart(tmp_path):
    path = tmp_path / "state" / "cost.json"
    first = metering(path)
    first.hold([sampler("a0"), sampler("a1", price=4.0)], {}, START)
    first.save(START + HOUR)
    again = metering(path, START + 3 * HOUR)
    cost = again.read(START + 3 * HOUR)["a"]
    assert cost.gpu_hours == pytest.approx(3 * 16), "held on while the gateway was away"
    assert cost.dollars == pytest.approx(3 * 20.0)
    again.hold([], {}, START + 3 * HOUR)
    assert again.read(START + 9 * HOUR)["a"] == cost


@pytest.mark.parametrize("text", ["", "[]", '{"a": {}}', '{"a": {"since": 0}}'])
def test_another_file_in_its_place_is_refused(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match="expected the JSON of a gateway"):
        metering(path)


def test_prices_that_begin_in_the_future_are_refused():
    with pytest.raises(BadInputError, match="expected a price in force on 2026-09-01"):
        metering(now=datetime(2026, 9, 1, tzinfo=UTC).timestamp())


def test_a_clock_that_was_set_back_costs_nothing():
    meter = metering()
    meter.hold([sampler("a0")], {}, START)
    meter.hold([sampler("a0")], {}, START + HOUR)
    meter.hold([sampler("a0")], {}, START)
    assert meter.read(START + HOUR)["a"].gpu_hours == pytest.approx(8)
