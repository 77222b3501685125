"""The trainer's benchmark on small sizes: what it compares is equal, what it reads is right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.trainer import largest_array


def test_the_largest_array_of_a_module_is_found_by_its_bytes():
    module = "%a = bf16[4,100]{1,0} x\n%b = (f32[150]{0}, pred[]) y\n ROOT %c = u8[7,100]{1,0} z"
    assert largest_array(module) == 800


@pytest.mark.slow
def test_gradients_agree_and_every_contender_is_measured(tmp_path):
    out = tmp_path / "trainer.json"
    command = [sys.executable, "-m", "benchmarks.trainer", "--quick", "--part", "deltanet"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ((contenders),) = json.loads(out.read_text())["results"]["deltanet"].values()
    assert set(contenders) == {"ours", "torch chunked"}
    for result in contenders.values():
        assert result["median_s"] > 0 and result["cpu_s"] > 0 and result["megabytes"] > 0
    ours = contenders["ours"]
    assert ours["largest_array_megabytes"] <= ours["planned_megabytes"]
    assert {"times_best_peer", "times_best_peer_by_cpu", "times_less_memory"} <= set(ours)
