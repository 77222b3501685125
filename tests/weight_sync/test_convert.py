"""Directories through the converter: content, determinism, and nothing half-written."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from tests.weight_sync import tiny_moe
from weight_sync import coding, durable
from weight_sync.convert import (
    LEGACY_CONFIG_NAME,
    Options,
    StoppedError,
    convert_directory,
    plan_directory,
)
from weight_sync.formats import bf16, fp8, mxfp8, nvfp4
from weight_sync.layouts import LAYOUTS, Layout
from weight_sync.safetensors_file import Checkpoint, Writer
from weight_sync.verify import compare

NVFP4, FP8, BF16 = WeightFormat.NVFP4, WeightFormat.FP8_BLOCK, WeightFormat.BF16
EXPERT = "model.layers.1.mlp.experts.2"
STORED = [(format, layout) for format, known in LAYOUTS.items() for layout in known]


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


def test_eight_bits_per_row_and_per_block_of_32(source, tmp_path):
    before = tiny_moe.tensors()
    for format, scale_name in (
        (WeightFormat.FP8_CHANNEL, "scale"),
        (WeightFormat.MXFP8, "scale_inv"),
    ):
        convert_directory(source, tmp_path / format, Options(format=format))
        after = read_bytes(tmp_path / format)
        for module in (f"{EXPERT}.down_proj", "model.layers.0.self_attn.o_proj"):
            bits = as_bits(before[f"{module}.weight"])
            is_channel = format == WeightFormat.FP8_CHANNEL
            expected = (
                fp8.encode_channel(bits, name="x") if is_channel else mxfp8.encode(bits, name="x")
            )
            assert after[f"{module}.weight"] == expected.codes.tobytes()
            assert after[f"{module}.weight_{scale_name}"] == expected.scale.tobytes()


def test_power_of_two_block_scales(source, tmp_path):
    convert_directory(source, tmp_path / "out", Options(format=FP8, recipe="ue8m0"))
    scale = Checkpoint(tmp_path / "out").array_of(f"{EXPERT}.down_proj.weight_scale_inv")
    assert (np.frexp(scale)[0] == 0.5).all()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize("recipe", ["modelopt", "ct"])
def test_a_dense_model_shares_global_scales_of_fused_projections(tmp_path, recipe):
    source = tiny_moe.write(tmp_path / "source", tiny_moe.dense_tensors())
    options = Options(format=NVFP4, recipe=recipe, layout=Layout.COMPRESSED_TENSORS)
    convert_directory(source, tmp_path / "out", options)
    after = read_bytes(tmp_path / "out")
    for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
        modules = [f"model.layers.1.{part}_proj" for part in parts]
        assert len({after[f"{module}.weight_global_scale"] for module in modules}) == 1
        assert all(f"{module}.weight_packed" in after for module in modules)
    assert after["model.layers.1.self_attn.q_proj.bias"]


def decoded_by_hand(directory: Path, plan) -> dict[str, np.ndarray]:
    """Each quantized matrix of a plan's outputs as float32."""
    checkpoint = Checkpoint(directory)
    return {
        specs[0].name.rpartition(".")[0]: coding.decode(
            action.storage, [checkpoint.array_of(spec.name) for spec in specs]
        )
        for action in plan.actions
        if action.storage
        for specs in action.outputs
    }


@pytest.mark.parametrize(("format", "layout"), STORED)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_quantized_directory_decodes_to_a_plain_one(source, tmp_path, format, layout, threads):
    plan = convert_directory(source, tmp_path / "q", Options(format=format, layout=layout))
    expected = decoded_by_hand(tmp_path / "q", plan)
    (tmp_path / "q" / LEGACY_CONFIG_NAME).write_text("{}")  # what engines must not find afterwards
    for dtype in ("BF16", "F32"):
        options = Options(format=BF16, source_format=format, dtype=dtype, threads=threads)
        target = tmp_path / dtype
        convert_directory(tmp_path / "q", target, options)
        after = Checkpoint(target)
        assert set(after.tensors) == set(tiny_moe.tensors())
        assert {header.dtype for header in after.tensors.values()} == {dtype}
        for module, matrix in expected.items():
            stored = after.array_of(f"{module}.weight")
            wanted = bf16.round_from(matrix) if dtype == "BF16" else matrix
            np.testing.assert_array_equal(stored, wanted)
        name = {"BF16": "bfloat16", "F32": "float32"}[dtype]
        config = json.loads((target / "config.json").read_text())
        assert config == tiny_moe.CONFIG | {"dtype": name}
        assert not (target / LEGACY_CONFIG_NAME).exists()
        assert not [*verify(tmp_path / "q", target, options)]


