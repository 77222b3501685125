"""safetensors files: headers read and checked, tensors mapped, files written piece by piece.

Owns the container format: 8 bytes of header length, a JSON header, the tensors without gaps. Files
are deterministic: tensors go in order of element size, then of name, so each is aligned. Owns no
knowledge of what tensors mean.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts.errors import BadInputError

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MAX_DIMS, _MAX_BYTES = 32, 2**60  # what numpy can shape, whatever dimension is 0
_SHARD_NAME = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")
# What numpy has no type for is seen as its bits.
_NUMPY = {
    **dict.fromkeys(("U8", "F8_E4M3", "F8_E8M0"), np.uint8),
    **{"BF16": np.uint16, "F16": np.float16, "F32": np.float32},
}


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Where a tensor lies; `start` and `end` are absolute byte offsets in `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor to be written into `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def num_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file, in file order.

    Raises:
        BadInputError: anything but a whole, well-formed safetensors file.
    """

    def refuse(found: str) -> BadInputError:
        return BadInputError(f"{path}", expected="a whole safetensors file", found=found)

    def located(entry: dict) -> TensorHeader:
        start, end = entry["data_offsets"]
        if type(start) is not int or type(end) is not int or not isinstance(entry["shape"], list):
            raise TypeError(f"{entry}")
        return TensorHeader(
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            file=path.name,
            start=8 + length + start,
            end=8 + length + end,
        )

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise refuse(f"{size} bytes and a header that claims {length}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: located(entry) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise refuse(f"a header that does not parse ({error!r})") from None
        except RecursionError:
            raise refuse("a header that does not parse (too deep)") from None
    position = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if not isinstance(tensor.dtype, str) or tensor.dtype not in DTYPE_BYTES:
            raise refuse(f"tensor {name} of unknown dtype {tensor.dtype}")
        if any(type(dim) is not int or dim < 0 for dim in tensor.shape):
            raise refuse(f"tensor {name} of shape {list(tensor.shape)}")
        room = DTYPE_BYTES[tensor.dtype] * math.prod(max(dim, 1) for dim in tensor.shape)
        if len(tensor.shape) > _MAX_DIMS or room > _MAX_BYTES:
            raise refuse(f"tensor {name} of shape {list(tensor.shape)}")
        num_bytes = DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)
        if tensor.start != position or tensor.end - tensor.start != num_bytes:
            raise refuse(f"tensor {name} at bytes {tensor.start}..{tensor.end} for {num_bytes}")
        position = tensor.end
    if position != size:
        raise refuse(f"{size} bytes where the header describes {position}")
    return tensors


class Mapping:
    """A file mapped into memory, read-only; `release` keeps what is resident small."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = np.frombuffer(self._map, np.uint8)

    def release(self, start: int, end: int) -> None:
        """The pages of [start, end) may leave this process; if still needed they come back."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


class Checkpoint:
    """The tensors of a Hugging Face checkpoint directory, mapped.

    Raises:
        BadInputError: no tensors, a tensor twice, or an index that says otherwise than the shards
            which it names.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, TensorHeader] = {}
        self._files: dict[str, Mapping] = {}
        index = _read_index(directory)
        for path in _shards(directory, index):
            for name, header in read_headers(path).items():
                if name in self.tensors:
                    raise BadInputError(
                        f"checkpoint {directory}",
                        expected=f"tensor {name} once",
                        found=f"it in {self.tensors[name].file} and {path.name}",
                    )
                self.tensors[name] = header
            self._files[path.name] = Mapping(path)
        if not self.tensors:
            raise BadInputError(f"checkpoint {directory}", expected="tensors", found="none")
        if index is not None:
            _check_index(directory / INDEX_NAME, index, self.tensors)

    def bytes_of(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8, a view of the mapping."""
        header = self.tensors[name]
        return self._files[header.file].data[header.start : header.end]

    def array_of(self, name: str) -> np.ndarray:
        """A tensor in its shape, a view: BF16 as uint16, 8-bit floats as uint8; else flat bytes."""
        header, data = self.tensors[name], self.bytes_of(name)
        if header.dtype not in _NUMPY:
            return data
        return data.view(_NUMPY[header.dtype]).reshape(header.shape)

    def release(self, name: str, first: int = 0, last: int | None = None) -> None:
        """Bytes [first, last) of a tensor, to its end without `last`, may leave this process."""
        header = self.tensors[name]
        end = header.end if last is None else header.start + last
        self._files[header.file].release(header.start + first, end)


