"""The encoders for the device that holds the weights: the same bytes, as functions for jax.jit.

Owns the arithmetic of the formats in terms of array operations, and imports no array library: the
functions take jax arrays, and are meant to be compiled. Weights [N, K] are BF16, or its bits as
uint16; the results hold arrays where those of the encoders beside this file hold numpy arrays.

XLA's float32 arithmetic is not the same everywhere: it divides by multiplying with a reciprocal, on
GPUs to within two units; it fuses products into sums; it flushes subnormals. So nothing here hangs
on the last bit of a quotient: NVFP4 compares integers with the tables of `nvfp4.py`, scales come
out of tables, scales of powers of two subtract exponents, and the one product of FP8 may be some
units off (`_settled`). Only the errors that `4over6` compares are plain float32 sums.

Nothing can be refused here. NaN or infinity show in `amax`, which callers fetch and check.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weight_sync.formats import bf16, fp8, mxfp8, nvfp4

Array = Any  # of jax; its methods and namespace are all that is needed of jax

_NORMAL_FROM = 0x3C800000  # bits of 2^-6, the smallest normal E4M3
_INFINITY = 0x7F800000


def _bits(weights: Array) -> tuple[Array, Array]:
    """int32 magnitudes, and uint8 signs where E4M3 has them."""
    bits = weights.view("uint16")
    return (bits & 0x7FFF).astype("int32"), ((bits >> 8) & 0x80).astype("uint8")


def _look_up(table: np.ndarray, index: Array) -> Array:
    return index.__array_namespace__().asarray(table)[index]


def amax(weights: Array) -> Array:
    """float32 []: the largest magnitude; NaN or infinite if any element is."""
    return (_bits(weights)[0].max() << 16).view("float32")


def encode_nvfp4(weights_NxK: Array, tables: nvfp4.Tables) -> nvfp4.NvFp4:
    """The bytes of `nvfp4.encode`; the tables are made on the host, by `nvfp4.tables`.

    Tables are an argument, not a constant: one compilation serves all tensors of a shape.
    """
    N, K = weights_NxK.shape
    assert K % nvfp4.BLOCK == 0, "columns in multiples of 16"
    blocks = weights_NxK.reshape(N, K // nvfp4.BLOCK, nvfp4.BLOCK)
    xp = blocks.__array_namespace__()
    nibbles, codes = _candidate(blocks, tables.candidates[0])
    if len(tables.candidates) == 2:
        others = _candidate(blocks, tables.candidates[1])
        errors = [_squared_error(blocks, *each, tables.unit) for each in ((nibbles, codes), others)]
        better = errors[1] < errors[0]
        nibbles = xp.where(better[:, :, None], others[0], nibbles)
        codes = xp.where(better, others[1], codes)
    packed = (nibbles[:, :, 0::2] | (nibbles[:, :, 1::2] << 4)).reshape(N, K // 2)
    return nvfp4.NvFp4(packed, codes, tables.global_scale)


def _candidate(blocks: Array, candidate: nvfp4.Candidate) -> tuple[Array, Array]:
    """uint8 nibbles [N, B, 16] and scale codes [N, B]."""
    magnitudes, signs = _bits(blocks)
    codes = _look_up(candidate.code_of, magnitudes.max(2))
    reached = _look_up(candidate.thresholds, codes.astype("int32")).astype("int32")  # [N, B, 8]
    nibbles = (signs >> 4) * (magnitudes >= reached[:, :, :1]).astype("uint8")
    for step in range(1, 8):
        nibbles = nibbles + (magnitudes >= reached[:, :, step : step + 1]).astype("uint8")
    return nibbles, codes


def _squared_error(blocks: Array, nibbles: Array, codes: Array, unit: Array) -> Array:
    """float32 [N, B], summed in the order of columns, as `kernels.squared_errors` does.

    An element times its scale is exact, so that nothing changes where a device fuses it. An error
    so small that its square is flushed is of an element that is 0 under both candidates.
    """
    xp = blocks.__array_namespace__()
    bits = blocks.view("uint16").astype("uint32")
    x = (bits << 16).view("float32")
    # A subnormal is an integer times 2^-133; its own bits would be flushed. The factor goes to the
    # unit by its exponent: of two products with constants XLA makes one, with a flushed constant.
    small_unit = (unit.view("int32") - (133 << 23)).clip(0).view("float32")
    subnormal = (bits & 0x7F).astype("float32") * small_unit
    subnormal = xp.where((bits & 0x8000) > 0, -subnormal, subnormal)
    scaled = xp.where((bits & 0x7FFF) < 0x80, subnormal, x * unit)
    decoded = _look_up(nvfp4.VALUES, nibbles.astype("int32"))
    decoded = decoded * _look_up(fp8.VALUES, codes.astype("int32"))[:, :, None]
    off = decoded - _unfused(scaled)
    squares = _unfused(off * off)
    error = squares[:, :, 0]
    for column in range(1, nvfp4.BLOCK):
        error = error + squares[:, :, column]
    return error


def _unfused(product: Array) -> Array:
    """A rounded product, which compilers then cannot draw into a fused multiply-add."""
    return product.view("int32").clip(max=_INFINITY).view("float32")


def encode_fp8(weights_NxK: Array, *, recipe: fp8.Recipe = fp8.Recipe.F32) -> fp8.Fp8Block:
    """The bytes of `fp8.encode`."""
    magnitudes, signs = _bits(weights_NxK)
    N, K = magnitudes.shape
    n, k = -(-N // fp8.BLOCK), -(-K // fp8.BLOCK)
    xp = magnitudes.__array_namespace__()
    padded = xp.pad(magnitudes, ((0, n * fp8.BLOCK - N), (0, k * fp8.BLOCK - K)))
    blocks = padded.reshape(n, fp8.BLOCK, k, fp8.BLOCK)
    block_amax = blocks.max((1, 3))
    if recipe == fp8.Recipe.F32:
        scaled = _scaled(blocks, block_amax[:, None, :, None])
    else:
        exponent = _look_up(_exponents(fp8.SCALE_OF[recipe]), block_amax)
        scaled = _scaled_by_power(blocks, exponent[:, None, :, None])
    codes = _e4m3(scaled).reshape(padded.shape)[:N, :K] | signs
    return fp8.Fp8Block(codes, _look_up(fp8.SCALE_OF[recipe], block_amax))


def encode_fp8_channel(weights_NxK: Array) -> fp8.Fp8Channel:
    """The bytes of `fp8.encode_channel`."""
    magnitudes, signs = _bits(weights_NxK)
    row_amax = magnitudes.max(1)[:, None]
    codes = _e4m3(_scaled(magnitudes, row_amax)) | signs
    return fp8.Fp8Channel(codes, _look_up(fp8.SCALE_OF[fp8.Recipe.F32], row_amax))


def encode_mxfp8(weights_NxK: Array) -> mxfp8.MxFp8:
    """The bytes of `mxfp8.encode`."""
    magnitudes, signs = _bits(weights_NxK)
    N, K = magnitudes.shape
    assert K % mxfp8.BLOCK == 0, "columns in multiples of 32"
    blocks = magnitudes.reshape(N, K // mxfp8.BLOCK, mxfp8.BLOCK)
    scale = mxfp8.scale_byte(blocks.max(2))
    codes = _e4m3(_scaled_by_power(blocks, scale[:, :, None] - 127)).reshape(N, K) | signs
    return mxfp8.MxFp8(codes, scale.astype("uint8"))


def _exponents(scale_of: np.ndarray) -> np.ndarray:
    """int32 exponents of powers of two."""
    return (scale_of.view(np.int32) >> 23) - 127


def _scaled_by_power(magnitudes: Array, exponent: Array) -> Array:
    """int32 bits of x / 2^exponent as float32, its exponent running on below zero."""
    xp = magnitudes.__array_namespace__()
    # A subnormal is an integer times 2^-133.
    subnormal = magnitudes.astype("float32").view("int32") - (133 << 23)
    return xp.where(magnitudes < 0x80, subnormal, magnitudes << 16) - (exponent << 23)


def _nudges() -> tuple[np.ndarray, np.ndarray]:
    """int8 [32768], by amax: on which side of a tie the quotient x / s ends, as rounded to float32.

    x / s = 448 x / amax, and both numbers have 8 bits: it is a tie of E4M3 (an odd number t of at
    most 5 bits), or 2^-13 of it away at least. If 7 divides amax, s is exact and ties are ties. If
    not, 7 divides t: t is 21 (normal, x = 3 amax / 64) or 7 (subnormal, x = amax / 64), times a
    power of two. The first array is of t = 21, the second of t = 7.
    """
    amax = np.maximum(bf16.MAGNITUDES, fp8.SMALLEST_AMAX)
    scale = fp8.SCALE_OF[fp8.Recipe.F32][: bf16.INFINITY]
    of_21 = np.sign(amax / np.float32(256) * np.float32(3) / scale - np.float32(1344 / 256))
    of_7 = np.sign(amax / scale - np.float32(448))
    of_rest = np.zeros(0x8000 - bf16.INFINITY, np.int8)
    return (
        np.append(of_21.astype(np.int8), of_rest),
        np.append(of_7.astype(np.int8), of_rest),
    )


_NUDGE_NORMAL, _NUDGE_SUBNORMAL = _nudges()
_RECIPROCAL = np.float32(1) / fp8.SCALE_OF[fp8.Recipe.F32]


def _scaled(magnitudes: Array, block_amax: Array) -> Array:
    """int32 bits of a float32 that E4M3 rounds as it rounds x / s; s = amax / 448."""
    x = (magnitudes << 16).view("float32")
    product = (x * _look_up(_RECIPROCAL, block_amax)).view("int32")
    return _settled(product, block_amax)


def _settled(product: Array, block_amax: Array) -> Array:
    """The product with the reciprocal, which is a few units off, ready to be rounded.

    Snapped to multiples of 16 units it is a tie if x / s is nearly one, and is then pushed to the
    side where the division ends.
    """
    xp = product.__array_namespace__()
    snapped = (product + 8) & ~15
    normal = _look_up(_NUDGE_NORMAL, block_amax).astype("int32")
    subnormal = _look_up(_NUDGE_SUBNORMAL, block_amax).astype("int32")
    return snapped + xp.where(snapped >= _NORMAL_FROM, normal, subnormal)


def _e4m3(scaled: Array) -> Array:
    """uint8 E4M3 codes without signs of float32 bits (int32), to nearest, ties to even."""
    xp = scaled.__array_namespace__()
    # almost half a unit in the last place, minus the difference of the biases
    normal = (scaled + ((scaled >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20
    significand = (scaled & 0x7FFFFF) | 0x800000
    shift = (141 - (scaled >> 23)).clip(21, 26)  # to units of 2^-9
    half = (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)
    return xp.where(scaled >= _NORMAL_FROM, normal, (significand + half) >> shift).astype("uint8")
