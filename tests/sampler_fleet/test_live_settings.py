"""A run file that is edited while the autoscaler runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contracts.errors import BadInputError
from sampler_fleet.config import read_settings
from sampler_fleet.live_settings import LiveSettings

RUN_FILE = """
[autoscaler]
every_seconds = 5.0
[fleet]
drain_seconds = 30.0
[[fleet.groups]]
name = "a"
weight_format = "bf16"
max_samplers = 3
[[fleet.groups]]
name = "b"
weight_format = "bf16"
accelerator = "H100"
"""
PRICE = """
[[fleet.prices.H100]]
per_hour = 3.0
since = 2026-01-01
source = "a test"
"""


@pytest.fixture
def live(tmp_path: Path) -> LiveSettings:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return LiveSettings(tmp_path / "run.toml", tmp_path / "state" / "config.json")


def edit(tmp_path: Path, old: str, new: str) -> None:
    """One edit, with a time of its own however fast the test is."""
    path = tmp_path / "run.toml"
    text = path.read_text()
    assert old in text
    later = path.stat().st_mtime_ns + 1_000_000_000
    path.write_text(text.replace(old, new, 1))
    os.utime(path, ns=(later, later))


def test_bounds_prices_and_the_autoscaler_s_own_settings_are_taken_over(live, tmp_path):
    edit(tmp_path, "max_samplers = 3", "max_samplers = 9")
    edit(tmp_path, "[fleet]\n", f"{PRICE}\n[fleet]\n")
    edit(tmp_path, "every_seconds = 5.0", "every_seconds = 7.0")
    live.follow()
    assert live.fleet.groups[0].bounds == (1, 9)
    assert [p.per_hour for p in live.fleet.prices_of(live.fleet.groups[1])] == [3.0]
    assert live.autoscaler.every_seconds == 7.0
    copied = read_settings(tmp_path / "state" / "config.json")
    assert copied.fleet == live.fleet and copied.autoscaler == live.autoscaler


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("max_samplers = 3", "max_samplers = -1", "fleet.groups.0.max_samplers"),
        ("max_samplers = 3", "max_samplers = ", "valid TOML"),
        ('name = "b"', 'name = "c"', "fleet.groups: expected a, b"),
        ('accelerator = "H100"', "max_sessions = 99", "fleet.groups.b.accelerator: expected H100"),
        ("drain_seconds = 30.0", "drain_seconds = 3.0", "fleet.drain_seconds: expected 30.0"),
        ("[autoscaler]\nevery_seconds = 5.0\n", "", "expected a section [autoscaler]"),
    ],
)
def test_a_bad_edit_is_one_sentence_and_what_was_in_force_stays(
    live, tmp_path, caplog, old, new, sentence
):
    before, copied = live.fleet, (tmp_path / "state" / "config.json").read_text()
    edit(tmp_path, old, new)
    live.follow()
    live.follow()
    (record,) = caplog.records
    assert sentence in record.getMessage() and "\n" not in record.getMessage()
    assert live.fleet is before
    assert (tmp_path / "state" / "config.json").read_text() == copied
    if new:
        edit(tmp_path, new, old.replace("max_samplers = 3", "max_samplers = 4"))
        live.follow()
        assert live.fleet.groups[0].bounds[1] == (4 if "max_samplers" in old else 3)


def test_a_file_that_is_away_for_a_moment_is_read_when_it_is_back(live, tmp_path, caplog):
    path = tmp_path / "run.toml"
    text = path.read_text()
    path.unlink()
    live.follow()
    assert live.fleet.groups[0].bounds == (1, 3) and len(caplog.records) == 1
    path.write_text(text.replace("max_samplers = 3", "max_samplers = 5"))
    live.follow()
    assert live.fleet.groups[0].bounds == (1, 5)


def test_a_run_file_without_an_autoscaler_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text(RUN_FILE.replace("[autoscaler]\nevery_seconds = 5.0\n", ""))
    with pytest.raises(BadInputError, match=r"expected a section \[autoscaler\]"):
        LiveSettings(tmp_path / "run.toml", tmp_path / "copy.json")
