"""BF16 as raw bits: the form in which every encoder takes its weights.

Owns widening, rounding and the magnitude scan. A BF16 number is the upper half of a float32, so
its magnitudes sort like the integers `bits & 0x7fff`; scans and comparisons run on those.
"""

from __future__ import annotations

import numpy as np

from weight_sync.formats import finite

INFINITY = 0x7F80  # magnitudes from here on are infinite or not a number


def widen(bits: np.ndarray) -> np.ndarray:
    """uint16 bits to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


MAGNITUDES = widen(np.arange(INFINITY, dtype=np.uint16))  # float32, of each finite magnitude


def round_from(values: np.ndarray) -> np.ndarray:
    """float32 or float16 to uint16 bits, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)


def amax(bits: np.ndarray, name: str) -> np.float32:
    """The largest magnitude of a tensor; 0 if it is empty.

    Raises:
        BadInputError: NaN or infinity, with the tensor named.
    """
    return widen(np.array([finite.largest_magnitude(bits, "BF16", name)], np.uint16))[0]
