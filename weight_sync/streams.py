"""Files to and from streams: a publication into a staging directory, a file in chunks.

Owns the order of a publication and the checks of its header. The content is checked by the store.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from contracts.errors import BadInputError, RetryError
from contracts.pb import weights_pb2
from contracts.rpc import CHUNK_BYTES
from contracts.types import FileEntry
from weight_sync.manifest import is_checkpoint_name


def check_header(version: int, files: list[FileEntry]) -> None:
    """Raises BadInputError."""
    if version < 1:
        raise BadInputError("publish", expected="a version from 1", found=version)
    names = [entry.name for entry in files]
    if not files or len(set(names)) != len(names) or not all(map(is_checkpoint_name, names)):
        raise BadInputError(
            "publish", expected="distinct plain file names of a checkpoint", found=names
        )
    if any(entry.num_bytes < 0 for entry in files):
        raise BadInputError("publish", expected="file sizes from 0", found=files)


def check_space(staged: Path, files: list[FileEntry]) -> None:
    """Raises RetryError."""
    total = sum(entry.num_bytes for entry in files)
    free = shutil.disk_usage(staged).free
    if total > free:
        raise RetryError(
            f"the disk of the weight store is full: expected {total / 1e6:.1f} MB free, "
            f"found {free / 1e6:.1f} MB"
        )


async def write_files(
    requests: AsyncIterator[weights_pb2.PublishRequest], staged: Path, files: list[FileEntry]
) -> None:
    """The stream's bytes into the announced files; their content is checked by the commit."""
    data = memoryview(b"")
    for entry in files:
        missing = entry.num_bytes
        with (staged / entry.name).open("xb") as file:
            while missing:
                if not data:
                    request = await anext(aiter(requests), None)
                    if request is None:
                        raise RetryError(f"the stream ended {missing} bytes before {entry.name}")
                    data = memoryview(request.data)
                    continue
                part, data = data[:missing], data[missing:]
                await asyncio.to_thread(file.write, part)
                missing -= len(part)
    if data or await anext(aiter(requests), None) is not None:
        raise BadInputError("publish", expected="the bytes announced", found="more")


async def read_chunks(path: Path, offset: int) -> AsyncIterator[bytes]:
    """A file's bytes from `offset`, one chunk in memory at a time."""
    file: BinaryIO = await asyncio.to_thread(path.open, "rb")
    try:
        file.seek(offset)
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
    finally:
        file.close()
