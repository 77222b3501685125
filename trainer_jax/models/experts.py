"""Routing and the experts' feed-forward network, dropless.

Owns the seam `grouped_ffn` and its implementations. Must not hold parameters. Shape letters as in
`decoder`; M = N * X assignments of a token to an expert, K tokens of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer_jax.models.kernels import grouped_dot

LEAST_TOTAL = 1e-18  # the gradient has its square
BLOCK = 64  # tokens; fastest of 32..256 on CPU at N = 4096, F = 64..128


def route(
    x: jax.Array,
    router_DxE: jax.Array,
    num_experts_per_tok: int,
    *,
    normalize: bool,
    routed_experts: jax.Array | None = None,
):
    """Of tokens [..., D]: weights [..., X] float32 and expert ids [..., X] int32, by a softmax over
    all experts, then top-k.

    `routed_experts` [..., X], in any order and different ones, are chosen in place of the top-k;
    their weights are this router's all the same. Where the first is -1 the choice is the router's.
    """
    logits = jnp.matmul(x, router_DxE, preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(logits, axis=-1)
    if routed_experts is not None:
        is_routed = jax.nn.one_hot(routed_experts, probs.shape[-1], dtype=bool).any(axis=-2)
        probs = jnp.where(is_routed | (routed_experts[..., :1] < 0), probs, -1.0)
    weights, experts = jax.lax.top_k(probs, num_experts_per_tok)
    if normalize:
        total = weights.sum(axis=-1, keepdims=True)
        if routed_experts is not None:  # to this router they may be next to impossible
            total = jnp.maximum(total, LEAST_TOTAL)
        weights = weights / total
    return weights, experts


def grouped_ffn(x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD, *, impl="auto"):
    """Sum over a token's experts of weight * (silu(x gate) * (x up)) down, [N, D].

    An expert id of E or more is nobody's: its assignment contributes nothing and costs nothing
    (padding, or experts of another device). No assignment is ever dropped otherwise.

    `impl`: "blocks" sorts assignments by expert and computes each expert's own tokens, cut into
    blocks; "dense" computes every expert for every token, plain matrix products that any compiler
    partitions well; "auto" is the one of these two with fewer rows to multiply (`_fewer_rows`);
    "tokamax" sorts as well, and multiplies with a GPU's or TPU's kernels (`kernels`).

    The choice looks at shapes alone, never at the mesh. With experts split over a mesh axis both
    are exact, but GSPMD cannot tell where a block's expert lies and gathers the matrices for
    "blocks"; ask for "dense" where they do not fit.

    Raises:
        BadInputError: of `grouped_dot`.
    """
    if impl == "auto":
        N, X = experts_NxX.shape
        impl = _fewer_rows(N, X, len(gate_ExDxF))
    if impl == "tokamax":
        ffn = functools.partial(sorted_ffn, ragged_dot=grouped_dot())
    else:
        ffn = {"blocks": _blocks, "dense": _dense}[impl]
    return ffn(x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD)


def _fewer_rows(N: int, X: int, E: int) -> str:
    """A block computes its empty slots too: half a block per expert, when sizes are random.

    Forward and backward on one CPU core at D = F = 128, E = 8, X = 2: dense 168 ms and blocks
    29 ms for N = 4096, 2.5 and 1.4 for 128, 0.7 and 1.3 for 32; the rule's border is N = 43.
    """
    return "blocks" if N * X + E * BLOCK // 2 < N * E else "dense"


def _dense(x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD):
    E, D, F = gate_ExDxF.shape
    scale_NxE = (
        jax.nn.one_hot(experts_NxX, E, dtype=weights_NxX.dtype) * weights_NxX[..., None]
    ).sum(axis=1)
    gate_NxEF = x_NxD @ gate_ExDxF.swapaxes(0, 1).reshape(D, E * F)
    up_NxEF = x_NxD @ up_ExDxF.swapaxes(0, 1).reshape(D, E * F)
    hidden = (jax.nn.silu(gate_NxEF) * up_NxEF).reshape(-1, E, F)
    hidden = hidden * scale_NxE[:, :, None].astype(hidden.dtype)
    return hidden.reshape(-1, E * F) @ down_ExFxD.reshape(E * F, D)


def sorted_ffn(
    x_NxD,
    weights_NxX,
    experts_NxX,
    gate_ExDxF,
    up_ExDxF,
    down_ExFxD,
    *,
    ragged_dot: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """As `grouped_ffn`, with a product of rows that are sorted by expert.

    `ragged_dot(rows [M, I], matrices [E, I, O], sizes [E])` has the meaning of jax.lax.ragged_dot
    and its gradients, but what it makes of rows beyond the last expert's may be anything.
    """
    (N, X), D, E = experts_NxX.shape, x_NxD.shape[1], len(gate_ExDxF)
    M = N * X
    order_M, sizes_E = _sort(experts_NxX.reshape(-1), E)
    owned_M = jnp.arange(M) < sizes_E.sum()
    place_M = jnp.zeros(M, jnp.int32).at[order_M].set(jnp.arange(M, dtype=jnp.int32))
    place_NxX = jnp.where(experts_NxX < E, place_M.reshape(N, X), M)
    x_MxD = _moved(x_NxD, jnp.where(owned_M, order_M // X, N), place_NxX)
    hidden_MxF = jax.nn.silu(ragged_dot(x_MxD, gate_ExDxF, sizes_E))
    hidden_MxF = hidden_MxF * ragged_dot(x_MxD, up_ExDxF, sizes_E)
    y_MxD = ragged_dot(hidden_MxF, down_ExFxD, sizes_E)
    back_Mx1 = jnp.where(owned_M, order_M, M)[:, None]
    y_NxXxD = _moved(y_MxD, place_NxX.reshape(M), back_Mx1).reshape(N, X, D)
    return _weighted(y_NxXxD, weights_NxX)


@jax.custom_vjp
def _moved(rows_RxD: jax.Array, index_S: jax.Array, back_RxX: jax.Array) -> jax.Array:
    """`_take(rows, index)`, whose gradient is a gather too: row r went to back_RxX[r]."""
    return _take(rows_RxD, index_S)


_moved.defvjp(
    lambda rows, index, back: (_take(rows, index), back),
    lambda back, slope_SxD: (_take(slope_SxD, back).sum(axis=1), None, None),
)


def _sort(experts_M: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Assignments by expert, nobody's last, and how many each expert has."""
    sizes_E = jnp.zeros(num_experts, jnp.int32).at[experts_M].add(1, mode="drop")
    return jnp.argsort(experts_M, stable=True).astype(jnp.int32), sizes_E


