"""An update against the plain way: every trajectory alone, dense logits, one gradient."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from contracts.errors import BadInputError
from contracts.types import CandidateSets
from tests.trainer_jax.random_trajectories import random_groups
from trainer_jax.advantages import advantages_of
from trainer_jax.batch import pack
from trainer_jax.loss import objective_from_logits
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import make_mesh
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import init_params
from trainer_jax.records import RecordRules
from trainer_jax.step import EXACT, make_update, round_at_random

NAMES = ("bf16", "fp8")
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=8, initializer_range=0.3,
)  # fmt: skip
PARAMS = init_params(CONFIG, jax.random.key(0))
TEMPERATURE = 0.8


def batches_of(groups, loss, *, rows=2, row_tokens=64, num_shards=1, routing=None):
    rules = RecordRules(
        group_names=NAMES, vocab_size=64, replay=loss.replay, max_candidates=16, routing=routing
    )
    advantages = advantages_of(groups, normalize=loss.normalize_advantages)
    return pack(
        groups, advantages, row_tokens=row_tokens, rows=rows, candidate_buckets=(4, 16),
        rules=rules, num_shards=num_shards,
    )  # fmt: skip


def run(
    groups, loss, *, shape=None, optimizer=None, params=PARAMS, freeze_router=False,
    masters="float32", compute=EXACT, **packing,
):  # fmt: skip
    """One SGD step of size 1: the gradient is the difference of the parameters."""
    update = make_update(
        CONFIG, loss, optimizer or optax.sgd(1.0), make_mesh(shape or {}), group_names=NAMES,
        temperature=TEMPERATURE, freeze_router=freeze_router, masters=masters,
        compute=compute,
    )  # fmt: skip
    batches = batches_of(groups, loss, num_shards=update.num_shards, **packing)
    state, pending = update(update.init(params), batches, version=4)
    assert int(state.step) == 1
    gradient = jax.tree.map(
        lambda new, old: np.asarray(new) - np.asarray(old), state.params, params
    )
    return gradient, pending.read()


@jax.jit
def dense_logits(params, tokens_BxR):
    """Each trajectory in a row of its own, logits over the whole vocabulary."""
    shape = tokens_BxR.shape
    positions = jnp.broadcast_to(jnp.arange(shape[1])[None], shape)
    hidden = hidden_states(params, CONFIG, tokens_BxR, positions, jnp.ones(shape, jnp.int32))
    return hidden @ head_weight(params).T / TEMPERATURE


def rows_of(trajectories):
    """Padded behind, which a causal model does not see."""
    return np.stack([np.pad(t.tokens, (0, 32 - len(t.tokens))) for t in trajectories])


def records(trajectories):
    """Row, position of the logits, token, log-prob, padded candidate set of each trained token."""
    parts = []
    for row, t in enumerate(trajectories):
        at = np.flatnonzero(t.loss_mask)
        sets = t.candidates
        ids, logp = np.full((len(at), 16), -1), np.full((len(at), 16), -np.inf, np.float32)
        for n in range(len(at)):
            own = slice(sets.offsets[n], sets.offsets[n + 1])
            ids[n, : sets.counts[n]], logp[n, : sets.counts[n]] = sets.ids[own], sets.logp[own]
        parts.append((np.full(len(at), row), at - 1, t.tokens[at], t.sampler_logp, ids, logp))
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def scored(groups):
    for group, values in zip(groups, advantages_of(groups, normalize=False), strict=True):
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            if trajectory.reward is not None:
                yield trajectory, float(advantage)


def assert_same(got, want, **tolerance):
    for (path, g), w in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(
            g, w, err_msg=jax.tree_util.keystr(path), **{"rtol": 2e-3, "atol": 2e-5} | tolerance
        )


def log_softmax(z):
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def log_ratios(trajectories):
    """Mean of log p - log q over each trajectory's trained tokens, without replay."""
    row, at, token, logp, _, _ = records(trajectories)
    trainer_logp = log_softmax(np.asarray(dense_logits(PARAMS, rows_of(trajectories))))
    gap = trainer_logp[row, at, token] - logp
    return np.bincount(row, gap) / np.bincount(row)


