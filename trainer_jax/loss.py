"""The corrected policy gradient: settings, the per-token estimator, and a dense entry point.

Owns the maths of docs/correction.md and nothing else. Must not know about models, meshes, files or
where records come from. The estimator, per token with `a` drawn from q:

    g = A * [ w(a) dlogp(a) - C ],    C = sum_v q(v) w(v) dlogp(v)  with centering, else 0

`token_objective` is a surrogate: every coefficient is a stop-gradient, so its value means little
and its gradient is g. What `C` needs of the vocabulary outside the recorded candidates K is known
without looking, because sum_v p dlogp = 0 and the tail is taken as q(v) = rho p(v).

Shape letters: T tokens, K candidates of a token (padded with id -1), V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from pydantic import Field, model_validator

from contracts.errors import BadInputError
from contracts.runfile import Section
from trainer_jax import loss_metrics

Importance = Literal["none", "masked", "truncated", "sequence"]
Reduction = Literal["token-mean", "sequence-mean", "constant"]

DEFAULT_ARM = "sc+mis+top-p"
TAIL_FLOOR = 1e-6

_MIS = {"importance": "masked", "ratio_low": 0.2, "ratio_high": 5.0}
_TIS = {"importance": "truncated", "ratio_high": 2.0}
# The clip of GSPO (arXiv 2507.18071) is on a length-normalized ratio, hence this narrow.
_GSPO = {
    "importance": "sequence",
    "ratio_low": 1 - 3e-4,
    "ratio_high": 1 + 4e-4,
    "reduction": "sequence-mean",
}

# arm -> the settings it stands for; what a run file says beside `arm` wins.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo+mis": _MIS,
    "grpo+tis": _TIS,
    "grpo+top-p": {"replay": True},
    "sc": {"center": True},
    "sc+mis": {**_MIS, "center": True},
    "sc+mis+top-p": {**_MIS, "center": True, "replay": True},
    "gspo": _GSPO,
}
_ALIASES = {"mis": "grpo+mis", "tis": "grpo+tis"}


class Band(Section):
    """Bounds of the importance ratio; both are required, and 1 lies between them."""

    ratio_low: float = Field(gt=0, le=1)
    ratio_high: float = Field(ge=1, allow_inf_nan=False)


class LossConfig(Section):
    """[loss]: `arm` names a preset, any other key overrides what the preset says.

    ratio_low, ratio_high: the band of `masked` (both) and `sequence` (both, on the length-
    normalized ratio), the cap of `truncated` (high only). An `importance` that differs from the
    arm's takes no bounds from it. Without importance weighting they only serve the metrics.
    reduction: `token-mean` divides by all trained tokens of the global batch, `sequence-mean`
    averages trajectories' means, `constant` divides by `constant`.
    off_policy_limit: drop trajectories with A < 0 whose mean log(q/p) exceeds it (DeepSeek-V3.2).
    bands: sampler group -> its own band.
    """

    arm: str = DEFAULT_ARM
    importance: Importance = "none"
    ratio_low: float | None = Field(default=None, gt=0, le=1)
    ratio_high: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    center: bool = False
    replay: bool = False
    reduction: Reduction = "token-mean"
    constant: float | None = Field(default=None, gt=0)
    normalize_advantages: bool = False
    zero_variance: Literal["keep", "refill"] = "keep"
    off_policy_limit: float | None = Field(default=None, gt=0)
    bands: dict[str, Band] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _expand_arm(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        arm = data.get("arm", DEFAULT_ARM)
        arm = _ALIASES.get(arm, arm) if isinstance(arm, str) else arm
        if not isinstance(arm, str) or arm not in PRESETS:
            raise ValueError(f"an arm of {', '.join(PRESETS)}, not {arm!r}")
        preset = dict(PRESETS[arm])
        if data.get("importance", preset.get("importance")) != preset.get("importance"):
            preset = {key: value for key, value in preset.items() if not key.startswith("ratio_")}
        return {**preset, **data, "arm": arm}

    @model_validator(mode="after")
    def _composes(self) -> LossConfig:
        check_arm(self.importance, self.ratio_low, self.ratio_high, self.center)
        if self.center and self.off_policy_limit is not None:
            raise ValueError(
                "center without off_policy_limit: dropping a trajectory by the tokens it drew puts "
                "back the drift that centering removes"
            )
        if self.bands and self.importance != "masked":
            raise ValueError(f"bands with importance = 'masked', not {self.importance!r}")
        if (self.constant is not None) != (self.reduction == "constant"):
            raise ValueError("`constant` if and only if reduction = 'constant'")
        return self

    @property
    def band(self) -> Band:
        """The band that applies where no group overrides it; [0.2, 5] for metrics alone."""
        low, high = loss_metrics.REFERENCE_BAND
        return Band(ratio_low=self.ratio_low or low, ratio_high=self.ratio_high or high)

    def log_bands(self, group_names: tuple[str, ...]) -> np.ndarray:
        """log(low), log(high) of each sampler group, float32 [groups, 2].

        Raises:
            BadInputError: a band for a group that does not exist.
        """
        unknown = sorted(set(self.bands) - set(group_names))
        if unknown:
            raise BadInputError(
                "run file, loss.bands", expected=f"groups of {list(group_names)}", found=unknown
            )
        bands = [self.bands.get(name, self.band) for name in group_names]
        return np.log([[b.ratio_low, b.ratio_high] for b in bands]).astype(np.float32)


def check_arm(importance: str, low: float | None, high: float | None, center: bool) -> None:
    """Refuses an importance weight without its bounds, and what centering cannot repair.

    Raises:
        BadInputError: bounds missing or out of order, an unknown importance, centered GSPO.
    """
    if importance not in ("none", "masked", "truncated", "sequence"):
        raise BadInputError(
            "importance", expected="none, masked, truncated or sequence", found=repr(importance)
        )
    needed = {
        "ratio_low": importance in ("masked", "sequence") and low is None,
        "ratio_high": importance in ("masked", "sequence", "truncated") and high is None,
    }
    missing = [name for name, is_missing in needed.items() if is_missing]
    if missing:
        raise BadInputError(
            f"importance = {importance!r}", expected=" and ".join(missing), found="no value"
        )
    low, high = (0.0 if low is None else low), (math.inf if high is None else high)
    if not 0 <= low < high:
        raise BadInputError(
            "the band", expected="0 <= ratio_low < ratio_high", found=f"[{low}, {high}]"
        )
    if center and importance == "sequence":
        raise BadInputError(
            "score centering of a sequence-level weight",
            expected="a weight that depends on one token alone: C averages it over that token",
            found="importance = 'sequence'",
        )


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
    center: bool,
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
        center: subtract C, the sampler's expectation of the weighted score.
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
        centering_TxK = _centering(at, band, importance)
        objective_T -= (centering_TxK * at.trainer_logp_TxK).sum(1)
    stats = loss_metrics.token_stats(at, record.mask_T, weight_T, centering_TxK, band)
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
    """GSPO: the trajectory's ratio where min(s A, clip(s) A) has a gradient, else 0."""
    log_ratio_T = jax.lax.stop_gradient(log_ratio_T)
    clipped_T = jnp.where(advantage_T > 0, log_ratio_T > band.high_T, log_ratio_T < band.low_T)
    return jnp.where(clipped_T, 0.0, jnp.exp(jnp.where(clipped_T, 0.0, log_ratio_T)))


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
    center: bool,
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
        BadInputError: shapes that disagree, an empty batch, ids beyond the vocabulary, records that
            are not finite, a token missing from its replayed set, bounds missing or out of order,
            sequence-level importance (it needs to know which tokens form a trajectory).
    """
    check_arm(importance, ratio_low, ratio_high, center)
    if importance == "sequence":
        raise BadInputError(
            "objective_from_logits", expected="a weight of one token", found="importance='sequence'"
        )
    if not temperature > 0:
        raise BadInputError("temperature", expected="above 0", found=temperature)
    record = SamplerRecord(
        candidate_ids_TxK=jnp.asarray(candidate_ids_TxK),
        candidate_sampler_logp_TxK=jnp.asarray(candidate_sampler_logp_TxK),
        sampler_logp_T=jnp.asarray(sampler_logp_T),
        advantage_T=jnp.asarray(advantage_T),
        mask_T=jnp.asarray(mask_T).astype(bool),
    )
    logits_TxV, sampled_T = jnp.asarray(logits_TxV), jnp.asarray(sampled_T)
    _check_dense(logits_TxV, sampled_T, record, replay=replay, num_tokens=num_tokens)

    dtype = _compute_dtype(logits_TxV)
    logits_TxV = logits_TxV.astype(dtype) / jnp.asarray(temperature, dtype)
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


def _check_dense(logits_TxV, sampled_T, record: SamplerRecord, *, replay, num_tokens) -> None:
    shapes = {
        "logits_TxV": (logits_TxV, 2),
        "sampled_T": (sampled_T, 1),
        "candidate_ids_TxK": (record.candidate_ids_TxK, 2),
        "candidate_sampler_logp_TxK": (record.candidate_sampler_logp_TxK, 2),
        "sampler_logp_T": (record.sampler_logp_T, 1),
        "advantage_T": (record.advantage_T, 1),
        "mask_T": (record.mask_T, 1),
    }
    for name, (array, ndim) in shapes.items():
        if array.ndim != ndim or array.shape[0] != logits_TxV.shape[0]:
            raise BadInputError(
                name, expected=f"{ndim} dims, {logits_TxV.shape[0]} tokens", found=array.shape
            )
    if record.candidate_sampler_logp_TxK.shape != record.candidate_ids_TxK.shape:
        raise BadInputError(
            "candidate_sampler_logp_TxK",
            expected=f"the shape of the ids {record.candidate_ids_TxK.shape}",
            found=record.candidate_sampler_logp_TxK.shape,
        )
    if not len(sampled_T):
        raise BadInputError("batch", expected="at least one token", found="none")
    values = (sampled_T, num_tokens, *jax.tree.leaves(record))
    if not any(isinstance(value, Tracer) for value in values):
        if not num_tokens > 0:
            raise BadInputError("num_tokens", expected="above 0", found=num_tokens)
        _check_values(np.asarray(sampled_T), record, logits_TxV.shape[1], replay)


def _check_values(sampled_T: np.ndarray, record: SamplerRecord, V: int, replay: bool) -> None:
    ids_TxK, logp_TxK = (
        np.asarray(record.candidate_ids_TxK),
        np.asarray(record.candidate_sampler_logp_TxK),
    )
    mask_T, logp_T = np.asarray(record.mask_T), np.asarray(record.sampler_logp_T)
    in_set_T = (ids_TxK == sampled_T[:, None]).any(1)
    padding_TxK = ids_TxK < 0
    rules = (
        ("sampled token in the vocabulary", (sampled_T < 0) | (sampled_T >= V)),
        ("candidate ids in the vocabulary", ((ids_TxK >= V) | (ids_TxK < -1)).any(1)),
        ("finite sampler_logp", ~np.isfinite(logp_T)),
        ("finite candidate log-probs", (~padding_TxK & ~np.isfinite(logp_TxK)).any(1)),
        ("log-prob -inf at padding", (padding_TxK & ~np.isneginf(logp_TxK)).any(1)),
        ("finite advantage", ~np.isfinite(np.asarray(record.advantage_T))),
        ("the token drawn in its replayed set", ~in_set_T & replay),
    )
    for rule, broken_T in rules:
        rows = np.flatnonzero(broken_T & mask_T)
        if len(rows):
            t = int(rows[0])
            raise BadInputError(
                f"record of token {t}",
                expected=rule,
                found=f"token {sampled_T[t]}, sampler_logp {logp_T[t]}, ids {ids_TxK[t].tolist()}, "
                f"log-probs {logp_TxK[t].tolist()}",
            )
