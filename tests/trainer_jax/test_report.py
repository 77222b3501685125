import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from rich.console import Console

from contracts.errors import BadInputError
from trainer_jax.compare import compare_runs
from trainer_jax.evaluate import Estimate, Evaluation, estimate, pass_at_k
from trainer_jax.live import LiveView
from trainer_jax.metrics import METRICS_FILE
from trainer_jax.report import SIGNS, draw_plots, first_signs, write_report
from trainer_jax.summary import (
    SUMMARY_FILE,
    build_summary,
    cost_sentence,
    print_summary,
    write_summary,
)

SECTIONS = {
    "run": {"name": "test-run", "directory": None},
    "loss": {"arm": "sc+mis+top-p"},
    "fleet": {
        "groups": [
            {"name": "fast", "weight_format": "nvfp4", "capacity": 3.0, "accelerator": "B200"},
            {"name": "slow", "weight_format": "bf16", "capacity": 1.0},
            {"name": "eval", "weight_format": "bf16", "purpose": "evaluate"},
        ]
    },
}


def record(step: int, **more) -> dict:
    return {
        "step": step,
        "version": step + 1,
        "reward": step / 10,
        "kl": 0.01 * step,
        "share_out_of_band": 0.02,
        "entropy": 1.0,
        "grad_norm": 0.5,
        "sampled_tokens": 100,
        "staleness/mean": 1.0,
        "staleness/max": 2,
        "ending/submitted": 1.0,
        "tokens_per_second/sampled": 50.0,
        "group/fast/samples": 6,
        "group/fast/sampled_tokens": 60,
        "group/fast/kl": 0.02,
        "group/fast/share_out_of_band": 0.05,
        "group/slow/samples": 2,
        "group/slow/sampled_tokens": 40,
        "group/slow/kl": 0.001,
        "group/slow/share_out_of_band": 0.0,
        **more,
    }


def evaluation(rate: float) -> dict:
    rates = {
        k: Estimate(value=rate, standard_error=0.1, low=rate - 0.1, high=rate + 0.1, num_tasks=4)
        for k in (1, 4)
    }
    return Evaluation(
        version=1,
        num_tasks=4,
        num_samples=4,
        pass_at=rates,
        endings={"submitted": 1.0},
        format_error_share=0.1,
        episode_turns=3.0,
        infrastructure_failures=0,
        missing_samples=0,
        seconds=2.0,
    ).to_json()


def summary_of(records, before=None, after=None) -> dict:
    return build_summary(
        SECTIONS,
        records,
        status="finished",
        wall_seconds=12.34,
        before=before,
        after=after,
        restarts=3,
    )


def test_keys_that_machines_read():
    summary = summary_of([record(1), record(2)], evaluation(0.25), evaluation(0.5))
    summary = json.loads(json.dumps(summary))
    assert summary["wall_seconds"] == 12.3
    assert summary["updates"] == 2
    assert summary["restarts"] == 3
    assert summary["heldout"]["before"]["pass_at_1"] == 0.25
    assert summary["heldout"]["after"]["pass_at_4"] == 0.5
    assert summary["heldout"]["after"]["pass_at_1_interval"] == [0.4, 0.6]
    assert summary["mean_staleness"] == 1.0
    assert set(summary["groups"]) == {"fast", "slow"}
    fast = summary["groups"]["fast"]
    assert fast["kl"] == pytest.approx(0.02)
    assert (fast["capacity_share"], fast["share_of_samples"]) == (0.75, 0.75)
    assert fast["share_of_out_of_band_tokens"] == 1.0
    assert summary["groups"]["slow"]["share_of_out_of_band_tokens"] == 0.0


def test_means_are_weighted_by_tokens():
    records = [
        record(1, **{"group/fast/kl": 0.1, "group/fast/sampled_tokens": 10}),
        record(2, **{"group/fast/kl": 0.4, "group/fast/sampled_tokens": 30}),
        {"step": 3, "version": 4},  # nothing of that group
    ]
    assert summary_of(records)["groups"]["fast"]["kl"] == pytest.approx((0.1 * 10 + 0.4 * 30) / 40)


