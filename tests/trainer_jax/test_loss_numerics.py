"""Float32 at its edges, and what the dense entry refuses."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.errors import BadInputError
from trainer_jax.loss import objective_from_logits

MIS = {"importance": "masked", "ratio_low": 0.2, "ratio_high": 5.0}
NONE = {"importance": "none", "ratio_low": None, "ratio_high": None}
TIS = {"importance": "truncated", "ratio_low": None, "ratio_high": 2.0}
WEIGHTS = pytest.mark.parametrize("weight", [NONE, MIS, TIS], ids=lambda w: w["importance"])


def record(**changes):
    """Two tokens, three candidates of which one is padding, vocabulary 5."""
    values = {
        "logits_TxV": np.array([[0.0, 1, 2, 3, -1], [1, 0, 0, 1, 2]], np.float32),
        "sampled_T": np.array([3, 4], np.int32),
        "candidate_ids_TxK": np.array([[3, 2, -1], [4, 0, -1]], np.int32),
        "candidate_sampler_logp_TxK": np.log([[0.7, 0.3, 0], [0.6, 0.4, 0]]).astype(np.float32),
        "sampler_logp_T": np.log([0.7, 0.6]).astype(np.float32),
        "advantage_T": np.array([1.0, -1.0], np.float32),
        "mask_T": np.array([True, True]),
    }
    assert set(changes) <= set(values)
    return {**values, **changes}


@pytest.fixture(autouse=True)
def quiet_log_of_zero():
    with np.errstate(divide="ignore"):
        yield


def run(values, *, weight=MIS, center=True, replay=True, num_tokens=2, **more):
    logits = jnp.asarray(values["logits_TxV"])
    rest = [v for name, v in values.items() if name != "logits_TxV"]

    def objective(logits):
        return objective_from_logits(
            logits, *rest, center=center, replay=replay, num_tokens=num_tokens, **weight, **more
        )

    (value, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(logits)
    finite = [value, gradient, *metrics.values()]
    assert all(np.isfinite(x).all() for x in finite), metrics
    return value, metrics, np.asarray(gradient)


@WEIGHTS
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("log_q", [math.log(1e-30), -200.0])
def test_extreme_records_stay_finite(weight, replay, log_q):
    """q(a) = 1e-30, a ratio of 1e30, and one beyond float32; one-candidate sets."""
    rare = record(
        candidate_sampler_logp_TxK=np.array(
            [[log_q, 0.0, -np.inf], [0.0, -90.0, -np.inf]], np.float32
        ),
        sampler_logp_T=np.array([log_q, 0.0], np.float32),
    )
    value, metrics, gradient = run(rare, weight=weight, replay=replay)
    assert metrics["share_out_of_band"] >= 0.5
    if weight is MIS:
        assert value == 0 or np.abs(gradient).max() < 1
    single = record(
        candidate_ids_TxK=np.array([[3, -1, -1], [4, -1, -1]], np.int32),
        candidate_sampler_logp_TxK=np.array([[0.0, -np.inf, -np.inf]] * 2, np.float32),
        sampler_logp_T=np.zeros(2, np.float32),
    )
    _, metrics, gradient = run(single, weight=weight, replay=replay)
    if replay:  # p = q = 1: there is nothing to learn
        np.testing.assert_allclose(gradient, 0, atol=1e-6)
        np.testing.assert_allclose(metrics["kl"], 0, atol=1e-6)


@WEIGHTS
def test_logits_far_apart(weight):
    """p(a) = 0 in float32; a candidate with p = 0; p with all its mass on one token."""
    far = record(logits_TxV=np.array([[0, 0, 500, -500, 0], [900, 0, 0, 0, 900]], np.float32))
    for replay in (False, True):
        run(far, weight=weight, replay=replay)


@WEIGHTS
@pytest.mark.parametrize("replay", [False, True])
def test_masked_tokens_may_hold_anything(weight, replay):
    clean = record(mask_T=np.array([True, False]))
    dirty = record(
        mask_T=np.array([True, False]),
        logits_TxV=np.array([[0.0, 1, 2, 3, -1], [np.nan] * 5], np.float32),
        candidate_sampler_logp_TxK=np.array(
            [[np.log(0.7), np.log(0.3), -np.inf], [np.nan, np.inf, 0]], np.float32
        ),
        sampler_logp_T=np.array([np.log(0.7), np.nan], np.float32),
        advantage_T=np.array([1.0, np.inf], np.float32),
    )
    want, _, want_gradient = run(clean, weight=weight, replay=replay)
    got, _, gradient = run(dirty, weight=weight, replay=replay)
    assert got == want
    np.testing.assert_array_equal(gradient, want_gradient)
    assert not gradient[1].any()
    _, metrics, gradient = run(record(mask_T=np.zeros(2, bool)), weight=weight, replay=replay)
    assert metrics["num_tokens"] == 0 and not gradient.any()


def test_no_tail_below_noise():
    """A complete record without replay: 1 - sum p is rounding, and must not become a ratio."""
    logits = np.array([[0.0, 1, 2, 3, -1]], np.float32)
    q = np.exp(logits[0, ::-1]) / np.exp(logits).sum()
    values = record(
        logits_TxV=logits,
        sampled_T=np.array([3]),
        candidate_ids_TxK=np.arange(5)[None],
        candidate_sampler_logp_TxK=np.log(q)[None],
        sampler_logp_T=np.log(q[[3]]),
        advantage_T=np.ones(1, np.float32),
        mask_T=np.ones(1, bool),
    )
    for weight in (NONE, MIS, TIS):
        _, metrics, gradient = run(values, weight=weight, replay=False, num_tokens=1)
        _, _, exact = run(values, weight=weight, replay=True, num_tokens=1)
        assert metrics["tail_ratio"] < 1
        np.testing.assert_allclose(gradient, exact, atol=1e-6)


def test_denominator_and_temperature():
    value, _, gradient = run(record(), num_tokens=2)
    half, _, half_gradient = run(record(), num_tokens=4)
    np.testing.assert_allclose(half, value / 2, rtol=1e-6)
    np.testing.assert_allclose(half_gradient, gradient / 2, rtol=1e-5)
    hot = record(logits_TxV=record()["logits_TxV"] * 2)
    _, _, hot_gradient = run(hot, temperature=2.0)
    np.testing.assert_allclose(hot_gradient, gradient / 2, rtol=1e-5, atol=1e-8)


def test_objective_needs_no_concrete_record():
    def objective(*values):
        return objective_from_logits(
            *values, **MIS, center=True, replay=True, num_tokens=jnp.float32(2)
        )[0]

    np.testing.assert_allclose(jax.jit(objective)(*record().values()), run(record())[0], rtol=1e-6)


nan, inf = np.float32(np.nan), np.float32(np.inf)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampled_T": np.array([3])}, "sampled_T"),
        ({"mask_T": np.ones((2, 1), bool)}, "mask_T"),
        ({"candidate_sampler_logp_TxK": np.zeros((2, 2), np.float32)}, "candidate_sampler_logp"),
        ({"candidate_ids_TxK": np.array([[3, 5, -1], [4, 0, -1]])}, "ids in the vocabulary"),
        ({"sampled_T": np.array([7, 4])}, "sampled token in the vocabulary"),
        ({"sampled_T": np.array([0, 4])}, "drawn in its replayed set"),
        ({"sampler_logp_T": np.array([nan, 0])}, "sampler_logp finite"),
        (
            {"sampler_logp_T": np.array([5, np.log(0.6)], np.float32)},
            "sampler_logp finite and <= 0",
        ),
        ({"sampler_logp_T": np.log([0.1, 0.6]).astype(np.float32)}, "equal to the set's log-prob"),
        ({"advantage_T": np.array([inf, 0])}, "finite advantage"),
        ({"candidate_ids_TxK": np.array([[3, 3, -1], [4, 0, -1]])}, "token 0: .*ids once, found 3"),
        ({"mask_T": np.array([1, np.nan], np.float32)}, "mask_T: expected 0 or 1, found nan"),
        ({"mask_T": np.array([1, 2])}, "mask_T: expected 0 or 1, found 2"),
        (
            {"candidate_sampler_logp_TxK": np.array([[-inf, 0, -inf], [0, 0, -inf]])},
            "candidate log-probs finite",
        ),
        (
            {"candidate_sampler_logp_TxK": np.array([[5, 0, -inf], [0, 0, -inf]])},
            "candidate log-probs finite and <= 0, found 5",
        ),
        (
            {"candidate_sampler_logp_TxK": np.array([[-0.3, -0.3, -inf], [-0.5, -1, -inf]])},
            "candidate mass <= 1",
        ),
        (
            {"candidate_sampler_logp_TxK": np.array([[-0.3, -3.0, -inf], [-0.5, -1, -inf]])},
            "all of the sampler's mass",
        ),
        ({"candidate_sampler_logp_TxK": np.zeros((2, 3), np.float32)}, "at padding"),
    ],
)
def test_refuses_bad_records(changes, says):
    with pytest.raises(BadInputError, match=says):
        run(record(**changes))


@pytest.mark.parametrize(
    ("row", "says"),
    [([0, nan, 0, 0, 0], "no NaN"), ([0, inf, 0, 0, 0], "no NaN"), ([-inf] * 5, "not banned")],
)
@pytest.mark.parametrize("replay", [False, True])
def test_refuses_bad_logits_of_trained_rows(row, says, replay):
    """Where they are concrete: under `grad` they are traced."""
    values = record(logits_TxV=np.array([[1, 0, 0, 1, 2], row], np.float32))
    settings = {**MIS, "center": True, "replay": replay, "num_tokens": 2}
    with pytest.raises(BadInputError, match=f"logits_TxV: .*{says}.* at token 1"):
        objective_from_logits(*values.values(), **settings)
    values["mask_T"] = np.array([True, False])
    values["candidate_ids_TxK"][1] = 99
    objective_from_logits(*values.values(), **settings)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"candidate_ids_TxK": np.array([[3.0, 2, -1], [4, 0, -1]])}, "integers, found .* float"),
        ({"sampled_T": np.array([3.0, 4.0])}, "integers, found .* float"),
        ({"logits_TxV": np.zeros((2, 5), np.int32)}, "floating-point numbers, found .* int32"),
        ({"logits_TxV": np.zeros((2, 5), np.complex64)}, "floating-point numbers, .* complex64"),
        ({"logits_TxV": np.float32(0)}, "with a token and a vocabulary"),
        ({"logits_TxV": np.zeros((2, 0), np.float32)}, "with a token and a vocabulary"),
        ({"logits_TxV": None}, "logits_TxV: .* found NoneType"),
        ({"candidate_ids_TxK": [[1], [1, 2]]}, "candidate_ids_TxK: .* found list"),
        ({"mask_T": np.array(["a", "b"])}, "mask_T: .* booleans"),
        ({"advantage_T": np.array([True, False])}, "advantage_T: .* real numbers, found .* bool"),
    ],
)
def test_refuses_arrays_of_another_kind(changes, says):
    values = record(**changes)
    with pytest.raises(BadInputError, match=says):
        objective_from_logits(*values.values(), **MIS, center=True, replay=True, num_tokens=2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        *[
            ({name: bad}, f"{name}: expected a finite number above 0")
            for name in ("temperature", "num_tokens")
            for bad in (0, -1, math.nan, math.inf, "7", None, np.ones(2), True)
        ],
        *[({name: bad}, f"{name}: .* True or False") for name in ("center", "replay")
          for bad in ("no", None, 1)],
        *[({"ratio_low": bad}, "ratio_low") for bad in ("a", np.ones(2), True)],
        *[({"ratio_high": bad}, "the band") for bad in (math.inf, math.nan)],
        ({"ratio_low": 2.0, "ratio_high": 3.0}, "ratio_low <= 1"),
        ({"importance": "truncated", "ratio_low": None, "ratio_high": 0.5}, "1 <= ratio_high"),
        ({"importance": None}, "importance"),
    ],
)  # fmt: skip
def test_refuses_settings_out_of_range(settings, says):
    settings = {**MIS, "center": True, "replay": True, "num_tokens": 2, **settings}
    with pytest.raises(BadInputError, match=says):
        objective_from_logits(*record().values(), **settings)


@WEIGHTS
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("banned", [[1], [1, 3]], ids=["outside K", "the token drawn too"])
def test_banned_tokens(weight, center, replay, banned):
    """A logit of -inf has no mass and no gradient, and leaves everything finite (`run` checks)."""
    values = record()
    values["logits_TxV"][0, banned] = -np.inf
    _, metrics, gradient = run(values, weight=weight, center=center, replay=replay)
    far = record()
    far["logits_TxV"][0, banned] = -80
    _, want, want_gradient = run(far, weight=weight, center=center, replay=replay)
    others = np.delete(np.arange(5), banned)
    np.testing.assert_allclose(gradient[:, others], want_gradient[:, others], atol=1e-6)
    assert not gradient[0, banned].any()
    np.testing.assert_allclose(metrics["entropy"], want["entropy"], atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"importance": "masked", "ratio_low": 0.2, "ratio_high": None},
        {"importance": "masked", "ratio_low": None, "ratio_high": 5.0},
        {"importance": "masked", "ratio_low": 5.0, "ratio_high": 0.2},
        {"importance": "masked", "ratio_low": -1.0, "ratio_high": 0.2},
        {"importance": "truncated", "ratio_low": None, "ratio_high": None},
        {"importance": "icepop", "ratio_low": 0.2, "ratio_high": 5.0},
        {"importance": "sequence", "ratio_low": 0.9, "ratio_high": 1.1},
    ],
)
@pytest.mark.parametrize("center", [False, True])
def test_refuses_bad_arms(settings, center):
    with pytest.raises(BadInputError):
        run(record(), weight=settings, center=center)


def test_refuses_an_empty_batch():
    empty = {name: value[:0] for name, value in record().items()}
    with pytest.raises(BadInputError, match="with a token"):
        run(empty)
    with pytest.raises(BadInputError, match="num_tokens"):
        run(record(), num_tokens=0)