def verify(source: Path, converted: Path, options: Options) -> list:
    plan, checkpoint = plan_directory(source, options)
    return [
        error for batch, _ in compare(plan, checkpoint, Checkpoint(converted)) for error in batch
    ]


def test_modelopts_own_config_file_is_read_where_config_json_says_nothing(source, tmp_path):
    convert_directory(source, tmp_path / "q", Options(format=NVFP4))
    (tmp_path / "q" / "config.json").write_text(json.dumps(tiny_moe.CONFIG))
    legacy = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "q" / LEGACY_CONFIG_NAME).write_text(json.dumps(legacy))
    convert_directory(tmp_path / "q", tmp_path / "out", Options(format=BF16))
    assert set(read_bytes(tmp_path / "out")) == set(tiny_moe.tensors())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (Options(format=FP8), "bf16 comes first, found nvfp4"),
        (Options(format=BF16, source_format=FP8), "expected fp8-block, found nvfp4"),
        (Options(format=BF16, ignore=("*",)), "modules to ignore, found nvfp4"),
    ],
)
def test_what_a_quantized_source_cannot_become_is_refused(source, tmp_path, options, sentence):
    convert_directory(source, tmp_path / "q", Options(format=NVFP4))
    with pytest.raises(BadInputError, match=sentence):
        convert_directory(tmp_path / "q", tmp_path / "out", options)


def test_a_stored_nan_is_refused_by_name(source, tmp_path):
    convert_directory(source, tmp_path / "q", Options(format=FP8))
    name = f"{EXPERT}.up_proj.weight"
    start = Checkpoint(tmp_path / "q").tensors[name].start
    path = tmp_path / "q" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[start] = 0x7F
    path.write_bytes(data)
    with pytest.raises(BadInputError, match=rf"tensor {name}: .*found 1 NaN or infinite of 2048"):
        convert_directory(tmp_path / "q", tmp_path / "out", Options(format=BF16))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", list(WeightFormat))
def test_a_source_whose_tensors_are_not_aligned(source, tmp_path, format):
    convert_directory(source, tmp_path / "out", Options(format=format))
    expected = read_bytes(tmp_path / "out")
    path = source / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    path.write_bytes(shifted)
    convert_directory(source, tmp_path / "shifted", Options(format=format))
    assert read_bytes(tmp_path / "shifted") == expected


def test_what_a_plain_source_is_not_is_refused(source, tmp_path):
    with pytest.raises(BadInputError, match="expected nvfp4, found bf16"):
        plan_directory(source, Options(format=BF16, source_format=NVFP4))
    with pytest.raises(BadInputError, match="quantized source to decode to F32, found bf16"):
        plan_directory(source, Options(format=BF16, dtype="F32"))
    (source / "config.json").write_text('{"quantization_config": [1]}')
    with pytest.raises(BadInputError, match="that is an object"):
        plan_directory(source, Options(format=BF16))


