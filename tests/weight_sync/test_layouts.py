"""Storages and the configs that announce them, as the engines' readers take them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync import coding
from weight_sync.layouts import (
    LAYOUTS,
    RECIPES,
    Layout,
    Storage,
    choose_storage,
    detect,
    parts,
    quantization_config,
)
from weight_sync.modules import TensorClass, classify

STORAGES = [choose_storage(f, None, layout) for f, known in LAYOUTS.items() for layout in known]
BITS = (np.random.default_rng(0).standard_normal((256, 192)).astype(np.float32) * 0.05).view(
    np.uint32
) >> 16


def ids(storage: Storage) -> str:
    return f"{storage.format}-{storage.layout}"


@pytest.mark.parametrize("storage", STORAGES, ids=ids)
def test_a_config_names_its_storage(storage):
    found = detect(quantization_config(storage, ["lm_head"]))
    assert (found.format, found.layout) == (storage.format, storage.layout)


def test_power_of_two_scales_are_announced():
    storage = choose_storage(WeightFormat.FP8_BLOCK, "ue8m0", None)
    config = quantization_config(storage, [])
    assert config["scale_fmt"] == "ue8m0"
    assert detect(config) == storage
    assert "scale_fmt" not in quantization_config(choose_storage(storage.format, "f32", None), [])


@pytest.mark.parametrize("storage", STORAGES, ids=ids)
def test_the_coder_makes_the_parts_of_the_layout(storage):
    (arrays,) = coding.encode(storage, [BITS.astype(np.uint16)], ["x"])
    dtypes = {"U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32}
    expected = [(part.shape, np.dtype(dtypes[part.dtype])) for part in parts(storage, 256, 192)]
    assert [(array.shape, array.dtype) for array in arrays] == expected


@pytest.mark.parametrize("storage", STORAGES, ids=ids)
def test_decoded_matrices_are_within_their_bound_and_a_wrong_code_is_not(storage):
    bits = BITS.astype(np.uint16)
    x = (bits.astype(np.uint32) << 16).view(np.float32)
    (arrays,) = coding.encode(storage, [bits], ["x"])
    bound = coding.error_bound(storage, arrays, x) * np.float32(1.00001)
    assert (np.abs(coding.decode(storage, arrays) - x) <= bound).all()
    wrong = (arrays[0] ^ 0x70, *arrays[1:])
    assert not (np.abs(coding.decode(storage, wrong) - x) <= bound).all()


@pytest.mark.parametrize("recipe", ["modelopt", "4over6", "te", "ct"])
def test_compressed_tensors_divides_block_scales_by_the_inverse(recipe):
    """Against the formula of compressed-tensors' `dequantize`, in the test's own words."""
    storage = choose_storage(WeightFormat.NVFP4, recipe, Layout.COMPRESSED_TENSORS)
    (arrays,) = coding.encode(storage, [BITS.astype(np.uint16)], ["x"])
    packed, scale, inverse, activation = arrays
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([half, -half])
    elements = np.stack([values[packed & 15], values[packed >> 4]], -1).reshape(256, 12, 16)
    sf = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = elements * (sf / inverse)[..., None]
    np.testing.assert_array_equal(coding.decode(storage, arrays), expected.reshape(256, 192))
    assert activation == 1
    amax = np.abs((BITS << 16).view(np.float32)).max()
    np.testing.assert_allclose(inverse, 2688 / amax, rtol=2**-7 if recipe == "ct" else 2**-22)


def test_the_ct_recipe_stores_the_number_of_its_owner():
    golden = np.load(Path(__file__).parents[1] / "data" / "formats" / "golden.npz")
    storage = choose_storage(WeightFormat.NVFP4, "ct", Layout.COMPRESSED_TENSORS)
    for case in ("heavy", "edge", "allzero"):
        (arrays,) = coding.encode(storage, [golden[f"{case}/x"]], ["x"])
        for array, part in zip(arrays, ("packed", "scale", "global"), strict=False):
            np.testing.assert_array_equal(array, golden[f"{case}/ct/{part}"].reshape(array.shape))


def test_the_ct_recipe_stores_bf16_numbers():
    """llm-compressor computes its scale in the dtype of the weights."""
    storage = choose_storage(WeightFormat.NVFP4, "ct", Layout.COMPRESSED_TENSORS)
    for largest in range(0x3F80, 0x4000):  # all mantissas
        bits = np.full((1, 16), largest, np.uint16)
        ((_, _, inverse, _),) = coding.encode(storage, [bits], ["x"])
        assert not inverse.view(np.uint32) & 0xFFFF


def test_weights_whose_inverse_scale_overflows_are_refused():
    storage = choose_storage(WeightFormat.NVFP4, "modelopt", Layout.COMPRESSED_TENSORS)
    tiny = np.full((1, 16), 0x0080, np.uint16)  # 2^-126
    with pytest.raises(BadInputError, match=r"tensor w in compressed-tensors"):
        coding.encode(storage, [tiny], ["w"])


@pytest.mark.parametrize(
    "storage",
    [choose_storage(s.format, r, s.layout) for s in STORAGES for r in RECIPES[s.format] or (None,)],
    ids=lambda storage: f"{ids(storage)}-{storage.recipe}",
)
@pytest.mark.parametrize("magnitude", [0x7E80, 0x7F00, 0x7F40, 0x7F60, 0x7F70, 0x7F7E, 0x7F7F])
def test_what_is_encoded_decodes_to_finite_weights_or_is_refused_by_name(storage, magnitude):
    bits = np.full((32, 32), magnitude, np.uint16)
    try:
        (arrays,) = coding.encode(storage, [bits], ["w"])
    except BadInputError as error:
        assert str(error).startswith(f"tensor w in {storage.format}: expected weights whose codes")
        assert storage.recipe in ("ct", "ue8m0") or storage.format == WeightFormat.MXFP8
    else:
        assert np.isfinite(coding.decode(storage, arrays)).all()


@pytest.mark.parametrize(
    ("format", "recipe"),
    [(WeightFormat.MXFP8, None), (WeightFormat.FP8_BLOCK, "ue8m0"), (WeightFormat.NVFP4, "ct")],
)
def test_the_largest_weight_overflows_where_scales_are_rounded_up(format, recipe):
    for layout in LAYOUTS[format]:
        with pytest.raises(BadInputError, match=r"tensor w in .*decode to finite numbers"):
            coding.encode(
                choose_storage(format, recipe, layout),
                [np.full((32, 32), 0x7F7F, np.uint16)],
                ["w"],
            )


@pytest.mark.parametrize("recipe", RECIPES[WeightFormat.NVFP4])
def test_zeros_have_an_inverse_scale_of_1_as_compressed_tensors_has_it(recipe):
    storage = choose_storage(WeightFormat.NVFP4, recipe, Layout.COMPRESSED_TENSORS)
    (arrays,) = coding.encode(storage, [np.zeros((4, 32), np.uint16)], ["w"])
    assert arrays[2] == 1
    assert not coding.decode(storage, arrays).any()


@pytest.mark.parametrize(
    "config",
    [
        {},
        *(
            {"quant_method": "compressed-tensors", "config_groups": groups}
            for groups in ({"g": 5}, {"g": {"weights": 5}}, {"g": None}, [5])
        ),
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"g": {"weights": {"strategy": "tensor"}}},
        },
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "a": {"format": "nvfp4-pack-quantized", "weights": {}},
                "b": {"format": "float-quantized", "weights": {"strategy": "channel"}},
            },
        },
    ],
)
def test_another_quantization_is_refused(config):
    with pytest.raises(BadInputError, match="quantization_config"):
        detect(config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", TensorClass.EXPERTS),
        ("model.layers.0.mlp.experts.gate_up_proj", TensorClass.EXPERTS),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", TensorClass.SHARED_EXPERTS),
        ("model.layers.0.mlp.shared_expert_gate.weight", TensorClass.SHARED_EXPERTS),
        ("model.layers.0.mlp.gate.weight", TensorClass.ROUTERS),
        ("model.layers.0.mlp.gate_proj.weight", TensorClass.MLP),
        ("model.layers.0.self_attn.q_proj.bias", TensorClass.ATTENTION),
        ("model.layers.0.self_attn.q_norm.weight", TensorClass.NORMS),
        ("model.layers.0.post_attention_layernorm.weight", TensorClass.NORMS),
        ("model.norm.weight", TensorClass.NORMS),
        ("model.language_model.layers.0.linear_attn.A_log", TensorClass.LINEAR_ATTENTION),
        ("model.embed_tokens.weight", TensorClass.EMBEDDINGS),
        ("lm_head.weight", TensorClass.HEAD),
        ("mtp.layers.0.mlp.experts.0.up_proj.weight", TensorClass.MTP),
        ("model.visual.blocks.0.norm1.weight", TensorClass.VISION),
        ("model.rotary.inv_freq", TensorClass.OTHER),
    ],
)
def test_what_tensors_are(name, expected):
    assert classify(name) == expected
