"""NVFP4: E2M1 elements, an E4M3 scale per 16 of them, one float32 scale per tensor.

Owns the bit layout and the recipes, which differ in rounding, not in layout; must not know files,
models or tensor names. For a matrix [N, K], K divisible by 16:
    packed        uint8   [N, K / 2]   column 2j in the low nibble of byte j, 2j + 1 in the high
    block_scale   uint8   [N, K / 16]  E4M3, row-major (not swizzled)
    global_scale  float32 []           `weight_scale_2`
    w = E2M1(nibble) * E4M3(block_scale) * global_scale
A nibble is sign << 3 | index into (0, .5, 1, 1.5, 2, 3, 4, 6), rounded to nearest, ties to even.

How the encoder is fast with the exact arithmetic of each recipe: a block's scale code depends only
on the 15 magnitude bits of its largest element, and an element's index only on its own magnitude
bits and that code, growing with the magnitude. So a tensor has two tables, made with the recipe's
own arithmetic: the code of each magnitude, and the smallest magnitudes that reach each index under
each code. The elements are then compared as 16-bit integers and never widened (`kernels.py`).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from contracts.errors import BadInputError
from weight_sync.formats import bf16, finite, fp8, kernels

BLOCK = 16
_CHUNK_BLOCKS = 8192  # worked on at a time, so that 4over6's second candidate stays in the cache

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
    # |x| / divisor, or |x| * factor, is what is rounded to E2M1; float32 by scale code
    divisor: np.ndarray | None = None
    factor: np.ndarray | None = None
    keeps_negative_zero: bool = False  # x = -0.0 or an underflow becomes 0x8


_SCALES = fp8.VALUES[:128]


def _modelopt(amax: np.float32) -> _Arithmetic:
    s2 = amax / _RANGE if amax else _F(1)

    def block_scale(block_amax: np.ndarray) -> np.ndarray:
        s = block_amax / (_F(6) * s2)
        s[s == 0] = 1
        return fp8.to_e4m3(np.minimum(np.maximum(s, _F(2.0**-9)), fp8.MAX))

    return _Arithmetic(s2, block_scale, divisor=_SCALES * s2)


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

    return _Arithmetic(_F(1) / encode, block_scale, divisor=_SCALES / encode)


def _reciprocals(decode: np.float32) -> np.ndarray:
    return np.minimum(_F(1) / (_SCALES * decode), _LARGEST)


def _transformer_engine(amax: np.float32) -> _Arithmetic:
    encode = min(_RANGE / amax, _LARGEST) if amax else _LARGEST
    decode = _F(1) / encode

    def block_scale(block_amax: np.ndarray) -> np.ndarray:
        return fp8.to_e4m3(np.minimum(block_amax * (encode * (_F(1) / _F(6))), fp8.MAX))

    return _Arithmetic(decode, block_scale, factor=_reciprocals(decode), keeps_negative_zero=True)


def _four_over_six(amax: np.float32, stretch: np.float32) -> _Arithmetic:
    """One of the two candidates: the block maximum becomes 6 (`stretch` 1) or 4 (1.5)."""
    s2 = amax / _RANGE if amax else _F(1)
    encode = min(_F(1) / s2, _LARGEST)
    decode = _F(1) / encode

    def block_scale(block_amax: np.ndarray) -> np.ndarray:
        s = ((block_amax / _F(6)) * encode) * stretch
        return fp8.to_e4m3(np.minimum(s, fp8.MAX))

    return _Arithmetic(s2, block_scale, factor=_reciprocals(decode), keeps_negative_zero=True)


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


class Candidate(NamedTuple):
    """An arithmetic as the kernels take it."""

    code_of: np.ndarray  # uint8 [32768], the scale code of each block amax
    # uint16 [128, 8], under each scale code: where a negative element starts to keep its sign, and
    # the smallest magnitudes of index 1 to 7
    thresholds: np.ndarray
    lanes: np.ndarray  # uint16 [128, 128], each threshold 16 times, as the kernel wants them

    @staticmethod
    def of(arithmetic: _Arithmetic, amax: np.float32) -> Candidate:
        num = int(amax.view(np.uint32) >> 16) + 1  # magnitudes up to the largest there is
        code_of = np.zeros(0x8000, np.uint8)
        code_of[:num] = arithmetic.block_scale(bf16.MAGNITUDES[:num])
        zero = _F(0) if arithmetic.keeps_negative_zero else np.finfo(np.float32).smallest_subnormal
        scale = arithmetic.factor if arithmetic.divisor is None else arithmetic.divisor
        assert scale is not None
        steps = np.concatenate([[zero], _STEPS]).astype(np.float32)
        thresholds = kernels.thresholds(scale, arithmetic.divisor is not None, steps)
        return Candidate(code_of, thresholds, np.repeat(thresholds, BLOCK, axis=1))

    def encode(
        self, bits: np.ndarray, magnitudes: np.ndarray, packed: np.ndarray, codes: np.ndarray
    ) -> None:
        """Writes the nibbles and scale codes of BF16 bits, uint16 [16 B], by their block amax."""
        kernels.look_up(magnitudes, self.code_of, codes)
        kernels.encode_e2m1(bits, self.lanes, codes, packed)


class Tables(NamedTuple):
    """A recipe for one global scale, as integers to look up."""

    candidates: tuple[Candidate, ...]  # of each block the one with the smaller error, or the first
    global_scale: np.float32
    unit: np.float32  # elements times this are compared with codes for the error


@functools.lru_cache(maxsize=8)  # tensors that share a scale come one after the other
def tables(amax: np.float32, recipe: Recipe) -> Tables:
    """The tables of a tensor whose largest magnitude is `amax`; not to be written to."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        arithmetics = _arithmetics(recipe, _F(amax))
        global_scale = arithmetics[0].global_scale
        unit = min(_F(1) / global_scale, _LARGEST)
        candidates = tuple(Candidate.of(arithmetic, _F(amax)) for arithmetic in arithmetics)
        return Tables(candidates, global_scale, unit)


