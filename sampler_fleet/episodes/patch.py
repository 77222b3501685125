"""Patches: what an episode changed of its tree, and which of it may be graded.

Owns the comparison with the recorded start tree, the rules of what a submission may touch, and the
diff text for logs. Pure: it sees names and bytes and opens nothing.

A patch is *refused* as a whole (reward 0) where it does what no honest fix does: leaves the tree,
touches `.git`, adds links or large binaries. Files that an honest episode may leave behind but
that could steer a test run (tests, their configuration, byte code) are *dropped* from it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from contracts.types import Patch
from sampler_fleet.episodes.base import Snapshot

MAX_FILES = 200
MAX_TEXT_BYTES = 1 << 20  # of a file
MAX_BINARY_BYTES = 64 << 10
MAX_TOTAL_BYTES = 4 << 20
MAX_PATH_BYTES = 1024

_DROPPED_FOLDERS = ("tests", "test", "__pycache__", "*.dist-info", "*.egg-info", ".pytest_cache")
_DROPPED_FILES = (
    *("test_*.py", "*_test.py", "conftest.py"),
    *("pytest.ini", ".pytest.ini", "pyproject.toml", "setup.cfg", "setup.py", "tox.ini"),
    *("*.pyc", "*.pyo", "*.pth", "sitecustomize.py", "usercustomize.py", "pyvenv.cfg"),
)
_NAME = re.compile(r"[^\x00-\x1f\x7f\\\ud800-\udfff]+")


@dataclass(frozen=True, kw_only=True)
class Screened:
    """The part of a patch that is graded, or why none of it is."""

    patch: Patch
    dropped: tuple[str, ...]
    refused: str  # "": it isn't


def capture(start: Mapping[str, bytes], end: Snapshot) -> Patch:
    """What happened between the tree as it was handed out (a checkout: {}) and as it is."""
    return Patch(
        changed={p: data for p, data in sorted(end.files.items()) if start.get(p) != data},
        deleted=tuple(sorted({*end.deleted, *(start.keys() - end.files.keys())})),
        special=tuple(sorted(end.special)),
        complete=end.complete,
    )


def apply(start: Mapping[str, bytes], patch: Patch) -> dict[str, bytes]:
    """The tree after the patch."""
    kept = {path: data for path, data in start.items() if path not in set(patch.deleted)}
    return {**kept, **patch.changed}


def screen(
    patch: Patch, start: Mapping[str, bytes], *, protected: Collection[str] = ()
) -> Screened:
    """Applies the rules. `protected` paths (the hidden tests') are dropped too."""
    paths = [*patch.changed, *patch.deleted]
    dropped = {path for path in paths if path in protected or _steers_tests(path)}
    kept = Patch(
        changed={path: data for path, data in patch.changed.items() if path not in dropped},
        deleted=tuple(path for path in patch.deleted if path not in dropped),
    )
    problems = [*_violations(patch), *_excess(kept), *_collisions(apply(start, kept))]
    refused = problems[0] if problems else ""
    return Screened(patch=kept, dropped=tuple(sorted(dropped)), refused=refused)


def _violations(patch: Patch) -> Iterator[str]:
    """What no honest fix does, in any part of it."""
    if not patch.complete:
        yield "the tree is larger than allowed"
    if patch.special:
        yield f"{patch.special[0]!r} is no regular file"
    for path in (*patch.changed, *patch.deleted):
        parts = path.split("/")
        if not _NAME.fullmatch(path) or len(path.encode()) > MAX_PATH_BYTES:
            yield f"{path!r} is no plain file name"
        if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
            yield f"{path!r} is outside the tree"
        if any(part.lower() == ".git" for part in parts):
            yield f"{path!r} belongs to git"


def _excess(patch: Patch) -> Iterator[str]:
    """What is too much; only what is graded counts: byte code is what a test run leaves behind."""
    if len(patch.changed) + len(patch.deleted) > MAX_FILES:
        yield f"more than {MAX_FILES} files"
    if sum(len(data) for data in patch.changed.values()) > MAX_TOTAL_BYTES:
        yield f"more than {MAX_TOTAL_BYTES} bytes"
    for path, data in patch.changed.items():
        limit = MAX_TEXT_BYTES if _text(data) is not None else MAX_BINARY_BYTES
        if len(data) > limit:
            yield f"{path!r} has {len(data)} bytes"


def _collisions(tree: Mapping[str, bytes]) -> Iterator[str]:
    """Where a saved patch would need a path to be both a file and a folder."""
    for path in tree:
        if any(str(parent) in tree for parent in PurePosixPath(path).parents):
            yield f"{path!r} is below another file"


def _steers_tests(path: str) -> bool:
    *folders, name = path.split("/")
    return any(
        fnmatchcase(part.lower(), pattern)
        for parts, patterns in ((folders, _DROPPED_FOLDERS), ([name], _DROPPED_FILES))
        for part in parts
        for pattern in patterns
    )


def _text(data: bytes) -> str | None:
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def diff(start: Mapping[str, bytes], patch: Patch) -> str:
    """A unified diff for people."""
    lines: list[str] = []
    for path in sorted({*patch.changed, *patch.deleted}):
        old, new = start.get(path), patch.changed.get(path)
        before, after = _text(old or b""), _text(new or b"")
        if before is None or after is None:
            lines.append(f"binary file {path!r} differs")
            continue
        lines += difflib.unified_diff(
            before.splitlines(),
            after.splitlines(),
            "/dev/null" if old is None else f"a/{path}",
            "/dev/null" if new is None else f"b/{path}",
            lineterm="",
        )
    return "\n".join(lines)
