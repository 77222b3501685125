"""Files that processes share: one that appears whole or not at all, one that is locked.

Owns writing aside and renaming, and waiting for a lock. Promises nothing about a power cut;
`weight_sync.durable` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

LOCK_POLL_S = 0.2


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write; what is written there takes its place when the block ends.

    Raises:
        OSError: of the block or of the renaming, naming `path`; what was at `path` is still there.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield aside
        aside.replace(path)
    except OSError as error:
        if error.filename in (None, str(aside), aside):
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def lock(path: Path, *, wait_s: float) -> TextIO:
    """An open file that nobody else has locked. Processes that inherit it share the lock, which
    lasts until the last of them closes it or is gone.

    Raises:
        BlockingIOError: somebody still has it after `wait_s`.
    """
    file = path.open("w")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise
            time.sleep(LOCK_POLL_S)
