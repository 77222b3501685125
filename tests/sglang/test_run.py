"""A whole run whose training samples come from a SGLang server that the sampler started."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from tests.e2e.conftest import RUN_FILE, Run, tiny_checkpoint
from tests.sglang.conftest import PYTHON
from trainer_jax.hf import load_config, save_checkpoint
from trainer_jax.metrics import read_metrics
from trainer_jax.models.parameters import init_params

__all__ = ["tiny_checkpoint"]  # a fixture

GROUPS = f"""
assemble_seconds = 300
[[fleet.groups]]
name = "sglang"
weight_format = "bf16"
kv_format = "bf16"
max_sessions = 8
engine = "sglang"
[fleet.groups.sglang]
python = "{PYTHON}"
[[fleet.groups]]
name = "eval"
purpose = "evaluate"
weight_format = "bf16"
kv_format = "bf16"
"""


@pytest.fixture
def run(tiny_checkpoint, tmp_path):
    # with a head of its own: SGLang's Qwen3-MoE has no other
    model = dataclasses.replace(load_config(tiny_checkpoint), tie_word_embeddings=False)
    checkpoint = tmp_path / "model"
    tokenizer = tiny_checkpoint.parent / "tokenizer"
    save_checkpoint(checkpoint, model, init_params(model, jax.random.key(0)), copy_from=tokenizer)
    directory, run_file = tmp_path / "run", tmp_path / "run.toml"
    sections = RUN_FILE[: RUN_FILE.index("[[fleet.groups]]")] + GROUPS
    run_file.write_text(sections.format(checkpoint=checkpoint, directory=directory))
    return Run(run_file=run_file, directory=directory)


def test_a_run_trains_on_what_sglang_samples(run):
    run.start()
    run.until(lambda: "sglang" in run.services(), timeout_s=120)
    run.until(lambda: run.steps(), timeout_s=400)
    status, output = run.wait(timeout_s=300)
    assert status == 0, output + run.logs()
    log = (run.directory / "logs" / "sglang-0.log").read_text()
    assert "version 2 (bf16): decoding paused for" in log
    assert "ended (status" not in output
    steps = [record for record in read_metrics(run.directory) if "step" in record]
    assert {record["step"] for record in steps} >= {1, 2, 3}
    assert not run.leftovers()
