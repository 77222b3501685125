"""The parameters of a policy: the table of all of them, shapes, and random values to start from.

Owns the tree, a plain nested dict of float32 masters. Layers of one kind are stacked on a leading
axis: attention layers under "layers", Gated DeltaNet layers under "delta_layers". Must not know
formulas, nor names in files.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from trainer_jax.models.config import ATTENTION, DELTANET, ModelConfig

Params = dict[str, Any]
Path = tuple[str, ...]

STACKS = {ATTENTION: "layers", DELTANET: "delta_layers"}  # kind of a layer -> where it lies

_FFN = {
    "ffn_norm": ("layer", "model"),
    "router": ("layer", "model", "router"),
    "gate": ("layer", "expert", "model", "ffn"),
    "up": ("layer", "expert", "model", "ffn"),
    "down": ("layer", "expert", "ffn", "model"),
    # a feed-forward network that sees every token: a dense model's only one, or the shared expert
    "mlp_gate": ("layer", "model", "mlp"),
    "mlp_up": ("layer", "model", "mlp"),
    "mlp_down": ("layer", "mlp", "model"),
    "mlp_router": ("layer", "model"),  # the shared expert's weight, one logit
}
_ATTENTION = {
    "attention_norm": ("layer", "model"),
    "q": ("layer", "model", "heads"),  # with an output gate, each head is followed by its gate
    "k": ("layer", "model", "kv_heads"),
    "v": ("layer", "model", "kv_heads"),
    "o": ("layer", "head_outputs", "model"),
    "q_norm": ("layer", "head_dim"),
    "k_norm": ("layer", "head_dim"),
}
_DELTANET = {
    "delta_norm": ("layer", "model"),
    "qkv": ("layer", "model", "delta_channels"),  # all q, all k, all v
    "z": ("layer", "model", "delta_outputs"),
    "b": ("layer", "model", "delta_heads"),
    "a": ("layer", "model", "delta_heads"),
    "conv": ("layer", "tap", "delta_channels"),  # the last tap is the token's own
    "a_log": ("layer", "delta_heads"),
    "dt_bias": ("layer", "delta_heads"),
    "out_norm": ("layer", "delta_head_dim"),
    "out": ("layer", "delta_outputs", "model"),
}

# Every parameter once: its path and the logical axis of each dimension. Which of them a model has,
# and their shapes, follow from its config; shardings from `trainer_jax.mesh`; names in files from
# `trainer_jax.tensor_map`.
PARAMETERS: dict[Path, tuple[str, ...]] = {
    ("embed",): ("vocab", "model"),
    **{("layers", leaf): axes for leaf, axes in {**_ATTENTION, **_FFN}.items()},
    **{("delta_layers", leaf): axes for leaf, axes in {**_DELTANET, **_FFN}.items()},
    ("norm",): ("model",),
    ("head",): ("vocab", "model"),  # absent when tied to embed
}
FLOAT32 = ("a_log", "dt_bias")  # computed in float32 whatever the compute dtype
_VECTORS = (*FLOAT32, "norm")  # endings of what weight decay would only distort


def parameter_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
    """Path -> shape of every parameter this config has."""
    outputs = config.num_attention_heads * config.head_dim
    key_width = config.linear_num_key_heads * config.linear_key_head_dim
    value_width = config.linear_num_value_heads * config.linear_value_head_dim
    sizes = {
        "vocab": config.vocab_size,
        "model": config.hidden_size,
        "heads": outputs * (2 if config.gated_attention else 1),
        "head_outputs": outputs,
        "kv_heads": config.num_key_value_heads * config.head_dim,
        "head_dim": config.head_dim,
        "router": config.num_experts,
        "expert": config.num_experts,
        "ffn": config.moe_intermediate_size,
        "mlp": config.mlp_size,
        "delta_channels": 2 * key_width + value_width,
        "delta_outputs": value_width,
        "delta_heads": config.linear_num_value_heads,
        "delta_head_dim": config.linear_value_head_dim,
        "tap": config.linear_conv_kernel_dim,
    }
    num_layers = {stack: config.kinds.count(kind) for kind, stack in STACKS.items()}
    shapes = {
        path: tuple(num_layers[path[0]] if axis == "layer" else sizes[axis] for axis in axes)
        for path, axes in PARAMETERS.items()
    }
    absent = {("head",)} if config.tie_word_embeddings else set()
    if not (config.num_experts and config.mlp_size):
        absent |= {(stack, "mlp_router") for stack in STACKS.values()}
    if not config.norms_queries:
        absent |= {("layers", "q_norm"), ("layers", "k_norm")}
    return {path: shape for path, shape in shapes.items() if path not in absent and all(shape)}


def nest(flat: dict[Path, Any]) -> Params:
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
    """Float32 parameters: norms that do nothing, decays as the authors of Gated DeltaNet start
    them, matrices normal with deviation `initializer_range`.
    """
    shapes = parameter_shapes(config)
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))

    def start(path: Path, shape: tuple[int, ...]) -> jax.Array:
        leaf = path[-1]
        if leaf.endswith("norm"):
            is_zero = config.norms_around_one and leaf != "out_norm"
            return jnp.full(shape, 0.0 if is_zero else 1.0, jnp.float32)
        if leaf == "dt_bias":
            return jnp.ones(shape, jnp.float32)
        if leaf == "a_log":
            return jnp.log(jax.random.uniform(keys[path], shape, jnp.float32, 0.01, 16.0))
        return config.initializer_range * jax.random.normal(keys[path], shape, jnp.float32)

    return nest({path: start(path, shape) for path, shape in shapes.items()})


def decays(params: Any) -> Any:
    """A tree like `params`: True where weight decay applies, which is for matrices alone.

    A norm's neutral weight is 1 in one family and 0 in another, and the decays of Gated DeltaNet
    are rates: pulled to zero, either would change what the model does.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not str(path[-1].key).endswith(_VECTORS), params
    )
