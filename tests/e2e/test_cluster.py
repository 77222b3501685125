"""One trainer of two processes: it trains as one process does, and can go on as one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from tests.trainer_jax import test_loop
from tests.trainer_jax.test_loop import RUN_FILE
from trainer_jax.hf import load_checkpoint
from trainer_jax.metrics import read_metrics

pytestmark = pytest.mark.e2e
MESH = """
[mesh]
data = 2
fsdp = 2
[sampling]
top_k = 4
"""
gateway, checkpoint = test_loop.gateway, test_loop.checkpoint


class Trainers:
    """Processes of `python -m trainer_jax train` on one run file."""

    def __init__(self, tmp_path, gateway, checkpoint) -> None:
        self.gateway, self.checkpoint, self.tmp_path = gateway, checkpoint, tmp_path
        gateway.version_of = lambda _: 1  # equal groups for all

    def start(self, name: str, processes: int, devices: int, *overrides: str) -> list:
        """Each with so many virtual devices, all on one mesh of four."""
        run_file = self.tmp_path / f"{name}.toml"
        if not run_file.exists():
            directory = self.tmp_path / name
            text = RUN_FILE.format(
                directory=directory, address=self.gateway.address, checkpoint=self.checkpoint
            )
            run_file.write_text(text.replace("micro_rows = 2", "micro_rows = 4") + MESH)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = [f"cluster.processes={processes}"]
        if processes > 1:
            settings.append(f'cluster.coordinator="127.0.0.1:{port}"')
        flags = f" --xla_force_host_platform_device_count={devices}"
        return [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "trainer_jax", "train", run_file),
                    *(s if s.startswith("--") else f"--set={s}" for s in (*settings, *overrides)),
                    f"--process={process}",
                ],
                env=os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + flags},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for process in range(processes)
        ]

    def run(self, *arguments: Any) -> None:
        for process in self.start(*arguments):
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said


@pytest.fixture
def trainers(tmp_path, gateway, checkpoint):
    return Trainers(tmp_path, gateway, checkpoint)


def test_two_processes_train_as_one(trainers, gateway, tmp_path):
    trainers.run("one", 1, 4)
    published, gateway.published = gateway.published, []
    trainers.run("two", 2, 2)
    assert gateway.published == [1, 2, 3, 4, 5, 6] and published[-1] == 6, "none is left out"
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    for metric in ("kl", "grad_norm", "update_norm", "entropy", "reward"):
        np.testing.assert_allclose(
            [r[metric] for r in two], [r[metric] for r in one], rtol=2e-5, err_msg=metric
        )
    expected, found = (load_checkpoint(tmp_path / name / "final")[1] for name in ("one", "two"))
    start = load_checkpoint(trainers.checkpoint)[1]
    assert not np.allclose(start["embed"], expected["embed"], atol=1e-3)
    np.testing.assert_allclose(found["embed"], expected["embed"], atol=1e-3)
    assert not list((tmp_path / "two" / "export").iterdir())


@pytest.mark.parametrize("victim", [0, 1], ids=["the leader", "a follower"])
def test_when_one_dies_all_end_and_the_run_goes_on(trainers, gateway, tmp_path, victim):
    processes = trainers.start("run", 2, 2, "train.updates=5000", "cluster.heartbeat_s=5")
    deadline = time.monotonic() + 60
    while max(gateway.published, default=0) < 6:
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.05)
    processes[victim].kill()
    said, _ = processes[1 - victim].communicate(timeout=60)
    assert processes[1 - victim].returncode != 0, said
    processes[victim].communicate()
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    steps = max(int(name) for name in names if name.isdigit())
    assert steps >= 2
    trainers.run("run", 1, 4, f"train.updates={steps + 1}", "--resume")
    assert [r["step"] for r in read_metrics(tmp_path / "run")][-2:] == [steps, steps + 1]
