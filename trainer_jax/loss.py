"""The corrected policy gradient: the per-token estimator, and a dense entry point.

Owns the maths of docs/correction.md and nothing else: settings are `trainer_jax.loss_config`'s.
Must not know about models, meshes, files or where records come from. The estimator, per token with
`a` drawn from q:

    g = A * [ w(a) dlogp(a) - C ],    C = sum_v q(v) w(v) dlogp(v)  with centering, else 0

`token_objective` is a surrogate: every coefficient is a stop-gradient, so its value means little
and its gradient is g. What `C` needs of the vocabulary outside the recorded candidates K is known
without looking, because sum_v p dlogp = 0 and the tail is taken as q(v) = rho p(v).

Shape letters: T tokens, K candidates of a token (padded with id -1), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from contracts.errors import BadInputError
from trainer_jax import loss_metrics
from trainer_jax.dense_checks import check_dense
from trainer_jax.inputs import array_of, check_flag, check_positive
from trainer_jax.loss_config import Center, Importance, check_arm

TAIL_FLOOR = 1e-6
_BANNED = -1e30  # stands for a logit of -inf: no mass in any float, and no NaN where it meets 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplerRecord:
    """What the samplers said about T tokens, and what the batch made of it.

    Rows with mask False may hold anything; they add nothing, neither to values nor to gradients.
    """

    candidate_ids_TxK: jax.Array  # int, -1 is padding
    candidate_sampler_logp_TxK: jax.Array  # -inf at padding
    sampler_logp_T: jax.Array  # of the token drawn, which may lie outside K
    advantage_T: jax.Array
    mask_T: jax.Array  # bool, trained tokens


class LogBand(NamedTuple):
    """Logarithms of the ratio bounds, each [T]."""

    low_T: jax.Array
    high_T: jax.Array


class Position(NamedTuple):
    """Both policies at T tokens. No field carries a gradient except the two trainer_logp."""

    valid_TxK: jax.Array
    trainer_logp_TxK: jax.Array  # 0 at padding
    trainer_logp_T: jax.Array  # of the token drawn; 0 where masked
    p_TxK: jax.Array
    q_TxK: jax.Array
    log_ratio_TxK: jax.Array  # log p - log q; 0 at padding
    log_ratio_T: jax.Array
    p_tail_T: jax.Array  # mass outside K; 0 under replay
    q_tail_T: jax.Array
    rho_T: jax.Array  # q_tail / p_tail


def position_of(
    logits_TxK: jax.Array,
    sampled_logit_T: jax.Array,
    normalizer_T: jax.Array | None,
    record: SamplerRecord,
) -> Position:
    """The two policies at each token; without a normalizer p lives on the candidates (replay)."""
    dtype = _compute_dtype(logits_TxK)
    mask_T = record.mask_T
    valid_TxK = mask_T[:, None] & (record.candidate_ids_TxK >= 0)
    logits_TxK = jnp.where(valid_TxK, logits_TxK.astype(dtype), 0.0)
    if normalizer_T is None:
        lse_T = _masked_logsumexp(logits_TxK, valid_TxK)
    else:
        lse_T = jnp.where(mask_T, normalizer_T.astype(dtype), 0.0)
    trainer_logp_TxK = jnp.where(valid_TxK, logits_TxK - lse_T[:, None], 0.0)
    trainer_logp_T = jnp.where(mask_T, sampled_logit_T.astype(dtype) - lse_T, 0.0)

    frozen_TxK = jax.lax.stop_gradient(trainer_logp_TxK)
    sampler_logp_TxK = record.candidate_sampler_logp_TxK.astype(dtype)
    p_TxK = jnp.where(valid_TxK, jnp.exp(frozen_TxK), 0.0)
    q_TxK = jnp.where(valid_TxK, jnp.exp(sampler_logp_TxK), 0.0)
    if normalizer_T is None:
        p_tail_T = q_tail_T = rho_T = jnp.zeros_like(lse_T)
    else:
        p_tail_T = jnp.where(mask_T, jnp.maximum(1 - p_TxK.sum(1), 0.0), 0.0)
        q_tail_T = jnp.where(mask_T, jnp.maximum(1 - q_TxK.sum(1), 0.0), 0.0)
        is_noise_T = p_tail_T <= 4 * jnp.finfo(dtype).eps
        rho_T = jnp.where(is_noise_T, 0.0, q_tail_T / jnp.maximum(p_tail_T, TAIL_FLOOR))
    drawn_T = jax.lax.stop_gradient(trainer_logp_T) - record.sampler_logp_T.astype(dtype)
    return Position(
        valid_TxK=valid_TxK,
        trainer_logp_TxK=trainer_logp_TxK,
        trainer_logp_T=trainer_logp_T,
        p_TxK=p_TxK,
        q_TxK=q_TxK,
        log_ratio_TxK=jnp.where(valid_TxK, frozen_TxK - sampler_logp_TxK, 0.0),
        log_ratio_T=jnp.where(mask_T, drawn_T, 0.0),
        p_tail_T=jax.lax.stop_gradient(p_tail_T),
        q_tail_T=q_tail_T,
        rho_T=jax.lax.stop_gradient(rho_T),
    )


def token_objective(
    logits_TxK: jax.Array,
    sampled_logit_T: jax.Array,
    normalizer_T: jax.Array | None,
    record: SamplerRecord,
    *,
    importance: Importance,
    band: LogBand,
    center: Center,
    sequence_log_ratio_T: jax.Array | None = None,
) -> tuple[jax.Array, loss_metrics.TokenStats]:
    """A surrogate to maximize, one value per token, whose gradient is the corrected estimate.

    Args:
        logits_TxK: trainer logits at the candidates, divided by the sampling temperature.
        sampled_logit_T: the same at the token drawn.
        normalizer_T: log-sum-exp of the logits over the vocabulary; None under mask replay, where
            the candidates are the whole support of both policies.
        record: the sampler's side.
        importance: the weight w. `sequence` (GSPO) takes exp of `sequence_log_ratio_T`, and drops
            the token when a PPO clip at the band would.
        band: bounds of the ratio, in logarithms.
        center: subtract C, the sampler's expectation of the weighted score; or the wrong one.
        sequence_log_ratio_T: mean of `position_of(...).log_ratio_T` over the token's trajectory.

    Returns:
        objective_T in float32 (float64 for float64 logits), 0 where masked; statistics per token.
    """
    at = position_of(logits_TxK, sampled_logit_T, normalizer_T, record)
    advantage_T = jnp.where(record.mask_T, record.advantage_T.astype(at.rho_T.dtype), 0.0)
    band = LogBand(*(bound.astype(at.rho_T.dtype) for bound in band))
    if importance == "sequence":
        assert sequence_log_ratio_T is not None and not center
        weight_T = _sequence_weight(sequence_log_ratio_T, advantage_T, band)
    else:
        weight_T = _weight(at.log_ratio_T, band, importance)
    weight_T = jnp.where(record.mask_T, weight_T, 0.0)
    objective_T = weight_T * at.trainer_logp_T
    centering_TxK = jnp.zeros_like(at.p_TxK)
    if center:
        centering_TxK = (
            weight_T[:, None] * _centering(at, band, "none")
            if center == "drawn"
            else _centering(at, band, importance)
        )
        objective_T -= (centering_TxK * at.trainer_logp_TxK).sum(1)
    rejected = _rejected(at, band, importance, sequence_log_ratio_T, advantage_T)
    stats = loss_metrics.token_stats(at, record.mask_T, weight_T, centering_TxK, rejected)
    return advantage_T * objective_T, stats


def _compute_dtype(logits: jax.Array) -> Any:
    return jnp.float64 if logits.dtype == jnp.float64 else jnp.float32


def _masked_logsumexp(logits_TxK: jax.Array, valid_TxK: jax.Array) -> jax.Array:
    """Over the valid entries; 0 for a row without any."""
    top_T = jax.lax.stop_gradient(
        jnp.where(valid_TxK, logits_TxK, -jnp.inf).max(1, initial=-jnp.inf)
    )
    top_T = jnp.where(jnp.isneginf(top_T), 0.0, top_T)
    mass_T = jnp.where(valid_TxK, jnp.exp(jnp.where(valid_TxK, logits_TxK - top_T[:, None], 0)), 0)
    total_T = mass_T.sum(1)
    return top_T + jnp.log(jnp.where(total_T > 0, total_T, 1.0))


def _inside(log_ratio: jax.Array, band: LogBand) -> jax.Array:
    return (band.low_T <= log_ratio) & (log_ratio <= band.high_T)


def _weight(log_ratio_T: jax.Array, band: LogBand, importance: Importance) -> jax.Array:
    """w of the token drawn."""
    if importance == "none":
        return jnp.ones_like(log_ratio_T)
    if importance == "truncated":
        return jnp.exp(jnp.minimum(log_ratio_T, band.high_T))
    kept_T = _inside(log_ratio_T, band)
    # a rejected ratio is replaced before exp: 0 * inf is not 0
    return jnp.where(kept_T, jnp.exp(jnp.where(kept_T, log_ratio_T, 0.0)), 0.0)


def _sequence_weight(log_ratio_T: jax.Array, advantage_T: jax.Array, band: LogBand) -> jax.Array:
    """GSPO: the trajectory's ratio where it is not clipped, else 0."""
    log_ratio_T = jax.lax.stop_gradient(log_ratio_T)
    clipped_T = _clipped(log_ratio_T, advantage_T, band)
    return jnp.where(clipped_T, 0.0, jnp.exp(jnp.where(clipped_T, 0.0, log_ratio_T)))


