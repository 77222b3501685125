"""The device mesh, and where every parameter and batch lies on it.

Owns the axis names and the one table from logical axes (what a dimension means) to mesh axes. Must
not know shapes beyond divisibility, nor any model's formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from contracts.errors import BadInputError
from trainer_jax.models.parameters import PARAMETERS

AXES = ("data", "fsdp", "expert", "tensor", "context")
# Rows are split over all of these, parameters over fsdp, experts over expert. Where experts are not
# computed, devices along `expert` are as good as more data.
BATCH_AXES = ("data", "fsdp", "expert")

# Dimensions of parameters -> the mesh axis they are split over; None is replicated.
LOGICAL_AXES: Mapping[str, str | None] = {
    "layer": None,  # scanned
    "model": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "head_outputs": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "router": None,
    "expert": "expert",
    "ffn": "tensor",
    "mlp": "tensor",
    "delta_channels": None,  # q, k and v side by side: no even cut is between heads of each
    "delta_outputs": "tensor",
    "delta_heads": None,
    "delta_head_dim": None,
    "tap": None,
}


def make_mesh(shape: Mapping[str, int]) -> Mesh:
    """A mesh over the first devices; axes that `shape` leaves out have size 1.

    Raises:
        BadInputError: an unknown axis, a size below 1, more devices than there are.
    """
    unknown = sorted(set(shape) - set(AXES))
    if unknown:
        raise BadInputError("mesh axes", expected=", ".join(AXES), found=", ".join(unknown))
    sizes = [shape.get(axis, 1) for axis in AXES]
    if min(sizes) < 1:
        raise BadInputError("mesh sizes", expected="at least 1", found=dict(shape))
    num = math.prod(sizes)
    devices = jax.devices()
    if num > len(devices):
        raise BadInputError(
            f"mesh {dict(zip(AXES, sizes, strict=True))}",
            expected=f"at most {len(devices)} devices, as many as there are",
            found=num,
        )
    grid = np.array(devices[:num]).reshape(sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_spec(path: tuple[str, ...]) -> PartitionSpec:
    """How a parameter is split, by its path in the tree."""
    axes = [LOGICAL_AXES[name] for name in PARAMETERS[path]]
    used = [axis for axis in axes if axis is not None]
    assert len(used) == len(set(used)), f"{path}: two dimensions on one mesh axis"
    return PartitionSpec(*axes)


def param_shardings(mesh: Mesh, params: Any) -> Any:
    """A tree like `params` (arrays or shapes) of the sharding of each leaf.

    Raises:
        BadInputError: a dimension that its mesh axis does not divide.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = tuple(key.key for key in path)
        spec = parameter_spec(names)
        for size, axis in zip(leaf.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise BadInputError(
                    f"mesh axis {axis} for parameter {'.'.join(names)} {tuple(leaf.shape)}",
                    expected=f"a divisor of {size}",
                    found=mesh.shape[axis],
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, params)


def place(tree: Any, shardings: Any) -> Any:
    """Copies arrays to the devices of `shardings`, a tree like theirs; no memory is shared.

    With several processes each copies the parts of its own devices from the same whole arrays.
    """

    def put(array: Any, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(
            np.shape(array), sharding, lambda index: np.array(array[index])
        )

    return jax.tree.map(put, tree, shardings)


def by_data_shard(function: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    """`function(params, *arrays)`, each data shard's rows alone.

    What couples rows without mixing them (tokens of all rows are sorted by expert) would otherwise
    be computed over all shards, with tokens sent between devices. Gradients of `params` are added
    up over the shards. The leading dimension of every array, and of the result, are rows.

    With another axis in use everything stays GSPMD's: its partitioner (of jaxlib 0.10.2) ends the
    process on a program that is manual over some axes only.
    """
    if mesh.size == 1 or mesh.shape["data"] < mesh.size:
        return function
    rows = PartitionSpec("data")

    def sharded(params: Any, *arrays: jax.Array) -> jax.Array:
        call = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PartitionSpec(), *[rows] * len(arrays)),
            out_specs=rows,
            check_vma=False,
        )
        return call(params, *arrays)

    return sharded


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of [rows, ...]: rows split over the batch axes, everything else of a row on one device."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def token_sharding(mesh: Mesh) -> NamedSharding:
    """Of [rows, tokens]: tokens split over the context axis as well."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "context"))
