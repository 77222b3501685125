"""Routing and the experts' feed-forward network, dropless.

Owns the seam `grouped_ffn` and its implementations. Must not hold parameters. Shape letters as in
`qwen3_moe`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def route(x_NxD, router_DxE, num_experts_per_tok: int, *, normalize: bool):
    """Weights [N, X] float32 and expert ids [N, X] int32: softmax over all experts, then top-k."""
    logits_NxE = jnp.matmul(x_NxD, router_DxE, preferred_element_type=jnp.float32)
    weights_NxX, experts_NxX = jax.lax.top_k(
        jax.nn.softmax(logits_NxE, axis=-1), num_experts_per_tok
    )
    if normalize:
        weights_NxX = weights_NxX / weights_NxX.sum(axis=-1, keepdims=True)
    return weights_NxX, experts_NxX


def grouped_ffn(x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD, *, impl="auto"):
    """Sum over a token's experts of weight * (silu(x gate) * (x up)) down, [N, D]."""
    N, E = x_NxD.shape[0], gate_ExDxF.shape[0]
    scale_NxE = jnp.zeros((N, E), jnp.float32).at[jnp.arange(N)[:, None], experts_NxX].set(weights_NxX)
    h = jax.nn.silu(jnp.einsum("nd,edf->enf", x_NxD, gate_ExDxF)) * jnp.einsum(
        "nd,edf->enf", x_NxD, up_ExDxF
    )
    h = h * scale_NxE.T[:, :, None].astype(h.dtype)
    return jnp.einsum("enf,efd->nd", h, down_ExFxD)