_CHILD = """
import sys
from pathlib import Path
from contracts.types import WeightFormat
from weight_sync.convert import Options, convert_directory

def peak_kib():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

small, large, out = map(Path, sys.argv[1:4])
options = Options(format=WeightFormat(sys.argv[4]))
for source in (small, large):
    before = peak_kib()
    convert_directory(source, out / source.name, options)
print(peak_kib() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("format", "most_mib"), [(NVFP4, 24), (FP8, 24), (BF16, 80)])
def test_memory_is_bounded_by_the_largest_matrix(tmp_path, format, most_mib):
    """Of 200 MB in fused tensors of 64 and 32 MiB, whose matrices have 1 MiB; copies are whole."""
    small = tiny_moe.write(tmp_path / "small")
    E, F, D = 32, 512, 1024
    noise = np.random.default_rng(0).standard_normal(2 * F * D).astype(ml_dtypes.bfloat16)
    arrays = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        arrays[f"{prefix}.gate_up_proj"] = np.broadcast_to(noise.reshape(2 * F, D), (E, 2 * F, D))
        arrays[f"{prefix}.down_proj"] = np.broadcast_to(noise[: F * D].reshape(D, F), (E, D, F))
    arrays["model.embed_tokens.weight"] = noise.reshape(2 * F, D)
    large = tiny_moe.write(tmp_path / "large", {k: v.copy() for k, v in arrays.items()})
    config = tiny_moe.CONFIG | {"hidden_size": D, "moe_intermediate_size": F}
    (large / "config.json").write_text(json.dumps(config))
    assert (large / "model.safetensors").stat().st_size > 200e6
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", _CHILD, small, large, tmp_path / "out", format]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown_kib < most_mib * 1024


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


@pytest.mark.parametrize("format", list(WeightFormat))
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_in_what_is_not_quantized_too(tmp_path, format, dtype, value):
    for name, shape in (("model.norm.weight", (64,)), ("model.embed_tokens.weight", (96, 64))):
        array = np.zeros(shape, dtype)
        array.flat[-1] = value
        source = tmp_path / name
        tiny_moe.write(source, tiny_moe.tensors() | {name: array})
        found = f"found 1 NaN or infinite of {array.size}, the first at {array.size - 1}"
        with pytest.raises(BadInputError, match=rf"tensor {name}: .*{found}"):
            convert_directory(source, tmp_path / "out", Options(format=format))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_the_largest_and_the_smallest_numbers_are_no_infinity(tmp_path, dtype):
    limits = ml_dtypes.finfo(dtype)
    array = np.array([limits.max, limits.min, limits.smallest_subnormal, -0.0, 0], dtype)
    tiny_moe.write(tmp_path / "source", tiny_moe.tensors() | {"model.norm.weight": array})
    convert_directory(tmp_path / "source", tmp_path / "out", Options(format=NVFP4))
    assert read_bytes(tmp_path / "out")["model.norm.weight"] == array.tobytes()


def test_a_float32_that_rounds_to_infinity_is_refused_by_name(tmp_path):
    array = np.zeros((96, 64), np.float32)
    array[1, 2] = 3.4e38
    source = tiny_moe.write(tmp_path / "source", tiny_moe.tensors() | {"lm_head.weight": array})
    for format in (BF16, FP8):
        with pytest.raises(BadInputError, match=r"tensor lm_head\.weight: .*the first at 66"):
            convert_directory(source, tmp_path / "out", Options(format=format))


def test_integers_are_copied_whatever_their_bits(tmp_path):
    arrays = {f"model.{t.__name__}": np.full(3, -1, t) for t in (np.int8, np.int32, np.int64)}
    tiny_moe.write(tmp_path / "source", tiny_moe.tensors() | arrays)
    convert_directory(tmp_path / "source", tmp_path / "out", Options(format=NVFP4))
    assert read_bytes(tmp_path / "out")["model.int32"] == b"\xff" * 12


def test_what_a_tokenizer_or_a_model_of_its_own_code_needs_comes_along(source, tmp_path):
    names = {"modeling_x.py", "qwen.tiktoken", "vocab.bpe", "source.spm", "merges.txt"}
    for name in names:
        (source / name).write_text(name)
    convert_directory(source, tmp_path / "out", Options(format=NVFP4))
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("format", list(WeightFormat))
def test_a_directory_without_tensors_is_refused(source, tmp_path, format):
    tiny_moe.write(source, {})
    with pytest.raises(BadInputError, match="expected tensors, found none"):
        convert_directory(source, tmp_path / "out", Options(format=format))


def test_a_config_that_is_too_deep_is_refused(source):
    (source / "config.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    with pytest.raises(BadInputError, match=r"config\.json: expected JSON, found .* too deep"):
        plan_directory(source, Options(format=NVFP4))


def test_too_little_room_is_the_disks_own_error(source, tmp_path, monkeypatch):
    """So that the service tries again when there is room."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"0\.1 MB needed, 0\.0 MB free") as raised:
        convert_directory(source, tmp_path / "out", Options(format=NVFP4))
    assert raised.value.errno == errno.ENOSPC
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


@pytest.mark.parametrize("format", list(WeightFormat))
def test_verification_accepts_what_was_converted(source, tmp_path, format):
    convert_directory(source, tmp_path / "out", Options(format=format))
    errors = verify(source, tmp_path / "out", Options(format=format))
    assert all(error.share_of_bound <= 1 for error in errors)
    assert {e.relative_rms > 0.001 for e in errors} == (set() if format == BF16 else {True})


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


@pytest.mark.parametrize("format", [NVFP4, FP8])
def test_verification_holds_the_experts_against_each_other_and_the_config(tmp_path, format):
    """What the plan takes for granted: of which two widths the projections are."""
    arrays = tiny_moe.tensors()
    down = f"{EXPERT}.down_proj.weight"
    turned = arrays | {down: np.ascontiguousarray(arrays[down].T)}
    source = tiny_moe.write(tmp_path / "turned", turned)
    plan = convert_directory(source, tmp_path / "out", Options(format=format))
    pairs = plan, Checkpoint(source), Checkpoint(tmp_path / "out")
    with pytest.raises(BadInputError, match=r"between widths 64 and 32, found 32 and 64"):
        list(compare(*pairs))
    config = {key: value for key, value in plan.config.items() if "size" not in key}
    with pytest.raises(BadInputError, match=rf"tensor {EXPERT}\.down_proj.*found 32 and 64"):
        list(compare(dataclasses.replace(plan, config=config), *pairs[1:]))


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
