"""Causal attention over packed rows, and rotary embeddings.

Owns the mask (same segment, not later) and how the work is cut: query chunk by key chunk with a
running softmax, forward and backward, so that no [T, T] array exists and pairs of chunks that the
mask rules out are never computed. Must not hold parameters.

Shape letters as in `decoder`; C tokens of a chunk, n chunks, Q = R * C queries of a chunk that
share a key-value head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Tokens; fastest of 64..512 on CPU at T = 512, and small enough for any cache. A shorter row is one
# chunk, which is the plain form; at 256 and more, plain scores [T, T] were never the faster.
CHUNK = 128
_MASKED = -1e30  # finite: a query with nothing to attend to gives numbers, not NaN


def rotary(x_BxTxHxA: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (j, j + A/2); cos and sin are [B, T, 1, A/2] float32."""
    first, second = jnp.split(x_BxTxHxA.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxTxHxA.dtype)


def attend(q_BxTxHxA, k_BxTxJxA, v_BxTxJxA, segments_BxT, *, chunk: int = CHUNK) -> jax.Array:
    """softmax(q k / sqrt(A)) v over earlier tokens of the same segment, [B, T, H, A].

    The tokens of a segment are contiguous in their row. Memory beyond the arguments is linear in T;
    time is quadratic in the length of segments, not of rows.
    """
    T = q_BxTxHxA.shape[1]
    chunk = min(chunk, T)
    # what fills the last chunk is a segment of its own, to which no token attends
    pad = [(0, 0), (0, -T % chunk)]
    q, k, v = (jnp.pad(x, [*pad, (0, 0), (0, 0)]) for x in (q_BxTxHxA, k_BxTxJxA, v_BxTxJxA))
    segments = jnp.pad(segments_BxT, pad, constant_values=-1)
    return attend_from(jnp.int32(0), q, k, v, segments, chunk=chunk)[:, :T]


def attend_from(
    start: jax.Array, q_BxTxHxA, k_BxSxJxA, v_BxSxJxA, segments_BxS, *, chunk: int = CHUNK
) -> jax.Array:
    """As `attend`, for queries that begin at token `start` of a row of S; all of these multiples of
    the chunk.
    """
    B, T, H, A = q_BxTxHxA.shape
    J = k_BxSxJxA.shape[2]
    q_BxTxHxA = q_BxTxHxA * jnp.asarray(A**-0.5, q_BxTxHxA.dtype)
    first_n = _first_chunks(segments_BxS, chunk)
    offset, num = start // chunk, T // chunk
    out = _attend(
        _to_chunks(q_BxTxHxA, J, chunk),
        _to_chunks(k_BxSxJxA, J, chunk),
        _to_chunks(v_BxSxJxA, J, chunk),
        segments_BxS.reshape(B, -1, chunk).swapaxes(0, 1),
        jax.lax.dynamic_slice_in_dim(first_n, offset, num),
        offset + jnp.arange(num, dtype=jnp.int32),
    )
    return _from_chunks(out, H)


