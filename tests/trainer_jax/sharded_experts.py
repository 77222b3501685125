"""Run as a process with four virtual devices by test_experts: split experts against one device."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.trainer_jax.ragged_exchange import by_all_gather
from tests.trainer_jax.test_experts import (
    assert_near,
    random_inputs,
    random_routing,
    reference,
    run_jit,
)
from trainer_jax.mesh import BATCH_AXES, make_mesh
from trainer_jax.models.dispatch import MATRICES, mesh_ffn


def dispatched(experts_NxX, inputs, direction_NxD, want) -> int:
    """All forms on meshes that split everything, forward and backward; the ragged one with an
    exchange that CPU has.
    """
    num_runs = 0
    for shape in (
        {"expert": 4}, {"data": 2, "expert": 2}, {"expert": 2, "tensor": 2},
        {"fsdp": 2, "expert": 2}, {"fsdp": 2, "tensor": 2},
    ):  # fmt: skip
        mesh = make_mesh(shape)
        rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        split = NamedSharding(mesh, PartitionSpec("expert"))
        arguments = jax.device_put(
            (experts_NxX, *inputs, direction_NxD), (rows, rows, rows, split, split, split, rows)
        )
        for dispatch in ("gather", "all-to-all", "ragged"):
            tokens = PartitionSpec(BATCH_AXES)
            ffn = jax.shard_map(
                mesh_ffn(mesh, impl="blocks", dispatch=dispatch, exchange=by_all_gather),
                mesh=mesh,
                in_specs=(tokens, tokens, tokens, *MATRICES),
                out_specs=tokens,
                check_vma=False,
            )
            assert_near(run_jit(ffn, *arguments), want, 1e-5)
            num_runs += 1
    return num_runs


def main() -> None:
    assert jax.device_count() == 4
    experts_NxX = random_routing(200, 2, 8)
    experts_NxX[5::7] = 8  # nobody's, as of padding
    inputs = random_inputs(experts_NxX, 8)
    direction_NxD = np.random.default_rng(1).normal(size=inputs[0].shape).astype(np.float32)
    want = reference(experts_NxX, *inputs, direction_NxD)
    num_runs = 0
    for shape in ({"expert": 4}, {"data": 2, "expert": 2}):
        mesh = make_mesh(shape)
        rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        split = NamedSharding(mesh, PartitionSpec("expert"))
        arguments = jax.device_put(
            (experts_NxX, *inputs, direction_NxD), (rows, rows, rows, split, split, split, rows)
        )
        gate = arguments[3]
        assert gate.addressable_shards[0].data.shape[0] == 8 // shape["expert"]
        for impl in ("blocks", "dense"):
            assert_near(run_jit(impl, *arguments), want, 1e-5)
            num_runs += 1
    num_runs += dispatched(experts_NxX, inputs, direction_NxD, want)
    sys.stdout.write(f"{num_runs} runs")


if __name__ == "__main__":
    main()
