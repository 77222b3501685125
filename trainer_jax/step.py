"""One optimizer step over the micro-batches of one update.

Owns the training state and the jitted functions: backward, accumulation, update. What they
differentiate is `trainer_jax.objective`'s. Must not read trajectories, write files, or decide when
an update happens.

Micro-batches are accumulated by a loop on the host over one jitted function with donated
gradients. The denominator is that of the whole update, known before its first micro-batch, so the
split does not matter. There is no pass that recomputes old log-probs: the importance ratio uses the
policy of the one differentiated forward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from contracts.errors import BadInputError
from trainer_jax import loss_metrics
from trainer_jax.batch import Batch
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import batch_sharding, param_shardings, place, token_sharding
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.parameters import FLOAT32, Params, init_params
from trainer_jax.objective import Scalars, TokenValues, batch_objective

EXACT = ComputeConfig()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What an update changes. `step` counts optimizer steps, int32 scalar."""

    params: Params
    opt_state: Any
    step: jax.Array


class PendingMetrics:
    """The metrics of an update that may still be running."""

    def __init__(self, values, norms, sums: loss_metrics.Sums, group_names, tokens) -> None:
        self._values, self._norms, self._sums = values, norms, sums
        self._group_names, self._tokens = group_names, tokens

    def is_ready(self) -> bool:
        """Whether `read` returns at once."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves((self._norms, self._sums)))

    def read(self) -> dict[str, float]:
        """Flat metrics: objective, grad_norm (before clipping), update_norm, `loss_metrics.report`.

        Raises:
            FloatingPointError: gradient or update is not finite. The state is lost: go back to the
                last checkpoint.
        """
        values, norms, sums = jax.device_get((self._values, self._norms, self._sums))
        metrics = {"objective": math.fsum(float(value) for value in values)}
        metrics |= {name: float(value) for name, value in norms.items()}
        for name in ("grad_norm", "update_norm"):
            if not math.isfinite(metrics[name]):
                raise FloatingPointError(f"{name} {metrics[name]}")
        return metrics | loss_metrics.report(sums, self._group_names)

    def token_values(self) -> list[list[TokenValues]]:
        """Of every bucket of every micro-batch; nothing unless the update was called to record."""
        return jax.device_get(self._tokens)


class Update:
    """`update(state, batches, version=v, record=r) -> (state, metrics)`; see `make_update`."""

    def __init__(
        self,
        objective,
        loss: LossConfig,
        optimizer,
        mesh: Mesh,
        group_names,
        shapes: Params,
        masters: str,
    ) -> None:
        self._objective = objective
        self._loss = loss
        self._optimizer = optimizer
        self._mesh = mesh
        self._group_names = group_names
        self._dtypes = jax.tree_util.tree_map_with_path(
            lambda path, _: jnp.float32 if path[-1].key in FLOAT32 else jnp.dtype(masters), shapes
        )
        self._shapes = shapes
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._shardings = param_shardings(mesh, shapes)
        self._state_shardings = self._shardings_of_state(shapes)
        self._zeros = jax.jit(
            lambda params: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params),
            out_shardings=self._shardings,
        )
        # placed like what comes back, or the second micro-batch would compile anew
        self._no_sums = jax.jit(
            functools.partial(loss_metrics.no_sums, len(group_names)),
            out_shardings=self._replicated,
        )
        self._accumulate = jax.jit(
            self._accumulate_one,
            donate_argnums=(1, 2),
            out_shardings=(
                self._shardings,
                self._replicated,
                self._replicated,
                batch_sharding(mesh),  # token values, if there are any
            ),
        )
        self._gather = jax.jit(lambda tokens: tokens, out_shardings=self._replicated)
        self._apply = jax.jit(
            self._apply_grads,
            donate_argnums=(0,),
            out_shardings=(self._state_shardings, self._replicated),
        )

    @property
    def num_shards(self) -> int:
        """Devices along the mesh's data axes: `pack(..., num_shards=)`."""
        return num_data_shards(self._mesh)

    def init(self, params: Params) -> TrainState:
        """The state before the first update, placed on the mesh."""
        placed = place(params, self._shardings)
        return jax.jit(self._fresh, out_shardings=self._state_shardings)(placed)

    def _fresh(self, params: Params) -> TrainState:
        opt_state = self._optimizer.init(_in_float32(params))
        params = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, self._dtypes)
        return TrainState(params=params, opt_state=opt_state, step=jnp.zeros((), jnp.int32))

    def abstract_state(self) -> TrainState:
        """The state without its arrays: shapes, dtypes and shardings."""
        return _abstract(jax.eval_shape(self._fresh, self._shapes), self._state_shardings)

    def lower(self, batch: Batch) -> dict[str, jax.stages.Lowered]:
        """Both programs of an update, for a batch of arrays or of shapes; nothing is computed."""
        state = self.abstract_state()
        grads = _abstract(jax.eval_shape(_in_float32, self._shapes), self._shardings)
        sums = jax.eval_shape(self._no_sums)
        sums = _abstract(sums, jax.tree.map(lambda _: self._replicated, sums))
        placed = _abstract(batch, batch_placement(self._mesh, batch))
        scalars = Scalars(np.int32(0), np.float32(1))
        return {
            "accumulate": self._accumulate.lower(state.params, grads, sums, placed, scalars),
            "apply": self._apply.lower(state, grads),
        }

    def _shardings_of_state(self, shapes: Params) -> Any:
        opt_state = optax.tree_utils.tree_map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._optimizer.init, shapes),
            self._shardings,
            transform_non_params=lambda _: self._replicated,
        )
        step: Any = self._replicated
        return TrainState(params=self._shardings, opt_state=opt_state, step=step)

    def _accumulate_one(self, params, grads, sums, batch: Batch, scalars: Scalars):
        def cost(params):
            value, aux = self._objective(params, batch, scalars)
            return -value, aux

        (value, (new_sums, tokens)), new_grads = jax.value_and_grad(cost, has_aux=True)(params)
        grads = jax.tree.map(jnp.add, grads, _in_float32(new_grads))
        return grads, loss_metrics.merge(sums, new_sums), -value, tokens

    def _apply_grads(self, state: TrainState, grads: Params):
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            params = _in_float32(state.params)
            updates, opt_state = self._optimizer.update(grads, state.opt_state, params)
        params = round_at_random(optax.apply_updates(params, updates), self._dtypes, state.step)
        norms = {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), norms

    def __call__(
        self, state: TrainState, batches: Sequence[Batch], *, version: int, record: bool = False
    ) -> tuple[TrainState, PendingMetrics]:
        """Dispatches one optimizer step. `state` is donated: its arrays are gone afterwards.

        Args:
            batches: all micro-batches of the update (numpy), as `pack` makes them.
            version: the policy version that `state.params` is; staleness is relative to it.
            record: gather what this update makes of every token; only with `keep_tokens`.

        Returns:
            the new state and its metrics, both possibly still being computed.

        Raises:
            BadInputError: no trained token.
        """
        denominator = self._denominator(batches)
        grads = self._zeros(state.params)
        sums = self._no_sums()
        scalars = Scalars(np.int32(version), np.float32(denominator))
        values, recorded = [], []
        for batch in batches:
            placed = place(batch, batch_placement(self._mesh, batch))
            grads, sums, value, tokens = self._accumulate(
                state.params, grads, sums, placed, scalars
            )
            values.append(value)
            if record:
                recorded.append(self._gather(tokens))
        state, norms = self._apply(state, grads)
        return state, PendingMetrics(values, norms, sums, self._group_names, recorded)

    def _denominator(self, batches: Sequence[Batch]) -> float:
        num_tokens = sum(batch.num_tokens for batch in batches)
        if not num_tokens:
            raise BadInputError("update", expected="at least one trained token", found="none")
        if self._loss.reduction == "constant":
            assert self._loss.constant is not None
            return self._loss.constant
        if self._loss.reduction == "sequence-mean":
            return sum(batch.num_sequences for batch in batches)
        return num_tokens


