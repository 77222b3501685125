"""The directory of one run: who may write it, what an earlier attempt left, the run record.

Owns the layout's fixed names and the lock. Must not know what the files hold.

    config.json             the run record: all sections, resolved
    metrics.jsonl           one line per update
    tensorboard/            the same as event files
    trajectories/           what was trained on, of the updates that [train] has recorded
    evaluation-before.json  held-out pass rates; -after likewise
    summary.json, report.html
    checkpoints/            the trainer's own (Orbax)
    final/                  the trained policy, a Hugging Face directory
    logs/                   one file per local service; samplers of the autoscaler: samplers/logs/
    gateway/, weights/, samplers/   state of the local services
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from contracts.errors import BadInputError
from contracts.files import lock
from contracts.runfile import read_resolved, write_resolved

Mode = Literal["new", "resume", "fresh"]

RECORD = "config.json"
LOCK = ".lock"
SERVICES = ("gateway", "weights", "samplers")  # directories of the local services
LOCK_WAIT_S = 40.0  # processes of a killed attempt need a moment to end
# Changing these, or anything in these sections, would make another experiment of the run, or a
# checkpoint that does not fit.
_IDENTITY = (
    *("run.name", "run.seed", "model.checkpoint", "optimizer.name", "episodes.group_size"),
    *("loss", "sampling", "tasks"),
)


class RunDirectory:
    """An open run directory. The lock is inherited by the run's local services (`lock_fd`), so
    that nobody opens it before the last process of an earlier attempt is gone."""

    def __init__(self, path: Path, mode: Mode, sections: dict[str, dict[str, Any]]) -> None:
        """Opens `path` and writes the run record.

        A start that failed before it had anything to go on from is no run: its successor takes
        the directory. `changes` says what a resume does differently from the record.

        Raises:
            BadInputError: there is a run already and `mode` is new; another process has it open;
                a resume without a run, or of another run.
        """
        self.path = path
        self.changes: list[str] = []
        record = path / RECORD
        is_left = record.exists() and (path / LOCK).exists()  # by an earlier start
        is_begun = _is_begun(path)
        if mode == "new" and record.exists() and (is_begun or not is_left):
            raise BadInputError(
                f"run directory {path}",
                expected="no earlier run (--resume goes on with it, --fresh moves it aside)",
                found=record,
            )
        if mode == "resume":
            if not record.exists():
                raise BadInputError("--resume", expected=f"a run in {path}", found="none")
            if is_begun:
                self.changes = _changes(read_resolved(record), sections)
        if mode == "fresh" and record.exists():
            self._lock(path, wait_s=LOCK_WAIT_S).close()
            path.rename(_free_name(path))
            is_left = False
        path.mkdir(parents=True, exist_ok=True)
        self._file = self._lock(path, wait_s=LOCK_WAIT_S if mode == "resume" else 0.0)
        if is_left and not _is_begun(path):
            for name in SERVICES:  # episodes of a failed start may be of other settings
                shutil.rmtree(path / name, ignore_errors=True)
        write_resolved(record, sections)

    @property
    def lock_fd(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def _lock(path: Path, *, wait_s: float):
        try:
            return lock(path / LOCK, wait_s=wait_s)
        except BlockingIOError:
            raise BadInputError(
                f"run directory {path}",
                expected="no process of this run still at work",
                found="one that holds its lock",
            ) from None


def _is_begun(path: Path) -> bool:
    """Whether an attempt left anything to go on from: a checkpoint, an update, an evaluation."""
    checkpoints, metrics = path / "checkpoints", path / "metrics.jsonl"
    return (
        (checkpoints.is_dir() and any(step.name.isdigit() for step in checkpoints.iterdir()))
        or (metrics.is_file() and metrics.stat().st_size > 0)
        or (path / "evaluation-before.json").exists()
    )


def _changes(recorded: dict[str, dict[str, Any]], sections: dict[str, dict[str, Any]]) -> list[str]:
    """What differs from the record, as "key = now (was then)".

    Raises:
        BadInputError: a difference that makes another run of it.
    """
    earlier, now = dict(flat("", recorded)), dict(flat("", sections))
    changes = []
    for key in sorted(earlier.keys() | now.keys()):
        was, found = earlier.get(key, "nothing"), now.get(key, "nothing")
        if was == found:
            continue
        if any(key == name or key.startswith(f"{name}.") for name in _IDENTITY):
            raise BadInputError(f"--resume, {key}", expected=f"{was} as recorded", found=found)
        changes.append(f"{key} = {found} (was {was})")
    return changes


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; the tables of a list are numbered."""
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield prefix, list(value) if isinstance(value, tuple) else value
        return
    for key, part in value.items():
        yield from flat(f"{prefix}.{key}" if prefix else str(key), part)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate
