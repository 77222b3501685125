"""What the tensors of a model are, by their names alone.

Owns the naming of Qwen3-MoE, Qwen3.5/3.6-MoE and dense Llama-like checkpoints in both of Hugging
Face's forms, per expert and with the experts fused, and of Mixtral per expert (w1 is gate, w3 up,
w2 down); which architectures fuse experts in which order, and which modules engines run as one
matrix. Must not know formats.

Fused experts lie as [E, 2F, D], gate first, and [E, D, F] in checkpoints of FUSED_MODEL_TYPES
(transformers 5.x, conversion_mapping.py: experts are merged, never turned). Under the same names
qwen3_vl_moe has [E, D, 2F] and [E, F, D], and gpt_oss those with gate and up interleaved.

Fusions: `packed_modules_mapping` of sglang's qwen3_moe.py and qwen3_5.py and of vllm's qwen3_5.py;
for vision, sglang's qwen3_vl.py, which loads `attn.qkv` as `attn.qkv_proj`.
"""

from __future__ import annotations

import enum
import re

_LAYER = r"model\.(?:language_model\.)?layers\.\d+"
EXPERT = re.compile(
    rf"({_LAYER}\.(?:mlp\.experts\.\d+\.(?:gate|up|down)_proj"
    rf"|block_sparse_moe\.experts\.\d+\.w[123]))\.weight"
)
DOWN_PARTS = ("down_proj", "w2")  # of an expert: what leads back to the model's width
FUSED_EXPERTS = re.compile(rf"({_LAYER}\.mlp\.experts)\.(gate_up_proj|down_proj)")
FUSED_MODEL_TYPES = (
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
DENSE = re.compile(rf"({_LAYER}\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj))\.weight")

_ANY_EXPERTS = re.compile(r"(^|\.)(experts|block_sparse_moe)\.")

_ENGINE_FUSIONS = (
    (re.compile(r"(.*\.self_attn)\.[qkv]_proj"), "qkv_proj"),
    (re.compile(r"(.*\.mlp(?:\.shared_experts?)?)\.(?:gate|up)_proj"), "gate_up_proj"),
    (re.compile(r"(.*\.linear_attn)\.in_proj_(?:qkv|z)"), "in_proj_qkvz"),
    (re.compile(r"(.*\.linear_attn)\.in_proj_[ab]"), "in_proj_ba"),
    (re.compile(r"(.*visual\..*\.attn)\.qkv"), "qkv_proj"),
    (re.compile(r"(.*\.mlp\.experts)\.(?:\d+\.)?(?:gate|up|gate_up|down)_proj"), ""),
    (re.compile(r"(.*\.block_sparse_moe\.experts)\.\d+\.w[123]"), ""),
)
# Matrices that share one NVFP4 global scale, because engines keep one of the fused matrix.
_SHARED_SCALES = (
    (re.compile(r"(.*\.self_attn)\.[qkv]_proj"), "qkv_proj", 3),
    (re.compile(r"(.*\.mlp(?:\.experts\.\d+)?)\.(?:gate|up)_proj"), "gate_up_proj", 2),
    (re.compile(r"(.*\.block_sparse_moe\.experts\.\d+)\.w[13]"), "w13", 2),
)


class TensorClass(enum.StrEnum):
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared experts"
    ROUTERS = "routers"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear attention"
    MLP = "dense MLP"
    EMBEDDINGS = "embeddings"
    HEAD = "lm_head"
    NORMS = "norms"
    MTP = "multi-token prediction"
    VISION = "vision"
    OTHER = "other"


# The first that is found in a name decides.
_CLASSES = (
    (re.compile(r"(^|\.)(visual|vision_tower|vision_model)\."), TensorClass.VISION),
    (re.compile(r"(^|\.)mtp\."), TensorClass.MTP),
    (re.compile(r"norm(\.weight|\.bias)?$"), TensorClass.NORMS),
    (re.compile(r"(^|\.)embed_tokens\."), TensorClass.EMBEDDINGS),
    (re.compile(r"(^|\.)lm_head\."), TensorClass.HEAD),
    (re.compile(r"\.(mlp|block_sparse_moe)\.experts\."), TensorClass.EXPERTS),
    (re.compile(r"\.mlp\.shared_expert(s|_gate)?\."), TensorClass.SHARED_EXPERTS),
    (re.compile(r"\.(mlp|block_sparse_moe)\.gate\."), TensorClass.ROUTERS),
    (re.compile(r"\.linear_attn\."), TensorClass.LINEAR_ATTENTION),
    (re.compile(r"\.self_attn\."), TensorClass.ATTENTION),
    (re.compile(r"\.mlp\."), TensorClass.MLP),
)


def classify(name: str) -> TensorClass:
    """What a tensor belongs to."""
    found = (kind for pattern, kind in _CLASSES if pattern.search(name))
    return next(found, TensorClass.OTHER)


def has_experts(names: list[str]) -> bool:
    """Whether a model of these tensors is a mixture of experts."""
    return any(EXPERT.fullmatch(name) or FUSED_EXPERTS.fullmatch(name) for name in names)


def is_unknown_expert(name: str) -> bool:
    """Whether a tensor belongs to experts of the language model, but not under a name known here.

    Granite's `block_sparse_moe.input_linear`, Llama 4's `feed_forward.experts`, biases of experts
    and the like.
    """
    known = EXPERT.fullmatch(name) or FUSED_EXPERTS.fullmatch(name)
    kept = classify(name) in (TensorClass.MTP, TensorClass.VISION, TensorClass.ROUTERS)
    return not known and not kept and _ANY_EXPERTS.search(name) is not None


def fusion(module: str) -> str:
    """The name under which engines run a module, its own if it stays alone."""
    for pattern, fused in _ENGINE_FUSIONS:
        if match := pattern.fullmatch(module):
            return f"{match[1]}.{fused}" if fused else match[1]
    return module


def scale_group(module: str) -> tuple[str, int]:
    """Whose NVFP4 global scale a matrix has, and how many matrices that is."""
    for pattern, fused, size in _SHARED_SCALES:
        if match := pattern.fullmatch(module):
            return f"{match[1]}.{fused}", size
    return module, 1


def linear_module(name: str, num_dims: int) -> str | None:
    """The module of a tensor that a linear layer (or fused experts) multiplies with."""
    module, _, part = name.rpartition(".")
    if part in ("gate_up_proj", "down_proj") and module.endswith(".experts"):
        return module
    is_linear = part == "weight" and num_dims > 1 and not module.endswith("embed_tokens")
    return module if is_linear and module else None
