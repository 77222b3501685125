"""Exports from arrays that lie on several devices: the same bytes as from whole ones.

Run as a process with eight virtual devices by test_mesh.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.trainer_jax.sharded_model import CONFIG
from tests.trainer_jax.test_hf import contents, random_params
from trainer_jax.checkpoint import Checkpoints, Position
from trainer_jax.hf import save_checkpoint
from trainer_jax.mesh import make_mesh, param_shardings, place
from trainer_jax.parts import own_parts

MESHES = [{"fsdp": 4}, {"expert": 2, "tensor": 2}, {"data": 2, "fsdp": 2}, {"data": 8}]


def spread(params, sizes):
    return place(params, param_shardings(make_mesh(sizes), params))


@pytest.mark.parametrize("layout", ["fused", "per-expert"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_an_export_does_not_depend_on_the_mesh(tmp_path, sizes, layout):
    params = random_params(CONFIG, seed=3)
    save_checkpoint(tmp_path / "whole", CONFIG, params, layout=layout)
    save_checkpoint(tmp_path / "spread", CONFIG, spread(params, sizes), layout=layout)
    assert contents(tmp_path / "spread") == contents(tmp_path / "whole")


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_value_is_in_one_part(sizes):
    params = random_params(CONFIG, seed=3)
    arrays = spread(params, sizes)
    counted = jax.tree.map(lambda leaf: np.zeros(leaf.shape, int), params)
    for part in own_parts(arrays):
        data, leaf, array = part.on_host(), counted, arrays
        for key in part.path:
            leaf, array = leaf[key], array[key]
        assert data.shape == array.sharding.shard_shape(array.shape), "not gathered"
        leaf[tuple(slice(s, s + n) for s, n in zip(part.start, data.shape, strict=True))] += 1
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(counted))


def test_a_written_part_is_released(tmp_path):
    parts = own_parts(spread(random_params(CONFIG), {"fsdp": 4}))
    save_checkpoint(tmp_path / "model", CONFIG, parts)
    assert all(part.on_host().size == 0 for part in parts)


def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path):
    params = random_params(CONFIG, seed=5)
    position = Position(run="r", step=1, version=2, sequence=3, seed=0, elapsed_seconds=0.0)
    saved = Checkpoints(tmp_path, keep=1)
    saved.save(spread(params, {"fsdp": 4, "tensor": 2}), position)
    saved.close()
    like = spread(jax.tree.map(np.zeros_like, params), {"data": 2, "expert": 4})
    restored, found = Checkpoints(tmp_path, keep=1).restore(like)
    assert found == position
    for got, want, other in zip(*map(jax.tree.leaves, (restored, params, like)), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding == other.sharding
