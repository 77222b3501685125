"""What a conversion does with each tensor, decided from names, dtypes and shapes alone.

Owns which modules each format quantizes, the names and shapes of the result, and the
`quantization_config` that SGLang and vLLM read. Pure: no file is opened here.

Quantized are, in layers `model[.language_model].layers.N`:
    nvfp4      the experts' projections; gate and up of an expert share one global scale
    fp8-block  those, the attention projections, and the MLPs of dense layers
Never the embedding, lm_head, routers, norms, shared experts, multi-token prediction or vision.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync.formats import fp8, nvfp4
from weight_sync.safetensors_file import TensorHeader, TensorSpec

_LAYER = r"model\.(?:language_model\.)?layers\.\d+"
_EXPERT = re.compile(rf"({_LAYER}\.mlp\.experts\.\d+\.(?:gate|up|down)_proj)\.weight")
_FUSED_EXPERTS = re.compile(rf"({_LAYER}\.mlp\.experts)\.(gate_up_proj|down_proj)")
_DENSE = re.compile(rf"({_LAYER}\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj))\.weight")

# Engines run these as one matrix, so its parts are quantized together or not at all.
_ENGINE_FUSIONS = (
    (re.compile(r"(.*\.self_attn)\.[qkv]_proj"), "qkv_proj"),
    (re.compile(r"(.*\.mlp)\.(?:gate|up)_proj"), "gate_up_proj"),
    (re.compile(r"(.*\.linear_attn)\.in_proj_(?:qkv|z)"), "in_proj_qkvz"),
    (re.compile(r"(.*\.linear_attn)\.in_proj_[ab]"), "in_proj_ba"),
    (re.compile(r"(.*\.mlp\.experts)\.\d+\.(?:gate|up|down)_proj"), ""),
)


class Kind(enum.StrEnum):
    COPY = "copy"
    ROUND = "round to bf16"
    NVFP4 = "nvfp4"
    FP8_BLOCK = "fp8-block"


@dataclass(frozen=True, kw_only=True)
class Region:
    """A tensor, or rows [first, last) of one expert's matrix inside a fused tensor [E, N, K]."""

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Action:
    """What is made of one region, or of several that share a global scale.

    `outputs` holds for each source the tensors made of it, in the order the encoder returns them.
    """

    kind: Kind
    sources: tuple[Region, ...]
    outputs: tuple[tuple[TensorSpec, ...], ...]
    recipe: str = ""  # of the encoder, where the format has several


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
    recipe: nvfp4.Recipe = nvfp4.Recipe.MODELOPT,
    ignore: Sequence[str] = (),
) -> ConversionPlan:
    """Decides the conversion of a BF16 (or float16, float32) checkpoint.

    `ignore` holds globs of module names (without `.weight`) that stay as they are.

    Raises:
        BadInputError: an already quantized source, a shape the format cannot hold, nothing to
            quantize, or an `ignore` that splits a matrix which engines fuse.
    """
    if "quantization_config" in config:
        given = config["quantization_config"]
        method = given.get("quant_method") if isinstance(given, dict) else repr(given)
        raise BadInputError(
            "source checkpoint", expected="no quantization_config", found=f"quant_method {method}"
        )
    matrices = [] if format == WeightFormat.BF16 else _matrices(tensors, format)
    ignored = {m.module for m in matrices if any(fnmatchcase(m.module, glob) for glob in ignore)}
    _check_fusions([m.module for m in matrices], ignored)
    chosen = [m for m in matrices if m.module not in ignored]
    if format != WeightFormat.BF16 and not chosen:
        raise BadInputError(
            f"source checkpoint for {format}",
            expected="tensors model.layers.N.mlp.experts.M.{gate,up,down}_proj.weight",
            found=f"none of that kind among {len(tensors)}",
        )
    touched = {m.source.tensor for m in chosen}
    kept = [_keep(name, header) for name, header in tensors.items() if name not in touched]
    new_config = dict(config)
    if format == WeightFormat.NVFP4:
        actions = _nvfp4_actions(chosen, recipe)
    else:
        actions = [_fp8_action(matrix) for matrix in chosen]
    if format == WeightFormat.BF16:
        new_config["torch_dtype" if "torch_dtype" in config else "dtype"] = "bfloat16"
    else:
        modules = _unquantized_modules(tensors, touched)
        new_config["quantization_config"] = _quantization_config(format, modules)
    return ConversionPlan(
        format=format,
        recipe=str(recipe) if format == WeightFormat.NVFP4 else "",
        actions=tuple(sorted([*kept, *actions], key=lambda action: _position(action, tensors))),
        config=new_config,
    )


def unmatched(
    ignore: Sequence[str], tensors: Mapping[str, TensorHeader], format: WeightFormat
) -> list[str]:
    """The globs of `ignore` that fit no module of a checkpoint that `plan_conversion` accepts."""
    modules = {name.removesuffix(".weight") for name in tensors}
    if format != WeightFormat.BF16:
        modules |= {matrix.module for matrix in _matrices(tensors, format)}
    return [glob for glob in ignore if not any(fnmatchcase(name, glob) for name in modules)]


def _position(action: Action, tensors: Mapping[str, TensorHeader]) -> tuple[str, int, int]:
    """Source order, so that a disk is read forwards."""
    header = tensors[action.sources[0].tensor]
    return header.file, header.start, action.sources[0].expert or 0


def _keep(name: str, header: TensorHeader) -> Action:
    """Float matrices become BF16; vectors (norms, biases) keep the precision they came with."""
    rounds = header.dtype in ("F32", "F16") and len(header.shape) > 1
    spec = TensorSpec(
        name=name,
        dtype="BF16" if rounds else header.dtype,
        shape=header.shape,
        file=header.file,
    )
    return Action(
        kind=Kind.ROUND if rounds else Kind.COPY,
        sources=(Region(tensor=name),),
        outputs=((spec,),),
    )


