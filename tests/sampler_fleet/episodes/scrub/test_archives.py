"""Everything in archives is seen, and what isn't is said."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest

from sampler_fleet.episodes.scrub.archives import Budget, Unreadable, expand, kind_of
from tests.sampler_fleet.episodes.scrub.adversarial import git, tarred, write, zipped

TEXT = b"a line that must be found\n" * 20


def contents(data: bytes, budget: int = 1 << 20) -> list[bytes]:
    return [content for _, content in expand(data, Budget(budget))]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("zip", zipped(a=TEXT)),
        ("tar", tarred("w", a=TEXT)),
        ("gz", gzip.compress(TEXT)),
        ("gz", gzip.compress(b"first") + gzip.compress(TEXT)),
        ("bz2", bz2.compress(TEXT)),
        ("xz", lzma.compress(TEXT) + b"what follows"),
        ("gz", tarred("w:gz", a=zipped(b=tarred("w:xz", c=TEXT)))),
        (
            "ar",
            b"!<arch>\n" + b"data.tar/       0           0     0     644     520       `\n" + TEXT,
        ),
    ],
    ids=["zip", "tar", "gz", "two gz", "bz2", "xz and more", "nested", "ar"],
)
def test_members_come_out(kind: str, data: bytes):
    assert kind_of(data) == kind
    assert any(TEXT in content for content in contents(data))


@pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd program")
def test_zstd_comes_out():
    packed = subprocess.run(["zstd", "-q"], input=TEXT, capture_output=True, check=True).stdout
    assert contents(packed) == [TEXT]
    with pytest.raises(Unreadable, match="broken"):
        contents(packed[:-10])


def test_packs_bundles_and_loose_objects_come_out(tmp_path: Path):
    git(tmp_path, "init", "-q")
    for number in range(3):  # the later ones become deltas
        write(tmp_path / "a", TEXT + b"line %d of its own\n" % number)
        git(tmp_path, "add", "a")
        git(tmp_path, "commit", "-qm", "c")
    loose = [path for path in (tmp_path / ".git/objects").rglob("*") if path.is_file()]
    assert any(TEXT in content for path in loose for content in contents(path.read_bytes()))
    git(tmp_path, "bundle", "create", "-q", "all", "HEAD")
    git(tmp_path, "repack", "-adq")
    pack = next((tmp_path / ".git/objects/pack").glob("*.pack"))
    for data in (pack.read_bytes(), (tmp_path / "all").read_bytes()):
        found = b"".join(contents(data))
        assert TEXT in found
        assert all(
            b"line %d" % number in found or b"%d of" % number in found for number in range(3)
        )


def test_what_cannot_be_read_is_said():
    packed = zipped(a=TEXT)
    encrypted = bytearray(packed)
    for flags in (6, packed.index(b"PK\x01\x02") + 8):
        encrypted[flags] |= 1
    for data, why in (
        (packed[:40], "broken zip"),
        (bytes(encrypted), "encrypted"),
        (gzip.compress(TEXT)[:-12], "cut off"),
        (b"7z\xbc\xaf\x27\x1c....", "7z"),
        (b"PACK\0\0\0\2\0\0\0\1", "broken pack"),
    ):
        with pytest.raises(Unreadable, match=why):
            contents(data)


def test_bombs_and_endless_nesting_are_stopped(tmp_path: Path):
    for data in (
        zipped(a=bytes(9 << 20)),
        gzip.compress(bytes(9 << 20)),
        lzma.compress(bytes(9 << 20)),
    ):
        with pytest.raises(Unreadable, match="more than may be"):
            contents(data)
    deep = TEXT
    for _ in range(7):
        deep = zipped(a=deep)
    with pytest.raises(Unreadable, match="deep"):
        contents(deep)


def test_other_files_are_no_archives():
    for data in (b"", b"x", TEXT, b"x\x9c not zlib at all", b"x\x9c", bytes(600)):
        assert kind_of(data) == ""
        assert contents(data) == []
