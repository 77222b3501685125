import itertools
import json
import signal

import jax
import numpy as np
import pytest

from trainer_jax.export import export_checkpoint
from trainer_jax.hf import load_checkpoint
from trainer_jax.metrics import read_metrics

pytestmark = pytest.mark.e2e


def check_record(run, updates: int) -> None:
    """What must hold however often anything was killed."""
    records = read_metrics(run.directory)
    assert [r["step"] for r in records] == list(range(1, updates + 1))
    versions = [r["version"] for r in records]
    assert all(a < b for a, b in itertools.pairwise(versions)), versions
    sequences = [s for r in records for s in r["sequences"]]
    assert sequences == sorted(set(sequences)), "groups in order, none trained on twice"
    seconds = [r["elapsed_seconds"] for r in records]
    assert seconds == sorted(seconds)
    for record in records:
        assert record["staleness/mean"] >= 0
        assert record["kl"] is not None


def test_a_run_from_start_to_report(run, tmp_path):
    run.start()
    run.until_step(1)
    run.services()
    status, output = run.wait()
    assert status == 0, output + run.logs()
    check_record(run, 3)
    summary = run.summary()
    assert summary["status"] == "finished" and summary["updates"] == 3
    assert set(summary["groups"]) == {"b200-nvfp4", "h100-fp8"}
    for when in ("before", "after"):
        evaluation = summary["heldout"][when]
        assert 0 <= evaluation["pass_at_1"] <= evaluation["pass_at_4"] <= 1
        assert evaluation["num_tasks"] == 2 and evaluation["missing_samples"] == 0
    assert summary["heldout"]["after"]["version"] > summary["heldout"]["before"]["version"]
    assert summary["restarts"] == 0
    assert "<svg" in (run.directory / "report.html").read_text()
    assert list((run.directory / "tensorboard").glob("events*"))
    assert "update 3/3" in output and "report.html" in output
    export_checkpoint(run.directory, tmp_path / "out", layout="fused", dtype="bfloat16")
    _, final = load_checkpoint(run.directory / "final")
    _, exported = load_checkpoint(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, final, exported)
    record = json.loads((run.directory / "config.json").read_text())
    assert record["sampling"]["top_p"] == 0.97

    run.start()  # a second run in its place
    status, output = run.wait()
    assert status == 2 and "no earlier run" in output


def test_killed_services_are_replaced(run):
    run.start("--set", "train.updates=8", "--set", "evaluation.before=false")
    for step, name in enumerate(
        ("b200-nvfp4", "sampler_fleet serve", "weight_sync serve"), start=1
    ):
        run.until_step(2 * step - 1)
        run.kill_service(name)
    status, output = run.wait()
    assert status == 0, output + run.logs()
    check_record(run, 8)
    assert run.summary()["restarts"] >= 3


def test_a_killed_trainer_resumes(run):
    settings = ("--set", "train.updates=6", "--set", "evaluation.num_tasks=1")
    run.start(*settings)
    run.until(lambda: (run.directory / "checkpoints" / "2").exists())
    run.until_step(3)
    run.signal(signal.SIGKILL)
    run.wait()
    assert not run.leftovers()
    before = read_metrics(run.directory)

    run.start(*settings, "--resume")
    status, output = run.wait()
    assert status == 0, output + run.logs()
    check_record(run, 6)
    kept = read_metrics(run.directory)[:2]
    assert kept == before[:2], "the curves go on from the checkpoint"
    assert run.summary()["status"] == "finished"


def test_ctrl_c_saves_and_resume_goes_on(run):
    settings = ("--set", "train.checkpoint_every=100", "--set", "evaluation.before=false")
    run.start(*settings, "--set", "train.updates=50")
    run.until_step(2)
    run.signal(signal.SIGINT)
    status, output = run.wait()
    assert status == 0, output
    assert "--resume" in output
    assert not run.leftovers()
    before = read_metrics(run.directory)
    steps = len(before)
    assert (run.directory / "checkpoints" / str(steps)).exists()
    assert run.summary()["status"] == "interrupted"

    run.start(*settings, "--resume", "--set", f"train.updates={steps + 2}")
    status, output = run.wait()
    assert status == 0, output + run.logs()
    check_record(run, steps + 2)
    assert read_metrics(run.directory)[:steps] == before
