"""What is recorded of an update: the policy's own log-probs, at the right trajectory and token."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.errors import BadInputError
from contracts.types import Trajectory, TrajectoryGroup
from tests.trainer_jax.random_trajectories import random_groups
from tests.trainer_jax.test_step import CONFIG, PARAMS, batches_of
from trainer_jax.config import RunConfig, load_run
from trainer_jax.hf import save_checkpoint
from trainer_jax.learner import Learner
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import make_mesh
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.recorded import (
    RecordedUpdate,
    TrainedTokens,
    forget_after,
    is_recorded,
    read_recorded,
    read_update,
    write_recorded,
)
from trainer_jax.step import make_update

TEMPERATURE = 0.8
LOW, HIGH = 0.7, 1.4
RUN_FILE = """
[run]
name = "recorded"
[model]
checkpoint = "{checkpoint}"
[loss]
arm = "{arm}"
ratio_low = {low}
ratio_high = {high}
[optimizer]
name = "sgd"
lr = 1.0
[sampling]
temperature = {temperature}
[train]
updates = 1
row_tokens = 32
micro_rows = 1
candidate_buckets = [4, 16]
record_every = {every}
[[fleet.groups]]
name = "bf16"
weight_format = "bf16"
[[fleet.groups]]
name = "fp8"
weight_format = "fp8-block"
"""


@pytest.fixture
def config_of(tmp_path):
    checkpoint = tmp_path / "model"
    save_checkpoint(checkpoint, CONFIG, PARAMS)

    def config_of(arm: str, every: int = 1) -> RunConfig:
        path = tmp_path / "run.toml"
        path.write_text(
            RUN_FILE.format(
                checkpoint=checkpoint, arm=arm, low=LOW, high=HIGH,
                temperature=TEMPERATURE, every=every,
            )
        )  # fmt: skip
        return load_run(path)

    return config_of


def expected_logp(config: RunConfig, learner: Learner, t: Trajectory) -> np.ndarray:
    """The policy's log-probs of the tokens drawn, from a forward pass of the trajectory alone."""
    shape, compute = (1, len(t.tokens)), config.model.compute
    hidden = hidden_states(
        learner.params, learner.model, jnp.asarray(t.tokens[None]),
        jnp.arange(shape[1], dtype=jnp.int32)[None], jnp.ones(shape, jnp.int32), compute=compute,
    )[0]  # fmt: skip
    logits = np.asarray(hidden @ head_weight(learner.params, compute=compute).T, np.float64)
    logits /= TEMPERATURE
    found = []
    for n, at in enumerate(np.flatnonzero(t.loss_mask)):
        own = slice(t.candidates.offsets[n], t.candidates.offsets[n + 1])
        support = t.candidates.ids[own] if config.loss.replay else slice(None)
        lse = np.log(np.exp(logits[at - 1][support]).sum())
        found.append(logits[at - 1][t.tokens[at]] - lse)
    return np.array(found)


def members(groups: list[TrajectoryGroup]) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories]


@pytest.mark.parametrize("arm", ["sc+mis+top-p", "grpo+mis"])
def test_values_are_the_policys_own(config_of, arm):
    """Over many micro-batches, whose rows are packed in another order than the groups."""
    config = config_of(arm)
    learner = Learner(config)
    groups = random_groups(whole=config.loss.replay)
    batches = learner.pack(groups)
    assert len(batches) > 2
    want = [expected_logp(config, learner, t) for t in members(groups)]
    update = learner.update(batches, version=4, record=True)
    trained = update.trained_tokens()
    assert sorted(trained) == [0, 1, 2, 3, 4, 5, 6], "the last has no reward"
    num_masked = 0
    for number, tokens in trained.items():
        np.testing.assert_allclose(tokens.trainer_logp, want[number], rtol=1e-4, atol=1e-5)
        log_ratio = tokens.trainer_logp - members(groups)[number].sampler_logp
        outside = (log_ratio < math.log(LOW)) | (log_ratio > math.log(HIGH))
        np.testing.assert_array_equal(tokens.masked, outside)
        num_masked += int(outside.sum())
    metrics = update.metrics()
    assert 0 < num_masked < metrics["num_tokens"]
    assert metrics["share_out_of_band"] * metrics["num_tokens"] == pytest.approx(num_masked)
    gaps = [t.trainer_logp - members(groups)[n].sampler_logp for n, t in trained.items()]
    assert metrics["abs_dlogp"] == pytest.approx(np.abs(np.concatenate(gaps)).mean(), rel=1e-4)


def test_nothing_is_masked_without_a_band(config_of):
    config = config_of("grpo+tis")
    learner = Learner(config)
    groups = random_groups(whole=False)
    trained = learner.update(learner.pack(groups), 4, record=True).trained_tokens()
    assert not np.concatenate([tokens.masked for tokens in trained.values()]).any()


