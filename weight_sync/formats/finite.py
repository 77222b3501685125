"""NaN and infinity in arrays of any float type, found at the speed of memory.

Owns which magnitudes of a type are no numbers. A float's bits without the sign sort like integers,
so the largest of them tells: that is one pass, and nothing is widened.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from contracts.errors import BadInputError
from weight_sync.formats import kernels


class _Bits(NamedTuple):
    magnitude: np.unsignedinteger  # the mask of all bits but the sign
    end: int  # magnitudes from here on are infinite or not a number


_BITS = {
    "F8_E4M3": _Bits(np.uint8(0x7F), 0x7F),
    "F8_E5M2": _Bits(np.uint8(0x7F), 0x7C),
    "BF16": _Bits(np.uint16(0x7FFF), 0x7F80),
    "F16": _Bits(np.uint16(0x7FFF), 0x7C00),
    "F32": _Bits(np.uint32(0x7FFFFFFF), 0x7F800000),
    "F64": _Bits(np.uint64(2**63 - 1), 0x7FF << 52),
}


def check(array: np.ndarray, dtype: str, name: str) -> None:
    """An array of a safetensors dtype, or its bytes; what has no NaN is not looked at.

    Raises:
        BadInputError: NaN or infinity, with the tensor named.
    """
    if dtype in _BITS:
        largest_magnitude(array, dtype, name)


def largest_magnitude(array: np.ndarray, dtype: str, name: str) -> int:
    """The bits of the largest magnitude, without sign; 0 if there is none. Raises as `check`."""
    magnitude, end = _BITS[dtype]
    bits = np.ascontiguousarray(array).reshape(-1).view(magnitude.dtype)
    largest = int(kernels.largest_magnitude(bits, magnitude))
    if largest >= end:
        where = np.flatnonzero((bits & magnitude) >= end)
        raise BadInputError(
            f"tensor {name}",
            expected="finite weights",
            found=f"{len(where)} NaN or infinite of {bits.size}, the first at {int(where[0])}",
        )
    return largest
