"""Packing loses nothing, mixes nothing up, and refuses what the loss could not use."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from contracts.errors import BadInputError
from contracts.types import CandidateSets, TrajectoryGroup
from tests.trainer_jax.random_trajectories import random_groups
from trainer_jax.advantages import advantages_of, group_advantages, has_signal
from trainer_jax.batch import pack
from trainer_jax.records import RecordRules, check_trajectory

RULES = RecordRules(group_names=("bf16", "fp8"), vocab_size=64, replay=True, max_candidates=16)


def packed(groups, *, row_tokens=32, rows=2, buckets=(4, 16), rules=RULES, **more):
    advantages = advantages_of(groups, normalize=False)
    return pack(
        groups, advantages, row_tokens=row_tokens, rows=rows, candidate_buckets=buckets,
        rules=rules, **more,
    )  # fmt: skip


def trained_tokens(groups):
    """What each trained token should carry, as a sorted list."""
    rows = []
    for group, values in zip(groups, advantages_of(groups, normalize=False), strict=True):
        for t, advantage in zip(group.trajectories, values, strict=True):
            if t.reward is None:
                continue
            at = np.flatnonzero(t.loss_mask)
            for n, index in enumerate(at):
                own = slice(t.candidates.offsets[n], t.candidates.offsets[n + 1])
                rows.append(
                    (
                        tuple(t.tokens[: index + 1]),
                        float(t.sampler_logp[n]),
                        tuple(t.candidates.ids[own]),
                        tuple(t.candidates.logp[own]),
                        float(advantage),
                        ("bf16", "fp8").index(t.group),
                        int(t.version[n]),
                        len(at),
                    )
                )
    return sorted(rows)


def found_tokens(batches):
    """The same, read back from the arrays."""
    rows = []
    for batch in batches:
        for bucket in batch.buckets:
            S = bucket.mask_SxN.shape[0]
            tokens = batch.tokens_BxR.reshape(S, -1)
            positions = batch.positions_BxR.reshape(S, -1)
            segments = batch.segments_BxR.reshape(S, -1)
            for s, n in zip(*np.nonzero(bucket.mask_SxN), strict=True):
                at = bucket.position_SxN[s, n]
                assert segments[s, at] == segments[s, at + 1] > 0
                assert tokens[s, at + 1] == bucket.sampled_SxN[s, n]
                start = at - positions[s, at]
                assert len(set(segments[s, start : at + 2])) == 1
                ids = bucket.candidate_ids_SxNxK[s, n]
                logp = bucket.candidate_sampler_logp_SxNxK[s, n]
                assert np.array_equal(ids < 0, np.isneginf(logp))
                rows.append(
                    (
                        tuple(tokens[s, start : at + 2]),
                        float(bucket.sampler_logp_SxN[s, n]),
                        tuple(ids[ids >= 0]),
                        tuple(logp[ids >= 0]),
                        float(bucket.advantage_SxN[s, n]),
                        int(bucket.group_SxN[s, n]),
                        int(bucket.version_SxN[s, n]),
                        int(batch.num_trained_M[bucket.trajectory_SxN[s, n]]),
                    )
                )
    return sorted(rows)


@pytest.mark.parametrize(
    ("rows", "num_shards", "row_tokens"), [(1, 1, 32), (2, 1, 64), (4, 2, 32), (2, 2, 128)]
)
def test_every_trained_token_once_with_its_record(rows, num_shards, row_tokens):
    groups = random_groups()
    batches = packed(groups, rows=rows, num_shards=num_shards, row_tokens=row_tokens)
    assert found_tokens(batches) == trained_tokens(groups)
    assert len({batch.shape for batch in batches}) == 1
    assert sum(b.num_tokens for b in batches) == len(trained_tokens(groups))
    assert sum(b.num_sequences for b in batches) == 7, "the failure is left out"
    for batch in batches:
        assert batch.tokens_BxR.shape == (rows, row_tokens)


def test_tokens_lie_in_the_narrowest_bucket():
    batches = packed(random_groups(), buckets=(2, 4, 16))
    widths = [b.candidate_ids_SxNxK.shape[2] for b in batches[0].buckets]
    assert widths == [2, 4, 16]
    for batch in batches:
        for bucket, low in zip(batch.buckets, (0, 2, 4), strict=True):
            counts = (bucket.candidate_ids_SxNxK >= 0).sum(2)[bucket.mask_SxN]
            assert (counts > low).all()


def test_a_long_trajectory_gets_longer_rows():
    groups = random_groups()
    batches = packed(groups, row_tokens=16, rows=4)
    assert {b.tokens_BxR.shape for b in batches} == {(4, 16), (2, 32)}
    assert found_tokens(batches) == trained_tokens(groups)


def test_first_fit_decreasing_fills_rows():
    batches = packed(random_groups(), row_tokens=64, rows=1)
    used = [int((b.segments_BxR > 0).sum()) for b in batches]
    assert sum(used) == 117 and len(batches) == 2


def test_shapes_only_grow():
    groups = random_groups()
    first = packed(groups, row_tokens=64, rows=2)[0].shape
    assert all(slots & (slots - 1) == 0 for slots in first.slots)
    wider = first._replace(slots=tuple(2 * n for n in first.slots), num_trajectories=64)
    again = packed(groups, row_tokens=64, rows=2, at_least=[wider])
    assert [b.shape for b in again] == [wider] * len(again)
    assert found_tokens(again) == trained_tokens(groups)


def test_nothing_to_train_on():
    groups = random_groups()
    lost = [
        replace(g, trajectories=tuple(replace(t, reward=None) for t in g.trajectories))
        for g in groups
    ]
    with pytest.raises(BadInputError, match="trained token"):
        packed(lost)


def _set(trajectory, index, *, ids=None, logp=None):
    """The trajectory with another candidate set for its sampled token `index`."""
    sets = trajectory.candidates
    parts = [
        (sets.ids[a:b], sets.logp[a:b])
        for a, b in zip(sets.offsets[:-1], sets.offsets[1:], strict=True)
    ]
    old_ids, old_logp = parts[index]
    new_ids = old_ids if ids is None else np.array(ids, np.int32)
    new_logp = old_logp if logp is None else np.array(logp, np.float32)
    parts[index] = (new_ids, new_logp)
    return replace(
        trajectory,
        candidates=CandidateSets.from_counts(
            np.array([len(i) for i, _ in parts]),
            np.concatenate([i for i, _ in parts]),
            np.concatenate([p for _, p in parts]),
        ),
    )


def _sets(trajectory, **changes):
    return replace(trajectory, candidates=replace(trajectory.candidates, **changes))


def _sampled(t, index):
    return int(t.tokens[t.loss_mask][index])


FAULTS = {
    "a group of": lambda t: replace(t, group="tpu"),
    "sampler_logp finite": lambda t: replace(
        t, sampler_logp=np.where(np.arange(len(t.sampler_logp)) == 2, np.nan, t.sampler_logp)
    ),
    "candidate log-probs finite": lambda t: _set(t, 2, logp=[-np.inf] * t.candidates.counts[2]),
    "candidate ids in the vocabulary": lambda t: _set(t, 2, ids=[64], logp=[0.0]),
    "tokens in the vocabulary, found 64 at position 0": lambda t: replace(
        t, tokens=np.where(np.arange(len(t.tokens)) == 0, 64, t.tokens)
    ),
    "at most 16 candidates": lambda t: _set(t, 2, ids=range(17), logp=[np.log(1 / 17)] * 17),
    "candidate ids once": lambda t: _set(t, 2, ids=[5, 5], logp=np.log([0.5, 0.5])),
    "mass <= 1": lambda t: _set(t, 2, ids=[5, 6], logp=[0.0, 0.0]),
    "drawn in its replayed set": lambda t: _set(t, 2, ids=[(_sampled(t, 2) + 1) % 64], logp=[0.0]),
    "all of the sampler's mass": lambda t: _set(t, 2, ids=[_sampled(t, 2)], logp=[-0.5]),
    "equal to the set's": lambda t: replace(t, sampler_logp=t.sampler_logp - 1),
    "candidate sets": lambda t: replace(t, candidates=CandidateSets.empty()),
    "a finite reward, found nan": lambda t: replace(t, reward=math.nan),
    "a finite reward, found inf": lambda t: replace(t, reward=math.inf),
    "tokens as a list of integers": lambda t: replace(t, tokens=t.tokens.astype(float)),
    "loss_mask as a list of booleans": lambda t: replace(t, loss_mask=t.loss_mask.astype(int)),
    "sampler_logp as a list of floating": lambda t: replace(
        t, sampler_logp=np.zeros(len(t.sampler_logp), int)
    ),
    "candidate ids as a list of integers": lambda t: _sets(t, ids=t.candidates.ids * 1.0),
    "offsets that start at 0 and never fall, found \\[3": lambda t: _sets(
        t, offsets=np.r_[3, t.candidates.offsets[1:]]
    ),
    "offsets that start at 0 and never fall, found \\[0, 99": lambda t: _sets(
        t, offsets=np.r_[0, 99, t.candidates.offsets[2:]]
    ),
    "versions from 1, found .*version=-5": lambda t: replace(
        t, spans=tuple(replace(span, version=-5) for span in t.spans)
    ),
    "one token or more": lambda t: replace(
        t, spans=(replace(t.spans[0], start=9, end=2), *t.spans[1:])
    ),
    "token versions": lambda t: replace(t, spans=t.spans[:-1]),
    "prompt before": lambda t: replace(
        t, loss_mask=np.arange(len(t.tokens)) < np.count_nonzero(t.loss_mask)
    ),
}


@pytest.mark.parametrize("says", FAULTS)
def test_refusals_name_sampler_and_trajectory(says):
    good = random_groups()[0].trajectories[0]
    check_trajectory(good, RULES)
    bad = FAULTS[says](good)
    with pytest.raises(BadInputError, match=says) as caught:
        group = TrajectoryGroup(sequence=1, task_id="task-x", trajectories=(bad,))
        pack([group], [np.zeros(1)], row_tokens=32, rows=2, candidate_buckets=(4, 16), rules=RULES)
    for part in ("trajectory x0", "task task-x", "bf16-0", f"group {bad.group}"):
        assert part in str(caught.value)


def test_without_replay_the_token_may_lie_outside():
    groups = random_groups(whole=False)
    batches = packed(groups, rules=replace(RULES, replay=False))
    assert found_tokens(batches) == trained_tokens(groups)
    with pytest.raises(BadInputError):
        packed(groups)


def test_without_replay_a_record_may_not_contradict_itself():
    """Unless a tool asks for such records."""
    rules = replace(RULES, replay=False)
    bad = random_groups()[0].trajectories[0]
    bad = replace(bad, sampler_logp=bad.sampler_logp - 3)
    with pytest.raises(BadInputError, match=r"trajectory x0 .* equal to the set's"):
        check_trajectory(bad, rules)
    check_trajectory(bad, replace(rules, consistent=False))


def test_rewards_and_advantages_that_are_not_finite():
    groups = random_groups()
    quiet = replace(
        groups[0].trajectories[0],
        reward=math.nan,
        loss_mask=np.zeros(len(groups[0].trajectories[0].tokens), bool),
    )  # nothing to train on, so its record is not checked, but it has a say in the mean
    sick = [replace(groups[0], trajectories=(quiet, *groups[0].trajectories[1:])), groups[1]]
    with pytest.raises(BadInputError, match=r"trajectory x0 .* bf16-0 .* finite reward, found nan"):
        advantages_of(sick, normalize=False)
    with pytest.raises(BadInputError, match="rewards of a group: expected finite"):
        group_advantages([math.nan, 1, 0], normalize=False)
    advantages = advantages_of(groups, normalize=False)
    advantages[0] = advantages[0] * np.float32(np.nan)
    with pytest.raises(BadInputError, match=r"trajectory x0 .* a finite advantage, found nan"):
        pack(groups, advantages, row_tokens=64, rows=1, candidate_buckets=(16,), rules=RULES)


def test_advantages():
    np.testing.assert_allclose(
        group_advantages([1, 0, None, 0, 1], normalize=False), [0.5, -0.5, 0, -0.5, 0.5]
    )
    np.testing.assert_allclose(
        group_advantages([3, 1, None], normalize=True), [1, -1, 0], rtol=1e-5
    )
    for rewards in ([1, 1, None, 1], [None, None], [0.3] * 7, [1.0], []):
        assert not group_advantages(rewards, normalize=True).any()
    group = random_groups()[0]
    assert has_signal(group)
    equal = tuple(replace(t, reward=1.0) for t in group.trajectories)
    assert not has_signal(replace(group, trajectories=equal))
