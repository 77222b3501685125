"""The language-model head, evaluated only where the loss looks.

Owns logits at candidates, the log-normalizer over the vocabulary, and their gradients. Must not
know about samplers or losses: `token_sum` is handed the loss as a function. Under mask replay no
array of tokens x vocabulary exists, forward or backward; with the normalizer one exists for a chunk
of tokens at a time. `token_sum` takes a chunk's gradient while its logits are there, so they are
computed once: three products with the head, as many as dense logits need. `candidate_logits` serves
those who want the values; its gradient computes the logits again.

A kernel for log-probs over a ragged support (FlashInfer ships one for Blackwell) plugs in at
`_at_candidates` and `_at_candidates_pull`: nothing else under mask replay sees a row of the head.

Everything has a leading axis S of shards (1 without a mesh), which is never chunked and never
mixed: GSPMD leaves it in place, and adds up the head's gradient once at the end. The vocabulary is
walked in P interleaved blocks, v = b P + p, so that a head split over V stays split.

Shape letters: S shards of the tokens, T tokens of a shard, C tokens of a chunk, K candidates,
D model, V vocabulary, P blocks of B ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from contracts.errors import BadInputError
from trainer_jax.inputs import array_of, check_positive, is_concrete, is_number

# Bytes of the widest temporary of a shard: [C, K, D] rows of the head, or [C, V] logits. With the
# normalizer more than 512 tokens at once gain nothing in the products.
CANDIDATE_CHUNK_BYTES = 8 << 20
VOCABULARY_CHUNK_BYTES = 512 << 20
VOCABULARY_CHUNK_TOKENS = 512
# Of the head's rows that are multiplied at once, and of their gradient before it is added up.
BLOCK_BYTES = 64 << 20
MAX_BLOCKS = 64


class CandidateLogits(NamedTuple):
    """Normalizer and entropy are None unless asked for; entropy has no gradient."""

    logits_TxK: jax.Array
    normalizer_T: jax.Array | None  # log-sum-exp over the vocabulary
    entropy_T: jax.Array | None


class Part(NamedTuple):
    """Tokens whose candidate sets have one width, sharded over S."""

    hidden_SxTxD: jax.Array
    candidate_ids_SxTxK: jax.Array  # integers, -1 is padding
    tokens: Any  # arrays [S, T, ...] that the objective wants; they get no gradient


# (CandidateLogits, tokens) of C tokens -> (objective_C, statistics [C] in any tree)
Objective = Callable[[CandidateLogits, Any], tuple[jax.Array, Any]]


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

    Raises:
        BadInputError: dtypes or shapes that do not fit, no candidate; a temperature that is no
            finite number above 0; where ids are concrete, one that is neither -1 nor below V.
    """
    hidden_TxD = array_of("hidden_TxD", hidden_TxD, "floating-point numbers")
    head_weight_VxD = array_of("head_weight_VxD", head_weight_VxD, "floating-point numbers")
    candidate_ids_TxK = array_of("candidate_ids_TxK", candidate_ids_TxK, "integers")
    _check_arguments(hidden_TxD, head_weight_VxD, candidate_ids_TxK)
    temperature = _static_temperature(temperature)
    flat = hidden_TxD.ndim == 2
    if flat:
        hidden_TxD, candidate_ids_TxK = hidden_TxD[None], candidate_ids_TxK[None]
    how = _How(normalizer, chunk_tokens, temperature)
    out: Any = _candidate_logits(how, hidden_TxD, head_weight_VxD, candidate_ids_TxK)
    return jax.tree.map(lambda x: x[0], out) if flat else out


def token_sum(
    objective: Objective,
    head_weight_VxD: jax.Array,
    parts: Sequence[Part],
    *,
    normalizer: bool,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, list[Any]]:
    """The sum of a function of `candidate_logits` over all tokens, differentiated on the way.

    Args:
        objective: of each token alone. It may close over constants, not over traced arrays.
        head_weight_VxD, normalizer, temperature, chunk_tokens: as of `candidate_logits`.

    Returns:
        the sum, with gradients for hidden states and head; the statistics of each part, [S, T].
    """
    how = _How(normalizer, chunk_tokens, _static_temperature(temperature))
    return _token_sum(objective, how, jnp.asarray(head_weight_VxD), list(parts))


