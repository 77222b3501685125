"""What a Qwen3-MoE is (`ModelConfig`) and how it is computed (`ComputeConfig`).

Owns the reading and writing of config.json's keys. Must not import jax: tools read a
checkpoint's shape without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from contracts.errors import BadInputError
from contracts.runfile import Section

# config.json keys that would change the maths and that this model has no path for: key -> accepted
_REQUIRED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a Qwen3-MoE. Field names are those of config.json where it has them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BadInputError(f"model {name}", expected="an integer >= 1", found=repr(value))
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise BadInputError(f"model {name}", expected="a number >= 0", found=repr(value))
        if self.num_attention_heads % self.num_key_value_heads:
            raise BadInputError(
                "model num_attention_heads",
                expected=f"a multiple of num_key_value_heads ({self.num_key_value_heads})",
                found=self.num_attention_heads,
            )
        if self.num_experts_per_tok > self.num_experts:
            raise BadInputError(
                "model num_experts_per_tok",
                expected=f"<= num_experts ({self.num_experts})",
                found=self.num_experts_per_tok,
            )
        if not isinstance(self.head_dim, int) or self.head_dim < 2 or self.head_dim % 2:
            raise BadInputError(
                "model head_dim",
                expected="an even number (rotary pairs)",
                found=repr(self.head_dim),
            )

    @staticmethod
    def from_hf(data: dict[str, Any]) -> ModelConfig:
        """From the keys of a config.json, as the hub or transformers 4 and 5 write them.

        Raises:
            BadInputError: another architecture, a missing key, or a feature without a path here.
        """
        if not isinstance(data, dict):
            raise BadInputError("config.json", expected="an object", found=type(data).__name__)
        if data.get("model_type") != "qwen3_moe":
            raise BadInputError(
                "config.json model_type", expected="qwen3_moe", found=data.get("model_type")
            )
        for key, accepted in _REQUIRED.items():
            if key in data and data[key] not in accepted:
                raise BadInputError(f"config.json {key}", expected=accepted[0], found=data[key])
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise BadInputError("config.json rope_scaling", expected="an object", found=repr(rope))
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise BadInputError("config.json rope_type", expected="default", found=kind)
        data = {"norm_topk_prob": False, **data}  # the default of transformers, not ours
        data.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        if "num_local_experts" in data:
            data.setdefault("num_experts", data["num_local_experts"])
        if isinstance(data.get("eos_token_id"), list):
            data["eos_token_id"] = tuple(data["eos_token_id"])
        names = [field.name for field in fields(ModelConfig)]
        try:
            if not data.get("head_dim") and data.get("num_attention_heads"):
                data["head_dim"] = data.get("hidden_size", 0) // data["num_attention_heads"]
            known = {name: data[name] for name in names if name in data}
            return ModelConfig(**known)
        except TypeError as error:  # a required key is absent, or of the wrong kind
            raise BadInputError(
                "config.json", expected="the keys of qwen3_moe", found=str(error)
            ) from None

    def to_hf(self) -> dict[str, Any]:
        """The keys of a config.json that transformers 4 and 5 and SGLang read."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own["eos_token_id"] = (
            list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id
        )
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "intermediate_size": self.moe_intermediate_size,  # of dense layers; there are none
            "rope_scaling": None,
            "dtype": "bfloat16",
            "use_cache": True,
            **own,
        }


class ComputeConfig(Section):
    """How the forward pass is computed. Hashable: a static argument of jitted functions.

    `round_weights` makes the forward pass use the weights rounded to BF16, as they are published
    to the samplers, while the gradient goes straight through to the float32 master weights.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    round_weights: bool = False
    remat: bool = False
    ffn: Literal["auto", "blocks", "dense"] = "auto"
