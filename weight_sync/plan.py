"""What a conversion does with each tensor, decided from the config and the tensors' headers alone.

Owns which modules each format quantizes, the names and shapes of the result, and its config.json.
Pure: no file is opened here. Names and shapes alone do not tell how fused experts lie, so of those
the config decides: its model_type must be one whose order is known, and its sizes must fit.

Quantized are, in layers `model[.language_model].layers.N`:
    of a mixture of experts
        nvfp4                          the experts' projections
        fp8-block, fp8-channel, mxfp8  those, the attention projections, the MLPs of dense layers
    of a model without experts
        every format                   the attention projections and the MLPs
Never the embedding, lm_head, routers, norms, shared experts, linear attention, multi-token
prediction or vision. In nvfp4 gate and up of an expert (or MLP) share one global scale, and so do
q, k and v of a layer, because engines keep one scale of what they fuse.

A quantized checkpoint is decoded instead: every matrix that has scales becomes one of the dtype
asked for under its plain name, whatever module it is; scales of activations and of the KV cache
are left out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync import layouts
from weight_sync.layouts import Layout, Storage
from weight_sync.modules import (
    DENSE,
    EXPERT,
    FUSED_EXPERTS,
    FUSED_MODEL_TYPES,
    fusion,
    has_experts,
    is_unknown_expert,
    linear_module,
    scale_group,
)
from weight_sync.safetensors_file import TensorHeader, TensorSpec

_FLOATS = ("BF16", "F16", "F32")
CONFIG_DTYPES = {"BF16": "bfloat16", "F32": "float32"}  # of a decoded checkpoint


class Kind(enum.StrEnum):
    COPY = "copy"
    CAST = "cast"
    ENCODE = "encode"
    DECODE = "decode"
    DROP = "drop"


@dataclass(frozen=True, kw_only=True)
class Region:
    """A tensor, or rows [first, last) of one expert's matrix inside a fused tensor [E, N, K]."""

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Action:
    """What is made of one region, of several that share a global scale, or of a matrix's parts.

    `outputs` holds for each matrix that results its tensors, in the order of `layouts.parts`.
    """

    kind: Kind
    sources: tuple[Region, ...]
    outputs: tuple[tuple[TensorSpec, ...], ...]
    storage: Storage | None = None  # to encode into, or to decode from


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    format: WeightFormat
    recipe: str  # of the encoder; "" where the format has only one
    actions: tuple[Action, ...]
    config: dict[str, Any]  # the new config.json

    @property
    def outputs(self) -> list[TensorSpec]:
        return [spec for action in self.actions for specs in action.outputs for spec in specs]


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A quantizable matrix [N, K] under the name of the module it becomes."""

    module: str
    source: Region
    shape: tuple[int, int]
    file: str


def plan_conversion(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorHeader],
    *,
    format: WeightFormat,
    recipe: str | None = None,
    layout: Layout | None = None,
    ignore: Sequence[str] = (),
) -> ConversionPlan:
    """Decides the conversion of a BF16 (or float16, float32) checkpoint.

    `ignore` holds globs of module names (without `.weight`) that stay as they are.

    Raises:
        BadInputError: an already quantized source, a shape the format cannot hold, experts whose
            names or order are not known, nothing to quantize, a layout the format does not have, or
            an `ignore` that splits a matrix which engines fuse.
    """
    if "quantization_config" in config:
        given = config["quantization_config"]
        method = given.get("quant_method") if isinstance(given, dict) else repr(given)
        raise BadInputError(
            "source checkpoint", expected="no quantization_config", found=f"quant_method {method}"
        )
    if format == WeightFormat.BF16:
        layouts.choose_recipe(format, recipe)
        return ConversionPlan(
            format=format,
            recipe="",
            actions=_sorted([_keep(name, header) for name, header in tensors.items()], tensors),
            config=_with_dtype(config, "bfloat16"),
        )
    storage = layouts.choose_storage(format, recipe, layout)
    matrices = _matrices(config, tensors, format)
    ignored = {m.module for m in matrices if any(fnmatchcase(m.module, glob) for glob in ignore)}
    _check_fusions([m.module for m in matrices], ignored)
    chosen = [m for m in matrices if m.module not in ignored]
    if not chosen:
        raise BadInputError(
            f"source checkpoint for {format}",
            expected="tensors model.layers.N.mlp.experts.M.{gate,up,down}_proj.weight, or "
            "attention and MLP projections",
            found=f"none of that kind among {len(tensors)}",
        )
    touched = {m.source.tensor for m in chosen}
    kept = [_keep(name, header) for name, header in tensors.items() if name not in touched]
    modules = _unquantized_modules(tensors, touched)
    return ConversionPlan(
        format=format,
        recipe=storage.recipe,
        actions=_sorted([*kept, *_encode_actions(chosen, storage)], tensors),
        config={**config, "quantization_config": layouts.quantization_config(storage, modules)},
    )


def plan_decoding(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorHeader],
    *,
    stored: Storage,
    dtype: str = "BF16",
) -> ConversionPlan:
    """Decides the conversion of a quantized checkpoint into a plain one; `dtype` BF16 or F32.

    Raises:
        BadInputError: a matrix without its scales, scales without their matrix, or shapes that do
            not fit together.
    """
    modules = {
        name.removesuffix(f".{stored.scale_name}")
        for name in tensors
        if name.endswith(f".{stored.scale_name}")
    }
    if not modules:
        raise BadInputError(
            f"source checkpoint in {stored.format}",
            expected=f"tensors named {stored.scale_name}",
            found=f"none among {len(tensors)}",
        )
    actions = [_decode_action(module, tensors, stored, dtype) for module in modules]
    touched = {region.tensor for action in actions for region in action.sources}
    for name, header in tensors.items():
        if name in touched:
            continue
        if name.rpartition(".")[2] in layouts.RUNTIME_SCALES:
            actions.append(Action(kind=Kind.DROP, sources=(Region(tensor=name),), outputs=()))
        elif header.dtype in ("U8", "F8_E4M3", "F8_E8M0"):
            raise BadInputError(
                f"tensor {name}",
                expected=f"{stored.scale_name} and what else {stored.format} has beside it",
                found=f"{header.dtype} alone",
            )
        else:
            actions.append(_keep(name, header, dtype))
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return ConversionPlan(
        format=WeightFormat.BF16,
        recipe="",
        actions=_sorted(actions, tensors),
        config=_with_dtype(plain, CONFIG_DTYPES[dtype]),
    )


def unmatched(
    ignore: Sequence[str], plan: ConversionPlan, tensors: Mapping[str, TensorHeader]
) -> list[str]:
    """The globs of `ignore` that fit no module of the checkpoint that was planned."""
    modules = {name.removesuffix(".weight") for name in tensors}
    if plan.format != WeightFormat.BF16:
        modules |= {matrix.module for matrix in _matrices(plan.config, tensors, plan.format)}
    return [glob for glob in ignore if not any(fnmatchcase(name, glob) for name in modules)]


def _sorted(actions: list[Action], tensors: Mapping[str, TensorHeader]) -> tuple[Action, ...]:
    """Source order, so that a disk is read forwards."""

    def position(action: Action) -> tuple[str, int, int]:
        first = action.sources[0]
        return tensors[first.tensor].file, tensors[first.tensor].start, first.expert or 0

    return tuple(sorted(actions, key=position))


def _keep(name: str, header: TensorHeader, dtype: str = "BF16") -> Action:
    """Float matrices become `dtype`; in BF16 vectors (norms, biases) keep what they came with."""
    is_float = header.dtype in _FLOATS
    casts = is_float and header.dtype != dtype and (len(header.shape) > 1 or dtype == "F32")
    spec = TensorSpec(
        name=name,
        dtype=dtype if casts else header.dtype,
        shape=header.shape,
        file=header.file,
    )
    kind = Kind.CAST if casts else Kind.COPY
    return Action(kind=kind, sources=(Region(tensor=name),), outputs=((spec,),))


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config with its dtype replaced, and that of its parts (text_config, vision_config)."""
    changed: dict[str, Any] = {
        key: _with_dtype(value, dtype)
        for key, value in config.items()
        if key.endswith("_config")
        and isinstance(value, dict)
        and {"dtype", "torch_dtype"} & set(value)
    }
    changed["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    return {**config, **changed}


def sizes(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """A mixture's model width D and expert width F, as its config has them."""
    text = _text_config(config)
    found = (text.get("hidden_size"), text.get("moe_intermediate_size"))
    D, F = (size if type(size) is int else None for size in found)
    return D, F


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the language model, where the config has parts."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _matrices(
    config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], format: WeightFormat
) -> list[_Matrix]:
    _check_experts(config, tensors)
    takes_dense = format != WeightFormat.NVFP4 or not has_experts(list(tensors))
    found = []
    for name, header in tensors.items():
        if fused := FUSED_EXPERTS.fullmatch(name):
            _check_fused(config, fused[2], name, header)
            matrices = _split_fused(fused[1], fused[2], name, header)
        elif match := EXPERT.fullmatch(name) or (DENSE.fullmatch(name) if takes_dense else None):
            if len(header.shape) != 2:
                raise BadInputError(f"tensor {name}", expected="a matrix", found=header.shape)
            N, K = header.shape
            source = Region(tensor=name)
            matrices = [_Matrix(module=match[1], source=source, shape=(N, K), file=header.file)]
        else:
            continue
        if header.dtype not in _FLOATS:
            raise BadInputError(
                f"tensor {name}", expected="BF16, F16 or F32 weights", found=header.dtype
            )
        if 0 in header.shape:
            raise BadInputError(f"tensor {name}", expected="weights", found=header.shape)
        found += matrices
    _check_matrices(found, format)
    return found


