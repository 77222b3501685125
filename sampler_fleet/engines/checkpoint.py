"""Reads a converted checkpoint: packed tensors from safetensors files, checked against a manifest.

Owns the bytes between the file and the decoded weights, and the checksums over them. Must not
convert formats: it decodes what the weight service wrote, nothing else. The manifest says where
each tensor lies, so headers are not parsed again.

Layouts of a linear module `m` (by the dtype of `m.weight`):
    BF16 / F32   m.weight [O, I]
    F8_E4M3      m.weight [O, I], and one of
                 m.weight_scale_inv F32 [ceil(O/128), ceil(I/128)] (fp8-block)
                 m.weight_scale F32 [O, 1] (fp8-channel)
                 m.weight_scale_inv U8 [O, I/32], exponents of two plus 127 (mxfp8)
    U8 (NVFP4)   m.weight [O, I/2], m.weight_scale F8_E4M3 [O, I/16], m.weight_scale_2 F32 [];
                 m.input_scale F32 [] may be there and is not used: activation scales are dynamic
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from contracts.errors import BadInputError
from contracts.types import Manifest, TensorEntry, WeightFormat
from sampler_fleet.engines.precision import (
    FP8_BLOCK,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    Weight,
    decode_nvfp4,
)

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


class Checkpoint:
    """The bytes of one version in memory, and which of them a model has taken."""

    def __init__(self, config: dict[str, Any], manifest: Manifest, raw: dict[str, np.ndarray]):
        self.config = config
        self.manifest = manifest
        self._raw = raw
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._unused = set(self._entries)
        self._rule = f"checkpoint of version {manifest.version} ({manifest.format})"

    @staticmethod
    def read(directory: Path, manifest: Manifest) -> Checkpoint:
        """Reads config.json and every tensor of the manifest into memory of our own.

        Raises:
            BadInputError: a missing or short file, no valid config.json, an unknown dtype, a byte
                range that does not fit the shape, bytes that differ from their checksum.
        """
        try:
            config = json.loads((directory / "config.json").read_text())
        except FileNotFoundError:
            raise BadInputError(
                f"checkpoint {directory}", expected="config.json", found="no such file"
            ) from None
        except json.JSONDecodeError as error:
            raise BadInputError(
                f"checkpoint {directory}", expected="config.json to be JSON", found=error
            ) from None
        raw: dict[str, np.ndarray] = {}
        for file in sorted({entry.file for entry in manifest.tensors}):
            entries = [entry for entry in manifest.tensors if entry.file == file]
            raw.update(_read_file(directory / file, entries))
        checkpoint = Checkpoint(config, manifest, raw)
        if wrong := checkpoint.mismatches():
            raise BadInputError(
                checkpoint._rule,
                expected="tensors whose xxh3-128 is the manifest's",
                found=f"{len(wrong)} that differ, first {wrong[0]}",
            )
        return checkpoint

    def mismatches(self) -> list[str]:
        """Names of tensors whose bytes in memory differ from the manifest's checksum."""
        return [
            name
            for name, data in self._raw.items()
            if xxhash.xxh3_128_hexdigest(data.data) != self._entries[name].checksum
        ]

    @property
    def checksum(self) -> str:
        """Of all tensors, as long as `mismatches` finds none: xxh3-128, 32 hex digits."""
        lines = (f"{name} {entry.checksum}\n" for name, entry in sorted(self._entries.items()))
        return xxhash.xxh3_128_hexdigest("".join(lines).encode())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str, shape: tuple[int, ...], *dtypes: str) -> Tensor:
        """A view of the tensor's bytes; it counts as used.

        Raises:
            BadInputError: missing, or of another shape or dtype. Scalars may be [] or [1].
        """
        entry = self._entries.get(name)
        if entry is None:
            raise BadInputError(self._rule, expected=f"a tensor {name}", found="none")
        scalar = shape == () and entry.shape == (1,)
        if entry.dtype not in dtypes or not (entry.shape == shape or scalar):
            raise BadInputError(
                f"{self._rule}, {name}",
                expected=f"{' or '.join(dtypes)} {list(shape)}",
                found=f"{entry.dtype} {list(entry.shape)}",
            )
        self._unused.discard(name)
        return torch.from_numpy(self._raw[name]).view(DTYPES[entry.dtype]).reshape(shape)

    def plain(self, name: str, *shape: int) -> Tensor:
        """An unquantized tensor as a float32 copy."""
        return self.tensor(name, shape, "BF16", "F32").to(torch.float32, copy=True)

    def weight(self, module: str, num_outputs: int, num_inputs: int) -> Weight:
        """The weight of a linear module, decoded from whichever layout it has."""
        name = f"{module}.weight"
        dtype = self._entries[name].dtype if name in self._entries else "BF16"
        if dtype == "U8":
            if num_inputs % NVFP4_BLOCK:
                raise BadInputError(
                    f"{self._rule}, {name}",
                    expected=f"inputs in blocks of {NVFP4_BLOCK}",
                    found=num_inputs,
                )
            packed = self.tensor(name, (num_outputs, num_inputs // 2), "U8")
            scale_shape = (num_outputs, num_inputs // NVFP4_BLOCK)
            scale = self.tensor(f"{module}.weight_scale", scale_shape, "F8_E4M3")
            if f"{module}.input_scale" in self:
                self.tensor(f"{module}.input_scale", (), "F32")
            return Weight(
                format=WeightFormat.NVFP4,
                values_OxI=decode_nvfp4(packed, scale),
                scale=self.tensor(f"{module}.weight_scale_2", (), "F32").clone(),
            )
        if dtype == "F8_E4M3":
            return self._fp8(module, num_outputs, num_inputs)
        return Weight(
            format=WeightFormat.BF16, values_OxI=self.plain(name, num_outputs, num_inputs)
        )

    def _fp8(self, module: str, num_outputs: int, num_inputs: int) -> Weight:
        values_OxI = self.tensor(f"{module}.weight", (num_outputs, num_inputs), "F8_E4M3").float()
        channel, block = f"{module}.weight_scale", f"{module}.weight_scale_inv"
        if channel in self:
            scale = self.tensor(channel, (num_outputs, 1), "F32").clone()
            return Weight(format=WeightFormat.FP8_CHANNEL, values_OxI=values_OxI, scale=scale)
        if block in self and self._entries[block].dtype == "U8":
            exponent = (
                self.tensor(block, (num_outputs, num_inputs // MXFP8_BLOCK), "U8").int() - 127
            )
            scale = torch.exp2(exponent.float()).repeat_interleave(MXFP8_BLOCK, dim=-1)
            return Weight(format=WeightFormat.MXFP8, values_OxI=values_OxI * scale)
        blocks = (math.ceil(num_outputs / FP8_BLOCK), math.ceil(num_inputs / FP8_BLOCK))
        scale = self.tensor(block, blocks, "F32").clone()
        return Weight(format=WeightFormat.FP8_BLOCK, values_OxI=values_OxI, scale=scale)

    def finish(self) -> None:
        """Raises BadInputError if the checkpoint has tensors that no one asked for."""
        if self._unused:
            raise BadInputError(
                self._rule,
                expected="only tensors of this architecture",
                found=f"{len(self._unused)} unknown, first {min(self._unused)}",
            )


def _read_file(path: Path, entries: list[TensorEntry]) -> dict[str, np.ndarray]:
    """Each tensor's bytes as a uint8 array that owns its memory."""
    raw = {}
    try:
        with path.open("rb") as file:
            for entry in entries:
                dtype = DTYPES.get(entry.dtype)
                if dtype is None:
                    raise BadInputError(
                        f"tensor {entry.name}", expected=", ".join(DTYPES), found=entry.dtype
                    )
                size = math.prod(entry.shape) * dtype.itemsize
                if entry.end - entry.start != size:
                    raise BadInputError(
                        f"tensor {entry.name}",
                        expected=f"{size} bytes for {entry.dtype} {list(entry.shape)}",
                        found=f"bytes {entry.start} to {entry.end}",
                    )
                data = np.empty(size, np.uint8)
                file.seek(entry.start)
                if file.readinto(data.data) != size:
                    raise BadInputError(
                        f"{path.name}, tensor {entry.name}",
                        expected=f"{entry.end} bytes of file",
                        found=f"{path.stat().st_size}",
                    )
                raw[entry.name] = data
    except FileNotFoundError:
        raise BadInputError(
            f"checkpoint {path.parent}", expected=f"a file {path.name}", found="no such file"
        ) from None
    return raw