class Measured(NamedTuple):
    """A matrix [N, K] as the encoder takes it, and what one pass over it found."""

    bits: np.ndarray  # uint16 [N * K], BF16, at an address that 4 divides
    shape: tuple[int, int]
    magnitudes: np.ndarray  # uint16 [N * K / 16], of each block
    amax: np.float32


def measure(bits_NxK: np.ndarray, name: str) -> Measured:
    """The block maxima of BF16 bits (uint16), and the largest of them.

    Raises:
        BadInputError: K is not a multiple of 16, NaN or infinity; with the tensor named.
    """
    N, K = bits_NxK.shape
    if K % BLOCK:
        raise BadInputError(
            f"tensor {name} in nvfp4", expected=f"columns in multiples of {BLOCK}", found=K
        )
    bits = np.ascontiguousarray(bits_NxK).reshape(-1)
    if bits.ctypes.data % 4:
        bits = bits.copy()
    magnitudes = np.empty(bits.size // BLOCK, np.uint16)
    largest = kernels.block_magnitudes(bits, magnitudes)
    if largest >= bf16.INFINITY:
        finite.check(bits, "BF16", name)  # says where
    return Measured(bits, (N, K), magnitudes, bf16.MAGNITUDES[largest])


def encode(
    bits_NxK: np.ndarray, *, amax: np.float32, recipe: Recipe = Recipe.MODELOPT, name: str
) -> NvFp4:
    """BF16 bits (uint16) to NVFP4; `amax` as of `encode_measured`. Raises as `measure`."""
    return encode_measured(measure(bits_NxK, name), amax=amax, recipe=recipe)


def encode_measured(
    measured: Measured, *, amax: np.float32, recipe: Recipe = Recipe.MODELOPT
) -> NvFp4:
    """What was measured to NVFP4.

    `amax` is the largest magnitude of all tensors that share the global scale: an expert's gate and
    up projections together.
    """
    bits, (N, K), magnitudes, _ = measured
    packed = np.empty(bits.size // 2, np.uint8)
    block_scale = np.empty(bits.size // BLOCK, np.uint8)
    (first, *second), global_scale, unit = tables(amax, recipe)
    first.encode(bits, magnitudes, packed, block_scale)
    if second:
        _take_better(measured, packed, block_scale, second[0], unit)
    return NvFp4(packed.reshape(N, K // 2), block_scale.reshape(N, K // BLOCK), global_scale)


def _take_better(
    measured: Measured, packed: np.ndarray, codes: np.ndarray, second: Candidate, unit: np.float32
) -> None:
    """Overwrites the blocks whose squared error is smaller under the second candidate."""
    for start in range(0, len(codes), _CHUNK_BLOCKS):
        num = min(_CHUNK_BLOCKS, len(codes) - start)
        x = measured.bits[start * BLOCK : (start + num) * BLOCK]
        own = packed[start * 8 : (start + num) * 8], codes[start : start + num]
        other = np.empty(num * 8, np.uint8), np.empty(num, np.uint8)
        second.encode(x, measured.magnitudes[start : start + num], *other)
        errors = np.empty((2, num), np.float32)
        for (nibbles, scales), error in zip((own, other), errors, strict=True):
            kernels.squared_errors(x, nibbles, scales, VALUES, fp8.VALUES, unit, error)
        kernels.take_better(errors, *own, *other)


def decode(tensor: NvFp4) -> np.ndarray:
    """float32 [N, K]."""
    N, num_bytes = tensor.packed.shape
    pairs = np.stack([VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], axis=1)
    elements = pairs[tensor.packed].reshape(N, num_bytes * 2 // BLOCK, BLOCK)
    scaled = elements * fp8.VALUES[tensor.block_scale][:, :, None] * tensor.global_scale
    return scaled.reshape(N, num_bytes * 2)
