"""A Qwen3-MoE checkpoint directory of a few hundred kilobytes, written without the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
}


def tensors(*, seed: int = 0, D: int = 64, F: int = 32, E: int = 4) -> dict[str, np.ndarray]:
    """Two layers with per-expert names, BF16."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)

    result = {
        "model.embed_tokens.weight": weight(96, D),
        "model.norm.weight": weight(D),
        "lm_head.weight": weight(96, D),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for part in "qkvo":
            result[f"{prefix}.self_attn.{part}_proj.weight"] = weight(D, D)
        result[f"{prefix}.input_layernorm.weight"] = weight(D)
        result[f"{prefix}.mlp.gate.weight"] = weight(E, D)
        for expert in range(E):
            for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
                result[f"{prefix}.mlp.experts.{expert}.{part}_proj.weight"] = weight(*shape)
    return result


def dense_tensors(*, D: int = 64, F: int = 128) -> dict[str, np.ndarray]:
    """Two layers of a Llama-like model, with a bias as Qwen2 has it and tied embeddings."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)

    result = {"model.embed_tokens.weight": weight(96, D), "model.norm.weight": weight(D)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for part, rows in (("q", D), ("k", D // 2), ("v", D // 2), ("o", D)):
            result[f"{prefix}.self_attn.{part}_proj.weight"] = weight(rows, D)
        result[f"{prefix}.self_attn.q_proj.bias"] = weight(D)
        result[f"{prefix}.input_layernorm.weight"] = weight(D)
        for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            result[f"{prefix}.mlp.{part}_proj.weight"] = weight(*shape)
    return result


def nudged(arrays: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """One unit in the last place of about 1 % of the weights, as an update of a policy is."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, array in arrays.items():
        bits = array.view(np.uint16).copy()
        bits[rng.random(bits.shape) < 0.01] += np.uint16(1)
        result[name] = bits.view(ml_dtypes.bfloat16)
    return result


def fuse(per_expert: dict[str, np.ndarray], E: int = 4) -> dict[str, np.ndarray]:
    """The same model with all experts of a projection in one tensor, gate before up."""
    fused = {name: array for name, array in per_expert.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"

        def part(name: str, expert: int, prefix: str = prefix) -> np.ndarray:
            return per_expert[f"{prefix}.{expert}.{name}_proj.weight"]

        fused[f"{prefix}.gate_up_proj"] = np.stack(
            [np.concatenate([part("gate", e), part("up", e)]) for e in range(E)]
        )
        fused[f"{prefix}.down_proj"] = np.stack([part("down", e) for e in range(E)])
    return fused


def write(directory: Path, arrays: dict[str, np.ndarray] | None = None, *, seed: int = 0) -> Path:
    """One safetensors file, config.json and a tokenizer file."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays = tensors(seed=seed) if arrays is None else arrays
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return directory


def write_sharded(directory: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Every second tensor in the other shard, so that gate and up are apart."""
    write(directory, arrays)
    (directory / "model.safetensors").unlink()
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: files[i % 2] for i, name in enumerate(sorted(arrays))}
    for file in files:
        chosen = {name: arrays[name] for name, where in weight_map.items() if where == file}
        save_file(chosen, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_corrupt(path: Path, offset: int = -1) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
