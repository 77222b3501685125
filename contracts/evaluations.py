"""The files of an evaluation that trainer and fleet both read: records as lines of JSON.

Owns their names, lines that survive a power cut, what a kill leaves of the last one, and the form
of a patch in them. Must not know what else a record holds.

    settings.json    what was evaluated, and how; "digests" has a checksum of each task, by its id
    config.json      the run record: the sections that the episodes were played by
    episodes.jsonl   a line per episode as it ended
    regraded.jsonl   a line per patch that was graded again; "checksum" is of the patch, its first
                     verdict and the task, and the last line of a patch and sample is the one that
                     counts
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any, TextIO

from contracts.errors import BadInputError
from contracts.files import lock
from contracts.types import Patch

SETTINGS = "settings.json"
CONFIG = "config.json"
LOCK = ".lock"  # held by whoever evaluates or grades
EPISODES = "episodes.jsonl"
REGRADED = "regraded.jsonl"

Record = dict[str, Any]


class RecordFile:
    """A file of records, open to add some; nobody else may have it open so. `records` are those
    that were there. What is left of a line without an end is taken away."""

    def __init__(self, path: Path) -> None:
        """Raises BadInputError: a line that is no record."""
        self.records = read_records(path)
        self._file = path.open("ab")
        end = self._file.tell()
        whole = path.read_bytes().rfind(b"\n") + 1
        if whole < end:
            self._file.truncate(whole)

    def add(self, record: Record) -> None:
        """Returns when the line is on the disk."""
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """The records of a file; none if it isn't there. A line without an end doesn't count.

    Raises:
        BadInputError: a line that is no record.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise BadInputError(
                f"{path}, line {number}", expected="JSON", found=str(error)
            ) from None
        if not isinstance(record, dict):
            raise BadInputError(f"{path}, line {number}", expected="an object", found=record)
        records.append(record)
    return records


def lock_evaluation(directory: Path) -> TextIO:
    """The lock on an evaluation's files. Raises BadInputError: somebody has it."""
    try:
        return lock(directory / LOCK, wait_s=0.0)
    except BlockingIOError:
        raise BadInputError(
            str(directory), expected="no process that evaluates there", found="one at work"
        ) from None


def patch_to_json(patch: Patch) -> Record:
    """Contents as base64."""
    return {
        "changed": {path: base64.b64encode(data).decode() for path, data in patch.changed.items()},
        "deleted": list(patch.deleted),
        "special": list(patch.special),
        "complete": patch.complete,
    }


def patch_from_json(data: Record) -> Patch:
    """Raises KeyError, TypeError or ValueError: not what `patch_to_json` wrote."""
    return Patch(
        changed={p: base64.b64decode(text, validate=True) for p, text in data["changed"].items()},
        deleted=tuple(data["deleted"]),
        special=tuple(data["special"]),
        complete=bool(data["complete"]),
    )
