"""What a weight service has moved and made since its start: the numbers of its status.

Owns counters and one rate. Decides nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque

from contracts.types import WeightFormat

_RATE_OVER_S = 10.0


class Traffic:
    """Bytes since the start, and seconds of the latest conversion and delta of each format."""

    def __init__(self) -> None:
        self.bytes_published = 0
        self.snapshot_bytes: Counter[WeightFormat] = Counter()
        self.delta_bytes: Counter[WeightFormat] = Counter()
        self.convert_seconds: dict[WeightFormat, float] = {}
        self.delta_seconds: dict[WeightFormat, float] = {}
        self._recent: deque[tuple[float, int]] = deque()  # time, bytes
        self._recent_bytes = 0

    def fetched(self, format: WeightFormat, num_bytes: int, *, is_delta: bool) -> None:
        (self.delta_bytes if is_delta else self.snapshot_bytes)[format] += num_bytes
        self._recent.append((time.monotonic(), num_bytes))
        self._recent_bytes += num_bytes
        self._forget()

    def bytes_per_second(self) -> float:
        self._forget()
        return self._recent_bytes / _RATE_OVER_S

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - _RATE_OVER_S:
            self._recent_bytes -= self._recent.popleft()[1]
