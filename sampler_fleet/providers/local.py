"""Samplers as processes of this machine.

Owns their ids, their command lines and which of them goes first. `contracts.supervisor` keeps them
running; a sampler drains by itself when it is told to stop. Must not talk to the gateway.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

from contracts.errors import BadInputError
from contracts.files import lock
from contracts.supervisor import STOP_S, Service, Supervisor
from sampler_fleet.providers.base import Provider

NICE = {"sampler": 8}  # the trainer's updates are what everything waits for
RETRY_S = 60.0  # for a sampler that refuses its input or keeps dying
LOCK_WAIT_S = 20.0  # samplers of a killed process need a moment to end


class LocalProvider(Provider):
    """`sampler_fleet join` processes, named GROUP-0, GROUP-1, ... by the lowest free number.

    The newest go first. One that was killed, or that left by itself, is started again; one that
    refuses its input or keeps dying, every `retry_s`.
    """

    def __init__(
        self, directory: Path, *, join: Sequence[str], drain_s: float, retry_s: float = RETRY_S
    ) -> None:
        """`join` is their command without group, id and state, `drain_s` the time they take to
        finish what runs. State and logs are kept under `directory`, which is locked until the
        last of them is gone: two processes of one id would share a cache.

        Raises:
            BadInputError: somebody else's samplers have the directory.
        """
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock(directory / ".lock", wait_s=LOCK_WAIT_S)
        except BlockingIOError:
            raise BadInputError(
                f"directory of local samplers {directory}",
                expected="no sampler of another autoscaler still at work",
                found="one that holds its lock",
            ) from None
        self._directory = directory
        self._join = tuple(join)
        self._stop_s = drain_s + STOP_S
        self._supervisor = Supervisor(
            directory, nice=NICE, inherit=(self._lock.fileno(),), retry_s=retry_s
        )
        self._wanted: dict[str, list[str]] = {}  # ids by group, the newest last

    async def scale(self, group: str, num: int) -> None:
        """As the port says; the error is that of a group none of whose samplers can run."""
        wanted = self._wanted.setdefault(group, [])
        leaving, wanted[num:] = wanted[num:], []
        self._supervisor.end_services(leaving)
        held = self._supervisor.held()
        free = (name for n in itertools.count() if (name := f"{group}-{n}") not in held)
        joining = list(itertools.islice(free, num - len(wanted)))
        self._supervisor.start([self._sampler(group, name) for name in joining])
        wanted += joining
        errors = self._supervisor.errors()
        if wanted and all(name in errors for name in wanted):
            raise errors[wanted[0]].with_traceback(None)

    async def num_held(self, group: str) -> int:
        return sum(name.rpartition("-")[0] == group for name in self._supervisor.held())

    async def close(self) -> None:
        await asyncio.to_thread(self._supervisor.stop)
        self._lock.close()

    def _sampler(self, group: str, name: str) -> Service:
        return Service(
            name=name,
            kind="sampler",
            command=(
                *self._join,
                *("--group", group, "--sampler-id", name),
                *("--state-dir", str(self._directory / name)),
            ),
            stop_s=self._stop_s,
        )
