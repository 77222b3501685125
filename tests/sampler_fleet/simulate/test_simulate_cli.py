"""`python -m sampler_fleet simulate`: files that are wrong, and what it writes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sampler_fleet.__main__ import app

GOOD = """
[scenario]
name = "small one"
days = 0.05
start = 2026-11-02

[episodes]
group_size = 2
max_concurrent = 4
queue_groups = 2

[workload]
tokens_median = 1000
tokens_sigma = 0.5

[machines.default]
tokens_per_second = 10

[trainer]
prompts_per_update = 2
overhead_seconds = 10
tokens_per_second = 1000

[fleet]
groups = [{ name = "a", accelerator = "X", weight_format = "bf16", max_sessions = 4 }]

[[fleet.prices.X]]
per_hour = 2.0
since = 2026-01-01
source = "a test"
"""


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_it_writes_figures_and_numbers(tmp_path):
    (tmp_path / "small.toml").write_text(GOOD)
    (tmp_path / "two.toml").write_text(
        'base = "small.toml"\n[scenario]\nname = "two"\n[fleet]\ngroups = ['
        '{ name = "a", accelerator = "X", weight_format = "bf16", max_sessions = 2 },'
        '{ name = "b", accelerator = "X", weight_format = "nvfp4", max_sessions = 2 }]\n'
    )
    out = tmp_path / "out"
    result = run(tmp_path / "small.toml", tmp_path / "two.toml", "--out", out)
    assert result.exit_code == 0, result.output
    assert "small one" in result.stdout
    names = {"small-one", "two", "comparison", "over-time"}
    assert {path.stem for path in out.glob("*.png")} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    first, second = json.loads((out / "summary.json").read_text())
    assert (first["name"], second["name"]) == ("small one", "two")
    assert first["updates"] > 10
    records = json.loads((out / "two.json").read_text())
    assert len(records["updates"]) == second["updates"]
    assert second["groups"]["b"]["dollars_per_update"] > 0


def test_without_out_it_writes_nothing(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert run("small.toml").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


def test_a_scenario_too_short_for_an_update_has_no_means(tmp_path):
    (tmp_path / "short.toml").write_text(GOOD.replace("days = 0.05", "days = 0.0001"))
    result = run(tmp_path / "short.toml", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (summary,) = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["updates"] == 0
    assert summary["per_update"]["sampler_dollars"] is None


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("days = 0.05", "days = 0", "scenario.days: expected greater than 0, found 0"),
        ("tokens_sigma = 0.5", "tokens_sigm = 1", "workload.tokens_sigm: expected a known key"),
        ("[scenario]", "[scenario", "expected valid TOML"),
        ("[workload]", "[wrkload]\n[workload]", ", wrkload: expected a known key"),
        ("max_sessions = 4", "max_sessions = 0", "max_sessions: expected greater than or equal"),
        ("tokens_per_second = 10\n", "start_seconds = 1\n", "tokens_per_second: expected a value"),
        ("[machines.default]", "[machines.b]", "machines: expected a group (a), found b"),
        ("queue_groups = 2", "queue_groups = 1", "at least trainer.prompts_per_update, 2, found 1"),
        ("since = 2026-01-01", "since = 2027-01-01", "a price in force on 2026-11-02"),
        ('accelerator = "X"', 'accelerator = "Y"', "found X, while Y has none"),
        ("tokens_sigma = 0.5", "lockstep = 3", "a divisor of a max_sessions, 4, found 3"),
        (
            'weight_format = "bf16"',
            'weight_format = "bf16", purpose = "evaluate"',
            "training groups only",
        ),
        (
            "[fleet]",
            '[[events]]\nkind = "bounds"\nat_hours = 1\n[fleet]',
            "expected [autoscaler], which keeps to bounds, found none",
        ),
        ("[fleet]", '[[events]]\nkind = "pause"\nat_hours = 1\n[fleet]', "hours above 0 where"),
        ("[scenario]", 'base = "bad.toml"\n[scenario]', "that is not built on this one"),
        ("[scenario]", 'base = "nowhere.toml"\n[scenario]', "nowhere.toml: No such file"),
    ],
)
def test_a_bad_file_is_one_sentence_and_status_2(tmp_path, old, new, sentence):
    path = tmp_path / "bad.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    result = run(path)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert sentence in result.stderr, result.stderr


def test_two_scenarios_of_one_name_are_refused(tmp_path):
    (tmp_path / "small.toml").write_text(GOOD)
    result = run(tmp_path / "small.toml", tmp_path / "small.toml")
    assert result.exit_code == 2
    assert "'small one' twice" in result.stderr
