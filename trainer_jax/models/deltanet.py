"""Gated DeltaNet over packed rows: the causal convolution and the gated delta rule, in chunks.

Owns that both start anew at every segment, exactly: a convolution never reaches into an earlier
segment, and no state crosses a boundary, also where it lies inside a chunk. Must not hold
parameters.

The rule, for every value head, with a state S [A, W] that is zero at a segment's start (Yang,
Kautz, Hatamizadeh: Gated Delta Networks, arXiv 2412.06464):

    S <- exp(g_t) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  o_t = S^T q_t

In a chunk, with decays D_ij = exp(g_{j+1} + .. + g_i) of token pairs of one segment, the values
that are written solve (I + strict(beta k k^T D)) u = beta (v - decayed k S): one triangular
inverse for all chunks of a group at once; only states are passed from chunk to chunk. All in
float32. The backward pass computes a group anew from the state before it, so that beside the
arguments only these states are kept.

Shape letters as in `decoder`; J key heads, H value heads, A key head dimension, W value head
dimension, I channels, C tokens of a chunk, n chunks (of a group).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 64  # tokens, as in transformers
CPU_CHUNK = 32  # 1.15 times as fast there: fewer products, and small ones are no slower
GROUP = 256  # tokens; on CPU as fast as 128, 512 took 1.25 times as long and more memory
_BLOCK = 8  # of a triangular inverse by substitution
_STRONGEST = -100.0  # log of a decay; exp of it is 0
_GRID = 2.0**-11  # CHUNK * _STRONGEST / _GRID is below 2^24: sums of multiples are exact
NO_SEGMENT = -2  # of nothing that comes in
_MASKED = -1e30  # before exp: after it, inf * 0 would be the gradient


def causal_convolution(x_BxTxI, taps_KxI, segments_BxT) -> jax.Array:
    """Of every channel I alone, over the last K tokens of the same segment, [B, T, I]."""
    T, K = x_BxTxI.shape[1], len(taps_KxI)
    y_BxTxI = x_BxTxI * taps_KxI[None, None, -1]
    for back in range(1, min(K, T)):
        x = jnp.pad(x_BxTxI[:, :-back], [(0, 0), (back, 0), (0, 0)])
        same_BxT = segments_BxT[:, back:] == segments_BxT[:, :-back]
        same_BxT = jnp.pad(same_BxT, [(0, 0), (back, 0)])
        y_BxTxI += jnp.where(same_BxT[..., None], x, 0) * taps_KxI[None, None, -1 - back]
    return y_BxTxI


def normalize(x: jax.Array) -> jax.Array:
    """To length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)


class _Chunks(NamedTuple):
    """Arguments cut into chunks, float32; their leading axes are groups and chunks, or chunks."""

    q_nxBxJxCxA: jax.Array
    k_nxBxJxCxA: jax.Array
    v_nxBxHxCxW: jax.Array
    g_nxBxHxC: jax.Array
    beta_nxBxHxC: jax.Array
    segments_nxBxC: jax.Array
    incoming_nxB: jax.Array  # the segment that the chunk before ended with, whose state comes in


class Incoming(NamedTuple):
    """What comes in from tokens before: a state, and the segment that it is of."""

    state_BxHxAxW: jax.Array
    segment_B: jax.Array


def delta_rule(
    q_BxTxJxA, k_BxTxJxA, v_BxTxHxW, g_BxTxH, beta_BxTxH, segments_BxT, *, chunk: int | None = None
) -> jax.Array:
    """The rule's outputs o, [B, T, H, W] float32.

    Value head h reads key head h // (H / J). The tokens of a segment are contiguous in their row;
    `g` is the log of the decay, at most 0. Memory is linear in T. `chunk`: tokens, the backend's
    own number by default.
    """
    (B, _, _, A), (H, W) = q_BxTxJxA.shape, v_BxTxHxW.shape[2:]
    nothing = Incoming(jnp.zeros((B, H, A, W), jnp.float32), jnp.full(B, NO_SEGMENT, jnp.int32))
    arguments = q_BxTxJxA, k_BxTxJxA, v_BxTxHxW, g_BxTxH, beta_BxTxH, segments_BxT
    return delta_rule_from(nothing, *arguments, chunk=chunk)[0]


