"""Qwen3-MoE: the table of its parameters, the forward pass, and an NNX shell for users.

Owns the parameter tree (a plain nested dict; layers stacked on a leading axis, float32 masters)
and the maths from tokens to the final norm. Must not know about losses, batches or files; the
language-model head is a matrix handed out by `head_weight`, and `trainer_jax.head` owns its use.

Shape letters: B rows, T tokens of a row, S tokens attended to, D model, H query heads, J key-value
heads, R query heads per key-value head, A head dimension, E experts, X experts per token, F expert
ffn, V vocabulary, L layers, N tokens of all rows.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer_jax.models.attention import attend, rotary
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.experts import grouped_ffn, route

Params = dict[str, Any]

DEFAULT_COMPUTE = ComputeConfig()

# Every parameter once: its path and the logical axis of each dimension. Shapes follow from the
# config, shardings from `trainer_jax.mesh`, names in files from `trainer_jax.hf`.
PARAMETERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("embed",): ("vocab", "model"),
    ("layers", "attention_norm"): ("layer", "model"),
    ("layers", "q"): ("layer", "model", "heads"),
    ("layers", "k"): ("layer", "model", "kv_heads"),
    ("layers", "v"): ("layer", "model", "kv_heads"),
    ("layers", "o"): ("layer", "heads", "model"),
    ("layers", "q_norm"): ("layer", "head_dim"),
    ("layers", "k_norm"): ("layer", "head_dim"),
    ("layers", "ffn_norm"): ("layer", "model"),
    ("layers", "router"): ("layer", "model", "router"),
    ("layers", "gate"): ("layer", "expert", "model", "ffn"),
    ("layers", "up"): ("layer", "expert", "model", "ffn"),
    ("layers", "down"): ("layer", "expert", "ffn", "model"),
    ("norm",): ("model",),
    ("head",): ("vocab", "model"),  # absent when tied to embed
}


def parameter_shapes(config: ModelConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path -> shape of every parameter this config has."""
    sizes = {
        "vocab": config.vocab_size,
        "model": config.hidden_size,
        "layer": config.num_hidden_layers,
        "heads": config.num_attention_heads * config.head_dim,
        "kv_heads": config.num_key_value_heads * config.head_dim,
        "head_dim": config.head_dim,
        "router": config.num_experts,
        "expert": config.num_experts,
        "ffn": config.moe_intermediate_size,
    }
    return {
        path: tuple(sizes[axis] for axis in axes)
        for path, axes in PARAMETERS.items()
        if not (path == ("head",) and config.tie_word_embeddings)
    }


