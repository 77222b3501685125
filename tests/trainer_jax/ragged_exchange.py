"""What jax.lax.ragged_all_to_all does, as its documentation says it, for backends that cannot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def exchanged(rows: list[np.ndarray], empty: list[np.ndarray], slices: list) -> list[np.ndarray]:
    """On all devices at once: of each its rows, its result before, and its slices."""
    results = [one.copy() for one in empty]
    for source, (own, (starts, sizes, places, _)) in enumerate(zip(rows, slices, strict=True)):
        for target, result in enumerate(results):
            start, size, place = starts[target], sizes[target], places[target]
            assert size == slices[target].recv_sizes_P[source]
            assert start + size <= len(own)
            assert place + size <= len(result)
            result[place : place + size] = own[start : start + size]
    return results


def by_all_gather(rows_Rx, empty_Sx, starts_P, sizes_P, places_P, received_P, *, axis_name):
    """On one device in a `shard_map`, with gradients: all rows of all devices, then a choice."""
    me = jax.lax.axis_index(axis_name)
    rows_PxRx, starts_PxP, places_PxP = (
        jax.lax.all_gather(x, axis_name) for x in (rows_Rx, starts_P, places_P)
    )
    del sizes_P  # those received are the same
    result = empty_Sx
    for rows, start, place, size in zip(
        rows_PxRx, starts_PxP[:, me], places_PxP[:, me], received_P, strict=True
    ):
        index_S = jnp.arange(len(empty_Sx)) - place
        inside_S = (index_S >= 0) & (index_S < size)
        inside = inside_S.reshape(-1, *[1] * (empty_Sx.ndim - 1))
        result = jnp.where(inside, rows[jnp.where(inside_S, start + index_S, 0)], result)
    return result
