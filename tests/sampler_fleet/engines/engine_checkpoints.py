"""Small random checkpoints in every format, written by slow encoders of the tests' own."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file

from contracts.types import FileEntry, Manifest, TensorEntry, WeightFormat

CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
MIXTRAL = {
    key: value
    for key, value in CONFIG.items()
    if key not in ("num_experts", "moe_intermediate_size", "norm_topk_prob")
} | {"model_type": "mixtral", "num_local_experts": 4, "architectures": ["MixtralForCausalLM"]}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Tensors = dict[str, torch.Tensor]


def random_tensors(config: dict = CONFIG, seed: int = 0, scale: float = 4.0) -> Tensors:
    """BF16 tensors with Hugging Face names; `scale` 4 gives distributions far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], c["hidden_size"]),
        "model.norm.weight": (c["hidden_size"],),
        "lm_head.weight": (c["vocab_size"], c["hidden_size"]),
    }
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        queries = c["num_attention_heads"] * c["head_dim"]
        keys = c["num_key_value_heads"] * c["head_dim"]
        shapes |= {
            f"{layer}.input_layernorm.weight": (c["hidden_size"],),
            f"{layer}.post_attention_layernorm.weight": (c["hidden_size"],),
            f"{attention}.q_proj.weight": (queries, c["hidden_size"]),
            f"{attention}.k_proj.weight": (keys, c["hidden_size"]),
            f"{attention}.v_proj.weight": (keys, c["hidden_size"]),
            f"{attention}.o_proj.weight": (c["hidden_size"], queries),
        }
        if is_mixtral := c["model_type"] == "mixtral":
            num, ffn = c["num_local_experts"], c["intermediate_size"]
            block, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
        else:
            num, ffn = c["num_experts"], c["moe_intermediate_size"]
            block, names = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
        norms = () if is_mixtral else ("q_norm", "k_norm")
        shapes |= {f"{attention}.{norm}.weight": (c["head_dim"],) for norm in norms}
        shapes[f"{block}.gate.weight"] = (num, c["hidden_size"])
        for e in range(num):
            sizes = [(ffn, c["hidden_size"])] * 2 + [(c["hidden_size"], ffn)]
            for name, size in zip(names, sizes, strict=True):
                shapes[f"{block}.experts.{e}.{name}.weight"] = size
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            x = 1 + 0.2 * x
        elif name != "model.embed_tokens.weight":
            x *= (scale if name == "lm_head.weight" else 1.5) / shape[1] ** 0.5
        tensors[name] = x.bfloat16()
    return tensors


def nvfp4_slow(weight: torch.Tensor) -> tuple[np.ndarray, torch.Tensor, np.float32]:
    """Packed codes, E4M3 block scales and the tensor's scale; codes by search."""
    w = weight.float().numpy()
    num_rows, num_columns = w.shape
    scale_2 = np.float32(np.abs(w).max() / 2688)
    packed = np.zeros((num_rows, num_columns // 2), np.uint8)
    scales = torch.zeros(num_rows, num_columns // 16)
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # so that a tie goes to the even code
    for row in range(num_rows):
        for block in range(num_columns // 16):
            x = w[row, 16 * block : 16 * block + 16]
            ideal = torch.tensor(np.abs(x).max() / (6 * scale_2)).clamp(2.0**-9, 448)
            scale = scales[row, block] = ideal.to(torch.float8_e4m3fn).float()
            size = np.abs(x) / (float(scale) * scale_2)
            far = np.abs(size[:, None] - np.array(E2M1)[even_first])
            codes = even_first[far.argmin(1)] + 8 * (x < 0)
            packed[row, 8 * block : 8 * block + 8] = codes[0::2] + 16 * codes[1::2]
    return packed, scales.to(torch.float8_e4m3fn), scale_2


def fp8_slow(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and one float32 multiplier per 128 x 128 block."""
    w = weight.float()
    scale = torch.zeros(-(-w.shape[0] // 128), -(-w.shape[1] // 128))
    codes = torch.zeros(w.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = w[here].abs().max() / 448
            codes[here] = w[here] / scale[i, j]
    return codes.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def fp8_channel_slow(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and one float32 multiplier per row."""
    w = weight.float()
    scale = torch.stack([row.abs().max() / 448 for row in w]).unsqueeze(1)
    return (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def mxfp8_slow(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and the exponent plus 127 of one power of two per row and 32 columns."""
    w = weight.float().unflatten(1, (-1, 32))
    exponent = torch.ceil(torch.log2(w.abs().amax(-1, keepdim=True) / 448))
    codes = (w / torch.exp2(exponent)).to(torch.float8_e4m3fn).flatten(1)
    return codes, (exponent + 127).to(torch.uint8).squeeze(-1)


_FP8_SLOW = {
    WeightFormat.FP8_BLOCK: (fp8_slow, "weight_scale_inv"),
    WeightFormat.FP8_CHANNEL: (fp8_channel_slow, "weight_scale"),
    WeightFormat.MXFP8: (mxfp8_slow, "weight_scale_inv"),
}


def convert_slow(tensors: Tensors, format: WeightFormat) -> Tensors:
    """NVFP4: the experts; FP8: all linear modules but the router and the head."""
    converted: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        expert = ".experts." in name
        if format == WeightFormat.NVFP4 and expert:
            packed, scale, scale_2 = nvfp4_slow(tensor)
            converted[name] = torch.from_numpy(packed)
            converted[f"{module}.weight_scale"] = scale
            converted[f"{module}.weight_scale_2"] = torch.tensor(scale_2)
            converted[f"{module}.input_scale"] = torch.tensor(1.0)
        elif format in _FP8_SLOW and (expert or module.endswith("_proj")):
            convert, scale_name = _FP8_SLOW[format]
            converted[name], converted[f"{module}.{scale_name}"] = convert(tensor)
        else:
            converted[name] = tensor
    return converted


def write_checkpoint(
    directory: Path,
    *,
    tensors: Tensors | None = None,
    config: dict = CONFIG,
    format: WeightFormat = WeightFormat.BF16,
    version: int = 1,
) -> Manifest:
    """A checkpoint directory of the format, and its manifest. `tensors` are BF16 ones."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config) if tensors is None else tensors
    (directory / "config.json").write_text(json.dumps(config))
    save_file(convert_slow(tensors, format), directory / "model.safetensors", {"format": "pt"})
    return manifest_of(directory, format=format, version=version)


def manifest_of(directory: Path, *, format: WeightFormat, version: int) -> Manifest:
    """What the weight service says of a directory with one safetensors file."""
    data = (directory / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries = []
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            entries.append(
                TensorEntry(
                    name=name,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    file="model.safetensors",
                    start=start,
                    end=end,
                    checksum=xxhash.xxh3_128_hexdigest(data[start:end]),
                )
            )
    files = tuple(
        FileEntry(
            name=path.name,
            num_bytes=path.stat().st_size,
            checksum=xxhash.xxh3_128_hexdigest(path.read_bytes()),
        )
        for path in sorted(directory.iterdir())
    )
    return Manifest(version=version, format=format, files=files, tensors=tuple(entries))
