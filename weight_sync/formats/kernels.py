"""The encoders' inner loops, compiled by Numba.

Owns loops over elements, and no format: what a code means and how a recipe rounds comes in as
tables and scalars. They release the GIL, so that tensors are encoded side by side. Each works on a
few thousand elements at a time in flat passes over small buffers, which LLVM turns into vector
instructions; float32 arithmetic is that of IEEE 754, operation by operation.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import njit

_BLOCK = 16  # elements of an NVFP4 block
_CHUNK = 64  # NVFP4 blocks at a time
_U8, _U16, _U32, _F32 = np.uint8, np.uint16, np.uint32, np.float32
_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = 0x7F80  # a BF16 magnitude

# Division as IEEE 754 has it, without an exception; compiled code is kept beside this file.
_compiled = functools.partial(njit, nogil=True, cache=True, error_model="numpy")()


@_compiled
def largest_magnitude(bits: np.ndarray, mask: np.unsignedinteger) -> np.unsignedinteger:
    """Of the bits of floats, [M] of any unsigned type: the largest under `mask`; 0 if none."""
    unsigned = bits.dtype.type
    largest = unsigned(0)
    for i in range(len(bits)):
        largest = max(largest, unsigned(bits[i] & mask))
    return largest


@_compiled
def thresholds(scale: np.ndarray, divides: bool, steps: np.ndarray) -> np.ndarray:
    """uint16 [128, 8]: the smallest BF16 magnitude m with m / scale[c] >= steps[i].

    scale: float32 [128], of each scale code; with `divides` False it multiplies. A step that is
    never reached stays at infinity. By bisection: among the few magnitudes where it should be, or
    among all if it is not there, as at the ends of the range.
    """
    found = np.empty((128, 8), np.uint16)
    for code in range(128):
        for i in range(8):
            step, by = _F32(steps[i]), _F32(scale[code])
            near = _magnitude(step * by) if divides else _magnitude(step / by)
            low, high = max(near - 1, 0), min(near + 2, _INFINITY)
            is_below = low == 0 or not _reaches(low - 1, by, divides, step)
            is_above = high == _INFINITY or _reaches(high, by, divides, step)
            if not (is_below and is_above):
                low, high = 0, _INFINITY
            while low < high:
                middle = (low + high) >> 1
                if _reaches(middle, by, divides, step):
                    high = middle
                else:
                    low = middle + 1
            found[code, i] = low
    return found


@njit(error_model="numpy")
def _magnitude(value: np.float32) -> np.int64:
    """Of a float32 from 0 on, infinity and NaN included: the BF16 magnitude below."""
    return np.int64(min(_F32(value).view(np.uint32) >> _U32(16), _INFINITY))


@njit(error_model="numpy")
def _reaches(
    magnitude: np.int64 | int, scale: np.float32, divides: bool, step: np.float32
) -> np.bool_:
    value = _U32(magnitude << 16).view(np.float32)
    if divides:
        return _F32(value / scale) >= step
    return _F32(value * scale) >= step


# NVFP4 takes three kernels: of one that does all of it LLVM vectorizes nothing.


@_compiled
def block_magnitudes(bits: np.ndarray, magnitudes: np.ndarray) -> np.uint32:
    """The largest magnitude of each NVFP4 block and of all of them.

    bits: uint16 [16 B], BF16, at an address that 4 divides. magnitudes: uint16 [B], is written.
    """
    words = bits.view(np.uint32)
    of_2 = np.empty(_CHUNK * 8, np.uint32)
    of_4 = np.empty(_CHUNK * 4, np.uint32)
    of_8 = np.empty(_CHUNK * 2, np.uint32)
    for start in range(0, len(magnitudes), _CHUNK):
        num = min(_CHUNK, len(magnitudes) - start)
        source = words[start * 8 : (start + num) * 8]
        for i in range(num * 8):
            word = source[i]
            of_2[i] = max(_U32(word & _U32(0x7FFF)), _U32((word >> _U32(16)) & _U32(0x7FFF)))
        for i in range(num * 4):
            of_4[i] = max(of_2[2 * i], of_2[2 * i + 1])
        for i in range(num * 2):
            of_8[i] = max(of_4[2 * i], of_4[2 * i + 1])
        target = magnitudes[start : start + num]
        for b in range(num):
            target[b] = max(of_8[2 * b], of_8[2 * b + 1])
    largest = _U32(0)
    for b in range(len(magnitudes)):
        largest = max(largest, _U32(magnitudes[b]))
    return largest


@_compiled
def look_up(index: np.ndarray, table: np.ndarray, found: np.ndarray) -> None:
    """index: uint16 [M]. table: of 32768. found: [M], of the table's type, is written."""
    for i in range(len(index)):
        found[i] = table[index[i]]


