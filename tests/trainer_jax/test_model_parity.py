"""The decoder against transformers' models, and what must not depend on how rows are laid out."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from flax import nnx

from contracts.types import WeightFormat
from sampler_fleet.engines.checkpoint import Checkpoint
from sampler_fleet.engines.model import MixtureModel, Segment, StepBatch
from sampler_fleet.engines.precision import Precision
from tests.sampler_fleet.engines.engine_checkpoints import manifest_of
from trainer_jax.hf import load_checkpoint, save_checkpoint
from trainer_jax.models.config import ATTENTION, DELTANET, ComputeConfig, ModelConfig
from trainer_jax.models.decoder import Decoder, head_weight, hidden_states, through_layers
from trainer_jax.models.parameters import Params, decays, init_params

BASE = ModelConfig(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=24, initializer_range=0.15,
)  # fmt: skip
DENSE = ModelConfig(
    model_type="qwen3", vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=48, initializer_range=0.15,
)  # fmt: skip
# wider matrices make log-probs move by more than 1e-5 when an embedding moves by one ulp
HYBRID = replace(
    BASE, model_type="qwen3_5_moe", head_dim=16, partial_rotary_factor=0.25,
    num_hidden_layers=4, layer_types=(DELTANET, ATTENTION) * 2,
    shared_expert_intermediate_size=20, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
    initializer_range=0.05,
)  # fmt: skip
LLAMA = replace(DENSE, model_type="llama", rms_norm_eps=1e-5, head_dim=8, rope_theta=1e5)
MIXTRAL = replace(BASE, model_type="mixtral", rms_norm_eps=1e-5, num_experts_per_tok=1)
PLAIN = ComputeConfig()
PEERS = {
    "qwen3": transformers.Qwen3ForCausalLM,
    "qwen3_moe": transformers.Qwen3MoeForCausalLM,
    "qwen3_5_moe": transformers.Qwen3_5MoeForCausalLM,
    "llama": transformers.LlamaForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
}
# seed -> config, tokens of a row: one more than a chunk of attention, no multiples of DeltaNet's
CASES = {
    0: (BASE, 37),
    1: (replace(BASE, tie_word_embeddings=True, norm_topk_prob=False, num_key_value_heads=1), 129),
    2: (
        replace(
            BASE, num_attention_heads=6, head_dim=10, num_experts=7, num_experts_per_tok=3,
            norm_topk_prob=False, rope_theta=1e4, rms_norm_eps=1e-5, num_hidden_layers=3,
        ),
        50,
    ),
    3: (DENSE, 70),
    4: (replace(DENSE, tie_word_embeddings=True, rope_theta=1e4, num_key_value_heads=4), 33),
    5: (HYBRID, 150),
    6: (  # a run of DeltaNet layers; one key head for every value head; rematerialized
        replace(
            HYBRID, num_hidden_layers=3, layer_types=(DELTANET, DELTANET, ATTENTION),
            linear_num_key_heads=3, linear_num_value_heads=3, linear_conv_kernel_dim=3,
            tie_word_embeddings=True, num_key_value_heads=1, partial_rotary_factor=0.5,
        ),
        77,
    ),
    7: (LLAMA, 129),
    8: (replace(LLAMA, tie_word_embeddings=True, num_key_value_heads=1, head_dim=12), 40),
    9: (replace(MIXTRAL, num_experts_per_tok=2), 131),
    10: (replace(MIXTRAL, tie_word_embeddings=True, num_experts=3, num_experts_per_tok=3), 37),
}  # fmt: skip


def random_params(config: ModelConfig, seed: int) -> Params:
    """As initialized, but nothing that one start value is neutral for."""
    params = init_params(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def shake(path, leaf):
        if path[-1].key == "a_log":
            # strong decays are in test_deltanet: with them the gradients of transformers are
            # wrong by 1e-2 of float64's, because it subtracts long sums of their logarithms
            return jnp.asarray(rng.uniform(-3, 0, leaf.shape), jnp.float32)
        if not path[-1].key.endswith(("norm", "dt_bias")):
            return leaf
        return leaf + jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(shake, params)


def random_tokens(config: ModelConfig, seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, np.int32)


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def logp_of(params, config, tokens_BxT, positions_BxT=None, segments_BxT=None, compute=PLAIN):
    """Log-probs over the vocabulary after every token, [B, T, V]."""
    B, T = tokens_BxT.shape
    if positions_BxT is None:
        positions_BxT = jnp.tile(jnp.arange(T, dtype=jnp.int32), (B, 1))
    if segments_BxT is None:
        segments_BxT = jnp.ones((B, T), jnp.int32)
    hidden_BxTxD = hidden_states(
        params, config, tokens_BxT, positions_BxT, segments_BxT, compute=compute
    )
    head_VxD = head_weight(params, compute=compute)
    logits_BxTxV = jnp.einsum(
        "btd,vd->btv", hidden_BxTxD, head_VxD, preferred_element_type=jnp.float32
    )
    return jax.nn.log_softmax(logits_BxTxV, axis=-1)


@pytest.mark.parametrize("seed", CASES)
def test_log_probs_and_gradients_equal_transformers(seed, tmp_path):
    config, num_tokens = CASES[seed]
    params = random_params(config, seed)
    tokens_BxT = random_tokens(config, seed, 2, num_tokens)
    # a random weight for every log-prob: no direction of the gradient goes unseen
    weight_BxTxV = np.random.default_rng(seed).normal(size=(*tokens_BxT.shape, config.vocab_size))
    weight_BxTxV = weight_BxTxV.astype(np.float32) / tokens_BxT.size

    compute = ComputeConfig(remat=seed == 6)

    def objective(params):
        logp_BxTxV = logp_of(params, config, tokens_BxT, compute=compute)
        return (logp_BxTxV * weight_BxTxV).sum(), logp_BxTxV

    (_, logp_BxTxV), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)

    save_checkpoint(tmp_path / "model", config, params, dtype="float32")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    assert type(peer) is PEERS[config.model_type]
    peer_logits = peer(torch.from_numpy(tokens_BxT).long(), use_cache=False).logits
    peer_logp_BxTxV = peer_logits.log_softmax(dim=-1)
    (peer_logp_BxTxV * torch.from_numpy(weight_BxTxV)).sum().backward()

    np.testing.assert_allclose(logp_BxTxV, peer_logp_BxTxV.detach().numpy(), atol=1e-5, rtol=0)
    # the map of the checkpoint gives gradients their names; transformers names tensors as "fused"
    save_checkpoint(tmp_path / "grads", config, grads, layout="fused", dtype="float32")
    named = safetensors.numpy.load_file(tmp_path / "grads" / "model.safetensors")
    peer_grads = {name: parameter.grad for name, parameter in peer.named_parameters()}
    assert set(named) == set(peer_grads)
    for name, peer_grad in peer_grads.items():
        assert peer_grad is not None, name
        want = peer_grad.numpy()
        assert np.abs(want).max() > 0, name
        np.testing.assert_allclose(
            named[name], want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=name
        )


@pytest.mark.parametrize("config", [BASE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_the_embedded_engine_says_the_same(config, tmp_path):
    config = replace(config, num_experts_per_tok=2)
    params = random_params(config, 7)
    save_checkpoint(tmp_path, config, params, dtype="float32")
    manifest = manifest_of(tmp_path, format=WeightFormat.BF16, version=1)
    model = MixtureModel(Checkpoint.read(tmp_path, manifest), Precision(exact=True))
    tokens_T = random_tokens(config, 7, 40)
    batch = StepBatch.of([Segment(slot=0, start=0, tokens=tokens_T)])
    with torch.inference_mode():
        hidden = model.hidden_states(batch, model.new_cache(num_slots=1, max_context=40))
        got_TxV = model.logits(hidden).log_softmax(-1).numpy()
    want_TxV = logp_of(params, config, tokens_T[None])[0]
    np.testing.assert_allclose(got_TxV, want_TxV, atol=1e-5, rtol=0)


# lengths of the segments of a packed row; those of DeltaNet end inside chunks, some of them
# shorter than its convolution, one longer than two chunks
PACKED = {"qwen3_moe": (BASE, (60, 131, 7)), "qwen3_5_moe": (HYBRID, (40, 1, 2, 3, 18, 150, 30))}


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_equal_separate_rows(family):
    config, lengths = PACKED[family]
    params = random_params(config, 3)
    rows = [random_tokens(config, length, length) for length in lengths]
    padding = 22
    packed = {
        "tokens_BxT": np.concatenate([*rows, np.zeros(padding, np.int32)]),
        "positions_BxT": np.concatenate([*map(np.arange, lengths), np.zeros(padding, int)]),
        "segments_BxT": np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding]),
    }
    packed = {name: value.astype(np.int32)[None] for name, value in packed.items()}
    logp_TxV = np.asarray(logp_of(params, config, **packed))[0]
    assert np.isfinite(logp_TxV).all()
    # one compiled shape for all: what fills a row behind a segment can't reach it
    longest, start = max(lengths), 0
    for row in rows:
        tokens_T = np.concatenate([row, np.zeros(longest - len(row), np.int32)])
        want_TxV = logp_of(params, config, tokens_T[None])[0]
        got_TxV = logp_TxV[start : start + len(row)]
        np.testing.assert_allclose(got_TxV, want_TxV[: len(row)], atol=1e-5, rtol=0)
        start += len(row)


@pytest.mark.parametrize("config", [DENSE, HYBRID], ids=["qwen3", "qwen3_5_moe"])
def test_bfloat16_stays_in_its_band(config, tmp_path):
    """Differences from float32, with the same rounded weights: as transformers', or smaller."""
    save_checkpoint(tmp_path / "model", config, random_params(config, 8))
    _, params = load_checkpoint(tmp_path / "model")
    tokens_BxT = random_tokens(config, 8, 2, 70)
    exact = np.asarray(logp_of(params, config, tokens_BxT))
    ours = logp_of(params, config, tokens_BxT, compute=ComputeConfig(dtype="bfloat16"))
    peer = PEERS[config.model_type].from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    with torch.no_grad():
        peer_logits = peer(torch.from_numpy(tokens_BxT).long(), use_cache=False).logits
    error = np.abs(np.asarray(ours) - exact)
    peer_error = np.abs(peer_logits.float().log_softmax(dim=-1).numpy() - exact)
    assert 1e-3 < error.mean() < 0.01 and error.max() < 0.15
    assert error.mean() < 1.2 * peer_error.mean()


@pytest.mark.parametrize(
    "pattern", ["a", "aaaa", "d", "ddda" * 3, "dddaddda" + "dd", "adda", "dad"]
)
def test_any_pattern_of_layers_is_gone_through_in_order(pattern):
    """Each layer does something to x that no other order of layers would do."""
    stacks = [{"a": "layers", "d": "delta_layers"}[letter] for letter in pattern]
    numbers = np.arange(1.0, len(stacks) + 1)
    params = {
        stack: {"w": jnp.asarray([n for n, s in zip(numbers, stacks, strict=True) if s == stack])}
        for stack in dict.fromkeys(stacks)
    }

    def block(stack, x, layer):
        return (x * 3 + layer["w"]) % 997 + (1.0 if stack == "layers" else 0.0)

    want = jnp.zeros(())
    for number, stack in zip(numbers, stacks, strict=True):
        want = block(stack, want, {"w": jnp.asarray(number, jnp.float32)})
    assert through_layers(block, stacks, jnp.zeros(()), params) == want


def test_weight_decay_is_for_matrices():
    decay = decays(init_params(HYBRID, jax.random.key(0)))
    kept = {
        "norm", "attention_norm", "delta_norm", "ffn_norm", "q_norm", "k_norm", "out_norm",
        "a_log", "dt_bias",
    }  # fmt: skip
    found = {
        path[-1].key
        for path, is_decayed in jax.tree_util.tree_leaves_with_path(decay)
        if not is_decayed
    }
    assert found == kept
    assert all(jax.tree.leaves(decay["delta_layers"]["qkv"]))


