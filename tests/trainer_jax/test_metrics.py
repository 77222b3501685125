import dataclasses
import json
import struct

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from contracts.errors import BadInputError
from contracts.types import CandidateSets, Ending, Trajectory, TrajectoryGroup, VersionSpan
from trainer_jax.metrics import METRICS_FILE, MetricsLog, batch_statistics, read_metrics


def trajectory(group="a", reward=1.0, versions=(3, 3, 5), **changes) -> Trajectory:
    num = len(versions)
    values = {
        "task_id": "t",
        "session_id": "s",
        "group": group,
        "sampler_ids": ("x",),
        "tokens": np.arange(num + 2, dtype=np.int32),
        "loss_mask": np.array([False] * 2 + [True] * num),
        "sampler_logp": np.full(num, -1.0, np.float32),
        "candidates": CandidateSets.from_counts(
            np.ones(num, np.int64), np.arange(num, dtype=np.int32), np.zeros(num, np.float32)
        ),
        "spans": tuple(
            VersionSpan(version=v, start=2 + i, end=3 + i) for i, v in enumerate(versions)
        ),
        "reward": reward,
        "ending": Ending.SUBMITTED,
        "num_turns": 4,
        "num_format_errors": 1,
    }
    return Trajectory(**{**values, **changes})


def group_of(*trajectories: Trajectory, sequence=1) -> TrajectoryGroup:
    return TrajectoryGroup(sequence=sequence, task_id="t", trajectories=trajectories)


def test_statistics_of_a_batch():
    lost = trajectory(reward=None, ending=Ending.FAILURE, versions=())
    groups = [
        group_of(trajectory("a", 1.0), trajectory("b", 0.0, versions=(1,)), lost, sequence=7),
        group_of(trajectory("a", 1.0), trajectory("a", 1.0, ending=Ending.TIMEOUT), sequence=8),
    ]
    record = batch_statistics(groups, version=5)
    assert record["sequences"] == [7, 8]
    assert (record["num_trajectories"], record["infrastructure_failures"]) == (4, 1)
    assert record["reward"] == 0.75
    assert record["share_of_mixed_groups"] == 0.5
    assert record["sampled_tokens"] == 10
    assert record["staleness/mean"] == pytest.approx((3 * (2 + 2 + 0) + 4) / 10)
    assert record["staleness/max"] == 4
    assert (record["versions/min"], record["versions/max"]) == (1, 5)
    assert record["ending/timeout"] == 0.25
    assert record["format_error_share"] == 0.25
    assert record["group/a/share_of_samples"] == 0.75
    assert record["group/a/timeout_share"] == pytest.approx(1 / 3)
    assert record["group/b/reward"] == 0.0
    assert "group/b/share_of_samples" in record


def test_a_batch_that_was_lost_has_no_reward():
    record = batch_statistics([group_of(trajectory(reward=None, versions=()))], version=2)
    assert record["infrastructure_failures"] == 1
    assert "reward" not in record


def test_lines_are_json_also_when_a_value_is_not_finite(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "kl": float("nan"), "reward": 0.5, "sequences": [1, 2]})
    log.close()
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "kl": None,
        "reward": 0.5,
        "sequences": [1, 2],
    }
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_resumed_log_forgets_what_the_checkpoint_does_not_cover(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.write({"step": step, "attempt": 1})
    log.close()
    log = MetricsLog(tmp_path, last_step=3)
    log.write({"step": 4, "attempt": 2})
    log.close()
    assert [(r["step"], r["attempt"]) for r in read_metrics(tmp_path)] == [
        *((step, 1) for step in (1, 2, 3)),
        (4, 2),
    ]
    assert [r["step"] for r in log.records] == [1, 2, 3, 4]


def test_events_are_scalars_of_the_update(tmp_path):
    log = MetricsLog(tmp_path, last_step=1)
    log.write({"step": 2, "group/a-1/kl": 0.5, "sequences": [1]})
    log.close()
    (path,) = (tmp_path / "tensorboard").glob("events*")
    data, events = path.read_bytes(), []
    while data:  # length, its checksum, the event, its checksum
        (length,) = struct.unpack_from("<Q", data)
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    version, start, update = events
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (2, event_pb2.SessionLog.START)
    assert [(v.tag, v.simple_value) for v in update.summary.value] == [("group/a-1/kl", 0.5)]
    assert update.step == 2


@pytest.mark.parametrize("full", ["lines", "events"])
def test_a_full_disk_fails_the_write_and_not_the_end(tmp_path, full):
    log = MetricsLog(tmp_path)
    owner, name = (
        (log, "_file") if full == "lines" else (log._events._py_recordio_writer, "_writer")
    )
    opened = getattr(owner, name)
    opened.close()
    mode, buffering = ("w", 1) if full == "lines" else ("wb", -1)
    setattr(owner, name, open("/dev/full", mode, buffering))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        log.write({"step": 1, "kl": 0.5})
    log.close()


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{"step": 2, "kl"')
    assert read_metrics(tmp_path) == [{"step": 1}]
    log = MetricsLog(tmp_path, last_step=5)
    log.write({"step": 2})
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_damage_in_the_middle_is_an_error(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(BadInputError, match="line 1"):
        read_metrics(tmp_path)


def test_staleness_needs_tokens():
    empty = dataclasses.replace(trajectory(versions=()), reward=0.0)
    assert "staleness/mean" not in batch_statistics([group_of(empty)], version=1)
