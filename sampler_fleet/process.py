"""What every long-lived process of the fleet does at its start and end.

Owns the port file, signals, and dying with the parent. Must not know what the process
serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel for SIGTERM when the thread that started this process ends (Linux)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent == 1 or os.getppid() != parent:  # it was gone before the kernel knew
        sys.exit(1)


def write_port_file(path: Path | None, port: int) -> None:
    """The bound port, visible only once it is complete."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)


async def run_until_stopped(work: Awaitable[None], stop: Callable[[], object]) -> None:
    """Runs `work`; the first SIGTERM or SIGINT calls `stop`, the second ends the process."""
    loop = asyncio.get_running_loop()
    stopping = False

    def on_signal() -> None:
        nonlocal stopping
        if stopping:
            os._exit(1)
        stopping = True
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await work
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
