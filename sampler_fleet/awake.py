"""A clock that stands still when this process does.

Owns that one rule. The silence of others is measured by it: after a pause of this process (a
machine suspended, a CPU starved, a slow disk) what they said meanwhile is yet to be read.
"""

from __future__ import annotations

from collections.abc import Callable


class AwakeClock:
    """Seconds of `clock` while this process ran, for one thread that reads it often.

    Between two readings at most `longest_s` pass: more is a pause.
    """

    def __init__(self, clock: Callable[[], float], *, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._read_at = clock()
        self._seconds = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._seconds += min(now - self._read_at, self._longest_s)
        self._read_at = now
        return self._seconds
