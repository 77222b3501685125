"""NVFP4: E2M1 elements, an E4M3 scale per 16 of them, one float32 scale per tensor.

Owns the bit layout and the recipes, which differ in rounding, not in layout. For a matrix [N, K],
K divisible by 16:
    packed        uint8   [N, K / 2]   column 2j in the low nibble of byte j, 2j + 1 in the high
    block_scale   uint8   [N, K / 16]  E4M3, row-major (not swizzled)
    global_scale  float32 []           `weight_scale_2`
    w = E2M1(nibble) * E4M3(block_scale) * global_scale
A nibble is sign << 3 | index into (0, .5, 1, 1.5, 2, 3, 4, 6), rounded to nearest, ties to even.

How the encoder is fast with the exact arithmetic of each recipe: an element's index depends only
on its 15 magnitude bits, on the scale code of its block (126 of them) and on the tensor's global
scale, and grows with the magnitude. So a tensor has one table of the smallest magnitudes that
reach each index under each scale code, found by bisection with the recipe's own arithmetic; the
elements are then compared as 16-bit integers and never widened.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from contracts.errors import BadInputError
from weight_sync.formats import bf16, fp8

BLOCK = 16
_CHUNK_BLOCKS = 8192  # worked on at a time, so that intermediates stay in the second-level cache

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([E2M1, -E2M1])  # float32 [16], the value of each nibble

_F = np.float32
_LARGEST = np.finfo(np.float32).max
_RANGE = _F(6 * 448)  # the largest element times the largest block scale

# The smallest scaled magnitude with index 1..7: ties go to the even index.
_JUST_ABOVE = [np.nextafter(_F(tie), _F(6)) for tie in (0.25, 1.25, 2.5, 5)]
_STEPS = np.array(
    [_JUST_ABOVE[0], 0.75, _JUST_ABOVE[1], 1.75, _JUST_ABOVE[2], 3.5, _JUST_ABOVE[3]], np.float32
)


class Recipe(enum.StrEnum):
    """Whose bytes to reproduce."""

    MODELOPT = "modelopt"  # NVIDIA ModelOpt, dynamic max calibration
    FOUR_OVER_SIX = "4over6"  # per block the better of amax/6 and amax/4, as SGLang does online
    TE = "te"  # Transformer Engine, FlashInfer's exact mode, miles
    CT = "ct"  # compressed-tensors (llm-compressor) on BF16 weights: scale math in BF16


class NvFp4(NamedTuple):
    packed: np.ndarray  # uint8 [N, K / 2]
    block_scale: np.ndarray  # uint8 [N, K / 16], E4M3
    global_scale: np.float32


class _Arithmetic(NamedTuple):
    """A recipe for one global scale: the only place where recipes differ."""

    global_scale: np.float32
    block_scale: Callable[[np.ndarray], np.ndarray]  # float32 block amax -> E4M3 codes
    scaled: Callable[[np.ndarray, np.ndarray], np.ndarray]  # (|x|, block scale) -> rounded to E2M1
    keeps_negative_zero: bool = False  # x = -0.0 or an underflow becomes 0x8


def _modelopt(amax: np.float32) -> _Arithmetic:
    s2 = amax / _RANGE if amax else _F(1)

    def block_scale(block_amax: np.ndarray) -> np.ndarray:
        s = block_amax / (_F(6) * s2)
        s[s == 0] = 1
        return fp8.to_e4m3(np.clip(s, _F(2.0**-9), fp8.MAX))

    return _Arithmetic(s2, block_scale, lambda x, sf: x / (sf * s2))


def _to_bf16(values: np.ndarray) -> np.ndarray:
    return bf16.widen(bf16.round_from(values))


def _compressed_tensors(amax: np.float32) -> _Arithmetic:
    # A number divided by a BF16 tensor is, in PyTorch, the number times the rounded reciprocal.
    floored = np.array([max(amax, np.finfo(np.float32).tiny)])
    encode = _to_bf16(_RANGE * _to_bf16(_F(1) / floored))[0]
    if not np.isfinite(encode):
        encode = _F(1)

    def block_scale(block_amax: np.ndarray) -> np.ndarray:
        codes = fp8.to_e4m3(np.minimum(encode * _to_bf16(block_amax / _F(6)), fp8.MAX))
        codes[codes == 0] = 0x20  # 0.125
        return codes

    return _Arithmetic(_F(1) / encode, block_scale, lambda x, sf: x / (sf / encode))


def _reciprocal(x: np.ndarray, sf: np.ndarray, decode: np.float32) -> np.ndarray:
    return x * np.minimum(_F(1) / (sf * decode), _LARGEST)


def _transformer_engine(amax: np.float32) -> _Arithmetic:
    encode = min(_RANGE / amax, _LARGEST) if amax else _LARGEST
    decode = _F(1) / encode

    def block_scale(block_amax: np.ndarray) -> np.ndarray:
        return fp8.to_e4m3(np.minimum(block_amax * (encode * (_F(1) / _F(6))), fp8.MAX))

    return _Arithmetic(
        decode, block_scale, lambda x, sf: _reciprocal(x, sf, decode), keeps_negative_zero=True
    )


def _four_over_six(amax: np.float32, stretch: np.float32) -> _Arithmetic:
    """One of the two candidates: the block maximum becomes 6 (`stretch` 1) or 4 (1.5)."""
    s2 = amax / _RANGE if amax else _F(1)
    encode = min(_F(1) / s2, _LARGEST)
    decode = _F(1) / encode

    def block_scale(block_amax: np.ndarray) -> np.ndarray:
        s = ((block_amax / _F(6)) * encode) * stretch
        return fp8.to_e4m3(np.minimum(s, fp8.MAX))

    return _Arithmetic(
        s2, block_scale, lambda x, sf: _reciprocal(x, sf, decode), keeps_negative_zero=True
    )


def _arithmetics(recipe: Recipe, amax: np.float32) -> list[_Arithmetic]:
    """The recipe's candidates for each block; all but 4over6 have one."""
    if recipe == Recipe.FOUR_OVER_SIX:
        return [_four_over_six(amax, _F(1)), _four_over_six(amax, _F(1.5))]
    one = {
        Recipe.MODELOPT: _modelopt,
        Recipe.TE: _transformer_engine,
        Recipe.CT: _compressed_tensors,
    }
    return [one[recipe](amax)]


