"""Which tensors a format touches, and what the engines are told: decided from headers alone."""

from __future__ import annotations

import math

import pytest

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync.layouts import Layout, Storage
from weight_sync.plan import Kind, plan_conversion, plan_decoding
from weight_sync.safetensors_file import DTYPE_BYTES, TensorHeader

NVFP4, FP8, BF16 = WeightFormat.NVFP4, WeightFormat.FP8_BLOCK, WeightFormat.BF16
CONFIG = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
EIGHT_BITS = [WeightFormat.FP8_BLOCK, WeightFormat.FP8_CHANNEL, WeightFormat.MXFP8]
QUANTIZED = [NVFP4, *EIGHT_BITS]


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


def quantized(plan, kind: Kind = Kind.ENCODE) -> set[str]:
    return {
        region.tensor for action in plan.actions if action.kind == kind for region in action.sources
    }


def sharing(plan) -> list[set[str]]:
    """The matrices of each global scale that several share."""
    return [
        {region.tensor for region in action.sources}
        for action in plan.actions
        if action.kind == Kind.ENCODE and len(action.sources) > 1
    ]


def test_nvfp4_takes_only_experts_and_lists_every_other_linear():
    plan = plan_conversion({}, MODEL, format=NVFP4)
    assert quantized(plan) == {*expert(index=0), *expert(index=1)}
    assert plan.config["quantization_config"]["ignore"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert.gate_proj",
        "model.layers.0.mlp.shared_expert.gate_up_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.v_proj",
        "model.visual.blocks.0.attn.qkv",
        "model.visual.blocks.0.attn.qkv_proj",
        "mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.0.gate_proj",
    ]


def test_nvfp4_shares_a_global_scale_between_gate_and_up_of_one_expert_only():
    plan = plan_conversion({}, MODEL, format=NVFP4)
    prefix = "model.layers.0.mlp.experts"
    assert sharing(plan) == [
        {f"{prefix}.{e}.gate_proj.weight", f"{prefix}.{e}.up_proj.weight"} for e in (0, 1)
    ]


@pytest.mark.parametrize("format", QUANTIZED)
def test_mixtrals_experts_are_quantized_and_its_router_stays(format):
    block = "model.layers.0.block_sparse_moe"
    sizes = {"w1": (32, 64), "w3": (32, 64), "w2": (64, 32)}
    experts = {f"{block}.experts.{e}.{w}.weight": s for e in (0, 1) for w, s in sizes.items()}
    attention = {f"model.layers.0.self_attn.{p}_proj.weight": (64, 64) for p in "qkvo"}
    tensors = headers({f"{block}.gate.weight": (2, 64)} | experts | attention)
    plan = plan_conversion({"num_local_experts": 2}, tensors, format=format)
    if format == NVFP4:
        assert quantized(plan) == set(experts)
        assert sharing(plan) == [
            {f"{block}.experts.{e}.{w}.weight" for w in ("w1", "w3")} for e in (0, 1)
        ]
        assert f"{block}.gate" in plan.config["quantization_config"]["ignore"]
    else:
        assert quantized(plan) == {*experts, *attention}
    with pytest.raises(BadInputError, match=r"all parts of .*\.experts or none"):
        plan_conversion({}, tensors, format=format, ignore=["*.experts.0.*"])


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
    untouched = MODEL.keys() - quantized(plan)
    assert untouched <= {spec.name for spec in plan.outputs}


