"""What a run says about each update: metrics.jsonl, TensorBoard events, statistics of a batch.

Owns the names of the metrics that come from trajectories, the file with one JSON line per update,
and the event files beside it. Must not compute losses (`trainer_jax.step` does) nor draw
(`trainer_jax.live`, `trainer_jax.report`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar

from contracts.errors import BadInputError
from contracts.types import Ending, Trajectory, TrajectoryGroup
from trainer_jax.advantages import has_signal

Record = dict[str, Any]

METRICS_FILE = "metrics.jsonl"


def batch_statistics(groups: Sequence[TrajectoryGroup], version: int) -> Record:
    """What the trajectories of one update say by themselves, against the trainer's `version`.

    Shares are in [0, 1]; staleness is the trainer's version minus the token's, over sampled tokens;
    trajectories lost to the infrastructure count only as `infrastructure_failures`.
    """
    everything = [t for group in groups for t in group.trajectories]
    scored = [t for t in everything if t.reward is not None]
    record: Record = {
        "sequences": [group.sequence for group in groups],
        "num_trajectories": len(scored),
        "infrastructure_failures": len(everything) - len(scored),
    }
    if not scored:
        return record
    rewards = np.array([t.reward for t in scored])
    versions = np.concatenate([t.version for t in scored])
    record |= {
        "reward": float(rewards.mean()),
        "share_of_mixed_groups": float(np.mean([has_signal(group) for group in groups])),
        "sampled_tokens": len(versions),
        "episode_tokens": float(np.mean([len(t.tokens) for t in scored])),
        "episode_turns": float(np.mean([t.num_turns for t in scored])),
        "episode_seconds": float(np.mean([t.seconds for t in scored])),
        "format_error_share": sum(t.num_format_errors for t in scored)
        / max(1, sum(t.num_turns for t in scored)),
        "num_failovers": sum(max(0, len(t.sampler_ids) - 1) for t in scored),
    }
    num_routed = sum(len(part.ids) for t in scored for part in t.routed_experts)
    if num_routed:
        record["share_of_routed_tokens"] = num_routed / sum(len(t.tokens) for t in scored)
    if len(versions):
        staleness = version - versions
        record |= {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": int(staleness.max()),
            "versions/min": int(versions.min()),
            "versions/max": int(versions.max()),
        }
    endings = Counter(t.ending for t in scored)
    record |= {f"ending/{e}": endings[e] / len(scored) for e in Ending if e != Ending.FAILURE}
    return record | _by_sampler_group(scored)


def _by_sampler_group(scored: Sequence[Trajectory]) -> Record:
    record: Record = {}
    for name in sorted({t.group for t in scored}):
        own = [t for t in scored if t.group == name]
        record |= {
            f"group/{name}/share_of_samples": len(own) / len(scored),
            f"group/{name}/samples": len(own),
            f"group/{name}/sampled_tokens": int(sum(len(t.sampler_logp) for t in own)),
            f"group/{name}/reward": float(np.mean([t.reward or 0.0 for t in own])),
            f"group/{name}/timeout_share": sum(t.ending == Ending.TIMEOUT for t in own) / len(own),
        }
    return record


def read_metrics(directory: Path) -> list[Record]:
    """The records of a run, in order. A last line cut off by a kill is left out.

    Raises:
        BadInputError: a line in the middle that is not JSON.
        FileNotFoundError: no metrics file.
    """
    lines = (directory / METRICS_FILE).read_text().splitlines()
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise BadInputError(
                f"{directory / METRICS_FILE}, line {number}", expected="JSON", found=str(error)
            ) from None
    return records


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


class MetricsLog:
    """One JSON line and one TensorBoard step per update.

    Opened after a resume it forgets everything beyond `last_step`: where an update was made twice,
    the later attempt is the record.
    """

    def __init__(self, directory: Path, *, last_step: int = 0) -> None:
        path = directory / METRICS_FILE
        kept: list[Record] = []
        if path.exists():
            kept = [r for r in read_metrics(directory) if r["step"] <= last_step]
            scratch = path.with_suffix(".tmp")
            scratch.write_text("".join(_line(record) for record in kept))
            os.replace(scratch, path)
        self.records = kept
        self._file = path.open("a", buffering=1)
        (directory / "tensorboard").mkdir(exist_ok=True)
        # not SummaryWriter, whose thread and exit hook make a full disk a hang and a traceback
        self._events = EventsWriter(str(directory / "tensorboard" / "events"))
        if last_step:  # TensorBoard forgets what an earlier attempt wrote from here on
            self._events.write_event(_event(last_step + 1, session_log={"status": "START"}))

    def write(self, record: Record) -> None:
        """Appends the record of `record["step"]`; numbers also become scalars of the event file."""
        self.records.append(record)
        self._file.write(_line(record))
        event = _event(record["step"])
        for name, value in _numbers(record):
            if name != "step":
                event.summary.MergeFrom(scalar(name, value))
        self._events.write_event(event)
        self._events.flush()

    def close(self) -> None:
        """Never raises: what could not be written has already failed in `write`."""
        for file in (self._file, self._events):
            with contextlib.suppress(OSError):
                file.close()


def _event(step: int, **content: Any) -> Any:
    new = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
    return new(step=step, wall_time=time.time(), **content)


def _line(record: Record) -> str:
    # NaN is not JSON; a metric without a value is null
    clean = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(clean, sort_keys=True) + "\n"
