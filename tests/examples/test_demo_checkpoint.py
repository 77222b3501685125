"""The committed demo checkpoint belongs to the code beside it."""

from __future__ import annotations

import filecmp
from pathlib import Path

from sampler_fleet.episodes.tokenizer import write_tokenizer
from trainer_jax.config import load_run
from trainer_jax.hf import load_checkpoint
from trainer_jax.models.parameters import count_parameters

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHECKPOINT = EXAMPLES / "demo-checkpoint"


def test_its_tokenizer_is_the_one_that_the_code_writes(tmp_path):
    """Else a change of tasks, prompts or frames has orphaned it: run `make warmstart`."""
    write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert filecmp.cmp(tmp_path / name, CHECKPOINT / name, shallow=False), name


def test_it_is_a_small_mixture_of_experts():
    model, _ = load_checkpoint(CHECKPOINT)
    assert 1e6 <= count_parameters(model) <= 3e6
    assert model.num_experts > model.num_experts_per_tok
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 8e6


def test_every_example_run_file_is_valid(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    for name in ("demo.toml", "demo-homogeneous.toml", "autoscale.toml"):
        load_run(EXAMPLES / name)
