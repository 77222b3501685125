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

# Division as IEEE 754 has it, without an exception; compiled code is kept beside this file.
_compiled = functools.partial(njit, nogil=True, cache=True, error_model="numpy")()


@_compiled
def thresholds(scale: np.ndarray, divides: bool, steps: np.ndarray) -> np.ndarray:
    """uint16 [128, 8]: the smallest BF16 magnitude m with m / scale[c] >= steps[i], by bisection.

    scale: float32 [128], of each scale code; with `divides` False it multiplies. A step that is
    never reached stays at infinity.
    """
    found = np.empty((128, 8), np.uint16)
    bits = np.zeros(1, np.uint32)
    value = bits.view(np.float32)
    for code in range(128):
        for i in range(8):
            low, high = 0, 0x7F80
            while low < high:
                middle = (low + high) >> 1
                bits[0] = middle << 16
                scaled = value[0] / scale[code] if divides else value[0] * scale[code]
                if scaled >= steps[i]:
                    high = middle
                else:
                    low = middle + 1
            found[code, i] = low
    return found


@_compiled
def encode_nvfp4(
    bits: np.ndarray,
    code_of: np.ndarray,
    thresholds_128x8: np.ndarray,
    packed: np.ndarray,
    codes: np.ndarray,
) -> None:
    """Blocks of 16 elements to nibbles and scale codes.

    bits: uint16 [16 B], BF16. code_of: uint8 [32768], the scale code of each block amax. Column 0
    of the thresholds is where a negative element starts to keep its sign, column i where it has
    index i. packed: uint8 [8 B] and codes: uint8 [B] are written.
    """
    magnitudes = np.empty(_CHUNK * 16, np.uint16)
    of_2 = np.empty(_CHUNK * 8, np.uint16)
    of_4 = np.empty(_CHUNK * 4, np.uint16)
    of_8 = np.empty(_CHUNK * 2, np.uint16)
    nibbles = np.empty(_CHUNK * 16, np.uint8)
    pairs = nibbles.view(np.uint16)
    for start in range(0, len(codes), _CHUNK):
        num = min(_CHUNK, len(codes) - start)
        source = bits[start * 16 : (start + num) * 16]
        for i in range(num * 16):
            magnitudes[i] = source[i] & _MAGNITUDE
        for i in range(num * 8):
            of_2[i] = max(magnitudes[2 * i], magnitudes[2 * i + 1])
        for i in range(num * 4):
            of_4[i] = max(of_2[2 * i], of_2[2 * i + 1])
        for i in range(num * 2):
            of_8[i] = max(of_4[2 * i], of_4[2 * i + 1])
        for b in range(num):
            code = code_of[max(of_8[2 * b], of_8[2 * b + 1])]
            codes[start + b] = code
            t = thresholds_128x8[code]
            t0, t1, t2, t3, t4, t5, t6, t7 = t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]
            for j in range(_BLOCK):
                x = source[b * _BLOCK + j]
                m = _U16(x & _MAGNITUDE)
                index = _U16(m >= t1) + _U16(m >= t2) + _U16(m >= t3) + _U16(m >= t4)
                index += _U16(m >= t5) + _U16(m >= t6) + _U16(m >= t7)
                sign = _U16(_U16(m >= t0) & _U16(x >> _U16(15)))
                nibbles[b * _BLOCK + j] = _U8(index + _U16(sign << _U16(3)))
        target = packed[start * 8 : (start + num) * 8]
        for i in range(num * 8):
            pair = pairs[i]  # low byte: even column, high byte: odd column
            target[i] = _U8(pair | _U16(pair >> _U16(4)))


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
        m = quotient.view(np.uint32)
        # almost half a unit in the last place, minus the difference of the biases
        normal = _U32(m + _U32((m >> _U32(20)) & _U32(1)) + _U32(0xC407FFFF)) >> _U32(20)
        # from 2^14 on float32 has units of 2^-9
        subnormal = _U32(_F32(quotient + _F32(16384)).view(np.uint32) - _U32(0x46800000))
        code = normal if m >= _U32(0x3C800000) else subnormal  # 2^-6, the smallest normal
        target[i] = _U8(code | _U32(_U32(source[i] >> _U16(8)) & _U32(0x80)))
