"""The text of a manifest, which holds its own checksum: the same on disk and on the wire.

Owns that text. Files and tensors stand by column, as a large mixture of experts has 400,000
tensors; whatever the checksum does not vouch for is refused as a whole.

    {"checksum":"<xxh3-128 of the object that follows, 32 hex digits>","manifest":{...}}
"""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import chain
from typing import Any

import xxhash

from contracts.errors import RetryError
from contracts.types import FileEntry, Manifest, TensorEntry, WeightFormat

_BEFORE, _BETWEEN, _AFTER = b'{"checksum":"', b'","manifest":', b"}\n"
_TYPES = {
    **dict.fromkeys(("name", "dtype", "file", "checksum"), str),
    **dict.fromkeys(("start", "end", "num_bytes"), int),
    "shape": list,
}


def manifest_to_text(manifest: Manifest) -> bytes:
    content = {
        "version": manifest.version,
        "base_version": manifest.base_version,
        "format": manifest.format,
        "recipe": manifest.recipe,
        "files": _columns(manifest.files, FileEntry),
        "tensors": _columns(manifest.tensors, TensorEntry),
    }
    body = json.dumps(content, separators=(",", ":")).encode()
    return _BEFORE + _checksum(body) + _BETWEEN + body + _AFTER


def manifest_from_text(text: bytes) -> Manifest:
    """Raises RetryError unless the text is one of `manifest_to_text`, every bit of it."""
    start = len(_BEFORE) + 32 + len(_BETWEEN)
    body = text[start : -len(_AFTER)]
    if text[:start] != _BEFORE + _checksum(body) + _BETWEEN or text[-len(_AFTER) :] != _AFTER:
        raise RetryError("a manifest whose bytes are not those of its checksum")
    try:
        content = json.loads(body)
        scalars = {name: content[name] for name in ("version", "base_version", "recipe")}
        if [*map(type, scalars.values())] != [int, int, str]:
            raise TypeError
        return Manifest(
            **scalars,
            format=WeightFormat(content["format"]),
            files=tuple(
                FileEntry(name=name, num_bytes=num_bytes, checksum=checksum)
                for name, num_bytes, checksum in _rows(content["files"], FileEntry)
            ),
            tensors=tuple(
                TensorEntry(
                    **{"name": name, "dtype": dtype, "shape": tuple(shape), "file": file},
                    **{"start": start, "end": end, "checksum": checksum},
                )
                for name, dtype, shape, file, start, end, checksum in _rows(
                    content["tensors"], TensorEntry
                )
            ),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RetryError("a manifest of another software version") from None


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


def _columns(entries: tuple[Any, ...], kind: type) -> dict[str, list[Any]]:
    names = [field.name for field in fields(kind)]
    return {name: [getattr(entry, name) for entry in entries] for name in names}


def _rows(columns: dict[str, list[Any]], kind: type) -> zip[tuple[Any, ...]]:
    names = [field.name for field in fields(kind)]
    for name in names:
        if not set(map(type, columns[name])) <= {_TYPES[name]}:
            raise TypeError
    if not set(map(type, chain.from_iterable(columns.get("shape", ())))) <= {int}:
        raise TypeError
    return zip(*(columns[name] for name in names), strict=True)
