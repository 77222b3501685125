"""An evaluation by real processes: killed, gone on with, graded again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from contracts.evaluations import EPISODES, REGRADED, read_records
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.tasks.generate import generate_tasks

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
NUM_SAMPLES = 2
RUN_FILE = """
[run]
name = "small"
[model]
checkpoint = "absent"
[loss]
arm = "grpo"
[train]
updates = 1
[evaluation]
max_new_tokens = 64
[episodes]
max_concurrent_evaluation = 2
[episodes.limits]
max_context_tokens = 2048
[fleet]
max_context_tokens = 2048
measure_seconds = 0.0
[[fleet.groups]]
name = "training"
weight_format = "nvfp4"
[[fleet.groups]]
name = "eval"
purpose = "evaluate"
weight_format = "bf16"
kv_format = "bf16"
"""


def write_local(task: Task, folder: Path) -> None:
    """A generated task in the local format."""
    tests = {name.removeprefix("tests/"): text for name, text in task.hidden_tests.items()}
    for place, files in (("tree", task.tree), ("tests", tests)):
        for name, text in files.items():
            path = folder / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    fields = {"issue": task.issue, "split": "heldout"}
    lists = {"fail_to_pass": task.fail_to_pass, "pass_to_pass": task.pass_to_pass}
    lines = [f"{key} = {json.dumps(value)}" for key, value in (fields | lists).items()]
    (folder / "task.toml").write_text("\n".join(lines))


@pytest.fixture
def source(tmp_path) -> Path:
    """Three tasks, of which a subset file names two."""
    for number, task in enumerate(generate_tasks("train", 3, 5)):
        write_local(task, tmp_path / "source" / f"task-{number}")
    (tmp_path / "two.txt").write_text("# a subset\ntask-2\n\ntask-0\n")
    return tmp_path / "source"


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    command = [
        *(sys.executable, "-m", "trainer_jax", "evaluate", str(tmp_path / "run.toml")),
        *("--checkpoint", str(ROOT / "examples" / "demo-checkpoint")),
        *("--tasks", str(tmp_path / "source"), "--ids", str(tmp_path / "two.txt")),
        *("--samples", str(NUM_SAMPLES), "--out", str(tmp_path / "out"), *arguments),
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill_in_the_middle(process: subprocess.Popen[str], episodes: Path) -> list[psutil.Process]:
    """Kills it once an episode is recorded; returns the services that it had."""
    deadline = time.monotonic() + 120
    while not read_records(episodes):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no episode in time"
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    return children


def test_a_killed_evaluation_goes_on_and_its_patches_are_graded_again(source, tmp_path):
    out = tmp_path / "out"
    children = kill_in_the_middle(start(tmp_path), out / EPISODES)
    assert children
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    before = read_records(out / EPISODES)
    assert 0 < len(before) < 2 * NUM_SAMPLES
    with (out / EPISODES).open("a") as file:
        file.write('{"task_id": "task-0", "samp')

    process = start(tmp_path)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert f"{len(before)} of {2 * NUM_SAMPLES} episodes" in text and "pass@2" in text
    records = read_records(out / EPISODES)
    assert records[: len(before)] == before
    played = Counter((r["task_id"], r["sample"]) for r in records if r["reward"] is not None)
    every = [(task, sample) for task in ("task-0", "task-2") for sample in range(NUM_SAMPLES)]
    assert played == dict.fromkeys(every, 1), "each sample once"
    assert len({r["session_id"].split(".", 2)[2] for r in records}) == len(records)
    result = json.loads((out / "evaluation.json").read_text())
    assert (result["num_tasks"], result["missing_samples"]) == (2, 0)
    passed = sum(r["reward"] or 0 for r in records)
    assert result["pass_at_1"] == pytest.approx(passed / 4) and "pass_at_4" not in result
    assert set(result["tasks"]) == {"task-0", "task-2"} and not result["incomplete_tasks"]
    assert "| task-2 | 2 |" in (out / "report.md").read_text()
    assert not (out / "services").exists()

    saved = [r for r in records if r["patch"] is not None]
    assert any(r["patch"]["changed"] for r in saved), "the policy changed something"
    process = start(tmp_path, "--regrade")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    again = {(r["task_id"], r["sample"]): r["passed"] for r in read_records(out / REGRADED)}
    assert again == {(r["task_id"], r["sample"]): r["reward"] == 1.0 for r in saved}
    assert f"{len(saved)} patches graded again, {len(saved)} verdicts as before" in text
    assert f"; {len(saved)} graded in this call; " in text
