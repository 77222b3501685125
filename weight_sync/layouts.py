"""How a quantized matrix lies in a checkpoint: tensor names, dtypes, shapes, and the config.

Owns the layouts and the `quantization_config` that announces each, written and read. Pure: knows
neither files nor which modules are quantized.

What engines read (sglang 0.5.23, vllm 0.33.0, compressed-tensors 0.20.1), for a module `m`:
    modelopt            nvfp4: m.weight U8, m.weight_scale E4M3, m.weight_scale_2 and m.input_scale
                        F32 []. sglang modelopt_quant.py ModelOptFp4Config, vllm modelopt.py.
    compressed-tensors  nvfp4: m.weight_packed U8, m.weight_scale E4M3, and the inverse scales
                        m.weight_global_scale and m.input_global_scale F32 [1].
                        fp8-channel: m.weight E4M3, m.weight_scale F32 [N, 1].
                        mxfp8: m.weight E4M3, m.weight_scale U8 (E8M0): vllm only, as
                        compressed_tensors_w8a8_mxfp8.py; sglang's reader has no such scheme.
                        Both: compressed_tensors/schemes; presets NVFP4, FP8_DYNAMIC and MXFP8 of
                        compressed_tensors/quantization/quant_scheme.py.
    deepseek            fp8-block: m.weight E4M3, m.weight_scale_inv F32 per 128 x 128 block.
                        sglang and vllm fp8.py.
    sglang              mxfp8: m.weight E4M3, m.weight_scale_inv U8 per 1 x 32 block.
                        sglang fp8.py Fp8Config, `quant_method` mxfp8.
Engines fill an activation scale that is missing with whatever is in memory (vllm's torch.empty), so
an uncalibrated one is written as 1.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync.formats import fp8, mxfp8, nvfp4


class Layout(enum.StrEnum):
    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"
    DEEPSEEK = "deepseek"
    SGLANG = "sglang"


# Of each format, the default first.
LAYOUTS: dict[WeightFormat, tuple[Layout, ...]] = {
    WeightFormat.BF16: (),
    WeightFormat.FP8_BLOCK: (Layout.DEEPSEEK,),
    WeightFormat.FP8_CHANNEL: (Layout.COMPRESSED_TENSORS,),
    WeightFormat.MXFP8: (Layout.SGLANG, Layout.COMPRESSED_TENSORS),
    WeightFormat.NVFP4: (Layout.MODELOPT, Layout.COMPRESSED_TENSORS),
}
RECIPES: dict[WeightFormat, tuple[str, ...]] = {
    WeightFormat.BF16: (),
    WeightFormat.FP8_BLOCK: (str(fp8.Recipe.F32), str(fp8.Recipe.UE8M0)),
    WeightFormat.FP8_CHANNEL: (),
    WeightFormat.MXFP8: (),
    WeightFormat.NVFP4: tuple(str(recipe) for recipe in nvfp4.Recipe),
}
_ALL_RECIPES = tuple(recipe for recipes in RECIPES.values() for recipe in recipes)
# Scales of activations and of the KV cache: nothing of the weights, and no part of a BF16 model.
RUNTIME_SCALES = ("input_scale", "input_global_scale", "k_scale", "v_scale", "q_scale")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How matrices are stored; `recipe` is "" where the format has only one, or none is known."""

    format: WeightFormat
    layout: Layout
    recipe: str = ""

    @property
    def scale_name(self) -> str:
        """The part that every quantized module has and no other."""
        inverse = self.layout in (Layout.DEEPSEEK, Layout.SGLANG)
        return "weight_scale_inv" if inverse else "weight_scale"


