"""The host's end of a running sandbox: asks the supervisor inside it.

Owns the requests of `sandbox_supervisor.py` and what is made of the replies. Subclasses start a
sandbox, connect to it and end it. Must not know how it isolates.
"""

from __future__ import annotations

import asyncio
import time
from itertools import chain
from typing import Any, Protocol

from sampler_fleet.episodes.base import ExecResult, SandboxError, Snapshot
from sampler_fleet.episodes.sandbox_supervisor import SNAPSHOT_S
from sampler_fleet.episodes.wire import decode, encode, frame

GRACE_S = 30.0  # the supervisor keeps the time; this long after, it is taken for dead
_MAX_OVERHEAD = 4 << 20  # of a message, over the contents in it
_BROKEN = (OSError, EOFError, ValueError, TypeError, LookupError, RecursionError)


class Reader(Protocol):
    """The part of asyncio.StreamReader that replies come by."""

    async def readexactly(self, n: int, /) -> bytes: ...


class Writer(Protocol):
    """The part of asyncio.StreamWriter that requests go by."""

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class Supervised:
    """A sandbox with a supervisor; it can be used once `_reader` and `_writer` lead there."""

    def __init__(self, *, max_tree_bytes: int) -> None:
        self._max_reply_bytes = max_tree_bytes + _MAX_OVERHEAD
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._broken = ""

    def _complaint(self) -> str:
        """What the sandbox said of its failure; "" if nothing."""
        raise NotImplementedError

    async def exec(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", max_output: int = 10_000
    ) -> ExecResult:
        start = time.monotonic()
        request = ("exec", encode_path(command), stdin, timeout_s, max_output)
        reply = await self.ask(*request, timeout_s=timeout_s + GRACE_S)
        returncode, timed_out, num_bytes, output = reply
        return ExecResult(
            returncode=returncode,
            output=output.decode("utf-8", "replace"),
            num_bytes=num_bytes,
            timed_out=timed_out,
            seconds=time.monotonic() - start,
        )

    async def read(self, path: str) -> bytes:
        return await self.ask("read", encode_path(path))

    async def write(self, path: str, data: bytes) -> None:
        await self.ask("write", encode_path(path), data)

    async def snapshot(self) -> Snapshot:
        try:
            reply = await self.ask("snapshot", timeout_s=SNAPSHOT_S + GRACE_S)
        except OSError:  # what commands left can't be read
            return Snapshot(files={}, special=(), complete=False)
        files, special, complete, *deleted = reply
        return Snapshot(
            files={decode_path(path): data for path, data in files.items()},
            special=tuple(decode_path(path) for path in special),
            complete=complete,
            deleted=tuple(decode_path(path) for path in chain(*deleted)),
        )

    async def ask(self, *request: Any, timeout_s: float = GRACE_S) -> Any:
        """One request, one reply. OSError if the supervisor refused."""
        if self._broken or self._reader is None or self._writer is None:
            raise SandboxError(f"the sandbox can't be used: {self._broken or 'it was not started'}")
        self._broken = "an earlier request was given up"  # until its reply is here
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(frame(encode(request)))
                await self._writer.drain()
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                if size > self._max_reply_bytes:
                    raise ValueError(f"a reply of {size} bytes")
                verdict, result = decode(await self._reader.readexactly(size))
        except _BROKEN as error:  # TimeoutError is an OSError
            self._broken = self._describe(error)
            raise SandboxError(f"the sandbox failed: {self._broken}") from error
        self._broken = ""
        if verdict != "ok":
            raise OSError(result)
        return result

    def _describe(self, error: Exception) -> str:
        complaint = self._complaint()
        if isinstance(error, TimeoutError):
            complaint = complaint or "no answer in time"
        return complaint or f"it ended unexpectedly ({type(error).__name__})"


def encode_path(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def decode_path(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
