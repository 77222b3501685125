"""Manifests: every byte of one version in one format, named and checksummed.

Owns `manifest.json`, which files of a directory belong to a checkpoint, and the comparison of a
directory with its manifest. A manifest never lists itself.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from contracts.errors import BadInputError, RetryError
from contracts.types import FileEntry, Manifest, TensorEntry, WeightFormat
from weight_sync import durable
from weight_sync.safetensors_file import Mapping, read_headers

NAME = "manifest.json"
_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")


class CorruptError(RetryError):
    """Bytes are not those of their checksum: discard them and get them again."""


def is_plain_name(name: str) -> bool:
    """Whether a name from a peer is safe to use in a directory of ours."""
    return bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}


def checkpoint_files(directory: Path) -> list[Path]:
    """The files of a Hugging Face checkpoint directory, sorted by name.

    Raises:
        BadInputError: without config.json it is none.
    """
    if not (directory / "config.json").is_file():
        raise BadInputError(
            f"checkpoint {directory}", expected="a directory with config.json", found="none"
        )
    return sorted(
        path
        for path in directory.iterdir()
        if path.suffix in _SUFFIXES
        and path.name != NAME
        and is_plain_name(path.name)
        and path.is_file()
    )


def describe_file(path: Path) -> tuple[FileEntry, tuple[TensorEntry, ...]]:
    """A file's checksum and, of safetensors, each tensor's; reads the bytes once from disk."""
    if not (size := path.stat().st_size):
        return FileEntry(name=path.name, num_bytes=0, checksum=durable.checksum(b"")), ()
    mapping = Mapping(path)
    entry = FileEntry(name=path.name, num_bytes=size, checksum=durable.checksum(mapping.data.data))
    headers = read_headers(path) if path.suffix == ".safetensors" else {}
    tensors = tuple(
        TensorEntry(
            name=name,
            dtype=header.dtype,
            shape=header.shape,
            file=header.file,
            start=header.start,
            end=header.end,
            checksum=durable.checksum(mapping.data[header.start : header.end].data),
        )
        for name, header in sorted(headers.items(), key=lambda item: item[1].start)
    )
    mapping.release(0, size)
    return entry, tensors


def describe_directory(
    directory: Path, *, version: int, format: WeightFormat, recipe: str
) -> Manifest:
    """Reads and checksums a whole checkpoint directory.

    Raises:
        BadInputError: not a checkpoint, or a broken safetensors file.
    """
    files, tensors = [], []
    for path in checkpoint_files(directory):
        entry, entries = describe_file(path)
        files.append(entry)
        tensors.extend(entries)
    if not tensors:
        raise BadInputError(f"checkpoint {directory}", expected="tensors", found="none")
    return Manifest(
        version=version, format=format, recipe=recipe, files=tuple(files), tensors=tuple(tensors)
    )


def verify_directory(directory: Path, manifest: Manifest) -> None:
    """Recomputes every checksum.

    Raises:
        CorruptError: a missing file, another size, or other bytes, with the file or tensor named.
    """
    for entry in manifest.files:
        verify_file(directory / entry.name, manifest, entry)


def verify_file(path: Path, manifest: Manifest, expected: FileEntry) -> None:
    """One file of a manifest, and each tensor in it; raises CorruptError as above.

    Its name may be another one while it is not yet complete.
    """
    tensors = {entry.name: entry for entry in manifest.tensors if entry.file == expected.name}
    try:
        found, entries = describe_file(path)
    except FileNotFoundError:
        raise CorruptError(f"{path} of version {manifest.version} is missing") from None
    except BadInputError as error:
        raise CorruptError(f"version {manifest.version}: {error}") from None
    wrong = [entry.name for entry in entries if tensors.get(entry.name) != entry]
    if wrong:
        raise CorruptError(
            f"{path} of version {manifest.version}: tensor {wrong[0]} is not the one announced"
        )
    found = dataclasses.replace(found, name=expected.name)
    if found != expected or len(entries) != len(tensors):
        raise CorruptError(
            f"{path} of version {manifest.version}: expected {expected.num_bytes} bytes with "
            f"checksum {expected.checksum}, found {found.num_bytes} with {found.checksum}"
        )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), separators=(",", ":"))
    durable.write_text(directory / NAME, text + "\n")


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a directory, or in a file.

    Raises:
        FileNotFoundError: no manifest there.
        BadInputError: not a manifest.
    """
    path = Path(path)
    path = path / NAME if path.is_dir() else path
    try:
        data = json.loads(path.read_text())
        return Manifest(
            version=data["version"],
            format=WeightFormat(data["format"]),
            recipe=data["recipe"],
            base_version=data["base_version"],
            files=tuple(FileEntry(**entry) for entry in data["files"]),
            tensors=tuple(
                TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
                for entry in data["tensors"]
            ),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise BadInputError(f"{path}", expected="a manifest", found=f"{error!r}") from None
