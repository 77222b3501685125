"""Checkpoints that must be refused, each with a sentence that names what is wrong."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from sampler_fleet.engines.checkpoint import Checkpoint
from sampler_fleet.engines.model import MixtureModel
from sampler_fleet.engines.precision import Precision
from tests.sampler_fleet.engines.engine_checkpoints import (
    CONFIG,
    manifest_of,
    random_tensors,
    write_checkpoint,
)

EXPERT = "model.layers.1.mlp.experts.3.down_proj"


def load(directory, manifest):
    return MixtureModel(Checkpoint.read(directory, manifest), Precision())


def without(manifest, name):
    return dataclasses.replace(
        manifest, tensors=tuple(entry for entry in manifest.tensors if entry.name != name)
    )


def changed(manifest, name, **changes):
    return dataclasses.replace(
        manifest,
        tensors=tuple(
            dataclasses.replace(entry, **changes) if entry.name == name else entry
            for entry in manifest.tensors
        ),
    )


@pytest.mark.parametrize("format", list(WeightFormat))
def test_every_byte_is_under_a_checksum(tmp_path, format):
    manifest = write_checkpoint(tmp_path, format=format, version=3)
    assert load(tmp_path, manifest).version == 3
    path = tmp_path / "model.safetensors"
    good = path.read_bytes()
    for entry in manifest.tensors[:: max(1, len(manifest.tensors) // 20)]:
        data = bytearray(good)
        data[(entry.start + entry.end) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(BadInputError, match=entry.name):
            load(tmp_path, manifest)


def test_bytes_that_change_in_memory_are_noticed(tmp_path):
    checkpoint = Checkpoint.read(tmp_path, write_checkpoint(tmp_path))
    assert checkpoint.mismatches() == []
    checkpoint.tensor("model.norm.weight", (64,), "BF16")[5] += 1
    assert checkpoint.mismatches() == ["model.norm.weight"]


@pytest.mark.parametrize(
    ("format", "missing"),
    [
        (WeightFormat.BF16, f"{EXPERT}.weight"),
        (WeightFormat.BF16, "model.layers.0.self_attn.k_norm.weight"),
        (WeightFormat.BF16, "lm_head.weight"),
        (WeightFormat.NVFP4, f"{EXPERT}.weight"),
        (WeightFormat.NVFP4, f"{EXPERT}.weight_scale"),
        (WeightFormat.NVFP4, f"{EXPERT}.weight_scale_2"),
        (WeightFormat.FP8_BLOCK, f"{EXPERT}.weight_scale_inv"),
    ],
)
def test_missing_tensors_are_named(tmp_path, format, missing):
    manifest = write_checkpoint(tmp_path, format=format)
    with pytest.raises(BadInputError, match=f"{missing}"):
        load(tmp_path, without(manifest, missing))


def test_unknown_tensors_are_named(tmp_path):
    tensors = random_tensors() | {"model.layers.2.mlp.gate.weight": torch.zeros(4, 64).bfloat16()}
    manifest = write_checkpoint(tmp_path, tensors=tensors)
    with pytest.raises(BadInputError, match=r"1 unknown, first model\.layers\.2"):
        load(tmp_path, manifest)


def test_shapes_and_dtypes_must_be_the_architectures(tmp_path):
    manifest = write_checkpoint(tmp_path, config=CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 32}))
    with pytest.raises(BadInputError, match=r"\[96, 32\], found BF16 \[96, 64\]"):
        load(tmp_path, manifest)
    tensors = random_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    manifest = write_checkpoint(tmp_path, tensors=tensors)
    with pytest.raises(BadInputError, match="F16"):
        load(tmp_path, manifest)


def test_experts_of_a_layer_must_share_a_format(tmp_path):
    tensors = random_tensors()
    manifest = write_checkpoint(tmp_path, tensors=tensors, format=WeightFormat.FP8_BLOCK)
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    mixed = load_file(path)
    name = "model.layers.0.mlp.experts.1.gate_proj"
    mixed[f"{name}.weight"] = tensors[f"{name}.weight"]
    del mixed[f"{name}.weight_scale_inv"]
    save_file(mixed, path)
    manifest = manifest_of(tmp_path, format=manifest.format, version=1)
    with pytest.raises(BadInputError, match="one format"):
        load(tmp_path, manifest)


def test_files_must_be_whole(tmp_path):
    manifest = write_checkpoint(tmp_path)
    with pytest.raises(BadInputError, match="bytes for BF16"):
        load(tmp_path, changed(manifest, "model.norm.weight", end=0, start=0))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BadInputError, match=r"model\.safetensors"):
        load(tmp_path, manifest)
    path.unlink()
    with pytest.raises(BadInputError, match="no such file"):
        load(tmp_path, manifest)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInputError, match="JSON"):
        load(tmp_path, manifest)
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadInputError, match=r"config\.json"):
        load(tmp_path, manifest)
