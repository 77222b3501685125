"""The script for accelerators, in the form that runs anywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_smoke_form_fills_the_table_and_everything_holds(tmp_path):
    out = tmp_path / "results" / "smoke.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.accelerator", "--smoke", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = out.read_text()
    assert text in done.stdout
    parts = [line.split()[1].rstrip(",") for line in text.splitlines() if line.startswith("| ")]
    parts = [part for part in parts if part != "|"]
    wanted = ["parity"] * 4 + ["update", "model-FLOPs", "one"] + ["encoder"] * 4 + ["loss"] * 3
    assert parts == wanted
    assert text.count("holds: True") == 8 and "holds: False" not in text