def test_an_update_that_does_not_record_is_the_same(config_of):
    """And a run without recording has no array more, in its program or out of it."""
    groups = random_groups()
    states = []
    for every, record in ((0, False), (5, False), (5, True)):
        learner = Learner(config_of("sc+mis+top-p", every))
        update = learner.update(learner.pack(groups), 4, record=record)
        assert bool(update.trained_tokens()) == record
        states.append(learner.params)
    for other in states[1:]:
        for ours, theirs in zip(jax.tree.leaves(states[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)

    loss = LossConfig()
    (batch, *_) = batches_of(groups, loss)
    optimizer = config_of("sc+mis+top-p").optimizer.build()
    num_outputs = [
        len(jax.tree.leaves(update.lower(batch)["accumulate"].out_info))
        for update in (
            make_update(
                CONFIG, loss, optimizer, make_mesh({}), group_names=("bf16", "fp8"),
                keep_tokens=keep,
            )
            for keep in (False, True)
        )
    ]  # fmt: skip
    assert num_outputs[1] == num_outputs[0] + 2 * len(batch.buckets)


def a_recorded_update(step: int = 3) -> RecordedUpdate:
    groups = random_groups()
    rng = np.random.default_rng(step)
    return RecordedUpdate(
        step=step,
        version=step + 4,
        groups=tuple(groups),
        trained=tuple(
            TrainedTokens(
                trainer_logp=-rng.random(len(t.sampler_logp), np.float32),
                masked=rng.random(len(t.sampler_logp)) < 0.3,
            )
            if t.reward is not None
            else None
            for t in members(groups)
        ),
    )


def assert_equal_updates(got: RecordedUpdate, want: RecordedUpdate) -> None:
    assert (got.step, got.version) == (want.step, want.version)
    assert [g.sequence for g in got.groups] == [g.sequence for g in want.groups]
    for (_, t, a), (_, other, b) in zip(got.episodes(), want.episodes(), strict=True):
        np.testing.assert_array_equal(t.tokens, other.tokens)
        np.testing.assert_array_equal(t.candidates.logp, other.candidates.logp)
        assert replace(t, tokens=0, loss_mask=0, sampler_logp=0, candidates=0) == replace(
            other, tokens=0, loss_mask=0, sampler_logp=0, candidates=0
        )
        assert (a is None) == (b is None)
        if a and b:
            np.testing.assert_array_equal(a.trainer_logp, b.trainer_logp)
            np.testing.assert_array_equal(a.masked, b.masked)


def test_a_file_says_what_was_written(tmp_path):
    for step in (12, 3):
        write_recorded(tmp_path, a_recorded_update(step))
    for got, step in zip(read_recorded(tmp_path), (3, 12), strict=True):
        assert_equal_updates(got, a_recorded_update(step))
    again = replace(a_recorded_update(3), version=40)
    write_recorded(tmp_path, again)
    assert_equal_updates(next(read_recorded(tmp_path)), again)
    forget_after(tmp_path, 3)
    assert [update.step for update in read_recorded(tmp_path)] == [3]
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["update-000003.npz"]


def test_an_update_of_failures_alone(tmp_path):
    update = a_recorded_update()
    lost = replace(update, trained=(None,) * len(update.trained))
    write_recorded(tmp_path, lost)
    assert_equal_updates(next(read_recorded(tmp_path)), lost)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"no archive"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "trajectories" / "update-000001.npz"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"update-000001\.npz: expected a recorded update"):
        list(read_recorded(tmp_path))


def test_a_file_that_lacks_something_is_refused(tmp_path):
    write_recorded(tmp_path, a_recorded_update())
    (path,) = (tmp_path / "trajectories").iterdir()
    with np.load(path) as file:
        arrays = dict(file)
    for wrong in ({"counts": arrays["counts"][:-1]}, {"masked": arrays["masked"][:-1]}):
        np.savez(path, **(arrays | wrong))
        with pytest.raises(BadInputError, match="expected a recorded update"):
            read_update(path)
    np.savez(path, **{name: value for name, value in arrays.items() if name != "counts"})
    with pytest.raises(BadInputError, match="expected a recorded update"):
        read_update(path)


def test_a_run_without_recordings_is_told_how(tmp_path):
    with pytest.raises(BadInputError, match=r"train\.record_every"):
        read_recorded(tmp_path)


def test_the_first_update_and_every_nth_are_recorded():
    assert [step for step in range(1, 11) if is_recorded(step, every=4)] == [1, 4, 8]
    assert [step for step in range(1, 4) if is_recorded(step, every=1)] == [1, 2, 3]
    assert not any(is_recorded(step, every=0) for step in range(1, 11))


def test_names_of_files_are_in_order(tmp_path):
    for step in (999_999, 1_000_000):
        write_recorded(tmp_path, a_recorded_update(step))
    assert [update.step for update in read_recorded(tmp_path)] == [999_999, 1_000_000]
    assert Path(tmp_path / "trajectories" / "update-1000000.npz").exists()
