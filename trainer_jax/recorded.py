"""What a run keeps of the trajectories it trained on: files of whole updates, written and read.

Owns which updates are recorded, the way from a batch's slots back to trajectories, and the format.
Must not compute: the trainer's log-probs come out of the update itself (`trainer_jax.step`).

RUN/trajectories/update-000010.npz is the update that was made tenth:
    step, version    the update; the policy that `trainer_logp` is of, before it
    group_000000 ..  bytes of a `rollout.v1.TrajectoryGroup`, its trajectories packed by zstd
    counts           int32, trained tokens of each trajectory, group by group; 0: not trained on
    trainer_logp     float32, of these tokens one after the other
    masked           bool, likewise
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from contracts import codec
from contracts.errors import BadInputError
from contracts.files import replacing
from contracts.pb import rollout_pb2
from contracts.types import Trajectory, TrajectoryGroup
from trainer_jax.batch import Batch
from trainer_jax.objective import TokenValues

DIRECTORY = "trajectories"
_PATTERN = "update-[0-9]*.npz"
_GROUP = "group_"


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """What an update made of a trajectory's sampled tokens, in the order of its buffer."""

    trainer_logp: np.ndarray  # float32 [T], at the sampling temperature, over the replayed sets
    masked: np.ndarray  # bool [T], weight 0


@dataclass(frozen=True, kw_only=True)
class RecordedUpdate:
    """The first groups of an update. `trained` has a value for each of their trajectories, group by
    group: None for one that was not trained on, for want of a reward or a sampled token.
    """

    step: int
    version: int  # of the policy before the update
    groups: tuple[TrajectoryGroup, ...]
    trained: tuple[TrainedTokens | None, ...]

    def episodes(self) -> Iterator[tuple[TrajectoryGroup, Trajectory, TrainedTokens | None]]:
        members = [(group, t) for group in self.groups for t in group.trajectories]
        for (group, trajectory), trained in zip(members, self.trained, strict=True):
            yield group, trajectory, trained


def is_recorded(step: int, *, every: int) -> bool:
    """Whether the update made as number `step`, from 1, is recorded; the first is, if any."""
    return every > 0 and (step == 1 or step % every == 0)


def by_trajectory(
    batches: Sequence[Batch], values: Sequence[Sequence[TokenValues]]
) -> dict[int, TrainedTokens]:
    """What an update made of its tokens, by the trajectory's number among all handed to `pack`.

    Args:
        values: of every bucket of every micro-batch.
    """
    found: dict[int, TrainedTokens] = {}
    for batch, of_buckets in zip(batches, values, strict=True):
        columns: list[tuple[np.ndarray, ...]] = []
        for bucket, tokens in zip(batch.buckets, of_buckets, strict=True):
            used = bucket.mask_SxN
            origin = batch.origin_M[bucket.trajectory_SxN]
            arrays = (origin, bucket.position_SxN, tokens.trainer_logp, tokens.masked)
            columns.append(tuple(np.asarray(array)[used] for array in arrays))
        origin, position, trainer_logp, masked = map(np.concatenate, zip(*columns, strict=True))
        order = np.lexsort((position, origin))
        numbers, starts = np.unique(origin[order], return_index=True)
        for number, own in zip(numbers, np.split(order, starts[1:]), strict=True):
            found[int(number)] = TrainedTokens(trainer_logp=trainer_logp[own], masked=masked[own])
    return found


def write_recorded(run: Path, update: RecordedUpdate) -> None:
    """Replaces the update's file in the run's directory."""
    path = run / DIRECTORY / f"update-{update.step:06}.npz"
    path.parent.mkdir(exist_ok=True)
    trained = [tokens for tokens in update.trained if tokens]
    packed = [codec.compressed(codec.group_to_pb(group)) for group in update.groups]
    none = np.zeros(0, np.float32)
    arrays: dict[str, Any] = {
        "step": update.step,
        "version": update.version,
        "counts": np.array([len(t.masked) if t else 0 for t in update.trained], np.int32),
        "trainer_logp": np.concatenate([none, *(t.trainer_logp for t in trained)]),
        "masked": np.concatenate([none, *(t.masked for t in trained)]).astype(bool),
        **{
            f"{_GROUP}{number:06}": np.frombuffer(message.SerializeToString(), np.uint8)
            for number, message in enumerate(packed)
        },
    }
    with replacing(path) as aside, aside.open("wb") as file:
        np.savez(file, **arrays)


def forget_after(run: Path, step: int) -> None:
    """Removes what an earlier attempt recorded of updates that are about to be made again."""
    for path in (run / DIRECTORY).glob(_PATTERN):
        if _step_of(path) > step:
            path.unlink()


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("update-"))


def read_recorded(run: Path) -> Iterator[RecordedUpdate]:
    """The recorded updates of a run, which may be at work, in their order; one at a time.

    Raises:
        BadInputError: none; while reading, a file of something else.
    """
    paths = sorted((run / DIRECTORY).glob(_PATTERN), key=_step_of)
    if not paths:
        raise BadInputError(
            f"run directory {run}",
            expected="recorded trajectories (train.record_every above 0 has them written)",
            found="none",
        )
    return map(read_update, paths)


def read_update(path: Path) -> RecordedUpdate:
    """One file. Raises BadInputError: no recorded update."""
    try:
        with np.load(path) as file:
            arrays: Mapping[str, np.ndarray] = dict(file)
        names = sorted(name for name in arrays if name.startswith(_GROUP))
        messages = [
            rollout_pb2.TrajectoryGroup.FromString(arrays[name].tobytes()) for name in names
        ]
        counts, trainer_logp, masked = (arrays[n] for n in ("counts", "trainer_logp", "masked"))
        groups = tuple(codec.group_from_pb(message) for message in messages)
        lengths = [len(t.sampler_logp) for group in groups for t in group.trajectories]
        ends = np.cumsum(counts)
        pairs = zip(counts, lengths, strict=True)
        if any(count not in (0, length) for count, length in pairs) or not (
            len(trainer_logp) == len(masked) == counts.sum()
        ):
            raise ValueError("values of other tokens than were sampled")
        return RecordedUpdate(
            step=int(arrays["step"]),
            version=int(arrays["version"]),
            groups=groups,
            trained=tuple(
                TrainedTokens(trainer_logp=trainer_logp[start:end], masked=masked[start:end])
                if end > start
                else None
                for start, end in zip(ends - counts, ends, strict=True)
            ),
        )
    except (zipfile.BadZipFile, DecodeError, EOFError, KeyError, ValueError) as error:
        raise BadInputError(str(path), expected="a recorded update", found=error) from None
