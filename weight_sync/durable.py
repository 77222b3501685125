"""Files that survive a power cut: written aside, flushed, then renamed into place.

Owns fsync, atomic replacement, staging folders and file checksums. Knows nothing of versions or
tensors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash

# What a machine refuses for a while, and says nothing of the bytes that are on its disk.
TEMPORARY = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_READ_BYTES = 4 * 1024 * 1024


def checksum(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_file(path: Path) -> str:
    """xxh3-128 of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def flush(path: Path) -> None:
    """fsync of a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """fsync of every file below a directory, then of the directories, innermost first."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            flush(Path(parent) / name)
        flush(Path(parent))


def write_text(path: Path, text: str) -> None:
    """Replaces a file: afterwards it holds the old text or the new, whatever happens."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """As `write_text`."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        aside.write_bytes(data)
        flush(aside)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    flush(path.parent)


@contextlib.contextmanager
def staging(final: Path) -> Iterator[Path]:
    """A new directory beside `final`, to be filled and moved; what stays of it is removed.

    It is locked while the block runs. What a killed process left here for the same `final` is not,
    and is removed first.
    """
    for path in final.parent.iterdir():
        if re.fullmatch(rf"\.(?:{re.escape(final.name)}\.|doomed-)[0-9a-f]{{8}}", path.name):
            _remove_abandoned(path)
    staged = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
    staged.mkdir()
    descriptor = os.open(staged, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes it either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield staged
    finally:
        os.close(descriptor)
        remove_tree(staged)


def _remove_abandoned(directory: Path) -> None:
    """Removes a staging directory unless a living process holds it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        return
    finally:
        os.close(descriptor)


def move_into_place(staged: Path, final: Path) -> None:
    """Makes a flushed directory visible under its final name, all at once.

    Raises:
        OSError: `final` exists and is not empty.
    """
    flush_tree(staged)
    staged.rename(final)
    flush(final.parent)


def remove_tree(path: Path) -> None:
    """Removes a directory, a file or a link if it is there.

    A directory vanishes from its name at once, its files after.
    """
    doomed = path.with_name(f".doomed-{uuid.uuid4().hex[:8]}")
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    if doomed.is_dir() and not doomed.is_symlink():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink(missing_ok=True)
