"""The model against transformers' Qwen3-MoE, and what must not depend on how rows are laid out."""

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

from trainer_jax.hf import load_checkpoint, save_checkpoint
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.qwen3_moe import (
    Params,
    Qwen3Moe,
    head_weight,
    hidden_states,
    init_params,
)

BASE = ModelConfig(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=24, initializer_range=0.15,
)  # fmt: skip
PLAIN = ComputeConfig()
# seed -> config, tokens of a row (129 is one more than a chunk of attention)
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
}  # fmt: skip


def random_params(config: ModelConfig, seed: int) -> Params:
    """As initialized, but with norms that are not 1."""
    params = init_params(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def shake(path, leaf):
        if not path[-1].key.endswith("norm"):
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
    logits_BxTxV = jnp.einsum("btd,vd->btv", hidden_BxTxD, head_weight(params, compute=compute))
    return jax.nn.log_softmax(logits_BxTxV, axis=-1)


@pytest.mark.parametrize("seed", CASES)
def test_log_probs_and_gradients_equal_transformers(seed, tmp_path):
    config, num_tokens = CASES[seed]
    params = random_params(config, seed)
    tokens_BxT = random_tokens(config, seed, 2, num_tokens)
    # a random weight for every log-prob: no direction of the gradient goes unseen
    weight_BxTxV = np.random.default_rng(seed).normal(size=(*tokens_BxT.shape, config.vocab_size))
    weight_BxTxV = weight_BxTxV.astype(np.float32) / tokens_BxT.size

    def objective(params):
        logp_BxTxV = logp_of(params, config, tokens_BxT)
        return (logp_BxTxV * weight_BxTxV).sum(), logp_BxTxV

    (_, logp_BxTxV), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)

    save_checkpoint(tmp_path / "model", config, params, dtype="float32")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    assert isinstance(peer, transformers.Qwen3MoeForCausalLM)
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
        want = peer_grad.numpy()
        assert np.abs(want).max() > 0, name
        np.testing.assert_allclose(
            named[name], want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=name
        )


def test_packed_rows_equal_separate_rows():
    params = random_params(BASE, 3)
    lengths = (60, 131, 7)
    rows = [random_tokens(BASE, length, length) for length in lengths]
    padding = 22
    packed = {
        "tokens_BxT": np.concatenate([*rows, np.zeros(padding, np.int32)]),
        "positions_BxT": np.concatenate([*map(np.arange, lengths), np.zeros(padding, int)]),
        "segments_BxT": np.repeat([1, 2, 3, 0], [*lengths, padding]),
    }
    packed = {name: value.astype(np.int32)[None] for name, value in packed.items()}
    logp_TxV = np.asarray(logp_of(params, BASE, **packed))[0]
    assert np.isfinite(logp_TxV).all()
    start = 0
    for row in rows:
        want_TxV = logp_of(params, BASE, row[None])[0]
        np.testing.assert_allclose(logp_TxV[start : start + len(row)], want_TxV, atol=1e-5, rtol=0)
        start += len(row)


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
    module = Qwen3Moe(BASE, rngs=nnx.Rngs(3))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))["params"]
    tokens_BxT = random_tokens(BASE, 3, 2, 11)
    logp = jax.nn.log_softmax(module(jnp.asarray(tokens_BxT)), axis=-1)
    np.testing.assert_allclose(logp, logp_of(params, BASE, tokens_BxT), atol=1e-6)
    assert jax.tree.structure(params) == jax.tree.structure(random_params(BASE, 0))
