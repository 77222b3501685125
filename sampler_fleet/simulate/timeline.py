"""Simulated time: what happens when.

Owns the order of events. Events of one moment happen in the order in which they were announced.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """`now` is in seconds since the scenario's start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_announced = 0

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        """Announces an event; not in the past."""
        assert time >= self.now, "events lie ahead"
        self._num_announced += 1
        heapq.heappush(self._events, (time, self._num_announced, act, args))

    def run(self, until: float) -> None:
        """Lets everything happen that lies before or at `until`."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, act, args = heapq.heappop(events)
            self.num_events += 1
            act(*args)
        self.now = until
