"""Holds a converted checkpoint against its source.

Owns the comparison and the measures of error; decoding and the error that a format may make at most
are `coding`'s. Copied, cast and decoded tensors must be equal to what they are made of; a
quantized element may be off by half a step of its format at its magnitude. Since the plan says what
is held against what, the one thing that it could get wrong unnoticed is asked of the result itself:
whether the projections of each expert are [F, D], [F, D] and [D, F].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync import coding
from weight_sync.convert import make, read_bits, release, source_bytes
from weight_sync.formats import bf16
from weight_sync.modules import DOWN_PARTS, EXPERT
from weight_sync.plan import Action, ConversionPlan, Kind, sizes
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
    """For each action, its errors (none where nothing is quantized) and the source bytes compared.

    Raises:
        BadInputError: a tensor is missing, of another dtype or shape, a copy is not equal, or an
            expert's projections do not fit together.
    """
    for action in plan.actions:
        specs = [spec for matrix in action.outputs for spec in matrix]
        for spec in specs:
            _check_header(spec, converted)
        if action.kind == Kind.ENCODE:
            errors = list(_errors(action, source, converted))
        else:
            _check_equal(action, source, converted)
            errors = []
        release(action, source)
        for spec in specs:
            converted.release(spec.name)
        yield errors, source_bytes(action, source)
    _check_experts(plan, converted)


def _check_experts(plan: ConversionPlan, converted: Checkpoint) -> None:
    """Each expert's projections have the same D and F, which are the config's if it has them."""
    known = sizes(plan.config)
    columns = 2 if plan.format == WeightFormat.NVFP4 else 1  # in a stored byte
    for action in plan.actions:
        for specs in action.outputs if action.kind == Kind.ENCODE else ():
            name = specs[0].name
            module, _, part = name.rpartition(".")[0].rpartition(".")
            if not EXPERT.fullmatch(f"{module}.{part}.weight"):
                continue
            N, K = converted.tensors[name].shape
            found = (N, K * columns) if part in DOWN_PARTS else (K * columns, N)
            known = tuple(size or other for size, other in zip(known, found, strict=True))
            if found != known:
                raise BadInputError(
                    f"tensor {name}",
                    expected=f"a projection between widths {known[0]} and {known[1]}",
                    found=f"{found[0]} and {found[1]}",
                )


def _check_header(spec: TensorSpec, converted: Checkpoint) -> None:
    header = converted.tensors.get(spec.name)
    found = (header.dtype, header.shape) if header else None
    if found != (spec.dtype, spec.shape):
        raise BadInputError(
            f"tensor {spec.name}", expected=f"{spec.dtype} {spec.shape}", found=found
        )


def _check_equal(action: Action, source: Checkpoint, converted: Checkpoint) -> None:
    for specs, (array,) in zip(action.outputs, make(action, source), strict=True):
        stored = converted.bytes_of(specs[0].name)
        expected = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not np.array_equal(stored, expected):
            where = int(np.argmax(stored != expected))
            raise BadInputError(
                f"tensor {specs[0].name}",
                expected="the bytes of the source",
                found=f"another byte at {where}",
            )


def _errors(action: Action, source: Checkpoint, converted: Checkpoint) -> Iterator[TensorError]:
    assert action.storage is not None
    for region, specs in zip(action.sources, action.outputs, strict=True):
        x = bf16.widen(read_bits(region, source))
        arrays = [converted.array_of(spec.name) for spec in specs]
        off = np.abs(coding.decode(action.storage, arrays) - x)
        bound = coding.error_bound(action.storage, arrays, x) * _SLACK
        np.maximum(bound, np.finfo(np.float32).smallest_subnormal, out=bound)
        norm, rms = _rms(x), _rms(off)
        yield TensorError(
            name=specs[0].name,
            relative_rms=rms / norm if norm else 0.0,
            share_of_bound=float(np.max(off / bound, initial=0)),
        )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0
