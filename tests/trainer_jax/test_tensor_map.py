"""The tensor map: checkpoints of every family and layout, there and back, and real models by shape.

What a checkpoint of the hub holds is generated here from lists of names and shapes that were taken
from transformers' own modules, so that the map is not compared with itself.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from contracts.errors import BadInputError
from trainer_jax.hf import (
    DTYPES,
    audit_checkpoint,
    load_checkpoint,
    load_config,
    save_checkpoint,
)
from trainer_jax.models.config import ATTENTION, DELTANET, ModelConfig
from trainer_jax.models.parameters import PARAMETERS, count_parameters, nest, parameter_shapes
from trainer_jax.tensor_map import Naming, file_tensors

MOE = ModelConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=3, num_experts_per_tok=2,
    moe_intermediate_size=12,
)  # fmt: skip
DENSE = replace(
    MOE, model_type="qwen3", num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0,
    intermediate_size=20, norm_topk_prob=True,
)  # fmt: skip
HYBRID = replace(
    MOE, model_type="qwen3_5_moe", num_hidden_layers=5, partial_rotary_factor=0.25,
    layer_types=(DELTANET, DELTANET, DELTANET, ATTENTION, DELTANET),
    shared_expert_intermediate_size=10, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=4, linear_value_head_dim=6, linear_conv_kernel_dim=4,
)  # fmt: skip
LLAMA = replace(DENSE, model_type="llama")
MIXTRAL = replace(MOE, model_type="mixtral")
FAMILIES = {
    config.model_type: config for config in (DENSE, MOE, HYBRID, LLAMA, MIXTRAL)
}  # fmt: skip


def hybrid_tensors(
    text: dict, prefix: str, layout: str, *, mtp: str | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a qwen3_5_moe checkpoint, vision left out."""
    D, V = text["hidden_size"], text["vocab_size"]
    A, H, J = text["head_dim"], text["num_attention_heads"], text["num_key_value_heads"]
    key_width = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    heads = text["linear_num_value_heads"]
    value_width = heads * text["linear_value_head_dim"]
    channels = 2 * key_width + value_width
    E, F, S = (
        text["num_experts"], text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    )  # fmt: skip

    def ffn(layer: str, layout: str) -> dict[str, tuple[int, ...]]:
        found = {
            layer + "input_layernorm.weight": (D,),
            layer + "post_attention_layernorm.weight": (D,),
            layer + "mlp.gate.weight": (E, D),
            layer + "mlp.shared_expert.gate_proj.weight": (S, D),
            layer + "mlp.shared_expert.up_proj.weight": (S, D),
            layer + "mlp.shared_expert.down_proj.weight": (D, S),
            layer + "mlp.shared_expert_gate.weight": (1, D),
        }
        if layout == "fused":
            found[layer + "mlp.experts.gate_up_proj"] = (E, 2 * F, D)
            found[layer + "mlp.experts.down_proj"] = (E, D, F)
        for e in range(E if layout == "per-expert" else 0):
            expert = f"{layer}mlp.experts.{e}."
            found[expert + "gate_proj.weight"] = found[expert + "up_proj.weight"] = (F, D)
            found[expert + "down_proj.weight"] = (D, F)
        return found

    def attention(layer: str) -> dict[str, tuple[int, ...]]:
        return {
            layer + "self_attn.q_proj.weight": (2 * H * A, D),
            layer + "self_attn.k_proj.weight": (J * A, D),
            layer + "self_attn.v_proj.weight": (J * A, D),
            layer + "self_attn.o_proj.weight": (D, H * A),
            layer + "self_attn.q_norm.weight": (A,),
            layer + "self_attn.k_norm.weight": (A,),
        }

    def linear(layer: str) -> dict[str, tuple[int, ...]]:
        return {
            layer + "linear_attn.in_proj_qkv.weight": (channels, D),
            layer + "linear_attn.in_proj_z.weight": (value_width, D),
            layer + "linear_attn.in_proj_b.weight": (heads, D),
            layer + "linear_attn.in_proj_a.weight": (heads, D),
            layer + "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
            layer + "linear_attn.A_log": (heads,),
            layer + "linear_attn.dt_bias": (heads,),
            layer + "linear_attn.norm.weight": (text["linear_value_head_dim"],),
            layer + "linear_attn.out_proj.weight": (D, value_width),
        }

    found = {f"{prefix}embed_tokens.weight": (V, D), f"{prefix}norm.weight": (D,)}
    found["lm_head.weight"] = (V, D)
    for i, kind in enumerate(text["layer_types"]):
        layer = f"{prefix}layers.{i}."
        found |= ffn(layer, layout) | (linear(layer) if kind == DELTANET else attention(layer))
    if mtp:
        found |= ffn("mtp.layers.0.", mtp) | attention("mtp.layers.0.")
        found["mtp.fc.weight"] = (D, 2 * D)
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        found |= {f"mtp.{norm}.weight": (D,) for norm in norms}
    return found