def _abstract(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def round_at_random(tree: Any, dtypes: Any, step: jax.Array) -> Any:
    """Float32 leaves in the dtypes given: bfloat16 up or down, each with the probability that makes
    the mean right. The same step gives the same random numbers.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), len(leaves))
    rounded = [
        _round_at_random(leaf, key) if dtype == jnp.bfloat16 else leaf
        for leaf, dtype, key in zip(leaves, jax.tree.leaves(dtypes), keys, strict=True)
    ]
    return jax.tree.unflatten(structure, rounded)


def _round_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    moved = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), moved, x).astype(jnp.bfloat16)


def make_update(  # noqa: PLR0913
    config: ModelConfig,
    loss: LossConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    group_names: Sequence[str],
    temperature: float = 1.0,
    compute: ComputeConfig = EXACT,
    freeze_router: bool = False,
    masters: Literal["float32", "bfloat16"] = "float32",
    keep_tokens: bool = False,
) -> Update:
    """The update function of a run.

    Args:
        optimizer: minimizes; clipping belongs into it.
        group_names: sampler groups in the order of `RecordRules.group_names`.
        temperature: of sampling; the policy that is trained is the one at this temperature.
        freeze_router: keep the router's weights as they are.
        masters: what parameters are kept in; bfloat16 is rounded at random. Moments and gradients
            are float32.
        keep_tokens: whether an update can be called to record what it makes of every token.

    Raises:
        BadInputError: a band for a group that does not exist.
    """
    objective = functools.partial(
        batch_objective,
        config=config,
        mesh=mesh,
        loss=loss,
        group_names=tuple(group_names),
        temperature=temperature,
        compute=compute,
        keep_tokens=keep_tokens,
    )
    loss.log_bands(tuple(group_names))  # refuses now rather than in the first update
    if freeze_router:
        optimizer = with_frozen_router(optimizer)
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return Update(objective, loss, optimizer, mesh, tuple(group_names), shapes, masters)


def with_frozen_router(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer without the router: not in the clipped norm, not moved by weight decay."""

    def zeroed(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.zeros_like(leaf) if path[-1].key == "router" else leaf, tree
        )

    def update(updates, state, params=None):
        updates, state = optimizer.update(zeroed(updates), state, params)
        return zeroed(updates), state

    return optax.GradientTransformation(optimizer.init, update)


def num_data_shards(mesh: Mesh) -> int:
    """Devices that rows of a batch are spread over."""
    axes = batch_sharding(mesh).spec[0]
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def batch_placement(mesh: Mesh, batch: Batch) -> Batch:
    """A sharding for every array of a batch: the leading axis over the data axes."""
    rows = PartitionSpec(batch_sharding(mesh).spec[0])
    placement = jax.tree.map(lambda _: NamedSharding(mesh, rows), batch)
    whole = NamedSharding(mesh, PartitionSpec())
    tokens: Any = token_sharding(mesh)
    return Batch(
        tokens_BxR=tokens,
        positions_BxR=tokens,
        segments_BxR=tokens,
        routed_experts_BxRxLxX=None if batch.routed_experts_BxRxLxX is None else tokens,
        num_trained_M=whole,  # pyright: ignore[reportArgumentType]
        origin_M=whole,  # pyright: ignore[reportArgumentType]
        buckets=placement.buckets,
    )
