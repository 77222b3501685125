"""The directory of one run: who may write it, what an earlier attempt left, the run record.

Owns the layout's fixed names and the lock. Must not know what the files hold.

    config.json             the run record: all sections, resolved
    metrics.jsonl           one line per update
    tensorboard/            the same as event files
    evaluation-before.json  held-out pass rates; -after likewise
    summary.json, report.html
    checkpoints/            the trainer's own (Orbax)
    final/                  the trained policy, a Hugging Face directory
    logs/                   one file per local service
    gateway/, weights/, samplers/   state of the local services
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any, Literal

from contracts.errors import BadInputError
from contracts.runfile import read_resolved, write_resolved

Mode = Literal["new", "resume", "fresh"]

RECORD = "config.json"
LOCK_WAIT_S = 40.0  # processes of a killed attempt need a moment to end
# Changing these would make another run of it, or a checkpoint that does not fit.
_IDENTITY = (("run", "name"), ("model", "checkpoint"), ("optimizer", "name"))


class RunDirectory:
    """An open run directory. The lock is inherited by the run's local services (`lock_fd`), so
    that nobody opens it before the last process of an earlier attempt is gone."""

    def __init__(self, path: Path, mode: Mode, sections: dict[str, dict[str, Any]]) -> None:
        """Opens `path` and writes the run record.

        Raises:
            BadInputError: there is a run already and `mode` is new; another process has it open;
                a resume without a run, or of another run.
        """
        self.path = path
        record = path / RECORD
        if mode == "new" and record.exists():
            raise BadInputError(
                f"run directory {path}",
                expected="no earlier run (--resume goes on with it, --fresh moves it aside)",
                found=record,
            )
        if mode == "resume":
            _check_same_run(record, sections)
        if mode == "fresh" and record.exists():
            self._lock(path, wait_s=LOCK_WAIT_S).close()
            path.rename(_free_name(path))
        path.mkdir(parents=True, exist_ok=True)
        self._file = self._lock(path, wait_s=LOCK_WAIT_S if mode == "resume" else 0.0)
        write_resolved(record, sections)

    @property
    def lock_fd(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def _lock(path: Path, *, wait_s: float):
        file = (path / ".lock").open("w")
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.close()
                    raise BadInputError(
                        f"run directory {path}",
                        expected="no process of this run still at work",
                        found="one that holds its lock",
                    ) from None
                time.sleep(0.2)


def _check_same_run(record: Path, sections: dict[str, dict[str, Any]]) -> None:
    if not record.exists():
        raise BadInputError("--resume", expected=f"a run in {record.parent}", found="none")
    earlier = read_resolved(record)
    for section, key in _IDENTITY:
        was, now = earlier.get(section, {}).get(key), sections[section][key]
        if was != now:
            raise BadInputError(f"--resume, {section}.{key}", expected=was, found=now)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate
