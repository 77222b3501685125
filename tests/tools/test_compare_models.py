"""Whole models before and after: transformers computes with exactly the decoded weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from tools import convert_checkpoint
from tools.compare_models import check_comparable, compare_models
from weight_sync.convert import Options, convert_directory, plan_directory

BF16, NVFP4 = WeightFormat.BF16, WeightFormat.NVFP4
VOCAB = 64
LARGE = 1 << 40
TEXT = " ".join(f"w{i * i % VOCAB}" for i in range(700))
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}


def save(directory: Path, model: torch.nn.Module) -> Path:
    model.to(torch.bfloat16).save_pretrained(directory)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    return save(tmp_path_factory.mktemp("moe") / "source", Qwen3MoeForCausalLM(config))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    return save(tmp_path_factory.mktemp("llama") / "source", LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory) -> Path:
    """Linear attention in three of four layers, a shared expert, a vision tower."""
    torch.manual_seed(0)
    linear = {f"linear_{part}_head_dim": 16 for part in ("key", "value")}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32}
    text = SHAPE | {"num_hidden_layers": 4, "head_dim": 16} | linear | experts
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    directory = tmp_path_factory.mktemp("qwen3_5") / "source"
    return save(directory, Qwen3_5MoeForConditionalGeneration(config))


KINDS = {
    "moe": (Qwen3MoeForCausalLM, 2 * 4 * 3),
    "llama": (LlamaForCausalLM, 2 * 7),
    "qwen3_5": (Qwen3_5MoeForConditionalGeneration, 4 * 4 * 3),
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(48).reshape(2, 24) % VOCAB
    with torch.no_grad():
        return model(tokens).logits


def dequantize(stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """The ModelOpt layout, from its description alone."""
    packed, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"].float()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    pairs = torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], dim=-1)
    blocks = pairs.reshape(*scale.shape, 16) * scale[..., None] * stored[f"{module}.weight_scale_2"]
    return blocks.reshape(packed.shape[0], -1)


@pytest.mark.parametrize("name", list(KINDS))
def test_the_decoded_checkpoint_computes_with_exactly_the_decoded_weights(name, request, tmp_path):
    source = request.getfixturevalue(name)
    convert_directory(source, tmp_path / "q", Options(format=NVFP4))
    options = Options(format=BF16, source_format=NVFP4, dtype="F32")
    convert_directory(tmp_path / "q", tmp_path / "plain", options)
    kind, num_matrices = KINDS[name]
    found = logits(kind.from_pretrained(tmp_path / "plain", dtype=torch.float32))

    stored = load_file(tmp_path / "q" / "model.safetensors")
    model = kind.from_pretrained(source, dtype=torch.float32)
    state, num_replaced = model.state_dict(), 0
    for module in [n.removesuffix(".weight_scale") for n in stored if n.endswith("weight_scale")]:
        matrix = dequantize(stored, module)
        prefix, experts, rest = module.partition(".mlp.experts.")
        if not experts:
            state[f"{module}.weight"].copy_(matrix)
        else:
            index, projection = rest.split(".")
            fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
            target = state[f"{prefix}.mlp.experts.{fused}"][int(index)]
            rows = len(matrix)
            first = rows if projection == "up_proj" else 0
            target[first : first + rows].copy_(matrix)
        num_replaced += 1
    assert num_replaced == num_matrices
    assert torch.equal(found, logits(model))
    assert not torch.equal(found, logits(kind.from_pretrained(source, dtype=torch.float32)))


def tokens_of(source: Path, options: Options, text: str = TEXT, memory: int = LARGE) -> list[int]:
    plan, _ = plan_directory(source, options)
    return check_comparable(source, plan, text, available_bytes=memory)


def test_perplexity_and_divergence_are_those_of_the_definition(moe, tmp_path):
    options = Options(format=NVFP4)
    convert_directory(moe, tmp_path / "q", options)
    convert_directory(tmp_path / "q", tmp_path / "plain", Options(format=BF16, dtype="F32"))
    tokens = tokens_of(moe, options)
    assert tokens == [i * i % VOCAB for i in range(700)]
    found = compare_models(moe, tmp_path / "q", tokens)
    assert {path.name for path in tmp_path.iterdir()} == {"q", "plain"}

    logps = []
    for directory in (moe, tmp_path / "plain"):
        model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32)
        rows = []
        for window in (tokens[:513], tokens[512:]):  # windows of 512 predictions
            with torch.no_grad():
                rows.append(model(torch.tensor([window[:-1]])).logits[0].double())
        logps.append(torch.log_softmax(torch.cat(rows), -1).numpy())
    p, q = logps
    kl = (np.exp(p) * (p - q)).sum(-1)
    chosen = [x[np.arange(699), tokens[1:]] for x in (p, q)]
    assert found.num_tokens == 699
    expected = [np.exp(-chosen[0].mean()), np.exp(-chosen[1].mean())]
    expected += [kl.mean(), np.quantile(kl, 0.99)]
    measured = [found.source_perplexity, found.result_perplexity, found.mean_kl, found.p99_kl]
    np.testing.assert_allclose(measured, expected, rtol=1e-6)
    assert found.mean_kl > 0


@pytest.mark.parametrize("way", ["quantized", "decoded"])
def test_the_converter_shows_both_models(moe, tmp_path, monkeypatch, capsys, way):
    source, to = moe, "nvfp4"
    if way == "decoded":
        source, to = tmp_path / "q", "bf16"
        convert_directory(moe, source, Options(format=NVFP4))
    (tmp_path / "text").write_text(TEXT)
    arguments = [source, tmp_path / "out", "--to", to, "--verify", "--prompts", tmp_path / "text"]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        convert_checkpoint.main()
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "699 predicted tokens" in shown and "KL(SRC || DST), mean" in shown
    found = compare_models(source, tmp_path / "out", tokens_of(source, Options(format=BF16)))
    for value in (found.source_perplexity, found.result_perplexity):
        assert f"{value:.4f}" in shown
    for value in (found.mean_kl, found.p99_kl):
        assert f"{value:.6f}" in shown


def test_a_model_does_not_differ_from_its_copy(llama, tmp_path):
    convert_directory(llama, tmp_path / "copy", Options(format=BF16))
    found = compare_models(llama, tmp_path / "copy", list(range(20)))
    assert found.mean_kl == found.p99_kl == 0
    assert found.source_perplexity == found.result_perplexity


def test_too_little_memory_is_refused(moe):
    options = Options(format=NVFP4)
    num_weights = sum(p.numel() for p in Qwen3MoeForCausalLM.from_pretrained(moe).parameters())
    assert tokens_of(moe, options, memory=8 * num_weights)
    with pytest.raises(BadInputError, match="memory for both models in float32"):
        tokens_of(moe, options, memory=8 * num_weights - 1)


@pytest.mark.parametrize("model_type", ["t5", "no_such_model"])
def test_an_architecture_that_transformers_cannot_load_is_refused(moe, tmp_path, model_type):
    convert_directory(moe, tmp_path / "other", Options(format=BF16))
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(BadInputError, match="a causal language model that transformers loads"):
        tokens_of(tmp_path / "other", Options(format=NVFP4))


def test_weights_that_do_not_fit_their_config_are_refused(llama, tmp_path):
    convert_directory(llama, tmp_path / "other", Options(format=BF16))
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(BadInputError, match=r"missing keys, first model\.layers\.2"):
        compare_models(tmp_path / "other", llama, [1, 2, 3])


@pytest.mark.parametrize(
    ("text", "tokenizer", "sentence"),
    [
        ("w1", None, "at least 2 tokens, found 1"),
        ("", None, "at least 2 tokens, found 0"),
        ("w1 w2", "", "expected tokenizer.json, found none"),
        ("w1 w2", "{}", "expected a tokenizer"),
    ],
)
def test_a_text_that_gives_nothing_to_predict_is_refused(moe, tmp_path, text, tokenizer, sentence):
    convert_directory(moe, tmp_path / "other", Options(format=BF16))
    path = tmp_path / "other" / "tokenizer.json"
    if tokenizer is not None:
        path.write_text(tokenizer) if tokenizer else path.unlink()
    with pytest.raises(BadInputError, match=sentence):
        tokens_of(tmp_path / "other", Options(format=NVFP4), text)


def test_tokens_beyond_the_vocabulary_are_refused(moe, tmp_path):
    convert_directory(moe, tmp_path / "other", Options(format=BF16))
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 10}))
    with pytest.raises(BadInputError, match="token ids below 10"):
        tokens_of(tmp_path / "other", Options(format=NVFP4))
