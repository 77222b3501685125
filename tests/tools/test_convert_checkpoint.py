"""The converter's command line: what it shows, and one sentence with status 2 when it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from contracts.types import WeightFormat
from tests.weight_sync import tiny_moe
from tools import convert_checkpoint
from weight_sync import journal
from weight_sync.journal import resuming
from weight_sync.layouts import LAYOUTS, RECIPES
from weight_sync.safetensors_file import Checkpoint
from weight_sync.verify import TensorError


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


@pytest.mark.parametrize("format", list(WeightFormat))
def test_convert_and_verify(run, source, tmp_path, format):
    status, shown, _ = run(source, tmp_path / "out", "--format", format, "--verify")
    assert status == 0
    assert "convert" in shown and "verify" in shown
    assert ("largest relative error" in shown) == (format != "bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in config) == (format != "bf16")


@pytest.mark.parametrize(("format", "recipe"), [(f, r) for f, rs in RECIPES.items() for r in rs])
def test_every_recipe_verifies(run, source, tmp_path, format, recipe):
    target = tmp_path / "out"
    status, shown, _ = run(source, target, "--format", format, "--recipe", recipe, "--verify")
    assert (status, recipe in shown) == (0, True)


@pytest.mark.parametrize(
    ("format", "layout"), [(f, one) for f, all in LAYOUTS.items() for one in all]
)
def test_every_layout_there_and_back(run, source, tmp_path, format, layout):
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    status, shown, _ = run(source, quantized, "--format", format, "--layout", layout)
    assert (status, format in shown, f", {layout} layout:" in shown) == (0, True, True)
    arguments = ("--from", format, "--to", "bf16", "--dtype", "float32", "--verify")
    status, shown, _ = run(quantized, plain, *arguments)
    assert (status, f"{format}, {layout} layout, to float32:" in shown) == (0, True)
    config = json.loads((plain / "config.json").read_text())
    assert config == tiny_moe.CONFIG | {"dtype": "float32"}
    assert set(Checkpoint(plain).tensors) == set(tiny_moe.tensors())


def test_a_kill_while_the_result_is_verified_is_continued(run, source, tmp_path, monkeypatch):
    arguments = (source, tmp_path / "out", "--format", "nvfp4", "--verify")

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert_checkpoint, "compare", killed)
        assert run(*arguments)[0] == 130
    assert not (tmp_path / "out").exists()
    status, shown, _ = run(*arguments)
    assert (status, "continuing an interrupted run, all were done" in shown) == (0, True)
    assert "largest relative error" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_result_that_fails_its_verification_does_not_appear(run, source, tmp_path, monkeypatch):
    def failing(*arguments):
        yield [TensorError(name="w", relative_rms=1.0, share_of_bound=2.0)], 0

    with monkeypatch.context() as patch:
        patch.setattr(convert_checkpoint, "compare", failing)
        status, _, stderr = run(source, tmp_path / "out", "--format", "nvfp4", "--verify")
    assert status == 2 and "tensor w: expected errors within half a step" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_kill_after_the_rename_is_tidied_up_by_the_same_command(run, source, tmp_path):
    arguments = (source, tmp_path / "out", "--format", "nvfp4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "discard", lambda final: sys.exit(130))
        assert run(*arguments)[0] == 130
    status, shown, stderr = run(*arguments)
    assert (status, "all were done" in shown, stderr) == (0, True, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    status, _, stderr = run(*arguments)
    assert (status, "expected a new directory, found it exists" in stderr) == (2, True)


def test_a_full_disk_is_one_sentence_and_keeps_what_was_done(run, source, tmp_path, monkeypatch):
    arguments = (source, tmp_path / "out", "--format", "nvfp4")
    with monkeypatch.context() as patch:
        patch.setattr(convert_checkpoint, "compare", lambda *_: sys.exit(1))
        run(*arguments, "--verify")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=-(2**40)))
        status, _, stderr = run(*arguments)
    assert (status, stderr.count("\n")) == (2, 1)
    assert "MB free): the disk is full; free some space and run the same command again" in stderr
    status, shown, _ = run(*arguments)
    assert (status, "continuing an interrupted run" in shown) == (0, True)


@pytest.mark.parametrize("layout", LAYOUTS[WeightFormat.NVFP4])
@pytest.mark.parametrize("recipe", RECIPES[WeightFormat.NVFP4])
def test_an_expert_of_zeros_converts_and_verifies(run, tmp_path, recipe, layout):
    arrays = tiny_moe.tensors()
    for part in ("gate", "up", "down"):
        arrays[f"model.layers.0.mlp.experts.1.{part}_proj.weight"][:] = 0
    source = tiny_moe.write(tmp_path / "source", arrays)
    arguments = ("--format", "nvfp4", "--recipe", recipe, "--layout", layout, "--verify")
    assert run(source, tmp_path / "out", *arguments)[::2] == (0, "")


def test_a_dry_run_writes_nothing(run, source, tmp_path):
    assert run(source, tmp_path / "out", "--format", "nvfp4", "--dry-run")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_dry_run_shows_what_happens_to_each_kind_of_tensor(run, source, tmp_path):
    _, shown, _ = run(source, tmp_path / "out", "--format", "fp8-channel", "--dry-run")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    table = {(row[0], row[1]): row[2:] for row in rows if row}
    E, F, D, V = 4, 32, 64, 96
    experts = 2 * E * 3
    megabytes = [2 * experts * F * D / 1e6, (experts * F * D + 4 * 2 * E * (2 * F + D)) / 1e6]
    assert table["experts", "to fp8-channel"] == [str(experts), *(f"{x:.2f}" for x in megabytes)]
    assert table["attention", "to fp8-channel"][0] == "8"
    size = f"{2 * V * D / 1e6:.2f}"
    assert table["embeddings", "copy"] == table["lm_head", "copy"] == ["1", size, size]
    assert table["routers", "copy"][0] == "2" and table["norms", "copy"][0] == "3"
    assert len(table) == 6


def test_a_second_conversion_to_the_same_place_is_refused(run, source, tmp_path):
    with resuming(tmp_path / "out", "f"):
        status, _, stderr = run(source, tmp_path / "out", "--format", "nvfp4")
    assert (status, stderr.count("\n")) == (2, 1)
    assert "out: another conversion is writing it" in stderr


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
        (
            ["source", "out", "--format", "bf16", "--recipe", "te"],
            "--recipe: expected none for bf16",
        ),
        (["source", "out", "--format", "fp8-block", "--recipe", "te"], "expected f32 or ue8m0 for"),
        (["source", "out", "--format", "fp8-block", "--layout", "modelopt"], "layout of fp8-block"),
        (["source", "out", "--format", "bf16", "--layout", "modelopt"], "--layout: expected none"),
        (["source", "out", "--from", "mxfp8", "--to", "bf16"], "expected mxfp8, found bf16"),
        (["source", "out", "--to", "bf16", "--dtype", "float32"], "expected a quantized source"),
        (["gptq", "out", "--to", "bf16"], "found quant_method gptq"),
        (["lying", "out", "--to", "bf16"], "expected tensors named weight_scale, found none"),
        (["source", "out", "--format", "nvfp4", "--prompts", "afile"], "expected --verify with it"),
        (
            ["source", "out", "--format", "nvfp4", "--verify", "--prompts", "x"],
            "expected a text file",
        ),
        (
            ["source", "out", "--format", "nvfp4", "--verify", "--prompts", "afile"],
            "expected a tokenizer",
        ),
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
    quantizations = {
        "gptq": {"quant_method": "gptq"},
        "lying": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }
    for name, quantization in quantizations.items():
        config = tiny_moe.CONFIG | {"quantization_config": quantization}
        (tiny_moe.write(tmp_path / name) / "config.json").write_text(json.dumps(config))
    status, _, stderr = run(*arguments)
    assert status == 2
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert sentence in stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
