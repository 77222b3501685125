"""Fingerprints of directories that hold no checkpoint: one sentence each."""

from __future__ import annotations

import pytest

from contracts.errors import BadInputError
from sampler_fleet.fingerprint import identify_checkpoint

CONFIG, TOKENIZER = b'{"vocab_size": 9}', b'{"model": {"vocab": {"a": 0}}}'


@pytest.mark.parametrize(
    ("config", "tokenizer", "file"),
    [
        (b"\xff", TOKENIZER, "config"),
        (b"[1]", TOKENIZER, "config"),
        (b'{"vocab_size": "many"}', TOKENIZER, "config"),
        (b'{"vocab_size": 9, "rope_parameters": "yarn"}', TOKENIZER, "config"),
        (b'{"vocab_size": 9, "num_attention_heads": "4"}', TOKENIZER, "config"),
        (CONFIG, b"\xff", "tokenizer"),
        (CONFIG, b"[1]", "tokenizer"),
        (CONFIG, b'{"model": {"vocab": {"a": "b"}}}', "tokenizer"),
        (CONFIG, b'{"added_tokens": [1]}', "tokenizer"),
    ],
)
def test_unusable_files_are_named(tmp_path, config, tokenizer, file) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    assert identify_checkpoint(tmp_path).vocab_size == 9
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    with pytest.raises(BadInputError, match=rf"{file}\.json: expected a .*, found "):
        identify_checkpoint(tmp_path)