@functools.partial(jax.jit, static_argnames="arm")
def dense_gradient(params, tokens, record, advantage_T, arm):
    row, at, token, logp, ids, candidate_logp = record

    def objective(params):
        logits_TxV = dense_logits(params, tokens)[row, at]
        return objective_from_logits(
            logits_TxV, token, ids, candidate_logp, logp, advantage_T,
            jnp.ones(len(token), bool), num_tokens=1, **dict(arm),
        )[0]  # fmt: skip

    return jax.grad(objective)(params)


def expect(groups, loss, scale):
    """Gradient of the sum over trajectories of their objectives times `scale(index, tokens)`."""
    trajectories = [t for t, _ in scored(groups)]
    record = records(trajectories)
    scales = [a * scale(i, len(t.sampler_logp)) for i, (t, a) in enumerate(scored(groups))]
    arm = {
        "importance": "none" if loss.importance == "sequence" else loss.importance,
        "ratio_low": loss.ratio_low, "ratio_high": loss.ratio_high,
        "center": loss.center, "replay": loss.replay,
    }  # fmt: skip
    advantage_T = np.array(scales, np.float32)[record[0]]
    return dense_gradient(PARAMS, rows_of(trajectories), record, advantage_T, tuple(arm.items()))


def count_tokens(groups):
    return sum(len(t.sampler_logp) for t, _ in scored(groups))


@pytest.mark.parametrize("arm", ["sc+mis+top-p", "sc+mis", "grpo+tis"])
def test_packed_update_is_the_sum_of_trajectories(arm):
    loss = LossConfig(arm=arm)
    groups = random_groups(whole=loss.replay)
    gradient, metrics = run(groups, loss)
    num_tokens = count_tokens(groups)
    want = expect(groups, loss, lambda i, n: 1 / num_tokens)
    assert metrics["num_tokens"] == num_tokens
    assert_same(gradient, want)
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(want)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-3)


def test_reductions():
    groups = random_groups()
    loss = LossConfig(arm="grpo+top-p", reduction="constant", constant=1000.0)
    assert_same(run(groups, loss)[0], expect(groups, loss, lambda i, n: 1e-3), atol=2e-6)
    loss = LossConfig(arm="grpo+top-p", reduction="sequence-mean")
    assert_same(run(groups, loss)[0], expect(groups, loss, lambda i, n: 1 / n / 7))


def shifted(groups, by):
    """The same with every sampler_logp moved, and without the sets, which GSPO does not need."""
    return [
        replace(
            g,
            trajectories=tuple(
                replace(
                    t,
                    sampler_logp=np.minimum(t.sampler_logp + np.float32(by), 0),
                    candidates=CandidateSets.from_counts(
                        np.zeros(len(t.sampler_logp), np.int64),
                        t.candidates.ids[:0],
                        t.candidates.logp[:0],
                    ),
                )
                for t in g.trajectories
            ),
        )
        for g in groups
    ]


def test_gspo():
    """The weight of every token is its trajectory's geometric mean ratio, clipped as PPO clips."""
    groups = random_groups(whole=False)
    members, advantages = zip(*scored(groups), strict=True)
    groups = shifted(groups, np.median(log_ratios(members)))
    members, advantages = zip(*scored(groups), strict=True)
    ratios = np.exp(log_ratios(members))
    loss = LossConfig(arm="gspo", ratio_low=0.99, ratio_high=1.01)
    clipped = np.where(np.array(advantages) > 0, ratios > 1.01, ratios < 0.99)
    assert clipped.any() and not clipped.all()
    weights = np.where(clipped, 0, ratios)
    gradient, metrics = run(groups, loss)
    assert_same(gradient, expect(groups, loss, lambda i, n: weights[i] / n / 7))
    lengths = np.array([len(t.sampler_logp) for t in members])
    outside = (ratios < 0.99) | (ratios > 1.01)
    assert outside.sum() > clipped.sum(), "what is out of band is not always dropped"
    for name, value in {
        "share_out_of_band": lengths[outside].sum() / lengths.sum(),
        "share_of_dropped_tokens": lengths[clipped].sum() / lengths.sum(),
        "share_of_dropped_trajectories": clipped.mean(),
        "weight_mean": (weights * lengths).sum() / lengths.sum(),
        "masked_q_mass": 0,
        "masked_p_mass": 0,
    }.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


