"""Weights as samplers have them, seen by the forward pass; gradients go straight through.

Owns the rounding of master weights to BF16, and of experts to the values that NVFP4 and FP8 can
hold, for training that knows of it. The formats' bytes are weight_sync's; here only the values
matter, in float32 arithmetic that may differ from an encoder's in the last bit of a quotient.

Matrices lie [..., I, O]: blocks of a format run along the inputs I. Formats: NVFP4 has elements
E2M1, an E4M3 scale per 16 inputs and a float32 scale per matrix, which gate and up share (ModelOpt,
amax / (6 * 448)); FP8 has E4M3 and a float32 scale per block of 128 x 128 (amax / 448).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from trainer_jax.models.config import ComputeConfig
from trainer_jax.models.parameters import FLOAT32, Params

_EXPERTS = ("gate", "up", "down")
_NVFP4_BLOCK, _FP8_BLOCK = 16, 128
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(rounding, weights):
    return rounding(weights)


_straight_through.defvjp(
    lambda rounding, weights: (rounding(weights), None), lambda _, __, gradient: (gradient,)
)


def prepare(tree: Any, compute: ComputeConfig) -> Any:
    """Master weights as the forward pass uses them: rounded, then in the compute dtype."""
    if compute.round_weights:
        tree = _straight_through(_to_bf16, tree)
    return jax.tree.map(lambda weight: weight.astype(compute.dtype), tree)


def prepare_layer(layer: Params, compute: ComputeConfig) -> Params:
    """A layer's weights likewise; what is computed in float32 stays so."""
    exact = {leaf: weight for leaf, weight in layer.items() if leaf in FLOAT32}
    rest = {leaf: weight for leaf, weight in layer.items() if leaf not in FLOAT32}
    if compute.quantize_experts != "none" and "gate" in rest:
        experts = {leaf: rest[leaf].astype(jnp.float32) for leaf in _EXPERTS}
        rest |= _straight_through(_QUANTIZATIONS[compute.quantize_experts], experts)
    in_float32 = compute.model_copy(update={"dtype": "float32"})
    return prepare(rest, compute) | prepare(exact, in_float32)


def _to_bf16(tree: Any) -> Any:
    return jax.tree.map(lambda weight: weight.astype(jnp.bfloat16).astype(weight.dtype), tree)


def _nvfp4_experts(experts: Params) -> Params:
    experts = _to_bf16(experts)
    amax = {leaf: jnp.abs(x).max((-2, -1), keepdims=True) for leaf, x in experts.items()}
    amax["gate"] = amax["up"] = jnp.maximum(amax["gate"], amax["up"])
    return {leaf: nvfp4_values(x, amax[leaf]) for leaf, x in experts.items()}


def _fp8_experts(experts: Params) -> Params:
    return {leaf: fp8_block_values(x) for leaf, x in _to_bf16(experts).items()}


_QUANTIZATIONS = {"nvfp4": _nvfp4_experts, "fp8-block": _fp8_experts}


def nvfp4_values(x: jax.Array, amax: jax.Array) -> jax.Array:
    """What NVFP4 makes of float32 [..., I, O]; `amax` [..., 1, 1] of all that share the scale."""
    blocks = x.reshape(*x.shape[:-2], -1, _NVFP4_BLOCK, x.shape[-1])
    unit = (jnp.where(amax > 0, amax, 1.0) / (_E2M1_MAX * _E4M3_MAX))[..., None]
    block_amax = jnp.abs(blocks).max(-2, keepdims=True)
    scale = _to_e4m3(block_amax / _E2M1_MAX / unit)
    divisor = jnp.where(scale > 0, scale * unit, 1.0)
    values = _to_e2m1(blocks / divisor) * scale * unit
    return values.reshape(x.shape)


def fp8_block_values(x: jax.Array) -> jax.Array:
    """What FP8 in blocks makes of float32 [..., I, O]."""
    rows, columns = x.shape[-2:]
    pad = [(0, 0)] * (x.ndim - 2) + [(0, -rows % _FP8_BLOCK), (0, -columns % _FP8_BLOCK)]
    padded = jnp.pad(x, pad)
    blocks = padded.reshape(
        *x.shape[:-2], padded.shape[-2] // _FP8_BLOCK, _FP8_BLOCK, -1, _FP8_BLOCK
    )
    amax = jnp.abs(blocks).max((-3, -1), keepdims=True)
    scale = jnp.where(amax > 0, amax, 1.0) / _E4M3_MAX
    values = (_to_e4m3(blocks / scale) * scale).reshape(padded.shape)
    return values[..., :rows, :columns]


def _to_e4m3(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -_E4M3_MAX, _E4M3_MAX).astype(jnp.float8_e4m3fn).astype(jnp.float32)


def _to_e2m1(x: jax.Array) -> jax.Array:
    """To nearest, ties to even, saturating at 6."""
    size = jnp.minimum(jnp.abs(x), _E2M1_MAX)
    unit = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(size / unit) * unit
