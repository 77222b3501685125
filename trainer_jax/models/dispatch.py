"""How tokens meet their experts: routed where they are, computed where the experts are, dropless.

Owns the collectives around `experts.grouped_ffn`, in a `shard_map` over all axes: tokens are split
over the batch axes and `context`, experts over `expert`, their width over `tensor`, and matrices
along the model's width over `fsdp`, gathered for the time of the product.

Three forms, all exact:
    gather      a device takes the tokens of all devices along `expert`, computes what its experts
                do with them, and the sums are scattered back: 2 N D numbers per device and layer,
                whatever the router says
    all-to-all  each token is sent to the devices of its experts and back. Shapes are static, so
                that buffers have room for all of a device's assignments at every other one: it pays
                where few of many devices are asked, X much smaller than their number
    ragged      all-to-all of what there is to send and nothing else, where the backend can
                (XLA's ragged-all-to-all; CPU cannot). What is received still has room for all

Shape letters as in `decoder`; P devices along `expert`, M = N * X assignments, L local experts, S
rows of a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from contracts.errors import BadInputError
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.experts import grouped_ffn, route


class Routing(NamedTuple):
    """How experts are chosen."""

    num_experts: int
    num_per_token: int
    normalize: bool

    @staticmethod
    def of(config: ModelConfig) -> Routing:
        return Routing(config.num_experts, config.num_experts_per_tok, config.norm_topk_prob)

    def choose(
        self,
        x_NxD: jax.Array,
        is_token_N: jax.Array,
        router_DxE: jax.Array,
        routed_experts_NxX: jax.Array | None,
    ):
        """Weights and experts [N, X]; what is no token is nobody's."""
        weights_NxX, experts_NxX = route(
            x_NxD,
            router_DxE,
            self.num_per_token,
            normalize=self.normalize,
            routed_experts=routed_experts_NxX,
        )
        return weights_NxX, jnp.where(is_token_N[:, None], experts_NxX, self.num_experts)


def local_experts(  # noqa: PLR0913  (bound once, in decoder.local_seams)
    x_BxTxD, is_token_BxT, routed_BxTxX, router, gate, up, down, *, routing: Routing, impl: str
) -> jax.Array:
    """What their experts make of tokens, on one device; [B, T, D]. `routed_BxTxX`: ids or None."""
    x_NxD = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
    chosen = routing.choose(x_NxD, is_token_BxT.reshape(-1), router, _rows(routed_BxTxX))
    return grouped_ffn(x_NxD, *chosen, gate, up, down, impl=impl).reshape(x_BxTxD.shape)


def _rows(ids_BxTxX: jax.Array | None) -> jax.Array | None:
    return None if ids_BxTxX is None else ids_BxTxX.reshape(-1, ids_BxTxX.shape[-1])


def mesh_experts(
    mesh: Mesh, batch_axes: tuple[str, ...], *, routing: Routing, impl: str, dispatch: str
) -> Callable[..., jax.Array]:
    """`local_experts(x, is_token, routed, router, gate, up, down)` on a mesh.

    `dispatch`: gather, all-to-all, ragged; auto is ragged where it can be, else gather. Rows are
    split over `batch_axes`, which hold `expert`.

    Raises:
        BadInputError: ragged where it cannot be.
    """
    rows = PartitionSpec(batch_axes, "context")
    if dispatch == "auto":
        dispatch = "ragged" if has_ragged(mesh) else "gather"
    elif dispatch == "ragged" and not has_ragged(mesh):
        raise BadInputError(
            'model.compute.dispatch = "ragged"',
            expected="a backend with ragged-all-to-all; auto, gather and all-to-all run on any",
            found=mesh.devices.flat[0].platform,
        )
    ffn = mesh_ffn(mesh, impl=impl, dispatch=dispatch)

    def local(x_BxTxD, is_token_BxT, routed_BxTxX, router_DxE, *matrices):
        x_NxD = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
        router_DxE, ids_NxX = _whole(router_DxE, axis=0), _rows(routed_BxTxX)
        chosen = routing.choose(x_NxD, is_token_BxT.reshape(-1), router_DxE, ids_NxX)
        return ffn(x_NxD, *chosen, *matrices).reshape(x_BxTxD.shape)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, rows, rows, PartitionSpec("fsdp"), *MATRICES),
        out_specs=rows,
        check_vma=False,
    )


