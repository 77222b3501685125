"""Run files: overrides, and one sentence for each way to get them wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from contracts.errors import BadInputError
from contracts.runfile import (
    Section,
    read_resolved,
    read_run_file,
    validate_section,
    write_resolved,
)


class _Optimizer(Section):
    lr: float
    name: str = "adamw"


def test_overrides_are_toml_values_or_strings(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[optimizer]\nlr = 1e-3\n[run]\nname = "a"\n')
    data = read_run_file(
        path, ["optimizer.lr=2e-4", "run.name=b c", "train.staleness_limit=4", "run.tags=[1, 2]"]
    )
    assert data["optimizer"]["lr"] == 2e-4
    assert data["run"] == {"name": "b c", "tags": [1, 2]}
    assert data["train"] == {"staleness_limit": 4}
    write_resolved(tmp_path / "record.json", data)
    assert read_resolved(tmp_path / "record.json") == data


@pytest.mark.parametrize(
    ("text", "overrides", "match"),
    [
        ("[optimiser]\nlr = 1", [], "optimiser"),
        ("optimizer = 3", [], "table"),
        ("[optimizer\nlr = 1", [], "valid TOML"),
        ("", ["lr=1"], "section.key=value"),
        ("", ["optimizer.lr"], "section.key=value"),
    ],
)
def test_malformed_run_files(tmp_path, text, overrides, match) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=match):
        read_run_file(path, overrides)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"lr": 1, "learning_rate": 2}, "unknown key"),
        ({}, "optimizer.lr: expected a value"),
        ({"lr": "fast"}, "optimizer.lr: expected .*number"),
    ],
)
def test_a_wrong_section_says_where_what_and_what_was_found(data, match) -> None:
    with pytest.raises(BadInputError, match=match):
        validate_section(_Optimizer, "optimizer", data)


def test_entry_points_turn_bad_input_into_one_sentence_and_status_2(tmp_path) -> None:
    program = (
        "from contracts.errors import *\n"
        "@exits_politely\n"
        "def main():\n"
        "    open('/nowhere/at/all')\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: /nowhere/at/all: No such file or directory\n"