@_compiled
def encode_e2m1(
    bits: np.ndarray, lanes_128x128: np.ndarray, codes: np.ndarray, packed: np.ndarray
) -> None:
    """Blocks of 16 elements to packed nibbles, under their scale codes.

    bits: uint16 [16 B], BF16. lanes: of each scale code the 8 thresholds, each 16 times, to be
    compared with a block at once; the first is where a negative element starts to keep its sign,
    number i where it has index i. codes: uint8 [B]. packed: uint8 [8 B], is written.
    """
    nibbles = np.empty(_CHUNK * 16, np.uint16)  # as wide as what is compared
    pairs = nibbles.view(np.uint32)
    for start in range(0, len(codes), _CHUNK):
        num = min(_CHUNK, len(codes) - start)
        source = bits[start * 16 : (start + num) * 16]
        own = codes[start : start + num]
        for b in range(num):
            t = lanes_128x128[own[b]]
            for j in range(_BLOCK):
                x = source[b * _BLOCK + j]
                m = _U16(x & _MAGNITUDE)
                index = _U16(m >= t[16 + j]) + _U16(m >= t[32 + j])
                index += _U16(m >= t[48 + j]) + _U16(m >= t[64 + j])
                index += _U16(m >= t[80 + j]) + _U16(m >= t[96 + j]) + _U16(m >= t[112 + j])
                sign = _U16(_U16(m >= t[j]) & _U16(x >> _U16(15)))
                nibbles[b * _BLOCK + j] = _U16(index + _U16(sign << _U16(3)))
        target = packed[start * 8 : (start + num) * 8]
        for i in range(num * 8):
            pair = pairs[i]  # low half: even column, high half: odd column
            target[i] = _U8(pair | _U32(pair >> _U32(12)))


@_compiled
def squared_errors(
    bits: np.ndarray,
    packed: np.ndarray,
    codes: np.ndarray,
    elements: np.ndarray,
    scales: np.ndarray,
    unit: np.float32,
    errors: np.ndarray,
) -> None:
    """Per block the sum over its columns, in order, of (element * scale - x * unit)^2, in float32.

    elements: float32 [16], of each nibble. scales: float32, of each scale code. errors: float32
    [B], is written.
    """
    wide = np.empty(_BLOCK, np.uint32)
    x = wide.view(np.float32)
    squares = np.empty(_BLOCK, np.float32)
    for b in range(len(codes)):
        scale = scales[codes[b]]
        for j in range(_BLOCK):
            wide[j] = _U32(bits[b * _BLOCK + j]) << _U32(16)
        for j in range(8):
            pair = packed[b * 8 + j]
            even = elements[pair & 15] * scale - x[2 * j] * unit
            odd = elements[pair >> 4] * scale - x[2 * j + 1] * unit
            squares[2 * j] = even * even
            squares[2 * j + 1] = odd * odd
        error = np.float32(0)
        for j in range(_BLOCK):
            error += squares[j]
        errors[b] = error


