"""Limits of a whole sandbox, by control groups where this user may make them.

Owns finding a writable hierarchy (v1 or v2), one group per sandbox slot, and its removal. Must not
start processes. Memory and processes are limited or there is no group; processor time is limited
where that controller is to be had, too. Without a writable hierarchy there are only the limits of
each process.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "mixed-samplers"
_EXTRA_PROCESSES = 4  # bubblewrap itself and what starts it
_PERIOD_US = 100_000  # that processor time is counted over


@dataclass(frozen=True, kw_only=True)
class Group:
    """The directories of one group: one in v2, one per controller in v1."""

    folders: tuple[Path, ...]

    @property
    def process_files(self) -> tuple[Path, ...]:
        """A process that writes its pid to each of these is in the group, with all it starts."""
        return tuple(folder / "cgroup.procs" for folder in self.folders)

    def num_oom_kills(self) -> int:
        """How many processes of it were killed because its memory was full, ever."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):  # v2, v1
                with contextlib.suppress(OSError):
                    for line in (folder / name).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Removes the group, waiting a moment for its last processes to be gone."""
        for folder in self.folders:
            for _ in range(50):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.02)
                else:
                    break


def find_parents(root: Path = Path("/sys/fs/cgroup")) -> tuple[Path, ...]:
    """Where groups can be made: () if nowhere."""
    if (root / "cgroup.controllers").exists():
        return _find_v2(root)
    memory, pids, cpu = (root / name for name in ("memory", "pids", "cpu"))
    if not (_usable(memory) and _usable(pids)):
        return ()
    return (memory, pids, cpu) if _usable(cpu) else (memory, pids)


def _usable(parent: Path) -> bool:
    return os.access(parent / "cgroup.procs", os.W_OK) and os.access(parent, os.W_OK)


def _find_v2(root: Path) -> tuple[Path, ...]:
    """The nearest group around us that hands memory and pids on to groups below it.

    Our own can't be told to while this process is in it, unless it is the root; that above it, a
    slice of systemd's, does so already as a rule.
    """
    own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    for parent in (root / own, *(root / above for above in Path(own).parents)):
        control = parent / "cgroup.subtree_control"
        with contextlib.suppress(OSError):
            handed_on = set(control.read_text().split())
            if not {"memory", "pids"} <= handed_on:
                control.write_text("+memory +pids")
            if "cpu" not in handed_on:
                with contextlib.suppress(OSError):
                    control.write_text("+cpu")
            if _usable(parent):
                return (parent,)
    return ()


def make_group(
    parents: tuple[Path, ...],
    name: str,
    *,
    memory_bytes: int,
    num_processes: int,
    num_cpus: float,
) -> Group | None:
    """A group of this process by that name; None where no group can be made."""
    if not parents:
        return None
    group = Group(folders=tuple(p / f"{_PREFIX}-{os.getpid()}-{name}" for p in parents))
    quota_us = max(round(num_cpus * _PERIOD_US), 1000)
    limits = {
        "memory.max": memory_bytes,
        "memory.swap.max": 0,
        "memory.limit_in_bytes": memory_bytes,
        "memory.memsw.limit_in_bytes": memory_bytes,  # after that without swap: never below it
        "pids.max": num_processes + _EXTRA_PROCESSES,
        "cpu.max": f"{quota_us} {_PERIOD_US}",
        "cpu.cfs_period_us": _PERIOD_US,
        "cpu.cfs_quota_us": quota_us,
    }
    try:
        for folder in group.folders:
            folder.mkdir(exist_ok=True)
            for file, value in limits.items():
                if (folder / file).exists():
                    (folder / file).write_text(str(value))
    except OSError:
        group.remove()
        return None
    return group


def sweep(parents: tuple[Path, ...]) -> None:
    """Removes groups that killed processes of this program left behind."""
    for parent in parents:
        for folder in parent.glob(f"{_PREFIX}-*-*"):
            pid = folder.name.removeprefix(f"{_PREFIX}-").split("-")[0]
            if not Path("/proc", pid).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