def _clipped(log_ratio_T: jax.Array, advantage_T: jax.Array, band: LogBand) -> jax.Array:
    """Where min(s A, clip(s) A) has no gradient though A is not 0."""
    too_high_T = (advantage_T > 0) & (log_ratio_T > band.high_T)
    return too_high_T | ((advantage_T < 0) & (log_ratio_T < band.low_T))


def _rejected(
    at: Position,
    band: LogBand,
    importance: Importance,
    sequence_log_ratio_T: jax.Array | None,
    advantage_T: jax.Array,
) -> loss_metrics.Rejected:
    """What the weight turns away; the table is in `loss_metrics`."""
    out_of_band_T = ~_inside(at.log_ratio_T, band)
    dropped_T = masked_tail_T = jnp.zeros_like(out_of_band_T)
    masked_TxK = jnp.zeros_like(at.valid_TxK)
    if importance == "masked":
        masked_TxK = ~_inside(at.log_ratio_TxK, LogBand(band.low_T[:, None], band.high_T[:, None]))
        masked_tail_T = ~_inside(-jnp.log(at.rho_T), band)
    elif importance == "truncated":
        out_of_band_T = at.log_ratio_T > band.high_T
    elif importance == "sequence":
        assert sequence_log_ratio_T is not None
        out_of_band_T = ~_inside(sequence_log_ratio_T, band)
        dropped_T = _clipped(sequence_log_ratio_T, advantage_T, band)
    return loss_metrics.Rejected(out_of_band_T, dropped_T, masked_TxK, masked_tail_T)


