"""Whose a container is, so that those of killed processes are found.

Owns the label and what it says. Must not know runtimes.
"""

from __future__ import annotations

import os
from pathlib import Path

LABEL = "mixed-samplers.owner"  # host/pid/start time of the process


def owner(pid: int) -> str:
    """A process of this host, told from later ones with its pid by when it started."""
    return f"{os.uname().nodename}/{pid}/{_start_time(pid)}"


def is_orphan(label: str) -> bool:
    """Whether it names a process of this host that is gone."""
    host, _, process = label.partition("/")
    pid = process.partition("/")[0]
    return host == os.uname().nodename and pid.isdigit() and owner(int(pid)) != label


def _start_time(pid: int) -> str:
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]  # field 22 of proc(5), in clock ticks
