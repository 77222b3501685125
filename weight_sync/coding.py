"""Matrices to the arrays of a storage and back, and how far off they may be.

Owns the order and the dtypes of those arrays, which are those of `layouts.parts`, and nothing of
how a format rounds: that is each format's.

Arrays: uint8 for codes, packed nibbles and E8M0 or E4M3 scales; float32 for the other scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync.formats import bf16, fp8, mxfp8, nvfp4
from weight_sync.layouts import Layout, Storage

_ONE = np.uint8(0x38)  # E4M3


def encode(
    storage: Storage, matrices: Sequence[np.ndarray], names: Sequence[str]
) -> list[tuple[np.ndarray, ...]]:
    """BF16 bits (uint16 [N, K] each) to the arrays of each; all share a global scale if there is.

    Raises:
        BadInputError: NaN or infinity, weights too small for the layout, or so large that their
            codes decode to infinity; with the tensor named.
    """
    if storage.format == WeightFormat.NVFP4:
        results = _encode_nvfp4(storage, matrices, names)
    else:
        results = _encode_eight_bits(storage, matrices, names)
    for arrays, name in zip(results, names, strict=True):
        _check_range(storage, arrays, name)
    return results


def _encode_eight_bits(
    storage: Storage, matrices: Sequence[np.ndarray], names: Sequence[str]
) -> list[tuple[np.ndarray, ...]]:
    results: list[tuple[np.ndarray, ...]] = []
    for bits, name in zip(matrices, names, strict=True):
        if storage.format == WeightFormat.FP8_BLOCK:
            block = fp8.encode(bits, recipe=fp8.Recipe(storage.recipe), name=name)
            results.append((block.codes, block.scale_inv))
        elif storage.format == WeightFormat.FP8_CHANNEL:
            results.append(tuple(fp8.encode_channel(bits, name=name)))
        else:
            results.append(tuple(mxfp8.encode(bits, name=name)))
    return results


def _encode_nvfp4(
    storage: Storage, matrices: Sequence[np.ndarray], names: Sequence[str]
) -> list[tuple[np.ndarray, ...]]:
    """The uncalibrated activation scale is 1, as miles has it."""
    recipe = nvfp4.Recipe(storage.recipe)
    measured = [nvfp4.measure(bits, name) for bits, name in zip(matrices, names, strict=True)]
    shared = max(each.amax for each in measured)
    results = []
    for each, name in zip(measured, names, strict=True):
        tensor = nvfp4.encode_measured(each, amax=shared, recipe=recipe)
        scale = np.array(tensor.global_scale, np.float32)
        if storage.layout == Layout.COMPRESSED_TENSORS:
            # Of zeros any scale will do; compressed-tensors itself writes 1.
            scale = _inverse(scale.reshape(1), recipe, name) if shared else np.ones(1, np.float32)
        activation_scale = np.ones(scale.shape, np.float32)
        results.append((tensor.packed, tensor.block_scale, scale, activation_scale))
    return results


def _inverse(scale: np.ndarray, recipe: nvfp4.Recipe, name: str) -> np.ndarray:
    """`weight_global_scale`, by which block scales are divided on decoding."""
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / scale
    if recipe == nvfp4.Recipe.CT:  # it was a BF16 number, whose reciprocal we were given
        inverse = bf16.widen(bf16.round_from(inverse))
    if not np.isfinite(inverse).all():
        raise BadInputError(
            f"tensor {name} in {Layout.COMPRESSED_TENSORS}",
            expected="weights whose inverse scale is a float32",
            found=f"a scale of {scale[0]}",
        )
    return inverse


def _check_range(storage: Storage, arrays: Sequence[np.ndarray], name: str) -> None:
    """A scale that was rounded up may decode the largest BF16 numbers to infinity."""
    if _bound(storage, arrays) < 2.0**127:
        return
    with np.errstate(over="ignore"):
        finite = np.isfinite(decode(storage, arrays)).all()
    if not finite:
        raise BadInputError(
            f"tensor {name} in {storage.format}",
            expected="weights whose codes decode to finite numbers",
            found="some close to the end of float32",
        )


def _bound(storage: Storage, arrays: Sequence[np.ndarray]) -> float:
    """No element of `decode(arrays)` is larger."""
    if storage.format == WeightFormat.NVFP4:
        scale = float(arrays[2].item())
        return 6 * 448 * (scale if storage.layout == Layout.MODELOPT else 1 / scale)
    largest = arrays[1].max(initial=0)
    return 448 * float(mxfp8.SCALES[largest] if storage.format == WeightFormat.MXFP8 else largest)


def decode(storage: Storage, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The arrays of a matrix to float32 [N, K], in the arithmetic of the layout's owner.

    Except that ModelOpt rounds the product of its two scales before it multiplies the elements:
    here, as in kernels, the exact product of element and block scale meets the global scale.
    """
    codes, scale = arrays[:2]
    if storage.format == WeightFormat.NVFP4:
        global_scale = np.float32(arrays[2].item())
        if storage.layout == Layout.MODELOPT:
            return nvfp4.decode(nvfp4.NvFp4(codes, scale, global_scale))
        ones = np.full(scale.shape, _ONE)
        elements = nvfp4.decode(nvfp4.NvFp4(codes, ones, np.float32(1)))
        blocks = elements.reshape(*scale.shape, nvfp4.BLOCK)
        blocks *= (fp8.VALUES[scale] / global_scale)[:, :, None]
        return elements
    if storage.format == WeightFormat.FP8_BLOCK:
        return fp8.decode(fp8.Fp8Block(codes, scale))
    if storage.format == WeightFormat.FP8_CHANNEL:
        return fp8.decode_channel(fp8.Fp8Channel(codes, scale))
    return mxfp8.decode(mxfp8.MxFp8(codes, scale))


def error_bound(storage: Storage, arrays: Sequence[np.ndarray], x_NxK: np.ndarray) -> np.ndarray:
    """How far each element of `decode(arrays)` may be from x: float32 [N, K].

    Half a step of the format at the element's magnitude, or what lies beyond the largest code.
    """
    codes, scale, *others = arrays
    if storage.format == WeightFormat.NVFP4:
        ones = np.full(codes.shape, 0x22, np.uint8)  # 1, 1
        unit = decode(storage, (ones, scale, *others))
        return np.maximum(unit, np.abs(x_NxK) - 6 * unit)
    unit = decode(storage, (np.full(codes.shape, _ONE), scale))
    beyond = np.maximum(np.abs(x_NxK) * np.float32(2.0**-4), np.abs(x_NxK) - fp8.MAX * unit)
    return np.maximum(unit * np.float32(2.0**-10), beyond)
