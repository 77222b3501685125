"""Holds a converted checkpoint against its source.

Owns the decoding of stored tensors and the error that each format may make at most. Copied tensors
must be equal; a quantized element may be off by half a step of its format at its magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contracts.errors import BadInputError
from weight_sync.convert import encode, read_bits, source_bytes
from weight_sync.formats import bf16, fp8, nvfp4
from weight_sync.plan import Action, ConversionPlan, Kind
from weight_sync.safetensors_file import Checkpoint, TensorSpec

_SLACK = np.float32(1 + 1e-5)  # of the float32 arithmetic on both sides


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """What quantization cost one matrix."""

    name: str
    relative_rms: float  # RMS of the error over RMS of the weights
    share_of_bound: float  # the largest error over what the format allows there; at most 1


def compare(
    plan: ConversionPlan, source: Checkpoint, converted: Checkpoint
) -> Iterator[tuple[list[TensorError], int]]:
    """For each action, its errors (none where it copies) and the source bytes compared.

    Raises:
        BadInputError: a tensor is missing, of another dtype or shape, or a copy is not equal.
    """
    for action in plan.actions:
        for specs in action.outputs:
            for spec in specs:
                _check_header(spec, converted)
        if action.kind in (Kind.COPY, Kind.ROUND):
            _check_equal(action, source, converted)
            yield [], source_bytes(action, source)
            continue
        errors = []
        for region, specs in zip(action.sources, action.outputs, strict=True):
            x = bf16.widen(read_bits(region, source))
            if action.kind == Kind.NVFP4:
                decoded, bound = _decode_nvfp4(x, specs, converted)
            else:
                decoded, bound = _decode_fp8(x, specs, converted)
            errors.append(_error(specs[0].name, x, decoded, bound))
        yield errors, source_bytes(action, source)


def _check_header(spec: TensorSpec, converted: Checkpoint) -> None:
    header = converted.tensors.get(spec.name)
    found = (header.dtype, header.shape) if header else None
    if found != (spec.dtype, spec.shape):
        raise BadInputError(
            f"tensor {spec.name}", expected=f"{spec.dtype} {spec.shape}", found=found
        )


def _check_equal(action: Action, source: Checkpoint, converted: Checkpoint) -> None:
    for specs, (array,) in zip(action.outputs, encode(action, source), strict=True):
        stored = converted.bytes_of(specs[0].name)
        expected = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not np.array_equal(stored, expected):
            where = int(np.argmax(stored != expected))
            raise BadInputError(
                f"tensor {specs[0].name}",
                expected="the bytes of the source",
                found=f"another byte at {where}",
            )


def _decode_nvfp4(
    x: np.ndarray, specs: tuple[TensorSpec, ...], converted: Checkpoint
) -> tuple[np.ndarray, np.ndarray]:
    """The decoded matrix and its bound: a unit of the block, or what lies beyond the largest."""
    packed, block_scale, scale_2, _ = (converted.bytes_of(spec.name) for spec in specs)
    tensor = nvfp4.NvFp4(
        packed.reshape(specs[0].shape),
        block_scale.reshape(specs[1].shape),
        scale_2.view(np.float32)[0],
    )
    blocks = np.abs(x).reshape(-1, nvfp4.BLOCK)
    unit = fp8.VALUES[tensor.block_scale].reshape(-1, 1) * tensor.global_scale
    bound = np.maximum(unit, blocks.max(axis=1, keepdims=True) - 6 * unit)
    return nvfp4.decode(tensor), np.broadcast_to(bound, blocks.shape).reshape(x.shape)


def _decode_fp8(
    x: np.ndarray, specs: tuple[TensorSpec, ...], converted: Checkpoint
) -> tuple[np.ndarray, np.ndarray]:
    """The decoded matrix and its bound: 2^-4 of the element, or half the smallest step."""
    codes, scale = (converted.bytes_of(spec.name) for spec in specs)
    block = fp8.Fp8Block(
        codes.reshape(specs[0].shape), scale.view(np.float32).reshape(specs[1].shape)
    )
    half_step = fp8.decode(fp8.Fp8Block(np.ones_like(block.codes), block.scale_inv)) / 2
    return fp8.decode(block), np.maximum(np.abs(x) * np.float32(2.0**-4), half_step)


def _error(name: str, x: np.ndarray, decoded: np.ndarray, bound: np.ndarray) -> TensorError:
    off = np.abs(decoded - x)
    norm = np.sqrt(np.mean(np.square(x, dtype=np.float64)))
    rms = np.sqrt(np.mean(np.square(off, dtype=np.float64)))
    allowed = np.maximum(bound * _SLACK, np.finfo(np.float32).smallest_subnormal)
    return TensorError(
        name=name,
        relative_rms=float(rms / norm) if norm else 0.0,
        share_of_bound=float(np.max(off / allowed, initial=0)),
    )
