"""The forward pass's loops over elements, compiled by Numba: what lies between its matrix products.

Owns roundings to narrow formats and everything that is fused with one. Must not know a model, a
checkpoint or PyTorch. Arrays are C-contiguous and float32 unless said otherwise; results go to
arrays that the caller gives. `exact` switches the rounding to bfloat16 off. They release the GIL.

Sums over a row may be added in any order, but always in the same: a row's result does not depend
on the rows beside it. All else is float32 arithmetic of IEEE 754, operation by operation.

Shape letters as in `model.py` and `precision.py`; M rows of a product, R experts of a token, G
groups of inputs that share a scale, C cached positions.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import njit

_U8, _U16, _U32, _I32, _F32 = np.uint8, np.uint16, np.uint32, np.int32, np.float32
_SIGN, _MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_FP8_GROUP = 128  # inputs that share a scale
_NVFP4_BLOCK = 16
_E4M3_MAX, _E2M1_MAX = np.float32(448), np.float32(6)
_LEAST_AMAX = np.float32(1e-10)  # keeps the scale of an all-zero group finite
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # few bits: its products with whole numbers are exact
_LN2_LOW = np.float32(0.693147180559945309 - 0.693359375)
_WHOLE = np.float32(12582912)  # 1.5 * 2**23: from here on float32 has units of 1
_LEAST_EXPONENT = np.float32(-87)

_compiled = functools.partial(njit, nogil=True, cache=True, error_model="numpy")()
_sums = functools.partial(
    njit, nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"}
)()
_inline = functools.partial(njit, forceinline=True, error_model="numpy")()


@_inline
def round_bf16(x: np.float32, exact: bool) -> np.float32:
    """To nearest, ties to even."""
    bits = _F32(x).view(np.uint32)
    rounded = _U32(bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) & _U32(0xFFFF0000)
    return x if exact else _U32(rounded).view(np.float32)


@_inline
def _clamped(x: np.float32, largest: np.float32) -> np.float32:
    # such that NaN stays
    return largest if x > largest else -largest if x < -largest else _F32(x)


@_inline
def round_e4m3(x: np.float32) -> np.float32:
    """To nearest, ties to even, saturating at 448."""
    x = _F32(_clamped(x, _E4M3_MAX))
    bits = _F32(x).view(np.uint32)
    normal = _U32(bits + _U32(0x7FFFF) + ((bits >> _U32(20)) & _U32(1))) & _U32(0xFFF00000)
    subnormal = _F32(_F32(x + _F32(24576)) - _F32(24576))  # 1.5 * 2**14: there the unit is 2**-9
    return subnormal if abs(x) < _F32(2.0**-6) else _U32(normal).view(np.float32)


@_inline
def round_e2m1(x: np.float32) -> np.float32:
    """To nearest, ties to even, saturating at 6."""
    x = _F32(_clamped(x, _E2M1_MAX))
    power = _U32(_F32(abs(x)).view(np.uint32) & _U32(0x7F800000)).view(np.float32)
    unit = _F32(_F32(0.5) * max(power, _F32(1)))
    whole = _F32(_WHOLE * unit)  # here float32 has that unit, too
    return _F32(_F32(x + whole) - whole)


@_inline
def code_e4m3(x: np.float32) -> np.uint8:
    """The byte of `round_e4m3(x)`."""
    size = _F32(abs(round_e4m3(x)))
    bits = size.view(np.uint32)
    if bits > _U32(0x7F800000):
        return _U8(0x7F)
    normal = _U32((bits >> _U32(20)) - _U32(120 << 3))  # the difference of the biases
    subnormal = _U32(_F32(size * _F32(512)))
    sign = _U32(_F32(x).view(np.uint32) >> _U32(24)) & _U32(0x80)
    return _U8((normal if size >= _F32(2.0**-6) else subnormal) | sign)


@_inline
def exp(x: np.float32) -> np.float32:
    """e**x for x <= 88 to a unit or two in the last place; below -87 as at -87."""
    x = _LEAST_EXPONENT if x < _LEAST_EXPONENT else _F32(x)
    shifted = _F32(_F32(x * _LOG2_E) + _WHOLE)
    whole = _F32(shifted - _WHOLE)
    rest = _F32(_F32(x - _F32(whole * _LN2_HIGH)) - _F32(whole * _LN2_LOW))
    power = _F32(_F32(_F32(1 / 5040) * rest) + _F32(1 / 720))
    power = _F32(_F32(power * rest) + _F32(1 / 120))
    power = _F32(_F32(power * rest) + _F32(1 / 24))
    power = _F32(_F32(power * rest) + _F32(1 / 6))
    power = _F32(_F32(power * rest) + _F32(0.5))
    power = _F32(_F32(power * rest) + _F32(1))
    power = _F32(_F32(power * rest) + _F32(1))
    scale = _U32(_U32(_F32(shifted).view(np.uint32) << _U32(23)) + _U32(127 << 23)).view(np.float32)
    return _F32(power * scale)


@_sums
def _dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    total = _F32(0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@_sums
def _sum(a: np.ndarray) -> np.float32:
    total = _F32(0)
    for i in range(len(a)):
        total += a[i]
    return total


@njit(nogil=True, cache=True, fastmath={"reassoc", "nnan", "nsz"})
def _max(a: np.ndarray) -> np.float32:
    """Any number where there is a NaN."""
    largest = a[0]
    for i in range(len(a)):
        largest = max(largest, a[i])
    return largest


@_compiled
def add_norm(
    x_NxD: np.ndarray,
    added_NxD: np.ndarray,
    weight_D: np.ndarray,
    eps: np.float32,
    exact: bool,
    out_NxD: np.ndarray,
) -> None:
    """x += added, rounded; the RMS norm of x, rounded, is written to `out`."""
    size = x_NxD.shape[1]
    for n in range(len(x_NxD)):
        x, added, out = x_NxD[n], added_NxD[n], out_NxD[n]
        for i in range(size):
            x[i] = round_bf16(_F32(x[i] + added[i]), exact)
        scale = _F32(_F32(1) / np.sqrt(_F32(_F32(_dot(x, x) / _F32(size)) + eps)))
        for i in range(size):
            out[i] = round_bf16(_F32(_F32(x[i] * scale) * weight_D[i]), exact)


@_compiled
def quantize_fp8(x_NxI: np.ndarray, values_NxI: np.ndarray, scale_NxG: np.ndarray) -> None:
    """x ~ values * scale of its group of 128; scale = amax / 448."""
    size = x_NxI.shape[1]
    for n in range(len(x_NxI)):
        for g in range(scale_NxG.shape[1]):
            x = x_NxI[n, g * _FP8_GROUP : min((g + 1) * _FP8_GROUP, size)]
            values = values_NxI[n, g * _FP8_GROUP : min((g + 1) * _FP8_GROUP, size)]
            scale = _F32(_amax(x) / _E4M3_MAX)
            scale_NxG[n, g] = scale
            for i in range(len(x)):
                values[i] = round_e4m3(_F32(x[i] / scale))


@_compiled
def quantize_nvfp4(x_NxI: np.ndarray, values_NxI: np.ndarray, scale_Nx1: np.ndarray) -> None:
    """x ~ values * scale: values are E2M1 times the E4M3 scale of their block of 16."""
    size = x_NxI.shape[1]
    scales = np.empty(size, _F32)  # of each input's block: loops over whole rows are vector code
    for n in range(len(x_NxI)):
        x, values = x_NxI[n], values_NxI[n]
        scale = _F32(_amax(x) / _F32(_E2M1_MAX * _E4M3_MAX))
        scale_Nx1[n, 0] = scale
        for i in range(size):
            values[i] = _F32(x[i] / scale)
        for start in range(0, size, _NVFP4_BLOCK):
            largest = _F32(_LEAST_AMAX).view(np.uint32)
            for i in range(start, start + _NVFP4_BLOCK):
                largest = max(largest, _U32(_F32(values[i]).view(np.uint32) & _MAGNITUDE))
            amax = _U32(largest).view(np.float32)
            scales[start : start + _NVFP4_BLOCK] = round_e4m3(_F32(amax / _E2M1_MAX))
        for i in range(size):
            divisor = _F32(1) if scales[i] == 0 else scales[i]
            values[i] = _F32(round_e2m1(_F32(values[i] / divisor)) * scales[i])


@_inline
def _amax(x: np.ndarray) -> np.float32:
    # as whole numbers, magnitudes have the same order and a maximum that becomes vector code
    largest = _F32(_LEAST_AMAX).view(np.uint32)
    for i in range(len(x)):
        largest = max(largest, _U32(_F32(x[i]).view(np.uint32) & _MAGNITUDE))
    return _U32(largest).view(np.float32)


@_compiled
def finish(
    sums_PxMxO: np.ndarray,
    bounds: np.ndarray,
    scale_ExPxO: np.ndarray,
    token_scale_MxG: np.ndarray,
    groups_P: np.ndarray,
    exact: bool,
    out_MxO: np.ndarray,
) -> None:
    """The partial sums of a product, scaled and added in order, rounded.

    Rows bounds[e] to bounds[e + 1] are of expert e; part p lies in group groups_P[p] of the
    inputs. Scales without an element are 1.
    """
    for e in range(len(bounds) - 1):
        for m in range(bounds[e], bounds[e + 1]):
            out = out_MxO[m]
            out[:] = 0
            for p in range(len(sums_PxMxO)):
                sums = sums_PxMxO[p, m]
                token_scale = token_scale_MxG[m, groups_P[p]] if token_scale_MxG.size else _F32(1)
                if scale_ExPxO.size:
                    scale = scale_ExPxO[e, p]
                    for i in range(len(out)):
                        out[i] += _F32(_F32(sums[i] * scale[i]) * token_scale)
                else:
                    for i in range(len(out)):
                        out[i] += sums[i]
            for i in range(len(out)):
                out[i] = round_bf16(out[i], exact)


@_inline
def _loaded(stored, kind: int) -> np.float32:
    """An element of the KV cache as a number; `kind` is the size of one in bytes."""
    if kind == 4:
        return _F32(stored)
    bits = _U32(stored)
    if kind == 2:
        return _U32(bits << _U32(16)).view(np.float32)
    size = bits & _U32(0x7F)
    normal = _U32((size << _U32(20)) + _U32(120 << 23))
    subnormal = _F32(_F32(size) * _F32(2.0**-9)).view(np.uint32)
    found = subnormal if size < _U32(8) else normal if size < _U32(0x7F) else _U32(0x7FC00000)
    return _U32(found | ((bits & _U32(0x80)) << _U32(24))).view(np.float32)


@_inline
def _load(stored: np.ndarray, kind: int, out: np.ndarray) -> None:
    for i in range(len(stored)):
        out[i] = _loaded(stored[i], kind)


@_compiled
def load(stored_2xKxCxh: np.ndarray, kind: int, out_2xKxCxh: np.ndarray) -> None:
    """A part of the KV cache as numbers."""
    for i in range(2):
        for k in range(stored_2xKxCxh.shape[1]):
            for c in range(stored_2xKxCxh.shape[2]):
                _load(stored_2xKxCxh[i, k, c], kind, out_2xKxCxh[i, k, c])


@_inline
def _store(x: np.ndarray, kind: int, out: np.ndarray) -> None:
    """As elements of the KV cache: float32 (4), the upper half of one (2), E4M3 (1), or NVFP4 (0),
    whose values bfloat16 holds exactly: E2M1 times the E4M3 scale of their block, and no other."""
    if kind == 0:
        for start in range(0, len(x), _NVFP4_BLOCK):
            block = x[start : start + _NVFP4_BLOCK]
            scale = round_e4m3(_F32(_amax(block) / _E2M1_MAX))
            divisor = _F32(1) if scale == 0 else scale
            for i in range(len(block)):
                value = _F32(round_e2m1(_F32(block[i] / divisor)) * scale)
                out[start + i] = _U32(value.view(np.uint32) >> _U32(16))
        return
    for i in range(len(x)):
        if kind == 4:
            out[i] = x[i]
        elif kind == 2:
            out[i] = _U32(_F32(round_bf16(x[i], False)).view(np.uint32) >> _U32(16))
        else:
            out[i] = code_e4m3(x[i])


@_compiled
def rotate_and_store(  # noqa: PLR0913 (fused: each array is read or written once)
    qkv_NxAxh: np.ndarray,
    norm_Axh: np.ndarray,
    rotation_2xNxh: np.ndarray,
    eps: np.float32,
    exact: bool,
    places_2xN: np.ndarray,
    kind: int,
    cache: np.ndarray,
    q_NxHxh: np.ndarray,
) -> None:
    """Norms and rotates queries and keys; writes keys and values to the cache, queries to `q`.

    qkv: the heads of queries, then keys, then values. norm: without an element where a model has
    no such norm. rotation: cosines and sines, of half the
    head size. places: slot and position of each token. Queries come divided by sqrt(h).
    """
    num_heads, size = q_NxHxh.shape[1:]
    num_slots, num_kv_heads = len(cache) // 2, cache.shape[1]
    half = size // 2
    q_scale = _F32(1 / np.sqrt(size))
    x, rotated = np.empty(size, _F32), np.empty(size, _F32)
    for n in range(len(qkv_NxAxh)):
        cos, sin = rotation_2xNxh[0, n], rotation_2xNxh[1, n]
        slot, position = places_2xN[0, n], places_2xN[1, n]
        for a in range(num_heads + num_kv_heads):
            head = qkv_NxAxh[n, a]
            if norm_Axh.size:
                weight = norm_Axh[a]
                scale = _F32(_F32(1) / np.sqrt(_F32(_F32(_dot(head, head) / _F32(size)) + eps)))
                for i in range(size):
                    x[i] = round_bf16(_F32(_F32(head[i] * scale) * weight[i]), exact)
            else:
                x[:] = head
            for i in range(half):
                low, high = x[i], x[i + half]
                rotated[i] = round_bf16(_F32(_F32(low * cos[i]) - _F32(high * sin[i])), exact)
                rotated[i + half] = round_bf16(
                    _F32(_F32(high * cos[i]) + _F32(low * sin[i])), exact
                )
            if a < num_heads:
                for i in range(size):
                    q_NxHxh[n, a, i] = _F32(rotated[i] * q_scale)
            else:
                _store(rotated, kind, cache[slot, a - num_heads, position])
        for k in range(num_kv_heads):
            value = qkv_NxAxh[n, num_heads + num_kv_heads + k]
            _store(value, kind, cache[num_slots + slot, k, position])


@_inline
def _softmax(x: np.ndarray, exact: bool) -> None:
    """In place, rounded."""
    largest = _max(x)
    for i in range(len(x)):
        x[i] = exp(_F32(x[i] - largest))
    factor = _F32(_F32(1) / _sum(x))
    for i in range(len(x)):
        x[i] = round_bf16(_F32(x[i] * factor), exact)


@_compiled
def causal_softmax(scores_MxTxC: np.ndarray, start: int, exact: bool) -> None:
    """In place, rounded: token t of each row looks at positions up to start + t, 0 beyond."""
    for m in range(len(scores_MxTxC)):
        for t in range(scores_MxTxC.shape[1]):
            _softmax(scores_MxTxC[m, t, : start + t + 1], exact)
            scores_MxTxC[m, t, start + t + 1 :] = 0


@_sums
def _scores(q: np.ndarray, keys_Cxh: np.ndarray, out_C: np.ndarray) -> None:
    for c in range(len(out_C)):
        out_C[c] = _dot(q, keys_Cxh[c])


@_sums
def _mix(weights_C: np.ndarray, values_Cxh: np.ndarray, out: np.ndarray) -> None:
    length, size = values_Cxh.shape
    whole = length - length % 8
    out[:] = 0
    for c in range(0, whole, 8):  # each result is read and written once for eight positions
        w, v = weights_C[c : c + 8], values_Cxh[c : c + 8]
        for i in range(size):
            out[i] += (
                ((w[0] * v[0, i] + w[1] * v[1, i]) + (w[2] * v[2, i] + w[3] * v[3, i]))
                + ((w[4] * v[4, i] + w[5] * v[5, i]) + (w[6] * v[6, i] + w[7] * v[7, i]))
            )  # fmt: skip
    for c in range(whole, length):
        for i in range(size):
            out[i] += weights_C[c] * values_Cxh[c, i]


@_compiled
def attend(
    q_NxHxh: np.ndarray,
    cache: np.ndarray,
    places_2xN: np.ndarray,
    kind: int,
    exact: bool,
    out_NxHxh: np.ndarray,
) -> None:
    """Single tokens, each over the cache of its own slot up to its own position; rounded.

    places: slot and position of each token; there may be more, of tokens that follow.
    """
    num_heads, size = q_NxHxh.shape[1:]
    num_slots, num_kv_heads = len(cache) // 2, cache.shape[1]
    per_kv_head = num_heads // num_kv_heads
    longest = places_2xN[1, : len(q_NxHxh)].max() + 1
    loaded, weights = np.empty(longest * size, _F32), np.empty((per_kv_head, longest), _F32)
    for n in range(len(q_NxHxh)):
        slot, length = places_2xN[0, n], places_2xN[1, n] + 1
        here = loaded[: length * size]
        rows = here.reshape(length, size)
        for k in range(num_kv_heads):
            _load(cache[slot, k].reshape(-1)[: length * size], kind, here)
            for h in range(per_kv_head):
                _scores(q_NxHxh[n, k * per_kv_head + h], rows, weights[h, :length])
                _softmax(weights[h, :length], exact)
            _load(cache[num_slots + slot, k].reshape(-1)[: length * size], kind, here)
            for h in range(per_kv_head):
                out = out_NxHxh[n, k * per_kv_head + h]
                _mix(weights[h, :length], rows, out)
                for i in range(size):
                    out[i] = round_bf16(out[i], exact)


@_compiled
def route(
    logits_NxE: np.ndarray,
    normalizes: bool,
    gates_NxR: np.ndarray,
    places_NxR: np.ndarray,
    rows_M: np.ndarray,
    bounds: np.ndarray,
) -> None:
    """Picks each token's experts and sorts the pairs of token and expert by expert.

    rows: int64 [N * R], the token of each pair; expert e has pairs bounds[e] to bounds[e + 1].
    gates and places: weight and pair of each of a token's experts, in the order of experts.
    """
    num, num_experts = logits_NxE.shape
    per_token = gates_NxR.shape[1]
    chosen = np.zeros((num, num_experts), np.bool_)
    probs = np.empty((num, num_experts), _F32)
    bounds[:] = 0
    for n in range(num):
        probs[n] = logits_NxE[n]
        _softmax(probs[n], True)
        for _ in range(per_token):
            best = -1
            for e in range(num_experts):
                if not chosen[n, e] and (best < 0 or probs[n, e] > probs[n, best]):
                    best = e
            chosen[n, best] = True
            bounds[best + 1] += 1
    for e in range(num_experts):
        bounds[e + 1] += bounds[e]
    filled = bounds[:-1].copy()
    for n in range(num):
        rank, total = 0, _F32(0)
        for e in range(num_experts):
            if chosen[n, e]:
                gates_NxR[n, rank], places_NxR[n, rank] = probs[n, e], filled[e]
                rows_M[filled[e]] = n
                filled[e] += 1
                rank += 1
                total += probs[n, e]
        if normalizes:
            for r in range(per_token):
                gates_NxR[n, r] /= total


@_compiled
def swiglu(gate_up_MxO: np.ndarray, exact: bool, out_MxF: np.ndarray) -> None:
    """silu(gate) * up of rows that hold gate, then up; rounded."""
    size = out_MxF.shape[1]
    for m in range(len(out_MxF)):
        gate, up, out = gate_up_MxO[m, :size], gate_up_MxO[m, size:], out_MxF[m]
        for i in range(size):
            negative = _clamped(_F32(-gate[i]), -_LEAST_EXPONENT)
            silu = _F32(gate[i] / _F32(_F32(1) + exp(negative)))
            out[i] = round_bf16(_F32(silu * up[i]), exact)


@_compiled
def combine(
    y_MxD: np.ndarray,
    gates_NxR: np.ndarray,
    places_NxR: np.ndarray,
    exact: bool,
    out_NxD: np.ndarray,
) -> None:
    """What a token's experts made, times their gates, each rounded; their sum, rounded."""
    for n in range(len(out_NxD)):
        out = out_NxD[n]
        out[:] = 0
        for r in range(gates_NxR.shape[1]):
            y, gate = y_MxD[places_NxR[n, r]], gates_NxR[n, r]
            for i in range(len(out)):
                out[i] += round_bf16(_F32(y[i] * gate), exact)
        for i in range(len(out)):
            out[i] = round_bf16(out[i], exact)