def nest(flat: dict[tuple[str, ...], Any]) -> Params:
    """{("layers", "q"): x} -> {"layers": {"q": x}}."""
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def count_parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Float32 parameters: norms 1, matrices normal with deviation `initializer_range`."""
    shapes = parameter_shapes(config)
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return nest(
        {
            path: jnp.ones(shape, jnp.float32)
            if path[-1].endswith("norm")
            else config.initializer_range * jax.random.normal(keys[path], shape, jnp.float32)
            for path, shape in shapes.items()
        }
    )


@jax.custom_vjp
def _published(weight: jax.Array) -> jax.Array:
    """The weight as samplers receive it: rounded to BF16. The gradient goes straight through."""
    return weight.astype(jnp.bfloat16).astype(weight.dtype)


_published.defvjp(lambda weight: (_published(weight), None), lambda _, gradient: (gradient,))


def _prepare(tree: Any, compute: ComputeConfig) -> Any:
    """Master weights as the forward pass uses them: rounded, then in the compute dtype."""
    if compute.round_weights:
        tree = jax.tree.map(_published, tree)
    return jax.tree.map(lambda weight: weight.astype(compute.dtype), tree)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Over the last dimension, in float32; the weight multiplies after the cast back, as in HF."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    shape = (1,) * (x.ndim - 1) + weight.shape
    return (x32 * scale).astype(x.dtype) * weight.reshape(shape)


def _attention(layer, config: ModelConfig, x_BxTxD, rope, segments_BxT):
    B, T, _ = x_BxTxD.shape
    J, A = config.num_key_value_heads, config.head_dim
    eps = config.rms_norm_eps
    q = (x_BxTxD @ layer["q"]).reshape(B, T, -1, A)
    k = (x_BxTxD @ layer["k"]).reshape(B, T, J, A)
    v = (x_BxTxD @ layer["v"]).reshape(B, T, J, A)
    q = rotary(rms_norm(q, layer["q_norm"], eps), *rope)
    k = rotary(rms_norm(k, layer["k_norm"], eps), *rope)
    return attend(q, k, v, segments_BxT).reshape(B, T, -1) @ layer["o"]


def _experts(layer, config: ModelConfig, x_BxTxD, segments_BxT, compute: ComputeConfig):
    B, T, D = x_BxTxD.shape
    x_NxD = x_BxTxD.reshape(B * T, D)
    weights_NxX, experts_NxX = route(
        x_NxD, layer["router"], config.num_experts_per_tok, normalize=config.norm_topk_prob
    )
    is_token_N = segments_BxT.reshape(B * T) > 0
    experts_NxX = jnp.where(is_token_N[:, None], experts_NxX, config.num_experts)  # else nobody's
    y_NxD = grouped_ffn(
        x_NxD, weights_NxX, experts_NxX, layer["gate"], layer["up"], layer["down"], impl=compute.ffn
    )
    return y_NxD.reshape(B, T, D)


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segments_BxT: jax.Array,
    *,
    compute: ComputeConfig = DEFAULT_COMPUTE,
) -> jax.Array:
    """Tokens to hidden states after the final norm, [B, T, D] in the compute dtype.

    A token attends to itself and to earlier tokens of its row with its segment id. Segment 0 is
    padding; what comes out there is finite and means nothing. `positions_BxT` are rotary positions,
    which restart with every segment.
    """
    rope = _rope(config, positions_BxT)
    layers = params["layers"]

    def block(x_BxTxD, layer):
        layer = _prepare(layer, compute)
        normed = rms_norm(x_BxTxD, layer["attention_norm"], config.rms_norm_eps)
        x_BxTxD = x_BxTxD + _attention(layer, config, normed, rope, segments_BxT)
        normed = rms_norm(x_BxTxD, layer["ffn_norm"], config.rms_norm_eps)
        return x_BxTxD + _experts(layer, config, normed, segments_BxT, compute), None

    if compute.remat:
        block = jax.checkpoint(block)
    x_BxTxD = _prepare(params["embed"], compute)[tokens_BxT]
    x_BxTxD, _ = jax.lax.scan(block, x_BxTxD, layers)
    return rms_norm(x_BxTxD, _prepare(params["norm"], compute), config.rms_norm_eps)


def _rope(config: ModelConfig, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, [B, T, 1, A/2] float32."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions_BxT[:, :, None, None].astype(jnp.float32) / jnp.power(
        jnp.float32(config.rope_theta), exponent
    ).reshape(1, 1, 1, -1)
    return jnp.cos(angles), jnp.sin(angles)


def head_weight(params: Params, *, compute: ComputeConfig = DEFAULT_COMPUTE) -> jax.Array:
    """The language-model head [V, D] in the compute dtype: `embed` when they are tied."""
    return _prepare(params["head"] if "head" in params else params["embed"], compute)


class Qwen3Moe(nnx.Module):
    """The same model as an NNX module, for notebooks; training uses the pure functions above."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.params = nnx.data(jax.tree.map(nnx.Param, init_params(config, rngs.params())))

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits [B, T, V] of whole rows."""
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))["params"]
        B, T = tokens_BxT.shape
        positions_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
        segments_BxT = jnp.ones((B, T), jnp.int32)
        hidden = hidden_states(params, self.config, tokens_BxT, positions_BxT, segments_BxT)
        return jnp.einsum("btd,vd->btv", hidden, head_weight(params))
