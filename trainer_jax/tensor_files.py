"""The safetensors files of an export: laid out first, then filled in any order by any process.

Owns which tensor lies where, headers and index, and the views that values are assigned to. Must not
know models. Format: 8 bytes of header length, a JSON header padded to 8 bytes, tensors without gaps
(https://github.com/huggingface/safetensors); the bytes are those that its own writer gives.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}
# Wider ones first, as the format's own writer orders them, so that all are aligned.
_ORDER = ("F32", "BF16", "F16")


class Header(NamedTuple):
    """What a file says of a tensor. `dtype` is safetensors' word."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


@dataclass(frozen=True, kw_only=True)
class _File:
    name: str
    tensors: dict[str, Header]
    offsets: dict[str, int]  # from the start of the file
    header: bytes
    num_bytes: int


class TensorFiles:
    """One model.safetensors, or shards of at most `max_bytes` (if no tensor is larger)."""

    def __init__(self, tensors: Mapping[str, Header], max_bytes: int) -> None:
        shards: list[dict[str, Header]] = [{}]
        num_bytes = 0
        for name, header in tensors.items():
            if shards[-1] and num_bytes + header.num_bytes > max_bytes:
                shards.append({})
                num_bytes = 0
            shards[-1][name] = header
            num_bytes += header.num_bytes
        single = len(shards) == 1
        self._files = [
            _lay_out(
                "model.safetensors"
                if single
                else f"model-{number:05d}-of-{len(shards):05d}.safetensors",
                shard,
            )
            for number, shard in enumerate(shards, start=1)
        ]

    def create(self, directory: Path) -> None:
        """Makes the files with room for everything. OSError: there is none."""
        for file in self._files:
            with (directory / file.name).open("xb") as out:
                out.write(file.header)
                out.flush()
                # now, because a view of a file that finds the disk full ends the process
                os.posix_fallocate(out.fileno(), 0, file.num_bytes)
        if len(self._files) > 1:
            total = sum(h.num_bytes for file in self._files for h in file.tensors.values())
            weight_map = {name: file.name for file in self._files for name in file.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    @contextlib.contextmanager
    def filling(self, directory: Path) -> Iterator[dict[str, np.ndarray]]:
        """Every tensor by name, to be assigned to; what was is in the files at the end."""
        views, maps = {}, []
        for file in self._files:
            data = np.memmap(directory / file.name, np.uint8, "r+")
            maps.append(data)
            for name, header in file.tensors.items():
                start = file.offsets[name]
                flat: Any = data[start : start + header.num_bytes]
                views[name] = flat.view(DTYPES[header.dtype]).reshape(header.shape)
        yield views
        for data in maps:
            data.flush()


def _lay_out(name: str, tensors: Mapping[str, Header]) -> _File:
    ordered = sorted(tensors, key=lambda tensor: (_ORDER.index(tensors[tensor].dtype), tensor))
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        shape, dtype = tensors[tensor]
        start, end = end, end + tensors[tensor].num_bytes
        said[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return _File(
        name=name,
        tensors=dict(tensors),
        offsets={tensor: first + said[tensor]["data_offsets"][0] for tensor in ordered},
        header=len(text).to_bytes(8, "little") + text,
        num_bytes=first + end,
    )