def _matrices(tensors: Mapping[str, TensorHeader], format: WeightFormat) -> list[_Matrix]:
    found = []
    for name, header in tensors.items():
        if fused := _FUSED_EXPERTS.fullmatch(name):
            matrices = _split_fused(fused[1], fused[2], name, header)
        elif match := _EXPERT.fullmatch(name) or (
            _DENSE.fullmatch(name) if format == WeightFormat.FP8_BLOCK else None
        ):
            if len(header.shape) != 2:
                raise BadInputError(f"tensor {name}", expected="a matrix", found=header.shape)
            N, K = header.shape
            source = Region(tensor=name)
            matrices = [_Matrix(module=match[1], source=source, shape=(N, K), file=header.file)]
        else:
            continue
        if header.dtype not in ("BF16", "F16", "F32"):
            raise BadInputError(
                f"tensor {name}", expected="BF16, F16 or F32 weights", found=header.dtype
            )
        found += matrices
    for matrix in found:
        if format == WeightFormat.NVFP4 and matrix.shape[1] % nvfp4.BLOCK:
            raise BadInputError(
                f"tensor {matrix.module}.weight in nvfp4",
                expected=f"columns in multiples of {nvfp4.BLOCK}",
                found=matrix.shape[1],
            )
    return found


def _split_fused(prefix: str, part: str, name: str, header: TensorHeader) -> list[_Matrix]:
    """gate_up_proj [E, 2F, D] (gate first) and down_proj [E, D, F] as per-expert matrices."""
    if len(header.shape) != 3 or (part == "gate_up_proj" and header.shape[1] % 2):
        raise BadInputError(
            f"tensor {name}", expected="[E, 2F, D] or [E, D, F]", found=header.shape
        )
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


def _fusion(module: str) -> str:
    """The name under which engines run a module, its own if it stays alone."""
    for pattern, fused in _ENGINE_FUSIONS:
        if match := pattern.fullmatch(module):
            return f"{match[1]}.{fused}" if fused else match[1]
    return module


def _check_fusions(modules: Sequence[str], ignored: set[str]) -> None:
    kept = {_fusion(module): module for module in ignored}
    for module in modules:
        if module not in ignored and (other := kept.get(_fusion(module))):
            raise BadInputError(
                "ignored modules",
                expected=f"all parts of {_fusion(module)} or none, as engines fuse them",
                found=f"{other} without {module}",
            )


def _fp8_action(matrix: _Matrix) -> Action:
    N, K = matrix.shape
    scale_shape = (-(-N // fp8.BLOCK), -(-K // fp8.BLOCK))
    outputs = tuple(
        TensorSpec(name=f"{matrix.module}.{part}", dtype=dtype, shape=shape, file=matrix.file)
        for part, dtype, shape in (
            ("weight", "F8_E4M3", (N, K)),
            ("weight_scale_inv", "F32", scale_shape),
        )
    )
    return Action(kind=Kind.FP8_BLOCK, sources=(matrix.source,), outputs=(outputs,))


def _nvfp4_outputs(matrix: _Matrix) -> tuple[TensorSpec, ...]:
    N, K = matrix.shape
    return tuple(
        TensorSpec(name=f"{matrix.module}.{part}", dtype=dtype, shape=shape, file=matrix.file)
        for part, dtype, shape in (
            ("weight", "U8", (N, K // 2)),
            ("weight_scale", "F8_E4M3", (N, K // nvfp4.BLOCK)),
            ("weight_scale_2", "F32", ()),
            ("input_scale", "F32", ()),
        )
    )


def _nvfp4_actions(matrices: Sequence[_Matrix], recipe: nvfp4.Recipe) -> list[Action]:
    """One action per global scale: gate with up, down alone."""
    sharing: dict[str, list[_Matrix]] = {}
    for matrix in matrices:
        key = re.sub(r"\.(?:gate|up)_proj$", ".gate_up_proj", matrix.module)
        sharing.setdefault(key, []).append(matrix)
    for key, group in sharing.items():
        if key.endswith(".gate_up_proj") and len(group) != 2:
            raise BadInputError(
                "source checkpoint", expected=f"both halves of {key}", found=group[0].module
            )
    return [
        Action(
            kind=Kind.NVFP4,
            sources=tuple(matrix.source for matrix in group),
            outputs=tuple(_nvfp4_outputs(matrix) for matrix in group),
            recipe=recipe,
        )
        for group in sharing.values()
    ]


def _unquantized_modules(tensors: Mapping[str, TensorHeader], touched: set[str]) -> list[str]:
    """Full names of the linear modules that stay, and of what engines fuse them into."""
    modules = {"lm_head"}
    for name, header in tensors.items():
        module, dot, part = name.rpartition(".")
        linear = (part == "weight" and len(header.shape) > 1) or _FUSED_EXPERTS.fullmatch(name)
        if name in touched or not linear or not dot or module.endswith("embed_tokens"):
            continue
        modules |= {module, _fusion(module)}
    return sorted(modules)


def _quantization_config(format: WeightFormat, ignore: list[str]) -> dict[str, Any]:
    if format == WeightFormat.FP8_BLOCK:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
            "modules_to_not_convert": ignore,
        }
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    try:
        producer = version("mixed-samplers")
    except PackageNotFoundError:
        producer = "0"  # run from a source tree that is not installed
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": nvfp4.BLOCK,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers,
                "input_activations": dict(numbers),
            }
        },
        "ignore": ignore,
        "producer": {"name": "mixed-samplers", "version": producer},
    }
