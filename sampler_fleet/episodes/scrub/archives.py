"""What is inside archives, compressed files and packs, and in the archives in them.

Owns telling them by their first bytes and taking them apart in memory, within limits. Nothing is
written to disk, so names in archives can do no harm. What can't be read is said, not skipped. Runs
inside containers too: standard library of Python 3.9.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import shutil
import subprocess
import tarfile
import zipfile
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 5
MAX_BYTES = 512 << 20  # that come out of one file, all levels together
_PACK = b"PACK"
_DELTA_BY_DISTANCE, _DELTA_BY_ID = 6, 7
_BLOCK = 16 << 10
_UNREADABLE = {b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar", b"\xed\xab\xee\xdb": "rpm"}
_COMPRESSED = {
    b"\x1f\x8b": "gz",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zst",
}
_KINDS = {**_COMPRESSED, b"PK\x03\x04": "zip", b"PK\x05\x06": "zip", b"!<arch>\n": "ar"}


class Unreadable(ValueError):
    """An archive that can't be taken apart, and why."""


class Budget:
    """How much may still come out of one file."""

    def __init__(self, num_bytes: int = MAX_BYTES) -> None:
        self.left = num_bytes

    def take(self, data: bytes) -> bytes:
        self.left -= len(data)
        if self.left < 0:
            raise Unreadable("it holds more than may be unpacked")
        return data


def kind_of(data: bytes) -> str:
    """zip, tar, gz, bz2, xz, zst, ar, pack, bundle, zlib, another name, or "" for no archive."""
    for magic, kind in (*_KINDS.items(), *_UNREADABLE.items(), (_PACK, "pack")):
        if data.startswith(magic):
            return kind
    if data.startswith((b"# v2 git bundle\n", b"# v3 git bundle\n")):
        return "bundle"
    if data[257:262] == b"ustar":
        return "tar"
    # A loose git object: its header is known, which other bytes that begin alike don't have.
    if data[:1] == b"\x78" and len(data) > 2 and int.from_bytes(data[:2], "big") % 31 == 0:
        start = zlib.decompressobj()
        try:
            head = start.decompress(data[:256], 64)
        except zlib.error:
            return ""
        return "zlib" if head.startswith((b"blob ", b"commit ", b"tree ", b"tag ")) else ""
    return ""


def expand(data: bytes, budget: Budget, depth: int = 0) -> Iterator[tuple[str, bytes]]:
    """(name, content) of everything in an archive, and in the archives in it; none if it is none.

    Raises:
        Unreadable: what came so far is not all.
    """
    kind = kind_of(data)
    if not kind:
        return
    if depth >= MAX_DEPTH:
        raise Unreadable(f"archives in archives, more than {MAX_DEPTH} deep")
    try:
        for name, inner in _members(kind, data, budget):
            yield name, inner
            for deeper, content in expand(inner, budget, depth + 1):
                yield f"{name}!{deeper}", content
    except Unreadable:
        raise
    except Exception as error:  # broken archives make these libraries raise nearly anything
        raise Unreadable(f"a broken {kind} ({type(error).__name__})") from error


def _members(kind: str, data: bytes, budget: Budget) -> Iterator[tuple[str, bytes]]:
    if kind == "zip":
        yield from _zip(data, budget)
    elif kind == "tar":
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                if file is not None:
                    yield member.name, budget.take(file.read())
    elif kind in _COMPRESSED.values():
        yield kind, _decompress(kind, data, budget)
    elif kind == "zlib":
        yield "object", _inflate(zlib.decompressobj(), data, budget)
    elif kind in ("pack", "bundle"):
        yield from _pack(data, budget)
    elif kind == "ar":
        yield from _ar(data, budget)
    else:
        raise Unreadable(f"{kind} can't be read")


def _zip(data: bytes, budget: Budget) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1:
                raise Unreadable("an encrypted zip")
            if info.file_size > budget.left:
                raise Unreadable("it holds more than may be unpacked")
            yield info.filename, budget.take(archive.read(info))


def _decompress(kind: str, data: bytes, budget: Budget) -> bytes:
    """All members of a compressed file; what follows them is no part of it."""
    if kind == "zst":
        return _zstd(data, budget)
    parts = []
    while data.startswith(next(magic for magic, name in _COMPRESSED.items() if name == kind)):
        if kind == "gz":
            stream = zlib.decompressobj(31)
        else:
            stream = bz2.BZ2Decompressor() if kind == "bz2" else lzma.LZMADecompressor()
        parts.append(_inflate(stream, data, budget))
        data = stream.unused_data
    return b"".join(parts)


def _inflate(stream: object, data: bytes, budget: Budget) -> bytes:
    """One compressed stream. A little more than the budget is taken, to see that it is exceeded."""
    inflated = stream.decompress(data, budget.left + 1)  # type: ignore[attr-defined]
    budget.take(inflated)
    if not stream.eof:  # type: ignore[attr-defined]
        raise Unreadable("it is cut off")
    return inflated


def _zstd(data: bytes, budget: Budget) -> bytes:
    """By the program: the standard library has it only from Python 3.14 on."""
    program = shutil.which("zstd")
    if program is None:
        raise Unreadable("no zstd program")
    source = os.memfd_create("zst")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(source, view) :]
        os.lseek(source, 0, os.SEEK_SET)
        with subprocess.Popen(
            [program, "-dcq"], stdin=source, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            out = process.stdout.read(budget.left + 1)
            process.stdout.close()
            if process.wait() and len(out) <= budget.left:
                raise Unreadable("a broken zst")
    finally:
        os.close(source)
    return budget.take(out)


def _pack(data: bytes, budget: Budget) -> Iterator[tuple[str, bytes]]:
    """The entries of a git pack or bundle. Of a delta, what it inserts: its new lines are there."""
    entry = data.index(_PACK) + 12
    for number in range(int.from_bytes(data[entry - 4 : entry], "big")):
        kind = data[entry] >> 4 & 7
        entry = _after_varint(data, entry)
        if kind == _DELTA_BY_DISTANCE:
            entry = _after_varint(data, entry)
        elif kind == _DELTA_BY_ID:
            entry += 20
        stream, parts = zlib.decompressobj(), []
        while not stream.eof:
            block = data[entry : entry + _BLOCK]
            if not block:
                raise Unreadable("it is cut off")
            parts.append(budget.take(stream.decompress(block)))
            entry += len(block) - len(stream.unused_data)
        yield f"object-{number}", b"".join(parts)


def _after_varint(data: bytes, position: int) -> int:
    while data[position] & 0x80:
        position += 1
    return position + 1


def _ar(data: bytes, budget: Budget) -> Iterator[tuple[str, bytes]]:
    """Debian packages and static libraries."""
    position = 8
    while position + 60 <= len(data):
        name = data[position : position + 16].decode("latin-1").strip(" /")
        size = int(data[position + 48 : position + 58])
        yield name, budget.take(data[position + 60 : position + 60 + size])
        position += 60 + size + size % 2
