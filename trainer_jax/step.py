"""One optimizer step over the micro-batches of one update.

Owns the training state and the jitted functions: forward, corrected loss, backward, accumulation,
update. Must not read trajectories, write files, or decide when an update happens.

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
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from contracts.errors import BadInputError
from trainer_jax import loss_metrics
from trainer_jax.batch import Batch, TokenBucket
from trainer_jax.head import CandidateLogits, Part, candidate_logits, token_sum
from trainer_jax.loss import LogBand, LossConfig, SamplerRecord, position_of, token_objective
from trainer_jax.mesh import (
    BATCH_AXES,
    batch_sharding,
    by_data_shard,
    param_shardings,
    place,
    token_sharding,
)
from trainer_jax.models import on_mesh
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import FLOAT32, Params, init_params

EXACT = ComputeConfig()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What an update changes. `step` counts optimizer steps, int32 scalar."""

    params: Params
    opt_state: Any
    step: jax.Array


class _Token(NamedTuple):
    """What the objective knows of a bucket's tokens beside their logits, each [S, N]."""

    record: SamplerRecord
    drawn: jax.Array  # the token drawn, -1 where masked
    num_trained: jax.Array  # tokens of its trajectory
    mean_log_ratio: jax.Array | None  # over its trajectory
    group: jax.Array


class _Scalars(NamedTuple):
    """What differs between updates, as arrays, so that nothing recompiles."""

    version: Any  # int32, the trainer's
    denominator: Any  # float32


class PendingMetrics:
    """The metrics of an update that may still be running."""

    def __init__(self, values, norms, sums: loss_metrics.Sums, group_names) -> None:
        self._values, self._norms, self._sums = values, norms, sums
        self._group_names = group_names

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