# gate, up and down
MATRICES = (
    PartitionSpec("expert", "fsdp", "tensor"),
    PartitionSpec("expert", "fsdp", "tensor"),
    PartitionSpec("expert", "tensor", "fsdp"),
)


def mesh_ffn(
    mesh: Mesh | AbstractMesh,
    *,
    impl: str,
    dispatch: str,
    exchange: Callable[..., jax.Array] = jax.lax.ragged_all_to_all,
) -> Callable[..., jax.Array]:
    """`grouped_ffn(x, weights, experts, gate, up, down)` for a `shard_map` over all axes.

    `exchange`: of ragged, a function with the meaning of the default.
    """
    ragged = functools.partial(_ragged, exchange=exchange)
    form = {"gather": _gather, "all-to-all": _all_to_all, "ragged": ragged}[dispatch]

    def local(x_NxD, weights_NxX, experts_NxX, gate_LxDxF, up_LxDxF, down_LxFxD):
        gate_LxDxF, up_LxDxF = (_whole(x, axis=1) for x in (gate_LxDxF, up_LxDxF))
        matrices = gate_LxDxF, up_LxDxF, _whole(down_LxFxD, axis=2)

        def ffn(x_NxD, weights_NxX, experts_NxX):
            y_NxD = grouped_ffn(x_NxD, weights_NxX, experts_NxX, *matrices, impl=impl)
            return jax.lax.psum(y_NxD.astype(jnp.float32), "tensor")

        L, P = len(gate_LxDxF), mesh.shape["expert"]
        return form(ffn, x_NxD, weights_NxX, experts_NxX, L=L, P=P).astype(x_NxD.dtype)

    return local


def _whole(x: jax.Array, *, axis: int) -> jax.Array:
    return jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True)


def _own(experts: jax.Array, L: int) -> jax.Array:
    """Ids among this device's experts; L, nobody's, for those of other devices."""
    local = experts - jax.lax.axis_index("expert") * L
    return jnp.where((local >= 0) & (local < L), local, L)


def _gather(ffn, x_NxD, weights_NxX, experts_NxX, *, L: int, P: int) -> jax.Array:
    del P
    x, weights, experts = (
        jax.lax.all_gather(part, "expert", axis=0, tiled=True)
        for part in (x_NxD, weights_NxX, experts_NxX)
    )
    y = ffn(x, weights, _own(experts, L))
    return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)


