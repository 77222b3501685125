"""Tests of pytest and unittest as plain functions: what hidden tests of made tasks begin with.

Owns the collection of tests, parametrizing and fixtures as far as they need no file and no patch,
and a stand-in for the module `pytest`, which no sandbox has. What it lacks makes a test fail, and
tests that fail on the right source are in no task. Runs in sandboxes, beside the tests; knows
nothing of the package under test.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType, SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def plain_tests(
    modules: Mapping[str, tuple[str, str]],
    name: str,
    compile_source: Callable[..., Any] = compile,
) -> dict[str, Any]:
    """{name: function, or a holder of methods} of all tests in the module `name`.

    `modules` has the (path, source) of every module of the test side that it needs.
    """
    sys.meta_path.insert(0, _Finder(modules, compile_source))
    sys.modules["pytest"] = _stand_in()
    fixtures: dict[str, Fixture] = {}
    for place in sorted((n for n in modules if n.endswith("conftest")), key=len):
        fixtures |= _fixtures(importlib.import_module(place))
    module = importlib.import_module(name)
    fixtures |= _fixtures(module)
    found: dict[str, Any] = {}
    for title, value in list(vars(module).items()):
        if type(value) is FunctionType and title.startswith("test"):
            found |= _cases(title, value, [], fixtures, lambda function: function)
        elif isinstance(value, type) and (methods := _methods(title, value, fixtures)):
            found[title] = SimpleNamespace(**methods)
    return found


def _methods(title: str, kind: type, fixtures: dict[str, Fixture]) -> dict[str, Any]:
    if getattr(kind, "_skipped", False):
        return {}
    names = sorted(name for name in dir(kind) if name.startswith("test"))
    if hasattr(kind, "assertEqual") and hasattr(kind, "debug"):
        return {name: _unittest(kind, name) for name in names if callable(getattr(kind, name))}
    if not title.startswith("Test") or "__init__" in vars(kind):
        return {}
    found: dict[str, Any] = {}
    for name in names:
        function = getattr(kind, name)
        if type(function) is FunctionType:
            rows = getattr(kind, "_rows", [])
            found |= _cases(name, function, rows, fixtures, lambda f: _bind(kind, f))
    return found


def _unittest(kind: Any, name: str) -> Callable[[], None]:
    def run() -> None:
        kind.setUpClass()
        try:
            kind(name).debug()  # as run(), but what goes wrong is raised
        finally:
            kind.tearDownClass()

    return run


def _bind(kind: type, function: Any) -> Callable[..., Any]:
    """The method of a new instance that was set up."""
    thing = kind()
    method = function.__get__(thing)
    setup, teardown = (getattr(thing, f"{name}_method", None) for name in ("setup", "teardown"))

    def run(**given: Any) -> None:
        for before in (setup,) if setup else ():
            before(*((method,) if before.__code__.co_argcount > 1 else ()))
        try:
            method(**given)
        finally:
            for after in (teardown,) if teardown else ():
                after(*((method,) if after.__code__.co_argcount > 1 else ()))

    return run


def _cases(
    name: str,
    function: Any,
    outer: list[list[dict[str, Any]]],
    fixtures: dict[str, Fixture],
    bind: Callable[[Any], Any],
) -> dict[str, Callable[[], None]]:
    """One test, or one for each row of parameters, numbered."""
    if getattr(function, "_skipped", False):
        return {}
    tables = [*getattr(function, "_rows", []), *outer]
    cases: dict[str, Callable[[], None]] = {}
    for number, rows in enumerate(itertools.product(*tables)):
        given = {key: value for row in rows for key, value in row.items()}
        title = f"{name}[{number}]" if tables else name
        cases[title] = lambda given=given: _run(function, bind, given, fixtures)
    return cases


def _run(function: Any, bind: Any, given: dict[str, Any], fixtures: dict[str, Fixture]) -> None:
    opened: list[Any] = []
    values = dict(given)

    def value(name: str) -> Any:
        if name not in values:
            if name not in fixtures:
                raise LookupError(f"no fixture {name}")
            made = fixtures[name].function(**{n: value(n) for n in _parameters(fixtures[name])})
            if hasattr(made, "gi_frame"):
                opened.append(made)
                made = next(made)
            values[name] = made
        return values[name]

    try:
        for name, fixture in fixtures.items():
            if fixture.autouse:
                value(name)
        bind(function)(**{name: value(name) for name in _parameters(function)})
    finally:
        for generator in reversed(opened):
            next(generator, None)


def _parameters(function: Any) -> list[str]:
    code = getattr(function, "function", function).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names if name != "self"]


class _Finder:
    """Finds the modules of the test side for the import system."""

    def __init__(self, modules: Mapping[str, tuple[str, str]], compile_source: Any) -> None:
        self._modules, self._compile = modules, compile_source

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name not in self._modules:
            return None
        is_package = self._modules[name][0].endswith("__init__.py")
        return ModuleSpec(name, self, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        path, source = self._modules[module.__name__]
        exec(self._compile(source, path, "exec"), module.__dict__)


# --- what stands for pytest --------------------------------------------------------------------


class Raises:
    """`pytest.raises`, as a context and as what it gives."""

    def __init__(
        self, expected: Any, *call: Any, match: str | None = None, **keywords: Any
    ) -> None:
        self.expected, self.match = expected, match
        self.type: Any = None
        self.value: Any = None
        if call:
            with self:
                call[0](*call[1:], **keywords)

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: object) -> bool:
        if kind is None:
            kinds = self.expected if isinstance(self.expected, tuple) else (self.expected,)
            raise AssertionError(f"{' or '.join(k.__name__ for k in kinds)} not raised")
        if not issubclass(kind, self.expected):
            return False
        self.type, self.value = kind, error
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self.match!r}")
        return True


class Fixture:
    def __init__(self, function: Any, name: str = "", autouse: bool = False) -> None:
        self.function, self.autouse = function, autouse
        self.name = name or function.__name__


def _fixtures(module: ModuleType) -> dict[str, Fixture]:
    return {value.name: value for value in vars(module).values() if type(value) is Fixture}


def fixture(function: Any = None, *, scope: str = "", name: str = "", autouse: bool = False) -> Any:
    """Every scope is that of one test."""
    if function is None:
        return lambda function: Fixture(function, name, autouse)
    return Fixture(function)


class Row:
    """`pytest.param`."""

    def __init__(self, *values: Any, marks: Any = (), id: object = None) -> None:
        self.values = values
        self.skipped = bool(marks)


def parametrize(names: Any, rows: Any, **_: object) -> Any:
    """Keeps the rows of values on what it decorates."""
    titles = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    bare = isinstance(names, str) and len(titles) == 1  # rows are values, not tuples of them

    def values(row: Any) -> tuple[Any, ...]:
        return row.values if isinstance(row, Row) else (row,) if bare else tuple(row)

    table = [
        dict(zip(titles, values(row), strict=True))
        for row in rows
        if not (isinstance(row, Row) and row.skipped)
    ]

    def decorate(thing: Any) -> Any:
        thing._rows = [*getattr(thing, "_rows", []), table]
        return thing

    return decorate


class Marks:
    """`pytest.mark`: parametrize; all tests that may be skipped are; other marks say nothing."""

    parametrize = staticmethod(parametrize)

    def __getattr__(self, mark: str) -> Any:
        def decorate(*arguments: Any, **_: object) -> Any:
            alone = len(arguments) == 1 and callable(arguments[0])
            skips = mark in ("skip", "xfail") or (mark == "skipif" and arguments[0])

            def leave(thing: Any) -> Any:
                if skips:
                    thing._skipped = True
                return thing

            return leave(arguments[0]) if alone else leave

        return decorate


class Near:
    """`pytest.approx` of numbers, and of lists and dicts of them."""

    def __init__(self, value: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.value, self.rel, self.abs = value, rel, abs

    def __eq__(self, other: object) -> bool:
        return self._close(self.value, other)

    __hash__ = None  # type: ignore[assignment]

    def _close(self, mine: Any, other: Any) -> bool:
        if isinstance(mine, dict):
            return mine.keys() == other.keys() and all(self._close(mine[k], other[k]) for k in mine)
        if isinstance(mine, list | tuple):
            pairs = itertools.zip_longest(mine, other)
            return all(self._close(one, two) for one, two in pairs)
        return abs(mine - other) <= max(self.abs, self.rel * abs(mine))

    def __repr__(self) -> str:
        return f"about {self.value!r}"


def fail(reason: str = "") -> None:
    raise AssertionError(reason)


def _stand_in() -> ModuleType:
    module = ModuleType("pytest")
    vars(module).update(
        approx=Near, fail=fail, fixture=fixture, mark=Marks(), param=Row, raises=Raises
    )
    return module
