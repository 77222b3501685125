"""The project that a tree is of, and copies of it that were installed in other versions.

Owns the project's names and version as its metadata says, and judging installed copies by their
metadata and by the files that the gold patch touches. Only reads. Runs inside containers too:
standard library of Python 3.9.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_METADATA = {
    "pyproject.toml": r"^\s*{}\s*=\s*[\"']([^\"']+)[\"']",
    "setup.cfg": r"^\s*{}\s*=\s*([^\s:]+)\s*$",
    "setup.py": r"^\s*{}\s*=\s*[\"']([^\"']+)[\"']",
    "package.json": r"^  ?(?:  )?\"{}\"\s*:\s*\"([^\"]+)\"",
}
_TABLE = re.compile(r"^\[(?:project|tool\.poetry)\]\s*$(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
_NOT_INSTALLED = ("tests", "test", "docs", "doc", "examples", "scripts", "setup.py", "conftest.py")
_ARCHIVES = (".whl", ".tar.gz", ".tar.bz2", ".tar.xz", ".zip", ".egg", ".tgz")


@dataclass(frozen=True)
class Project:
    """Names in normal form; version "" where the metadata doesn't say (or derives it)."""

    root: str
    names: frozenset[str]
    version: str
    touched: tuple[str, ...]  # paths of the gold patch
    modules: tuple[tuple[str, str], ...]  # (path as it is imported, path in the tree)

    def owns(self, name: str) -> bool:
        return normal(name) in self.names

    def other_version(self, version: str) -> bool:
        own, other = (normal(one.partition("+")[0]) for one in (self.version, version))
        return bool(own and other) and own != other

    def differs(self, path: str, touched: str) -> bool:
        """Whether a copy of a touched file is another version than the tree's."""
        own = os.path.join(self.root, touched)
        if not os.path.isfile(own):
            return True
        with open(own, "rb") as one, open(path, "rb") as other:
            return one.read() != other.read()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def find_project(root: str, touched: Collection[str]) -> Project:
    """What the metadata at the top of the tree says."""
    names, version = set(), ""
    for file, pattern in _METADATA.items():
        path = os.path.join(root, file)
        if not os.path.isfile(path) or os.path.islink(path):
            continue
        with open(path, encoding="utf-8", errors="replace") as opened:
            text = opened.read()
        if file == "pyproject.toml":
            text = "\n".join(match[1] for match in _TABLE.finditer(text))
        for field in ("name", "version"):
            found = re.search(pattern.format(field), text, re.MULTILINE)
            if found and field == "name":
                names.add(normal(found[1]))
            elif found and not version:
                version = found[1]
    modules = tuple(
        (imported, path)
        for imported, path in ((_imported(root, path), path) for path in touched)
        if imported.split("/")[0] not in _NOT_INSTALLED
    )
    return Project(root, frozenset(names), version, tuple(touched), modules)


def _imported(root: str, path: str) -> str:
    """A file's path from the directory that an import starts in."""
    parts = path.split("/")
    for start in range(len(parts) - 1):
        if os.path.isfile(os.path.join(root, *parts[: start + 1], "__init__.py")):
            return "/".join(parts[start:])
    return "/".join(parts[1:] if parts[0] in ("src", "lib") and len(parts) > 1 else parts)


def is_distribution(project: Project, name: str) -> bool:
    """Whether a file's name is that of a wheel, egg or sdist of the project."""
    for ending in _ARCHIVES:
        if name.lower().endswith(ending):
            stem = name[: -len(ending)]
            found = re.match(r"(.+?)-v?\d", stem)
            return bool(found) and project.owns(found[1])
    return False


def installed_copies(project: Project, folder: str) -> Iterator[tuple[str, str]]:
    """(path, why) of what a site-packages or node_modules holds of the project's other versions."""
    if os.path.basename(folder) == "node_modules":
        yield from _node_copies(project, folder)
        return
    entries = sorted(os.listdir(folder))
    why = ""
    for imported, touched in project.modules:
        path = os.path.join(folder, imported)
        if os.path.isfile(path) and project.differs(path, touched):
            why = f"its {imported} is not the tree's"
    for entry in entries:
        found = re.match(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(dist-info|egg-info|egg)$", entry)
        if not found or not project.owns(found[1]) or _editable(os.path.join(folder, entry)):
            continue
        if project.other_version(found[2]):
            why = why or f"version {found[2]}"
    if not why:
        return
    tops = {imported.split("/")[0] for imported, _ in project.modules}
    for entry in entries:
        found = re.match(r"(.+?)-[^-]+(-py[\d.]+)?\.(dist-info|egg-info|egg)$", entry)
        path = os.path.join(folder, entry)
        if entry in tops or (found and project.owns(found[1]) and not _editable(path)):
            yield path, why


def _editable(path: str) -> bool:
    """An editable install: nothing of the project but a pointer to the tree."""
    try:
        with open(os.path.join(path, "direct_url.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("dir_info", {}).get("editable"))
    except (OSError, ValueError, AttributeError):
        return False


def _node_copies(project: Project, folder: str) -> Iterator[tuple[str, str]]:
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        package = os.path.join(path, "package.json")
        if project.owns(name) and not os.path.islink(path) and os.path.isfile(package):
            with open(package, encoding="utf-8", errors="replace") as file:
                found = re.search(r"\"version\"\s*:\s*\"([^\"]+)\"", file.read())
            if found and project.other_version(found[1]):
                yield path, f"version {found[1]}"


def stale_egg_info(project: Project, path: str) -> str:
    """Why metadata beside the sources is of a later version; "" if it isn't."""
    for file in ("PKG-INFO", "METADATA"):
        text = _read(os.path.join(path, file))
        found = re.search(r"^Version: (\S+)", text, re.MULTILINE)
        if found and project.other_version(found[1]):
            return f"version {found[1]}"
    listed = set(_read(os.path.join(path, "SOURCES.txt")).split("\n"))
    for touched in project.touched:
        if touched in listed and not os.path.exists(os.path.join(project.root, touched)):
            return f"lists {touched}"
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def other_copy(project: Project, relative: str, path: str) -> str:
    """The touched file that an untracked file is another version of; "" if it is none."""
    for imported, touched in project.modules:
        own = relative == touched
        same = any(relative.endswith(f"/{tail}") for tail in {imported, touched} if "/" in tail)
        if same and not own and os.path.isfile(path) and project.differs(path, touched):
            return touched
    return ""