def _all_to_all(ffn, x_NxD, weights_NxX, experts_NxX, *, L: int, P: int) -> jax.Array:
    (N, X), D = experts_NxX.shape, x_NxD.shape[1]
    M = N * X
    experts_M = experts_NxX.reshape(M)
    owner_M = jnp.minimum(experts_M // L, P)  # P: nobody's
    is_owner_MxP = owner_M[:, None] == jnp.arange(P)[None]
    place_M = (jnp.cumsum(is_owner_MxP, axis=0) - 1)[jnp.arange(M), jnp.minimum(owner_M, P - 1)]
    slot_M = owner_M * M + place_M  # in the buffers of all owners
    source_S = (
        jnp.full(P * M, M, jnp.int32).at[slot_M].set(jnp.arange(M, dtype=jnp.int32), mode="drop")
    )
    send_SxD = x_NxD.at[source_S // X].get(mode="fill", fill_value=0)
    ids_S = (experts_M % L).at[source_S].get(mode="fill", fill_value=L)
    received_SxD, ids_S = (_exchange(part, P) for part in (send_SxD, ids_S))
    y_SxD = ffn(received_SxD, jnp.ones((P * M, 1), jnp.float32), ids_S[:, None])
    back_SxD = _exchange(y_SxD.astype(x_NxD.dtype), P)
    y_MxD = back_SxD.at[jnp.where(owner_M < P, slot_M, P * M)].get(mode="fill", fill_value=0)
    return (y_MxD.reshape(N, X, D).astype(jnp.float32) * weights_NxX[:, :, None]).sum(axis=1)


def _exchange(x_Sx: jax.Array, P: int) -> jax.Array:
    """Part p of each device's buffer becomes part of device p's."""
    parts = x_Sx.reshape(P, -1, *x_Sx.shape[1:])
    moved = jax.lax.all_to_all(parts, "expert", split_axis=0, concat_axis=0)
    return moved.reshape(x_Sx.shape)


class Slices(NamedTuple):
    """What `jax.lax.ragged_all_to_all` asks of a device: one entry for every other, [P]."""

    input_offsets_P: jax.Array  # of the rows for it, among one's own
    send_sizes_P: jax.Array
    output_offsets_P: jax.Array  # where it puts them
    recv_sizes_P: jax.Array


def ragged_slices(sizes_PxP: jax.Array, device: jax.Array | int) -> tuple[Slices, Slices]:
    """The way there and the way back, of one device.

    `sizes_PxP[p, q]`: rows of device p for device q. They lie in the order of receivers where they
    are sent, in the order of senders where they are received, without gaps.
    """
    starts_PxP = jnp.cumsum(sizes_PxP, axis=1, dtype=sizes_PxP.dtype) - sizes_PxP
    places_PxP = jnp.cumsum(sizes_PxP, axis=0, dtype=sizes_PxP.dtype) - sizes_PxP
    sent, received = sizes_PxP[device], sizes_PxP[:, device]
    there = Slices(starts_PxP[device], sent, places_PxP[device], received)
    return there, Slices(places_PxP[:, device], received, starts_PxP[:, device], sent)


def _ragged(
    ffn, x_NxD, weights_NxX, experts_NxX, *, L: int, P: int, exchange: Callable[..., jax.Array]
) -> jax.Array:
    (N, X), D = experts_NxX.shape, x_NxD.shape[1]
    M, S = N * X, P * N * min(X, L)  # of a token's experts no more than L are here
    experts_M = experts_NxX.reshape(M)
    owner_M = jnp.minimum(experts_M // L, P)  # P: nobody's, which come last and are not sent
    order_M = jnp.argsort(owner_M, stable=True).astype(jnp.int32)
    sizes_P = jnp.zeros(P, jnp.int32).at[owner_M].add(1, mode="drop")
    sizes_PxP = jax.lax.all_gather(sizes_P, "expert")
    there, back = ragged_slices(sizes_PxP, jax.lax.axis_index("expert"))

    def moved(rows: jax.Array, empty: jax.Array, slices: Slices) -> jax.Array:
        return exchange(rows, empty, *slices, axis_name="expert")

    x_SxD = moved(x_NxD[order_M // X], jnp.zeros((S, D), x_NxD.dtype), there)
    ids_S = moved((experts_M % L)[order_M], jnp.full(S, L, experts_M.dtype), there)
    y_SxD = ffn(x_SxD, jnp.ones((S, 1), jnp.float32), ids_S[:, None]).astype(x_NxD.dtype)
    y_MxD = moved(y_SxD, jnp.zeros((M, D), x_NxD.dtype), back)
    place_M = jnp.zeros(M, jnp.int32).at[order_M].set(jnp.arange(M, dtype=jnp.int32))
    y_NxXxD = y_MxD[place_M].reshape(N, X, D)  # nobody's: zeros, where nothing came back
    return (y_NxXxD.astype(jnp.float32) * weights_NxX[:, :, None]).sum(axis=1)


def has_ragged(mesh: Mesh) -> bool:
    """Whether this backend compiles ragged-all-to-all; found by asking it to."""
    P = mesh.shape["expert"]
    split = NamedSharding(mesh, PartitionSpec("expert"))
    rows, slices = (
        jax.ShapeDtypeStruct((size,), dtype, sharding=split)
        for size, dtype in ((P, jnp.float32), (P * P, jnp.int32))
    )

    def exchange(*arguments: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(*arguments, axis_name="expert")

    spread = jax.shard_map(
        exchange, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False
    )
    try:
        jax.jit(spread).lower(rows, rows, *[slices] * 4).compile()
    except jax.errors.JaxRuntimeError as error:
        if "UNIMPLEMENTED" not in str(error):
            raise
        return False
    return True
