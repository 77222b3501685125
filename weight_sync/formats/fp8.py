"""FP8 E4M3 with float32 scales: per block of 128 x 128, per output channel, or per tensor.

Owns E4M3 itself and the three layouts. For a matrix [N, K]:
    codes      uint8   [N, K]                          E4M3FN
    scale_inv  float32 [ceil(N / 128), ceil(K / 128)]  per block, as Qwen3 FP8 checkpoints have it
    scale      float32 [N, 1]                          per channel
    scale      float32 [1]                             per tensor
All scales multiply on decoding, `scale_inv` too. A block at the edge is scaled by the elements that
exist.

E4M3FN is sign, 4 exponent bits (bias 7), 3 mantissa bits: largest 448, smallest 2^-9, no infinity,
0x7f and 0xff are NaN.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from contracts.errors import BadInputError
from weight_sync.formats import bf16, kernels

BLOCK = 128
MAX = np.float32(448)
# Keeps the division of an all-zero block defined: 1e-12 rounded to BF16, as slime has it.
SMALLEST_AMAX = bf16.MAGNITUDES[0x2B8D]
_SMALLEST_AMAX_UE8M0 = np.float32(1e-4)


def _all_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


VALUES = _all_values()  # float32 [256], the value of each code


class Recipe(enum.StrEnum):
    """Whose block scales to reproduce."""

    # slime's convert_hf_to_fp8: amax / 448. prime-rl, Fireworks and Triton's kernels give the same
    # codes, and the same scales but for all-zero blocks.
    F32 = "f32"
    # SGLang's and vLLM's per_block_cast_to_fp8 (DeepGEMM): the power of two from there on.
    UE8M0 = "ue8m0"


class Fp8Block(NamedTuple):
    codes: np.ndarray  # uint8 [N, K]
    scale_inv: np.ndarray  # float32 [ceil(N / 128), ceil(K / 128)]


class Fp8Channel(NamedTuple):
    codes: np.ndarray  # uint8 [N, K]
    scale: np.ndarray  # float32 [N, 1]


class Fp8Tensor(NamedTuple):
    codes: np.ndarray  # uint8 [N, K]
    scale: np.ndarray  # float32 [1]


def by_magnitude(of_finite: np.ndarray) -> np.ndarray:
    """float32 [32768] from the scales of the finite magnitudes; the others are refused later."""
    return np.append(of_finite, np.full(0x8000 - bf16.INFINITY, np.inf, np.float32))


def _power_of_two_from(values: np.ndarray) -> np.ndarray:
    return ((values.view(np.uint32) + 0x7FFFFF) & 0x7F800000).view(np.float32)


# The scale of each block amax.
SCALE_OF = {
    Recipe.F32: by_magnitude(np.maximum(bf16.MAGNITUDES, SMALLEST_AMAX) / MAX),
    Recipe.UE8M0: by_magnitude(
        _power_of_two_from(np.maximum(bf16.MAGNITUDES, _SMALLEST_AMAX_UE8M0) / MAX)
    ),
}


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """float32 in [-448, 448] to E4M3 codes (uint8), to nearest, ties to even; keeps -0.0."""
    codes = np.empty(values.shape, np.uint8)
    kernels.round_e4m3(np.ascontiguousarray(values).reshape(-1), codes.reshape(-1))
    return codes


def encode_blocks(
    bits_NxK: np.ndarray, block: tuple[int, int], scale_of: np.ndarray, *, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """BF16 bits to codes (uint8 [N, K]) and the amax of each block (uint16, BF16).

    `block` is its rows and columns, `scale_of` the scale of each amax (float32 [32768]).

    Raises:
        BadInputError: NaN or infinite weights, with the tensor named.
    """
    N, K = bits_NxK.shape
    codes = np.empty((N, K), np.uint8)
    amax = np.empty((-(-N // block[0]), -(-K // block[1])), np.uint16)
    # Rounding of a scale puts a quotient at most one unit above 448, which rounds back to it.
    kernels.encode_e4m3(np.ascontiguousarray(bits_NxK), block, scale_of, codes, amax)
    if amax.max(initial=0) >= bf16.INFINITY:
        bf16.amax(bits_NxK, name)  # says where
    return codes, amax


def encode(bits_NxK: np.ndarray, *, recipe: Recipe = Recipe.F32, name: str) -> Fp8Block:
    """BF16 bits (uint16) to codes E4M3(x / s) and the scales s of blocks.

    Raises:
        BadInputError: NaN or infinite weights, with the tensor named.
    """
    scale_of = SCALE_OF[recipe]
    codes, amax = encode_blocks(bits_NxK, (BLOCK, BLOCK), scale_of, name=name)
    return Fp8Block(codes, scale_of[amax])


def encode_channel(bits_NxK: np.ndarray, *, name: str) -> Fp8Channel:
    """BF16 bits (uint16) to codes E4M3(x / s) with s = amax / 448 of each row, as slime has it.

    Raises:
        BadInputError: NaN or infinite weights, with the tensor named.
    """
    scale_of = SCALE_OF[Recipe.F32]
    codes, amax = encode_blocks(bits_NxK, (1, max(bits_NxK.shape[1], 1)), scale_of, name=name)
    return Fp8Channel(codes, scale_of[amax])


def encode_tensor(bits_NxK: np.ndarray, *, amax: np.float32, name: str) -> Fp8Tensor:
    """BF16 bits (uint16) to codes E4M3(x / s) with s = amax / 448, as slime has it.

    `amax` is the largest magnitude (`bf16.amax`) of all matrices that share the scale: those that
    an engine fuses.

    Raises:
        BadInputError: NaN or infinite weights, or one above `amax`, with the tensor named.
    """
    scale = np.maximum(np.float32(amax), SMALLEST_AMAX) / MAX
    scale_of = np.full(0x8000, scale)
    block = (1, max(bits_NxK.shape[1], 1))
    codes, found = encode_blocks(bits_NxK, block, scale_of, name=name)
    largest = bf16.MAGNITUDES[found.max(initial=0)]
    if largest > amax:
        raise BadInputError(f"tensor {name}", expected=f"magnitudes up to {amax}", found=largest)
    return Fp8Tensor(codes, scale.reshape(1))


def decode(block: Fp8Block) -> np.ndarray:
    """float32 [N, K]."""
    N, K = block.codes.shape
    scale = np.repeat(np.repeat(block.scale_inv, BLOCK, axis=0)[:N], BLOCK, axis=1)[:, :K]
    return VALUES[block.codes] * scale


def decode_channel(tensor: Fp8Channel) -> np.ndarray:
    """float32 [N, K]."""
    return VALUES[tensor.codes] * tensor.scale


def decode_tensor(tensor: Fp8Tensor) -> np.ndarray:
    """float32 [N, K]."""
    return VALUES[tensor.codes] * tensor.scale[0]
