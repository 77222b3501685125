"""A repository as image builders leave it: the fix is nearly everywhere. Made by real git.

Each leak is planted once under a path of its own, with the class that must find it there.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import os
import py_compile
import sqlite3
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sampler_fleet.episodes.scrub.findings import Target

READING = """\
from gauge import units


def read(raw_value, sensor_profile):
    value = units.scale(raw_value)
    return value
"""
FIXED = """\
from gauge import units


def calibrate_offset(value, sensor_profile):
    return value - sensor_profile.get("zero drift & <offset>", 0)


def read(raw_value, sensor_profile):
    value = units.scale(raw_value)
    return calibrate_offset(value, sensor_profile)
"""
NEWS = "- Readings are calibrated by the drift of each sensor\n  profile before they leave\n"
CHANGELOG = "# Changes\n\n- First public release\n- Scales are exact\n\n"
PATCH = """\
diff --git a/gauge/reading.py b/gauge/reading.py
index 1111111..2222222 100644
--- a/gauge/reading.py
+++ b/gauge/reading.py
@@ -1,6 +1,10 @@
 from gauge import units
 
 
+def calibrate_offset(value, sensor_profile):
+    return value - sensor_profile.get("zero drift & <offset>", 0)
+
+
 def read(raw_value, sensor_profile):
     value = units.scale(raw_value)
-    return value
+    return calibrate_offset(value, sensor_profile)
diff --git a/CHANGELOG.md b/CHANGELOG.md
index 1111111..2222222 100644
--- a/CHANGELOG.md
+++ b/CHANGELOG.md
@@ -1,4 +1,6 @@
 # Changes
 
+- Readings are calibrated by the drift of each sensor
+  profile before they leave
 - First public release
 - Scales are exact
"""
INSTANCE = "acme__gauge-4711"
TEST = """\
import unittest
from gauge.reading import read

class Reading(unittest.TestCase):
    def test_scales(self):
        self.assertEqual(read(3, {}), 30)

if __name__ == "__main__":
    unittest.main()