def _thresholds(arithmetic: _Arithmetic) -> np.ndarray:
    """uint64 [8, 128]: row 0 the smallest magnitude that keeps its sign, row i that has index i.

    Columns are scale codes. Each threshold stands four times in its word, once per element of a
    lane. Bisection over the finite BF16 magnitudes; one that is never reached stays at infinity.
    """
    zero = _F(0) if arithmetic.keeps_negative_zero else np.finfo(np.float32).smallest_subnormal
    steps_8x1 = np.concatenate([[zero], _STEPS]).astype(np.float32)[:, None]
    scale = fp8.VALUES[:128]
    low = np.zeros((8, 128), np.uint16)
    high = np.full((8, 128), bf16.INFINITY, np.uint16)
    for _ in range(15):
        middle = (low + high) >> 1
        reached = arithmetic.scaled(bf16.widen(middle), scale) >= steps_8x1
        high = np.where(reached, middle, high)
        low = np.where(reached, low, np.minimum(middle + 1, high))
    return high.astype(np.uint64) * np.uint64(0x0001_0001_0001_0001)


# Lanes: the 16 elements of each of B blocks as uint16 [4, 4 * B], where row r, columns 4b..4b+3
# are elements 4r..4r+3 of block b. Whole rows are then compared with one threshold per block.


def _to_lanes(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits.reshape(-1, BLOCK).view(np.uint64).T).view(np.uint16)


def _lanes_to_bytes(nibbles: np.ndarray) -> np.ndarray:
    """uint8 nibbles in lanes to packed bytes, uint8 [B, 8]."""
    pairs = nibbles.view(np.uint16)  # low byte: even column, high byte: odd column
    packed = (pairs | (pairs >> 4)).astype(np.uint8)
    return np.ascontiguousarray(packed.view(np.uint16).T).view(np.uint8)


def _block_amax(magnitudes: np.ndarray) -> np.ndarray:
    largest = magnitudes.max(axis=0)
    pairs = np.maximum(largest[0::2], largest[1::2])
    return bf16.widen(np.maximum(pairs[0::2], pairs[1::2]))