def test_what_the_samplers_cost():
    costs = {"group/fast/gpu_hours": 2.0, "group/fast/dollars": 8.0}
    costs |= {"group/slow/gpu_hours": 1.0, "group/slow/dollars": 1.5}
    unpriced = {"group/eval/gpu_hours": 0.5}
    cost = summary_of([record(1, **costs, **unpriced), record(2), {"step": 3}])["cost"]
    assert cost["gpu_hours"] == 3.5
    assert cost["gpu_hours_per_update"] == pytest.approx(3.5 / 3)
    assert (cost["dollars"], cost["unpriced"]) == (9.5, ["eval"])
    assert cost_sentence(cost).endswith("9.50 $, 3.1667 $ per update, without eval")
    assert cost["groups"]["fast"] == {"gpu_hours": 2.0, "dollars": 8.0}
    priced = summary_of([record(1, **costs, **unpriced, **{"group/eval/dollars": 0.5})])["cost"]
    assert (priced["dollars"], priced["dollars_per_update"]) == (10.0, 10.0)
    assert cost_sentence(priced) == (
        "samplers: 3.500 accelerator-hours, 3.50000 per update; 10.00 $, 10.0000 $ per update"
    )
    assert cost_sentence(summary_of([])["cost"]).startswith(
        "samplers: 0 accelerator-hours; no prices"
    )


def test_runs_are_compared_by_what_they_learned_and_cost(tmp_path, capsys):
    prices = {
        f"group/{g}/{k}": 1.0 for g in ("fast", "slow", "eval") for k in ("gpu_hours", "dollars")
    }
    for name, dollars in (("homogeneous", 2.0), ("mixed", 1.0)):
        records = [record(1, **prices | {"group/fast/dollars": dollars})]
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, records, after=evaluation(0.5))
    console = Console(width=160, force_terminal=False)
    compare_runs([tmp_path / "homogeneous", tmp_path / "mixed"], console)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines if "homogeneous" in line or "mixed" in line] == [
        ["1.00", "│"],
        ["0.75", "│"],
    ]
    with pytest.raises(BadInputError, match=r"expected summary\.json, found none"):
        compare_runs([tmp_path], console)
    whole = json.loads((tmp_path / "mixed" / "summary.json").read_text())
    for summary in ({}, [], whole | {"heldout": None}, whole | {"cost": "dear"}):
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        with pytest.raises(BadInputError, match="expected the summary of a run"):
            compare_runs([tmp_path], console)


def write_run(directory, records, **evaluations):
    write_summary(directory, summary_of(records, **evaluations))
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (directory / METRICS_FILE).write_text(lines)


def test_the_page_stands_alone_and_shows_the_run(tmp_path):
    records = [record(step) for step in range(1, 6)]
    write_run(tmp_path, records, before=evaluation(0.25), after=evaluation(0.5))
    page = write_report(tmp_path).read_text()
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:href", "href"))
    assert "@import" not in page and "<script" not in page
    assert page.count("<svg") == 13
    assert "#010203" not in page
    for text in ("test-run", "fast", "slow", "nvfp4", "sc+mis+top-p", "0.250", "0.500"):
        assert text in page, text
    assert '"eval"' not in page
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_what_is_drawn_is_what_was_recorded():
    records = [record(step) for step in range(1, 4)]
    plots = {plot["title"]: plot["svg"] for plot in draw_plots(summary_of(records), records)}
    assert "not evaluated" in plots["Pass rate on held-out tasks"]
    assert "fast" in plots["KL between sampler and trainer, by group"]
    other = [record(step, reward=0.1) for step in range(1, 4)]
    changed = {plot["title"]: plot["svg"] for plot in draw_plots(summary_of(other), other)}
    assert changed["Reward"] != plots["Reward"]
    assert changed["Entropy"] == plots["Entropy"]


