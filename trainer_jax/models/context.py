"""Rows longer than a device: each holds a stretch of every row's tokens, along the axis `context`.

Owns what tokens need of earlier stretches: keys and values of attention (gathered), the state of
the gated delta rule (passed on), the last tokens of a convolution (from the neighbour). For a
`shard_map` over all axes; exact. Must not hold parameters.

Of causal attention the last stretch has most to do: time is that of the last one.

Shape letters as in `decoder`; T tokens of a stretch, P stretches, A and W key and value head
dimensions of the delta rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainer_jax.models.attention import CHUNK, attend_from
from trainer_jax.models.deltanet import NO_SEGMENT, Incoming, causal_convolution, delta_rule_from

AXIS = "context"


def attend(q_BxTxHxA, k_BxTxJxA, v_BxTxJxA, segments_BxT) -> jax.Array:
    """`attention.attend` of this stretch's queries over all earlier keys of the row."""
    k, v, segments = (
        jax.lax.all_gather(x, AXIS, axis=1, tiled=True)
        for x in (k_BxTxJxA, v_BxTxJxA, segments_BxT)
    )
    T = q_BxTxHxA.shape[1]
    start = (jax.lax.axis_index(AXIS) * T).astype(jnp.int32)
    chunk = next(size for size in range(min(CHUNK, T), 0, -1) if T % size == 0)
    return attend_from(start, q_BxTxHxA, k, v, segments, chunk=chunk)


def convolution(x_BxTxI, taps_KxI, segments_BxT) -> jax.Array:
    """`deltanet.causal_convolution`, which looks back into the stretch before."""
    reach = len(taps_KxI) - 1
    tail = _from_before(x_BxTxI[:, -reach:])
    segments = _segments_before(segments_BxT[:, -reach:])
    y = causal_convolution(
        jnp.concatenate([tail, x_BxTxI], axis=1),
        taps_KxI,
        jnp.concatenate([segments, segments_BxT], axis=1),
    )
    return y[:, reach:]


def delta_rule(q_BxTxJxA, k_BxTxJxA, v_BxTxHxW, g_BxTxH, beta_BxTxH, segments_BxT) -> jax.Array:
    """`deltanet.delta_rule`, on from the state after the stretch before.

    The state after a stretch is affine in the one that comes in: S <- M S + N, and so is each
    output: o + S^T m. With values 0 and the identity coming in, the rule gives M and m; with
    nothing coming in, N and o. So all stretches are computed at once, and M and N are passed.
    """
    (B, _, _, A), (H, W) = q_BxTxJxA.shape, v_BxTxHxW.shape[2:]
    segment_B = _segments_before(segments_BxT[:, -1])
    nothing = Incoming(jnp.zeros((B, H, A, W), jnp.float32), segment_B)
    eye = jnp.broadcast_to(jnp.eye(A, dtype=jnp.float32)[None, None], (B, H, A, A))
    rest = g_BxTxH, beta_BxTxH, segments_BxT
    o, made = delta_rule_from(nothing, q_BxTxJxA, k_BxTxJxA, v_BxTxHxW, *rest)
    no_values = jnp.zeros((*v_BxTxHxW.shape[:3], A), jnp.float32)
    per_state, kept = delta_rule_from(
        Incoming(eye, segment_B), q_BxTxJxA, k_BxTxJxA, no_values, *rest
    )
    state_BxHxAxW = _before(kept, made)
    return o + jnp.einsum("bthc,bhcw->bthw", per_state, state_BxHxAxW)


def _before(kept_BxHxAxA: jax.Array, made_BxHxAxW: jax.Array) -> jax.Array:
    """The state that comes into this stretch."""
    kept, made = (jax.lax.all_gather(x, AXIS) for x in (kept_BxHxAxA, made_BxHxAxW))
    states = [jnp.zeros_like(made_BxHxAxW)]
    for stretch in range(len(made) - 1):
        states.append(kept[stretch] @ states[-1] + made[stretch])
    return jnp.stack(states)[jax.lax.axis_index(AXIS)]


def _from_before(x: jax.Array) -> jax.Array:
    """What the device of the stretch before has; for the first, anything.

    Gathered: it is little, and of independent permutations XLA's CPU devices may each wait for
    another one first.
    """
    return jax.lax.all_gather(x, AXIS)[jax.lax.axis_index(AXIS) - 1]


def _segments_before(segments: jax.Array) -> jax.Array:
    """Of the stretch before; nothing comes into the first."""
    is_first = jax.lax.axis_index(AXIS) == 0
    return jnp.where(is_first, NO_SEGMENT, _from_before(segments))
