"""Small tokenizers with Qwen's control tokens, normalizer and pieces, and templates beside them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

TEMPLATES = Path(__file__).with_name("templates")

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|fim_prefix|>",
)  # control tokens that their files don't call special
PIECE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRESERVES = "(preserve_thinking is defined and preserve_thinking is true) or "


def template(name: str) -> str:
    """qwen3, qwen3.6, or qwen3.5: like 3.6, but it can't be asked to keep thoughts."""
    if name == "qwen3.5":
        text = (TEMPLATES / "qwen3.6.jinja").read_text()
        assert PRESERVES in text
        return text.replace(PRESERVES, "")
    return (TEMPLATES / f"{name}.jinja").read_text()


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [template("qwen3"), template("qwen3.6"), "ls.\n)\n" * 100]
    tokenizer.train_from_iterator(texts * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return tokenizer


def write_checkpoint(directory: Path, name: str, *, text: str | None = None) -> Path:
    """Tokenizer files as checkpoints have them; `text` stands for the template of that name."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template(name) if text is None else text)
    return directory
