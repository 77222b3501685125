"""Sweeps: what is planned, what is kept of a run, and how runs are made (by a stand-in trainer)."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from contracts.errors import BadInputError, RetryError
from trainer_jax import sweep_run
from trainer_jax.collapse import CollapseLimits, collapse_of
from trainer_jax.config import parse_run
from trainer_jax.sweep import SweepConfig, planned_runs, read_sweep, record_of
from trainer_jax.sweep_results import (
    WINDOW,
    finished_digest,
    results_file,
    write_results,
)

RUN = """
[run]
name = "base"
[model]
checkpoint = "start"
[train]
updates = 5
[fleet]
groups = [{{ name = "a", weight_format = "{format}" }}]
"""
SWEEP = """
directory = "{root}/runs"
results = "{root}/results"
[scales.s]
fleets = {{ mixed = "{root}/mixed.toml", homogeneous = "{root}/homogeneous.toml" }}
warm_starts = ["w/one", "w/two"]
seeds = [0, 1]
set = {{ "train.updates" = 50 }}
smoke = {{ "train.updates" = 2 }}
[[scales.s.arms]]
arm = "grpo"
fleet = "mixed"
set = {{ "sampling.top_p" = 1.0 }}
[[scales.s.arms]]
arm = "sc+mis+top-p"
fleet = "homogeneous"
label = "the good one"
"""


@pytest.fixture
def sweep(tmp_path) -> SweepConfig:
    for name, format in (("mixed", "nvfp4"), ("homogeneous", "bf16")):
        (tmp_path / f"{name}.toml").write_text(RUN.format(format=format))
    (tmp_path / "sweep.toml").write_text(SWEEP.format(root=tmp_path))
    return read_sweep(tmp_path / "sweep.toml")


class TestPlan:
    def test_seeds_then_warm_starts_then_arms(self, sweep):
        runs = planned_runs(sweep, "s")
        assert [run.name for run in runs[:5]] == [
            "grpo-mixed-one-seed-0",
            "the-good-one-one-seed-0",
            "grpo-mixed-two-seed-0",
            "the-good-one-two-seed-0",
            "grpo-mixed-one-seed-1",
        ]
        assert len(runs) == len({run.name for run in runs}) == len({r.digest for r in runs}) == 8

    def test_a_run_record_is_the_fleets_with_what_is_varied(self, sweep, tmp_path):
        run = planned_runs(sweep, "s")[4]
        config = parse_run(dict(record_of(run, tmp_path / "d")))
        assert config.run.path == tmp_path / "d"
        assert (config.run.seed, config.sections["tasks"]["seed"]) == (1, 1)
        assert config.model.checkpoint == Path("w/one")
        assert (config.loss.arm, config.train.updates) == ("grpo", 50)
        assert config.sections["sampling"] == {"top_p": 1.0}
        assert config.sections["fleet"]["groups"][0]["weight_format"] == "nvfp4"
        other = planned_runs(sweep, "s")[1]
        assert other.sections["fleet"]["groups"][0]["weight_format"] == "bf16"
        assert "sampling" not in other.sections

    def test_smoke_is_one_short_run_per_arm(self, sweep):
        runs = planned_runs(sweep, "s", smoke=True)
        assert [run.arm.arm for run in runs] == ["grpo", "sc+mis+top-p"]
        assert {run.sections["train"]["updates"] for run in runs} == {2}

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ('fleet = "mixed"', 'fleet = "other"', "fleet of mixed, homogeneous, found 'other'"),
            ("seeds = [0, 1]", "seeds = []", "seeds"),
            ('arm = "grpo"', 'arm = "grpo"\nspeed = 1', "unknown key"),
            ('"sampling.top_p" = 1.0', '"top_p" = 1.0', "section.key"),
            ("[scales.s]", "[scales.s", "valid TOML"),
        ],
    )
    def test_one_sentence_for_what_is_wrong(self, sweep, tmp_path, old, new, words):
        path = tmp_path / "sweep.toml"
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(BadInputError, match=words.replace("[", r"\[")):
            planned_runs(read_sweep(path), "s")

    def test_no_such_scale(self, sweep):
        with pytest.raises(BadInputError, match="expected s"):
            planned_runs(sweep, "t")

    def test_the_projects_own_sweep(self):
        sweep = read_sweep(Path("examples/stability.toml"))
        runs = [run for scale in sweep.scales for run in planned_runs(sweep, scale)]
        assert len(runs) == 77
        for run in runs:
            config = parse_run(run.sections)
            is_whole = config.sections["sampling"]["top_p"] == 1.0
            assert config.loss.replay != is_whole
            assert config.model.checkpoint.is_dir()


def record(step: int, *, reward=0.5, kl=0.001, format_errors=0.0):
    return {
        "step": step,
        "reward": reward,
        "kl": kl,
        "ending/format_errors": format_errors,
        "sampled_tokens": 100 * step,
        "group/a/sampled_tokens": 100 * step,
        "group/a/kl": kl,
        "time/step": 2.0,
    }


SUMMARY = {
    "status": "finished",
    "updates": 12,
    "wall_seconds": 3.14159,
    "sampled_tokens": 7,
    "mean_staleness": 1.5,
    "infrastructure_failures": 0,
    "groups": {"a": {"kl": 0.123456}},
    "heldout": {"before": None, "after": {"pass_at_1": 0.5}},
    "cost": {},
}


def write_run(directory: Path, records, **summary) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "summary.json").write_text(json.dumps(SUMMARY | summary))
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (directory / "metrics.jsonl").write_text(lines)


class TestResults:
    def test_a_run_becomes_a_head_and_windows(self, sweep, tmp_path):
        run = planned_runs(sweep, "s")[0]
        records = [record(step, kl=0.001 * step) for step in range(1, WINDOW + 3)]
        write_run(tmp_path / "run", records)
        write_results(tmp_path / "results", run, tmp_path / "run")
        head, first, last = map(
            json.loads, results_file(tmp_path / "results", run).read_text().splitlines()
        )
        assert (head["label"], head["seed"], head["warm_start"]) == ("grpo mixed", 0, "one")
        assert (head["digest"], head["seconds"]) == (run.digest, 3.142)
        assert head["groups"] == {"a": {"kl": 0.1235}}
        assert (first["first"], first["last"], last["first"], last["last"]) == (1, 10, 11, 12)
        weighted = sum(s * s for s in range(1, 11)) / sum(range(1, 11)) * 0.001
        assert first["kl"] == first["group/a/kl"] == float(f"{weighted:.4g}")
        assert last["group/a/sampled_tokens"] == 2300
        assert first["entropy"] is None
        assert finished_digest(tmp_path / "results", run) == run.digest
        assert finished_digest(tmp_path / "results", planned_runs(sweep, "s")[1]) is None

    def test_signs_are_told_by_their_first_update(self):
        limits = CollapseLimits(window=2)
        records = [record(step) for step in range(1, 6)]
        records += [record(step, kl=1.0) for step in range(6, 10)]
        records += [record(step, kl=1.0, reward=0.1) for step in range(10, 14)]
        records += [record(step, reward=0.1) for step in range(14, 18)]
        assert collapse_of(records, limits) == (
            {"reward_falling": 10, "kl_rising": 6, "format_errors": None},
            10,
        )
        assert collapse_of(records[:9], limits)[1] is None


TRAINER = """
    import json, sys, signal, time
    from pathlib import Path
    record = json.loads(Path(sys.argv[4]).read_text())
    directory, mode = Path(record["run"]["directory"]), sys.argv[5]
    directory.mkdir(parents=True, exist_ok=True)
    with (directory.parent / "starts").open("a") as file:
        file.write(f"{record['run']['name']} {mode}\\n")
    behaviour = Path(__file__).with_name("behaviour").read_text()
    if behaviour == "waits":
        (directory / "checkpoints").mkdir(exist_ok=True)
        signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
        (directory / "ready").touch()
        time.sleep(60)
    if behaviour == "fails" and "grpo" in record["run"]["name"]:
        sys.exit(3)
    (directory / "summary.json").write_text(Path(__file__).with_name("summary").read_text())
    (directory / "metrics.jsonl").write_text(Path(__file__).with_name("metrics").read_text())
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Stands for `python -m trainer_jax train RECORD MODE`; returns how to set its behaviour."""
    folder = tmp_path / "trainer"
    folder.mkdir()
    (folder / "main.py").write_text(textwrap.dedent(TRAINER))
    (folder / "summary").write_text(json.dumps(SUMMARY))
    (folder / "metrics").write_text(json.dumps(record(1)) + "\n")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/main.py" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sweep_run.sys, "executable", str(program))
    monkeypatch.setattr(sweep_run, "POLL_S", 0.02)

    def behave(how: str) -> None:
        (folder / "behaviour").write_text(how)

    behave("works")
    return behave


def run(sweep, *, stop=lambda: False, keep=False, only=""):
    runs = [run for run in planned_runs(sweep, "s") if only in run.name]
    return sweep_run.run_sweep(
        sweep, runs, jobs=2, keep=keep, console=Console(quiet=True), stop_requested=stop
    )


def starts(sweep) -> list[str]:
    return (sweep.directory / "s" / "starts").read_text().split("\n")[:-1]


class TestRun:
    def test_every_run_is_made_once_and_never_again(self, sweep, trainer):
        assert run(sweep)
        assert sorted(starts(sweep)) == sorted(
            f"{r.name} --fresh" for r in planned_runs(sweep, "s")
        )
        assert len(list((sweep.results / "s").iterdir())) == 8
        assert not [path for path in (sweep.directory / "s").iterdir() if path.is_dir()]
        assert run(sweep) and len(starts(sweep)) == 8

    def test_directories_can_be_kept(self, sweep, trainer):
        assert run(sweep, keep=True, only="seed-0")
        assert len([path for path in (sweep.directory / "s").iterdir() if path.is_dir()]) == 4

    def test_a_stop_asks_each_run_for_a_checkpoint_and_the_next_sweep_resumes(self, sweep, trainer):
        trainer("waits")

        def stop() -> bool:
            return len(list((sweep.directory / "s").glob("*/ready"))) == 2

        assert not run(sweep, stop=stop)
        trainer("works")
        assert run(sweep, only="one-seed-0")
        assert [line.split()[1] for line in starts(sweep)] == ["--fresh"] * 2 + ["--resume"] * 2

    def test_a_run_that_fails_is_tried_again_and_does_not_hold_up_the_others(self, sweep, trainer):
        trainer("fails")
        with pytest.raises(RetryError, match=r"4 runs failed 3 times, see .*grpo-mixed.*\.log"):
            run(sweep)
        assert len(list((sweep.results / "s").iterdir())) == 4
        assert len(starts(sweep)) == 4 * 3 + 4

    def test_results_of_another_declaration_are_refused(self, sweep, trainer, tmp_path):
        run(sweep, only="grpo-mixed-one-seed-0")
        path = tmp_path / "sweep.toml"
        path.write_text(path.read_text().replace("= 50", "= 60"))
        with pytest.raises(BadInputError, match="as it is declared"):
            run(read_sweep(path))

    def test_no_process_is_left_when_something_else_goes_wrong(self, sweep, trainer):
        trainer("waits")
        seen: list[int] = []

        def stop() -> bool:
            if len(list((sweep.directory / "s").glob("*/ready"))) == 2:
                raise KeyboardInterrupt
            return False

        start = sweep_run._start

        def noted(*arguments):
            job = start(*arguments)
            seen.append(job.process.pid)
            return job

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sweep_run, "_start", noted)
            run(sweep, stop=stop)
        for pid in seen:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, signal.SIG_DFL)
