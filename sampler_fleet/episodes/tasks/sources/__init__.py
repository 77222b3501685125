"""Task sources: whatever a data set keeps its tasks in, read into the one record.

Owns which format a file or directory is in, told by its content, and the list of formats. Must not
run anything of a task.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.tasks.sources import mimo, pro, r2e, swebench
from sampler_fleet.episodes.tasks.sources.files import has_rows, is_lone, is_parquet, read_rows
from sampler_fleet.episodes.tasks.sources.harbor import read_harbor
from sampler_fleet.episodes.tasks.sources.local import read_local
from sampler_fleet.episodes.tasks.sources.row import Row

TASK_FILE = "task.toml"


@dataclass(frozen=True)
class _Format:
    """A format of rows: the fields that it can't do without, and its reader."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Row], Task]


def read_tasks(
    source: Path, on_broken: Callable[[str, BadInputError], None] | None = None
) -> list[Task]:
    """All tasks of a file of rows, a directory of such files, or a directory of task directories.

    `on_broken` is told of tasks that can't be read, which are left out: (id, what is wrong), "" for
    an id that can't be told. Without it the first of them ends the reading.

    Raises:
        BadInputError: nothing that is known, a broken task, two tasks of one id.
        FileNotFoundError: no such file.
    """
    tasks: dict[str, Task] = {}
    for where, task_id, read in _readers(source):
        try:
            task = read()
            task_id = task.task_id
            if task_id in tasks:
                raise BadInputError(
                    where, expected="ids that differ", found=f"{task_id} a second time"
                )
        except BadInputError as error:
            if on_broken is None:
                raise
            on_broken(task_id, error)
        else:
            tasks[task_id] = task
    return list(tasks.values())


def _readers(source: Path) -> Iterator[tuple[str, str, Callable[[], Task]]]:
    """(where, id if it can be told, reader) of every task."""
    if source.is_file():
        files = [source]
        if not has_rows(source):
            raise BadInputError(
                str(source),
                expected="Parquet, or JSON lines: one object on each line",
                found="neither",
            )
    else:
        folders, files = _find(source)
        if bool(folders) == bool(files):
            raise BadInputError(
                str(source),
                expected=f"either directories with {TASK_FILE}, or files of rows",
                found="both: name one of them" if files else "neither",
            )
        for folder in folders:
            yield str(folder), folder.name, functools.partial(_read_folder, folder)
    formats = _formats()
    for file in files:
        for line, fields in read_rows(file):
            row = _row(file, line, fields)
            read = _recognize(row, formats)
            yield row.where, _instance(fields), functools.partial(read, row)


def _find(source: Path) -> tuple[list[Path], list[Path]]:
    """(task directories, files of rows) below a directory; nothing inside a task is looked at.

    Pipes, devices and links to nothing are passed over.
    """
    if not source.is_dir():
        raise FileNotFoundError(2, "No such file or directory", str(source))
    task_folders, row_files = [], []
    for parent, folders, names in os.walk(source):
        if TASK_FILE in names:
            task_folders.append(Path(parent))
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (Path(parent, name) for name in sorted(names) if not name.startswith("."))
        row_files += [file for file in files if file.is_file() and _has_tasks(file)]
    return task_folders, row_files


def _has_tasks(file: Path) -> bool:
    """Whether it has rows of tasks, known or not.

    Names of images are none, nor is a lone object that shares no field with any format: data sets
    keep facts of themselves beside their rows, such as `dataset_infos.json`.
    """
    if not has_rows(file) or mimo.is_mapping(file):
        return False
    return is_parquet(file) or not is_lone(file) or _shares_a_field(next(read_rows(file))[1])


def _shares_a_field(fields: Mapping[str, Any]) -> bool:
    known = {name.partition(".")[0] for one in _formats() for name in one.fields}
    return not known.isdisjoint(name.lower() for name in fields)


def _read_folder(folder: Path) -> Task:
    if not (folder / TASK_FILE).is_file():
        raise BadInputError(
            str(folder / TASK_FILE), expected="a regular file", found="a dead link, pipe or device"
        )
    if (folder / "instruction.md").is_file():
        return read_harbor(folder)
    if (folder / "tree").is_dir():
        return read_local(folder)
    raise BadInputError(
        str(folder), expected="tree/ (local format) or instruction.md (Harbor)", found="neither"
    )


def _formats() -> tuple[_Format, ...]:
    """Formats of rows; one that has the fields of another and more comes before it."""
    return (
        _Format("SWE-bench Pro V1", pro.FIELDS, pro.read_pro),
        _Format(
            "MiMo-V2.6-RL-oss",
            mimo.FIELDS,
            functools.partial(mimo.read_mimo, image_names=functools.cache(mimo.read_image_names)),
        ),
        _Format("R2E-Gym", r2e.FIELDS, r2e.read_r2e),
        _Format("SWE-bench", swebench.SWEBENCH_FIELDS, swebench.read_swebench),
        _Format("SWE-smith", swebench.SMITH_FIELDS, swebench.read_smith),
    )


def _row(file: Path, line: int, fields: Mapping[str, Any]) -> Row:
    where, instance = f"{file}, line {line}", _instance(fields)
    return Row(
        fields={name.lower(): value for name, value in fields.items()},
        where=f"{where}, {instance}" if instance else where,
        folder=file.parent,
    )


def _instance(fields: Mapping[str, Any]) -> str:
    """What most sets call a row; "" where it has no such name."""
    named = fields.get("instance_id")
    return named if isinstance(named, str) else ""


def _recognize(row: Row, formats: tuple[_Format, ...]) -> Callable[[Row], Task]:
    names = {*row.fields}
    if isinstance(row.fields.get("extra_info"), str | dict):
        names |= {f"extra_info.{name.lower()}" for name in row.table("extra_info")}
    for one in formats:
        if names.issuperset(one.fields):
            return one.read
    nearest = max(formats, key=lambda one: len(names.intersection(one.fields)) / len(one.fields))
    missing = [name for name in nearest.fields if name not in names]
    raise BadInputError(
        row.where,
        expected=f"a known format; the nearest is {nearest.name}, which has also "
        f"{', '.join(missing)}",
        found=f"only {', '.join(sorted(names)) or 'an empty object'}",
    )
