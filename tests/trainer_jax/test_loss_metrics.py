"""What each metric means for each arm, by values computed by hand."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from trainer_jax import loss_metrics
from trainer_jax.loss import LogBand, SamplerRecord, token_objective

# Three tokens with two candidates each, the first of which is drawn:
#   r of the candidates   1/8, 4.5    1, 1    4, 2/3
Q = np.array([[0.8, 0.2], [0.5, 0.5], [0.1, 0.9]], np.float32)
P = np.array([[0.1, 0.9], [0.5, 0.5], [0.4, 0.6]], np.float32)
# tokens 0 and 2 form a trajectory, whose ratio is sqrt(1/8 * 4)
SEQUENCE = np.log([0.5**0.5, 1.0, 0.5**0.5]).astype(np.float32)
NUM_TRAINED = np.array([2.0, 1.0, 2.0], np.float32)


def token_stats(importance, *, band=(0.5, 2.0), advantage=(1.0, -1.0, 1.0)):
    logits = jnp.log(P)
    record = SamplerRecord(
        candidate_ids_TxK=jnp.array([[0, 1]] * 3, jnp.int32),
        candidate_sampler_logp_TxK=jnp.log(Q),
        sampler_logp_T=jnp.log(Q[:, 0]),
        advantage_T=jnp.array(advantage, jnp.float32),
        mask_T=jnp.ones(3, bool),
    )
    bounds = (jnp.full(3, np.log(bound), jnp.float32) for bound in band)
    _, stats = token_objective(
        logits, logits[:, 0], None, record,
        importance=importance, band=LogBand(*bounds), center=False,
        sequence_log_ratio_T=jnp.asarray(SEQUENCE) if importance == "sequence" else None,
    )  # fmt: skip
    return stats


def metrics_of(stats):
    found = loss_metrics.finalize(loss_metrics.summarize(stats, jnp.ones((3, 1), bool)))
    return {name: float(value[0]) for name, value in found.items()}


ROOT = 0.5**0.5
CAPPED = np.array([1 / 8, 1, 2])
NONE_MASKED = {"masked_q_mass": 0, "masked_p_mass": 0}
KEPT = {"share_of_dropped_tokens": 0, "share_of_dropped_trajectories": 0}


@pytest.mark.parametrize(
    ("importance", "settings", "want"),
    [
        ("none", {}, {"share_out_of_band": 2 / 3, "weight_mean": 1, "ess": 1} | NONE_MASKED | KEPT),
        (
            "masked",
            {},
            {
                "share_out_of_band": 2 / 3,
                "masked_q_mass": (1 + 0 + 0.1) / 3,
                "masked_p_mass": (1 + 0 + 0.4) / 3,
                "weight_mean": 1 / 3,
                "ess": 1 / 3,
            }
            | KEPT,
        ),
        (
            "truncated",
            {},
            {
                "share_out_of_band": 1 / 3,
                "weight_mean": CAPPED.mean(),
                "ess": CAPPED.mean() ** 2 / np.mean(CAPPED**2),
            }
            | NONE_MASKED
            | KEPT,
        ),
        (
            "sequence",
            {},
            {"share_out_of_band": 0, "weight_mean": (1 + 2 * ROOT) / 3} | NONE_MASKED | KEPT,
        ),
        (  # below the band, but A > 0 is clipped above it only
            "sequence",
            {"band": (0.8, 1.25)},
            {"share_out_of_band": 2 / 3, "weight_mean": (1 + 2 * ROOT) / 3} | NONE_MASKED | KEPT,
        ),
        (
            "sequence",
            {"band": (0.8, 1.25), "advantage": (-1.0, 1.0, -1.0)},
            {
                "share_out_of_band": 2 / 3,
                "share_of_dropped_tokens": 2 / 3,
                "share_of_dropped_trajectories": 1 / 2,
                "weight_mean": 1 / 3,
                "ess": 1 / 3,
            }
            | NONE_MASKED,
        ),
        (  # nothing to learn, so nothing to drop
            "sequence",
            {"band": (0.8, 1.25), "advantage": (0.0, 1.0, 0.0)},
            {"share_out_of_band": 2 / 3} | KEPT,
        ),
    ],
)
def test_what_the_weight_turns_away(importance, settings, want):
    stats = token_stats(importance, **settings)
    found = metrics_of(loss_metrics.with_trajectories(stats, jnp.asarray(NUM_TRAINED), None))
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    # the mismatch itself is the same whatever the arm makes of it
    r = np.array([1 / 8, 1, 4])
    np.testing.assert_allclose(found["ratio_mean"], r.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["share_out_of_reference_band"], 1 / 3, rtol=1e-5)
    np.testing.assert_allclose(found["kl"], (Q * np.log(Q / P)).sum() / 3, rtol=1e-5)


def test_what_off_policy_limit_drops_has_no_weight():
    dropped = jnp.array([True, False, True])
    stats = token_stats("truncated")
    found = metrics_of(loss_metrics.with_trajectories(stats, jnp.asarray(NUM_TRAINED), dropped))
    np.testing.assert_allclose(found["share_of_dropped_tokens"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(found["share_of_dropped_trajectories"], 1 / 2, rtol=1e-6)
    np.testing.assert_allclose(found["weight_mean"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(found["ess"], 1 / 3, rtol=1e-6)
    assert found["kl"] == metrics_of(stats)["kl"]


def test_every_metric_is_explained():
    page = (Path(__file__).parents[2] / "docs" / "correction.md").read_text()
    sums = loss_metrics.no_sums(2)
    sums["tokens"] += 1  # of every label, or the report leaves it out
    for name in loss_metrics.report(sums, ("a", "b")):
        kind, _, rest = name.rpartition("/")
        known = {f"`{name}`", f"`{rest}`", f"`group/<name>/{rest}`"}
        assert any(word in page for word in known), name
        assert kind in {"", "staleness", "group/a", "group/b"} or kind.startswith("staleness/")