def _read_index(directory: Path) -> dict[str, str] | None:
    """The index's file of each tensor; None if there is no index."""
    path = directory / INDEX_NAME
    if not path.exists():
        return None

    def refuse(found: str) -> BadInputError:
        expected = "an index with a weight_map of *.safetensors files beside it"
        return BadInputError(f"{path}", expected=expected, found=found)

    try:
        weight_map = json.loads(path.read_text())["weight_map"]
    except RecursionError:
        raise refuse("JSON that is too deep") from None
    except (ValueError, KeyError, TypeError) as error:
        raise refuse(f"{error!r}") from None
    if not isinstance(weight_map, dict):
        raise refuse(f"one that is {weight_map!r}")
    for file in weight_map.values():
        # A folder in it would make two files of one name, and files that nobody fingerprints.
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise refuse(repr(file))
    return weight_map


def _shards(directory: Path, index: dict[str, str] | None) -> list[Path]:
    if index is None:
        shards = sorted(p for p in directory.iterdir() if _SHARD_NAME.fullmatch(p.name))
        if not shards:
            raise BadInputError(
                f"checkpoint {directory}", expected="*.safetensors files", found="none"
            )
        return shards
    shards = [directory / name for name in sorted(set(index.values()))]
    if missing := [path.name for path in shards if not path.is_file()]:
        raise BadInputError(
            f"{directory / INDEX_NAME}",
            expected=f"{len(shards)} shards beside it",
            found=f"no {missing[0]}",
        )
    return shards


def _check_index(path: Path, index: dict[str, str], tensors: dict[str, TensorHeader]) -> None:
    found = {name: header.file for name, header in tensors.items()}
    if found != index:
        name = min(name for name in found.keys() | index if found.get(name) != index.get(name))
        raise BadInputError(
            f"{path}",
            expected=f"tensor {name} in {index.get(name, 'no shard, as the index has it')}",
            found=f"it in {found.get(name, 'none')}",
        )


class _Frame:
    """What surrounds the tensors of a file: its first bytes, where each tensor lies, its length."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        ordered = sorted(specs, key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))
        header: dict = {"__metadata__": {"format": "pt"}}
        self.ranges: dict[str, tuple[int, int]] = {}
        position = 0
        for spec in ordered:
            end = position + spec.num_bytes
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [position, end],
            }
            self.ranges[spec.name] = (position, end)
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self.num_bytes = len(self.head) + position


def has_frame(path: Path, specs: Sequence[TensorSpec]) -> bool:
    """Whether a `Writer` of these specs made this file, and it still has its full length."""
    frame = _Frame(specs)
    try:
        with path.open("rb") as file:
            whole = os.fstat(file.fileno()).st_size == frame.num_bytes
            return whole and file.read(len(frame.head)) == frame.head
    except FileNotFoundError:
        return False


class Writer:
    """One file whose tensors are known beforehand and come in any order, from any thread.

    With `resumes` the file may be there, made of the same specs: its tensors stay.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], *, resumes: bool = False) -> None:
        frame = _Frame(specs)
        self._ranges, self._data_start = frame.ranges, len(frame.head)
        flags = os.O_CREAT | os.O_WRONLY | (0 if resumes else os.O_EXCL)
        self._descriptor = os.open(path, flags, 0o644)
        self._path = path
        self._write_at(0, frame.head)
        os.ftruncate(self._descriptor, frame.num_bytes)

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        try:
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            error.filename = str(self._path)
            raise

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes one tensor; its byte count must be the one announced."""
        start, end = self._ranges[name]
        assert array.nbytes == end - start, (name, array.nbytes, end - start)
        if array.nbytes:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._write_at(self._data_start + start, data.data)

    def flush(self) -> None:
        """Returns when what was written so far would survive a power cut."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
