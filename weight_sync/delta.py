"""Deltas: what changed between two versions of a safetensors file, element by element.

Owns the delta's bytes. Must not know versions, stores or the network. Between two policy versions
a few percent of the elements change, spread over all tensors, so what is kept of a run of elements
is where and by how much, or all differences where most changed:

    sparse   gaps (uint32, distance from the changed element before) and new - old, zigzag coded:
             0, -1, 1, -2, 2, ... become 0, 1, 2, 3, 4, ...
    xor      old XOR new of every element

w is the width of an element in bytes: 2 for BF16, 1 for codes and their scales. Numbers are written
in byte planes (all low bytes, then all next ones), which zstd packs to near their entropy: small
updates move a BF16 weight by one unit, and a gap rarely needs its upper bytes.

A file, all little-endian:

    magic          8 bytes
    payloads       the zstd frames, one per run
    index          JSON: {"header": checksum of the safetensors header, "num_bytes": of the file,
                   "runs": [[start, width, count, changed, kind, offset, length], ...]}
    index length   8 bytes

A run is at most 2^24 elements of one tensor; runs without a change are left out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import zstandard

from contracts.errors import RetryError
from weight_sync import durable
from weight_sync.safetensors_file import DTYPE_BYTES, Mapping, TensorHeader, read_headers

SUFFIX = ".delta"
_MAGIC = b"mswdlt01"
_RUN = 1 << 24  # elements; bounds memory, and gaps fit in uint32
_MAY_BE_DENSE = 16  # below one change in so many elements, sparse is the smaller one
_LEVEL = 1  # of zstd; 3 and 6 gain 1 and 3 %
_SPARSE, _XOR = "sparse", "xor"


class DeltaError(RetryError):
    """The delta does not fit what it is applied to: the whole file helps."""


@dataclass(frozen=True)
class _Run:
    start: int  # byte in the safetensors file
    width: int
    count: int  # elements
    changed: int
    kind: str
    offset: int  # of the payload in the delta
    length: int

    @property
    def end(self) -> int:
        return self.start + self.width * self.count


def write_deltas(old: Path, new: Path, folder: Path) -> int | None:
    """Deltas of all safetensors files of a checkpoint directory; their bytes together.

    Returns None if one of them holds other tensors than it did.
    """
    total = 0
    for path in sorted(new.glob("*.safetensors")):
        before = old / path.name
        delta = folder / f"{path.name}{SUFFIX}"
        size = write_delta(before, path, delta) if before.exists() else None
        if size is None:
            return None
        total += size
    return total


def write_delta(old: Path, new: Path, delta: Path) -> int | None:
    """Writes what turns the file `old` into `new`; its size in bytes.

    Returns None, and writes nothing, if the files do not hold the same tensors in the same places.
    """
    headers = read_headers(new)
    size = new.stat().st_size
    if size != old.stat().st_size or _header_of(old) != (header := _header_of(new)):
        return None
    before, after = Mapping(old), Mapping(new)
    runs: list[_Run] = []
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    with delta.open("xb") as file:
        file.write(_MAGIC)
        for start, width, count in _pieces(headers):
            end = start + width * count
            x, y = (m.data[start:end].view(f"<u{width}") for m in (before, after))
            if encoded := _encode(x, y, compressor):
                kind, changed, payload = encoded
                runs.append(_Run(start, width, count, changed, kind, file.tell(), len(payload)))
                file.write(payload)
            before.release(start, end)
            after.release(start, end)
        index = {
            "header": durable.checksum(header),
            "num_bytes": size,
            "runs": [astuple(run) for run in runs],
        }
        text = json.dumps(index, separators=(",", ":")).encode()
        file.write(text + struct.pack("<Q", len(text)))
        return file.tell()


def _header_of(path: Path) -> bytes:
    """The bytes in front of the tensors."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def _pieces(headers: dict[str, TensorHeader]) -> Iterator[tuple[int, int, int]]:
    """(start, width, count) of each run, in file order."""
    for header in sorted(headers.values(), key=lambda header: header.start):
        width = DTYPE_BYTES[header.dtype]
        for start in range(header.start, header.end, _RUN * width):
            yield start, width, (min(start + _RUN * width, header.end) - start) // width


