"""What a policy is (`ModelConfig`: Qwen3, Llama and their mixtures) and how it is computed.

Owns the reading and writing of config.json's keys. Must not import jax: tools read a
checkpoint's shape without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from contracts.errors import BadInputError
from contracts.runfile import Section

Family = Literal["qwen3", "qwen3_moe", "qwen3_5_moe", "llama", "mixtral"]
ATTENTION, DELTANET = "full_attention", "linear_attention"  # as config.json's layer_types say it

# model_type -> family; a vision-language wrapper holds the text model in text_config
_FAMILIES: dict[Any, Family] = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "llama": "llama",
    "mixtral": "mixtral",
}
_WRAPPED = "qwen3_5_moe"
# family -> architecture and model_type that a checkpoint made here has
_WRITTEN: dict[Family, tuple[str, str]] = {
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
}
_LLAMAS = ("llama", "mixtral")  # no norms of queries and keys; a sliding window has no other switch
# config.json keys that would change the maths and that this model has no path for: key -> accepted
_REQUIRED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "attn_output_gate": (True,),  # known of qwen3_5_moe only, which always has it
}
# what every family needs, and what each needs beside it
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_SIZES_OF: dict[Family, tuple[str, ...]] = {
    "qwen3": ("intermediate_size",),
    "qwen3_moe": _EXPERT_SIZES,
    "qwen3_5_moe": (*_EXPERT_SIZES, "shared_expert_intermediate_size"),
    "llama": ("intermediate_size",),
    "mixtral": _EXPERT_SIZES,
}
_LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a policy. Field names are those of Qwen's config.json where it has them.

    Sizes that a family does not have are 0. `layer_types` is empty where all layers are attention.
    """

    model_type: Family = "qwen3_moe"
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    intermediate_size: int = 0  # of a feed-forward network without experts
    shared_expert_intermediate_size: int = 0
    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    tie_word_embeddings: bool = False
    rope_theta: float = 1e6
    partial_rotary_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """ATTENTION or DELTANET for every layer."""
        return self.layer_types or (ATTENTION,) * self.num_hidden_layers

    @property
    def mlp_size(self) -> int:
        """Width of the feed-forward network that sees every token: the only one, or the shared."""
        return self.shared_expert_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def gated_attention(self) -> bool:
        return self.model_type == "qwen3_5_moe"

    @property
    def norms_queries(self) -> bool:
        """Whether each head's queries and keys are normed before they are rotated."""
        return self.model_type not in _LLAMAS

    @property
    def norms_around_one(self) -> bool:
        """Whether norms multiply by 1 + weight, in float32."""
        return self.model_type == "qwen3_5_moe"

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def __post_init__(self) -> None:
        if self.model_type not in _SIZES_OF:
            raise BadInputError(
                "model model_type", expected=", ".join(_SIZES_OF), found=self.model_type
            )
        if not isinstance(self.head_dim, int) or self.head_dim < 2 or self.head_dim % 2:
            raise BadInputError(
                "model head_dim",
                expected="an even number (rotary pairs)",
                found=repr(self.head_dim),
            )
        linear = _LINEAR_SIZES if DELTANET in self.layer_types else ()
        for name in (*_SIZES, *_SIZES_OF[self.model_type], *linear):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BadInputError(f"model {name}", expected="an integer >= 1", found=repr(value))
        for name in ("rope_theta", "partial_rotary_factor", "rms_norm_eps", "initializer_range"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            may_be_zero = name == "initializer_range"
            if not is_number or not 0 <= value < math.inf or (value == 0 and not may_be_zero):
                bound = ">= 0" if may_be_zero else "> 0"
                raise BadInputError(
                    f"model {name}", expected=f"a number {bound}", found=repr(value)
                )
        self._check_relations(bool(linear))

    def _check_relations(self, linear: bool) -> None:
        _check_multiple(self, "num_attention_heads", "num_key_value_heads")
        if linear:
            _check_multiple(self, "linear_num_value_heads", "linear_num_key_heads")
        if self.num_experts_per_tok > self.num_experts:
            raise BadInputError(
                "model num_experts_per_tok",
                expected=f"<= num_experts ({self.num_experts})",
                found=self.num_experts_per_tok,
            )
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise BadInputError(
                "model partial_rotary_factor",
                expected=f"an even part of head_dim ({self.head_dim})",
                found=self.partial_rotary_factor,
            )
        known = {ATTENTION, DELTANET} if self.model_type == "qwen3_5_moe" else {ATTENTION}
        if len(self.kinds) != self.num_hidden_layers or not set(self.kinds) <= known:
            raise BadInputError(
                "model layer_types",
                expected=f"{' or '.join(sorted(known))} for each of {self.num_hidden_layers}",
                found=", ".join(map(str, self.kinds)),
            )

    @staticmethod
    def from_hf(data: dict[str, Any]) -> ModelConfig:
        """From the keys of a config.json, as the hub or transformers 4 and 5 write them.

        Raises:
            BadInputError: another architecture, a missing key, or a feature without a path here.
        """
        if not isinstance(data, dict):
            raise BadInputError("config.json", expected="an object", found=type(data).__name__)
        found = data.get("model_type")
        family = _FAMILIES.get(found) if isinstance(found, str) else None
        if family is None:
            raise BadInputError(
                "config.json model_type", expected=" or ".join(_FAMILIES), found=found
            )
        data = _text_config(data)
        required = _REQUIRED | ({"sliding_window": (None,)} if family in _LLAMAS else {})
        for key, accepted in required.items():
            if key in data and data[key] not in accepted:
                raise BadInputError(f"config.json {key}", expected=accepted[0], found=data[key])
        for key in ("tie_word_embeddings", "norm_topk_prob"):
            if not isinstance(data.get(key, False), bool):
                raise BadInputError(
                    f"config.json {key}", expected="true or false", found=repr(data[key])
                )
        data |= _rope(data, family) | {"model_type": family}
        data["norm_topk_prob"] = family != "qwen3_moe" or data.get("norm_topk_prob", False)
        if "num_local_experts" in data:
            data.setdefault("num_experts", data["num_local_experts"])
        if family == "mixtral":
            data["moe_intermediate_size"] = data.get("intermediate_size")
        if isinstance(data.get("eos_token_id"), list):
            data["eos_token_id"] = tuple(data["eos_token_id"])
        names = [field.name for field in fields(ModelConfig)]
        try:
            data["layer_types"] = _layer_types(data, family)
            if not data.get("head_dim") and data.get("num_attention_heads"):
                data["head_dim"] = data.get("hidden_size", 0) // data["num_attention_heads"]
            known = {name: data[name] for name in names if name in data}
            if "intermediate_size" not in _SIZES_OF[family]:
                known.pop("intermediate_size", None)  # of dense layers; there are none
            return ModelConfig(**known)
        except (TypeError, ArithmeticError) as error:  # a key is absent, or of the wrong kind
            raise BadInputError(
                "config.json", expected=f"the keys of {family}", found=str(error)
            ) from None

    def to_hf(self) -> dict[str, Any]:
        """The keys of a config.json that transformers 4 and 5 and SGLang read."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("eos_token_id", "layer_types"):
            if isinstance(own[name], tuple):
                own[name] = list(own[name])
        if self.num_experts:
            own["intermediate_size"] = self.moe_intermediate_size  # of dense layers; none here
            if self.model_type == "mixtral":  # other words for the same
                own["num_local_experts"] = own.pop("num_experts")
                del own["moe_intermediate_size"], own["norm_topk_prob"]
                own["sliding_window"] = None
            else:
                own |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
        else:
            for name in (*_EXPERT_SIZES, "norm_topk_prob"):
                del own[name]
        if self.model_type == "qwen3_5_moe":
            own["layer_types"] = list(self.kinds)
            own["attn_output_gate"] = True
            rope = {name: own[name] for name in ("rope_theta", "partial_rotary_factor")}
            own["rope_parameters"] = {"rope_type": "default", **rope}
        else:
            own["rope_scaling"] = None
            for name in ("layer_types", "partial_rotary_factor", "shared_expert_intermediate_size"):
                del own[name]
            for name in _LINEAR_SIZES:
                del own[name]
        architecture, model_type = _WRITTEN[self.model_type]
        return {
            **own,
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "dtype": "bfloat16",
            "use_cache": True,
        }


def _check_multiple(config: ModelConfig, name: str, of: str) -> None:
    if getattr(config, name) % getattr(config, of):
        raise BadInputError(
            f"model {name}",
            expected=f"a multiple of {of} ({getattr(config, of)})",
            found=getattr(config, name),
        )


def _text_config(data: dict[str, Any]) -> dict[str, Any]:
    """The language model's keys; of a wrapper, with its own word on tied embeddings."""
    if data["model_type"] != _WRAPPED or "text_config" not in data:
        return dict(data)
    text = data["text_config"]
    if not isinstance(text, dict):
        raise BadInputError("config.json text_config", expected="an object", found=repr(text))
    return {**text, "tie_word_embeddings": data.get("tie_word_embeddings", False)}


def _rope(data: dict[str, Any], family: Family) -> dict[str, Any]:
    """Rotary keys, which lie flat, in rope_scaling or (transformers 5) in rope_parameters."""
    # sections of positions in time and space, which are the same number for text
    accepted = ("default", "mrope") if family == "qwen3_5_moe" else ("default",)
    values = {
        "rope_theta": 1e6 if family == "mixtral" else 1e4,
        "partial_rotary_factor": 0.25 if family == "qwen3_5_moe" else 1.0,
    }
    said: dict[str, Any] = {}
    for place in ("rope_parameters", "rope_scaling", ""):
        rope = (data.get(place) or {}) if place else data
        if not isinstance(rope, dict):
            raise BadInputError(f"config.json {place}", expected="an object", found=repr(rope))
        if place and any(isinstance(value, dict) for value in rope.values()):
            raise BadInputError(
                f"config.json {place}", expected="one for all layers", found=", ".join(rope)
            )
        kind = rope.get("rope_type", rope.get("type", "default")) if place else "default"
        if kind not in accepted:
            raise BadInputError("config.json rope_type", expected="default", found=kind)
        for key in values.keys() & rope.keys():
            if said.setdefault(key, rope[key]) != rope[key]:
                raise BadInputError(f"config.json {key}", expected=said[key], found=rope[key])
    return values | said


def _layer_types(data: dict[str, Any], family: Family) -> tuple[str, ...]:
    """As given, else derived; empty where all are attention."""
    types = data.get("layer_types")
    if types is None and family == "qwen3_5_moe":
        interval = data.get("full_attention_interval", 4)
        num_layers = data.get("num_hidden_layers", 0)
        types = [DELTANET if (i + 1) % interval else ATTENTION for i in range(num_layers)]
    types = tuple(types or ())
    return () if types == (ATTENTION,) * data.get("num_hidden_layers", 0) else types


class ComputeConfig(Section):
    """How the forward pass is computed. Hashable: a static argument of jitted functions.

    `round_weights` makes the forward pass use the weights rounded to BF16, as they are published
    to the samplers, while the gradient goes straight through to the float32 master weights.
    `quantize_experts` goes on from there to what samplers of that format compute with.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    round_weights: bool = False
    quantize_experts: Literal["none", "nvfp4", "fp8-block"] = "none"
    remat: bool = False
    ffn: Literal["auto", "blocks", "dense", "tokamax"] = "auto"
    # of tokens, where experts are split
    dispatch: Literal["auto", "gather", "all-to-all", "ragged"] = "gather"
