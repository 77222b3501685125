"""Root-mean-square norms of the Qwen3 families. They differ in when they round.

Must not hold parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, around_one: bool = False) -> jax.Array:
    """Over the last dimension, in float32.

    The weight multiplies after the cast back to x's dtype (Qwen3), or `around_one` as 1 + weight
    before it (Qwen3.5).
    """
    normed, weight = _normed(x, eps), _broadcast(weight, x)
    if around_one:
        return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * weight


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * norm(x) * silu(gate), the gate in float32; of Gated DeltaNet's output."""
    normed = (_normed(x, eps).astype(x.dtype) * _broadcast(weight, x)).astype(jnp.float32)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def _normed(x: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


def _broadcast(weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape)
