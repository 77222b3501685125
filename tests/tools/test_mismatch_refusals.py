"""What the mismatch report refuses, in one sentence, and what it leaves untouched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.types import Trajectory
from sampler_fleet.spool import Spool
from tests.tools.mismatch_fixtures import (
    DEMO,
    MODEL,
    directory_file,
    groups_of,
    make_params,
    make_run,
    rounded,
    runner,
    sample,
    save_model,
)
from tools.mismatch_report.source import write_groups

run = pytest.fixture(runner)
run_directory = pytest.fixture(make_run)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy") / "model", make_params(0))


@pytest.fixture(scope="module")
def sound() -> list[Trajectory]:
    return [raw.trajectory for raw in sample(rounded(make_params(0), "bf16"), seed=1)]


def write_junk(path: Path) -> None:
    path.write_bytes(bytes(np.random.default_rng(0).integers(0, 256, 5000, np.uint8)))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b""), "expected at least one trajectory, found none"),
        (write_junk, "length-delimited TrajectoryGroup messages, found no such message after 0"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(2000)), "a readable log"),
        (lambda path: path.mkdir(), "expected a run's config.json or a gateway's groups.sqlite"),
        (lambda path: directory_file(path).write_text('{"vocab_size": 9}'), "a run's record"),
        (lambda path: directory_file(path).write_text("{"), "expected JSON"),
    ],
)
def test_refuses_sources(run, checkpoint, tmp_path, make, sentence):
    make(tmp_path / "source")
    before = sorted(tmp_path.rglob("*"))
    status, shown, error = run(tmp_path / "source", "--checkpoint", checkpoint)
    assert (status, shown) == (2, "")
    assert sentence in error and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_refuses_an_empty_log_a_cut_file_and_a_missing_log(run, sound, run_directory, tmp_path):
    status, _, error = run(run_directory)
    assert status == 2 and "expected gateway/groups.sqlite" in error
    Spool(run_directory / "gateway" / "groups.sqlite").close()
    status, _, error = run(run_directory)
    assert status == 2 and "expected at least one trajectory, found none" in error
    path = tmp_path / "cut.pb"
    write_groups(path, groups_of(sound, sound))
    path.write_bytes(path.read_bytes()[:-7])
    status, _, error = run(path, "--checkpoint", run_directory / "checkpoints" / "2")
    assert status == 2 and "found no such message after 1" in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--checkpoint: expected one to compare with, found none"),
        (("--checkpoint", "nowhere"), "expected a directory with config.json"),
        (("--checkpoint", DEMO, "--top", -1), "--top: expected at least 0, found -1"),
        (("--checkpoint", DEMO, "--temperature", 0), "temperature: expected 0.01 to 100, found 0"),
        (("--checkpoint", DEMO, "--temperature", "1e-40"), "expected 0.01 to 100, found 1e-40"),
        (("--checkpoint", DEMO, "--temperature", "nan"), "expected 0.01 to 100, found nan"),
        (("--checkpoint", DEMO, "--html", "/no/x.html"), "--html: expected a file in a directory"),
        (("--checkpoint", DEMO, "--save", "/dev/null"), "--save: expected a file in a directory"),
        (("--checkpoint", DEMO, "--other", "/no"), "--other: expected a checkpoint directory"),
    ],
)
def test_refuses_arguments(run, sound, tmp_path, arguments, sentence):
    write_groups(tmp_path / "groups.pb", groups_of(sound, sound))
    status, shown, error = run(tmp_path / "groups.pb", *arguments)
    assert (status, shown) == (2, "")
    assert sentence in error and error.count("\n") == 1


def test_refuses_a_checkpoint_of_another_vocabulary(run, sound, checkpoint, tmp_path):
    """Also where only the prompt has an id that the model lacks."""
    tokens = sound[0].tokens.copy()
    tokens[0] = MODEL.vocab_size
    write_groups(tmp_path / "groups.pb", groups_of([replace(sound[0], tokens=tokens)]))
    status, shown, error = run(tmp_path / "groups.pb", "--checkpoint", checkpoint)
    assert (status, shown) == (2, "")
    assert "expected token ids from 0 to 1023, its vocabulary, found 1024" in error


def test_refuses_records_without_anything_to_compare(run, sound, checkpoint, tmp_path):
    lost = [replace(t, reward=None) for t in sound]
    broken = [replace(t, sampler_logp=np.full_like(t.sampler_logp, np.nan)) for t in sound]
    for trajectories, sentence in ((lost, "found none"), (broken, "sampler_logp finite and <= 0")):
        write_groups(tmp_path / "groups.pb", groups_of(trajectories))
        status, shown, error = run(tmp_path / "groups.pb", "--checkpoint", checkpoint)
        assert (status, shown) == (2, "")
        assert sentence in error and error.count("\n") == 1


def test_a_config_that_is_no_object_is_named(run, sound, checkpoint, tmp_path):
    write_groups(tmp_path / "groups.pb", groups_of(sound))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("[]")
    status, _, error = run(tmp_path / "groups.pb", "--checkpoint", other)
    assert status == 2
    assert f"checkpoint {other}, config.json: expected an object, found list" in error
    (other / "config.json").write_text("{}")
    _, _, error = run(tmp_path / "groups.pb", "--checkpoint", other)
    assert f"checkpoint {other}, config.json model_type: " in error


@pytest.mark.parametrize("flag", ["--html", "--save"])
def test_outputs_spare_what_is_read(run, sound, checkpoint, run_directory, tmp_path, flag):
    source, link = tmp_path / "groups.pb", tmp_path / "link.pb"
    write_groups(source, groups_of(sound))
    link.symlink_to(source)
    before = source.read_bytes()
    config, record = checkpoint / "config.json", run_directory / "config.json"
    for place, output in ((source, source), (source, link), (source, config), (link, source)):
        status, _, error = run(place, "--checkpoint", checkpoint, flag, output)
        assert status == 2 and f"{flag}: expected another file than those read" in error
    status, _, error = run(run_directory, flag, record)
    assert status == 2 and f"{flag}: expected another file than those read" in error
    both = ("--html", tmp_path / "out", "--save", tmp_path / "out")
    status, _, error = run(source, "--checkpoint", checkpoint, *both)
    assert status == 2 and "--html and --save: expected two files" in error
    assert source.read_bytes() == before and config.read_text().startswith("{")
    assert not (tmp_path / "out").exists()


def test_help_names_the_command(run):
    status, shown, _ = run("--help")
    assert status == 0 and shown.startswith("usage: mismatch-report [-h]")
