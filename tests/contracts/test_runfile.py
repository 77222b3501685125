"""Run files: overrides, and one sentence for each way to get them wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field, model_validator

from contracts.errors import (
    AuthError,
    BadInputError,
    ConflictError,
    DirtyProcessError,
    RetryError,
    exits_politely,
)
from contracts.files import replacing
from contracts.runfile import (
    Section,
    read_resolved,
    read_run_file,
    validate_section,
    write_resolved,
)


class _Inner(Section):
    first: int = 1
    second: int = 2

    @model_validator(mode="after")
    def _grows(self) -> _Inner:
        if self.second <= self.first:
            raise ValueError("second above first")
        if self.first == 7:
            raise BadInputError("run file, first", expected="another", found=7)
        if self.first == 8:
            raise ValueError("a lucky number, not 8")
        return self


class _Optimizer(Section):
    lr: float
    name: str = "adamw"
    steps: int | None = Field(default=None, gt=0)
    betas: tuple[float, ...] = ()
    where: Path | None = None
    on: bool = False
    pair: tuple[int, int] = (0, 0)
    inner: _Inner = _Inner()


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
        ({"lr": "fast"}, r"optimizer\.lr: expected a number, found 'fast'$"),
        ({"lr": "1"}, r"optimizer\.lr: expected a number, found '1'$"),
        ({"lr": True}, r"optimizer\.lr: expected a number, found True$"),
        ({"lr": 1, "steps": True}, r"optimizer\.steps: expected an integer, found True$"),
        ({"lr": 1, "steps": "3"}, r"optimizer\.steps: expected an integer, found '3'$"),
        ({"lr": 1, "betas": [0.5, "1"]}, r"optimizer\.betas: expected a number, found "),
        ({"lr": 1, "where": 3}, r"optimizer\.where: expected a valid path, found 3$"),
        ({"lr": 1, "pair": [1, 2, 3]}, r"optimizer\.pair: expected at most 2 items"),
        ({"lr": 1, "steps": 0}, r"optimizer\.steps: expected greater than 0, found 0$"),
        (
            {"lr": 1, "inner": {"second": 0}},
            r"optimizer\.inner: expected second above first, found second = 0$",
        ),
        ({"lr": 1, "inner": {"first": 7, "second": 9}}, r"^run file, first: expected another"),
        ({"lr": 1, "inner": {"first": 8, "second": 9}}, "expected a lucky number, found 8$"),
        ({"lr": [0] * 999}, r"found \[0, 0, .{,120}\.\.\.$"),
    ],
)
def test_a_wrong_section_says_where_what_and_what_was_found(data, match) -> None:
    with pytest.raises(BadInputError, match=match):
        validate_section(_Optimizer, "optimizer", data)


def test_a_section_takes_what_toml_and_its_own_record_hold() -> None:
    data = {"lr": 1, "betas": [0, 0.5], "where": "a/b", "on": True, "steps": 3}
    section = validate_section(_Optimizer, "optimizer", data)
    assert (section.lr, section.betas, section.where) == (1.0, (0.0, 0.5), Path("a/b"))
    record = json.loads(json.dumps(section.model_dump(mode="json")))
    assert validate_section(_Optimizer, "optimizer", record) == section


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("run.toml", b"\xff\xfe", "valid TOML"),
        ("record.json", b"\xff\xfe", "expected JSON"),
        ("record.json", b"[1]", "a table of tables"),
        ("record.json", b'{"run": 3}', "a table of tables"),
    ],
)
def test_files_that_are_neither(tmp_path, name, content, match) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=match):
        read_resolved(tmp_path / name)


def test_a_failed_write_leaves_the_old_record_alone(tmp_path) -> None:
    path = tmp_path / "record.json"
    write_resolved(path, {"run": {"name": "a"}})
    with pytest.raises(TypeError):
        write_resolved(path, {"run": {"name": object()}})
    with pytest.raises(OSError, match="disk") as full, replacing(path) as aside:
        aside.write_text("half")
        raise OSError(errno.ENOSPC, "disk")
    assert full.value.filename == str(path)
    assert os.listdir(tmp_path) == ["record.json"]
    assert read_resolved(path) == {"run": {"name": "a"}}


@pytest.mark.parametrize(
    ("error", "status"),
    [(DirtyProcessError, 3), (AuthError, 2), (RetryError, 2), (ConflictError, 2)],
)
def test_each_error_exits_with_its_status_and_one_sentence(capsys, error, status) -> None:
    @exits_politely
    def main() -> None:
        raise error("the gateway\nis not ready")

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert capsys.readouterr().err == "error: the gateway is not ready\n"


def test_debug_shows_the_traceback(monkeypatch) -> None:
    monkeypatch.setenv("DEBUG", "1")

    @exits_politely
    def main() -> None:
        raise BadInputError("a", expected=1, found=2)

    with pytest.raises(BadInputError, match="a: expected 1"):
        main()


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


def test_dates_of_toml_become_text(tmp_path):
    (tmp_path / "run.toml").write_text("[fleet]\nsince = 2026-05-01\nat = 07:30:00\n")
    write_resolved(tmp_path / "record.json", read_resolved(tmp_path / "run.toml"))
    record = read_resolved(tmp_path / "record.json")
    assert record["fleet"] == {"since": "2026-05-01", "at": "07:30:00"}