def _check_matrices(matrices: Sequence[_Matrix], format: WeightFormat) -> None:
    multiple = layouts.column_multiple(format)
    source_of: dict[str, str] = {}
    for matrix in matrices:
        name = matrix.source.tensor
        if (other := source_of.setdefault(matrix.module, name)) != name:
            raise BadInputError(
                "source checkpoint",
                expected=f"{matrix.module} once",
                found=f"it in {other} and in {name}",
            )
        if matrix.shape[1] % multiple:
            raise BadInputError(
                f"tensor {matrix.module}.weight in {format}",
                expected=f"columns in multiples of {multiple}",
                found=matrix.shape[1],
            )


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _check_experts(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> None:
    """A mixture whose experts were not found would count as a model without any."""
    expected = (
        "experts named model.layers.N.mlp.experts.M.{gate,up,down}_proj.weight, "
        "block_sparse_moe.experts.M.w{1,2,3}.weight, or fused"
    )
    if unknown := next(filter(is_unknown_expert, tensors), None):
        raise BadInputError("source checkpoint", expected=expected, found=unknown)
    text = _text_config(config)
    for key in _NUM_EXPERTS:
        num = text.get(key)
        if type(num) is int and num > 1 and not has_experts(list(tensors)):
            raise BadInputError("source checkpoint", expected=expected, found=f"none of {num}")


def _check_fused(config: Mapping[str, Any], part: str, name: str, header: TensorHeader) -> None:
    """Refuses fused experts unless they lie as [E, 2F, D], gate first, and [E, D, F]."""
    if (model_type := config.get("model_type")) not in FUSED_MODEL_TYPES:
        raise BadInputError(
            f"tensor {name}",
            expected=f"fused experts of a model_type whose order of gate and up is known "
            f"({', '.join(FUSED_MODEL_TYPES)})",
            found=f"model_type {model_type}",
        )
    D, F = sizes(config)
    if D is None or F is None:
        raise BadInputError(
            "config.json",
            expected=f"hidden_size and moe_intermediate_size, to cut {name}",
            found=f"{D} and {F}",
        )
    letters, shape = ("2F, D", (2 * F, D)) if part == "gate_up_proj" else ("D, F", (D, F))
    if len(header.shape) != 3 or header.shape[1:] != shape:
        raise BadInputError(
            f"tensor {name}",
            expected=f"[E, {letters}], of the config's sizes [E, {shape[0]}, {shape[1]}]",
            found=header.shape,
        )


def _split_fused(prefix: str, part: str, name: str, header: TensorHeader) -> list[_Matrix]:
    """gate_up_proj [E, 2F, D] (gate first) and down_proj [E, D, F] as per-expert matrices."""
    E, N, K = header.shape
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    N //= len(names)
    return [
        _Matrix(
            module=f"{prefix}.{expert}.{projection}",
            source=Region(tensor=name, expert=expert, rows=(i * N, (i + 1) * N)),
            shape=(N, K),
            file=header.file,
        )
        for expert in range(E)
        for i, projection in enumerate(names)
    ]


def _check_fusions(modules: Sequence[str], ignored: set[str]) -> None:
    kept = {fusion(module): module for module in ignored}
    for module in modules:
        if module not in ignored and (other := kept.get(fusion(module))):
            raise BadInputError(
                "ignored modules",
                expected=f"all parts of {fusion(module)} or none, as engines fuse them",
                found=f"{other} without {module}",
            )


def _encode_actions(matrices: Sequence[_Matrix], storage: Storage) -> list[Action]:
    """One action per matrix, in nvfp4 one per global scale."""
    shares = storage.format == WeightFormat.NVFP4
    sharing: dict[tuple[str, int], list[_Matrix]] = {}
    for matrix in matrices:
        key = scale_group(matrix.module) if shares else (matrix.module, 1)
        sharing.setdefault(key, []).append(matrix)
    for (name, size), group in sharing.items():
        if len(group) != size:
            raise BadInputError(
                "source checkpoint",
                expected=f"all {size} parts of {name}",
                found=" and ".join(matrix.module for matrix in group),
            )
    return [
        Action(
            kind=Kind.ENCODE,
            sources=tuple(matrix.source for matrix in group),
            outputs=tuple(_parts(matrix, storage) for matrix in group),
            storage=storage,
        )
        for group in sharing.values()
    ]


def _parts(matrix: _Matrix, storage: Storage) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=f"{matrix.module}.{name}", dtype=dtype, shape=shape, file=matrix.file)
        for name, dtype, shape in layouts.parts(storage, *matrix.shape)
    )


