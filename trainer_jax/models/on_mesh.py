"""The decoder's seams on a mesh: what spans devices there, each in a `shard_map` over all axes.

Owns how arrays lie at the seams. Between them XLA partitions what needs no other token. (A program
that is manual over some axes only ends the process with jaxlib 0.10.2.)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer_jax.models import context
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.decoder import Seams, local_seams
from trainer_jax.models.dispatch import Routing, mesh_experts


def seams(
    config: ModelConfig, compute: ComputeConfig, mesh: Mesh, batch_axes: tuple[str, ...]
) -> Seams:
    """Rows are split over `batch_axes`, their tokens over `context`, heads over `tensor` where it
    divides the key heads.
    """
    experts = mesh_experts(
        mesh,
        batch_axes,
        routing=Routing.of(config),
        impl=compute.ffn,
        dispatch=compute.dispatch,
    )
    rows = PartitionSpec(batch_axes, "context")

    def constrained(spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    own = local_seams(config, compute)._replace(
        experts=experts, whole=constrained(PartitionSpec("tensor")), place=constrained(rows)
    )
    if mesh.size > 1:  # rows and tokens are split over axes of their own
        own = own._replace(multiply=jax.numpy.matmul)
    if mesh.shape["context"] == 1:
        return own

    def heads(num_key_heads: int) -> PartitionSpec:
        axis = "tensor" if num_key_heads % mesh.shape["tensor"] == 0 else None
        return PartitionSpec(batch_axes, "context", axis)

    def spread(function: Callable, *specs: PartitionSpec) -> Callable:
        """`specs`: of the arguments, and of the result like the first."""
        return jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
        )

    attention, delta = heads(config.num_key_value_heads), heads(config.linear_num_key_heads)
    return own._replace(
        attend=spread(context.attend, *[attention] * 3, rows),
        convolution=spread(context.convolution, rows, PartitionSpec(), rows),
        delta_rule=spread(context.delta_rule, *[delta] * 5, rows),
    )
