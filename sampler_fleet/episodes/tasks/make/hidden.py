"""Test files of a package as the grader takes them: each one text that needs no other file.

Owns that text and the names of the files. A hidden test file is `testkit.py`, then the sources of
the test module and of what it imports from its own side, unchanged, then one line that makes plain
tests of them. Must not run anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from sampler_fleet.episodes.tasks.make.package import Package, SideModule

_KIT = "testkit.py"


@dataclass(frozen=True, kw_only=True)
class HiddenFile:
    """One module of tests, with all it needs."""

    path: str  # in `Task.hidden_tests`
    origin: str  # its path in the package
    name: str  # of the module
    modules: dict[str, tuple[str, str]]  # name to (path, source), its own too

    def text(self, package: Package) -> str:
        kit = (resources.files("sampler_fleet.episodes.tasks.make") / _KIT).read_text()
        sources = "".join(
            f"    {name!r}: ({path!r}, {_literal(source)}),\n"
            for name, (path, source) in self.modules.items()
        )
        return (
            f"# {self.origin} of {package.name} {package.version} ({package.license or 'no'} "
            f"license), which stands below as it was\n{kit}\n\n"
            f"_MODULES = {{\n{sources}}}\nglobals().update(plain_tests(_MODULES, {self.name!r}))\n"
        )


def hidden_files(package: Package) -> list[HiddenFile]:
    """Of each module with tests, in order of their paths."""
    return [
        HiddenFile(
            path=hidden_path(module.path),
            origin=module.path,
            name=name,
            modules={
                needed: (package.tests[needed].path, package.tests[needed].source)
                for needed in sorted(_needed(name, package.tests))
            },
        )
        for name, module in package.tests.items()
        if module.is_tests
    ]


def hidden_path(path: str) -> str:
    """The local format keeps all hidden tests in tests/."""
    return path if path.startswith("tests/") else f"tests/{path}"


def _needed(name: str, tests: Mapping[str, SideModule]) -> set[str]:
    """The module, the packages it is in, every conftest, and what these import, all told."""
    waiting = [name, *(other for other in tests if other.split(".")[-1] == "conftest")]
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in found or module not in tests:
            continue
        found.add(module)
        waiting += _parents(module)
        waiting += _imported(module, tests[module])
    return found


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _imported(name: str, module: SideModule) -> Iterator[str]:
    try:
        tree = ast.parse(module.source)
    except SyntaxError:  # for another Python: its tests will fail, and be left out
        return
    package = name if module.is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package
            for _ in range(node.level - 1):
                start = start.rpartition(".")[0]
            parts = (start if node.level else "", node.module or "")
            origin = ".".join(part for part in parts if part)
            yield origin
            yield from (f"{origin}.{alias.name}" if origin else alias.name for alias in node.names)


def _literal(source: str) -> str:
    """A text as Python, readable where it can be."""
    if "\\" in source or "'''" in source or source.endswith("'") or "\r" in source:
        return repr(source)
    return f"'''{source}'''"