@pytest.mark.parametrize("format", EIGHT_BITS)
def test_eight_bits_take_attention_and_experts(format):
    plan = plan_conversion({}, MODEL, format=format)
    attention = {f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"}
    assert quantized(plan) == {*attention, *expert(index=0), *expert(index=1)}
    config = plan.config["quantization_config"]
    key = {FP8: "modules_to_not_convert", WeightFormat.MXFP8: "ignored_layers"}.get(
        format, "ignore"
    )
    ignored = config[key]
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


def dense(prefix: str = "model.layers.0") -> dict[str, tuple[int, ...]]:
    shapes = {
        **{f"self_attn.{p}_proj": (64, 64) for p in "qo"},
        **{f"self_attn.{p}_proj": (32, 64) for p in "kv"},
        **{f"mlp.{p}_proj": (128, 64) for p in ("gate", "up")},
        "mlp.down_proj": (64, 128),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("prefix", ["model.layers.0", "model.language_model.layers.11"])
def test_every_format_takes_the_layers_of_a_dense_model(format, prefix):
    others = {
        "model.embed_tokens.weight": (96, 64),
        f"{prefix}.input_layernorm.weight": (64,),
        f"{prefix}.self_attn.q_proj.bias": (64,),
        "lm_head.weight": (96, 64),
    }
    plan = plan_conversion({}, headers(dense(prefix) | others), format=format)
    assert quantized(plan) == set(dense(prefix))
    assert others.keys() <= {spec.name for spec in plan.outputs}


def test_nvfp4_shares_global_scales_of_what_engines_fuse_in_a_dense_model():
    plan = plan_conversion({}, headers(dense()), format=NVFP4)
    layer = "model.layers.0"
    assert sharing(plan) == [
        {f"{layer}.self_attn.{p}_proj.weight" for p in "qkv"},
        {f"{layer}.mlp.{p}_proj.weight" for p in ("gate", "up")},
    ]


def test_qwen3_5_names_are_all_listed_in_both_forms():
    """Names of Qwen3.5-MoE: linear attention beside attention, shared expert, MTP, vision."""
    layer = "model.language_model.layers.3"
    linear = {
        f"{layer}.linear_attn.{p}": (64, 64)
        for p in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
    } | {f"{layer}.mlp.shared_expert.{p}_proj": (64, 64) for p in ("gate", "up", "down")}
    linear |= {f"{layer}.mlp.gate": (2, 64), f"{layer}.mlp.shared_expert_gate": (1, 64)}
    linear |= {"mtp.fc": (64, 128), "mtp.layers.0.self_attn.q_proj": (64, 64)}
    linear |= {"model.visual.blocks.0.attn.qkv": (96, 32)}
    linear |= {"model.visual.blocks.0.mlp.linear_fc1": (64, 32)}
    shapes: dict[str, tuple[int, ...]] = {f"{m}.weight": shape for m, shape in linear.items()}
    shapes |= {
        f"{layer}.linear_attn.conv1d.weight": (64, 1, 4),
        f"{layer}.linear_attn.A_log": (4,),
        f"{layer}.linear_attn.norm.weight": (16,),
        f"{layer}.mlp.experts.gate_up_proj": (2, 64, 64),
        f"{layer}.mlp.experts.down_proj": (2, 64, 32),
        "mtp.layers.0.mlp.experts.gate_up_proj": (2, 64, 64),
    }
    config = {"model_type": "qwen3_5_moe", "text_config": CONFIG | {"num_experts": 2}}
    plan = plan_conversion(config, headers(shapes), format=NVFP4)
    assert quantized(plan) == {f"{layer}.mlp.experts.{p}_proj" for p in ("gate_up", "down")}
    ignored = plan.config["quantization_config"]["ignore"]
    fused = {
        f"{layer}.linear_attn.in_proj_qkvz",
        f"{layer}.linear_attn.in_proj_ba",
        f"{layer}.linear_attn.conv1d",
        f"{layer}.mlp.shared_expert.gate_up_proj",
        "mtp.layers.0.self_attn.qkv_proj",
        "mtp.layers.0.mlp.experts",
        "model.visual.blocks.0.attn.qkv_proj",
        "lm_head",
    }
    assert set(ignored) == {*linear, *fused}


def test_ignored_modules_stay():
    plan = plan_conversion({}, MODEL, format=FP8, ignore=["*.self_attn.*"])
    assert quantized(plan) == {*expert(index=0), *expert(index=1)}
    ignored = plan.config["quantization_config"]["modules_to_not_convert"]
    assert {"model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"} <= set(ignored)


@pytest.mark.parametrize("glob", ["*.q_proj", "*.experts.0.*", "*.experts.*.gate_proj"])
def test_ignoring_part_of_a_fused_matrix_is_refused(glob):
    with pytest.raises(BadInputError, match="all parts of"):
        plan_conversion({}, MODEL, format=FP8, ignore=[glob])


PREFIX = "model.language_model.layers.3.mlp.experts"


def fused(gate_up: tuple[int, ...], down: tuple[int, ...], **others: tuple[int, ...]) -> dict:
    shapes = {"gate_up_proj": gate_up, "down_proj": down, **others}
    return headers({f"{PREFIX}.{part}": shape for part, shape in shapes.items()})


def test_a_fused_checkpoint_becomes_per_expert():
    plan = plan_conversion(CONFIG, fused((2, 64, 64), (2, 64, 32)), format=NVFP4)
    weights = {s.name: s.shape for s in plan.outputs if s.name.endswith(".weight")}
    assert weights == {
        f"{PREFIX}.{e}.{p}_proj.weight": shape
        for e in (0, 1)
        for p, shape in (("gate", (32, 32)), ("up", (32, 32)), ("down", (64, 16)))
    }


# As transformers 5.x has them: qwen3_vl_moe in conversion_mapping.py, gpt_oss in its GptOssExperts.
D, F = 64, 48
TRANSPOSED = ((2, D, 2 * F), (2, F, D))
VL = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": D, "moe_intermediate_size": F}}
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": D, "intermediate_size": F}
BIASES = {"gate_up_proj_bias": (2, 2 * F), "down_proj_bias": (2, D)}
SIZED = {"model_type": "qwen3_moe", "hidden_size": D, "moe_intermediate_size": F}


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize(
    ("config", "tensors", "sentence"),
    [
        (VL, fused(*TRANSPOSED), "whose order of gate and up is known.*model_type qwen3_vl_moe"),
        (GPT_OSS, fused(*TRANSPOSED), "found model_type gpt_oss"),
        (GPT_OSS, fused(*TRANSPOSED, **BIASES), r"experts named .*found .*gate_up_proj_bias"),
        ({}, fused(*TRANSPOSED), "found model_type None"),
        (SIZED, fused(*TRANSPOSED), r"gate_up_proj: expected \[E, 2F, D\], .*found \(2, 64, 96\)"),
        (SIZED, fused((2, 2 * F, D), (2, F, D)), r"down_proj: expected \[E, D, F\].*\[E, 64, 48\]"),
        (SIZED, fused((2, 2 * F - 1, D), (2, D, F)), r"found \(2, 95, 64\)"),
        (SIZED, fused((2 * F, D), (2, D, F)), r"found \(96, 64\)"),
        ({"model_type": "qwen3_moe"}, fused((2, 2 * F, D), (2, D, F)), "expected hidden_size and"),
    ],
)
def test_fused_experts_that_lie_another_way_are_refused(format, config, tensors, sentence):
    """Where sizes happen to fit, a matrix cut along the wrong dimension would look like weights."""
    with pytest.raises(BadInputError, match=sentence):
        plan_conversion(config, tensors, format=format)


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "model.layers.0.block_sparse_moe.experts.0.w4.weight"),
        ({}, "model.layers.0.block_sparse_moe.input_linear.weight"),  # Granite
        ({}, "language_model.model.layers.0.feed_forward.experts.gate_up_proj"),  # Llama 4
        ({}, "model.layers.0.mlp.experts.0.gate_proj.bias"),
        ({"num_local_experts": 8}, "model.layers.0.moe.w1.weight"),
        ({"text_config": {"n_routed_experts": 8}}, "model.layers.0.ffn.w1.weight"),
    ],
)
def test_experts_of_other_names_do_not_make_a_model_without_experts(format, config, name):
    with pytest.raises(BadInputError, match=r"expected experts named .*found (none of 8|.*\.0\.)"):
        plan_conversion(config, headers(dense() | {name: (32, 64)}), format=format)


