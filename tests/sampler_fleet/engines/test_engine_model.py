"""The forward pass against transformers, and against itself in other batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contracts.errors import BadInputError
from contracts.types import KvFormat, WeightFormat
from sampler_fleet.engines.checkpoint import Checkpoint
from sampler_fleet.engines.model import MixtureModel, ModelConfig, Segment, StepBatch
from sampler_fleet.engines.precision import ActivationFormat, Precision
from tests.sampler_fleet.engines.engine_checkpoints import (
    CONFIG,
    E2M1,
    MIXTRAL,
    convert_slow,
    random_tensors,
    write_checkpoint,
)

EXACT = Precision(exact=True)
# Largest difference of log-probs between two batches that hold the same sequence. BF16 rounding
# turns differences in the last bit of a float32 sum into steps of 2**-8; more is a bug.
BATCH_TOLERANCE = {True: 1e-4, False: 0.15}


def model_of(path, precision, **kinds) -> MixtureModel:
    manifest = write_checkpoint(path, **kinds)
    with torch.inference_mode():
        return MixtureModel(Checkpoint.read(path, manifest), precision)


def logp(model, *segments, cache=None, num_slots=8):
    """Log-probs of every token of every segment; the cache is new unless given."""
    with torch.inference_mode():
        cache = cache or model.new_cache(num_slots=num_slots, max_context=160)
        batch = StepBatch.of(segments)
        rows = model.logits(model.hidden_states(batch, cache)).log_softmax(-1)
        ends = batch.last_rows + 1
        return [rows[end - len(s.tokens) : end] for end, s in zip(ends, segments, strict=True)]


def segment(tokens, slot=0, start=0):
    return Segment(slot=slot, start=start, tokens=np.asarray(tokens, np.int32))


def tokens_of(seed, length):
    return np.random.default_rng(seed).integers(0, CONFIG["vocab_size"], length)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        CONFIG | {"norm_topk_prob": False},
        CONFIG | {"num_key_value_heads": 4, "num_experts_per_tok": 1},
        MIXTRAL,
        MIXTRAL | {"num_experts_per_tok": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ],
    ids=["default", "no-topk-norm", "mha-top1", "mixtral", "mixtral-top1-tied"],
)
def test_equals_transformers_in_float32(tmp_path, config):
    from transformers import AutoModelForCausalLM

    tensors = random_tensors(config)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    manifest = write_checkpoint(tmp_path, config=config, tensors=tensors)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert config["architectures"] == [type(peer).__name__]
    model = MixtureModel(Checkpoint.read(tmp_path, manifest), EXACT)
    for length in (140, 11):
        tokens = tokens_of(length, length)
        with torch.inference_mode():
            expected = peer(torch.tensor(tokens)[None]).logits[0].float().log_softmax(-1)
        (found,) = logp(model, segment(tokens))
        assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.5  # the model has opinions, so agreement says something


@pytest.mark.parametrize("exact", [True, False], ids=["float32", "bf16"])
def test_steps_equal_one_pass(tmp_path, exact):
    model = model_of(tmp_path, Precision(exact=exact, kv_format=KvFormat.FP8, split_k=2))
    tokens = tokens_of(2, 24)
    (whole,) = logp(model, segment(tokens))
    cache = model.new_cache(num_slots=3, max_context=64)
    rows = []
    for start, end in [(0, 7), (7, 8), (8, 17), *((i, i + 1) for i in range(17, 24))]:
        rows += logp(model, segment(tokens[start:end], slot=2, start=start), cache=cache)
    difference = (torch.cat(rows) - whole).abs().max()
    assert difference < BATCH_TOLERANCE[exact]


@pytest.mark.parametrize("exact", [True, False], ids=["float32", "bf16"])
def test_a_batch_does_not_change_its_members(tmp_path, exact):
    """Sequences of different lengths, decoding and prefilling, in one step and alone."""
    model = model_of(tmp_path, Precision(exact=exact))
    cache = model.new_cache(num_slots=5, max_context=64)
    prefixes = [tokens_of(slot, length) for slot, length in enumerate((3, 30, 12, 1, 20))]
    for slot, prefix in enumerate(prefixes):
        logp(model, segment(prefix, slot=slot), cache=cache)
    new = [tokens_of(100 + slot, length) for slot, length in enumerate((1, 1, 5, 1, 9))]
    together = logp(
        model,
        *(segment(t, slot=i, start=len(prefixes[i])) for i, t in enumerate(new)),
        cache=cache,
    )
    for slot, (prefix, tokens) in enumerate(zip(prefixes, new, strict=True)):
        (alone,) = logp(model, segment(np.concatenate([prefix, tokens])))
        difference = (together[slot] - alone[-len(tokens) :]).abs().max()
        assert difference < BATCH_TOLERANCE[exact]


def test_later_tokens_and_other_slots_do_not_matter(tmp_path):
    model = model_of(tmp_path, EXACT)
    tokens, changed = tokens_of(3, 20), tokens_of(3, 20)
    changed[15:] = tokens_of(4, 5)
    first, _ = logp(model, segment(tokens), segment(tokens_of(5, 20), slot=1))
    second, _ = logp(model, segment(changed), segment(tokens_of(6, 20), slot=1))
    assert torch.equal(first[:15], second[:15])
    assert not torch.equal(first[15:], second[15:])


def test_a_smaller_cache_moves_the_log_probs_more(tmp_path):
    tokens = tokens_of(7, 40)
    results = {}
    for kv_format in KvFormat:
        model = model_of(tmp_path, Precision(kv_format=kv_format))
        cache = model.new_cache(num_slots=1, max_context=64)
        (results[kv_format],) = logp(model, segment(tokens), cache=cache)
        expected = torch.float8_e4m3fn if kv_format == KvFormat.FP8 else torch.bfloat16
        assert cache.data.dtype == expected
        share = (cache.data[:, :, :, :40].float() != 0).float().mean()
        assert share > (0.7 if kv_format == KvFormat.NVFP4 else 0.95)  # small ones become 0
        assert (cache.data[:, :, :, 40:].float() == 0).all()
    fp8, nvfp4 = (
        (results[kv_format] - results[KvFormat.BF16]).abs().mean()
        for kv_format in (KvFormat.FP8, KvFormat.NVFP4)
    )
    assert 1e-3 < fp8 < 0.2 and 2 * fp8 < nvfp4 < 1


def test_split_k_changes_no_more_than_rounding_does(tmp_path):
    tokens = tokens_of(8, 140)
    results = {}
    for exact in (True, False):
        for split_k in (1, 2, 4):
            model = model_of(tmp_path, Precision(split_k=split_k, exact=exact))
            (results[exact, split_k],) = logp(model, segment(tokens))
    rounding = (results[False, 1] - results[True, 1]).abs().mean()
    for split_k in (2, 4):
        assert 0 < (results[True, split_k] - results[True, 1]).abs().max() < 1e-4
        assert (results[False, split_k] - results[False, 1]).abs().mean() < rounding


@pytest.mark.parametrize("format", [f for f in WeightFormat if f != WeightFormat.BF16])
@pytest.mark.parametrize("config", [CONFIG, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_quantized_weights_compute_as_their_decoded_values(tmp_path, format, config):
    """Against the same weights, decoded by the test, in a float32 checkpoint."""
    tensors = random_tensors(config)
    decoded = {name: decode_slow(name, tensors, format) for name in tensors}
    changed = [name for name in tensors if not torch.equal(decoded[name], tensors[name].float())]
    assert len(changed) >= 2 * 4 * 3  # the experts at least
    tokens = segment(tokens_of(9, 140))
    decoded_model = model_of(tmp_path / "decoded", EXACT, config=config, tensors=decoded)
    (expected,) = logp(decoded_model, tokens)
    model = model_of(tmp_path / "packed", EXACT, config=config, tensors=tensors, format=format)
    assert (logp(model, tokens)[0] - expected).abs().max() < 1e-4


def decode_slow(name, tensors, format):
    converted = convert_slow({name: tensors[name]}, format)
    module = name.removesuffix(".weight")
    if format == WeightFormat.MXFP8 and f"{module}.weight_scale_inv" in converted:
        exponent = converted[f"{module}.weight_scale_inv"].float() - 127
        return converted[name].float() * torch.exp2(exponent).repeat_interleave(32, 1)
    if format == WeightFormat.FP8_CHANNEL and f"{module}.weight_scale" in converted:
        return converted[name].float() * converted[f"{module}.weight_scale"]
    if f"{module}.weight_scale_inv" in converted:  # one block: every size here is at most 128
        return converted[name].float() * converted[f"{module}.weight_scale_inv"]
    if f"{module}.weight_scale_2" in converted:
        packed = converted[name].numpy()
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        values = np.array([*E2M1, *(-value for value in E2M1)], np.float32)[codes]
        scale = converted[f"{module}.weight_scale"].float().repeat_interleave(16, 1)
        return torch.from_numpy(values) * scale * converted[f"{module}.weight_scale_2"]
    return tensors[name].float()


def test_fewer_bits_mean_larger_errors(tmp_path):
    tokens = segment(tokens_of(9, 140))
    (expected,) = logp(model_of(tmp_path / "exact", EXACT), tokens)
    errors = []
    for format, activation_format in (
        (WeightFormat.BF16, ActivationFormat.NONE),
        (WeightFormat.FP8_BLOCK, ActivationFormat.NONE),
        (WeightFormat.FP8_BLOCK, ActivationFormat.FP8),
        (WeightFormat.NVFP4, ActivationFormat.NONE),
        (WeightFormat.NVFP4, ActivationFormat.NVFP4),
    ):
        precision = Precision(activation_format=activation_format)
        model = model_of(tmp_path / format, precision, format=format)
        errors.append((logp(model, tokens)[0] - expected).abs().mean().item())
    assert errors == sorted(errors)
    (other,) = logp(model_of(tmp_path / "other", EXACT, tensors=random_tensors(seed=1)), tokens)
    assert 0 < errors[0] < errors[-1] < 0.5 * (other - expected).abs().mean()


def test_activation_formats_differ(tmp_path):
    tokens = tokens_of(10, 20)
    for format, activation_format in (
        (WeightFormat.FP8_BLOCK, ActivationFormat.FP8),
        (WeightFormat.NVFP4, ActivationFormat.NVFP4),
    ):
        plain, quantized = (
            logp(
                model_of(tmp_path / format, Precision(activation_format=kind), format=format),
                segment(tokens),
            )[0]
            for kind in (ActivationFormat.NONE, activation_format)
        )
        assert (plain - quantized).abs().mean() > 1e-3


def test_tied_embeddings(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    untied = random_tensors(CONFIG) | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    del tensors["lm_head.weight"]
    tokens = segment(tokens_of(11, 12))
    (tied,) = logp(model_of(tmp_path / "a", EXACT, config=config, tensors=tensors), tokens)
    (expected,) = logp(model_of(tmp_path / "b", EXACT, tensors=untied), tokens)
    assert torch.equal(tied, expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_refuses_what_it_does_not_compute(changes, named):
    with pytest.raises(BadInputError, match=named):
        ModelConfig.from_hf(CONFIG | changes)
    with pytest.raises(BadInputError, match="sliding_window"):
        ModelConfig.from_hf(MIXTRAL | {"sliding_window": 4096})
    with pytest.raises(BadInputError, match="hidden_size"):
        ModelConfig.from_hf({k: v for k, v in CONFIG.items() if k != "hidden_size"})
