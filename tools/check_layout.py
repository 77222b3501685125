"""`python -m tools.check_layout`: the rules of the source tree that linters don't know.

Owns: who may import whom, no import cycles, module docstrings, the closed list of log-prob names,
and the length of files and functions (a longer one says why in a comment `# layout: reason` on its
first line, or on line 1 of a file's docstring block). Reads source as text; imports nothing of it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("contracts", "weight_sync", "trainer_jax", "sampler_fleet", "tools")
# package -> what it may import besides itself; a dotted name allows only that module
MAY_IMPORT = {
    "contracts": (),
    "weight_sync": ("contracts",),
    "trainer_jax": ("contracts", "weight_sync.client"),
    "sampler_fleet": ("contracts", "weight_sync.client"),
    "tools": PACKAGES,
}
# third-party imports that a whole package must live without at module level
HEAVY = {
    "contracts": ("jax", "torch", "flax"),
    "weight_sync": ("jax", "torch", "flax"),
}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 70
BANNED_NAMES = re.compile(
    r"(^|_)(old|prev|rollout|generation|behaviou?r)_log_?p|logprob_|_logprobs?$"
)
BANNED_FILES = {"utils.py", "helpers.py", "common.py", "misc.py"}


def _modules() -> Iterator[tuple[str, Path, ast.Module, list[str]]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "pb" in path.parts and path.name != "__init__.py":
                continue
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text()
            yield name, path, ast.parse(text), text.splitlines()


def _imports(tree: ast.Module, *, top_level_only: bool = False) -> Iterator[tuple[int, str]]:
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def _import_rules(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    package = name.split(".")[0]
    for line, target in _imports(tree):
        other = target.split(".")[0]
        if other in PACKAGES and other != package:
            allowed = MAY_IMPORT[package]
            if other not in allowed and not any(
                target == one or target.startswith(one + ".") for one in allowed
            ):
                yield line, f"{package} must not import {target}"
    for line, target in _imports(tree, top_level_only=True):
        if target.split(".")[0] in HEAVY.get(package, ()):
            yield line, f"{package} must not need {target.split('.')[0]}"


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr


def _length_rules(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    if len(lines) > MAX_FILE_LINES and "# layout:" not in "\n".join(lines[:40]):
        yield 1, f"{len(lines)} lines, more than {MAX_FILE_LINES}, and no `# layout: reason`"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            doc = ast.get_docstring(node, clean=False)
            length -= doc.count("\n") + 1 if doc else 0
            if length > MAX_FUNCTION_LINES and "# layout:" not in lines[node.lineno - 1]:
                yield (
                    node.lineno,
                    f"{node.name} has {length} lines, more than {MAX_FUNCTION_LINES}",
                )


def _cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    state: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        state[node] = 1
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if state.get(other) == 1:
                yield [*stack[stack.index(other) :], other]
            elif other in graph and other not in state:
                yield from visit(other)
        stack.pop()
        state[node] = 2

    for node in sorted(graph):
        if node not in state:
            yield from visit(node)


def problems() -> list[str]:
    """Every broken rule as `path:line: what`."""
    found: list[str] = []
    modules = {name: (path, tree, lines) for name, path, tree, lines in _modules()}
    graph: dict[str, set[str]] = {}
    for name, (path, tree, lines) in modules.items():
        broken = [*_import_rules(name, tree), *_length_rules(tree, lines)]
        if not ast.get_docstring(tree):
            broken.append((1, "no module docstring: what does it own, what must it not do?"))
        if path.name in BANNED_FILES:
            broken.append((1, f"{path.name} says nothing about what it owns"))
        broken += [
            (line, f"{word}: log-probs are sampler_logp, trainer_logp or ref_logp")
            for line, word in _names(tree)
            if BANNED_NAMES.search(word)
        ]
        found += [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in broken]
        targets = set()
        for _, target in _imports(tree, top_level_only=True):
            parts = target.split(".")
            match = next(
                (
                    ".".join(parts[:n])
                    for n in (len(parts), len(parts) - 1)
                    if ".".join(parts[:n]) in modules
                ),
                None,
            )
            if match and match != name:
                targets.add(match)
        graph[name] = targets
    found += [f"import cycle: {' -> '.join(cycle)}" for cycle in _cycles(graph)]
    return found


def main() -> None:
    found = problems()
    print("\n".join(found) or "layout: ok")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
