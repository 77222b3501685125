"""What a mismatch report is about: recorded trajectories, a checkpoint, and the run's settings.

Owns the finding and reading of these: a run directory, a gateway's trajectory log, or a file of
length-delimited `rollout.v1.TrajectoryGroup` messages. Changes none of them; a run may be at work.

A run forgets groups that a durable checkpoint covers, so its log holds those since the checkpoint
before the last: the ones that were trained on when things went wrong.
"""

from __future__ import annotations

import asyncio
import io
import sqlite3
import tempfile
from collections.abc import Callable, Iterable
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from contracts import codec
from contracts.errors import BadInputError
from contracts.files import replacing
from contracts.pb import rollout_pb2
from contracts.runfile import read_resolved, validate_section
from contracts.types import TrajectoryGroup
from sampler_fleet.config import FleetConfig, SamplingConfig
from sampler_fleet.spool import Spool
from trainer_jax.checkpoint import CHECKPOINTS, read_params, read_position
from trainer_jax.config import ModelSection
from trainer_jax.hf import load_checkpoint, load_config
from trainer_jax.loss_config import LossConfig
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.parameters import Params
from trainer_jax.run_directory import RECORD
from weight_sync.manifest import NAME as MANIFEST
from weight_sync.manifest import read_manifest

LOG = "groups.sqlite"
_T = TypeVar("_T")
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Trajectories and what is known of how they were made. Without a run little is."""

    path: Path
    groups: list[TrajectoryGroup]
    sampling: SamplingConfig | None = None
    loss: LossConfig = field(default_factory=LossConfig)
    compute: ComputeConfig = field(default_factory=lambda: ComputeConfig(round_weights=True))
    replay: bool | None = None
    precision: dict[str, str] = field(default_factory=dict)  # by sampler group
    start_checkpoint: Path | None = None
    newest_checkpoint: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Weights to judge by. `version` is None where nobody wrote down which one they are."""

    path: Path
    config: ModelConfig
    params: Params
    version: int | None
    tokenizer: Path  # a directory that may hold tokenizer files


def read_source(path: Path) -> Source:
    """Everything that `path` says.

    Raises:
        BadInputError: neither a run directory, nor a trajectory log, nor a file of groups; no
            trajectories in it.
        FileNotFoundError: nothing there.
    """
    if not path.is_dir():
        return Source(path=path, groups=_not_empty(path, _read_file(path)))
    if (path / RECORD).exists():
        return _read_run(path)
    if (path / LOG).exists():  # a gateway's state directory
        return Source(path=path, groups=_not_empty(path, _read_log(path / LOG)))
    raise BadInputError(str(path), expected=f"a run's {RECORD} or a gateway's {LOG}", found="none")


def input_files(path: Path) -> list[Path]:
    """What a source of this path is read from: files, and directories of them."""
    if not path.is_dir():
        return [path]
    return [path / RECORD, path / LOG, path / "gateway", path / CHECKPOINTS]


def _read_run(path: Path) -> Source:
    sections = read_resolved(path / RECORD)
    if not isinstance(sections, dict) or not {"run", "model", "fleet"} <= sections.keys():
        raise BadInputError(
            str(path / RECORD), expected="a run's record", found="something else (a checkpoint?)"
        )
    log = path / "gateway" / LOG
    if not log.exists():
        raise BadInputError(
            f"run directory {path}",
            expected=f"gateway/{LOG} (a gateway elsewhere has it in its --state-dir)",
            found="none",
        )
    loss = validate_section(LossConfig, "loss", sections.get("loss", {}))
    model = validate_section(ModelSection, "model", sections["model"])
    fleet = validate_section(FleetConfig, "fleet", sections["fleet"])
    steps = [p for p in (path / CHECKPOINTS).glob("*") if p.name.isdecimal()]
    return Source(
        path=path,
        groups=_not_empty(path, _read_log(log)),
        sampling=validate_section(SamplingConfig, "sampling", sections.get("sampling", {})),
        loss=loss,
        compute=model.compute,
        replay=loss.replay,
        precision={
            group.name: f"{group.weight_format} weights, {group.activation_format} activations, "
            f"{group.kv_format} KV cache"
            for group in fleet.groups
        },
        start_checkpoint=model.checkpoint,
        newest_checkpoint=max(steps, key=lambda step: int(step.name), default=None),
    )


