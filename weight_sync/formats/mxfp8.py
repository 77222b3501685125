"""MXFP8: E4M3 elements, a power of two per 32 of them, as the OCP microscaling formats define it.

Owns the bit layout and the choice of the scale. For a matrix [N, K], K divisible by 32:
    codes  uint8 [N, K]       E4M3FN
    scale  uint8 [N, K / 32]  E8M0: the exponent of the scale plus 127; row-major (not swizzled)
    w = E4M3(code) * 2^(scale - 127)

The scale is the smallest power of two under which the block fits below 448, and no less than
2^-127: scale = ceil(log2(amax / 448)) + 127. So do the PyTorch forms of vLLM 0.33, SGLang 0.5.23
and NVIDIA ModelOpt 0.47, byte for byte. compressed-tensors 0.20.1 has twice that scale where amax
is 1.75 times a power of two, and the same otherwise, but for the ends of the range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from contracts.errors import BadInputError
from weight_sync.formats import bf16, fp8

BLOCK = 32


def _all_scales() -> np.ndarray:
    scales = np.ldexp(np.float32(1), np.arange(256) - 127)
    scales[255] = np.nan
    return scales


with np.errstate(over="ignore"):
    SCALES = _all_scales()  # float32 [256], the value of each E8M0 byte


class MxFp8(NamedTuple):
    codes: np.ndarray  # uint8 [N, K], E4M3
    scale: np.ndarray  # uint8 [N, K / 32], E8M0


def scale_byte(amax: Any) -> Any:
    """int32 E8M0 bytes from int32 BF16 magnitudes; of any array library.

    448 is 1.75 * 2^8: the exponent less 8, and one more for a mantissa above 1.75.
    """
    return (((amax + 0x1F) >> 7) - 8).clip(0)


_BYTE_OF = scale_byte(np.arange(0x8000, dtype=np.int32)).astype(np.uint8)
_SCALE_OF = fp8.by_magnitude(SCALES[_BYTE_OF[: bf16.INFINITY]])


def encode(bits_NxK: np.ndarray, *, name: str) -> MxFp8:
    """BF16 bits (uint16) to codes and scales.

    Raises:
        BadInputError: K is not a multiple of 32, or NaN or infinite weights; with the tensor named.
    """
    K = bits_NxK.shape[1]
    if K % BLOCK:
        raise BadInputError(
            f"tensor {name} in mxfp8", expected=f"columns in multiples of {BLOCK}", found=K
        )
    codes, amax = fp8.encode_blocks(bits_NxK, (1, BLOCK), _SCALE_OF, name=name)
    return MxFp8(codes, _BYTE_OF[amax])


def decode(tensor: MxFp8) -> np.ndarray:
    """float32 [N, K]."""
    N, K = tensor.codes.shape
    elements = fp8.VALUES[tensor.codes].reshape(N, K // BLOCK, BLOCK)
    return (elements * SCALES[tensor.scale][:, :, None]).reshape(N, K)
