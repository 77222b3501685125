"""The surrogate objective of one micro-batch: model, head and loss put together.

Owns what the head is asked for and what the loss is told of a token, the coupling of a trajectory's
tokens, and what becomes of each token beside its gradient. Must not differentiate, know optimizers,
or read trajectories.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from trainer_jax import loss_metrics
from trainer_jax.batch import Batch, TokenBucket
from trainer_jax.head import CandidateLogits, Part, candidate_logits, token_sum
from trainer_jax.loss import LogBand, SamplerRecord, position_of, token_objective
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import BATCH_AXES, by_data_shard
from trainer_jax.models import on_mesh
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import Params


class _Token(NamedTuple):
    """What the objective knows of a bucket's tokens beside their logits, each [S, N]."""

    record: SamplerRecord
    drawn: jax.Array  # the token drawn, -1 where masked
    num_trained: jax.Array  # tokens of its trajectory
    mean_log_ratio: jax.Array | None  # over its trajectory
    group: jax.Array


class TokenValues(NamedTuple):
    """What an update made of a bucket's tokens, each [S, N]; of free slots it means nothing."""

    trainer_logp: jax.Array
    masked: jax.Array  # bool, weight 0: outside the band, or dropped with its trajectory


class Scalars(NamedTuple):
    """What differs between updates, as arrays, so that nothing recompiles."""

    version: Any  # int32, the trainer's
    denominator: Any  # float32


def batch_objective(  # noqa: PLR0913  (bound once, in trainer_jax.step)
    params: Params,
    batch: Batch,
    scalars: Scalars,
    *,
    config: ModelConfig,
    mesh: Mesh,
    loss: LossConfig,
    group_names: tuple[str, ...],
    temperature: float,
    compute: ComputeConfig,
    keep_tokens: bool,
) -> tuple[jax.Array, tuple[loss_metrics.Sums, list[TokenValues | None]]]:
    """The surrogate of one micro-batch over the update's denominator, the metrics' sums, and of
    each bucket what became of its tokens if they are kept."""
    seams = None
    if mesh.shape["data"] < mesh.size:
        seams = on_mesh.seams(config, compute, mesh, BATCH_AXES)
    model = by_data_shard(
        lambda params, *rows: hidden_states(params, config, *rows, compute=compute, seams=seams),
        mesh,
    )
    rows = [batch.tokens_BxR, batch.positions_BxR, batch.segments_BxR]
    if batch.routed_experts_BxRxLxX is not None:
        rows.append(batch.routed_experts_BxRxLxX)
    hidden_BxRxD = model(params, *rows)
    S = batch.buckets[0].mask_SxN.shape[0]
    hidden_SxLxD = hidden_BxRxD.reshape(S, -1, hidden_BxRxD.shape[-1])
    head_VxD = head_weight(params, compute=compute)
    if seams:
        head_VxD = seams.whole(head_VxD)
    parts = [_ask(bucket, hidden_SxLxD, batch.num_trained_M, loss) for bucket in batch.buckets]
    if loss.importance == "sequence" or loss.off_policy_limit is not None:
        parts = _with_mean_log_ratio(parts, batch, head_VxD, loss, temperature)
    token_value = functools.partial(
        _token_value, loss=loss, group_names=group_names, keep=keep_tokens
    )
    total, seen = token_sum(
        token_value,
        head_VxD,
        parts,
        normalizer=not loss.replay,
        temperature=temperature,
    )
    sums = loss_metrics.no_sums(len(group_names))
    for bucket, (stats_SxN, _) in zip(batch.buckets, seen, strict=True):
        stats_T = jax.tree.map(jnp.ravel, stats_SxN)
        staleness_T = scalars.version - jnp.ravel(bucket.version_SxN)
        labels = loss_metrics.labels(jnp.ravel(bucket.group_SxN), staleness_T, len(group_names))
        sums = loss_metrics.merge(sums, loss_metrics.summarize(stats_T, labels, staleness_T))
    return total / scalars.denominator, (sums, [tokens for _, tokens in seen])


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
    out: CandidateLogits,
    token: _Token,
    *,
    loss: LossConfig,
    group_names: tuple[str, ...],
    keep: bool,
) -> tuple[jax.Array, tuple[loss_metrics.TokenStats, TokenValues | None]]:
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
    if not keep:
        return objective_T, (stats, None)
    at = position_of(logits_TxK, sampled_logit_T, out.normalizer_T, record)
    kept = TokenValues(
        trainer_logp=jax.lax.stop_gradient(at.trainer_logp_T), masked=stats.weight == 0
    )
    return objective_T, (stats, kept)


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