def _weighted(y_NxXxD: jax.Array, weights_NxX: jax.Array) -> jax.Array:
    y_NxD = (y_NxXxD.astype(jnp.float32) * weights_NxX[:, :, None]).sum(axis=1)
    return y_NxD.astype(y_NxXxD.dtype)


class _Plan(NamedTuple):
    """Where assignments go. Blocks [0, num_blocks) are in use; a block has one expert."""

    slot_M: jax.Array  # place of an assignment among the slots of all blocks
    source_S: jax.Array  # assignment in a slot; M where the slot is empty
    expert_b: jax.Array  # expert of a block
    num_blocks: jax.Array


def _plan(experts_NxX: jax.Array, num_experts: int) -> _Plan:
    experts_M = experts_NxX.reshape(-1)
    M = len(experts_M)
    max_blocks = M // BLOCK + num_experts
    order_M, sizes_E = _sort(experts_M, num_experts)
    blocks_E = (sizes_E + BLOCK - 1) // BLOCK
    first_block_E = jnp.cumsum(blocks_E, dtype=jnp.int32) - blocks_E
    first_E = jnp.cumsum(sizes_E, dtype=jnp.int32) - sizes_E
    sorted_M = experts_M[order_M]
    owned_M = sorted_M < num_experts
    owner_M = jnp.minimum(sorted_M, num_experts - 1)
    slots = first_block_E[owner_M] * BLOCK + jnp.arange(M, dtype=jnp.int32) - first_E[owner_M]
    slots = jnp.where(owned_M, slots, max_blocks * BLOCK)  # nobody's: beyond the last slot
    slot_M = jnp.zeros(M, jnp.int32).at[order_M].set(slots, unique_indices=True)
    source_S = jnp.full(max_blocks * BLOCK, M, jnp.int32)
    source_S = source_S.at[slots].set(order_M, mode="drop")
    blocks_b = jnp.arange(max_blocks, dtype=jnp.int32)
    expert_b = jnp.searchsorted(first_block_E, blocks_b, side="right") - 1
    return _Plan(slot_M, source_S, expert_b, blocks_E.sum(dtype=jnp.int32))


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index], zeros where the index is beyond the last row."""
    return rows.at[index].get(mode="fill", fill_value=0)


# Every move of rows below is a gather, in both directions: the plan knows the way back, so the
# backward pass needs no scatter (slow and serial on CPU). The loops run over blocks in use,
# known only at run time, which is why the gradient is written by hand.


@jax.custom_vjp
def _blocks(x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD):
    arguments = (x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD)
    return _blocks_forward(*arguments)[0]


def _blocks_forward(x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD):
    (N, X), D = experts_NxX.shape, x_NxD.shape[1]
    plan = _plan(experts_NxX, len(gate_ExDxF))
    x_bxKxD = _take(x_NxD, plan.source_S // X).reshape(-1, BLOCK, D)

    def one_block(b, y_bxKxD):
        e, x = plan.expert_b[b], x_bxKxD[b]
        hidden = jax.nn.silu(x @ gate_ExDxF[e]) * (x @ up_ExDxF[e])
        return y_bxKxD.at[b].set(hidden @ down_ExFxD[e])

    y_bxKxD = jax.lax.fori_loop(0, plan.num_blocks, one_block, jnp.zeros_like(x_bxKxD))
    y_NxXxD = _take(y_bxKxD.reshape(-1, D), plan.slot_M).reshape(N, X, D)
    y_NxD = _weighted(y_NxXxD, weights_NxX)
    return y_NxD, (x_NxD, weights_NxX, plan, gate_ExDxF, up_ExDxF, down_ExFxD)


def _blocks_backward(residuals, dy_NxD):
    x_NxD, weights_NxX, plan, gate_ExDxF, up_ExDxF, down_ExFxD = residuals
    (N, X), D = weights_NxX.shape, x_NxD.shape[1]
    token_S = plan.source_S // X
    x_bxKxD = _take(x_NxD, token_S).reshape(-1, BLOCK, D)
    dy_bxKxD = _take(dy_NxD, token_S).reshape(-1, BLOCK, D)
    weights_bxK = _take(weights_NxX.reshape(-1), plan.source_S).reshape(-1, BLOCK)

    def one_block(b, carry):
        dx_bxKxD, d_weights_bxK, d_gate, d_up, d_down = carry
        e, x, dy, weight_K = plan.expert_b[b], x_bxKxD[b], dy_bxKxD[b], weights_bxK[b]
        gate, up = x @ gate_ExDxF[e], x @ up_ExDxF[e]
        sigmoid = jax.nn.sigmoid(gate)
        silu = gate * sigmoid
        hidden = silu * up
        d_hidden = dy @ down_ExFxD[e].T  # of the unweighted output
        d_weight_K = (hidden * d_hidden).sum(axis=-1, dtype=jnp.float32)
        scale = weight_K[:, None].astype(x.dtype)
        d_hidden = d_hidden * scale
        d_up_x = d_hidden * silu
        d_gate_x = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
        dx = d_gate_x @ gate_ExDxF[e].T + d_up_x @ up_ExDxF[e].T
        return (
            dx_bxKxD.at[b].set(dx),
            d_weights_bxK.at[b].set(d_weight_K),
            d_gate.at[e].add(_outer(x, d_gate_x)),
            d_up.at[e].add(_outer(x, d_up_x)),
            d_down.at[e].add(_outer(hidden * scale, dy)),
        )

    zeros = (
        jnp.zeros_like(x_bxKxD),
        jnp.zeros(weights_bxK.shape, jnp.float32),
        *(jnp.zeros(w.shape, jnp.float32) for w in (gate_ExDxF, up_ExDxF, down_ExFxD)),
    )
    dx_bxKxD, d_weights_bxK, *d_matrices = jax.lax.fori_loop(0, plan.num_blocks, one_block, zeros)
    dx_NxD = _take(dx_bxKxD.reshape(-1, D), plan.slot_M).reshape(N, X, D).sum(axis=1)
    d_weights_NxX = _take(d_weights_bxK.reshape(-1), plan.slot_M).reshape(N, X)
    return dx_NxD, d_weights_NxX, None, *(d.astype(x_NxD.dtype) for d in d_matrices)


def _outer(x_KxI: jax.Array, y_KxO: jax.Array) -> jax.Array:
    return jnp.matmul(x_KxI.T, y_KxO, preferred_element_type=jnp.float32)


_blocks.defvjp(_blocks_forward, _blocks_backward)
