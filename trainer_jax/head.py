"""The language-model head, evaluated only where the loss looks.

Owns logits at candidates, the log-normalizer over the vocabulary, and their gradients. Must not
know about samplers or losses. Under mask replay no array of tokens x vocabulary exists, forward or
backward; with the normalizer one exists for a chunk of tokens at a time and is recomputed in the
backward pass. Everything has a leading axis S of shards (1 without a mesh), which is never chunked
and never mixed: GSPMD leaves it in place, and adds up the head's gradient once at the end.

Shape letters: S shards of the tokens, T tokens of a shard, C tokens of a chunk, K candidates,
D model, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Bytes of the widest temporary of a shard: [C, K, D] rows of the head, or [C, V] logits. With the
# normalizer more than 256 tokens at once gain nothing in the products and lose the cache.
CANDIDATE_CHUNK_BYTES = 16 << 20
VOCABULARY_CHUNK_BYTES = 128 << 20
VOCABULARY_CHUNK_TOKENS = 256


class CandidateLogits(NamedTuple):
    """Normalizer and entropy are None unless asked for; entropy has no gradient."""

    logits_TxK: jax.Array
    normalizer_T: jax.Array | None  # log-sum-exp over the vocabulary
    entropy_T: jax.Array | None


def candidate_logits(
    hidden_TxD: jax.Array,
    head_weight_VxD: jax.Array,
    candidate_ids_TxK: jax.Array,
    *,
    normalizer: bool,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> CandidateLogits:
    """`hidden @ head_weight.T / temperature` at the candidates, and what a softmax needs beyond.

    Args:
        hidden_TxD: [T, D], or [S, T, D] with S sharded over the mesh's data axes.
        head_weight_VxD: may be sharded over V or D.
        candidate_ids_TxK: integers, -1 is padding: its logit is 0 and has no gradient.
        normalizer: whether to return the log-normalizer (and entropy) over the vocabulary.
        chunk_tokens: tokens computed at once per shard; by default from a memory budget.

    Returns:
        logits in float32 (float64 when an input is), with the leading axes of `hidden_TxD`.
    """
    hidden_TxD, head_weight_VxD = jnp.asarray(hidden_TxD), jnp.asarray(head_weight_VxD)
    candidate_ids_TxK = jnp.asarray(candidate_ids_TxK)
    flat = hidden_TxD.ndim == 2
    if flat:
        hidden_TxD, candidate_ids_TxK = hidden_TxD[None], candidate_ids_TxK[None]
    S, T, D = hidden_TxD.shape
    assert candidate_ids_TxK.shape[:2] == (S, T) and head_weight_VxD.shape[1] == D
    if chunk_tokens is None and normalizer:
        chunk_tokens = VOCABULARY_CHUNK_BYTES // (4 * len(head_weight_VxD))
        chunk_tokens = min(chunk_tokens, VOCABULARY_CHUNK_TOKENS)
    elif chunk_tokens is None:
        chunk_tokens = CANDIDATE_CHUNK_BYTES // (4 * D * max(candidate_ids_TxK.shape[2], 1))
    how = _How(normalizer, max(1, min(chunk_tokens, T)), temperature)
    values: Any = _candidate_logits(how, hidden_TxD, head_weight_VxD, candidate_ids_TxK)
    out = CandidateLogits(*values)
    return jax.tree.map(lambda x: x[0], out) if flat else out


class _How(NamedTuple):
    normalizer: bool
    chunk: int
    temperature: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _candidate_logits(
    how: _How, hidden_SxTxD, weight_VxD, ids_SxTxK
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    S, T, _ = hidden_SxTxD.shape
    dtype = _accumulator(hidden_SxTxD, weight_VxD)

    def forward(args):
        hidden_SxCxD, ids_SxCxK = args
        safe_SxCxK = jnp.maximum(ids_SxCxK, 0)
        if how.normalizer:
            logits_SxCxV = _dense_logits(hidden_SxCxD, weight_VxD, dtype) / how.temperature
            picked_SxCxK = jnp.take_along_axis(logits_SxCxV, safe_SxCxK, axis=2)
            lse_SxC = jax.nn.logsumexp(logits_SxCxV, axis=2)
            logp_SxCxV = logits_SxCxV - lse_SxC[:, :, None]
            beyond = lse_SxC, -(jnp.exp(logp_SxCxV) * logp_SxCxV).sum(2)
        else:
            rows_SxCxKxD = weight_VxD[safe_SxCxK]
            picked_SxCxK = jnp.einsum(
                "scd,sckd->sck",
                *_same(hidden_SxCxD, rows_SxCxKxD),
                preferred_element_type=dtype,
            )
            picked_SxCxK /= how.temperature
            beyond = ()
        return jnp.where(ids_SxCxK >= 0, picked_SxCxK, 0.0), *beyond

    outs = jax.lax.map(
        forward, (_split(hidden_SxTxD, how.chunk, 0), _split(ids_SxTxK, how.chunk, -1))
    )
    logits_SxTxK, *beyond = [_join(out, S, T) for out in outs]
    lse_SxT, entropy_SxT = beyond or (None, None)
    return logits_SxTxK, lse_SxT, entropy_SxT


def _forward(how: _How, hidden_SxTxD, weight_VxD, ids_SxTxK):
    out: Any = _candidate_logits(how, hidden_SxTxD, weight_VxD, ids_SxTxK)
    return out, (hidden_SxTxD, weight_VxD, ids_SxTxK, out[1])


def _backward(how: _How, residuals, cotangents):
    hidden_SxTxD, weight_VxD, ids_SxTxK, lse_SxT = residuals
    S, T, D = hidden_SxTxD.shape
    V = len(weight_VxD)
    dtype = _accumulator(hidden_SxTxD, weight_VxD)
    # slopes are with respect to hidden @ weight.T, before the division by the temperature
    slope_SxTxK = jnp.where(ids_SxTxK >= 0, cotangents[0], 0.0).astype(dtype) / how.temperature

    def backward(grad_SxVxD, args):
        hidden_SxCxD, ids_SxCxK, slope_SxCxK, *dense = args
        if how.normalizer:
            lse_SxC, lse_slope_SxC = dense
            logits_SxCxV = _dense_logits(hidden_SxCxD, weight_VxD, dtype) / how.temperature
            slope_SxCxV = jnp.exp(logits_SxCxV - lse_SxC[:, :, None]) * lse_slope_SxC[:, :, None]
            slope_SxCxV = _add_at(slope_SxCxV, ids_SxCxK, slope_SxCxK)
            slopes, weights = _same(slope_SxCxV.astype(hidden_SxCxD.dtype), weight_VxD)
            grad_hidden_SxCxD = jnp.einsum(
                "scv,vd->scd", slopes, weights, preferred_element_type=dtype
            )
            grad_SxVxD += jnp.einsum(
                "scv,scd->svd", *_same(slopes, hidden_SxCxD), preferred_element_type=dtype
            )
        else:
            rows_SxCxKxD = weight_VxD[jnp.maximum(ids_SxCxK, 0)].astype(dtype)
            grad_hidden_SxCxD = jnp.einsum("sck,sckd->scd", slope_SxCxK, rows_SxCxKxD)
            rows = slope_SxCxK[..., None] * hidden_SxCxD[:, :, None, :].astype(dtype)
            grad_SxVxD = jax.vmap(lambda grad, ids, row: grad.at[ids].add(row, mode="drop"))(
                grad_SxVxD,
                _beyond_if_padding(ids_SxCxK, V).reshape(S, -1),
                rows.reshape(S, -1, D),
            )
        return grad_SxVxD, grad_hidden_SxCxD.astype(hidden_SxTxD.dtype)

    parts = [
        _split(hidden_SxTxD, how.chunk, 0),
        _split(ids_SxTxK, how.chunk, -1),
        _split(slope_SxTxK, how.chunk, 0),
    ]
    if how.normalizer:
        lse_slope_SxT = cotangents[1].astype(dtype) / how.temperature
        parts += [_split(lse_SxT, how.chunk, 0), _split(lse_slope_SxT, how.chunk, 0)]
    grad_SxVxD, grad_hidden = jax.lax.scan(backward, jnp.zeros((S, V, D), dtype), tuple(parts))
    grad_hidden_SxTxD = _join(grad_hidden, S, T)
    return grad_hidden_SxTxD, grad_SxVxD.sum(0).astype(weight_VxD.dtype), None


_candidate_logits.defvjp(_forward, _backward)


def _accumulator(*arrays: jax.Array) -> Any:
    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32


def _same(*arrays: jax.Array) -> list[jax.Array]:
    """Cast to the widest of their dtypes: a bfloat16 product only where both are bfloat16."""
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    return [array.astype(dtype) for array in arrays]


def _dense_logits(hidden_SxCxD, weight_VxD, dtype) -> jax.Array:
    return jnp.einsum("scd,vd->scv", *_same(hidden_SxCxD, weight_VxD), preferred_element_type=dtype)


def _beyond_if_padding(ids: jax.Array, V: int) -> jax.Array:
    # negative indices would wrap around; beyond the end they are dropped
    return jnp.where(ids >= 0, ids, V)


def _add_at(slope_SxCxV, ids_SxCxK, slope_SxCxK) -> jax.Array:
    add = jax.vmap(jax.vmap(lambda row, ids, values: row.at[ids].add(values, mode="drop")))
    return add(slope_SxCxV, _beyond_if_padding(ids_SxCxK, slope_SxCxV.shape[2]), slope_SxCxK)


def _split(x_SxTx: jax.Array, chunk: int, fill: int) -> jax.Array:
    """[S, T, ...] -> [chunks, S, chunk, ...], padded with `fill`."""
    S, T = x_SxTx.shape[:2]
    missing = -T % chunk
    if missing:
        widths = [(0, 0), (0, missing), *[(0, 0)] * (x_SxTx.ndim - 2)]
        x_SxTx = jnp.pad(x_SxTx, widths, constant_values=fill)
    return jnp.moveaxis(x_SxTx.reshape(S, -1, chunk, *x_SxTx.shape[2:]), 1, 0)


def _join(x: jax.Array, S: int, T: int) -> jax.Array:
    """The inverse of `_split`."""
    return jnp.moveaxis(x, 0, 1).reshape(S, -1, *x.shape[3:])[:, :T]
