"""What a sandbox runs, seen from the host."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path


def processes_of(marker: str) -> list[int]:
    """Host pids of processes whose command line contains the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Not once it has ended, though nobody may have asked for its status yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def started(marker: str, num: int) -> bool:
    """Whether so many processes have got as far as their own command line."""
    for _ in range(100):
        if len(processes_of(marker)) >= num:
            return True
        await asyncio.sleep(0.05)
    return False


async def gone(marker: str) -> bool:
    for _ in range(100):
        if not processes_of(marker):
            return True
        await asyncio.sleep(0.05)
    return False
