"""The account of a live fleet: who holds what, prices of samplers' own, restarts of the gateway."""

from __future__ import annotations

import asyncio
import json
import math
import time
from datetime import UTC, datetime

import pytest

from contracts.errors import BadInputError
from contracts.types import KvFormat, SamplerInfo, WeightFormat
from sampler_fleet.config import FleetConfig
from sampler_fleet.fingerprint import identify_checkpoint
from sampler_fleet.fleet import Fleet
from sampler_fleet.gateway_process import follow_prices
from sampler_fleet.live_settings import LiveFile
from sampler_fleet.metering import Metering
from sampler_fleet.registry import IDLE, Sampler, SamplerPhase
from tests.sampler_fleet.fakes import make_checkpoint, make_fleet_config

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


def priced(*prices: tuple[float, str]) -> FleetConfig:
    table = [{"per_hour": price, "since": since, "source": "a list"} for price, since in prices]
    return FleetConfig.model_validate(CONFIG | {"prices": {"H100": table}})


def test_prices_that_change_in_mid_run_hold_from_then_on():
    meter = metering()
    meter.hold([sampler("a0"), sampler("a1", price=4.0), sampler("b0")], {}, START)
    meter.reprice(priced((6.0, "2026-10-01T00:00:00Z")), START + HOUR)
    assert meter.read(START + HOUR)["a"].dollars == pytest.approx(8 * 2.0 + 4.0)
    costs = meter.read(START + 3 * HOUR)
    assert costs["a"].dollars == pytest.approx(8 * (2.0 + 2 * 6.0) + 3 * 4.0)
    assert costs["b"].dollars is None


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (priced((6.0, "2099-01-01T00:00:00Z")), "expected a price in force on 2026-11-01"),
        (priced(), "prices of group a: expected some, as at the gateway's start, found none"),
        (
            FleetConfig.model_validate(
                CONFIG | {"prices": dict.fromkeys(("H100", "unpriced"), CONFIG["prices"]["H100"])}
            ),
            "prices of group b: expected none, as at the gateway's start, found some",
        ),
    ],
)
def test_a_bad_table_in_mid_run_is_refused_and_the_old_one_stays(after, sentence):
    meter = metering()
    meter.hold([sampler("a0")], {}, START)
    with pytest.raises(BadInputError, match=sentence):
        meter.reprice(after, START + HOUR)
    assert meter.read(START + 2 * HOUR)["a"].dollars == pytest.approx(2 * 8 * 2.0)


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_price_is_as_if_it_were_not_told(price):
    meter = metering()
    meter.hold([sampler("a0", price=price)], {}, START)
    assert meter.read(START + HOUR)["a"].dollars == pytest.approx(8 * 2.0)


@pytest.mark.parametrize(("away_s", "counted_s"), [(5.0, 5.0), (3 * HOUR, 15.0)])
def test_a_killed_gateway_held_on_for_at_most_its_lease(tmp_path, away_s, counted_s):
    path = tmp_path / "state" / "cost.json"
    first = metering(path)
    first.hold([sampler("a0"), sampler("a1", price=4.0)], {}, START)
    first.write(first.state(START + HOUR))
    now = START + HOUR + away_s
    again = metering(path, now)
    hours = 1 + counted_s / HOUR
    for later in (now, now + 99 * HOUR):
        cost = again.read(later)["a"]
        assert cost.gpu_hours == pytest.approx(hours * 16), "those that lived join again"
        assert cost.dollars == pytest.approx(hours * 20.0)
    again.hold([sampler("a0")], {}, now + 99 * HOUR)
    assert again.read(now + 100 * HOUR)["a"].gpu_hours == pytest.approx(hours * 16 + 8)


def test_a_run_that_ended_costs_nothing_until_it_is_resumed(tmp_path):
    path = tmp_path / "cost.json"
    first = metering(path)
    first.hold([sampler("a0")], {"a": 2}, START)
    late = first.state(START + HOUR)
    first.close(START + HOUR)
    first.write(late)  # a thread that was still at it
    assert all(not saved["num_accelerators"] for saved in json.loads(path.read_text()).values())
    again = metering(path, START + 73 * HOUR)
    assert again.read(START + 73 * HOUR)["a"].gpu_hours == pytest.approx(16)