def _check_arguments(hidden_TxD, head_weight_VxD, candidate_ids_TxK) -> None:
    if hidden_TxD.ndim not in (2, 3):
        raise BadInputError("hidden_TxD", expected="[T, D] or [S, T, D]", found=hidden_TxD.shape)
    if head_weight_VxD.ndim != 2 or head_weight_VxD.shape[1] != hidden_TxD.shape[-1]:
        raise BadInputError(
            "head_weight_VxD",
            expected=f"[V, {hidden_TxD.shape[-1]}], as wide as the hidden states",
            found=head_weight_VxD.shape,
        )
    leading = hidden_TxD.shape[:-1]
    if candidate_ids_TxK.shape[:-1] != leading or not candidate_ids_TxK.shape[-1]:
        raise BadInputError(
            "candidate_ids_TxK",
            expected=f"{list(leading)}, as the hidden states, by at least one candidate",
            found=candidate_ids_TxK.shape,
        )
    if is_concrete(candidate_ids_TxK) and candidate_ids_TxK.size:
        V, ids_TxK = head_weight_VxD.shape[0], np.asarray(candidate_ids_TxK)
        low, high = int(ids_TxK.min()), int(ids_TxK.max())
        if low < -1 or high >= V:
            raise BadInputError(
                "candidate_ids_TxK",
                expected=f"ids below {V}, the vocabulary, or -1 for padding",
                found=high if high >= V else low,
            )


def _static_temperature(temperature: Any) -> float:
    check_positive("temperature", temperature)
    if not is_number(temperature):
        raise BadInputError("temperature", expected="a number, not a traced one", found=temperature)
    return float(temperature)


