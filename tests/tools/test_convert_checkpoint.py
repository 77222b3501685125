"""The converter's command line: what it shows, and one sentence with status 2 when it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.weight_sync import tiny_moe
from tools import convert_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_moe.write(tmp_path / "source")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the tool; returns its exit status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            convert_checkpoint.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.parametrize("format", ["nvfp4", "fp8-block", "bf16"])
def test_convert_and_verify(run, source, tmp_path, format):
    status, shown, _ = run(source, tmp_path / "out", "--format", format, "--verify")
    assert status == 0
    assert "convert" in shown and "verify" in shown
    assert ("largest relative error" in shown) == (format != "bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in config) == (format != "bf16")


@pytest.mark.parametrize("recipe", ["modelopt", "4over6", "te", "ct"])
def test_every_recipe_verifies(run, source, tmp_path, recipe):
    target = tmp_path / "out"
    status, shown, _ = run(source, target, "--format", "nvfp4", "--recipe", recipe, "--verify")
    assert (status, recipe in shown) == (0, True)


def test_a_dry_run_writes_nothing(run, source, tmp_path):
    status, shown, _ = run(source, tmp_path / "out", "--format", "nvfp4", "--dry-run")
    assert status == 0
    assert "nvfp4" in shown and "copy" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("flag", ["--format", "--recipe"])
def test_a_wrong_choice_is_told_the_right_ones(run, source, tmp_path, flag):
    status, _, stderr = run(source, tmp_path / "out", "--format", "bf16", flag, "int3")
    assert status == 2
    assert ("nvfp4" if flag == "--format" else "modelopt") in stderr and "<" not in stderr


def test_what_need_not_be_named_to_be_ignored_may_be(run, source, tmp_path):
    globs = ("--ignore", "lm_head", "--ignore", "*.self_attn.*", "--ignore", "*.experts.*")
    assert run(source, tmp_path / "out", "--format", "fp8-block", "--dry-run", *globs[:4])[0] == 0
    status, _, stderr = run(source, tmp_path / "out", "--format", "bf16", "--dry-run", *globs)
    assert (status, stderr) == (0, "")


def test_ignored_modules_stay(run, source, tmp_path):
    target = tmp_path / "out"
    status, _, _ = run(source, target, "--format", "fp8-block", "--ignore", "*.self_attn.*")
    assert status == 0
    config = json.loads((target / "config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.self_attn.qkv_proj" in kept


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["source", "source", "--format", "nvfp4"], "source: expected a new directory, found it"),
        (["source", "afile/x", "--format", "nvfp4"], "afile: expected a directory, found a file"),
        (["source", "afile/x/y", "--format", "nvfp4"], "afile: expected a directory, found a file"),
        (["source", "dangling", "--format", "nvfp4"], "found a link to nowhere, where nothing is"),
        (["source", "out", "--format", "nvfp4", "--ignore", "zzz*"], "--ignore: expected globs"),
        (["nowhere", "out", "--format", "nvfp4"], "config.json"),
        (["source", "out", "--format", "bf16", "--recipe", "te"], "--recipe: expected"),
        (["source", "out", "--format", "nvfp4", "--threads", "0"], "--threads: expected"),
        (["source", "out", "--format", "nvfp4", "--ignore", "*.up_proj"], "all parts of"),
        (["damaged", "out", "--format", "nvfp4"], "whole safetensors file"),
        (["narrow", "out", "--format", "nvfp4"], "multiples of 16"),
    ],
)
def test_refusals(run, source, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    damaged = tiny_moe.write(tmp_path / "damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    tiny_moe.write(tmp_path / "narrow", tiny_moe.tensors(F=24))
    status, _, stderr = run(*arguments)
    assert status == 2
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert sentence in stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
