"""A process with eight virtual devices, run by test_aot: what is planned against what is there."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tests.trainer_jax.test_step import CONFIG, NAMES, PARAMS
from trainer_jax.aot import device_bytes
from trainer_jax.budget import Setting, memory
from trainer_jax.config import OptimizerSection
from trainer_jax.hlo import Module
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import make_mesh
from trainer_jax.step import make_update

MESHES = (
    {"data": 8},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"expert": 4, "tensor": 2},
)


def allocated(tree: Any) -> int:
    """Bytes of a tree's arrays on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


def check_state(shape: dict[str, int], optimizer: str, masters: Any) -> None:
    section = OptimizerSection(name=optimizer, masters=masters)  # pyright: ignore
    mesh = make_mesh(shape)
    update = make_update(
        CONFIG, LossConfig(), section.build(), mesh, group_names=NAMES, masters=masters
    )
    state, planned = update.init(PARAMS), update.abstract_state()
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), planned
    )
    assert device_bytes(planned.params) == allocated(state.params)
    assert device_bytes(planned.opt_state) == allocated(state.opt_state)
    need = memory(
        CONFIG,
        Setting(
            mesh=dict(mesh.shape),
            micro_rows=8,
            row_tokens=64,
            optimizer=optimizer,
            masters=masters,
            dtype="float32",
            remat=False,
        ),
    )
    assert need.parameters == allocated(state.params)
    assert need.gradients == device_bytes(planned.params, dtype=jnp.float32)
    counters = sum(x.nbytes for x in jax.tree.leaves(state.opt_state) if x.ndim == 0)
    assert need.moments == allocated(state.opt_state) - counters


def known_traffic() -> list[Any]:
    """Of a program with one collective of each kind: [axes, kind, bytes, calls]."""
    mesh = make_mesh({"data": 2, "fsdp": 4})

    def local(x):  # [4, 8] float32 here, 128 bytes
        def turn(x, _):
            return x + jax.lax.psum(x, "fsdp"), None

        x, _ = jax.lax.scan(turn, x, None, length=3)
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        scattered = jax.lax.psum_scatter(gathered * gathered, ("data", "fsdp"), tiled=True)
        exchanged = jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True)
        pairs = [(0, 1), (1, 0)]
        return scattered.sum() + exchanged + jax.lax.ppermute(x * 2, "data", pairs)

    spec = PartitionSpec(("data", "fsdp"))
    call = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(call).lower(jax.ShapeDtypeStruct((32, 8), jnp.float32)).compile().as_text()
    found = Module(text or "").traffic(dict(mesh.shape))
    return sorted([list(t.axes), t.kind, t.received_bytes, t.num_calls] for t in found)


def main() -> None:
    assert jax.device_count() == 8
    for shape in MESHES:
        check_state(shape, "adamw", "float32")
    check_state(MESHES[2], "sgd", "bfloat16")
    sys.stdout.write(json.dumps(known_traffic()))


if __name__ == "__main__":
    main()