def _weighted_mass(p, q, log_ratio, band: LogBand, importance: Importance) -> jax.Array:
    """q * w(p / q), without forming the ratio."""
    if importance == "none":
        return q
    if importance == "truncated":
        return jnp.minimum(p, jnp.where(q > 0, jnp.exp(band.high_T) * q, 0.0))
    return jnp.where(_inside(log_ratio, band), p, 0.0)


def _centering(at: Position, band: LogBand, importance: Importance) -> jax.Array:
    """c_TxK with C = sum_K c dlogp.

    The tail's share of C is t * sum_{not K} p dlogp = -t * sum_K p dlogp, where t is q w / p there:
    a constant, because the ratio is 1 / rho on the whole tail.
    """
    # rho = 0 (an empty tail) has log-ratio +inf: outside every band, and min(1, 0) under a cap
    log_tail_ratio_T = -jnp.log(at.rho_T)
    one_T = jnp.ones_like(at.rho_T)
    tail_T = _weighted_mass(one_T, at.rho_T, log_tail_ratio_T, band, importance)
    wide = LogBand(band.low_T[:, None], band.high_T[:, None])
    inner_TxK = _weighted_mass(at.p_TxK, at.q_TxK, at.log_ratio_TxK, wide, importance)
    return jnp.where(at.valid_TxK, inner_TxK - tail_T[:, None] * at.p_TxK, 0.0)


