"""What goes over the wire comes back as it was, and what is malformed is refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import codec
from contracts.errors import BadInputError
from contracts.pb import rollout_pb2
from contracts.routed import RoutedExperts
from contracts.types import (
    CandidateSets,
    Completion,
    Ending,
    FileEntry,
    FinishReason,
    Freshness,
    GenerateRequest,
    GroupUpdate,
    Manifest,
    Patch,
    Purpose,
    SamplingParams,
    TensorEntry,
    Trajectory,
    TrajectoryGroup,
    UpdateReport,
    VersionSpan,
    WeightFormat,
    check_completion,
)


def make_completion(num: int, seed: int = 0, version: int = 1) -> Completion:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 6, num)
    ids, logp, tokens, sampler_logp = [], [], [], []
    for count in counts:
        some = rng.choice(1000, count, replace=False).astype(np.int32)
        probs = rng.dirichlet(np.ones(count)).astype(np.float32)
        ids.append(some)
        logp.append(np.log(np.maximum(probs, 1e-30)))
        tokens.append(some[0])
        sampler_logp.append(logp[-1][0])
    return Completion(
        tokens=np.array(tokens, np.int32),
        sampler_logp=np.array(sampler_logp, np.float32),
        candidates=CandidateSets.from_counts(
            counts,
            np.concatenate(ids) if num else np.zeros(0, np.int32),
            np.concatenate(logp).astype(np.float32) if num else np.zeros(0, np.float32),
        ),
        spans=(VersionSpan(version=version, start=0, end=num),) if num else (),
        finish_reason=FinishReason.STOP,
    )


def same(a: object, b: object) -> None:
    """Field by field, arrays by value and bit for bit."""
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


@given(st.integers(0, 40), st.integers(0, 1000))
def test_chunks_round_trip(num: int, seed: int) -> None:
    chunk = make_completion(num, seed)
    same(codec.chunk_from_pb(codec.chunk_to_pb(chunk)), chunk)


@pytest.mark.parametrize("num_experts", [8, 256, 300])
def test_routed_experts_round_trip(num_experts: int) -> None:
    dtype = RoutedExperts.dtype_for(num_experts)
    rng = np.random.default_rng(num_experts)
    routed = tuple(
        RoutedExperts(
            start=start, ids=rng.random((num, 2, num_experts)).argsort(-1)[..., -3:].astype(dtype)
        )
        for start, num in ((0, 4), (6, 1))
    )
    chunk = dataclasses.replace(make_completion(4), routed_experts=routed)
    message = codec.chunk_to_pb(chunk)
    same(codec.chunk_from_pb(message), chunk)
    same(codec.chunk_from_pb(message).routed_experts[0].ids.dtype, np.dtype(dtype))
    width = RoutedExperts.bytes_per_token(2, 3, num_experts)
    assert [len(part.ids) for part in message.routed_experts] == [4 * width, width]
    for strange in ({"num_layers": 0}, {"num_per_token": 4}, {"ids": b"\1"}):
        bad = codec.chunk_to_pb(chunk)
        for name, value in strange.items():
            setattr(bad.routed_experts[1], name, value)
        with pytest.raises(BadInputError, match="routed experts"):
            codec.chunk_from_pb(bad)


def test_trajectory_groups_round_trip_with_and_without_a_reward() -> None:
    chunk = make_completion(4)
    mask = np.array([0, 0, 1, 1, 0, 1, 1], bool)
    trajectory = Trajectory(
        task_id="t",
        session_id="s",
        group="h100-fp8",
        sampler_ids=("a", "b"),
        tokens=np.arange(7, dtype=np.int32),
        loss_mask=mask,
        sampler_logp=chunk.sampler_logp,
        candidates=chunk.candidates,
        spans=(VersionSpan(version=3, start=2, end=4), VersionSpan(version=4, start=5, end=7)),
        reward=0.0,
        ending=Ending.SUBMITTED,
        num_turns=3,
        seconds=1.5,
    )
    lost = dataclasses.replace(
        trajectory, reward=None, ending=Ending.FAILURE, failure="sandbox gone"
    )
    group = TrajectoryGroup(sequence=9, task_id="t", trajectories=(trajectory, lost))
    back = codec.group_from_pb(codec.group_to_pb(group))
    same(back, group)
    assert back.trajectories[1].reward is None and back.trajectories[0].reward == 0.0
    np.testing.assert_array_equal(trajectory.version, [3, 3, 4, 4])


@pytest.mark.parametrize(
    "patch",
    [
        None,
        Patch(changed={}),
        Patch(
            changed={"a/b.py": b"\x00\xff", "\udcff\ud800": b""},
            deleted=("\udc80", "x"),
            special=("link",),
            complete=False,
        ),
    ],
)
def test_an_evaluation_brings_the_patch_whatever_its_names(patch) -> None:
    chunk = make_completion(2)
    trajectory = Trajectory(
        task_id="t",
        session_id="s",
        group="g",
        sampler_ids=("a",),
        tokens=chunk.tokens,
        loss_mask=np.ones(2, bool),
        sampler_logp=chunk.sampler_logp,
        candidates=chunk.candidates,
        spans=chunk.spans,
        reward=1.0,
        ending=Ending.SUBMITTED,
        sample=3,
        patch=patch,
        verdict="4 tests passed",
    )
    sent = codec.trajectory_to_pb(trajectory).SerializeToString()
    same(codec.trajectory_from_pb(rollout_pb2.Trajectory.FromString(sent)), trajectory)


def test_a_path_that_is_no_text_is_refused() -> None:
    message = rollout_pb2.Trajectory(ending="submitted")
    message.patch.changed.add(path=b"\xff", content=b"")
    with pytest.raises(BadInputError, match="path of a patch: expected UTF-8"):
        codec.trajectory_from_pb(message)


def test_a_group_packed_by_zstd_is_the_same_group_in_fewer_bytes() -> None:
    record = make_completion(400, seed=3)
    trajectory = Trajectory(
        task_id="t",
        session_id="s",
        group="g",
        sampler_ids=("a",),
        tokens=record.tokens,
        loss_mask=np.ones(400, bool),
        sampler_logp=record.sampler_logp,
        candidates=record.candidates,
        spans=record.spans,
        reward=1.0,
        ending=Ending.SUBMITTED,
    )
    group = TrajectoryGroup(sequence=7, task_id="t", trajectories=(trajectory,) * 8)
    message = codec.group_to_pb(group)
    packed = codec.compressed(message)
    assert packed.sequence == 7
    assert packed.ByteSize() < message.ByteSize() / 2, "eight trajectories that share everything"
    same(codec.group_from_pb(packed), group)
    broken = type(packed)(sequence=7, zstd=packed.zstd[:-9])
    for data in (broken.zstd, b"no frame", b""):
        if data:
            with pytest.raises(BadInputError, match="group 7, zstd: expected"):
                codec.group_from_pb(type(packed)(sequence=7, zstd=data))


def test_reports_of_updates_round_trip_with_and_without_values() -> None:
    empty = UpdateReport(step=1, version=2, seconds=3.0, update_seconds=1.0, num_taken=0)
    full = dataclasses.replace(
        empty,
        sequences=(4, 7),
        staleness=1.5,
        kl=0.25,
        share_out_of_band=0.0,
        reward=0.5,
        groups=(
            GroupUpdate(group="a", num_trajectories=3, num_tokens=9, kl=0.5, share_out_of_band=0.0),
            GroupUpdate(group="b", num_trajectories=0, num_tokens=0),
        ),
        alarms=("one", "two"),
    )
    for report in (empty, full):
        assert codec.update_from_pb(codec.update_to_pb(report)) == report


def test_how_fresh_groups_must_be_round_trips_and_is_checked() -> None:
    freshness = Freshness(version=7, groups_per_update=8, num_collected=3, staleness_limit=2)
    assert codec.freshness_from_pb(codec.freshness_to_pb(freshness)) == freshness
    for name, least in (("version", 0), ("groups_per_update", 1), ("staleness_limit", 0)):
        bad = codec.freshness_to_pb(dataclasses.replace(freshness, **{name: least - 1}))
        with pytest.raises(BadInputError, match=f"freshness, {name}: expected at least {least}"):
            codec.freshness_from_pb(bad)


@given(
    version=st.integers(0, 50),
    size=st.integers(1, 6),
    collected=st.integers(0, 5),
    limit=st.integers(0, 3),
    num_ahead=st.integers(0, 30),
)
def test_a_group_begun_is_never_too_old_in_its_turn(version, size, collected, limit, num_ahead):
    collected = min(collected, size - 1)
    freshness = Freshness(
        version=version, groups_per_update=size, num_collected=collected, staleness_limit=limit
    )
    oldest = freshness.oldest_version(num_ahead)
    trained_from, room = version, size - collected  # by counting: updates until its turn comes
    for _ in range(num_ahead):
        room -= 1
        if not room:
            trained_from, room = trained_from + 1, size
    if oldest is None:
        assert trained_from - version > limit, "even the newest version there is would be too old"
    else:
        assert 0 <= oldest <= version
        assert oldest == max(trained_from - limit, 0)


def test_requests_and_manifests_round_trip() -> None:
    request = GenerateRequest(
        request_id="r",
        session_id="s",
        tokens=np.array([1, 2, 3], np.int32),
        sampling=SamplingParams(temperature=0.7, top_p=0.97, top_k=64, stop_token_ids=(2, 5)),
        min_version=4,
        purpose=Purpose.EVALUATE,
    )
    same(codec.generate_from_pb(codec.generate_to_pb(request)), request)
    manifest = Manifest(
        version=7,
        format=WeightFormat.NVFP4,
        recipe="modelopt",
        files=(FileEntry(name="model.safetensors", num_bytes=10, checksum="ab"),),
        tensors=(
            TensorEntry(
                name="w",
                dtype="U8",
                shape=(2, 3),
                file="model.safetensors",
                start=2,
                end=8,
                checksum="cd",
            ),
        ),
    )
    same(codec.manifest_from_pb(codec.manifest_to_pb(manifest)), manifest)


def test_concatenated_chunks_join_spans_of_one_version() -> None:
    joined = Completion.concatenate(
        [
            make_completion(3, version=1),
            make_completion(2, version=1),
            make_completion(4, version=2),
        ]
    )
    assert joined.spans == (
        VersionSpan(version=1, start=0, end=5),
        VersionSpan(version=2, start=5, end=9),
    )
    check_completion(joined, sampler_id="s", truncates=True)


def test_truncated_fields_are_refused() -> None:
    message = codec.chunk_to_pb(make_completion(3))
    message.tokens = message.tokens[:-1]
    with pytest.raises(BadInputError, match="multiple of 4 bytes"):
        codec.chunk_from_pb(message)
    message = codec.chunk_to_pb(make_completion(3))
    message.candidate_logp = message.candidate_logp[:-4]
    with pytest.raises(BadInputError, match="candidate sets"):
        codec.chunk_from_pb(message)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda c: {"sampler_logp": np.full_like(c.sampler_logp, np.nan)}, "finite"),
        (lambda c: {"sampler_logp": np.full_like(c.sampler_logp, 0.5)}, "finite"),
        (lambda c: {"sampler_logp": c.sampler_logp[:-1]}, "log-probs"),
        (lambda c: {"tokens": c.tokens + 2000}, "candidate set"),
        (lambda c: {"spans": (VersionSpan(version=1, start=0, end=2),)}, "spans"),
        (lambda c: {"spans": (VersionSpan(version=0, start=0, end=3),)}, "spans"),
        (lambda c: {"spans": (VersionSpan(version=1, start=1, end=3),)}, "spans"),
    ],
)
def test_records_the_loss_cannot_use_name_their_sampler(change, rule) -> None:
    good = make_completion(3)
    check_completion(good, sampler_id="b200-0", truncates=True)
    with pytest.raises(BadInputError, match=rule) as caught:
        check_completion(
            dataclasses.replace(good, **change(good)), sampler_id="b200-0", truncates=True
        )
    assert "b200-0" in str(caught.value)
