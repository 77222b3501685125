"""Which tensors a format touches, and what the engines are told: decided from headers alone."""

from __future__ import annotations

import math

import pytest

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync.plan import Kind, plan_conversion
from weight_sync.safetensors_file import DTYPE_BYTES, TensorHeader

NVFP4, FP8, BF16 = WeightFormat.NVFP4, WeightFormat.FP8_BLOCK, WeightFormat.BF16


def headers(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, TensorHeader]:
    position, result = 0, {}
    for name, shape in shapes.items():
        end = position + DTYPE_BYTES[dtype] * math.prod(shape)
        result[name] = TensorHeader(
            dtype=dtype, shape=shape, file="model.safetensors", start=position, end=end
        )
        position = end
    return result


def expert(prefix: str = "model.layers.0", index: int = 0) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    return {f"{prefix}.mlp.experts.{index}.{p}_proj.weight": s for p, s in shapes.items()}


MODEL = headers(
    {
        "model.embed_tokens.weight": (96, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.k_proj.weight": (32, 64),
        "model.layers.0.self_attn.v_proj.weight": (32, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 64),
        "model.layers.0.self_attn.q_norm.weight": (16,),
        "model.layers.0.mlp.gate.weight": (2, 64),
        "model.layers.0.mlp.shared_expert.gate_proj.weight": (32, 64),
        **expert(index=0),
        **expert(index=1),
        "model.norm.weight": (64,),
        "lm_head.weight": (96, 64),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": (32, 64),
        "model.visual.blocks.0.attn.qkv.weight": (32, 64),
    }
)


def quantized(plan, kind: Kind) -> set[str]:
    return {
        region.tensor for action in plan.actions if action.kind == kind for region in action.sources
    }


def test_nvfp4_takes_only_experts_and_lists_every_other_linear():
    plan = plan_conversion({}, MODEL, format=NVFP4)
    assert quantized(plan, Kind.NVFP4) == {*expert(index=0), *expert(index=1)}
    assert plan.config["quantization_config"]["ignore"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert.gate_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.v_proj",
        "model.visual.blocks.0.attn.qkv",
        "mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.0.gate_proj",
    ]


def test_nvfp4_shares_a_global_scale_between_gate_and_up_of_one_expert_only():
    plan = plan_conversion({}, MODEL, format=NVFP4)
    sharing = [
        {region.tensor for region in action.sources}
        for action in plan.actions
        if action.kind == Kind.NVFP4 and len(action.sources) > 1
    ]
    prefix = "model.layers.0.mlp.experts"
    assert sharing == [
        {f"{prefix}.{e}.gate_proj.weight", f"{prefix}.{e}.up_proj.weight"} for e in (0, 1)
    ]


def test_nvfp4_result_has_the_modelopt_layout():
    plan = plan_conversion({}, MODEL, format=NVFP4)
    module = "model.layers.0.mlp.experts.1.down_proj"
    found = {s.name: (s.dtype, s.shape) for s in plan.outputs if s.name.startswith(module)}
    assert found == {
        f"{module}.weight": ("U8", (64, 16)),
        f"{module}.weight_scale": ("F8_E4M3", (64, 2)),
        f"{module}.weight_scale_2": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }
    untouched = MODEL.keys() - quantized(plan, Kind.NVFP4)
    assert untouched <= {spec.name for spec in plan.outputs}


def test_fp8_takes_attention_and_experts():
    plan = plan_conversion({}, MODEL, format=FP8)
    attention = {f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"}
    assert quantized(plan, Kind.FP8_BLOCK) == {*attention, *expert(index=0), *expert(index=1)}
    ignored = plan.config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.self_attn.qkv_proj" not in ignored
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(ignored)
    scale = next(s for s in plan.outputs if s.name == "lm_head.weight")
    assert scale.dtype == "BF16"


@pytest.mark.parametrize(("N", "K", "expected"), [(130, 200, (2, 2)), (1, 16, (1, 1))])
def test_fp8_rounds_the_number_of_blocks_up(N, K, expected):
    name = "model.layers.0.self_attn.q_proj.weight"
    plan = plan_conversion({}, headers({name: (N, K)}), format=FP8)
    scale = next(s for s in plan.outputs if s.name.endswith("weight_scale_inv"))
    assert (scale.dtype, scale.shape) == ("F32", expected)


def test_fp8_takes_a_dense_model():
    shapes = {f"model.layers.0.mlp.{p}_proj.weight": (32, 64) for p in ("gate", "up", "down")}
    plan = plan_conversion({}, headers(shapes), format=FP8)
    assert quantized(plan, Kind.FP8_BLOCK) == set(shapes)


def test_ignored_modules_stay():
    plan = plan_conversion({}, MODEL, format=FP8, ignore=["*.self_attn.*"])
    assert quantized(plan, Kind.FP8_BLOCK) == {*expert(index=0), *expert(index=1)}
    ignored = plan.config["quantization_config"]["modules_to_not_convert"]
    assert {"model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"} <= set(ignored)


@pytest.mark.parametrize("glob", ["*.q_proj", "*.experts.0.*", "*.experts.*.gate_proj"])
def test_ignoring_part_of_a_fused_matrix_is_refused(glob):
    with pytest.raises(BadInputError, match="all parts of"):
        plan_conversion({}, MODEL, format=FP8, ignore=[glob])


def test_a_fused_checkpoint_becomes_per_expert():
    fused = headers(
        {
            "model.language_model.layers.3.mlp.experts.gate_up_proj": (2, 64, 48),
            "model.language_model.layers.3.mlp.experts.down_proj": (2, 48, 32),
        }
    )
    plan = plan_conversion({}, fused, format=NVFP4)
    weights = {s.name: s.shape for s in plan.outputs if s.name.endswith(".weight")}
    prefix = "model.language_model.layers.3.mlp.experts"
    assert weights == {
        f"{prefix}.{e}.{p}_proj.weight": shape
        for e in (0, 1)
        for p, shape in (("gate", (32, 24)), ("up", (32, 24)), ("down", (48, 16)))
    }


@pytest.mark.parametrize("K", [8, 24, 33])
def test_nvfp4_refuses_columns_that_blocks_do_not_fill(K):
    shapes = expert() | {"model.layers.0.mlp.experts.0.down_proj.weight": (64, K)}
    with pytest.raises(BadInputError, match=rf"experts\.0\.down_proj.*multiples of 16.*{K}"):
        plan_conversion({}, headers(shapes), format=NVFP4)


def test_nvfp4_refuses_a_gate_without_its_up():
    shapes = expert()
    del shapes["model.layers.0.mlp.experts.0.up_proj.weight"]
    with pytest.raises(BadInputError, match="both halves"):
        plan_conversion({}, headers(shapes), format=NVFP4)


def test_a_model_without_experts_is_refused_for_nvfp4():
    shapes = {"model.layers.0.self_attn.q_proj.weight": (32, 64)}
    with pytest.raises(BadInputError, match=r"experts.*found none"):
        plan_conversion({}, headers(shapes), format=NVFP4)


def test_a_quantized_source_is_refused():
    config = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(BadInputError, match="no quantization_config, found quant_method fp8"):
        plan_conversion(config, MODEL, format=NVFP4)
    with pytest.raises(BadInputError, match="BF16, F16 or F32 weights, found F8_E4M3"):
        plan_conversion({}, headers(expert(), "F8_E4M3"), format=NVFP4)


def test_bf16_rounds_float32_matrices_and_keeps_vectors():
    shapes = {"model.layers.0.mlp.gate.weight": (4, 8), "model.norm.weight": (8,)}
    plan = plan_conversion({"dtype": "float32"}, headers(shapes, "F32"), format=BF16)
    assert {s.name: s.dtype for s in plan.outputs} == {
        "model.layers.0.mlp.gate.weight": "BF16",
        "model.norm.weight": "F32",
    }
    assert plan.config == {"dtype": "bfloat16"}