def _nibbles(
    lanes: np.ndarray, magnitudes: np.ndarray, codes: np.ndarray, thresholds: np.ndarray
) -> np.ndarray:
    """Elements to nibbles (uint8, in lanes) under the blocks' scale codes."""
    columns = codes.astype(np.intp)

    def reached(row: int) -> np.ndarray:
        return magnitudes >= thresholds[row].take(columns).view(np.uint16)

    nibbles = (reached(0) & (lanes > 0x7FFF)).view(np.uint8) << 3
    for row in range(1, 8):
        nibbles += reached(row).view(np.uint8)
    return nibbles


def _squared_error(
    lanes: np.ndarray, nibbles: np.ndarray, codes: np.ndarray, encode: np.float32
) -> np.ndarray:
    """float32 [B], summed in column order as a loop over the block would."""
    decoded = VALUES[nibbles] * np.repeat(fp8.VALUES[codes], 4)
    squares_4xBx4 = np.square(decoded - bf16.widen(lanes) * encode).reshape(4, -1, 4)
    error = np.zeros(len(codes), np.float32)
    for row in range(4):
        for column in range(4):
            error += squares_4xBx4[row, :, column]
    return error


def encode(
    bits_NxK: np.ndarray, *, amax: np.float32, recipe: Recipe = Recipe.MODELOPT, name: str
) -> NvFp4:
    """BF16 bits (uint16, finite) to NVFP4.

    `amax` is the largest magnitude (`bf16.amax`) of all tensors that share the global scale: an
    expert's gate and up projections together.

    Raises:
        BadInputError: K is not a multiple of 16, with the tensor named.
    """
    N, K = bits_NxK.shape
    if K % BLOCK:
        raise BadInputError(
            f"tensor {name} in nvfp4", expected=f"columns in multiples of {BLOCK}", found=K
        )
    blocks = np.ascontiguousarray(bits_NxK).reshape(-1, BLOCK)
    packed = np.empty((len(blocks), BLOCK // 2), np.uint8)
    block_scale = np.empty(len(blocks), np.uint8)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        candidates = [(a, _thresholds(a)) for a in _arithmetics(recipe, _F(amax))]
        for start in range(0, len(blocks), _CHUNK_BLOCKS):
            chunk = slice(start, start + _CHUNK_BLOCKS)
            lanes = _to_lanes(blocks[chunk])
            magnitudes = lanes & np.uint16(0x7FFF)
            block_amax = _block_amax(magnitudes)
            encoded = []
            for arithmetic, thresholds in candidates:
                codes = arithmetic.block_scale(block_amax)
                encoded.append((codes, _nibbles(lanes, magnitudes, codes, thresholds)))
            codes, nibbles = encoded[0]
            if len(encoded) == 2:
                codes, nibbles = _better(lanes, encoded, candidates[0][0].global_scale)
            packed[chunk] = _lanes_to_bytes(nibbles)
            block_scale[chunk] = codes
    return NvFp4(
        packed.reshape(N, K // 2), block_scale.reshape(N, K // BLOCK), candidates[0][0].global_scale
    )


def _better(
    lanes: np.ndarray, encoded: list[tuple[np.ndarray, np.ndarray]], global_scale: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Per block the second candidate where its squared error is smaller, else the first."""
    unit = min(_F(1) / global_scale, _LARGEST)
    first, second = (_squared_error(lanes, nibbles, codes, unit) for codes, nibbles in encoded)
    take = second < first
    codes = np.where(take, encoded[1][0], encoded[0][0])
    return codes, np.where(np.repeat(take, 4), encoded[1][1], encoded[0][1])


def decode(tensor: NvFp4) -> np.ndarray:
    """float32 [N, K]."""
    N, num_bytes = tensor.packed.shape
    pairs = np.stack([VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], axis=1)
    elements = pairs[tensor.packed].reshape(N, num_bytes * 2 // BLOCK, BLOCK)
    scaled = elements * fp8.VALUES[tensor.block_scale][:, :, None] * tensor.global_scale
    return scaled.reshape(N, num_bytes * 2)