def test_the_signs_of_a_collapse_and_when_each_was_first_seen():
    told = {"ending/format_errors": 0.0}
    records = [record(step, reward=0.5, kl=0.01, **told) for step in range(1, 31)]
    records += [record(step, reward=0.1, kl=0.01, **told) for step in range(31, 61)]
    signs = dict(first_signs(summary_of(records), records))
    assert list(signs) == [*SIGNS.values(), "two of them at once: a collapse"]
    fell = signs.pop(SIGNS["reward_falling"])
    assert fell is not None and 30 < fell <= 40
    assert set(signs.values()) == {None}


def test_the_reference_band_is_drawn_where_it_is_not_the_arms_own():
    title = "Tokens with a ratio outside [0.2, 5]"
    for share, is_drawn in ((0.02, False), (0.05, True)):
        records = [record(step, share_out_of_reference_band=share) for step in (1, 2)]
        titles = [plot["title"] for plot in draw_plots(summary_of(records), records)]
        assert (title in titles) == is_drawn
        assert len(titles) == len(set(titles))


def test_a_run_without_an_update_has_a_report(tmp_path):
    write_run(tmp_path, [])
    assert "nothing recorded" in write_report(tmp_path).read_text()


def test_a_name_is_text_and_not_markup(tmp_path):
    summary = summary_of([record(1)])
    summary["name"] = "<b>&"
    write_summary(tmp_path, summary)
    (tmp_path / METRICS_FILE).write_text("")
    page = write_report(tmp_path).read_text()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page


def test_another_directory_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"expected summary\.json, found none"):
        write_report(tmp_path)
    write_summary(tmp_path, summary_of([]))
    with pytest.raises(BadInputError, match=r"expected metrics\.jsonl, found none"):
        write_report(tmp_path)


def test_a_damaged_summary_is_refused(tmp_path):
    write_run(tmp_path, [record(1)])
    path = tmp_path / SUMMARY_FILE
    path.write_text(path.read_text()[:100])
    with pytest.raises(BadInputError, match=r"summary\.json: expected JSON"):
        write_report(tmp_path)


@pytest.mark.parametrize("lost", ["heldout", "settings", "name", "sampled_tokens", ""])
def test_a_summary_that_lacks_something_is_one_sentence(tmp_path, lost):
    write_run(tmp_path, [record(1)])
    path = tmp_path / SUMMARY_FILE
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in summary.items() if lost and k != lost}))
    with pytest.raises(BadInputError, match=r"summary of a run|summary and metrics of a run") as e:
        write_report(tmp_path)
    assert "\n" not in str(e.value) and not (tmp_path / "report.html").exists()


def test_the_closing_tables_show_groups_and_rates(tmp_path):
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    summary = summary_of([record(1)], evaluation(0.25), evaluation(0.5))
    print_summary(console, summary, tmp_path / "report.html")
    text = console.export_text()
    assert "0.250" in text and "0.500" in text and "nvfp4" in text
    console.file.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_updates_are_shown_with_and_without_a_terminal(terminal):
    with open("/dev/null", "w") as null:
        console = Console(record=True, width=160, file=null, force_terminal=terminal)
        with LiveView(["fast", "slow"], 5, console) as view:
            view.phase("starting")
            view.show(record(3))
        text = console.export_text()
    assert "3/5" in text and "0.300" in text and "fast" in text


def test_pass_at_k_is_the_share_of_subsets_with_a_pass():
    for num_samples, num_passed, k in ((4, 1, 1), (4, 1, 4), (6, 2, 3), (5, 0, 2), (5, 5, 1)):
        outcomes = [True] * num_passed + [False] * (num_samples - num_passed)
        rng = np.random.default_rng(0)
        draws = [any(rng.choice(outcomes, k, replace=False)) for _ in range(4000)]
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(np.mean(draws), abs=0.03)
    with pytest.raises(BadInputError):
        pass_at_k(3, 1, 4)


def test_intervals_hold_the_mean_and_shrink_with_tasks():
    few, many = estimate([0.0, 1.0] * 5), estimate([0.0, 1.0] * 200)
    for value in (few, many):
        assert value.low <= value.value <= value.high
    assert many.high - many.low < few.high - few.low
    assert many.standard_error == pytest.approx(0.5 / np.sqrt(400), rel=0.01)
    assert estimate([1.0]).standard_error == 0.0
