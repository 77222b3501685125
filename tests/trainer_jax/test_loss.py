"""The estimator against brute force, in float64: the seven properties of docs/correction.md."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.trainer_jax.loss_oracle import (
    ARMS,
    Arm,
    estimate,
    kl,
    policy,
    sampler,
    softmax,
    wrong_estimate,
)
from trainer_jax.head import candidate_logits
from trainer_jax.loss import LogBand, SamplerRecord, objective_from_logits, token_objective

V = 6
ids_of_arm = [f"{a.importance}-{'sc' if a.center else 'plain'}-{a.replay}" for a in ARMS]
every_arm = pytest.mark.parametrize("arm", ARMS, ids=ids_of_arm)
examples = settings(max_examples=12, derandomize=True)
# failing on purpose: nothing to shrink
control = settings(examples, max_examples=40, phases=[Phase.generate])

logits = st.lists(st.floats(-4, 4, width=32), min_size=V, max_size=V).map(np.array)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@st.composite
def cases(draw, *, complete: bool = False):
    """(z, support, q on the support): the sampler's logits are the trainer's plus an error."""
    z = draw(logits)
    error = draw(logits) / 2
    full = draw(st.booleans()) if complete else False
    size = V if full else draw(st.integers(1, V - 1))
    support = np.array(draw(st.permutations(range(V)))[:size])
    return z, support, softmax((z + error)[support])


@functools.partial(jax.jit, static_argnames=("arm",))
def gradient(z_TxV, *record, arm):
    """(gradient by the logits, metrics); called with [V, V] to compile once per arm."""

    def objective(z_TxV):
        return objective_from_logits(
            z_TxV, *record, importance=arm.importance, ratio_low=arm.low, ratio_high=arm.high,
            center=arm.center, replay=arm.replay, num_tokens=1,
        )  # fmt: skip

    return jax.grad(objective, has_aux=True)(z_TxV)


def record(support, q_support):
    """A padded candidate set [V]."""
    ids, logq = np.full(V, -1), np.full(V, -np.inf)
    ids[: len(support)], logq[: len(support)] = support, np.log(q_support)
    return ids, logq


def autodiff(z, drawn, support, q_support, q_drawn, advantage, arm: Arm):
    """Rows of gradients, one per drawn token; always V rows, so that one compilation does."""
    T = len(drawn)
    ids, logq = record(support, q_support)
    pad = [0] * (V - T)
    out, _ = gradient(
        np.tile(z, (V, 1)),
        np.array([*drawn, *pad]),
        np.tile(ids, (V, 1)),
        np.tile(logq, (V, 1)),
        np.log(np.array([*q_drawn, *[1.0] * (V - T)])),
        np.array([*advantage, *pad], float),
        np.arange(V) < T,
        arm=arm,
    )
    assert not np.any(np.asarray(out)[T:])
    return np.asarray(out)[:T]


def expectation(z, support, q_support, reward, arm: Arm, how=autodiff):
    """E_q[g] by drawing every token the sampler may draw."""
    q = sampler(policy(z, support, arm), support, q_support, arm)
    drawn = np.flatnonzero(q)
    if how is autodiff:
        return autodiff(z, drawn, support, q_support, q[drawn], reward[drawn] * q[drawn], arm).sum(
            0
        )
    return sum(q[a] * reward[a] * how(z, a, support, q_support, q[a], arm) for a in drawn)


def no_drift(case, arm, how=autodiff):
    z, support, q_support = case
    np.testing.assert_allclose(
        expectation(z, support, q_support, np.ones(V), arm, how), 0, atol=1e-12
    )


@every_arm
@given(case=cases(complete=True), data=st.data())
@examples
def test_autodiff_is_the_closed_form(arm, case, data):
    """Property 6, for whole and for partial records, tokens drawn from the tail included."""
    z, support, q_support = case
    if not arm.replay and data.draw(st.booleans()):
        q_support = q_support * data.draw(st.floats(0.3, 0.99))
    drawn = support if arm.replay else np.arange(V)
    q = sampler(policy(z, support, arm), support, q_support, arm)[drawn]
    drawn, q = drawn[q > 0], q[q > 0]
    reward = np.linspace(-1, 2, len(drawn))
    want = [
        A * estimate(z, a, support, q_support, qa, arm)
        for A, a, qa in zip(reward, drawn, q, strict=True)
    ]
    got = autodiff(z, drawn, support, q_support, q, reward, arm)
    np.testing.assert_allclose(got, want, atol=1e-10)


centered = [arm for arm in ARMS if arm.center]


@pytest.mark.parametrize("arm", centered, ids=[i for i in ids_of_arm if "sc" in i])
@given(case=cases(complete=True))
@examples
def test_constant_advantage_does_not_drift(arm, case):
    """Property 1."""
    no_drift(case, arm)


@pytest.mark.parametrize("importance", ["none", "masked", "truncated"])
@given(case=cases(), tail=st.floats(0.01, 0.7))
@examples
def test_partial_record_does_not_drift_if_the_tail_is_proportional(importance, case, tail):
    z, support, q_support = case
    no_drift(
        (z, support, q_support * (1 - tail)), Arm(importance=importance, center=True, replay=False)
    )


@pytest.mark.parametrize("importance", ["masked", "truncated"])
@pytest.mark.parametrize("replay", [False, True])
def test_the_wrong_estimator_fails(importance, replay):
    """The negative control: `w(a) * (e_a - q)` must not pass what the right one passes.

    With weight 1 the two are the same: e_a - p - sum_v q (e_v - p) = e_a - q.
    """
    arm = Arm(importance=importance, center=True, replay=replay)

    @given(case=cases(complete=True))
    @control
    def never_drifts(case):
        no_drift(case, arm, wrong_estimate)

    @given(case=cases(complete=True))
    @control
    def is_the_closed_form(case):
        z, support, q_support = case
        a, q_a = support[0], q_support[0]
        np.testing.assert_allclose(
            wrong_estimate(z, a, support, q_support, q_a, arm),
            estimate(z, a, support, q_support, q_a, arm),
            atol=1e-10,
        )

    for check in (never_drifts, is_the_closed_form):
        with pytest.raises(AssertionError):
            check()


@pytest.mark.parametrize("replay", [False, True])
@given(case=cases())
@examples
def test_drawn_centering_is_the_wrong_estimator(replay, case):
    """The control that a run can train with is the one that the test above fails."""
    arm = Arm(importance="masked", center="drawn", replay=replay)
    z, support, q_support = case
    drawn = support if replay else np.arange(V)
    q = sampler(policy(z, support, arm), support, q_support, arm)[drawn]
    drawn, q = drawn[q > 0], q[q > 0]
    wrong = [
        wrong_estimate(z, a, support, q_support, q_a, arm) for a, q_a in zip(drawn, q, strict=True)
    ]
    found = autodiff(z, drawn, support, q_support, q, np.ones(len(drawn)), arm)
    np.testing.assert_allclose(found, wrong, atol=1e-9)


@pytest.mark.parametrize("importance", ["none", "masked"])
def test_without_centering_it_drifts(importance):
    """What centering is for: otherwise the tests above could not fail."""
    z, error = np.array([1.0, 0, -1, 2, 0, 0]), np.array([0, 1.5, 0, -1, 0, 2.0])
    q = softmax(z + error)
    drift = expectation(
        z, np.arange(V), q, np.ones(V), Arm(importance=importance, center=False, replay=True)
    )
    assert np.abs(drift).max() > 0.05


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("replay", [False, True])
@given(case=cases(complete=True), reward=logits)
@examples
def test_all_kept_is_the_on_policy_gradient(center, replay, case, reward):
    """Property 2: with a band that keeps everything, E_q[g] = E_p[A dlogp]."""
    z, _, _ = case
    support, q = np.arange(V), softmax(z + reward / 3)
    p = softmax(z)
    want = sum(p[a] * reward[a] * (np.eye(V)[a] - p) for a in range(V))
    for importance in ("masked", "truncated"):
        arm = Arm(importance=importance, center=center, replay=replay, low=1e-9, high=1e9)
        got = expectation(z, support, q, reward, arm)
        np.testing.assert_allclose(got, want, atol=1e-10)


@every_arm
@given(z=logits, reward=logits, size=st.integers(1, V))
@examples
def test_same_policy_is_plain_grpo(arm, z, reward, size):
    """Property 3."""
    support = np.argsort(-z)[:size]
    p = policy(z, support, arm)
    q_support = p[support]
    if size == V or arm.replay:
        want = sum(p[a] * reward[a] * (np.eye(V)[a] - p) for a in range(V))
        got = expectation(z, support, q_support, reward, arm)
        np.testing.assert_allclose(got, want, atol=1e-10)
    # also with a partial record: the tail's rho is 1
    elif not arm.replay:
        drawn = np.arange(V)
        got = autodiff(z, drawn, support, q_support, p, reward * p, arm).sum(0)
        want = sum(p[a] * reward[a] * (np.eye(V)[a] - p) for a in range(V))
        np.testing.assert_allclose(got, want, atol=1e-10)


@every_arm
@given(case=cases(), data=st.data(), shift=st.floats(-50, 50))
@examples
def test_order_and_constants_do_not_matter(arm, case, data, shift):
    """Properties 4 and 5: candidates in any order and place, a constant on all logits, logits
    outside the support under replay."""
    z, support, q_support = case
    order = np.array(data.draw(st.permutations(range(len(support)))))
    drawn, q = support, q_support
    reward = np.linspace(-1, 1, len(drawn))
    want = autodiff(z, drawn, support, q_support, q, reward, arm)
    got = autodiff(z + shift, drawn, support[order], q_support[order], q, reward, arm)
    np.testing.assert_allclose(got, want, atol=1e-9)
    if arm.replay:
        moved = z + 100 * ~np.isin(np.arange(V), support)
        got = autodiff(moved, drawn, support, q_support, q, reward, arm)
        np.testing.assert_allclose(got, want, atol=1e-9)
        outside = ~np.isin(np.arange(V), support)
        assert not np.any(got[:, outside])


@pytest.mark.parametrize("arm", [a for a in ARMS if a.center and a.importance != "truncated"])
def test_through_the_head(arm):
    """Property 6, with respect to hidden states and head weights."""
    rng = np.random.default_rng(0)
    T, D, K = 5, 3, 4
    hidden, head = rng.normal(size=(T, D)), rng.normal(size=(V, D))
    z = hidden @ head.T / 0.7
    supports = [rng.permutation(V)[:K] for _ in range(T)]
    q = [softmax((z[t] + rng.normal(size=V))[supports[t]]) for t in range(T)]
    A, slot = rng.normal(size=T), rng.integers(0, K, T)
    drawn = np.array([supports[t][slot[t]] for t in range(T)])
    q_drawn = np.array([q[t][slot[t]] for t in range(T)])
    g = np.stack(
        [A[t] * estimate(z[t], drawn[t], supports[t], q[t], q_drawn[t], arm) for t in range(T)]
    )

    @jax.jit
    def objective(hidden, head):
        ids = jnp.asarray(np.stack(supports))
        out = candidate_logits(
            hidden, head, ids, normalizer=not arm.replay, temperature=0.7, chunk_tokens=2
        )
        sampled = jnp.take_along_axis(out.logits_TxK, jnp.asarray(slot)[:, None], axis=1)[:, 0]
        rec = SamplerRecord(
            candidate_ids_TxK=ids,
            candidate_sampler_logp_TxK=jnp.log(np.stack(q)),
            sampler_logp_T=jnp.log(q_drawn),
            advantage_T=jnp.asarray(A),
            mask_T=jnp.ones(T, bool),
        )
        band = LogBand(jnp.full(T, np.log(arm.low)), jnp.full(T, np.log(arm.high)))
        return token_objective(
            out.logits_TxK, sampled, out.normalizer_T, rec,
            importance=arm.importance, band=band, center=arm.center,
        )[0].sum()  # fmt: skip

    got = jax.grad(objective, (0, 1))(jnp.asarray(hidden), jnp.asarray(head))
    np.testing.assert_allclose(got[0], g @ head / 0.7, atol=1e-10)
    np.testing.assert_allclose(got[1], g.T @ hidden / 0.7, atol=1e-10)


@every_arm
def test_splitting_and_padding_the_batch(arm):
    """Property 4: parts of a batch, and padding anywhere in a row."""
    rng = np.random.default_rng(1)
    K = 3
    z = rng.normal(size=(V, V)) * 2
    ids, logq = np.full((V, V), -1), np.full((V, V), -np.inf)
    ids[:, :K] = [rng.permutation(V)[:K] for _ in range(V)]
    logq[:, :K] = np.log([softmax(rng.normal(size=K)) for _ in range(V)])
    drawn, drawn_logq, A = ids[:, 0], logq[:, 0], rng.normal(size=V)

    def run(ids, logq, mask):
        return gradient(z, drawn, ids, logq, drawn_logq, A, mask, arm=arm)[0]

    whole = run(ids, logq, np.ones(V, bool))
    first = np.arange(V) < 2
    np.testing.assert_allclose(run(ids, logq, first) + run(ids, logq, ~first), whole, atol=1e-12)
    order = np.array([2, 5, 1, 4, 0, 3])
    moved = run(ids[:, order], logq[:, order], np.ones(V, bool))
    np.testing.assert_allclose(moved, whole, atol=1e-12)


@every_arm
def test_metrics_by_brute_force(arm):
    rng = np.random.default_rng(2)
    z, error = rng.normal(size=V) * 2, rng.normal(size=V)
    support = np.array([0, 2, 3, 5])
    q_support = softmax((z + error)[support]) * (1.0 if arm.replay else 0.8)
    p = policy(z, support, arm)
    ids, logq = record(support, q_support)
    drawn = support[:3]
    rows = np.arange(V) < 3
    _, metrics = gradient(
        np.tile(z, (V, 1)), np.where(rows, support[np.arange(V) % 4], 0), np.tile(ids, (V, 1)),
        np.tile(logq, (V, 1)), np.log(q_support)[np.arange(V) % 4], np.ones(V), rows, arm=arm,
    )  # fmt: skip
    r = p[drawn] / q_support[:3]
    q = sampler(p, support, q_support, arm)
    lump_p, lump_q = [*p[support]], [*q_support]
    if not arm.replay:
        lump_p, lump_q = [*lump_p, 1 - sum(lump_p)], [*lump_q, 1 - sum(lump_q)]
    ratio = p[q > 0] / q[q > 0]
    outside = ((ratio < arm.low) | (ratio > arm.high)) & (arm.importance == "masked")
    low = 0.0 if arm.importance == "truncated" else arm.low
    w = np.array([{"none": 1, "truncated": min(x, arm.high)}.get(
        arm.importance, x * (arm.low <= x <= arm.high)) for x in r])  # fmt: skip
    want = {
        "num_tokens": 3,
        "kl": kl(lump_p, lump_q),
        "k3": np.mean(r - 1 - np.log(r)),
        "ratio_mean": r.mean(),
        "abs_dlogp": np.abs(np.log(r)).mean(),
        "abs_dlogp_max": np.abs(np.log(r)).max(),
        "share_out_of_band": np.mean((r < low) | (r > arm.high)),
        "share_out_of_reference_band": np.mean((r < 0.2) | (r > 5)),
        "ess": w.mean() ** 2 / np.mean(w**2) if w.any() else 0,
        "masked_q_mass": q[q > 0][outside].sum(),
        "masked_p_mass": p[q > 0][outside].sum(),
        "share_of_dropped_tokens": 0,
        "entropy": -(p[p > 0] * np.log(p[p > 0])).sum(),
        "tail_ratio": 0 if arm.replay else lump_q[-1] / lump_p[-1],
    }
    for name, value in want.items():
        np.testing.assert_allclose(metrics[name], value, atol=1e-9, err_msg=name)
    if not arm.center:
        assert metrics["centering_norm"] == 0
    elif arm.importance == "none":
        assert metrics["centering_norm"] > 0.01


def test_centering_norm_is_zero_where_nothing_is_masked():
    """Importance sampling alone has no drift, so there is nothing to repair."""
    z = np.array([[0.0, 1, 2, 0, -1, 0.5]])
    q = softmax(z[0] + 0.1 * np.arange(V))
    args = (z, [1], [np.arange(V)], np.log(q)[None], np.log(q[[1]]), [1.0], [True])
    _, metrics = objective_from_logits(
        *map(np.array, args), importance="masked", ratio_low=0.2, ratio_high=5.0, center=True,
        replay=True, num_tokens=1,
    )  # fmt: skip
    assert metrics["masked_q_mass"] == 0
    np.testing.assert_allclose(metrics["centering_norm"], 0, atol=1e-12)
