"""A package as `tasks make` needs it: its files, its tests, its licence, from a source directory.

Owns what of an unpacked sdist or a checkout is the package, what tests it, and what is left out.
Reads files; runs nothing of them. A `src/` folder is flattened: tasks have their modules at the
root.
"""

from __future__ import annotations

import email.parser
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from contracts.errors import BadInputError
from sampler_fleet.episodes.tasks.sources.files import read_text, read_toml, walk

_TEST_FOLDERS = ("tests", "test")
_NO_MODULES = (*_TEST_FOLDERS, "setup", "conftest", "noxfile", "docs", "examples", "benchmarks")
_COMPILED = (".c", ".cc", ".cpp", ".pyx", ".pxd", ".rs", ".f90", ".so", ".pyd")
_NAME = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", re.ASCII)
_LICENSES = ("license*", "licence*", "copying*")
_LICENSE_CLASSIFIER = "License :: OSI Approved :: "


@dataclass(frozen=True, kw_only=True)
class SideModule:
    """A module of the test side: tests, or what tests import."""

    path: str
    source: str
    is_tests: bool

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


@dataclass(frozen=True, kw_only=True)
class Package:
    """Paths are relative to the root of the tasks' trees."""

    name: str
    version: str
    license: str  # "": unknown
    url: str  # "": unknown
    files: dict[str, str]  # modules, data, read-me, licence; as in `Task.tree`
    tests: dict[str, SideModule]  # by the name they are imported under

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the Python files that may be mutated."""
        return tuple(path for path in self.files if path.endswith(".py"))


def read_package(folder: Path) -> Package:
    """Reads an unpacked sdist or a checkout.

    Raises:
        BadInputError: no package, no tests, compiled sources, files that can't be read.
        FileNotFoundError: no such directory.
    """
    if not folder.is_dir():
        raise FileNotFoundError(2, "No such directory", str(folder))
    facts = _metadata(folder)
    if not _NAME.fullmatch(facts["name"]):  # it becomes a part of paths
        raise BadInputError(str(folder), expected="a package's name", found=facts["name"])
    base = folder / "src" if (folder / "src").is_dir() else folder
    names = _top_level(base, facts["name"])
    files: dict[str, str] = {}
    tests: dict[str, str] = {}
    for path, file in _side_files(folder, base, names):
        if file.suffix in _COMPILED:
            raise BadInputError(str(folder), expected="a pure-Python package", found=path)
        if _is_test_side(path):
            if file.suffix == ".py":
                tests[path] = read_text(file)
        elif file.suffix == ".py":
            files[path] = read_text(file)
        else:
            files[path] = file.read_bytes().decode("utf-8", "surrogateescape")
    if not any(map(_has_tests, tests)):
        raise BadInputError(
            str(folder),
            expected="tests (test_*.py, *_test.py, or tests.py in a folder of tests)",
            found="none",
        )
    return Package(
        name=facts["name"],
        version=facts["version"],
        license=facts["license"],
        url=facts["url"],
        files=files | _papers(folder),
        tests={
            _module_name(path, tests): SideModule(
                path=path, source=source, is_tests=_has_tests(path)
            )
            for path, source in sorted(tests.items())
        },
    )


def _metadata(folder: Path) -> dict[str, str]:
    """name, version, license and url of PKG-INFO, else of pyproject.toml, else of the name."""
    if (folder / "PKG-INFO").is_file():
        info = email.parser.Parser().parsestr(read_text(folder / "PKG-INFO"), headersonly=True)
        classifiers = info.get_all("Classifier", [])
        urls = [text.partition(", ")[2] for text in info.get_all("Project-URL", [])]
        return {
            "name": str(info["Name"]),
            "version": str(info["Version"]),
            "license": _license(info["License-Expression"], info["License"], classifiers),
            "url": str(info["Home-page"] or (urls or [""])[0]),
        }
    project: dict[str, Any] = {}
    if (folder / "pyproject.toml").is_file():
        project = read_toml(folder / "pyproject.toml").get("project", {})
    stated = project.get("license", "")
    text = stated.get("text", "") if isinstance(stated, dict) else stated
    urls = project.get("urls", {})
    return {
        "name": project.get("name") or re.sub(r"-\d[^-]*$", "", folder.resolve().name),
        "version": project.get("version", ""),
        "license": _license(text, "", project.get("classifiers", [])),
        "url": next(iter(urls.values()), ""),
    }


def _license(expression: str | None, text: str | None, classifiers: Iterable[str]) -> str:
    for stated in (expression, text):
        if stated and "\n" not in stated.strip() and stated.strip() != "UNKNOWN":
            return stated.strip()
    named = [c for c in classifiers if c.startswith(_LICENSE_CLASSIFIER)]
    return named[0].removeprefix(_LICENSE_CLASSIFIER) if named else ""


def _top_level(base: Path, name: str) -> list[str]:
    """Names at the root that belong to the package: the one of its name, else all there are."""
    found = {
        path.stem: path
        for path in sorted(base.iterdir())
        if path.stem.isidentifier()
        and path.stem not in _NO_MODULES
        and not _has_tests(path.name)
        and (path.suffix == ".py" or (path / "__init__.py").is_file())
    }
    named = [stem for stem in found if stem.lower() == re.sub(r"[-.]", "_", name).lower()]
    names = named or list(found)
    if not names:
        raise BadInputError(str(base), expected="a Python package or module", found="none")
    return [found[stem].name for stem in names]


def _side_files(folder: Path, base: Path, names: list[str]) -> Iterable[tuple[str, Path]]:
    """(path in a task's tree, file) of the package and of all its tests."""
    for name in names:
        if (base / name).is_file():
            yield name, base / name
        else:
            yield from ((f"{name}/{path}", file) for path, file in walk(base / name))
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name in _TEST_FOLDERS:
            yield from ((f"{path.name}/{inner}", file) for inner, file in walk(path))
        elif path.is_file() and (_has_tests(path.name) or path.name == "conftest.py"):
            yield path.name, path


def _papers(folder: Path) -> dict[str, str]:
    """The read-me and all files of the licence."""
    return {
        path.name: path.read_bytes().decode("utf-8", "surrogateescape")
        for path in sorted(folder.iterdir())
        if path.is_file()
        and any(PurePosixPath(path.name.lower()).match(p) for p in ("readme*", *_LICENSES))
    }


def _is_test_side(path: str) -> bool:
    *folders, name = path.split("/")
    in_tests = any(folder in _TEST_FOLDERS for folder in folders)
    return in_tests or _has_tests(path) or name == "conftest.py"


def _has_tests(path: str) -> bool:
    """Whether pytest or unittest would look for tests in a file of this path."""
    *folders, name = path.split("/")
    if name in ("tests.py", "test.py"):
        return any(folder in _TEST_FOLDERS for folder in folders)
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _module_name(path: str, tests: Iterable[str]) -> str:
    """What a test module is imported as: the packages that hold it are those with __init__.py."""
    *folders, name = path.removesuffix(".py").split("/")
    kept = [] if name == "__init__" else [name]
    for depth in range(len(folders), 0, -1):
        # a package of the tested side has its own __init__.py, which is not among the tests
        inner = "/".join(folders[:depth])
        if f"{inner}/__init__.py" not in tests and not _inside_package(folders[:depth]):
            break
        kept.insert(0, folders[depth - 1])
    return ".".join(kept)


def _inside_package(folders: list[str]) -> bool:
    return not any(folder in _TEST_FOLDERS for folder in folders)