def _not_empty(path: Path, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    if not any(group.trajectories for group in groups):
        raise BadInputError(str(path), expected="at least one trajectory", found="none")
    return groups


def _read_file(path: Path) -> list[TrajectoryGroup]:
    data = path.read_bytes()
    if data.startswith(_SQLITE):
        return _read_log(path)
    stream, groups = io.BytesIO(data), []
    try:
        while message := _next_message(stream):
            groups.append(codec.group_from_pb(message))
    except (DecodeError, ValueError, EOFError, IndexError) as error:
        raise BadInputError(
            str(path),
            expected=f"a run directory, {LOG}, or length-delimited TrajectoryGroup messages",
            found=f"no such message after {len(groups)} ({error})",
        ) from None
    return groups


def _next_message(stream: io.BytesIO) -> rollout_pb2.TrajectoryGroup | None:
    message = parse_length_prefixed(rollout_pb2.TrajectoryGroup, stream)
    if message is not None and not message.trajectories:
        raise ValueError("a group without trajectories")
    return message


def write_groups(path: Path, groups: Iterable[TrajectoryGroup]) -> None:
    """The file that `read_source` reads: each group's length as a varint, then its bytes."""
    with replacing(path) as aside, aside.open("wb") as file:
        for group in groups:
            buffer = io.BytesIO()
            serialize_length_prefixed(codec.group_to_pb(group), buffer)
            file.write(buffer.getvalue())


def _read_log(path: Path) -> list[TrajectoryGroup]:
    """Through a copy: the log itself belongs to its gateway, which may be running."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / LOG
        try:
            with (
                closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as log,
                closing(sqlite3.connect(copy)) as target,
            ):
                log.backup(target)
                known = log.execute("SELECT 1 FROM sqlite_schema WHERE name = 'groups'").fetchone()
        except sqlite3.Error as error:
            known, reason = None, str(error)
        else:
            reason = "another database"
        if not known:
            raise BadInputError(f"trajectory log {path}", expected="a readable log", found=reason)
        return asyncio.run(_drain(copy))


async def _drain(path: Path) -> list[TrajectoryGroup]:
    spool = Spool(path)
    try:
        async with aclosing(spool.follow(0)) as groups:
            return [await anext(groups) for _ in range(spool.count())]
    finally:
        spool.close()


def read_checkpoint(path: Path, *, start: Path | None = None) -> Checkpoint:
    """A Hugging Face directory, or checkpoints/<step> of a run (`start`: its start checkpoint).

    Raises:
        BadInputError: neither.
    """
    if not (path / "position").exists():
        config, params = _naming(path, load_checkpoint)
        version = read_manifest(path).version if (path / MANIFEST).exists() else None
        return Checkpoint(path=path, config=config, params=params, version=version, tokenizer=path)
    version = read_position(path).version
    record = path.resolve().parent.parent / RECORD
    if start is None and record.exists():
        start = Path(read_resolved(record)["model"]["checkpoint"])
    if start is None:
        raise BadInputError(f"checkpoint {path}", expected="a run's record above it", found="none")
    return Checkpoint(
        path=path,
        config=_naming(start, load_config),
        params=read_params(path),
        version=version,
        tokenizer=start,
    )


def _naming(directory: Path, load: Callable[[Path], _T]) -> _T:
    """What `load` gives; its errors name the directory."""
    try:
        return load(directory)
    except BadInputError as error:
        if str(directory) in error.rule:
            raise
        raise BadInputError(
            f"checkpoint {directory}, {error.rule}", expected=error.expected, found=error.found
        ) from None