"""
# What a task needs. Names that look like leaks are among them, because they are tracked.
HONEST: dict[str, bytes] = {
    "gauge/__init__.py": b"",
    "gauge/reading.py": READING.encode(),
    "gauge/units.py": b"def scale(value):\n    return 10 * value\n",
    "tests/test_reading.py": TEST.encode(),
    "tests/data/sample.log": b"a log that tests read\n",
    "tests/data/change.patch": b"--- a\n+++ b\n",
    "tests/data/old.orig": b"kept\n",
    "build/lib/notes.txt": b"tracked, whatever its name\n",
    "pyproject.toml": b'[project]\nname = "gauge-kit"\nversion = "1.4.0"\n',
    ".gitignore": b"*.log\n__pycache__/\n/local.cfg\n",
    "windows.txt": b"one\r\ntwo\r\n",
    "caf\xe9.txt".encode("latin-1").decode("latin-1"): "Grüße\n".encode(),
    "run.sh": b"#!/bin/sh\nexec python3 -m unittest\n",
}
UNTRACKED: dict[str, bytes] = {
    "local.cfg": b"ignored, and needed by the tests\n",
    "env/lib/python3.11/site-packages/other/__init__.py": b"",
    "env/lib/python3.11/site-packages/other/dist/run.log": b"of another project\n",
    "env/lib/python3.11/site-packages/other/__pycache__/x.cpython-311.pyc": b"\0compiled",
    "node_modules/left/dist/index.js": b"module.exports = 1\n",
}
_WHO = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", "Ann"), ("EMAIL", "ann@example.org"))}  # fmt: skip
_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **_WHO,
}


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """The repository, the directories around it, and where which class must be found."""

    target: Target
    root: Path
    around: Path  # the extra root
    elsewhere: Path  # neither tree nor extra root: nothing of it may change
    planted: tuple[tuple[str, str], ...]  # (class, path as reports show it)


def git(root: Path, *arguments: str, stdin: bytes = b"") -> str:
    command = ["git", "-c", "protocol.file.allow=always", *arguments]
    run = subprocess.run(
        command, cwd=root, env=_ENVIRONMENT, input=stdin, capture_output=True, check=True
    )
    return run.stdout.decode().strip()


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)  # always of the same time
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return file.getvalue()


def tarred(mode: Literal["w", "w:gz", "w:xz"], **members: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def write_tree(root: Path) -> None:
    """The base tree: only what a task needs."""
    for path, data in {**HONEST, **UNTRACKED}.items():
        write(root / path, data)
    (root / "run.sh").chmod(0o755)
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    (root / "docs").mkdir()
    (root / "docs" / "latest").symlink_to("../gauge")
    (root / "env" / "lib64").symlink_to("lib")
    (root / "tests" / "data" / "sample.zip").write_bytes(zipped(a=b"honest"))


TRACKED = (*HONEST, "CHANGELOG.md", "docs/latest", "tests/data/sample.zip")


def build(place: Path) -> Adversary:
    """Plants everything below `place`."""
    root, around, elsewhere = place / "tree", place / "around", place / "elsewhere"
    for folder in (root, around, elsewhere):
        folder.mkdir(parents=True)
    write_tree(root)
    planted = [
        *_plant_git(root, around),
        *_plant_names(root),
        *_plant_project(root, around),
        *_plant_contents(root, elsewhere),
        *_plant_edges(root, elsewhere),
    ]
    target = Target(str(root), PATCH, (str(around),), (INSTANCE, "fix-4711"))
    return Adversary(
        target=target, root=root, around=around, elsewhere=elsewhere, planted=tuple(planted)
    )


def _plant_git(root: Path, around: Path) -> list[tuple[str, str]]:
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-f", "--", *TRACKED)
    git(root, "commit", "-qm", "Base")
    library = around / "library"
    library.mkdir()
    git(library, "init", "-q")
    write(library / "code.py", "x = 1\n")
    git(library, "add", ".")
    git(library, "commit", "-qm", "Library")
    git(root, "submodule", "--quiet", "add", str(library), "vendored/library")
    url = ("submodule.vendored/library.url", "https://example.org/acme/library")
    git(root, "config", "-f", ".gitmodules", *url)  # the same wherever this is built
    write(root / "CHANGELOG.md", CHANGELOG + NEWS)  # the builder committed the fix's entry
    git(root, "commit", "-qam", "Base with a submodule")
    base = git(root, "rev-parse", "HEAD")
    git(root, "checkout", "-qb", "fix-4711")
    write(root / "gauge/reading.py", FIXED)
    git(root, "commit", "-qam", "Fix #4711")
    fix = git(root, "rev-parse", "HEAD")
    git(root, "tag", "v1.4.1")
    git(root, "tag", "-am", "Release", "v1.4.1-final")
    git(root, "update-ref", "refs/pull/4711/head", fix)
    git(root, "pack-refs", "--all")
    git(root, "notes", "add", "-m", "fixes 4711", base)
    git(root, "checkout", "-q", "main")
    git(root, "replace", base, fix)
    write(root / "gauge/reading.py", FIXED + "# stashed\n")
    git(root, "--no-replace-objects", "stash", "-q")
    git(root, "worktree", "add", "-qf", str(around / "worktree"), "fix-4711")
    git(root, "update-ref", "ORIG_HEAD", fix)
    git(root, "config", "remote.origin.url", "https://example.org/acme/gauge")
    blob = git(root, "hash-object", "-w", "--stdin", stdin=f"{FIXED}# nobody's\n".encode())
    staged = git(root, "hash-object", "-w", "--stdin", stdin=FIXED.encode())
    git(root, "update-index", "--cacheinfo", f"100644,{staged},gauge/reading.py")
    git(root, "bundle", "create", "-q", "all.bin", "fix-4711")
    dot = root / ".git"
    packed = git(root, "pack-objects", "-q", ".git/objects/pack/pack", stdin=f"{blob}\n".encode())
    write(dot / f"objects/pack/pack-{packed}.keep", "")
    write(root / "lost.bin", (dot / f"objects/pack/pack-{packed}.pack").read_bytes())
    borrowed = around / "borrowed.git"
    git(around, "init", "-q", "--bare", str(borrowed))
    git(borrowed, "hash-object", "-w", "--stdin", stdin=f"{FIXED}# borrowed\n".encode())
    write(dot / "objects/info/alternates", f"{borrowed}/objects\n")
    write(dot / "hooks/post-checkout", "#!/bin/sh\n")
    write(dot / "rr-cache/1f/postimage", FIXED)
    write(dot / "lfs/objects/ab/cd/abcd", FIXED)
    write(dot / "info/grafts", "")
    write(dot / "FETCH_HEAD", f"{fix}\t\tbranch 'fix-4711' of example.org\n")
    write(dot / "BISECT_LOG", f"# good: {fix}\n")
    write(dot / "mystery", FIXED)
    write(dot / "objects/pack/tmp_pack_1", FIXED)
    write(dot / "objects/ab/kept", FIXED)
    write(dot / "refs/heads/not a ref", FIXED)
    with (dot / "config").open("a") as file:
        file.write(f"# {FIXED.splitlines()[-1]}\n")
    return [
        ("git-history", ".git"),
        ("git-refs", ".git/refs/heads/fix-4711"),
        ("git-refs", ".git/refs/tags/v1.4.1-final"),
        ("git-refs", ".git/refs/pull/4711/head"),
        ("git-notes", ".git/refs/notes/commits"),
        ("git-stash", ".git/refs/stash"),
        ("git-replace", f".git/refs/replace/{base}"),
        ("git-packed-refs", ".git/packed-refs"),
        ("git-reflog", ".git/logs"),
        ("git-worktrees", ".git/worktrees"),
        ("git-alternates", ".git/objects/info/alternates"),
        ("git-modules", ".git/modules"),
        ("git-heads", ".git/ORIG_HEAD"),
        ("git-heads", ".git/FETCH_HEAD"),
        ("git-heads", ".git/BISECT_LOG"),
        ("git-hooks", ".git/hooks"),
        ("git-config", ".git/config"),
        ("git-index", "gauge/reading.py"),
        ("git-objects", ".git"),
        ("git-packs", f".git/objects/pack/pack-{packed}.keep"),
        ("git-packs", ".git/objects/pack/tmp_pack_1"),
        ("git-other", ".git/objects/ab/kept"),
        ("git-refs", ".git/refs/heads/not a ref"),
        ("gold-object", ".git/config"),
        ("git-rerere", ".git/rr-cache"),
        ("git-lfs", ".git/lfs"),
        ("git-shallow", ".git/info/grafts"),
        ("git-other", ".git/mystery"),
        ("gold-object", f".git object {blob}"),
        ("nested-repository", "vendored/library/.git"),
        ("nested-repository", str(borrowed)),
        ("nested-repository", str(around / "worktree" / ".git")),
        ("git-bundle", "all.bin"),
        ("stray-pack", "lost.bin"),
        ("gold-changelog", "CHANGELOG.md"),
    ]


def _plant_names(root: Path) -> list[tuple[str, str]]:
    """Files that their names give away; they hold no line of the patch."""
    fixed = write(root.parent / "elsewhere" / "reading.py", FIXED)
    cached = root / "gauge/__pycache__"
    cached.mkdir()
    py_compile.compile(str(fixed), str(cached / "reading.cpython-311.pyc"))
    fixed.unlink()
    files = {
        "test-cache": (".pytest_cache/v/cache/lastfailed", '{"tests/test_reading.py": true}'),
        "tool-cache": (".mypy_cache/3.11/gauge/reading.data.json", "{}"),
        "package-cache": (".cache/pip/http-v2/1/2/3", "cached"),
        "log": ("ci.log", "FAILED tests/test_drift.py"),
        "history-file": (".bash_history", "git cherry-pick 1234567"),
        "editor-file": ("gauge/.reading.py.swp", "b0VIM"),
        "patch-file": ("solution.diff", "--- a\n+++ b\n"),
        "setup-script": ("preprocess.sh", "git fetch origin pull/4711/head"),
        "credentials": (".netrc", "machine example.org"),
        "build-output": ("build/lib.linux/gauge/x.py", "x"),
        "telling-name": (f"work/{INSTANCE}/readme", "nothing"),
    }
    shown = {
        "test-cache": ".pytest_cache",
        "tool-cache": ".mypy_cache",
        "package-cache": ".cache/pip",
        "build-output": "build/lib.linux",
        "telling-name": f"work/{INSTANCE}",
    }
    for path, text in files.values():
        write(root / path, text)
    write(root / "junit.xml", "<x/>")
    write(root / "report.txt", '<?xml version="1.0"?><testsuites><testsuite name="drift"/>')
    write(root / ".coverage", "SQLite")
    write(root / "node_modules/.cache/babel/1.json", "{}")
    write(root / "gauge/_fast.so", b"\x7fELF\0calibrate_offset\0")
    return [
        *((kind, shown.get(kind, path)) for kind, (path, _) in files.items()),
        ("bytecode", "gauge/__pycache__"),
        ("test-report", "junit.xml"),
        ("test-report", "report.txt"),
        ("test-report", ".coverage"),
        ("build-output", "gauge/_fast.so"),
        ("tool-cache", "node_modules/.cache"),
    ]


def _plant_project(root: Path, around: Path) -> list[tuple[str, str]]:
    """The project itself, in another version. None of it holds a line of the patch."""
    later = READING + "# later\n"
    site = around / "lib/python3.11/site-packages"
    write(site / "gauge/reading.py", later)
    write(site / "gauge_kit-1.4.1.dist-info/METADATA", "Version: 1.4.1\n")
    write(site / "other/reading.py", "x = 1\n")
    python = root / "env/lib/python3.11/site-packages/gauge/__pycache__/reading.cpython-311.pyc"
    write(python, b"\0compiled")
    write(root / "gauge_kit.egg-info/PKG-INFO", "Name: gauge-kit\nVersion: 1.4.1\n")
    write(root / "copies/gauge/reading.py", later)
    write(root / "wheels/gauge_kit-1.4.1-py3-none-any.whl", "not even a wheel")
    return [
        ("installed-copy", str(site / "gauge")),
        ("installed-copy", str(site / "gauge_kit-1.4.1.dist-info")),
        ("bytecode", str(python.relative_to(root))),
        ("egg-info", "gauge_kit.egg-info"),
        ("other-copy", "copies/gauge/reading.py"),
        ("distribution", "wheels/gauge_kit-1.4.1-py3-none-any.whl"),
    ]


def _plant_contents(root: Path, elsewhere: Path) -> list[tuple[str, str]]:
    """Files that only what they hold gives away."""
    fixed = FIXED.encode()
    database = elsewhere / "new.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table snippets (text)")
        connection.execute("insert into snippets values (?)", (FIXED,))
    connection.close()
    loose = root / ".git/objects"
    lost = next(path for path in loose.rglob("*") if path.is_file() and _is_fix(path))
    deep = tarred("w", code=zipped(inner=tarred("w:gz", reading=fixed)))
    texts: dict[str, bytes | str] = {
        "notes/plain.txt": FIXED,
        "notes/ci-output": PATCH,
        "notes/session.json": json.dumps({"patch": PATCH}),
        "notes/page.html": FIXED.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;"),
        "notes/utf16.txt": FIXED.encode("utf-16"),
        "notes/snippets.db": database.read_bytes(),
    }
    archives = {
        "notes/a.bin": zipped(reading=fixed),
        "notes/b.bin": bz2.compress(fixed),
        "notes/c.bin": lzma.compress(fixed),
        "notes/d.bin": tarred("w:gz", reading=fixed),
        "notes/e.bin": deep,
        "notes/f.bin": lost.read_bytes(),
        "notes/g.bin": zipped(p=(root / "lost.bin").read_bytes()),
    }
    for path, data in {**texts, **archives}.items():
        write(root / path, data)
    write(root / "notes/broken.bin", zipped(a=b"1" * 1000)[:60])
    database.unlink()
    return [
        *(("gold-text", path) for path in texts),
        *(("gold-archive", path) for path in archives),
        ("unread-archive", "notes/broken.bin"),
    ]


def _is_fix(path: Path) -> bool:
    import zlib

    try:
        return b"calibrate_offset" in zlib.decompress(path.read_bytes())
    except zlib.error:
        return False


def _plant_edges(root: Path, elsewhere: Path) -> list[tuple[str, str]]:
    write(elsewhere / "upstream/reading.py", FIXED)
    (root / "upstream").symlink_to(elsewhere / "upstream")
    (root / "fixed.py").symlink_to(elsewhere / "upstream/reading.py")
    (root / "system").symlink_to("/usr/bin/env")
    os.link(root / "gauge/units.py", elsewhere / "units.py")
    for path in TRACKED:
        os.utime(root / path, (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    for path in ("gauge/reading.py", "CHANGELOG.md"):
        os.utime(root / path, (1_000_000_500, 1_000_000_500))
    for path in (*(root / "vendored").rglob("*"), root / ".gitmodules"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return [
        ("outward-link", "upstream"),
        ("outward-link", "fixed.py"),
        ("hard-link", "gauge/units.py"),
        ("telling-times", "CHANGELOG.md"),
    ]
