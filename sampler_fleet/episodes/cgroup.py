"""Memory and process limits for a whole sandbox, by control groups where this user may make them.

Owns finding a writable hierarchy (v1 or v2), one group per sandbox slot, and its removal. Must not
start processes. Without a writable hierarchy there are only the limits of each process.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "mixed-samplers"
_EXTRA_PROCESSES = 4  # bubblewrap itself and what starts it


@dataclass(frozen=True, kw_only=True)
class Group:
    """The directories of one group: one in v2, one per controller in v1."""

    folders: tuple[Path, ...]

    @property
    def process_files(self) -> tuple[Path, ...]:
        """A process that writes its pid to each of these is in the group, with all it starts."""
        return tuple(folder / "cgroup.procs" for folder in self.folders)

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
    parents = (root / "memory", root / "pids")
    usable = all(
        (parent / "cgroup.procs").exists() and os.access(parent, os.W_OK) for parent in parents
    )
    return parents if usable else ()


def _find_v2(root: Path) -> tuple[Path, ...]:
    """Our own group if it hands memory and pids on to groups below, or can be told to."""
    own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    parent = root / own
    control = parent / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if not {"memory", "pids"} <= set(control.read_text().split()):
            control.write_text("+memory +pids")  # refused where processes are in the group itself
        if os.access(parent, os.W_OK):
            return (parent,)
    return ()


def make_group(
    parents: tuple[Path, ...], name: str, *, memory_bytes: int, num_processes: int
) -> Group | None:
    """A group of this process by that name; None where no group can be made."""
    if not parents:
        return None
    group = Group(folders=tuple(p / f"{_PREFIX}-{os.getpid()}-{name}" for p in parents))
    limits = {
        "memory.max": memory_bytes,
        "memory.swap.max": 0,
        "memory.limit_in_bytes": memory_bytes,
        "pids.max": num_processes + _EXTRA_PROCESSES,
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