async def test_what_is_written_beside_the_loop_is_the_account_of_one_moment(tmp_path):
    meter = metering(tmp_path / "cost.json")
    members = [sampler(f"a{n}", price=1.0) for n in range(300)]
    for num in range(0, len(members), 3):
        meter.hold(members[:num], {}, START + num)
        state = meter.state(START + num)
        before = json.dumps(state)
        writing = asyncio.create_task(asyncio.to_thread(meter.write, state))
        meter.hold(members[: num + 3], {}, START + num + 1)
        await writing
        assert json.dumps(state) == before == (tmp_path / "cost.json").read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"a": {}}', '{"a": {"since": 0}}'])
def test_another_file_in_its_place_is_refused(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match="expected the JSON of a gateway"):
        metering(path)


@pytest.mark.parametrize("key", ["num_accelerators", "since", "gpu_seconds", "dollars"])
@pytest.mark.parametrize("value", ["-5", "NaN", "Infinity", "1e400"])
def test_an_account_of_what_cannot_be_is_refused(tmp_path, key, value):
    path = tmp_path / "cost.json"
    fields = {"num_accelerators": "1", "since": f"{START}", "gpu_seconds": "0", "dollars": "0"}
    account = ", ".join(f'"{name}": {text}' for name, text in (fields | {key: value}).items())
    path.write_text(f'{{"a": {{{account}, "prices": []}}}}')
    with pytest.raises(BadInputError, match=r"cost.json: expected the JSON of a gateway"):
        metering(path)


def test_an_account_from_before_the_first_price_is_refused_by_name(tmp_path):
    path = tmp_path / "cost.json"
    saved = {"num_accelerators": 8, "since": 1.7e9, "gpu_seconds": 0, "dollars": 0, "prices": []}
    path.write_text(json.dumps({"a": saved}))
    with pytest.raises(BadInputError, match=r"cost.json: expected prices .* that reach back"):
        metering(path)


def test_prices_that_begin_in_the_future_are_refused():
    with pytest.raises(BadInputError, match="group a: expected a price in force on 2026-09-01"):
        metering(now=datetime(2026, 9, 1, tzinfo=UTC).timestamp())


def test_a_clock_that_was_set_back_costs_nothing():
    meter = metering()
    meter.hold([sampler("a0")], {}, START)
    meter.hold([sampler("a0")], {}, START + HOUR)
    meter.hold([sampler("a0")], {}, START)
    assert meter.read(START + HOUR)["a"].gpu_hours == pytest.approx(8)


class CountingMetering(Metering):
    num_written = 0

    def write(self, state) -> None:
        self.num_written += 1
        super().write(state)


async def test_the_account_is_written_once_in_a_lease(tmp_path):
    now, num_read = 0.0, 0

    def clock() -> float:
        nonlocal num_read
        num_read += 1
        return now

    config = make_fleet_config(heartbeat_seconds=0.002, lease_seconds=15.0)
    meter = CountingMetering(config, START, tmp_path / "cost.json")
    identity = identify_checkpoint(make_checkpoint(tmp_path / "checkpoint"))
    fleet = Fleet(config, identity, metering=meter, clock=clock)
    keeping = asyncio.create_task(fleet.keep_leases())
    for moment, num in ((0.0, 1), (14.9, 1), (15.0, 2), (29.9, 2), (31.0, 3)):
        now, enough = moment, num_read + 30
        while num_read < enough:  # some heartbeats
            await asyncio.sleep(0.002)
        assert meter.num_written == num, f"at {moment} s"
    keeping.cancel()


async def test_the_gateway_follows_the_prices_of_the_run_file(tmp_path):
    path = tmp_path / "run.json"

    def edit(per_hour: float, **fleet: object) -> None:
        table = [{"per_hour": per_hour, "since": "2026-10-01T00:00:00Z", "source": "a list"}]
        values = CONFIG | {"prices": {"H100": table}} | fleet
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps({"fleet": values}))
        aside.rename(path)

    edit(2.0)
    live = LiveFile(path)
    identity = identify_checkpoint(make_checkpoint(tmp_path / "checkpoint"))
    config = live.settings.fleet
    fleet = Fleet(config, identity, metering=Metering(config, START), clock_utc=lambda: START)
    following = asyncio.create_task(follow_prices(live, fleet, every_s=0.005))

    async def until(condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    edit(-1.0)
    await until(lambda: "per_hour" in fleet.problems.get("gateway", ""))
    edit(3.0, drain_seconds=1.0)
    await until(lambda: "fleet.drain_seconds" in fleet.problems["gateway"])
    edit(4.0)
    await until(lambda: not fleet.problems["gateway"])
    fleet.metering.hold([sampler("a0")], {}, time.time())
    now = time.time() + HOUR
    assert fleet.metering.read(now)["a"].dollars == pytest.approx(8 * 4.0, rel=1e-3)
    assert not following.done()
    following.cancel()