# Other writers' dtypes of a scale: the same numbers, or fewer of their bits.
_ALSO = {"F32": ("F32", "BF16", "F16"), "U8": ("U8", "F8_E8M0")}


def _decode_action(
    module: str, tensors: Mapping[str, TensorHeader], stored: Storage, dtype: str
) -> Action:
    """One matrix from its parts, whose shapes must be those that the layout gives it."""

    def header_of(name: str) -> TensorHeader:
        if (header := tensors.get(f"{module}.{name}")) is None:
            found = f"only {module}.{stored.scale_name}"
            raise BadInputError("source checkpoint", expected=f"{module}.{name}", found=found)
        return header

    first = header_of(layouts.parts(stored, 0, 0)[0].name)
    if len(first.shape) != 2:
        raise BadInputError(f"tensor {module}", expected="a matrix", found=first.shape)
    N, K = first.shape[0], first.shape[1] * (2 if stored.format == WeightFormat.NVFP4 else 1)
    needed = [p for p in layouts.parts(stored, N, K) if p.name not in layouts.RUNTIME_SCALES]
    for part in needed:
        header = header_of(part.name)
        fits = header.shape == part.shape or {header.shape, part.shape} == {(), (1,)}
        multiple = layouts.column_multiple(stored.format)
        if header.dtype not in _ALSO.get(part.dtype, (part.dtype,)) or not fits or K % multiple:
            raise BadInputError(
                f"tensor {module}.{part.name}",
                expected=f"{part.dtype} {part.shape} of a matrix {(N, K)}",
                found=f"{header.dtype} {header.shape}",
            )
    spec = TensorSpec(name=f"{module}.weight", dtype=dtype, shape=(N, K), file=first.file)
    return Action(
        kind=Kind.DECODE,
        sources=tuple(Region(tensor=f"{module}.{part.name}") for part in needed),
        outputs=((spec,),),
        storage=stored,
    )


def _unquantized_modules(tensors: Mapping[str, TensorHeader], touched: set[str]) -> list[str]:
    """Full names of the linear modules that stay, and of what engines fuse them into."""
    modules = {"lm_head"}
    for name, header in tensors.items():
        module = linear_module(name, len(header.shape))
        if name not in touched and module is not None:
            modules |= {module, fusion(module)}
    return sorted(modules)
