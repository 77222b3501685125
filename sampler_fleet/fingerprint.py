"""Which policy a checkpoint directory holds, whatever its precision: two short fingerprints.

Owns what counts as "the same model" and "the same tokenizer". Must not read weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError

# What shapes the function a checkpoint computes. Precision, library versions and training settings
# are left out, so that every converted form of one policy has one fingerprint.
_MODEL_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "rms_norm_eps",
)

# what reading JSON of another form than expected raises
_UNUSABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class CheckpointIdentity:
    """Fingerprints are the first 16 hex digits of a SHA-256."""

    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int


def fingerprint(data: bytes) -> str:
    """Of tokenizer.json as it is, or of a model's defining fields."""
    return hashlib.sha256(data).hexdigest()[:16]


def _canonical(config: dict[str, Any]) -> dict[str, Any]:
    """The defining fields, with what different writers leave out or name differently settled."""
    fields = {name: config.get(name) for name in _MODEL_FIELDS}
    rope = config.get("rope_parameters") or {}  # where newer writers keep the frequency base
    heads = config.get("num_attention_heads") or 1
    fields |= {
        "head_dim": config.get("head_dim") or (config.get("hidden_size") or 0) // heads,
        "hidden_act": config.get("hidden_act", "silu"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "num_experts": config.get("num_experts") or config.get("num_local_experts"),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    dense = (config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or [])
    if not fields["num_experts"] or dense != (1, []):  # else nothing has this size
        fields |= {"dense_layers": dense, "intermediate_size": config.get("intermediate_size")}
    return fields


def identify_checkpoint(directory: Path) -> CheckpointIdentity:
    """Reads config.json and tokenizer.json of a checkpoint directory.

    Raises:
        BadInputError: config.json is not a model configuration, or the tokenizer has more tokens
            than the model.
        FileNotFoundError: one of the two is missing.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
        vocab_size = int(config["vocab_size"])
        canonical = _canonical(config)
    except _UNUSABLE as error:
        raise BadInputError(
            str(path), expected="a model configuration with a vocab_size", found=repr(error)
        ) from None
    tokenizer = (directory / "tokenizer.json").read_bytes()
    num_tokens = _num_tokens(tokenizer, directory / "tokenizer.json")
    if num_tokens > vocab_size:
        raise BadInputError(
            f"tokenizer of {directory}",
            expected=f"at most {vocab_size} tokens, the model's vocabulary",
            found=num_tokens,
        )
    return CheckpointIdentity(
        model_fingerprint=fingerprint(json.dumps(canonical, sort_keys=True).encode()),
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocab_size=vocab_size,
    )


def _num_tokens(tokenizer: bytes, path: Path) -> int:
    """One more than the largest token id."""
    try:
        fields = json.loads(tokenizer)
        ids = [token["id"] for token in fields.get("added_tokens") or ()]
        vocabulary = (fields.get("model") or {}).get("vocab") or {}
        ids += vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + max(ids, default=-1)
    except _UNUSABLE as error:
        raise BadInputError(str(path), expected="a tokenizer", found=repr(error)) from None