def _to_chunks(x_BxTxHxA: jax.Array, J: int, C: int) -> jax.Array:
    """[B, T, H, A] to [n, B, J, Q, A], heads of one key-value head side by side."""
    B, T, H, A = x_BxTxHxA.shape
    x = x_BxTxHxA.reshape(B, T // C, C, J, H // J, A)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(T // C, B, J, H // J * C, A)


def _from_chunks(x_nxBxJxQxA: jax.Array, H: int) -> jax.Array:
    n, B, J, Q, A = x_nxBxJxQxA.shape
    R = H // J
    x = x_nxBxJxQxA.reshape(n, B, J, R, Q // R, A).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, n * Q // R, H, A)


def _first_chunks(segments_BxT: jax.Array, C: int) -> jax.Array:
    """For each query chunk the first key chunk that any row's queries may attend to, [n].

    Padding (segment 0) counts as starting everywhere: a long tail of it costs nothing.
    """
    B, T = segments_BxT.shape
    changes = segments_BxT[:, 1:] != segments_BxT[:, :-1]
    starts = jnp.concatenate([jnp.ones((B, 1), bool), changes], axis=1) | (segments_BxT <= 0)
    start_BxT = jax.lax.cummax(jnp.where(starts, jnp.arange(T)[None], 0), axis=1)
    return (start_BxT[:, ::C].min(axis=0) // C).astype(jnp.int32)


class _Residuals(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    segments: jax.Array
    first: jax.Array
    number: jax.Array
    out: jax.Array
    log_normalizer: jax.Array


@jax.custom_vjp
def _attend(q_nxBxJxQxA, k_mxBxJxCxA, v_mxBxJxCxA, segments_mxBxC, first_n, number_n):
    """`number`: of each query chunk among the m chunks of the row."""
    return _attend_forward(
        q_nxBxJxQxA, k_mxBxJxCxA, v_mxBxJxCxA, segments_mxBxC, first_n, number_n
    )[0]


def _scores(q_BxJxQxA, k_BxJxCxA, q_segments_BxC, k_segments_BxC, i, j):
    """Masked scores of query chunk i against key chunk j, [B, J, Q, C] float32."""
    B, J, Q, _ = q_BxJxQxA.shape
    C = k_BxJxCxA.shape[2]
    scores = jnp.einsum(
        "bjqa,bjsa->bjqs", q_BxJxQxA, k_BxJxCxA, preferred_element_type=jnp.float32
    ).reshape(B, J, Q // C, C, C)
    tokens_C = jnp.arange(C, dtype=jnp.int32)
    causal_CxC = (i * C + tokens_C)[:, None] >= (j * C + tokens_C)[None, :]
    same_BxCxC = q_segments_BxC[:, :, None] == k_segments_BxC[:, None, :]
    allowed = (same_BxCxC & causal_CxC[None])[:, None, None]
    return jnp.where(allowed, scores, _MASKED).reshape(B, J, Q, C)


def _attend_forward(q_nxBxJxQxA, k_mxBxJxCxA, v_mxBxJxCxA, segments_mxBxC, first_n, number_n):
    def one_query_chunk(_, chunk):
        i, q, first = chunk
        segments = segments_mxBxC[i]

        def one_key_chunk(j, carry):
            peak, total, weighted = carry
            scores = _scores(q, k_mxBxJxCxA[j], segments, segments_mxBxC[j], i, j)
            new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
            p = jnp.exp(scores - new_peak)
            fade = jnp.exp(peak - new_peak)
            values = _product("bjqs,bjsa->bjqa", p, v_mxBxJxCxA[j])
            return new_peak, total * fade + p.sum(axis=-1, keepdims=True), weighted * fade + values

        peak = jnp.full((*q.shape[:-1], 1), _MASKED, jnp.float32)
        carry = (peak, jnp.zeros_like(peak), jnp.zeros(q.shape, jnp.float32))
        peak, total, weighted = jax.lax.fori_loop(first, i + 1, one_key_chunk, carry)
        return None, ((weighted / total).astype(q.dtype), peak + jnp.log(total))

    chunks = (number_n, q_nxBxJxQxA, first_n)
    _, (out, log_normalizer) = jax.lax.scan(one_query_chunk, None, chunks)
    residuals = _Residuals(
        q_nxBxJxQxA,
        k_mxBxJxCxA,
        v_mxBxJxCxA,
        segments_mxBxC,
        first_n,
        number_n,
        out,
        log_normalizer,
    )
    return out, residuals


def _attend_backward(residuals: _Residuals, d_out):
    q_all, k_all, v_all, segments_all, first_n, number_n, out, log_normalizer = residuals
    # the softmax's own term: sum over keys of p * dp equals sum over A of out * d_out
    centre = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1, keepdims=True)

    def one_query_chunk(carry, chunk):
        i, q, d, centre_i, log_normalizer_i, first = chunk
        segments = segments_all[i]

        def one_key_chunk(j, carry):
            dk, dv, dq = carry
            k, v = k_all[j], v_all[j]
            p = jnp.exp(_scores(q, k, segments, segments_all[j], i, j) - log_normalizer_i)
            dp = jnp.einsum("bjqa,bjsa->bjqs", d, v, preferred_element_type=jnp.float32)
            ds = p * (dp - centre_i)
            return (
                dk.at[j].add(_product("bjqs,bjqa->bjsa", ds, q)),
                dv.at[j].add(_product("bjqs,bjqa->bjsa", p, d)),
                dq + _product("bjqs,bjsa->bjqa", ds, k),
            )

        dk, dv, dq = jax.lax.fori_loop(
            first, i + 1, one_key_chunk, (*carry, jnp.zeros(q.shape, jnp.float32))
        )
        return (dk, dv), dq.astype(q.dtype)

    zeros = (jnp.zeros(k_all.shape, jnp.float32), jnp.zeros(v_all.shape, jnp.float32))
    chunks = (number_n, q_all, d_out, centre, log_normalizer, first_n)
    (dk, dv), dq = jax.lax.scan(one_query_chunk, zeros, chunks)
    return dq, dk.astype(k_all.dtype), dv.astype(v_all.dtype), None, None, None


def _product(subscripts: str, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Float32 weights times x at the precision of x, accumulated in float32."""
    return jnp.einsum(subscripts, weights.astype(x.dtype), x, preferred_element_type=jnp.float32)


_attend.defvjp(_attend_forward, _attend_backward)
