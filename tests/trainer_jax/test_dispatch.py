"""The ragged form's arithmetic, what it lowers to, and where it is refused; `sharded_experts`
computes with every form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from contracts.errors import BadInputError
from tests.trainer_jax.ragged_exchange import exchanged
from tests.trainer_jax.test_experts import run
from trainer_jax.mesh import AXES, BATCH_AXES, make_mesh
from trainer_jax.models.dispatch import (
    MATRICES,
    Routing,
    Slices,
    has_ragged,
    mesh_experts,
    mesh_ffn,
    ragged_slices,
)

LOADS = {  # rows of each device (first) for each other
    "even": np.full((4, 4), 3),
    "uneven": np.random.default_rng(0).integers(0, 9, (4, 4)),
    "one receives nothing": np.array([[2, 0, 1], [5, 0, 3], [1, 0, 4]]),
    "one sends nothing": np.array([[2, 7, 1], [0, 0, 0], [1, 3, 4]]),
    "all to one": np.array([[0, 4], [0, 6]]),
    "nothing": np.zeros((2, 2), np.int64),
    "one device": np.array([[5]]),
}
ROUTING = Routing(num_experts=4, num_per_token=2, normalize=True)


@pytest.mark.parametrize("load", LOADS)
def test_rows_reach_their_owners_in_order_and_come_back(load):
    sizes_PxP = LOADS[load].astype(np.int32)
    P, num_kept = len(sizes_PxP), 2  # what is nobody's lies behind, and stays
    ways = [ragged_slices(jnp.asarray(sizes_PxP), device) for device in range(P)]
    there = [Slices(*map(np.asarray, way)) for way, _ in ways]
    back = [Slices(*map(np.asarray, way)) for _, way in ways]
    named = [
        [(p, q, i) for q in range(P) for i in range(sizes_PxP[p, q])] + [(p, -1, -1)] * num_kept
        for p in range(P)
    ]
    rows = [np.array(names, np.int32).reshape(-1, 3) for names in named]
    space = [np.full((int(sizes_PxP.sum()) + 1, 3), -9, np.int32)] * P
    received = exchanged(rows, space, there)
    for q, got in enumerate(received):
        want = [(p, q, i) for p in range(P) for i in range(sizes_PxP[p, q])]
        np.testing.assert_array_equal(got[: len(want)], np.array(want).reshape(-1, 3))
        assert (got[len(want) :] == -9).all()
    returned = exchanged(received, [np.full_like(own, -9) for own in rows], back)
    for own, got in zip(rows, returned, strict=True):
        np.testing.assert_array_equal(got[:-num_kept], own[:-num_kept])
        assert (got[-num_kept:] == -9).all()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_ragged_form_lowers_with_its_gradient_for_devices_that_are_not_here(platform):
    mesh = AbstractMesh((1, 1, 4, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    tokens = PartitionSpec(BATCH_AXES)
    ffn = jax.shard_map(
        mesh_ffn(mesh, impl="blocks", dispatch="ragged"),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, *MATRICES),
        out_specs=tokens,
        check_vma=False,
    )
    N, X, E, D, F = 64, 2, 8, 16, 8
    shapes = (N, D), (N, X), (E, D, F), (E, D, F), (E, F, D), (N, D)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    experts_NxX = jax.ShapeDtypeStruct((N, X), jnp.int32)
    traced = jax.jit(run, static_argnums=0).trace(ffn, experts_NxX, *arrays)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # there with vectors and ids, and back; the backward pass sends vectors both ways
    assert text.count("@ragged_all_to_all(") == 5
    assert f"tensor<{4 * (N // 4) * X}x{D}xf32>" in text  # room for every token of every device


def experts(dispatch: str):
    mesh = make_mesh({})
    return mesh_experts(mesh, BATCH_AXES, routing=ROUTING, impl="blocks", dispatch=dispatch)


def test_where_the_backend_cannot_auto_is_gather_and_ragged_is_refused():
    assert jax.default_backend() == "cpu"
    assert not has_ragged(make_mesh({}))
    shapes = (2, 8, 16), (16, 4), (4, 16, 8), (4, 16, 8), (4, 8, 16)
    x, *parameters = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    arguments = x, jax.ShapeDtypeStruct((2, 8), jnp.bool_), None, *parameters
    auto, gather, other = (
        str(jax.make_jaxpr(experts(dispatch))(*arguments))
        for dispatch in ("auto", "gather", "all-to-all")
    )
    assert auto == gather != other
    with pytest.raises(BadInputError) as refused:
        experts("ragged")
    assert str(refused.value) == (
        'model.compute.dispatch = "ragged": expected a backend with ragged-all-to-all; auto, '
        "gather and all-to-all run on any, found cpu"
    )