@_compiled
def take_better(
    errors: np.ndarray,
    packed: np.ndarray,
    codes: np.ndarray,
    other_packed: np.ndarray,
    other_codes: np.ndarray,
) -> None:
    """Overwrites the blocks of `packed` and `codes` where the other's error is smaller.

    errors: float32 [2, B], the own ones and the other's. packed: uint8 [8 B]. codes: uint8 [B].
    """
    blocks, others = packed.view(np.uint64), other_packed.view(np.uint64)
    for b in range(len(codes)):  # without a branch, which would be taken at random
        takes = errors[1, b] < errors[0, b]
        codes[b] = other_codes[b] if takes else codes[b]
        blocks[b] = others[b] if takes else blocks[b]


@_compiled
def encode_e4m3(
    bits: np.ndarray,
    block: tuple[int, int],
    scale_of: np.ndarray,
    codes: np.ndarray,
    amax: np.ndarray,
) -> None:
    """BF16 to E4M3(x / scale), to nearest, ties to even, with a scale for each block of a matrix.

    bits: uint16 [N, K]. block: its rows and columns; those at the edges are cropped. scale_of:
    float32 [32768], of each block amax; quotients must lie within [-448, 448] but for rounding.
    codes: uint8 [N, K] and amax: uint16 [ceil(N / rows), ceil(K / columns)], the largest magnitude
    of each block, are written.
    """
    num_rows, num_columns = bits.shape
    rows, columns = block
    of_column = np.empty(num_columns, np.uint16)
    for top in range(0, num_rows, rows):
        bottom = min(top + rows, num_rows)
        of_block = amax[top // rows]
        # Whole rows, one after the other: memory likes that more than block by block.
        of_column[:] = 0
        for row in range(top, bottom):
            source = bits[row]
            for i in range(num_columns):
                of_column[i] = max(of_column[i], _U16(source[i] & _MAGNITUDE))
        for b in range(len(of_block)):
            of_block[b] = _largest(of_column[b * columns : min((b + 1) * columns, num_columns)])
        for row in range(top, bottom):
            for b in range(len(of_block)):
                start, end = b * columns, min((b + 1) * columns, num_columns)
                _encode_e4m3(
                    bits[row, start:end], _F32(scale_of[of_block[b]]), codes[row, start:end]
                )


@njit(inline="always")
def _largest(magnitudes: np.ndarray) -> np.uint16:
    largest = _U16(0)
    for i in range(len(magnitudes)):
        largest = max(largest, magnitudes[i])
    return largest


@njit(inline="always")
def _encode_e4m3(source: np.ndarray, scale: np.float32, target: np.ndarray) -> None:
    for i in range(len(source)):
        x = _U32(_U32(source[i] & _MAGNITUDE) << _U32(16)).view(np.float32)
        quotient = _F32(x / scale)
        target[i] = _U8(_e4m3(quotient) | _U32(_U32(source[i] >> _U16(8)) & _U32(0x80)))


@njit(inline="always")
def _e4m3(magnitude: np.float32) -> np.uint32:
    """The code of a float32 from 0 to 448, to nearest, ties to even."""
    m = _F32(magnitude).view(np.uint32)
    # almost half a unit in the last place, minus the difference of the biases
    normal = _U32(m + _U32((m >> _U32(20)) & _U32(1)) + _U32(0xC407FFFF)) >> _U32(20)
    # from 2^14 on float32 has units of 2^-9
    subnormal = _U32(_F32(magnitude + _F32(16384)).view(np.uint32) - _U32(0x46800000))
    return normal if m >= _U32(0x3C800000) else subnormal  # 2^-6, the smallest normal


@_compiled
def round_e4m3(values: np.ndarray, codes: np.ndarray) -> None:
    """float32 [M] in [-448, 448] to E4M3, to nearest, ties to even; codes uint8 [M] are written."""
    bits = values.view(np.uint32)
    for i in range(len(codes)):
        magnitude = _U32(bits[i] & _U32(0x7FFFFFFF)).view(np.float32)
        codes[i] = _U8(_e4m3(magnitude) | _U32((bits[i] >> _U32(24)) & _U32(0x80)))