def objective_from_logits(  # noqa: PLR0913  the whole record of a token, for other trainers
    logits_TxV,
    sampled_T,
    candidate_ids_TxK,
    candidate_sampler_logp_TxK,
    sampler_logp_T,
    advantage_T,
    mask_T,
    *,
    importance: Importance,
    ratio_low: float | None,
    ratio_high: float | None,
    center: Center,
    replay: bool,
    temperature: float = 1.0,
    num_tokens: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The objective from dense logits: for tests, notebooks and other trainers.

    Routed through `token_objective`, as training is. K is padded with id -1 and log-prob -inf.
    `objective` is to be maximized; its gradient with respect to the logits is the estimate summed
    over tokens and divided by `num_tokens`. Differentiable under jit and grad; records are checked
    when they are concrete arrays. Computes in float32, or in float64 for float64 logits.

    Returns:
        objective (scalar), metrics by name (scalars, see `loss_metrics.finalize`).

    Raises:
        BadInputError: settings of another kind or out of range, shapes or dtypes that do not fit,
            values that `check_dense` refuses; sequence-level importance (it needs to know which
            tokens form a trajectory).
    """
    _check_settings(importance, ratio_low, ratio_high, center, replay)
    check_positive("temperature", temperature)
    check_positive("num_tokens", num_tokens)
    record = SamplerRecord(
        candidate_ids_TxK=array_of("candidate_ids_TxK", candidate_ids_TxK, "integers"),
        candidate_sampler_logp_TxK=array_of(
            "candidate_sampler_logp_TxK", candidate_sampler_logp_TxK, "floating-point numbers"
        ),
        sampler_logp_T=array_of("sampler_logp_T", sampler_logp_T, "floating-point numbers"),
        advantage_T=array_of("advantage_T", advantage_T, "real numbers"),
        mask_T=array_of("mask_T", mask_T, "booleans"),
    )
    logits_TxV = array_of("logits_TxV", logits_TxV, "floating-point numbers")
    sampled_T = array_of("sampled_T", sampled_T, "integers")
    check_dense(logits_TxV, sampled_T, record, replay=replay)
    record = replace(record, mask_T=record.mask_T.astype(bool))

    dtype = _compute_dtype(logits_TxV)
    logits_TxV = logits_TxV.astype(dtype) / jnp.asarray(temperature, dtype)
    logits_TxV = jnp.where(jnp.isneginf(logits_TxV), _BANNED, logits_TxV)
    # masked rows may hold anything, also what has no gradient
    logits_TxV = jnp.where(record.mask_T[:, None], logits_TxV, 0.0)
    safe_TxK = jnp.clip(record.candidate_ids_TxK, 0, logits_TxV.shape[1] - 1)
    safe_T = jnp.clip(sampled_T, 0, logits_TxV.shape[1] - 1)
    bounds = zip((ratio_low, ratio_high), loss_metrics.REFERENCE_BAND, strict=True)
    with np.errstate(divide="ignore"):
        log_bounds = [np.log(default if bound is None else bound) for bound, default in bounds]
    normalizer_T = None if replay else jax.nn.logsumexp(logits_TxV, axis=1)
    objective_T, stats = token_objective(
        jnp.take_along_axis(logits_TxV, safe_TxK, axis=1),
        jnp.take_along_axis(logits_TxV, safe_T[:, None], axis=1)[:, 0],
        normalizer_T,
        record,
        importance=importance,
        band=LogBand(*(jnp.full(len(sampled_T), bound, dtype) for bound in log_bounds)),
        center=center,
    )
    if normalizer_T is not None:
        trainer_logp_TxV = jax.lax.stop_gradient(logits_TxV - normalizer_T[:, None])
        entropy_T = -(jnp.exp(trainer_logp_TxV) * trainer_logp_TxV).sum(1)
        stats = loss_metrics.with_entropy(stats, entropy_T)
    sums = loss_metrics.summarize(stats, jnp.ones((len(sampled_T), 1), bool))
    metrics = {name: value[0] for name, value in loss_metrics.finalize(sums).items()}
    return objective_T.sum() / jnp.asarray(num_tokens, dtype), metrics


def _check_settings(importance, ratio_low, ratio_high, center, replay) -> None:
    if center != "drawn":
        check_flag("center", center)
    check_flag("replay", replay)
    check_arm(importance, ratio_low, ratio_high, bool(center))
    if importance == "sequence":
        raise BadInputError(
            "objective_from_logits", expected="a weight of one token", found="importance='sequence'"
        )
