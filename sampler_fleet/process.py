"""What every long-lived process of the fleet does at its start and end.

Owns log lines, the port file, signals, and dying with the parent. Must not know what the process
serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from contracts.errors import BadInputError

_PR_SET_PDEATHSIG = 1


class _LineFormatter(logging.Formatter):
    """One line per record: time, level, process, logger, message; tracebacks are escaped."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        text = text.replace("\\", "\\\\").replace("\n", "\\n")
        return (
            f"{moment}.{int(record.msecs):03d}Z {record.levelname.lower()} {self._process} "
            f"{record.name}: {text}"
        )


def log_to_stderr(process: str) -> None:
    """Structured single lines on stderr; the level comes from LOG_LEVEL (default INFO)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(process))
    level = os.environ.get("LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise BadInputError(
            "environment variable LOG_LEVEL", expected="DEBUG, INFO, WARNING or ERROR", found=level
        )
    logging.basicConfig(level=level, handlers=[handler], force=True)


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