class Update:
    """`update(state, batches, version=v) -> (state, metrics)`; see `make_update`."""

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
            out_shardings=(self._shardings, self._replicated, self._replicated),
        )
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
        scalars = _Scalars(np.int32(0), np.float32(1))
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

    def _accumulate_one(self, params, grads, sums, batch: Batch, scalars: _Scalars):
        def cost(params):
            value, aux = self._objective(params, batch, scalars)
            return -value, aux

        (value, new_sums), new_grads = jax.value_and_grad(cost, has_aux=True)(params)
        grads = jax.tree.map(jnp.add, grads, _in_float32(new_grads))
        return grads, loss_metrics.merge(sums, new_sums), -value

    def _apply_grads(self, state: TrainState, grads: Params):
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            params = _in_float32(state.params)
            updates, opt_state = self._optimizer.update(grads, state.opt_state, params)
        params = round_at_random(optax.apply_updates(params, updates), self._dtypes, state.step)
        norms = {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), norms

    def __call__(
        self, state: TrainState, batches: Sequence[Batch], *, version: int
    ) -> tuple[TrainState, PendingMetrics]:
        """Dispatches one optimizer step. `state` is donated: its arrays are gone afterwards.

        Args:
            batches: all micro-batches of the update (numpy), as `pack` makes them.
            version: the policy version that `state.params` is; staleness is relative to it.

        Returns:
            the new state and its metrics, both possibly still being computed.

        Raises:
            BadInputError: no trained token.
        """
        denominator = self._denominator(batches)
        grads = self._zeros(state.params)
        sums = self._no_sums()
        scalars = _Scalars(np.int32(version), np.float32(denominator))
        values = []
        for batch in batches:
            placed = place(batch, batch_placement(self._mesh, batch))
            grads, sums, value = self._accumulate(state.params, grads, sums, placed, scalars)
            values.append(value)
        state, norms = self._apply(state, grads)
        return state, PendingMetrics(values, norms, sums, self._group_names)

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
) -> Update:
    """The update function of a run.

    Args:
        optimizer: minimizes; clipping belongs into it.
        group_names: sampler groups in the order of `RecordRules.group_names`.
        temperature: of sampling; the policy that is trained is the one at this temperature.
        freeze_router: keep the router's weights as they are.
        masters: what parameters are kept in; bfloat16 is rounded at random. Moments and gradients
            are float32.

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
    )
    loss.log_bands(tuple(group_names))  # refuses now rather than in the first update
    if freeze_router:
        optimizer = with_frozen_router(optimizer)
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return Update(objective, loss, optimizer, mesh, tuple(group_names), shapes, masters)


def batch_objective(  # noqa: PLR0913  (bound once, in make_update)
    params: Params,
    batch: Batch,
    scalars: _Scalars,
    *,
    config: ModelConfig,
    mesh: Mesh,
    loss: LossConfig,
    group_names: tuple[str, ...],
    temperature: float,
    compute: ComputeConfig,
) -> tuple[jax.Array, loss_metrics.Sums]:
    """The surrogate of one micro-batch over the update's denominator, and the metrics' sums."""
    seams = None
    if mesh.shape["data"] < mesh.size:
        seams = on_mesh.seams(config, compute, mesh, BATCH_AXES)
    model = by_data_shard(
        lambda params, *rows: hidden_states(params, config, *rows, compute=compute, seams=seams),
        mesh,
    )
    hidden_BxRxD = model(params, batch.tokens_BxR, batch.positions_BxR, batch.segments_BxR)
    S = batch.buckets[0].mask_SxN.shape[0]
    hidden_SxLxD = hidden_BxRxD.reshape(S, -1, hidden_BxRxD.shape[-1])
    head_VxD = head_weight(params, compute=compute)
    if seams:
        head_VxD = seams.whole(head_VxD)
    parts = [_ask(bucket, hidden_SxLxD, batch.num_trained_M, loss) for bucket in batch.buckets]
    if loss.importance == "sequence" or loss.off_policy_limit is not None:
        parts = _with_mean_log_ratio(parts, batch, head_VxD, loss, temperature)
    total, stats = token_sum(
        functools.partial(_token_value, loss=loss, group_names=group_names),
        head_VxD,
        parts,
        normalizer=not loss.replay,
        temperature=temperature,
    )
    sums = loss_metrics.no_sums(len(group_names))
    for bucket, stats_SxN in zip(batch.buckets, stats, strict=True):
        stats_T = jax.tree.map(jnp.ravel, stats_SxN)
        staleness_T = scalars.version - jnp.ravel(bucket.version_SxN)
        labels = loss_metrics.labels(jnp.ravel(bucket.group_SxN), staleness_T, len(group_names))
        sums = loss_metrics.merge(sums, loss_metrics.summarize(stats_T, labels, staleness_T))
    return total / scalars.denominator, sums


def _ask(bucket: TokenBucket, hidden_SxLxD, num_trained_M, loss: LossConfig) -> Part:
    """What the head is asked. Without replay the token drawn may lie outside K: one more id."""
    ids_SxNxK = jnp.asarray(bucket.candidate_ids_SxNxK)
    drawn_SxN = jnp.where(bucket.mask_SxN, bucket.sampled_SxN, -1)
    more = [] if loss.replay else [drawn_SxN[:, :, None]]
    return Part(
        hidden_SxTxD=jnp.take_along_axis(hidden_SxLxD, bucket.position_SxN[:, :, None], axis=1),
        candidate_ids_SxTxK=jnp.concatenate([ids_SxNxK, *more], axis=2),
        tokens=_Token(
            record=SamplerRecord(
                candidate_ids_TxK=ids_SxNxK,
                candidate_sampler_logp_TxK=jnp.asarray(bucket.candidate_sampler_logp_SxNxK),
                sampler_logp_T=jnp.asarray(bucket.sampler_logp_SxN),
                advantage_T=jnp.asarray(bucket.advantage_SxN),
                mask_T=jnp.asarray(bucket.mask_SxN),
            ),
            drawn=drawn_SxN,
            num_trained=jnp.asarray(num_trained_M)[bucket.trajectory_SxN],
            mean_log_ratio=None,
            group=jnp.asarray(bucket.group_SxN),
        ),
    )


def _logits_of(out: CandidateLogits, token: _Token) -> tuple[jax.Array, jax.Array]:
    """Logits at the candidates, and at the token drawn."""
    if out.normalizer_T is not None:
        return out.logits_TxK[:, :-1], out.logits_TxK[:, -1]
    is_drawn_TxK = token.record.candidate_ids_TxK == token.drawn[:, None]
    return out.logits_TxK, jnp.where(is_drawn_TxK, out.logits_TxK, 0.0).sum(1)


def _token_value(
    out: CandidateLogits, token: _Token, *, loss: LossConfig, group_names: tuple[str, ...]
) -> tuple[jax.Array, loss_metrics.TokenStats]:
    """The objective of each token alone: everything that couples tokens is already in `token`."""
    dropped_T = _off_policy(token, loss.off_policy_limit)
    record = _without(token.record, dropped_T)
    logits_TxK, sampled_logit_T = _logits_of(out, token)
    objective_T, stats = token_objective(
        logits_TxK,
        sampled_logit_T,
        out.normalizer_T,
        record,
        importance=loss.importance,
        band=LogBand(*jnp.asarray(loss.log_bands(group_names))[token.group].T),
        center=loss.center,
        sequence_log_ratio_T=token.mean_log_ratio,
    )
    if out.entropy_T is not None:
        stats = loss_metrics.with_entropy(stats, out.entropy_T)
    stats = loss_metrics.with_trajectories(stats, token.num_trained, dropped_T)
    if loss.reduction == "sequence-mean":
        objective_T /= jnp.maximum(token.num_trained, 1.0)
    return objective_T, stats


def _with_mean_log_ratio(
    parts: list[Part], batch: Batch, head_VxD, loss: LossConfig, temperature: float
) -> list[Part]:
    """Mean of log p/q over each trajectory's trained tokens, from a pass without a gradient."""
    totals_M = jnp.zeros(batch.num_trained_M.shape, jnp.float32)
    for bucket, part in zip(batch.buckets, parts, strict=True):
        hidden_SxNxD, head = jax.lax.stop_gradient((part.hidden_SxTxD, head_VxD))
        out = candidate_logits(
            hidden_SxNxD, head, part.candidate_ids_SxTxK,
            normalizer=not loss.replay, temperature=temperature,
        )  # fmt: skip
        at = jax.vmap(
            lambda out, token: position_of(*_logits_of(out, token), out.normalizer_T, token.record)
        )(out, part.tokens)
        totals_M = totals_M.at[bucket.trajectory_SxN].add(at.log_ratio_T)
    mean_M = totals_M / jnp.maximum(jnp.asarray(batch.num_trained_M), 1.0)
    return [
        part._replace(tokens=part.tokens._replace(mean_log_ratio=mean_M[bucket.trajectory_SxN]))
        for bucket, part in zip(batch.buckets, parts, strict=True)
    ]


def _off_policy(token: _Token, limit: float | None) -> jax.Array | None:
    """Whether a token's trajectory has A < 0 and is too unlikely for the trainer."""
    if limit is None:
        return None
    assert token.mean_log_ratio is not None
    return (token.record.advantage_T < 0) & (-token.mean_log_ratio > limit)


def _without(record: SamplerRecord, dropped_T: jax.Array | None) -> SamplerRecord:
    """What is dropped teaches nothing: advantage 0."""
    if dropped_T is None:
        return record
    return SamplerRecord(
        candidate_ids_TxK=record.candidate_ids_TxK,
        candidate_sampler_logp_TxK=record.candidate_sampler_logp_TxK,
        sampler_logp_T=record.sampler_logp_T,
        advantage_T=jnp.where(dropped_T, 0.0, record.advantage_T),
        mask_T=record.mask_T,
    )


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
        num_trained_M=whole,  # pyright: ignore[reportArgumentType]
        buckets=placement.buckets,
    )