class _How(NamedTuple):
    normalizer: bool
    chunk_tokens: int | None
    temperature: float

    def chunk(self, part: Part, V: int) -> int:
        """Tokens of a chunk; a power of two by default, to divide the slots of a batch."""
        T, D = part.hidden_SxTxD.shape[1:]
        if self.chunk_tokens is not None:
            return max(1, min(self.chunk_tokens, T))
        if self.normalizer:
            num = min(VOCABULARY_CHUNK_BYTES // (4 * V), VOCABULARY_CHUNK_TOKENS)
        else:
            num = CANDIDATE_CHUNK_BYTES // (4 * D * max(part.candidate_ids_SxTxK.shape[2], 1))
        return max(1, min(1 << max(num, 1).bit_length() - 1, T))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _candidate_logits(how: _How, hidden_SxTxD, weight_VxD, ids_SxTxK) -> CandidateLogits:
    part = Part(hidden_SxTxD, ids_SxTxK, ())
    return _values(lambda out, _: out, how, weight_VxD, part)


def _candidate_logits_forward(how: _How, hidden_SxTxD, weight_VxD, ids_SxTxK):
    out = _candidate_logits(how, hidden_SxTxD, weight_VxD, ids_SxTxK)
    return out, (hidden_SxTxD, weight_VxD, ids_SxTxK)


def _candidate_logits_backward(how: _How, residuals, slopes: CandidateLogits):
    hidden_SxTxD, weight_VxD, ids_SxTxK = residuals
    part = Part(hidden_SxTxD, ids_SxTxK, slopes)
    grad_SxVxD, grad_hidden_SxTxD, _ = _gradients(
        lambda _, slopes: (slopes, ()), how, weight_VxD, part, _no_gradient(weight_VxD, part)
    )
    return grad_hidden_SxTxD, grad_SxVxD.sum(0).astype(weight_VxD.dtype), None


_candidate_logits.defvjp(_candidate_logits_forward, _candidate_logits_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_sum(objective: Objective, how: _How, weight_VxD, parts: list[Part]):
    values = [_values(jax.vmap(objective), how, weight_VxD, part) for part in parts]
    return sum(value_SxT.sum() for value_SxT, _ in values), [stats for _, stats in values]


def _token_sum_forward(objective: Objective, how: _How, weight_VxD, parts: list[Part]):
    def slopes_of(out: CandidateLogits, tokens):
        value_SxC, pull, stats = jax.vjp(
            lambda out: jax.vmap(objective)(out, tokens), out, has_aux=True
        )
        return pull(jnp.ones_like(value_SxC))[0], (value_SxC, stats)

    grad_SxVxD = _no_gradient(weight_VxD, parts[0])
    total, grads_hidden, stats = jnp.zeros((), grad_SxVxD.dtype), [], []
    for part in parts:
        grad_SxVxD, grad_hidden_SxTxD, (value_SxT, stats_of_part) = _gradients(
            slopes_of, how, weight_VxD, part, grad_SxVxD
        )
        total += value_SxT.sum()
        grads_hidden.append(grad_hidden_SxTxD)
        stats.append(stats_of_part)
    return (total, stats), (grad_SxVxD.sum(0).astype(weight_VxD.dtype), grads_hidden)


def _token_sum_backward(objective: Objective, how: _How, grads, slopes):
    grad_VxD, *grads_hidden = (
        grad * slopes[0].astype(grad.dtype) for grad in (grads[0], *grads[1])
    )
    return grad_VxD, [Part(grad, None, None) for grad in grads_hidden]  # pyright: ignore


_token_sum.defvjp(_token_sum_forward, _token_sum_backward)


def _values(function, how: _How, weight_VxD, part: Part):
    """`function(CandidateLogits, tokens)` of every token, chunk by chunk."""
    S, T = part.hidden_SxTxD.shape[:2]

    def one_chunk(part: Part):
        out, _ = _look(how, part, weight_VxD)
        return function(out, part.tokens)

    outs = jax.lax.map(one_chunk, _split(part, how.chunk(part, len(weight_VxD))))
    return jax.tree.map(lambda x: _join(x, S, T), outs)


def _gradients(slopes_of, how: _How, weight_VxD, part: Part, grad_SxVxD):
    """Adds to the head's gradient, chunk by chunk, while the chunk's logits are there.

    Args:
        slopes_of: (CandidateLogits, tokens) -> (their gradients, what to keep).

    Returns:
        grad_SxVxD, grad_hidden_SxTxD, what was kept [S, T].
    """
    S, T = part.hidden_SxTxD.shape[:2]

    def one_chunk(grad_SxVxD, part: Part):
        out, seen = _look(how, part, weight_VxD)
        slopes, kept = slopes_of(out, part.tokens)
        pull = _at_vocabulary_pull if how.normalizer else _at_candidates_pull
        slope_SxCxK = jnp.where(part.candidate_ids_SxTxK >= 0, slopes.logits_TxK, 0.0)
        # with respect to hidden @ weight.T, before the division by the temperature
        slopes = slopes._replace(logits_TxK=slope_SxCxK)
        slopes = jax.tree.map(
            lambda slope: slope.astype(grad_SxVxD.dtype) / how.temperature, slopes
        )
        grad_SxVxD, grad_hidden_SxCxD = pull(part, weight_VxD, seen, out, slopes, grad_SxVxD)
        return grad_SxVxD, (grad_hidden_SxCxD.astype(part.hidden_SxTxD.dtype), kept)

    chunks = _split(part, how.chunk(part, len(weight_VxD)))
    grad_SxVxD, outs = jax.lax.scan(one_chunk, grad_SxVxD, chunks)
    grad_hidden_SxTxD, kept = jax.tree.map(lambda x: _join(x, S, T), outs)
    return grad_SxVxD, grad_hidden_SxTxD, kept


def _no_gradient(weight_VxD, part: Part) -> jax.Array:
    S = len(part.hidden_SxTxD)
    return jnp.zeros((S, *weight_VxD.shape), _accumulator(part.hidden_SxTxD, weight_VxD))


def _look(how: _How, part: Part, weight_VxD) -> tuple[CandidateLogits, jax.Array]:
    """A chunk's logits, and the array that its gradient needs."""
    at = _at_vocabulary if how.normalizer else _at_candidates
    return at(part, weight_VxD, how.temperature)


def _at_candidates(part: Part, weight_VxD, temperature: float):
    """Mask replay: the dot products of hidden states with the rows of their candidates."""
    hidden_SxCxD, ids_SxCxK, _ = part
    rows_SxCxKxD = weight_VxD[jnp.maximum(ids_SxCxK, 0)]
    logits_SxCxK = _product("scd,sckd->sck", hidden_SxCxD, rows_SxCxKxD) / temperature
    return CandidateLogits(jnp.where(ids_SxCxK >= 0, logits_SxCxK, 0.0), None, None), rows_SxCxKxD


def _at_candidates_pull(part: Part, weight_VxD, rows_SxCxKxD, out, slopes, grad_SxVxD):
    hidden_SxCxD, ids_SxCxK, _ = part
    S, V, D = grad_SxVxD.shape
    dtype = grad_SxVxD.dtype
    grad_hidden_SxCxD = jnp.einsum("sck,sckd->scd", slopes.logits_TxK, rows_SxCxKxD.astype(dtype))
    rows = slopes.logits_TxK[..., None] * hidden_SxCxD[:, :, None, :].astype(dtype)
    add = jax.vmap(lambda grad, ids, row: grad.at[ids].add(row, mode="drop"))
    ids = _beyond_if(ids_SxCxK < 0, ids_SxCxK, V)
    return add(grad_SxVxD, ids.reshape(S, -1), rows.reshape(S, -1, D)), grad_hidden_SxCxD


def _at_vocabulary(part: Part, weight_VxD, temperature: float):
    """All logits of a chunk, [P, S, C, B]."""
    hidden_SxCxD, ids_SxCxK, _ = part
    weight_BxPxD = _in_blocks(weight_VxD, 0)
    P = weight_BxPxD.shape[1]

    def one_block(p):
        logits_SxCxB = _product("scd,bd->scb", hidden_SxCxD, weight_BxPxD[:, p]) / temperature
        picked_SxCxK = jnp.take_along_axis(logits_SxCxB, jnp.maximum(ids_SxCxK, 0) // P, axis=2)
        is_here_SxCxK = (ids_SxCxK >= 0) & (ids_SxCxK % P == p)
        return logits_SxCxB, jnp.where(is_here_SxCxK, picked_SxCxK, 0.0)

    logits_PxSxCxB, picked_PxSxCxK = jax.lax.map(one_block, jnp.arange(P, dtype=ids_SxCxK.dtype))
    lse_SxC = jax.nn.logsumexp(logits_PxSxCxB, axis=(0, 3))
    logp_PxSxCxB = logits_PxSxCxB - lse_SxC[None, :, :, None]
    entropy_SxC = -(jnp.exp(logp_PxSxCxB) * logp_PxSxCxB).sum((0, 3))
    return CandidateLogits(picked_PxSxCxK.sum(0), lse_SxC, entropy_SxC), logits_PxSxCxB


def _at_vocabulary_pull(part: Part, weight_VxD, logits_PxSxCxB, out, slopes, grad_SxVxD):
    hidden_SxCxD, ids_SxCxK, _ = part
    weight_BxPxD, grad_SxBxPxD = _in_blocks(weight_VxD, 0), _in_blocks(grad_SxVxD, 1)
    B, P, _ = weight_BxPxD.shape
    dtype = grad_SxVxD.dtype
    add = jax.vmap(jax.vmap(lambda row, ids, values: row.at[ids].add(values, mode="drop")))

    def one_block(grads, block):
        grad_SxBxPxD, grad_hidden_SxCxD = grads
        p, logits_SxCxB = block
        slope_SxCxB = jnp.exp(logits_SxCxB - out.normalizer_T[:, :, None])
        slope_SxCxB *= slopes.normalizer_T[:, :, None]
        is_elsewhere = (ids_SxCxK < 0) | (ids_SxCxK % P != p)
        slope_SxCxB = add(
            slope_SxCxB, _beyond_if(is_elsewhere, ids_SxCxK // P, B), slopes.logits_TxK
        ).astype(hidden_SxCxD.dtype)
        grad_hidden_SxCxD += _product("scb,bd->scd", slope_SxCxB, weight_BxPxD[:, p])
        grad_SxBxD = _product("scb,scd->sbd", slope_SxCxB, hidden_SxCxD)
        return (grad_SxBxPxD.at[:, :, p].add(grad_SxBxD), grad_hidden_SxCxD), None

    zero = jnp.zeros(hidden_SxCxD.shape, dtype)
    (grad_SxBxPxD, grad_hidden_SxCxD), _ = jax.lax.scan(
        one_block, (grad_SxBxPxD, zero), (jnp.arange(P, dtype=ids_SxCxK.dtype), logits_PxSxCxB)
    )
    return grad_SxBxPxD.reshape(grad_SxVxD.shape), grad_hidden_SxCxD


def _in_blocks(x: jax.Array, dim: int) -> jax.Array:
    """[..., V, D] -> [..., B, P, D], the fewest blocks that keep to BLOCK_BYTES and divide V."""
    V, D = x.shape[dim:]
    num = next((n for n in range(1, MAX_BLOCKS) if not V % n and V // n * D * 4 <= BLOCK_BYTES), 0)
    num = num or max(n for n in range(1, MAX_BLOCKS) if not V % n)
    return x.reshape(*x.shape[:dim], V // num, num, D)


def _accumulator(*arrays: jax.Array) -> Any:
    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32


def _product(subscripts: str, *arrays: jax.Array) -> jax.Array:
    """Accumulated in float32; a bfloat16 product only where both are bfloat16."""
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    wide = [array.astype(dtype) for array in arrays]
    return jnp.einsum(subscripts, *wide, preferred_element_type=_accumulator(*wide))


def _beyond_if(is_dropped: jax.Array, ids: jax.Array, num: int) -> jax.Array:
    # negative indices would wrap around; beyond the end they are dropped
    return jnp.where(is_dropped, num, ids)


def _split(part: Part, chunk: int) -> Part:
    """[S, T, ...] -> [chunks, S, chunk, ...], padded behind with ids -1 and zeros."""

    def split(x_SxTx: jax.Array, fill: int = 0) -> jax.Array:
        S, T = x_SxTx.shape[:2]
        if missing := -T % chunk:
            widths = [(0, 0), (0, missing), *[(0, 0)] * (x_SxTx.ndim - 2)]
            x_SxTx = jnp.pad(x_SxTx, widths, constant_values=fill)
        return jnp.moveaxis(x_SxTx.reshape(S, -1, chunk, *x_SxTx.shape[2:]), 1, 0)

    hidden, ids, tokens = part
    return Part(split(hidden), split(ids, -1), jax.tree.map(split, tokens))


def _join(x: jax.Array, S: int, T: int) -> jax.Array:
    """The inverse of `_split`."""
    return jnp.moveaxis(x, 0, 1).reshape(S, -1, *x.shape[3:])[:, :T]