def _encode(
    old: np.ndarray, new: np.ndarray, compressor: zstandard.ZstdCompressor
) -> tuple[str, int, bytes] | None:
    """Kind, number of changes and payload of the smaller form; None if nothing changed."""
    where = np.flatnonzero(old != new)
    if not len(where):
        return None
    gaps = np.diff(where, prepend=-1).astype("<u4")
    streams = _planes(gaps) + _planes(_zigzag(new[where] - old[where]))
    payload, kind = compressor.compress(streams), _SPARSE
    if len(where) * _MAY_BE_DENSE > len(old):
        dense = compressor.compress(_planes(old ^ new))
        if len(dense) < len(payload):
            payload, kind = dense, _XOR
    return kind, len(where), payload


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """Small differences of either sign to small numbers, so that upper planes are zero."""
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _unzigzag(numbers: np.ndarray) -> np.ndarray:
    return (numbers >> 1) ^ -(numbers & 1)


def _planes(numbers: np.ndarray) -> bytes:
    width = numbers.dtype.itemsize
    return numbers.view(np.uint8).reshape(-1, width).T.tobytes()


def _from_planes(data: memoryview, width: int) -> np.ndarray:
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{width}")


def apply_delta(delta: Path, target: Path) -> None:
    """Turns the file `target`, a copy of the old version, into the new one, in place.

    What comes out is for the caller to verify.

    Raises:
        DeltaError: a broken delta, or one of another file. `target` may be half changed.
    """
    size = target.stat().st_size
    content = memoryview(Mapping(delta).data.data)
    runs = _read_index(content, size, durable.checksum(_header_of(target)), delta)
    decompressor = zstandard.ZstdDecompressor()
    mapped = np.memmap(target, np.uint8, "r+")
    try:
        for run in runs:
            elements = mapped[run.start : run.end].view(f"<u{run.width}")
            per_change = 4 + run.width
            expected = run.changed * per_change if run.kind == _SPARSE else run.end - run.start
            payload = content[run.offset : run.offset + run.length]
            if (found := zstandard.frame_content_size(payload)) != expected:
                raise ValueError(f"a run of {found} bytes for {expected}")
            data = memoryview(decompressor.decompress(payload))
            if run.kind == _XOR:
                elements ^= _from_planes(data, run.width)
                continue
            gaps = _from_planes(data[: 4 * run.changed], 4)
            where = np.cumsum(gaps, dtype=np.int64) - 1
            elements[where] += _unzigzag(_from_planes(data[4 * run.changed :], run.width))
    except (ValueError, TypeError, IndexError, zstandard.ZstdError) as error:
        raise DeltaError(f"{delta}: {error}") from None


def _read_index(content: memoryview, size: int, header: str, delta: Path) -> list[_Run]:
    try:
        if bytes(content[:8]) != _MAGIC:
            raise ValueError("no delta")
        (length,) = struct.unpack("<Q", content[-8:])
        index = json.loads(bytes(content[-8 - length : -8]))
        runs = [_Run(*run) for run in index["runs"]]
        if index["num_bytes"] != size or index["header"] != header:
            raise ValueError("it is of a file with other tensors")
        for run in runs:
            if run.width not in (1, 2, 4, 8) or run.kind not in (_SPARSE, _XOR):
                raise ValueError(f"a run of kind {run.kind} and width {run.width}")
            if not (8 <= run.start <= run.end <= size and 0 <= run.changed <= run.count):
                raise ValueError("a run outside the file")
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise DeltaError(f"{delta}: {error}") from None
    return runs
