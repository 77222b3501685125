"""A conversion that a kill interrupts and the same command continues.

Owns the folder `.NAME.partial` beside the destination NAME: its lock, the checkpoint that grows in
it, and the journal of the actions whose bytes are on disk. Knows nothing of tensors.

    .NAME.partial/journal      the fingerprint of source and options; then a line per action done
    .NAME.partial/checkpoint   becomes NAME at the end, by one rename
A journal of another fingerprint, or whose checkpoint is not as it was left, counts for nothing:
all starts anew. One without a checkpoint, beside a NAME, is of a run that ended between the rename
and the removal of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from contracts.errors import ConflictError
from weight_sync import durable

_FLUSH_EVERY_S = 1.0


class Journal:
    """The actions done, by number. Lines are written in batches, after the bytes they vouch for."""

    def __init__(self, path: Path, fingerprint: str, done: set[int]) -> None:
        self.done = frozenset(done)
        lines = [fingerprint, *map(str, sorted(done))]
        durable.write_text(path, "".join(f"{line}\n" for line in lines))
        self._file = path.open("a")
        self._pending: list[int] = []
        self._flushed_at = time.monotonic()

    def add(self, action: int, flush_bytes: Callable[[], None]) -> None:
        """Notes an action whose bytes are written; `flush_bytes` makes them durable."""
        self._pending.append(action)
        if time.monotonic() - self._flushed_at >= _FLUSH_EVERY_S:
            self.flush(flush_bytes)

    def flush(self, flush_bytes: Callable[[], None]) -> None:
        """Makes durable what was added so far."""
        flush_bytes()
        self._file.write("".join(f"{action}\n" for action in self._pending))
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self._pending.clear()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def resuming(
    final: Path, fingerprint: str, is_intact: Callable[[Path], bool] = lambda staged: True
) -> Iterator[tuple[Path, Journal]]:
    """The checkpoint folder to fill and the journal of what it holds.

    `is_intact` is asked of a folder that an earlier run left. The folder stays where it is when the
    block fails; `discard` removes it.

    Raises:
        ConflictError: another process converts to `final`.
    """
    partial = _folder(final)
    with _locked(partial, final):
        staged = partial / "checkpoint"
        done = _read(partial / "journal", fingerprint)
        if done is None or not staged.is_dir() or not is_intact(staged):
            done = None
            (partial / "journal").unlink(missing_ok=True)
            durable.remove_tree(staged)
            staged.mkdir()
        journal = Journal(partial / "journal", fingerprint, done or set())
        try:
            yield staged, journal
        finally:
            journal.close()


def has_moved(final: Path) -> bool:
    """Whether a run was ended after it had renamed its checkpoint to `final`."""
    partial = _folder(final)
    return (
        final.is_dir()
        and (partial / "journal").is_file()
        and not os.path.lexists(partial / "checkpoint")
    )


def moved_actions(final: Path, fingerprint: str) -> set[int] | None:
    """The actions of the run of `has_moved`; None if it was of another fingerprint."""
    return _read(_folder(final) / "journal", fingerprint)


def discard(final: Path) -> None:
    """Removes what `resuming` left, if anything."""
    durable.remove_tree(_folder(final))


def held_bytes(final: Path) -> int:
    """The room on disk that what `resuming` left takes up."""
    files = _folder(final).glob("checkpoint/*")
    return sum(path.stat().st_blocks * 512 for path in files)


def _folder(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


@contextlib.contextmanager
def _locked(partial: Path, final: Path) -> Iterator[None]:
    """The folder exists and is ours while the block runs."""
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = partial.exists() and os.path.samestat(os.fstat(descriptor), partial.stat())
        except BlockingIOError:
            ours = False
        if not ours:  # held, or just finished and removed, by another
            raise ConflictError(f"{final}: another conversion is writing it; wait for its end")
        yield
    finally:
        os.close(descriptor)


def _read(path: Path, fingerprint: str) -> set[int] | None:
    """The actions of a journal with this fingerprint, up to a line that a kill cut off."""
    try:
        first, *lines = path.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return None
    if first != fingerprint:
        return None
    done: set[int] = set()
    for line in lines[:-1]:  # what follows the last newline is no whole line
        if not line.isascii() or not line.isdigit():
            break
        done.add(int(line))
    return done
