"""The program that looks at a package's tests in a sandbox: which there are, what they run, how
they fail.

Owns the trace of lines and the reply. Tests and package run in this one process; nothing here is
trusted, and no verdict comes from here.

Input: ({path of a hidden file: (name, {module: (path, source)})}, test ids or None for all, whether
to trace, modules to import), encoded by `wire.py`. Output: a line `PROBE ` and the hex of the
encoded reply: {"tests": [ids], "lines": {path: [line]}, "unimportable": [modules], "copies":
[modules that this machine has elsewhere], "failures": {id: what `describe.py` says}}.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from sampler_fleet.episodes.tasks.make.describe import Sources, describe
from sampler_fleet.episodes.tasks.make.testkit import plain_tests
from sampler_fleet.episodes.wire import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _tracer(lines: dict[str, set[int]]) -> Any:
    root = os.getcwd() + "/"

    def local(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            lines[frame.f_code.co_filename.removeprefix(root)].add(frame.f_lineno)
        return local

    def trace(frame: Any, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(root):
            return None
        lines.setdefault(path.removeprefix(root), set()).add(frame.f_lineno)
        return local

    return trace


def _flat(path: str, tests: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, test in tests.items():
        inner = vars(test) if not callable(test) else None
        found |= (
            {f"{path}::{name}::{n}": t for n, t in inner.items()}
            if inner
            else {f"{path}::{name}": test}
        )
    return found


def _unimportable(modules: list[str]) -> list[str]:
    found: list[str] = []
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException:  # whatever it was: it can't be imported
            found.append(name)
    return found


def look(files: Any, wanted: list[str] | None, traced: bool, modules: list[str]) -> dict[str, Any]:
    tops = tuple(sorted({name.split(".")[0] for name in modules}))
    copies = [name for name in tops if importlib.util.find_spec(name) is not None]
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    lines: dict[str, set[int]] = {}
    sources, tests, failures = Sources(), {}, {}
    if traced:
        sys.settrace(_tracer(lines))
    unimportable = _unimportable(modules)
    for path, (name, contents) in files.items():
        try:
            tests |= _flat(path, plain_tests(contents, name, sources.compile))
        except BaseException as error:
            failures[path] = {"kind": "load", "observed": f"{type(error).__name__}: {error}"[:300]}
    for name in sorted(tests if wanted is None else tests.keys() & set(wanted)):
        try:
            tests[name]()
        except BaseException as error:
            failures[name] = {} if traced else describe(error, sources, frozenset(modules))
    sys.settrace(None)
    return {
        "tests": sorted(tests),
        "lines": {path: sorted(found) for path, found in lines.items()},
        "unimportable": unimportable,
        "copies": copies,
        "failures": failures,
    }


def main() -> None:
    with open(0, "rb", closefd=False) as stdin:
        arguments = decode(stdin.read())
    report = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    data = f"\nPROBE {encode(look(*arguments)).hex()}\n".encode()
    while data:
        data = data[os.write(report, data) :]
    os._exit(0)
