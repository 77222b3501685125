"""A file that appears whole or not at all.

Owns writing aside and renaming. Promises nothing about a power cut; `weight_sync.durable` does.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path


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
