"""The simulator: a scenario computed by hand, nothing lost or doubled, the same by seed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sampler_fleet.simulate.records import summarize
from sampler_fleet.simulate.scenario import make_scenario, read_scenario
from sampler_fleet.simulate.world import simulate

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "simulate").glob("*.toml"))
SECOND = 1 / 86400
PRICE = [{"per_hour": 3.6, "since": "2026-01-01", "source": "a test"}]  # $0.001 a second

TINY = {
    "scenario": {"name": "tiny", "days": 45 * SECOND, "start": "2026-11-02", "num_samples": 8},
    "episodes": {"group_size": 2, "max_concurrent": 2, "queue_groups": 1},
    "workload": {"tokens_median": 100},
    "machines": {"default": {"tokens_per_second": 10, "start_seconds": 5}},
    "trainer": {
        "prompts_per_update": 1,
        "overhead_seconds": 4,
        "tokens_per_second": 100,
        "sync_seconds": 1,
    },
    "fleet": {
        "groups": [
            {
                "name": "a",
                "accelerator": "X",
                "num_accelerators": 2,
                "weight_format": "bf16",
                "max_sessions": 2,
            }
        ],
        "prices": {"X": PRICE},
    },
}


def changed(base: dict, **sections: dict | list) -> dict:
    """The scenario with keys of some sections replaced."""
    data = copy.deepcopy(base)
    for name, keys in sections.items():
        data[name] = {**data.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return data


def groups(*rows: tuple[str, int, int], **keys) -> dict:
    """[fleet] with groups of (name, samplers, max_sessions)."""
    return {
        "groups": [
            {"name": n, "accelerator": "X", "weight_format": "bf16", "samplers": num} | keys
            | {"max_sessions": places}
            for n, num, places in rows
        ],
        "prices": {"X": PRICE},
    }  # fmt: skip


def test_a_tiny_scenario_computed_by_hand():
    """One sampler of two places serves from second 5; a prompt's two episodes take 10 s there, an
    update 4 s + 200 tokens / 100 per s = 6 s, and samplers use it 1 s later.

    prompt 0 from  5 to 15, update 15 to 21, all tokens from version 1
    prompt 1 from 15 to 25, update 25 to 31, 70 tokens from version 1, 30 from version 2 (from 22)
    prompt 2 from 25 to 35, update 35 to 41, 70 tokens from version 2, 30 from version 3 (from 32)
    """
    result = simulate(make_scenario(TINY))
    updates = result.updates
    assert [u.ended_s for u in updates] == pytest.approx([21, 31, 41])
    assert [u.waited_s for u in updates] == pytest.approx([15, 4, 4])
    assert [u.prompts for u in updates] == [(0,), (1,), (2,)]
    assert [u.version for u in updates] == [2, 3, 4]
    assert [u.num_trajectories for u in updates] == [2, 2, 2]
    assert [u.num_tokens for u in updates] == pytest.approx([200] * 3)
    assert [u.staleness_mean for u in updates] == pytest.approx([0, 0.7, 0.7], abs=1e-9)
    assert [u.staleness_max for u in updates] == pytest.approx([0, 0.7, 0.7], abs=1e-9)
    # two GPUs from second 0 on, at $0.001 a second
    assert [u.costs["a"].dollars for u in updates] == pytest.approx([0.042, 0.02, 0.02])
    assert [u.costs["a"].gpu_hours for u in updates] == pytest.approx(
        [42 / 3600, 20 / 3600, 20 / 3600]
    )
    assert result.overall_utilization == pytest.approx(1.0)
    assert [s.num_ready["a"] for s in result.samples] == [1] * 8
    assert [s.num_sessions["a"] for s in result.samples] == [2] * 8
    assert result.totals["a"].dollars == pytest.approx(0.09)
    summary = summarize(result)
    assert summary["per_update"]["sampler_dollars"] == pytest.approx(0.082 / 3)
    assert summary["trainer_wait_share"] == pytest.approx(8 / 20)


def test_a_preemption_by_hand():
    """Two samplers of one place. At second 4 the first goes, with 40 of 100 tokens made; both
    episodes share the other at half the speed and end 12 s later. The replacement comes too late
    for them: a session stays where it is."""
    data = changed(
        TINY,
        fleet=groups(("a", 2, 1)),
        machines={"default": {"tokens_per_second": 10, "start_seconds": 0}},
        events=[{"kind": "preempt", "at_hours": 4 / 3600, "share": 0.5}],
    )
    result = simulate(make_scenario(data))
    assert result.updates[0].ended_s == pytest.approx(16 + 6)
    assert result.counts["preemptions"] == result.counts["failovers"] == 1
    assert result.counts["trajectories_trained"] == 2 * len(result.updates)


def test_a_group_that_stays_away_loses_its_sessions_after_the_grace_and_they_run_again():
    data = changed(
        TINY,
        fleet=groups(("a", 1, 1), ("b", 1, 1)) | {"grace_seconds": 3},
        machines={"default": {"tokens_per_second": 10, "start_seconds": 0}},
        events=[
            {"kind": "unavailable", "at_hours": 4 / 3600, "groups": ["a"], "hours": 1},
            {"kind": "preempt", "at_hours": 4 / 3600, "groups": ["a"]},
        ],
    )
    result = simulate(make_scenario(data))
    assert result.counts["trajectories_retried"] == 1
    assert result.counts["tokens_lost"] == 40
    # b ends its own at 10, then runs what a lost from the start: 10 to 20, and the update
    assert result.updates[0].ended_s == pytest.approx(20 + 6)
    assert result.updates[0].prompts == (0,)


def test_an_oversubscribed_sampler_shares_its_speed():
    """Routing prefers groups with room; here a moved session must share, and nothing is lost."""
    data = changed(
        TINY,
        episodes={"group_size": 2, "max_concurrent": 4, "queue_groups": 2},
        fleet=groups(("a", 2, 2)),
        machines={"default": {"tokens_per_second": 10, "start_seconds": 0}},
        events=[
            {"kind": "unavailable", "at_hours": 5 / 3600, "hours": 1},
            {"kind": "preempt", "at_hours": 5 / 3600, "share": 0.5},
        ],
    )
    result = simulate(make_scenario(data))
    # 50 tokens are left of each of four: 10 s at half speed, so that prompt 0 is there at 15
    assert result.updates[0].ended_s == pytest.approx(15 + 6)
    assert result.counts["failovers"] == 2
    assert result.counts["trajectories_trained"] == 2 * len(result.updates)


STORM = changed(
    TINY,
    scenario={"days": 0.04},
    episodes={"group_size": 4, "max_concurrent": 40, "queue_groups": 8, "max_retries": 1},
    workload={"tokens_median": 600, "tokens_sigma": 0.8},
    trainer={"prompts_per_update": 3, "overhead_seconds": 30, "sync_seconds": 5},
    fleet={**groups(("a", 3, 4), ("b", 2, 8), ("c", 2, 6)), "grace_seconds": 20},
    machines={"default": {"tokens_per_second": 10, "start_seconds": 40, "start_sigma": 0.4}},
)
events = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["preempt", "unavailable", "pause"]),
            "at_hours": st.floats(0, 0.9),
            "groups": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
            "share": st.floats(0.1, 1),
            "hours": st.floats(0.01, 0.4),
        }
    ),
    max_size=6,
)


@given(
    events=events,
    preemptions=st.sampled_from([0.0, 100.0, 600.0]),
    lockstep=st.sampled_from([1, 2]),
    is_scaled=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, phases=[Phase.explicit, Phase.generate])
def test_no_trajectory_is_lost_or_doubled_whatever_is_taken_away(
    events, preemptions, lockstep, is_scaled, seed
):
    data = changed(
        STORM,
        scenario={"seed": seed},
        workload={"lockstep": lockstep},
        machines={"default": STORM["machines"]["default"] | {"preemptions_per_day": preemptions}},
        events=events,
    )
    if is_scaled:
        data["autoscaler"] = {"cooldown_down_seconds": 120, "backlog_target": 16}
        for group in data["fleet"]["groups"]:
            group |= {"min_samplers": 0, "max_samplers": 2 * group["samplers"]}
    result = simulate(make_scenario(data))
    counts, updates = result.counts, result.updates
    lost = counts.get("trajectories_failed", 0)
    dropped = counts.get("trajectories_dropped", 0)
    assert counts["trajectories_started"] == (
        counts.get("trajectories_completed", 0) + counts["trajectories_open"] + lost
    )
    assert counts.get("trajectories_completed", 0) == (
        counts.get("trajectories_trained", 0)
        + counts["trajectories_in_update"]
        + counts["trajectories_queued"]
        + counts["trajectories_in_open_prompts"]
        + dropped
    )
    trained = [prompt for update in updates for prompt in update.prompts]
    assert len(trained) == len(set(trained)) == 3 * len(updates)
    assert counts.get("trajectories_trained", 0) == sum(u.num_trajectories for u in updates)
    if not lost:
        assert counts.get("trajectories_trained", 0) == 4 * len(trained)
    for sample in result.samples:
        assert all(0 <= used <= 1 + 1e-9 for used in sample.utilization.values() if used)
    assert all(u.staleness_mean >= -1e-9 for u in updates)


def test_a_group_that_never_has_a_sampler_costs_nothing():
    result = simulate(make_scenario(changed(TINY, fleet=groups(("a", 1, 2), ("b", 0, 2)))))
    summary = summarize(result)["groups"]["b"]
    assert summary == {
        "utilization": None,
        "mean_samplers": 0.0,
        "gpu_hours_per_update": 0.0,
        "dollars_per_update": 0.0,
    }


def test_the_same_seed_gives_the_same_result_and_another_does_not():
    data = changed(
        STORM, machines={"default": STORM["machines"]["default"] | {"preemptions_per_day": 300.0}}
    )
    first, again = simulate(make_scenario(data)), simulate(make_scenario(data))
    assert first == again
    other = simulate(make_scenario(changed(data, scenario={"seed": 1})))
    assert other.updates != first.updates


def test_a_pause_of_the_trainer_empties_an_autoscaled_fleet_and_it_comes_back():
    data = changed(
        STORM,
        scenario={"days": 0.2, "num_samples": 200},
        autoscaler={"cooldown_down_seconds": 60, "backlog_target": 16},
        events=[{"kind": "pause", "at_hours": 1, "hours": 1.5}],
    )
    for group in data["fleet"]["groups"]:
        group |= {"min_samplers": 0, "max_samplers": group["samplers"]}
    result = simulate(make_scenario(data))
    num = {round(s.at_s / 3600, 2): sum(s.num_ready.values()) for s in result.samples}
    assert any(n == 0 for hour, n in num.items() if 1 < hour < 2.5), "scaled to zero"
    assert num[max(num)] > 0, "and back"
    assert result.updates[-1].ended_s > 3 * 3600


def test_a_staleness_limit_is_kept_to():
    scenario = read_scenario(EXAMPLES[0].with_name("autoscaled.toml"))
    scenario = replace(scenario, config=scenario.config.model_copy(update={"days": 0.5}))
    assert scenario.autoscaler
    fresh = scenario.autoscaler.model_copy(update={"staleness_limit": 2.0})
    limited = summarize(simulate(replace(scenario, autoscaler=fresh)))
    assert summarize(simulate(scenario))["staleness_mean"] > 2.4
    assert limited["staleness_mean"] == pytest.approx(2.0, abs=0.2)
    assert limited["trainer_wait_share"] < 0.15


def test_bounds_that_change_in_mid_run_are_kept():
    data = changed(
        STORM,
        autoscaler={"cooldown_down_seconds": 60},
        events=[
            {
                "kind": "bounds",
                "at_hours": 0.5,
                "groups": ["a"],
                "min_samplers": 5,
                "max_samplers": 5,
            }
        ],
    )
    samples = simulate(make_scenario(data)).samples
    assert samples[3].num_ready["a"] == 3, "no bounds: as many as the file says"
    assert samples[-1].num_ready["a"] == 5


def test_the_dearer_group_goes_when_prices_move():
    data = changed(
        STORM,
        trainer={"overhead_seconds": 10, "tokens_per_second": 2000},
        autoscaler={"cooldown_down_seconds": 60, "backlog_target": 16},
    )
    cheap = [{"per_hour": 1.0, "since": "2026-01-01", "source": "a test"}]
    dear = [{"per_hour": 9.0, "since": "2026-11-02T00:28:00Z", "source": "a test"}]
    data["fleet"] = groups(("a", 2, 6), ("b", 2, 6), min_samplers=0, max_samplers=8)
    data["fleet"]["groups"][0]["price_per_hour"] = cheap + dear
    data["fleet"]["groups"][1]["price_per_hour"] = [cheap[0] | {"per_hour": 2.0}]
    samples = simulate(make_scenario(data)).samples
    before, after = samples[2].num_ready, samples[-1].num_ready
    assert before["a"] > before["b"]
    assert after["b"] > after["a"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_valid(path):
    assert read_scenario(path).fleet.groups


def test_the_homogeneous_examples_have_the_capacity_of_the_mixed_one():
    def capacity(path: Path) -> int:
        return sum(g.samplers * g.max_sessions for g in read_scenario(path).fleet.groups)

    mixed = capacity(EXAMPLES[0].with_name("mixed.toml"))
    alone = {p.stem: capacity(p) for p in EXAMPLES if p.stem.startswith("homogeneous")}
    assert len(alone) == 9
    assert all(abs(num - mixed) <= 32 for num in alone.values()), alone