def test_off_policy_sequence_masking():
    """Trajectories with A < 0 and mean log(q/p) above the limit are dropped, others are not."""
    groups = random_groups(whole=False)
    members, advantages = zip(*scored(groups), strict=True)
    gaps = -log_ratios(members)
    limit = float(np.median(gaps))
    loss = LossConfig(arm="grpo+mis", off_policy_limit=limit)
    dropped = (np.array(advantages) < 0) & (gaps > limit)
    assert 0 < dropped.sum() < (gaps > limit).sum()
    num_tokens = count_tokens(groups)
    want = expect(groups, loss, lambda i, n: (not dropped[i]) / num_tokens)
    gradient, metrics = run(groups, loss)
    assert_same(gradient, want)
    _, plain = run(groups, LossConfig(arm="grpo", off_policy_limit=limit))
    _, free = run(groups, LossConfig(arm="grpo+mis"))
    lengths = np.array([len(t.sampler_logp) for t in members])
    share = lengths[dropped].sum() / num_tokens
    np.testing.assert_allclose(metrics["share_of_dropped_tokens"], share, rtol=1e-5)
    np.testing.assert_allclose(metrics["share_of_dropped_trajectories"], dropped.mean(), rtol=1e-5)
    assert free["share_of_dropped_tokens"] == free["share_of_dropped_trajectories"] == 0
    np.testing.assert_allclose(plain["weight_mean"], 1 - share, rtol=1e-5)
    assert metrics["kl"] == free["kl"], "and its mismatch is reported all the same"


def test_packing_does_not_matter():
    """Other rows, micro-batches and orders: the same gradient and the same metrics."""
    loss = LossConfig()
    groups = random_groups()
    want, want_metrics = run(groups, loss, rows=2, row_tokens=64)
    turned = [replace(g, trajectories=g.trajectories[::-1]) for g in groups[::-1]]
    for packing in ({"rows": 1, "row_tokens": 32}, {"rows": 4, "row_tokens": 16}):
        got, metrics = run(turned, loss, **packing)
        assert_same(got, want, rtol=1e-3, atol=1e-6)
        assert metrics.keys() == want_metrics.keys()
        for name, value in want_metrics.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_compiles_once_for_all_micro_batches_and_updates():
    loss = LossConfig()
    update = make_update(CONFIG, loss, optax.adam(1e-3), make_mesh({}), group_names=NAMES)
    batches = batches_of(random_groups(), loss, rows=1, row_tokens=32)
    assert len(batches) > 2
    state = update.init(PARAMS)
    for version in (4, 5):
        state, _ = update(state, batches, version=version)
    assert update._accumulate._cache_size() == update._apply._cache_size() == 1


def test_metrics_of_groups_and_staleness_add_up():
    groups = random_groups()
    _, metrics = run(groups, LossConfig())
    tokens = {name: metrics[f"group/{name}/num_tokens"] for name in NAMES}
    assert sum(tokens.values()) == metrics["num_tokens"]
    for name in ("kl", "entropy", "share_out_of_band", "abs_dlogp", "masked_q_mass"):
        mean = sum(n * metrics[f"group/{g}/{name}"] for g, n in tokens.items())
        np.testing.assert_allclose(mean / metrics["num_tokens"], metrics[name], rtol=1e-4)
    staleness = 4 - np.concatenate([t.version for t, _ in scored(groups)])
    np.testing.assert_allclose(metrics["staleness/mean"], staleness.mean(), rtol=1e-5)
    assert metrics["staleness/max"] == 3
    assert metrics["staleness/1/num_tokens"] == (staleness == 1).sum()
    assert metrics["staleness/2-3/num_tokens"] == (staleness == 3).sum()
    assert "staleness/0/kl" not in metrics
    shares = [metrics[f"group/{g}/share_of_out_of_band_tokens"] for g in NAMES]
    np.testing.assert_allclose(sum(shares), 1, rtol=1e-5)


def test_a_sampler_that_agrees():
    """Records made by the policy itself: the ratio is 1, the KL 0, and centering has no work."""
    groups = []
    for group in random_groups():
        members = []
        for t in group.trajectories:
            logits = np.asarray(dense_logits(PARAMS, rows_of([t])))[0]
            own, logp = [], []
            for n, index in enumerate(np.flatnonzero(t.loss_mask)):
                ids = t.candidates.ids[t.candidates.offsets[n] : t.candidates.offsets[n + 1]]
                logp.append(log_softmax(logits[index - 1][ids]))
                own.append(logp[-1][list(ids).index(t.tokens[index])])
            sets = replace(t.candidates, logp=np.concatenate(logp))
            members.append(replace(t, candidates=sets, sampler_logp=np.array(own, np.float32)))
        groups.append(replace(group, trajectories=tuple(members)))
    gradient, metrics = run(groups, LossConfig())
    for name in ("kl", "k3", "abs_dlogp_max", "share_out_of_band", "centering_norm"):
        np.testing.assert_allclose(metrics[name], 0, atol=1e-5, err_msg=name)
    for name in ("ess", "ratio_mean", "weight_mean"):
        np.testing.assert_allclose(metrics[name], 1, atol=1e-5, err_msg=name)
    plain, _ = run(groups, LossConfig(arm="grpo+top-p"))
    assert_same(gradient, plain, atol=1e-5)