VISION = {"model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4), "model.visual.pos.bias": (8,)}


def random_checkpoint(directory: Path, config: dict, tensors: dict, dtypes=None) -> dict:
    """Writes a checkpoint of random values; returns them. `dtypes`: endings of names -> dtype."""
    rng = np.random.default_rng(len(tensors))

    def dtype(name: str):
        return next((d for end, d in (dtypes or {}).items() if name.endswith(end)), "bfloat16")

    values = {
        name: rng.normal(size=shape).astype(DTYPES[dtype(name)]) for name, shape in tensors.items()
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(values, directory / "model.safetensors", {"format": "pt"})
    return values


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    files = directory.glob("*.safetensors")
    return {name: x for file in files for name, x in safetensors.numpy.load_file(file).items()}


def assert_same_bytes(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert got[name].tobytes() == value.tobytes(), name


TEXT = HYBRID.to_hf() | {"router_aux_loss_coef": 0.001, "mamba_ssm_dtype": "float32"}
WRAPPED = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 39,
    "tie_word_embeddings": False,
    "text_config": TEXT,
    "vision_config": {"depth": 1, "model_type": "qwen3_5_moe"},
}


@pytest.mark.parametrize("mtp", [None, "fused", "per-expert"])
@pytest.mark.parametrize("layout", ["fused", "per-expert"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_an_export_is_its_source_byte_for_byte(tmp_path, prefix, layout, mtp):
    """Untrained, every tensor comes back: prefix, experts, dtypes, and what is only carried."""
    wrapped = prefix != "model."
    tensors = hybrid_tensors(TEXT, prefix, layout, mtp=mtp) | (VISION if wrapped else {})
    config = WRAPPED if wrapped else TEXT
    dtypes = {"linear_attn.A_log": "float32", "linear_attn.norm.weight": "float32"}  # as Qwen3.5
    want = random_checkpoint(tmp_path / "source", config, tensors, dtypes)
    model, params = load_checkpoint(tmp_path / "source")
    assert model == HYBRID
    for dtype in (None, "bfloat16"):  # what Qwen3.5 keeps in float32 also stays so when published
        out = tmp_path / f"as {dtype}"
        save_checkpoint(out, model, params, dtype=dtype, copy_from=tmp_path / "source")
        assert_same_bytes(tensors_of(out), want)
        written = json.loads((out / "config.json").read_text())
        assert written["text_config" if wrapped else "router_aux_loss_coef"] == (
            config["text_config"] if wrapped else 0.001
        )
        assert written.get("vision_config") == config.get("vision_config")
    assert json.loads((tmp_path / "as None" / "config.json").read_text()) == config


def test_trained_values_are_in_the_export_and_the_rest_is_untouched(tmp_path):
    tensors = hybrid_tensors(TEXT, "model.language_model.", "fused", mtp="fused") | VISION
    want = random_checkpoint(tmp_path / "source", WRAPPED, tensors)
    model, params = load_checkpoint(tmp_path / "source")
    params = jax.tree.map(lambda leaf: leaf * 2, params)
    save_checkpoint(tmp_path / "out", model, params, copy_from=tmp_path / "source")
    doubled = {
        name: value if name.startswith(("mtp.", "model.visual.")) else value * value.dtype.type(2)
        for name, value in want.items()
    }
    assert_same_bytes(tensors_of(tmp_path / "out"), doubled)


@pytest.mark.parametrize("layout", ["fused", "per-expert"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_round_trip_of_the_tree(tmp_path, family, layout, tied):
    config = replace(FAMILIES[family], tie_word_embeddings=tied)
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(config)
    params = nest({path: rng.normal(size=x).astype(np.float32) for path, x in shapes.items()})
    save_checkpoint(tmp_path / "a", config, params, layout=layout, dtype="float32")
    got_config, got = load_checkpoint(tmp_path / "a")
    assert got_config == config
    assert jax.tree.structure(got) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, got, params)
    report = audit_checkpoint(tmp_path / "a")
    assert report.num_parameters == count_parameters(config) == sum(map(math.prod, shapes.values()))
    assert report.naming.layout == (layout if config.num_experts else "per-expert")


def test_a_tied_head_that_the_source_repeats_is_repeated(tmp_path):
    config = replace(DENSE, tie_word_embeddings=True)
    shapes = {tensor.name: tensor.shape for tensor in file_tensors(config, Naming())}
    values = random_checkpoint(tmp_path / "source", config.to_hf(), shapes)
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    safetensors.numpy.save_file(values, tmp_path / "source" / "model.safetensors")
    model, params = load_checkpoint(tmp_path / "source")
    assert "head" not in params
    save_checkpoint(tmp_path / "out", model, params, copy_from=tmp_path / "source")
    assert_same_bytes(tensors_of(tmp_path / "out"), values)


def test_every_parameter_of_the_table_has_a_name():
    paths = {
        path
        for config in FAMILIES.values()
        for layout in ("fused", "per-expert")
        for tensor in file_tensors(config, Naming(layout=layout))
        for path in tensor.paths
    }
    assert paths == set(PARAMETERS)


QWEN36_TEXT = {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "attn_output_gate": True,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "eos_token_id": 248044,
    "hidden_act": "silu", "attention_bias": False,
    "rope_parameters": {
        "rope_theta": 10000000, "partial_rotary_factor": 0.25, "rope_type": "default",
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN36 = {"model_type": "qwen3_5_moe", "text_config": QWEN36_TEXT, "tie_word_embeddings": False}
QWEN3_30B = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "norm_topk_prob": True, "rope_theta": 1000000.0, "rope_scaling": None,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip


def vision_tensors() -> dict[str, tuple[int, ...]]:
    D, F, out = 1152, 4304, 2048
    sizes = {"norm1": (D,), "norm2": (D,), "attn.qkv": (3 * D, D), "attn.proj": (D, D)}
    sizes |= {"mlp.linear_fc1": (F, D), "mlp.linear_fc2": (D, F)}
    modules = {f"blocks.{i}.{name}": shape for i in range(27) for name, shape in sizes.items()}
    modules |= {
        "merger.norm": (D,), "merger.linear_fc1": (4 * D, 4 * D),
        "merger.linear_fc2": (out, 4 * D), "patch_embed.proj": (D, 3, 2, 16, 16),
    }  # fmt: skip
    found = {"model.visual.pos_embed.weight": (2304, D)}
    for name, shape in modules.items():
        found |= {f"model.visual.{name}.weight": shape, f"model.visual.{name}.bias": shape[:1]}
    return found


def sparse_checkpoint(directory: Path, config: dict, tensors: dict[str, tuple[int, ...]]) -> None:
    """Headers of whole files, with holes for values, in two shards."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        header, end = {}, 0
        for name in part:
            start, end = end, end + 2 * math.prod(tensors[name])
            header[name] = {
                "dtype": "BF16", "shape": tensors[name], "data_offsets": [start, end],
            }  # fmt: skip
        text = json.dumps(header).encode()
        file = f"model-{number:05d}-of-00002.safetensors"
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("layout", "mtp", "num_carried"), [("fused", "fused", 19), ("fused", "per-expert", 785)]
)  # fmt: skip
def test_the_35b_model_by_shape(tmp_path, layout, mtp, num_carried):
    """Qwen3.6-35B-A3B, and the way Qwen3.5 stores the experts of its multi-token prediction."""
    types = ([DELTANET] * 3 + [ATTENTION]) * 10
    tensors = hybrid_tensors(
        QWEN36_TEXT | {"layer_types": types}, "model.language_model.", layout, mtp=mtp
    )
    vision = vision_tensors()
    assert sum(map(math.prod, vision.values())) == 446_571_248
    sparse_checkpoint(tmp_path / "model", QWEN36, tensors | vision)
    report = audit_checkpoint(tmp_path / "model")
    report.check("model")
    assert (report.missing, report.unexpected, report.wrong) == ((), (), ())
    assert report.num_parameters == count_parameters(report.config) == 34_660_610_688
    assert len(report.tensors) == 693
    assert len(report.carried) == num_carried + len(vision) == num_carried + 333
    assert report.naming == Naming(
        prefix="model.language_model.", layout="fused", repeats_head=True
    )
    assert report.config.rotary_dim == 64


def test_the_30b_model_by_shape(tmp_path):
    """Qwen3-30B-A3B as on the hub, one tensor per expert."""
    D, F = 2048, 768
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (151936, D),
        "lm_head.weight": (151936, D),
        "model.norm.weight": (D,),
    }
    for i in range(48):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": (D,),
            layer + "post_attention_layernorm.weight": (D,),
            layer + "self_attn.q_proj.weight": (4096, D),
            layer + "self_attn.k_proj.weight": (512, D),
            layer + "self_attn.v_proj.weight": (512, D),
            layer + "self_attn.o_proj.weight": (D, 4096),
            layer + "self_attn.q_norm.weight": (128,),
            layer + "self_attn.k_norm.weight": (128,),
            layer + "mlp.gate.weight": (128, D),
        }
        for e in range(128):
            expert = f"{layer}mlp.experts.{e}."
            tensors[expert + "gate_proj.weight"] = tensors[expert + "up_proj.weight"] = (F, D)
            tensors[expert + "down_proj.weight"] = (D, F)
    assert len(tensors) == 18_867
    sparse_checkpoint(tmp_path / "model", QWEN3_30B, tensors)
    report = audit_checkpoint(tmp_path / "model")
    report.check("model")
    assert (report.missing, report.unexpected, report.carried) == ((), (), ())
    assert report.num_parameters == 30_532_122_624


def test_an_audit_names_what_is_wrong(tmp_path):
    tensors = hybrid_tensors(TEXT, "model.", "fused")
    del tensors["model.layers.0.linear_attn.A_log"]
    tensors["model.layers.3.self_attn.q_proj.weight"] = (32, 16)  # without its gate
    tensors["model.layers.3.linear_attn.dt_bias"] = (4,)  # of another kind of layer
    random_checkpoint(tmp_path / "model", TEXT, tensors)
    report = audit_checkpoint(tmp_path / "model")
    assert report.missing == ("model.layers.0.linear_attn.A_log",)
    assert report.unexpected == ("model.layers.3.linear_attn.dt_bias",)
    assert [str(fault) for fault in report.wrong] == [
        "shape of model.layers.3.self_attn.q_proj.weight: expected (64, 16), found (32, 16)"
    ]
    with pytest.raises(BadInputError, match="A_log"):
        report.check("model")


def test_only_the_family_that_has_vision_carries_it(tmp_path):
    shapes = {tensor.name: tensor.shape for tensor in file_tensors(MOE, Naming())}
    random_checkpoint(tmp_path / "model", MOE.to_hf(), shapes | VISION)
    with pytest.raises(BadInputError, match=r"also model\.visual"):
        load_checkpoint(tmp_path / "model")


def test_a_tokenizer_of_another_model_gives_only_its_files(tmp_path):
    random_checkpoint(tmp_path / "other", WRAPPED, {"x": (1,)})
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    params = nest({path: np.zeros(shape) for path, shape in parameter_shapes(MOE).items()})
    save_checkpoint(tmp_path / "out", MOE, params, copy_from=tmp_path / "other")
    assert load_config(tmp_path / "out") == MOE
    assert (tmp_path / "out" / "tokenizer.json").exists()


FLAT = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
ROPES = {
    "flat": FLAT,
    "rope_scaling": {"rope_scaling": {"type": "mrope", **FLAT}},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", **FLAT}},
}


@pytest.mark.parametrize("place", ROPES)
def test_rotary_keys_are_found_in_all_three_places(place):
    names = ("rope_theta", "partial_rotary_factor", "rope_parameters", "rope_scaling")
    text = {key: value for key, value in TEXT.items() if key not in names} | ROPES[place]
    config = ModelConfig.from_hf(WRAPPED | {"text_config": text})
    assert (config.rope_theta, config.rotary_dim) == (5e5, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_survives_config_json(family):
    config = FAMILIES[family]
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


BAD = {
    "other layers": ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
    "too few layers": ({"layer_types": [DELTANET]}, "for each of 5"),
    "no gate": ({"attn_output_gate": False}, "attn_output_gate: expected True"),
    "uneven heads": ({"linear_num_value_heads": 3}, "linear_num_value_heads: expected a multiple"),
    "no shared expert": ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
    "odd rotary part": (
        {"rope_parameters": {"partial_rotary_factor": 0.4}, "partial_rotary_factor": 0.4},
        "an even part of head_dim",
    ),
    "no convolution": ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_configs_without_a_path_here_are_refused(case):
    changes, sentence = BAD[case]
    with pytest.raises(BadInputError, match=sentence):
        ModelConfig.from_hf(WRAPPED | {"text_config": TEXT | changes})


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sliding_window": 4096}, "sliding_window: expected None, found 4096"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
    ],
)
def test_llamas_without_a_path_here_are_refused(family, changes, sentence):
    with pytest.raises(BadInputError, match=sentence):
        ModelConfig.from_hf(FAMILIES[family].to_hf() | changes)