@pytest.mark.parametrize("ffn", ["blocks", "dense"])
def test_a_later_token_changes_nothing_before_it(ffn):
    params = random_params(BASE, 4)
    tokens_BxT = random_tokens(BASE, 4, 1, 140)
    run = functools.partial(logp_of, params, BASE, compute=ComputeConfig(ffn=ffn))
    before = np.asarray(run(tokens_BxT))[0]
    for changed in (1, 77, 139):
        other = tokens_BxT.copy()
        other[0, changed] = (other[0, changed] + 1) % BASE.vocab_size
        after = np.asarray(run(other))[0]
        np.testing.assert_allclose(after[:changed], before[:changed], atol=1e-6, rtol=0)
        assert np.abs(after[changed:] - before[changed:]).max(axis=-1).min() > 1e-5


def test_the_order_of_experts_does_not_matter():
    params = random_params(BASE, 5)
    tokens_BxT = random_tokens(BASE, 5, 2, 40)
    order = np.array([2, 0, 3, 1])
    layers = params["layers"]
    router = {"router": layers["router"][..., order]}
    experts = {name: layers[name][:, order] for name in ("gate", "up", "down")}

    def run(layers):
        return logp_of({**params, "layers": layers}, BASE, tokens_BxT)

    want = run(layers)
    np.testing.assert_allclose(run(layers | router | experts), want, atol=1e-5, rtol=0)
    assert np.abs(run(layers | router) - want).max() > 1e-2


def test_rounded_weights_are_those_of_the_published_checkpoint(tmp_path):
    params = random_params(BASE, 6)
    tokens_BxT = random_tokens(BASE, 6, 1, 30)
    save_checkpoint(tmp_path / "published", BASE, params)
    _, published = load_checkpoint(tmp_path / "published")
    rounded = logp_of(params, BASE, tokens_BxT, compute=ComputeConfig(round_weights=True))
    want = logp_of(jax.tree.map(jnp.asarray, published), BASE, tokens_BxT)
    np.testing.assert_allclose(rounded, want, atol=1e-6, rtol=0)
    assert np.abs(rounded - logp_of(params, BASE, tokens_BxT)).max() > 1e-4


def test_the_nnx_module_computes_what_the_functions_do():
    module = Decoder(BASE, rngs=nnx.Rngs(3))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))["params"]
    tokens_BxT = random_tokens(BASE, 3, 2, 11)
    logp = jax.nn.log_softmax(module(jnp.asarray(tokens_BxT)), axis=-1)
    np.testing.assert_allclose(logp, logp_of(params, BASE, tokens_BxT), atol=1e-6)
    assert jax.tree.structure(params) == jax.tree.structure(random_params(BASE, 0))
