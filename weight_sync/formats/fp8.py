"""FP8 E4M3 with one float32 scale per 128 x 128 block, as the Qwen3 FP8 checkpoints store it.

Owns E4M3 itself and the block layout. For a matrix [N, K]:
    codes      uint8   [N, K]                          E4M3FN
    scale_inv  float32 [ceil(N / 128), ceil(K / 128)]  multiplies on decoding, despite its name
A block at the edge is scaled by the elements that exist.

E4M3FN is sign, 4 exponent bits (bias 7), 3 mantissa bits: largest 448, smallest 2^-9, no infinity,
0x7f and 0xff are NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weight_sync.formats import bf16

BLOCK = 128
MAX = np.float32(448)
# Keeps the division of an all-zero block defined: 1e-12 rounded to BF16, as slime has it.
_SMALLEST_AMAX = np.float32(bf16.widen(np.array([0x2B8D], np.uint16))[0])

_NORMAL_FROM = 0x3C800000  # bits of 2^-6, the smallest normal E4M3
_REBIAS = (127 - 7) << 3
_SUBNORMAL_ADDEND = np.float32(2.0**14)  # float32 from here on has units of 2^-9


def _all_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


VALUES = _all_values()  # float32 [256], the value of each code


class Fp8Block(NamedTuple):
    codes: np.ndarray  # uint8 [N, K]
    scale_inv: np.ndarray  # float32 [ceil(N / 128), ceil(K / 128)]


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """float32 in [-448, 448] to E4M3 codes (uint8), to nearest, ties to even; keeps -0.0."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    codes = (magnitude >> 20) & 1
    codes += magnitude
    codes += 0x7FFFF
    codes >>= 20
    codes -= _REBIAS  # wraps below the normal range, which the next lines overwrite
    small = (magnitude.view(np.float32) + _SUBNORMAL_ADDEND).view(np.uint32)
    np.copyto(codes, small - _SUBNORMAL_ADDEND.view(np.uint32), where=magnitude < _NORMAL_FROM)
    codes |= (bits >> 24) & 0x80
    return codes.astype(np.uint8)


def encode(bits_NxK: np.ndarray, *, name: str) -> Fp8Block:
    """BF16 bits (uint16) to codes and scales: s = amax / 448, code = E4M3(x / s).

    Source: slime's convert_hf_to_fp8. prime-rl, Fireworks and Triton's kernels give the same codes,
    and the same scales but for all-zero blocks.

    Raises:
        BadInputError: NaN or infinite weights, with the tensor named.
    """
    bf16.amax(bits_NxK, name)
    N, K = bits_NxK.shape
    column_starts = np.arange(0, K, BLOCK)
    codes = np.empty((N, K), np.uint8)
    scale_inv = np.empty((-(-N // BLOCK), len(column_starts)), np.float32)
    for row, start in enumerate(range(0, N, BLOCK)):
        x = bf16.widen(bits_NxK[start : start + BLOCK])
        column_amax = np.maximum(x.max(axis=0), -x.min(axis=0))
        block_amax = np.maximum.reduceat(column_amax, column_starts)
        scale_inv[row] = np.maximum(block_amax, _SMALLEST_AMAX) / MAX
        x /= np.repeat(scale_inv[row], BLOCK)[:K]
        np.clip(x, -MAX, MAX, out=x)
        codes[start : start + BLOCK] = to_e4m3(x)
    return Fp8Block(codes, scale_inv)


def decode(block: Fp8Block) -> np.ndarray:
    """float32 [N, K]."""
    N, K = block.codes.shape
    scale = np.repeat(np.repeat(block.scale_inv, BLOCK, axis=0)[:N], BLOCK, axis=1)[:, :K]
    return VALUES[block.codes] * scale
