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

from weight_sync.formats import bf16, kernels

BLOCK = 128
MAX = np.float32(448)
# Keeps the division of an all-zero block defined: 1e-12 rounded to BF16, as slime has it.
_SMALLEST_AMAX = np.float32(bf16.widen(np.array([0x2B8D], np.uint16))[0])

_NORMAL_FROM = 0x3C800000  # bits of 2^-6, the smallest normal E4M3
# Almost half a unit in the last place, minus the difference of the biases; wraps for subnormals.
_ROUND_AND_REBIAS = np.uint32(0x7FFFF + 2**32 - ((127 - 7) << 23))
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
    rounded = magnitude >> 20
    rounded &= 1
    rounded += magnitude
    rounded += _ROUND_AND_REBIAS
    rounded >>= 20
    codes = rounded.astype(np.uint8)
    subnormal = np.flatnonzero(magnitude < _NORMAL_FROM)  # few, as a rule
    shifted = magnitude.reshape(-1)[subnormal].view(np.float32) + _SUBNORMAL_ADDEND
    codes.reshape(-1)[subnormal] = shifted.view(np.uint32) - _SUBNORMAL_ADDEND.view(np.uint32)
    codes |= ((bits >> 24) & 0x80).astype(np.uint8)
    return codes


def encode(bits_NxK: np.ndarray, *, name: str) -> Fp8Block:
    """BF16 bits (uint16) to codes and scales: s = amax / 448, code = E4M3(x / s).

    Source: slime's convert_hf_to_fp8. prime-rl, Fireworks and Triton's kernels give the same codes,
    and the same scales but for all-zero blocks.

    Raises:
        BadInputError: NaN or infinite weights, with the tensor named.
    """
    bf16.amax(bits_NxK, name)
    N, K = bits_NxK.shape
    rows, columns = np.arange(0, N, BLOCK), np.arange(0, K, BLOCK)
    magnitudes = np.stack([(bits_NxK[row : row + BLOCK] & 0x7FFF).max(axis=0) for row in rows])
    block_amax = bf16.widen(np.maximum.reduceat(magnitudes, columns, axis=1))
    # Rounding of the scale puts a quotient at most one unit above 448, which rounds back to it.
    scale_inv = np.maximum(block_amax, _SMALLEST_AMAX) / MAX
    codes = np.empty((N, K), np.uint8)
    kernels.encode_e4m3(np.ascontiguousarray(bits_NxK), scale_inv, BLOCK, codes)
    return Fp8Block(codes, scale_inv)


def decode(block: Fp8Block) -> np.ndarray:
    """float32 [N, K]."""
    N, K = block.codes.shape
    scale = np.repeat(np.repeat(block.scale_inv, BLOCK, axis=0)[:N], BLOCK, axis=1)[:, :K]
    return VALUES[block.codes] * scale
