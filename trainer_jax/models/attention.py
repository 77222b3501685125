"""Causal attention over packed rows, and rotary embeddings.

Owns the mask (same segment, not later) and how the work is cut so that no [T, T] array is needed
for long rows. Must not hold parameters. Shape letters as in `qwen3_moe`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row of padding softmaxes to something harmless instead of NaN


def rotary(x_BxTxHxA: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (j, j + A/2); cos and sin are [B, T, 1, A/2] float32."""
    first, second = jnp.split(x_BxTxHxA.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxTxHxA.dtype)


def attend(q_BxTxHxA, k_BxTxJxA, v_BxTxJxA, segments_BxT) -> jax.Array:
    """softmax(q k / sqrt(A)) v over earlier tokens of the same segment, [B, T, H, A]."""
    B, T, H, A = q_BxTxHxA.shape
    J = k_BxTxJxA.shape[2]
    q = q_BxTxHxA.reshape(B, T, J, H // J, A)
    scores = jnp.einsum("btjra,bsja->bjrts", q, k_BxTxJxA, preferred_element_type=jnp.float32)
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    allowed = (segments_BxT[:, :, None] == segments_BxT[:, None, :]) & causal[None]
    scores = jnp.where(allowed[:, None, None], scores * A**-0.5, _MASKED)
    p = jax.nn.softmax(scores, axis=-1).astype(v_BxTxJxA.dtype)
    return jnp.einsum("bjrts,bsja->btjra", p, v_BxTxJxA).reshape(B, T, H, A)
