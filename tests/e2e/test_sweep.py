"""The sweep's smoke form: every arm of the fast scale through real processes, a few updates each.

Asserts what must hold whatever the arms learn: all run to their end, nothing is NaN, the fleets are
what they are declared to be. That the wrong centering drifts is for
tests/trainer_jax/test_drift.py.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_jax.sweep import planned_runs, read_sweep

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SWEEP = Path("examples/stability.toml")


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)


def test_every_arm_runs(tmp_path):
    command = [sys.executable, "-m", "trainer_jax", "sweep", str(SWEEP), "--scale", "fast"]
    command += [
        "--smoke",
        "--results",
        str(tmp_path / "results"),
        "--directory",
        str(tmp_path / "runs"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = planned_runs(read_sweep(SWEEP), "fast", smoke=True)
    files = {path.stem: path for path in (tmp_path / "results" / "fast").iterdir()}
    assert files.keys() == {run.name for run in planned} and len(files) == 10
    for run in planned:
        head, *windows = map(json.loads, files[run.name].read_text().splitlines())
        assert (head["status"], head["updates"], len(windows)) == ("finished", 3, 1)
        assert all(math.isfinite(number) for number in numbers([head, windows]))
        assert head["infrastructure_failures"] == 0
        after = head["evaluation"]["after"]
        assert (after["num_tasks"], after["num_samples"]) == (4, 4)
        formats = {group["weight_format"] for group in head["groups"].values()}
        assert formats == (
            {"bf16"} if run.arm.fleet == "homogeneous" else {"nvfp4", "fp8-block", "bf16"}
        )
        (window,) = windows
        assert 0 <= window["kl"] < 0.1 and window["entropy"] > 0.1
        if run.arm.arm in ("sc+mis", "sc+mis+top-p", "drawn-centering"):
            assert window["centering_norm"] > 0
        assert "Traceback" not in (tmp_path / "runs" / "logs" / f"{run.name}.log").read_text()
    assert not [path for path in (tmp_path / "runs" / "fast").iterdir() if path.is_dir()]