def test_bands_of_groups():
    """A group whose band keeps nothing teaches through its centering term alone."""
    groups = random_groups()
    narrow = {"fp8": {"ratio_low": 0.9999, "ratio_high": 1.0001}}
    _, metrics = run(groups, LossConfig(bands=narrow))
    assert metrics["group/fp8/share_out_of_band"] > metrics["group/bf16/share_out_of_band"]
    assert metrics["group/fp8/masked_q_mass"] > 0.5


def test_frozen_router():
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    free, _ = run(random_groups(), LossConfig(), optimizer=optimizer)
    frozen, _ = run(random_groups(), LossConfig(), optimizer=optimizer, freeze_router=True)
    assert np.abs(free["layers"]["router"]).max() > 0
    assert not frozen["layers"]["router"].any()
    assert_same(frozen["layers"]["q"], free["layers"]["q"])


def test_bfloat16_masters_move_as_float32_ones_on_average():
    """Steps of a thousandth of a unit in the last place, which rounding to nearest would lose."""
    x = jnp.full((200_000,), 1.0 + 2.0**-18, jnp.float32)
    rounded = round_at_random({"w": x}, {"w": jnp.dtype("bfloat16")}, jnp.int32(3))["w"]
    assert rounded.dtype == jnp.bfloat16
    assert set(np.unique(np.asarray(rounded, np.float32))) == {1.0, 1.0 + 2.0**-7}
    share_up = (rounded > 1).astype(jnp.float32).mean()
    assert abs(share_up - 2.0**-11) < 4 * np.sqrt(2.0**-11 / len(x))
    again = round_at_random({"w": x}, {"w": jnp.dtype("bfloat16")}, jnp.int32(3))["w"]
    other = round_at_random({"w": x}, {"w": jnp.dtype("bfloat16")}, jnp.int32(4))["w"]
    assert_same(rounded, again)
    assert (rounded != other).any()
    odd = jnp.array([np.inf, -np.inf, np.nan, 0.0, -1.5], jnp.float32)
    same = round_at_random({"w": odd}, {"w": jnp.dtype("bfloat16")}, jnp.int32(0))["w"]
    np.testing.assert_array_equal(np.asarray(same, np.float32), odd)


def test_an_update_of_bfloat16_masters():
    groups, optimizer = random_groups(), optax.sgd(1e-2)
    wide = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), PARAMS)
    exact, of_exact = run(groups, LossConfig(), optimizer=optimizer, params=wide)
    found, of_found = run(
        groups, LossConfig(), optimizer=optimizer, params=wide, masters="bfloat16"
    )
    assert of_found["grad_norm"] == pytest.approx(of_exact["grad_norm"], rel=1e-3)
    for ours, theirs, start in zip(*map(jax.tree.leaves, (found, exact, wide)), strict=True):
        assert (np.abs(ours - theirs) <= 2.0**-7 * np.abs(np.asarray(start) + theirs)).all()


def test_refusals():
    update = make_update(CONFIG, LossConfig(), optax.sgd(1.0), make_mesh({}), group_names=NAMES)
    with pytest.raises(BadInputError, match="trained token"):
        update(update.init(PARAMS), [], version=1)
    with pytest.raises(BadInputError, match="tpu"):
        bands = {"tpu": {"ratio_low": 0.5, "ratio_high": 2.0}}
        make_update(
            CONFIG, LossConfig(bands=bands), optax.sgd(1.0), make_mesh({}), group_names=NAMES
        )
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), PARAMS)
    with pytest.raises(FloatingPointError):
        run(random_groups(), LossConfig(), params=bad)


@pytest.mark.slow
def test_eight_devices_make_the_same_update():
    """Data, FSDP, expert and tensor parallel, against one device."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer_jax.sharded_update"],
        env={
            **os.environ,
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
            + " --xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"meshes": 7}
