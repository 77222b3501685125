"""A run small enough for a test, with everything real: processes, gRPC, sandboxes, weights.

Owns the tiny checkpoint, its run file, and the handle on a running trainer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import psutil
import pytest
from tokenizers import Tokenizer

from trainer_jax.hf import save_checkpoint
from trainer_jax.metrics import METRICS_FILE, read_metrics
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.parameters import init_params

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = """
[run]
name = "tiny"
directory = "{directory}"
[model]
checkpoint = "{checkpoint}"
[optimizer]
lr = 1e-3
[loss]
arm = "sc+mis+top-p"
[train]
updates = 3
prompts_per_update = 2
row_tokens = 1024
micro_rows = 2
checkpoint_every = 2
[evaluation]
num_tasks = 2
num_samples = 4
max_new_tokens = 12
[sampling]
top_p = 0.97
top_k = 64
max_new_tokens = 12
[episodes]
group_size = 2
max_concurrent = 8
queue_groups = 4
[episodes.limits]
max_turns = 3
max_context_tokens = 1000
[tasks]
num_train = 8
num_heldout = 4
[fleet]
max_context_tokens = 1024
lease_seconds = 4.0
[[fleet.groups]]
name = "b200-nvfp4"
weight_format = "nvfp4"
max_sessions = 8
capacity = 3
[[fleet.groups]]
name = "h100-fp8"
weight_format = "fp8-block"
activation_format = "fp8"
max_sessions = 8
capacity = 1
split_k = 2
[[fleet.groups]]
name = "eval"
purpose = "evaluate"
weight_format = "bf16"
kv_format = "bf16"
"""


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """Random weights under the demo's tokenizer: every episode ends on format errors."""
    place = tmp_path_factory.mktemp("tiny")
    subprocess.run(
        [sys.executable, "-m", "sampler_fleet", "tokenizer", "--out", str(place / "tokenizer")],
        check=True,
        cwd=ROOT,
    )
    tokenizer = Tokenizer.from_file(str(place / "tokenizer" / "tokenizer.json"))
    model = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        tie_word_embeddings=True,
    )
    params = init_params(model, jax.random.key(0))
    save_checkpoint(place / "model", model, params, copy_from=place / "tokenizer")
    return place / "model"


@dataclass
class Run:
    """A trainer process and what it writes."""

    run_file: Path
    directory: Path
    process: subprocess.Popen[str] | None = None
    seen: list[psutil.Process] = field(default_factory=list)

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "trainer_jax", "train", str(self.run_file), *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self, timeout_s: float = 150.0) -> tuple[int, str]:
        """Exit status and output."""
        assert self.process
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out

    def until(self, condition: Callable[[], object], timeout_s: float = 120.0) -> None:
        """Waits for a condition while the trainer lives."""
        assert self.process
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.wait()[1]
            assert time.monotonic() < deadline, f"not in time; logs:\n{self.logs()}"
            time.sleep(0.05)

    def steps(self) -> list[int]:
        if not (self.directory / METRICS_FILE).exists():
            return []
        return [record["step"] for record in read_metrics(self.directory)]

    def until_step(self, step: int) -> None:
        self.until(lambda: step in self.steps())

    def services(self) -> dict[str, psutil.Process]:
        """Its local services, by the kind of command."""
        assert self.process
        found = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                line = " ".join(child.cmdline())
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # it ended between the two looks
            for kind in ("weight_sync serve", "sampler_fleet serve", "sampler_fleet join"):
                if f"-m {kind}" in line:
                    name = (
                        kind
                        if kind != "sampler_fleet join"
                        else line.split("--group ")[1].split()[0]
                    )
                    found[name] = child
        self.seen += found.values()
        return found

    def kill_service(self, name: str) -> None:
        found: dict[str, psutil.Process] = {}
        self.until(lambda: found.update(self.services()) or name in found)
        found[name].kill()

    def signal(self, number: int) -> None:
        assert self.process
        self.services()
        os.kill(self.process.pid, number)

    def logs(self) -> str:
        files = sorted((self.directory / "logs").glob("*.log"))
        return "\n".join(f"== {f.name}\n{f.read_text()[-1500:]}" for f in files)

    def leftovers(self) -> list[psutil.Process]:
        """Processes of the run that are still there after a moment."""
        _, alive = psutil.wait_procs(self.seen, timeout=10)
        return alive

    def summary(self) -> dict:
        return json.loads((self.directory / "summary.json").read_text())


@pytest.fixture
def run(tiny_checkpoint, tmp_path):
    directory = tmp_path / "run"
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(checkpoint=tiny_checkpoint, directory=directory))
    run = Run(run_file=run_file, directory=directory)
    yield run
    if run.process and run.process.poll() is None:
        run.process.send_signal(signal.SIGKILL)
        run.process.communicate()
    assert not run.leftovers()
