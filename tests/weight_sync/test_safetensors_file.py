"""Our files read by the safetensors library and the other way round; broken ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from contracts.errors import BadInputError
from tests.weight_sync import tiny_moe
from weight_sync.safetensors_file import Checkpoint, TensorSpec, Writer, read_headers

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


@pytest.mark.parametrize("index", [[], {"weight_map": {"a": 3}}, {"weight_map": [1]}])
def test_an_index_of_another_form(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInputError, match="an index with a weight_map"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("x", "y"):
        save_file({"w": ARRAYS["z.weight"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(BadInputError, match="tensor w once"):
        Checkpoint(tmp_path)


def test_no_tensors_at_all(tmp_path):
    with pytest.raises(BadInputError, match="found none"):
        Checkpoint(tmp_path)
