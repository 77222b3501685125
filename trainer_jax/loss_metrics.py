"""What a user needs to know about the mismatch between samplers and trainer.

Owns the statistics of the loss: per token, summed over micro-batches by label, and their names.
Must not influence the gradient. Sums, not means, travel between micro-batches, so that any split of
a batch reports the same.

What a rejected token is follows the arm's weight w:

| importance | out of band | masked mass | dropped |
|---|---|---|---|
| masked | r below low or above high: w = 0 | of q and of p there | no |
| truncated | r above high: w = high | 0 | no |
| none | r outside the band, which nothing applies | 0 | no |
| sequence | its trajectory's ratio below low or above high | 0 | where PPO's clip has no gradient |

`off_policy_limit` drops trajectories under any of them. A dropped token has weight 0 and no
gradient, so it counts so in `weight_mean` and `ess`; its KL and ratios are reported all the same.

Labels: column 0 is every token, then one column per sampler group, then one per staleness bucket.
Shape letters: T tokens, K candidates, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from trainer_jax.loss import Position

REFERENCE_BAND = (0.2, 5.0)
# log-ratios are clamped here before exp, so that one absurd token is seen and the rest is too
LOG_RATIO_LIMIT = 20.0
# staleness (trainer version minus the token's) of a bucket is below the next bucket's first value
STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16)
STALENESS_NAMES = ("0", "1", "2-3", "4-7", "8-15", "16+")


class TokenStats(NamedTuple):
    """Per token, all [T]; 0 where masked. Sums of these are what `summarize` keeps."""

    tokens: jax.Array  # 1
    kl: jax.Array  # KL(q || p) over the candidates and the tail as one lump
    k3: jax.Array  # the same from the token drawn: r - 1 - log r
    ratio: jax.Array
    abs_dlogp: jax.Array
    out_of_band: jax.Array  # see the table above
    out_of_reference_band: jax.Array  # of [0.2, 5]
    weight: jax.Array
    weight_squared: jax.Array
    masked_q: jax.Array  # q-mass of what is masked
    masked_p: jax.Array
    centering: jax.Array  # L2 norm of C with respect to the logits, the tail as one entry
    tail_ratio: jax.Array  # rho
    entropy: jax.Array  # of p
    dropped: jax.Array  # 1 where the whole trajectory is
    trajectories: jax.Array  # 1 / trained tokens of its trajectory; 0 where nobody knows them
    dropped_trajectories: jax.Array  # the same, where dropped


class Rejected(NamedTuple):
    """What the arm's weight turns away, all bool. See the table above."""

    out_of_band_T: jax.Array
    dropped_T: jax.Array
    masked_TxK: jax.Array
    masked_tail_T: jax.Array


Sums = dict[str, jax.Array]

_MAXIMA = ("tail_ratio", "abs_dlogp", "staleness")


def token_stats(
    at: Position,
    mask_T: jax.Array,
    weight_T: jax.Array,
    centering_TxK: jax.Array,
    rejected: Rejected,
) -> TokenStats:
    """The statistics of `Position`; entropy from candidates and the tail as one lump."""
    logp_TxK = jax.lax.stop_gradient(at.trainer_logp_TxK)
    log_ratio_T = jnp.clip(at.log_ratio_T, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_T = jnp.exp(log_ratio_T)
    # rows of no tail divide 1 by 1
    p_tail_T = jnp.maximum(at.p_tail_T, 1e-6)
    q_tail_T = jnp.where(at.q_tail_T > 0, at.q_tail_T, 1.0)
    tail_kl_T = jnp.where(at.q_tail_T > 0, at.q_tail_T * jnp.log(q_tail_T / p_tail_T), 0.0)
    kl_TxK = jnp.where(at.q_TxK > 0, -at.q_TxK * at.log_ratio_TxK, 0.0)
    low, high = (np.log(bound) for bound in REFERENCE_BAND)
    share_T = centering_TxK.sum(1)
    slope_TxK = jnp.where(at.valid_TxK, centering_TxK - share_T[:, None] * at.p_TxK, 0.0)
    values = TokenStats(
        tokens=jnp.ones_like(ratio_T),
        kl=kl_TxK.sum(1) + tail_kl_T,
        k3=ratio_T - 1 - log_ratio_T,
        ratio=ratio_T,
        abs_dlogp=jnp.abs(at.log_ratio_T),
        out_of_band=rejected.out_of_band_T,
        out_of_reference_band=(at.log_ratio_T < low) | (at.log_ratio_T > high),
        weight=weight_T,
        weight_squared=jnp.square(weight_T),
        masked_q=jnp.where(rejected.masked_TxK, at.q_TxK, 0.0).sum(1)
        + jnp.where(rejected.masked_tail_T, at.q_tail_T, 0.0),
        masked_p=jnp.where(rejected.masked_TxK, at.p_TxK, 0.0).sum(1)
        + jnp.where(rejected.masked_tail_T, at.p_tail_T, 0.0),
        centering=jnp.sqrt(jnp.square(slope_TxK).sum(1) + jnp.square(share_T * at.p_tail_T)),
        tail_ratio=at.rho_T,
        entropy=-(at.p_TxK * logp_TxK).sum(1)
        - jnp.where(at.p_tail_T > 0, at.p_tail_T * jnp.log(p_tail_T), 0.0),
        dropped=rejected.dropped_T,
        trajectories=jnp.zeros_like(ratio_T),
        dropped_trajectories=jnp.zeros_like(ratio_T),
    )
    dtype = ratio_T.dtype
    return TokenStats(*(jnp.where(mask_T, value.astype(dtype), 0.0) for value in values))


def with_entropy(stats: TokenStats, entropy_T: jax.Array) -> TokenStats:
    """The same with the entropy over the whole vocabulary, where the head knows it."""
    entropy_T = jax.lax.stop_gradient(entropy_T).astype(stats.entropy.dtype)
    return stats._replace(entropy=jnp.where(stats.tokens > 0, entropy_T, 0.0))


def with_trajectories(
    stats: TokenStats, num_trained_T: jax.Array, dropped_T: jax.Array | None
) -> TokenStats:
    """The same with what only whole trajectories tell.

    Args:
        num_trained_T: trained tokens of the token's trajectory.
        dropped_T: where `off_policy_limit` drops it as well.
    """
    dtype = stats.tokens.dtype
    if dropped_T is not None:
        stats = stats._replace(
            dropped=jnp.where(dropped_T & (stats.tokens > 0), 1.0, stats.dropped).astype(dtype),
            weight=jnp.where(dropped_T, 0.0, stats.weight),
            weight_squared=jnp.where(dropped_T, 0.0, stats.weight_squared),
        )
    share_T = stats.tokens / jnp.maximum(num_trained_T.astype(dtype), 1.0)
    return stats._replace(
        trajectories=share_T, dropped_trajectories=jnp.where(stats.dropped > 0, share_T, 0.0)
    )


def labels(group_T: jax.Array, staleness_T: jax.Array, num_groups: int) -> jax.Array:
    """Which label each token counts for, bool [T, 1 + num_groups + staleness buckets]."""
    first_S = jnp.asarray(STALENESS_BUCKETS, staleness_T.dtype)
    bucket_T = jnp.searchsorted(first_S, jnp.maximum(staleness_T, 0), side="right") - 1
    groups_TxG = group_T[:, None] == jnp.arange(num_groups, dtype=group_T.dtype)[None, :]
    buckets_TxS = bucket_T[:, None] == jnp.arange(len(first_S), dtype=bucket_T.dtype)[None, :]
    everything = jnp.ones((len(group_T), 1), bool)
    return jnp.concatenate([everything, groups_TxG, buckets_TxS], axis=1)


def label_names(group_names: Sequence[str]) -> list[str]:
    """The prefix of each label's metrics."""
    return [
        "",
        *(f"group/{name}/" for name in group_names),
        *(f"staleness/{name}/" for name in STALENESS_NAMES),
    ]


def summarize(
    stats: TokenStats, labels_TxL: jax.Array, staleness_T: jax.Array | None = None
) -> Sums:
    """Sums and maxima per label, each [L]."""
    if staleness_T is None:
        staleness_T = jnp.zeros_like(stats.tokens)
    staleness_T = jnp.asarray(staleness_T).astype(stats.tokens.dtype)
    values = stats._asdict() | {"staleness": jnp.where(stats.tokens > 0, staleness_T, 0.0)}
    table_TxM = jnp.stack(list(values.values()), axis=1)
    # highest precision: on accelerators a plain matmul would round the values to bfloat16
    totals_LxM = jnp.matmul(
        labels_TxL.astype(table_TxM.dtype).T, table_TxM, precision=jax.lax.Precision.HIGHEST
    )
    sums = {name: totals_LxM[:, i] for i, name in enumerate(values)}
    for name in _MAXIMA:
        sums[f"{name}_max"] = jnp.where(labels_TxL, values[name][:, None], 0.0).max(0)
    return sums


def merge(first: Sums, second: Sums) -> Sums:
    """The sums of two disjoint parts of a batch."""
    return {
        name: jnp.maximum(value, second[name]) if name.endswith("_max") else value + second[name]
        for name, value in first.items()
    }


def no_sums(num_groups: int) -> Sums:
    """The sums of no tokens."""
    num_labels = 1 + num_groups + len(STALENESS_BUCKETS)
    names = (*TokenStats._fields, "staleness", *(f"{name}_max" for name in _MAXIMA))
    return {name: jnp.zeros(num_labels, jnp.float32) for name in names}


def finalize(sums: Sums) -> dict[str, jax.Array]:
    """Metrics from sums, each with the shape of the sums; 0 for a label without tokens.

    num_tokens; kl, k3, abs_dlogp in nats; ratio_mean (an estimate of p's mass where q has any: 1
    over the whole vocabulary and under replay); share_out_of_band and share_out_of_reference_band
    (of each token's own ratio to [0.2, 5]); share_of_dropped_tokens, share_of_dropped_trajectories;
    ess: effective sample size of the weights as a share of the tokens; masked_q_mass,
    masked_p_mass; centering_norm; tail_ratio; entropy; weight_mean; staleness.
    """
    count = jnp.maximum(sums["tokens"], 1.0)
    mean = {name: total / count for name, total in sums.items() if not name.endswith("_max")}
    squares = mean["weight_squared"]
    return {
        "num_tokens": sums["tokens"],
        "kl": mean["kl"],
        "k3": mean["k3"],
        "abs_dlogp": mean["abs_dlogp"],
        "abs_dlogp_max": sums["abs_dlogp_max"],
        "ratio_mean": mean["ratio"],
        "share_out_of_band": mean["out_of_band"],
        "share_out_of_reference_band": mean["out_of_reference_band"],
        "share_of_dropped_tokens": mean["dropped"],
        "share_of_dropped_trajectories": sums["dropped_trajectories"]
        / jnp.where(sums["trajectories"] > 0, sums["trajectories"], 1.0),
        "ess": jnp.where(
            squares > 0, jnp.square(mean["weight"]) / jnp.where(squares > 0, squares, 1), 0
        ),
        "weight_mean": mean["weight"],
        "masked_q_mass": mean["masked_q"],
        "masked_p_mass": mean["masked_p"],
        "centering_norm": mean["centering"],
        "tail_ratio": mean["tail_ratio"],
        "tail_ratio_max": sums["tail_ratio_max"],
        "entropy": mean["entropy"],
        "staleness": mean["staleness"],
        "staleness_max": sums["staleness_max"],
    }


def report(sums: Sums, group_names: Sequence[str]) -> dict[str, float]:
    """Flat metrics: `kl`, `group/<name>/kl`, `staleness/<bucket>/kl`, ... and staleness/mean, /max.

    A group or bucket without tokens says nothing. Each group also gets `share_of_tokens` and
    `share_of_out_of_band_tokens`.
    """
    metrics = {name: np.asarray(value) for name, value in finalize(sums).items()}
    staleness, staleness_max = metrics.pop("staleness"), metrics.pop("staleness_max")
    out_of_band = np.asarray(sums["out_of_band"])
    flat = {"staleness/mean": float(staleness[0]), "staleness/max": float(staleness_max[0])}
    for i, prefix in enumerate(label_names(group_names)):
        if i and not metrics["num_tokens"][i]:
            continue
        flat |= {f"{prefix}{name}": float(value[i]) for name, value in metrics.items()}
        if i:
            flat[f"{prefix}share_of_tokens"] = float(
                metrics["num_tokens"][i] / max(metrics["num_tokens"][0], 1.0)
            )
            flat[f"{prefix}share_of_out_of_band_tokens"] = float(
                out_of_band[i] / max(out_of_band[0], 1.0)
            )
        if prefix.startswith("group/"):
            flat[f"{prefix}staleness"] = float(staleness[i])
    return flat
