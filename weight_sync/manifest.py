"""Manifests: every byte of one version in one format, named and checksummed.

Owns `manifest.json`, which files of a directory belong to a checkpoint, and the comparison of a
directory with its manifest. A manifest never lists itself; its text is `contracts.manifests`'.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from contracts.errors import LONGEST_NAME, BadInputError, RetryError
from contracts.manifests import manifest_from_text, manifest_to_text
from contracts.types import FileEntry, Manifest, TensorEntry, WeightFormat
from weight_sync import durable
from weight_sync.safetensors_file import Mapping, read_headers

NAME = "manifest.json"
# Weights, configs, tokenizers (SentencePiece, tiktoken, BPE), templates, a model's own code.
_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
_SUFFIXES += (".tiktoken", ".bpe", ".spm", ".py")


class CorruptError(RetryError):
    """Bytes are not those of their checksum: discard them and get them again."""


def is_plain_name(name: str) -> bool:
    """Whether a name from a peer is safe to use in a directory of ours, also with a suffix."""
    return (
        bool(name)
        and name.isprintable()
        and len(name.encode()) <= LONGEST_NAME
        and not name.startswith(".")
        and not set(name) & {"/", "\\"}
    )


def is_checkpoint_name(name: str) -> bool:
    """Whether a checkpoint may have such a file; others in its directory are passed over."""
    return is_plain_name(name) and name != NAME and name.endswith(_SUFFIXES)


def version_of(name: str) -> int | None:
    """The version that a directory of this name holds; None if it is none of ours."""
    return int(name) if re.fullmatch(r"[1-9][0-9]{0,18}", name) else None


def checkpoint_files(directory: Path) -> list[Path]:
    """The files of a Hugging Face checkpoint directory, sorted by name.

    Raises:
        BadInputError: without config.json it is none.
    """
    if not (directory / "config.json").is_file():
        raise BadInputError(
            f"checkpoint {directory}", expected="a directory with config.json", found="none"
        )
    return sorted(p for p in directory.iterdir() if is_checkpoint_name(p.name) and p.is_file())


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
    what = f"{expected.name} of version {manifest.version} in {manifest.format}"
    try:
        found, entries = describe_file(path)
    except FileNotFoundError:
        raise CorruptError(f"{what} is missing") from None
    except BadInputError:
        raise CorruptError(f"{what} is no whole safetensors file") from None
    wrong = [entry.name for entry in entries if tensors.get(entry.name) != entry]
    if wrong:
        raise CorruptError(f"{what}: tensor {wrong[0]} is not the one announced")
    found = dataclasses.replace(found, name=expected.name)
    if found != expected or len(entries) != len(tensors):
        raise CorruptError(
            f"{what}: expected {expected.num_bytes} bytes with checksum {expected.checksum}, "
            f"found {found.num_bytes} with {found.checksum}"
        )


def extra_files(directory: Path, manifest: Manifest) -> list[Path]:
    """What lies in a version's directory and is no file of its manifest."""
    names = {NAME, *(entry.name for entry in manifest.files)}
    with os.scandir(directory) as found:
        return [
            directory / entry.name
            for entry in found
            if entry.name not in names or not entry.is_file(follow_symlinks=False)
        ]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    durable.write_bytes(directory / NAME, manifest_to_text(manifest))


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a directory, or in a file.

    Raises:
        FileNotFoundError: no manifest there.
        CorruptError: not a manifest, one of which a bit has changed, or one that cannot be read.
    """
    path = Path(path)
    path = path / NAME if path.is_dir() else path
    try:
        return manifest_from_text(path.read_bytes())
    except RetryError as error:
        raise CorruptError(f"{path}: {error}") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in durable.TEMPORARY:
            raise
        raise CorruptError(f"{path}: {error.strerror}") from None
