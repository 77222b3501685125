"""Our files read by the safetensors library and the other way round; broken ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from contracts.errors import BadInputError
from tests.weight_sync import tiny_moe
from weight_sync.safetensors_file import (
    Checkpoint,
    TensorSpec,
    Writer,
    has_frame,
    read_headers,
)

ARRAYS = {
    "z.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.scale": np.array(0.5, np.float32),
    "b.codes": np.arange(5, dtype=np.uint8),
    "empty": np.zeros((0, 4), np.float32),
}
DTYPES = {"float32": "F32", "uint8": "U8"}


def write(path: Path, order: list[str]) -> None:
    specs = [
        TensorSpec(name=name, dtype=DTYPES[a.dtype.name], shape=a.shape, file=path.name)
        for name, a in ARRAYS.items()
    ]
    writer = Writer(path, specs)
    for name in order:
        writer.write(name, ARRAYS[name])
    writer.close()


def test_the_library_reads_what_is_written(tmp_path):
    write(tmp_path / "x.safetensors", list(ARRAYS))
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)


def test_bytes_depend_on_neither_order_nor_time(tmp_path):
    write(tmp_path / "x", list(ARRAYS))
    write(tmp_path / "y", list(reversed(ARRAYS)))
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_a_file_that_is_resumed_keeps_its_tensors(tmp_path):
    write(tmp_path / "whole", list(ARRAYS))
    specs = [
        TensorSpec(name=name, dtype=DTYPES[a.dtype.name], shape=a.shape, file="x")
        for name, a in ARRAYS.items()
    ]
    for names in (["z.weight", "empty"], ["a.scale", "b.codes"]):
        writer = Writer(tmp_path / "x", specs, resumes=True)
        for name in names:
            writer.write(name, ARRAYS[name])
        writer.flush()
        writer.close()
    assert (tmp_path / "x").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(FileExistsError):
        Writer(tmp_path / "x", specs)


def test_a_file_has_its_frame_while_header_and_length_are_those_of_its_specs(tmp_path):
    path = tmp_path / "x.safetensors"
    specs = [
        TensorSpec(name=name, dtype=DTYPES[a.dtype.name], shape=a.shape, file=path.name)
        for name, a in ARRAYS.items()
    ]
    assert not has_frame(path, specs)
    write(path, list(ARRAYS))
    assert has_frame(path, specs) and has_frame(path, specs[::-1])
    assert not has_frame(path, specs[1:])
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"x", b"\0" * len(whole), b""):
        path.write_bytes(content)
        assert not has_frame(path, specs)


def test_arrays_have_the_shape_of_their_tensor_and_survive_a_release(tmp_path):
    write(tmp_path / "x.safetensors", list(ARRAYS))
    checkpoint = Checkpoint(tmp_path)
    for name, array in ARRAYS.items():
        found = checkpoint.array_of(name)
        np.testing.assert_array_equal(found, array, strict=True)
        checkpoint.release(name)
        checkpoint.release(name, 1, 2)
        np.testing.assert_array_equal(found, array)


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    write(tmp_path / "x.safetensors", list(ARRAYS))
    headers = read_headers(tmp_path / "x.safetensors")
    assert all(h.start % 4 == 0 for h in headers.values() if h.dtype == "F32")


def test_files_of_the_library_are_read(tmp_path):
    save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    for name, array in ARRAYS.items():
        header = checkpoint.tensors[name]
        found = checkpoint.bytes_of(name).view(array.dtype).reshape(header.shape)
        np.testing.assert_array_equal(found, array)


def header_of(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00",
        (1 << 40).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"{no}",
        header_of([1]),
        header_of({"a": {"dtype": "U8", "shape": [4]}}),
        header_of({"a": {"dtype": "Q9", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"a": {"dtype": ["BF16"], "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": [1.5], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": ["4"], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": ["0", 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"123"),
        header_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"12345"),
        header_of({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0.0, 4.0]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [False, 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}}, b"1234"),
        header_of({"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}}, b"1"),
        header_of({"a": {"dtype": "U8", "shape": [0, 2**70], "data_offsets": [0, 0]}}),
        header_of({"a": {"dtype": "U8", "shape": [2**40, 0, 2**40], "data_offsets": [0, 0]}}),
        header_of({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, b"1"),
        (200_000).to_bytes(8, "little") + b"[" * 100_000 + b"]" * 100_000,
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"broken\.safetensors.*whole safetensors file"):
        read_headers(path)


def test_a_missing_shard_is_named(tmp_path):
    tiny_moe.write_sharded(tmp_path, tiny_moe.tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"2 shards.*no model-00002-of-00002"):
        Checkpoint(tmp_path)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[" * 200_000,
        "[]",
        '{"weight_map": null}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": [1]}',
        *(
            json.dumps({"weight_map": {"a": name}})
            for name in (
                "sub/x.safetensors",
                "../x.safetensors",
                "/x.safetensors",
                ".x.safetensors",
                "a\\x.safetensors",
                "x\0.safetensors",
                "config.json",
                ".",
            )
        ),
    ],
)
def test_an_index_of_another_form(tmp_path, index):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(BadInputError, match=r"an index with a weight_map of \*\.safetensors files"):
        Checkpoint(tmp_path)


def test_shards_of_one_name_in_two_folders_are_refused(tmp_path):
    weight_map = {}
    for folder in "ab":
        (tmp_path / folder).mkdir()
        save_file({folder: ARRAYS["z.weight"]}, tmp_path / folder / "m.safetensors")
        weight_map[folder] = f"{folder}/m.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadInputError, match=r"found 'a/m\.safetensors'"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.norm.weight": None}, "in no shard, as the index has it, found it in model-0000"),
        (
            {"x.weight": "model-00001-of-00002.safetensors"},
            "tensor x.weight in .* found it in none",
        ),
        (
            {"lm_head.weight": "model-00002-of-00002.safetensors"},
            "lm_head.* found it in model-00001",
        ),
    ],
)
def test_an_index_that_says_otherwise_than_the_shards(tmp_path, changes, sentence):
    tiny_moe.write_sharded(tmp_path, tiny_moe.tensors())
    path = tmp_path / INDEX
    index = json.loads(path.read_text())
    assert index["weight_map"]["lm_head.weight"] == "model-00001-of-00002.safetensors"
    merged = index["weight_map"] | changes
    index["weight_map"] = {name: file for name, file in merged.items() if file}
    path.write_text(json.dumps(index))
    with pytest.raises(BadInputError, match=sentence):
        Checkpoint(tmp_path)


def test_files_that_nobody_sees_are_no_shards(tmp_path):
    save_file({"w": ARRAYS["z.weight"]}, tmp_path / "x.safetensors")
    (tmp_path / ".x.safetensors").write_bytes(b"half of a download")
    assert set(Checkpoint(tmp_path).tensors) == {"w"}


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("x", "y"):
        save_file({"w": ARRAYS["z.weight"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(BadInputError, match="tensor w once"):
        Checkpoint(tmp_path)


def test_no_tensors_at_all(tmp_path):
    with pytest.raises(BadInputError, match="found none"):
        Checkpoint(tmp_path)
    save_file({}, tmp_path / "x.safetensors")
    with pytest.raises(BadInputError, match="expected tensors, found none"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(BadInputError, match="expected tensors, found none"):
        Checkpoint(tmp_path)