def test_deepseeks_experts_have_known_names_and_shared_ones_stay():
    shared = {
        f"model.layers.0.mlp.shared_experts.{p}_proj.weight": (32, 64) for p in ("gate", "up")
    }
    tensors = headers(expert() | shared | {"model.layers.0.self_attn.kv_b_proj.weight": (64, 64)})
    plan = plan_conversion({"n_routed_experts": 1}, tensors, format=NVFP4)
    assert quantized(plan) == set(expert())
    ignored = plan.config["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.shared_experts.gate_up_proj" in ignored


def test_the_same_expert_fused_and_on_its_own_is_refused():
    both = fused((1, 64, 64), (1, 64, 32)) | headers(expert("model.language_model.layers.3"))
    sentence = rf"expected {PREFIX}\.0\.gate_proj once, found it in {PREFIX}\.gate_up_proj and in "
    with pytest.raises(BadInputError, match=sentence + rf"{PREFIX}\.0\.gate_proj\.weight$"):
        plan_conversion(CONFIG, both, format=NVFP4)


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("shape", [(0, 64), (32, 0)])
def test_a_matrix_without_elements_is_refused(format, shape):
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    with pytest.raises(BadInputError, match=rf"tensor {name}: expected weights, found "):
        plan_conversion({}, headers(expert() | {name: shape}), format=format)


@pytest.mark.parametrize("K", [8, 24, 33])
def test_nvfp4_refuses_columns_that_blocks_do_not_fill(K):
    shapes = expert() | {"model.layers.0.mlp.experts.0.down_proj.weight": (64, K)}
    with pytest.raises(BadInputError, match=rf"experts\.0\.down_proj.*multiples of 16.*{K}"):
        plan_conversion({}, headers(shapes), format=NVFP4)


def test_nvfp4_refuses_a_gate_without_its_up():
    shapes = expert()
    del shapes["model.layers.0.mlp.experts.0.up_proj.weight"]
    with pytest.raises(BadInputError, match=r"all 2 parts of .*experts\.0\.gate_up_proj"):
        plan_conversion({}, headers(shapes), format=NVFP4)


@pytest.mark.parametrize("format", QUANTIZED)
def test_a_model_with_nothing_to_quantize_is_refused(format):
    shapes = {"transformer.h.0.attn.c_attn.weight": (32, 64), "lm_head.weight": (96, 64)}
    with pytest.raises(BadInputError, match=r"projections, found none of that kind among 2"):
        plan_conversion({}, headers(shapes), format=format)


def test_mxfp8_refuses_columns_that_blocks_do_not_fill():
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(BadInputError, match=r"o_proj.*multiples of 32, found 48"):
        plan_conversion({}, headers({name: (64, 48)}), format=WeightFormat.MXFP8)


@pytest.mark.parametrize(
    ("format", "layout"),
    [(FP8, Layout.MODELOPT), (WeightFormat.FP8_CHANNEL, Layout.DEEPSEEK), (NVFP4, Layout.SGLANG)],
)
def test_a_layout_that_a_format_does_not_have_is_refused(format, layout):
    with pytest.raises(BadInputError, match=f"layout of {format}"):
        plan_conversion({}, MODEL, format=format, layout=layout)


def test_an_unknown_recipe_is_refused_and_one_of_another_format_passed_over():
    assert plan_conversion({}, MODEL, format=FP8, recipe="te").recipe == "f32"
    assert plan_conversion({}, MODEL, format=NVFP4, recipe="te").recipe == "te"
    with pytest.raises(BadInputError, match=r"recipe: expected .*modelopt, .*found int3"):
        plan_conversion({}, MODEL, format=NVFP4, recipe="int3")


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


CHANNEL = Storage(format=WeightFormat.FP8_CHANNEL, layout=Layout.COMPRESSED_TENSORS)


def stored(**changes: tuple[str, tuple[int, ...]] | None) -> dict[str, TensorHeader]:
    """A module in CHANNEL's storage, with parts replaced or left out."""
    parts = {"weight": ("F8_E4M3", (32, 64)), "weight_scale": ("F32", (32, 1))}
    result: dict[str, TensorHeader] = {}
    for part, given in (parts | changes).items():
        if given is not None:
            result |= headers({f"a.b.{part}": given[1]}, given[0])
    return result


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_decoding_gives_plain_names_and_leaves_out_scales_of_activations(dtype):
    tensors = stored(input_scale=("F32", ())) | headers(
        {"a.k_proj.k_scale": (), "lm_head.weight": (96, 64), "norm.weight": (64,)}
    )
    config = {
        "dtype": "float16",
        "text_config": {"dtype": "float16", "x": 1},
        "quantization_config": {},
    }
    plan = plan_decoding(config, tensors, stored=CHANNEL, dtype=dtype)
    assert {s.name: (s.dtype, s.shape) for s in plan.outputs} == {
        "a.b.weight": (dtype, (32, 64)),
        "lm_head.weight": (dtype, (96, 64)),
        "norm.weight": (dtype, (64,)),
    }
    name = {"F32": "float32", "BF16": "bfloat16"}[dtype]
    assert plan.config == {"dtype": name, "text_config": {"dtype": name, "x": 1}}
    assert quantized(plan, Kind.DROP) == {"a.b.input_scale", "a.k_proj.k_scale"}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_decoding_takes_the_scales_of_other_writers(dtype):
    plan = plan_decoding({}, stored(weight_scale=(dtype, (32, 1))), stored=CHANNEL)
    assert [spec.name for spec in plan.outputs] == ["a.b.weight"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weight": None}, r"expected a\.b\.weight, found only a\.b\.weight_scale"),
        ({"weight_scale": None}, "expected tensors named weight_scale, found none"),
        ({"weight_scale": ("F32", (31, 1))}, r"weight_scale: expected F32 \(32, 1\)"),
        ({"weight_scale": ("I32", (32, 1))}, r"found I32"),
        ({"weight": ("U8", (32, 64))}, r"a\.b\.weight: expected F8_E4M3"),
        ({"weight": ("F8_E4M3", (2048,))}, "expected a matrix"),
        ({"other": ("F8_E4M3", (32, 64))}, r"a\.b\.other: expected .*found F8_E4M3 alone"),
    ],
)
def test_decoding_refuses_parts_that_do_not_fit(changes, sentence):
    with pytest.raises(BadInputError, match=sentence):
        plan_decoding({}, stored(**changes), stored=CHANNEL)
