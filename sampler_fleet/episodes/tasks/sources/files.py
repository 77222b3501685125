"""Reading what task sources are made of: directories, text, TOML, JSON lines, Parquet.

Owns what a file is by its content, and one wording for each way it can be unreadable. Must not know
any format of tasks.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError

_PARQUET = b"PAR1"
_BOM = b"\xef\xbb\xbf"
_BATCH = 256  # rows of a Parquet file in memory at once
_START_BYTES = 1 << 16  # of a file, in which JSON has to begin


def walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative path with /, file) of all regular files below a directory, in order.

    Byte code is passed over. BadInputError for links and what else is neither file nor directory.
    """
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        here = Path(parent)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in sorted([*names, *links]):
            file = here / name
            if file.is_symlink() or not file.is_file():
                raise BadInputError(str(file), expected="a regular file", found="a link or device")
            yield file.relative_to(folder).as_posix(), file


def read_text(path: Path) -> str:
    """UTF-8 with its line ends as they are."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise BadInputError(str(path), expected="UTF-8", found=str(error)) from None


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadInputError(str(path), expected="valid TOML", found=str(error)) from None


def read_json(text: str | bytes, where: str) -> Any:
    """Any JSON value. BadInputError: it is none, or nested too deeply to read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(where, expected="JSON", found=str(error)) from None


def is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def has_rows(path: Path) -> bool:
    """Whether it is Parquet, or its first line that isn't empty is a JSON object."""
    if is_parquet(path):
        return True
    with path.open("rb") as file:
        start = file.read(_START_BYTES).removeprefix(_BOM).lstrip()
        if not start.startswith(b"{"):
            return False
        first, newline, _ = start.partition(b"\n")
        if not newline:
            first += file.readline()
    try:
        return isinstance(read_json(first, str(path)), dict)
    except BadInputError:
        return False


def is_lone(path: Path) -> bool:
    """Whether nothing follows the first line of a file of JSON lines."""
    with path.open("rb") as file:
        lines = (line for line in file if line.removeprefix(_BOM).strip())
        return next(lines, None) is not None and next(lines, None) is None


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row from 1, fields) of a file of JSON lines or Parquet.

    Raises:
        BadInputError: a line that is no JSON object; Parquet without pyarrow.
    """
    yield from enumerate(_parquet(path), 1) if is_parquet(path) else _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            fields = read_json(line, where)
            if not isinstance(fields, dict):
                raise BadInputError(where, expected="a JSON object", found=repr(fields))
            yield number, fields


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise BadInputError(
            str(path),
            expected="pyarrow in this Python environment (pip install pyarrow), or JSON lines "
            "(python -c \"import pandas; pandas.read_parquet('IN').to_json('OUT.jsonl', "
            "orient='records', lines=True)\" where pandas is)",
            found="a Parquet file and no pyarrow",
        )
    parquet = importlib.import_module("pyarrow.parquet")
    arrow = importlib.import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                yield from batch.to_pylist()
    except arrow.ArrowInvalid as error:
        raise BadInputError(str(path), expected="a Parquet file", found=str(error)) from None