def delta_rule_from(
    incoming: Incoming,
    q_BxTxJxA,
    k_BxTxJxA,
    v_BxTxHxW,
    g_BxTxH,
    beta_BxTxH,
    segments_BxT,
    *,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs as of `delta_rule` for tokens that follow others, and the state after the last."""
    (B, T), (H, W) = q_BxTxJxA.shape[:2], v_BxTxHxW.shape[2:]
    chunk = min(chunk or (CPU_CHUNK if jax.default_backend() == "cpu" else CHUNK), T)
    num_chunks = -(-T // chunk)
    num_groups = -(-num_chunks // max(GROUP // chunk, 1))
    per_group = -(-num_chunks // num_groups)
    pad = num_groups * per_group * chunk - T

    def split(x_BxTx: jax.Array, mode: str = "constant") -> jax.Array:
        """[B, T, ...] to [groups, n, B, C, ...]."""
        widths = [(0, 0), (0, pad), *[(0, 0)] * (x_BxTx.ndim - 2)]
        x = jnp.pad(x_BxTx, widths, mode=mode)
        x = x.reshape(B, num_groups, per_group, chunk, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2)

    # what fills the last chunk neither writes nor decays: the state stays the last token's
    segments = split(segments_BxT, mode="edge")
    last = segments[..., -1].reshape(-1, B)
    before = jnp.concatenate([incoming.segment_B[None].astype(last.dtype), last[:-1]])
    arrays = (q_BxTxJxA, k_BxTxJxA, v_BxTxHxW, g_BxTxH, beta_BxTxH)
    q, k, v, g, beta = (split(x.astype(jnp.float32)).swapaxes(3, 4) for x in arrays)
    groups = _Chunks(q, k, v, g, beta, segments, before.reshape(num_groups, per_group, B))
    state, o = jax.lax.scan(jax.checkpoint(_one_group), incoming.state_BxHxAxW, groups)
    o = o.transpose(2, 0, 1, 4, 3, 5)  # to [B, groups, n, C, H, W]
    return o.reshape(B, T + pad, H, W)[:, :T], state


def _one_group(state_BxHxAxW: jax.Array, group: _Chunks) -> tuple[jax.Array, jax.Array]:
    """The state after the group's chunks, and their outputs [n, B, H, C, W]."""
    q, k, v, g, beta, segments, incoming = group
    H, J, C = v.shape[2], k.shape[2], k.shape[3]

    def per_value_head(x_nxBxJx: jax.Array) -> jax.Array:
        return jnp.repeat(x_nxBxJx, H // J, axis=2)

    total = _totals(g)
    tokens = jnp.arange(C)
    earlier_CxC = tokens[:, None] > tokens[None, :]
    same_nxBxCxC = segments[..., :, None] == segments[..., None, :]
    decay_nxBxHxCxC = jnp.exp(
        jnp.where(
            (same_nxBxCxC & earlier_CxC[None, None])[:, :, None],
            _between(total.coarse) + _between(total.fine),
            _MASKED,
        )
    )
    k_transposed = k.swapaxes(-1, -2)
    # a token's own term has no decay, and in the decay's gradient it would only be noise
    own_CxC = jnp.eye(C)[None, None, None]
    qk_nxBxHxCxC = per_value_head(q @ k_transposed) * (decay_nxBxHxCxC + own_CxC)
    inverse = _inverse(per_value_head(k @ k_transposed) * decay_nxBxHxCxC * beta[..., None])

    last_nxB = segments[..., -1]
    reads = (segments == incoming[..., None])[:, :, None]
    writes = (segments == last_nxB[..., None])[:, :, None]
    keeps = (incoming == last_nxB)[:, :, None]
    since_start_nxBxHxC = total.coarse + total.fine
    coarse, fine = (part[..., -1:] - part for part in total)
    until_end_nxBxHxC = coarse + fine
    read_nxBxHxC = jnp.where(reads, jnp.exp(since_start_nxBxHxC), 0.0)
    write_nxBxHxC = jnp.where(writes, jnp.exp(until_end_nxBxHxC), 0.0)
    keep_nxBxH = jnp.where(keeps, jnp.exp(since_start_nxBxHxC[..., -1]), 0.0)

    q, k = per_value_head(q), per_value_head(k)
    chunks = (
        inverse @ (v * beta[..., None]),
        inverse @ (k * (beta * read_nxBxHxC)[..., None]),
        q * read_nxBxHxC[..., None],
        qk_nxBxHxCxC,
        (k * write_nxBxHxC[..., None]).swapaxes(-1, -2),
        keep_nxBxH[..., None, None],
    )
    return jax.lax.scan(_one_chunk, state_BxHxAxW, chunks)


class _Totals(NamedTuple):
    """Running sums of g over a chunk, [n, B, H, C], in two parts whose differences are exact.

    A sum reaches -1000, and a difference of two such in float32 is wrong by 1e-4.
    """

    coarse: jax.Array  # multiples of _GRID, without rounding; no gradient
    fine: jax.Array


def _totals(g_nxBxHxC: jax.Array) -> _Totals:
    g_nxBxHxC = jnp.maximum(g_nxBxHxC, _STRONGEST)
    coarse = jax.lax.stop_gradient(jnp.round(g_nxBxHxC / _GRID) * _GRID)
    return _Totals(jnp.cumsum(coarse, axis=-1), jnp.cumsum(g_nxBxHxC - coarse, axis=-1))


def _between(total_nxBxHxC: jax.Array) -> jax.Array:
    return total_nxBxHxC[..., :, None] - total_nxBxHxC[..., None, :]


def _one_chunk(state_BxHxAxW: jax.Array, chunk) -> tuple[jax.Array, jax.Array]:
    values, known, q, qk, k, keep = chunk
    written_BxHxCxW = values - known @ state_BxHxAxW
    o_BxHxCxW = q @ state_BxHxAxW + qk @ written_BxHxCxW
    return keep * state_BxHxAxW + k @ written_BxHxCxW, o_BxHxCxW


@jax.custom_vjp
def _inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of strictly lower triangular matrices.

    Blocks on the diagonal by substitution, then pairs of blocks: [[A, 0], [B, D]] has the inverse
    [[A', 0], [-D' B A', D']]. Products of powers are as fast, and lose everything where keys
    repeat. solve_triangular is slower, and hangs on CPU (jaxlib 0.10.2) when as many devices call
    it at once as XLA has threads: each waits there for work that only another thread would do.
    """
    C = lower.shape[-1]
    padded = 1 << (C - 1).bit_length()
    pad = [(0, 0)] * (lower.ndim - 2) + [(0, padded - C)] * 2
    lower = jnp.pad(lower, pad)  # the identity, which changes nothing
    size = min(_BLOCK, padded)
    inverse = _by_substitution(_blocks(lower, size, 0))
    while size < padded:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -(second @ (_blocks(lower, 2 * size, size) @ first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :C, :C]


def _blocks(lower: jax.Array, step: int, below: int) -> jax.Array:
    """Square blocks at every `step` on the diagonal, [.., number, size, size]: whole steps, or the
    lower left quarters, that begin `below` the diagonal.
    """
    size = step - below
    starts = range(0, lower.shape[-1], step)
    return jnp.stack([lower[..., s + below : s + step, s : s + size] for s in starts], axis=-3)


def _by_substitution(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 row by row."""
    size = lower.shape[-1]
    rows: list[jax.Array] = []
    for i, unit in enumerate(np.eye(size, dtype=lower.dtype)):
        row = jnp.broadcast_to(unit, (*lower.shape[:-2], size))
        rows.append(row - sum(lower[..., i, j, None] * rows[j] for j in range(i)))
    return jnp.stack(rows, axis=-2)


def _inverse_backward(inverse: jax.Array, slope: jax.Array):
    transposed = inverse.swapaxes(-1, -2)
    return (-(transposed @ slope @ transposed),)


_inverse.defvjp(lambda lower: (_inverse(lower),) * 2, _inverse_backward)