class Part(NamedTuple):
    """One of the tensors that a matrix becomes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def choose_recipe(format: WeightFormat, recipe: str | None) -> str:
    """The recipe to use: the one given, or the format's first.

    A recipe of another format is passed over, since a run file names one for all formats.

    Raises:
        BadInputError: a recipe that no format has.
    """
    if recipe is not None and recipe not in _ALL_RECIPES:
        raise BadInputError("recipe", expected=", ".join(_ALL_RECIPES), found=recipe)
    known = RECIPES[format]
    if not known:
        return ""
    return str(recipe) if recipe in known else known[0]


def choose_storage(format: WeightFormat, recipe: str | None, layout: Layout | None) -> Storage:
    """The storage of a quantized format, defaults filled in.

    Raises:
        BadInputError: a layout that the format does not have, or an unknown recipe.
    """
    known = LAYOUTS[format]
    if layout is not None and layout not in known:
        expected = " or ".join(known) or "none"
        raise BadInputError(f"layout of {format}", expected=expected, found=layout)
    return Storage(format=format, layout=layout or known[0], recipe=choose_recipe(format, recipe))


def parts(storage: Storage, N: int, K: int) -> tuple[Part, ...]:
    """The tensors of a matrix [N, K], in the order of `coding`; activation scales come last."""
    format, packed = storage.format, storage.layout == Layout.COMPRESSED_TENSORS
    if format == WeightFormat.NVFP4:
        scale = Part("weight_scale", "F8_E4M3", (N, K // nvfp4.BLOCK))
        if packed:
            return (
                Part("weight_packed", "U8", (N, K // 2)),
                scale,
                Part("weight_global_scale", "F32", (1,)),
                Part("input_global_scale", "F32", (1,)),
            )
        return (
            Part("weight", "U8", (N, K // 2)),
            scale,
            Part("weight_scale_2", "F32", ()),
            Part("input_scale", "F32", ()),
        )
    scales = {
        WeightFormat.FP8_BLOCK: ("F32", (-(-N // fp8.BLOCK), -(-K // fp8.BLOCK))),
        WeightFormat.FP8_CHANNEL: ("F32", (N, 1)),
        WeightFormat.MXFP8: ("U8", (N, K // mxfp8.BLOCK)),
    }
    return Part("weight", "F8_E4M3", (N, K)), Part(storage.scale_name, *scales[format])


def column_multiple(format: WeightFormat) -> int:
    """What K must be divisible by."""
    return {WeightFormat.NVFP4: nvfp4.BLOCK, WeightFormat.MXFP8: mxfp8.BLOCK}.get(format, 1)


def quantization_config(storage: Storage, ignore: list[str]) -> dict[str, Any]:
    """The entry of config.json by which engines know what they load."""
    format = storage.format
    if storage.layout == Layout.COMPRESSED_TENSORS:
        return _compressed_tensors_config(format, ignore)
    if storage.layout == Layout.MODELOPT:
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
        group = {"targets": ["Linear"], "weights": numbers, "input_activations": dict(numbers)}
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": nvfp4.BLOCK,
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "producer": {"name": "mixed-samplers", "version": software_version()},
        }
    common = {"fmt": "e4m3", "activation_scheme": "dynamic"}
    if format == WeightFormat.MXFP8:
        # `ignored_layers`: vllm's reader of this method knows no other name for it.
        blocks = {"weight_block_size": [1, mxfp8.BLOCK], "ignored_layers": ignore}
        return {"quant_method": "mxfp8", **common, **blocks}
    blocks = {"weight_block_size": [fp8.BLOCK, fp8.BLOCK], "modules_to_not_convert": ignore}
    scales = {"scale_fmt": "ue8m0"} if storage.recipe == fp8.Recipe.UE8M0 else {}
    return {"quant_method": "fp8", **common, **blocks, **scales}


_CT_FORMATS = {
    WeightFormat.NVFP4: "nvfp4-pack-quantized",
    WeightFormat.FP8_CHANNEL: "float-quantized",
    WeightFormat.MXFP8: "mxfp8-quantized",
}


def _compressed_tensors_config(format: WeightFormat, ignore: list[str]) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    if format == WeightFormat.FP8_CHANNEL:
        weights = {**numbers, "strategy": "channel", "dynamic": False}
        activations = {**numbers, "strategy": "token", "dynamic": True}
    elif format == WeightFormat.MXFP8:
        shared = {**numbers, "strategy": "group", "group_size": mxfp8.BLOCK}
        shared |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        weights, activations = {**shared, "dynamic": False}, {**shared, "dynamic": True}
    else:
        shared = {**numbers, "num_bits": 4, "strategy": "tensor_group", "group_size": nvfp4.BLOCK}
        shared |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        weights, activations = {**shared, "dynamic": False}, {**shared, "dynamic": "local"}
    name = _CT_FORMATS[format]
    group = {"targets": ["Linear"], "format": name, "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": activations}},
        "ignore": ignore,
    }


def detect(given: Mapping[str, Any]) -> Storage:
    """The storage that a `quantization_config` announces.

    Raises:
        BadInputError: a method, or a variant of it, that is none of ours.
    """
    method = given.get("quant_method")
    if method == "modelopt" and given.get("quant_algo") in ("NVFP4", "W4A16_NVFP4"):
        return Storage(format=WeightFormat.NVFP4, layout=Layout.MODELOPT)
    if method == "fp8" and given.get("weight_block_size") == [fp8.BLOCK, fp8.BLOCK]:
        recipe = fp8.Recipe.UE8M0 if given.get("scale_fmt") == "ue8m0" else fp8.Recipe.F32
        return Storage(format=WeightFormat.FP8_BLOCK, layout=Layout.DEEPSEEK, recipe=str(recipe))
    if method == "mxfp8":
        return Storage(format=WeightFormat.MXFP8, layout=Layout.SGLANG)
    if method == "compressed-tensors":
        formats = _compressed_tensors_formats(given)
        for format, name in _CT_FORMATS.items():
            if formats == {name}:
                return Storage(format=format, layout=Layout.COMPRESSED_TENSORS)
    details = ("quant_algo", "format", "weight_block_size")
    shown = [f"quant_method {method}"] + [f"{key} {given[key]}" for key in details if key in given]
    raise BadInputError(
        "quantization_config",
        expected="nvfp4 (modelopt, compressed-tensors), fp8 in 128 x 128 blocks, fp8 per channel "
        "(compressed-tensors) or mxfp8",
        found=", ".join(shown),
    )


def _compressed_tensors_formats(given: Mapping[str, Any]) -> set[str]:
    """The formats of its groups; a per-tensor or per-block FP8 group counts as one of no name."""
    formats: set[str] = set()
    groups = given.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = (group.get("weights") or {}) if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            formats.add("none")
            continue
        name = str(group.get("format") or given.get("format"))
        strategy = weights.get("strategy")
        channels = name != "float-quantized" or strategy == "channel"
        formats.add(name if channels else f"{name} per {strategy}")
    return formats


def software_version() -> str:
    try:
        return version("mixed-samplers")
    except PackageNotFoundError:
        return "0"  # run from a source tree that is not installed
