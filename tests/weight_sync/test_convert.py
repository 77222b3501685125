"""Directories through the converter: content, determinism, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from tests.weight_sync import tiny_moe
from weight_sync import durable
from weight_sync.convert import Options, StoppedError, convert_directory, plan_directory
from weight_sync.formats import bf16, fp8, nvfp4
from weight_sync.safetensors_file import Checkpoint, Writer
from weight_sync.verify import compare

NVFP4, FP8, BF16 = WeightFormat.NVFP4, WeightFormat.FP8_BLOCK, WeightFormat.BF16
EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_moe.write(tmp_path / "source")


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read_bytes(directory: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.bytes_of(name).tobytes() for name in checkpoint.tensors}


def as_bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16)


def test_nvfp4_directory(source, tmp_path):
    convert_directory(source, tmp_path / "out", Options(format=NVFP4))
    before, after = tiny_moe.tensors(), read_bytes(tmp_path / "out")
    halves = {part: as_bits(before[f"{EXPERT}.{part}_proj.weight"]) for part in ("gate", "up")}
    shared = max(bf16.amax(bits, "x") for bits in halves.values())
    for part, bits in halves.items():
        expected = nvfp4.encode(bits, amax=shared, name="x")
        module = f"{EXPERT}.{part}_proj"
        assert after[f"{module}.weight"] == expected.packed.tobytes()
        assert after[f"{module}.weight_scale"] == expected.block_scale.tobytes()
        assert after[f"{module}.weight_scale_2"] == expected.global_scale.tobytes()
        assert after[f"{module}.input_scale"] == np.float32(1).tobytes()
    kept = "model.layers.1.self_attn.q_proj.weight"
    assert after[kept] == before[kept].tobytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_algo"] == "NVFP4"
    assert config == tiny_moe.CONFIG
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'


def test_fp8_directory(source, tmp_path):
    convert_directory(source, tmp_path / "out", Options(format=FP8))
    before, after = tiny_moe.tensors(), read_bytes(tmp_path / "out")
    for module in (f"{EXPERT}.down_proj", "model.layers.0.self_attn.o_proj"):
        expected = fp8.encode(as_bits(before[f"{module}.weight"]), name="x")
        assert after[f"{module}.weight"] == expected.codes.tobytes()
        assert after[f"{module}.weight_scale_inv"] == expected.scale_inv.tobytes()


def test_bf16_directory_is_the_source(source, tmp_path):
    convert_directory(source, tmp_path / "out", Options(format=BF16))
    assert read_bytes(tmp_path / "out") == read_bytes(source)


def test_float32_is_rounded_first(source, tmp_path):
    wide = {name: array.astype(np.float32) for name, array in tiny_moe.tensors().items()}
    tiny_moe.write(tmp_path / "wide", wide)
    for name in ("source", "wide"):
        convert_directory(tmp_path / name, tmp_path / f"{name}-4", Options(format=NVFP4))
    found, expected = read_bytes(tmp_path / "wide-4"), read_bytes(tmp_path / "source-4")
    module = f"{EXPERT}.up_proj.weight"
    assert found[module] == expected[module]


@pytest.mark.parametrize("format", [NVFP4, FP8])
def test_fused_sharded_and_threaded_give_the_same_tensors(source, tmp_path, format):
    arrays = tiny_moe.tensors()
    tiny_moe.write(tmp_path / "fused", tiny_moe.fuse(arrays))
    tiny_moe.write_sharded(tmp_path / "sharded", arrays)
    convert_directory(source, tmp_path / "out", Options(format=format))
    expected = read_bytes(tmp_path / "out")
    for name, threads in (("source", 3), ("fused", 1), ("sharded", 2)):
        target = tmp_path / f"{name}-out"
        convert_directory(tmp_path / name, target, Options(format=format, threads=threads))
        assert read_bytes(target) == expected
        assert (target / "model.safetensors.index.json").exists() == (name == "sharded")


def test_equal_input_gives_equal_files(source, tmp_path):
    for name in ("a", "b"):
        convert_directory(source, tmp_path / name, Options(format=NVFP4, threads=2))
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_the_index_names_the_shard_of_every_tensor(tmp_path):
    source = tiny_moe.write_sharded(tmp_path / "source", tiny_moe.tensors())
    convert_directory(source, tmp_path / "out", Options(format=NVFP4))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        # the library has no numpy type for E4M3, so only the names are asked of it
        names = {n for n, where in index["weight_map"].items() if where == file}
        assert names == set(load_names(tmp_path / "out" / file))
    sizes = sum(len(data) for data in read_bytes(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == sizes


def load_names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return list(file.keys())


def test_progress_adds_up_to_the_source(source, tmp_path):
    heard: list[int] = []
    convert_directory(source, tmp_path / "out", Options(format=NVFP4), on_progress=heard.append)
    assert sum(heard) == sum(array.nbytes for array in tiny_moe.tensors().values())


def only_source_remains(tmp_path: Path) -> bool:
    return [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("threads", [1, 2])
def test_nan_names_the_tensor_and_leaves_nothing(tmp_path, threads):
    arrays = tiny_moe.tensors()
    arrays[f"{EXPERT}.up_proj.weight"][3, 4] = np.nan
    source = tiny_moe.write(tmp_path / "source", arrays)
    with pytest.raises(BadInputError, match=rf"{EXPERT}\.up_proj\.weight.*1 NaN or infinite"):
        convert_directory(source, tmp_path / "out", Options(format=NVFP4, threads=threads))
    assert only_source_remains(tmp_path)


def test_a_stop_leaves_nothing(source, tmp_path):
    with pytest.raises(StoppedError):
        convert_directory(source, tmp_path / "out", Options(format=NVFP4), should_stop=lambda: True)
    assert only_source_remains(tmp_path)


def test_a_disk_that_fills_leaves_nothing(source, tmp_path, monkeypatch):
    def full(self, name, array):
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(Writer, "write", full)
    with pytest.raises(OSError, match="No space left"):
        convert_directory(source, tmp_path / "out", Options(format=NVFP4))
    assert only_source_remains(tmp_path)


def test_what_a_killed_conversion_left_is_removed_and_a_living_ones_is_not(source, tmp_path):
    with durable.staging(tmp_path / "out") as held:
        for name in (".out.0123abcd", ".doomed-0123abcd", ".out2.0123abcd", ".out.kept"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_bytes(b"half")
        convert_directory(source, tmp_path / "out", Options(format=NVFP4))
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"source", "out", held.name, ".out2.0123abcd", ".out.kept"}
    assert not held.exists()


def test_an_existing_destination_is_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(BadInputError, match="it exists"):
        convert_directory(source, tmp_path / "out", Options(format=NVFP4))


def test_a_directory_without_config_is_no_checkpoint(tmp_path):
    with pytest.raises(BadInputError, match=r"config\.json, found none"):
        plan_directory(tmp_path, Options(format=NVFP4))


@pytest.mark.parametrize("format", [NVFP4, FP8, BF16])
def test_verification_accepts_what_was_converted(source, tmp_path, format):
    plan = convert_directory(source, tmp_path / "out", Options(format=format))
    errors = list(compare(plan, Checkpoint(source), Checkpoint(tmp_path / "out")))
    flat = [error for batch, _ in errors for error in batch]
    assert all(error.share_of_bound <= 1 for error in flat)
    assert {e.relative_rms > 0.001 for e in flat} == (set() if format == BF16 else {True})


def test_verification_finds_a_wrong_code_and_a_wrong_copy(source, tmp_path):
    plan = convert_directory(source, tmp_path / "out", Options(format=NVFP4))
    converted = Checkpoint(tmp_path / "out")
    header = converted.tensors[f"{EXPERT}.up_proj.weight"]
    path = tmp_path / "out" / "model.safetensors"
    tiny_moe.write_corrupt(path, header.start)
    original = path.read_bytes()
    path.write_bytes(
        original[: header.start]
        + bytes(a ^ 0x77 for a in original[header.start : header.end])
        + original[header.end :]
    )
    worst = max(
        (
            error
            for batch, _ in compare(plan, Checkpoint(source), Checkpoint(tmp_path / "out"))
            for error in batch
        ),
        key=lambda error: error.share_of_bound,
    )
    assert worst.name == f"{EXPERT}.up_proj.weight"
    assert worst.share_of_bound > 1
    tiny_moe.write_corrupt(path, converted.tensors["lm_head.weight"].start)
    with pytest.raises(BadInputError, match=r"lm_head\.weight.*another byte at 0"):
        list(compare(plan, Checkpoint(source), Checkpoint(tmp_path / "out")))


def test_decoded_tensors_are_those_of_torch(source, tmp_path):
    """An independent decoder: torch's own E4M3, and a table of E2M1 pairs."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    convert_directory(source, tmp_path / "out", Options(format=NVFP4))
    stored = load_torch(tmp_path / "out" / "model.safetensors")
    module = f"{EXPERT}.gate_proj"
    packed = stored[f"{module}.weight"]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    elements = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1)
    scale = stored[f"{module}.weight_scale"].float() * stored[f"{module}.weight_scale_2"]
    decoded = elements.reshape(32, -1, 16) * scale[..., None]
    original = load_file(source / "model.safetensors")[f"{module}.weight"]
    assert original.dtype == ml_dtypes.bfloat16
    off = np.abs(decoded.reshape(32, 64).numpy() - original.astype(np.float32))
    assert off.max() <= scale.max().item() * 1.0001
    assert off.mean() < 0.1 * np.abs(original.astype(np.float32)).mean()
