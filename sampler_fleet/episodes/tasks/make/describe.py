"""What a failed test says of the package: a call, what it gave, what was expected, steps before it.

Owns the reading of a test's source and frame at the failure: the tested expression, with plain
values for its names. Runs in a sandbox beside the tests, as a part of `probe.py`; a test that can't
be told in plain words is left untold.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_VALUE = 120  # characters of a value that may stand for a name
_MAX_RESULT = 400
_EQUAL = "__equal_or_differs__"
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, str, bytes, list, tuple, dict)
_CONDITIONS = {
    "assertTrue": "{0}",
    "assertFalse": "not ({0})",
    "assertIn": "{0} in {1}",
    "assertNotIn": "{0} not in {1}",
    "assertIs": "{0} is {1}",
    "assertIsNone": "{0} is None",
    "assertIsNotNone": "{0} is not None",
    "assertIsInstance": "isinstance({0}, {1})",
    "assertNotEqual": "{0} != {1}",
    "assertGreater": "{0} > {1}",
    "assertLess": "{0} < {1}",
}


class Differs(AssertionError):
    """Two values that a test holds against each other."""

    def __init__(self, place: int, left: Any, right: Any) -> None:
        super().__init__("differs")
        self.place, self.left, self.right = place, left, right


class Watch(ast.NodeTransformer):
    """Makes comparisons for equality tell their values."""

    def __init__(self) -> None:
        self.pairs: list[tuple[ast.expr, ast.expr]] = []

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = node.test
        if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq]:
            call = self._call(test.left, test.comparators[0])
            return ast.copy_location(ast.Expr(ast.copy_location(call, node)), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name != "assertEqual" or len(node.args) < 2:
            return self.generic_visit(node)
        return ast.copy_location(self._call(node.args[0], node.args[1]), node)

    def _call(self, left: ast.expr, right: ast.expr) -> ast.Call:
        self.pairs.append((left, right))
        place = ast.Constant(len(self.pairs) - 1)
        return ast.Call(ast.Name(_EQUAL, ast.Load()), [place, left, right], [])


class Sources:
    """The test modules of a run: rewritten to watch, and as they were."""

    def __init__(self) -> None:
        self.trees: dict[str, ast.Module] = {}
        self.lines: dict[str, list[str]] = {}
        self.watch = Watch()
        setattr(builtins, _EQUAL, self._equal)

    def compile(self, source: str, path: str, mode: str) -> Any:
        self.trees[path] = ast.parse(source)
        self.lines[path] = source.split("\n")
        tree = ast.fix_missing_locations(self.watch.visit(ast.parse(source)))
        return compile(tree, path, mode)

    def fixture(self, name: str) -> str:
        """The steps by which a fixture without arguments makes its value; "" if none are found."""
        for path, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return self._steps(node, self.lines[path])
        return ""

    def _steps(self, fixture: ast.FunctionDef, lines: list[str]) -> str:
        for number, statement in enumerate(fixture.body):
            value = statement.value if isinstance(statement, ast.Return | ast.Expr) else None
            if isinstance(statement, ast.Expr):
                value = value.value if isinstance(value, ast.Yield) else None
            if value is None or fixture.args.args:
                continue
            first, end = fixture.body[0].lineno, statement.lineno
            steps = _dedent(lines[first - 1 : end - 1]) if number else ""
            told = ast.unparse(value)
            last = "" if told == fixture.name else f"{fixture.name} = {told}"
            return "\n".join(part for part in (steps, last) if part)
        return ""

    @staticmethod
    def _equal(place: int, left: Any, right: Any) -> None:
        if not left == right:
            raise Differs(place, left, right)


def describe(error: BaseException, sources: Sources, package: frozenset[str]) -> dict[str, str]:
    """Of a failed test: what is told of it; {} where no plain words can be found.

    `package` has the names of the modules under test.
    """
    trace, frame, line = error.__traceback__, None, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in sources.trees:
            frame, line = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    if frame is None:
        return {}
    path = frame.f_code.co_filename
    statement, function = _places(sources.trees[path], line)
    if statement is None or function is None:
        return {}
    names = Names(frame, package)
    before, expected = _before(function.body, statement)
    found = _told(error, statement, sources, names)
    if found.get("kind") == "raised" and expected is not None:
        found |= {"kind": "other error", "expected": names.value(expected)}
    if not found or not (names.named or names.left):
        return {}
    found |= names.signature(_watched(error, statement, sources))
    if names.left:
        if before is None:
            return {}
        given = [sources.fixture(name) for name in sorted(names.left - _bound(before))]
        if "" in given:
            return {}
        steps = [_step(step, sources.lines[path], names) for step in before]
        found["steps"] = "\n".join(step for step in (*given, *steps) if step)
    return {} if any(map(_is_unsteady, found.values())) else found


def _before(
    body: list[ast.stmt], wanted: ast.stmt
) -> tuple[list[ast.stmt] | None, ast.expr | None]:
    """(statements of a test before one of them, the exception that one must raise if any).

    None if it is in a block whose course a list can't tell.
    """
    for number, statement in enumerate(body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Yield):
            return None, None  # what a fixture does at the end
        if statement is wanted:
            return body[:number], None
        if wanted in ast.walk(statement):
            kind = _must_raise(statement)
            if kind is None:
                return None, None
            inner, _ = _before(statement.body, wanted)  # type: ignore[attr-defined]
            return (None if inner is None else body[:number] + inner), kind
    return None, None


def _bound(parts: list[Any]) -> set[str]:
    """Names that statements, or parts of them, give a meaning."""
    found: set[str] = set()
    for node in (node for part in parts for node in ast.walk(part)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def _must_raise(statement: ast.stmt) -> ast.expr | None:
    """The exception that a block `with pytest.raises(...)` or with `assertRaises` waits for."""
    if isinstance(statement, ast.With) and len(statement.items) == 1:
        call = statement.items[0].context_expr
        if isinstance(call, ast.Call) and call.args:
            name = ast.unparse(call.func).split(".")[-1]
            return call.args[0] if name.startswith(("raises", "assertRaises")) else None
    return None


def _step(statement: ast.stmt, lines: list[str], names: Names) -> str:
    """A statement of a test as a user would write it: of what it asserts, only what it calls."""
    asserted: list[ast.expr] | None = None
    if isinstance(statement, ast.Assert):
        test = statement.test
        asserted = [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr.startswith("assert"):
            asserted = statement.value.args
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return ""
    if asserted is not None:
        return names.in_text("\n".join(ast.unparse(part) for part in asserted if _acts(part)))
    first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
    return names.in_text(_dedent(lines[first - 1 : statement.end_lineno]))


def _acts(node: ast.expr) -> bool:
    """Whether an expression calls more than built-in functions."""
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(not (isinstance(f, ast.Name) and hasattr(builtins, f.id)) for f in calls)


def _told(
    error: BaseException, statement: ast.stmt, sources: Sources, names: Names
) -> dict[str, str]:
    if isinstance(error, Differs):
        pair = sources.watch.pairs[error.place]
        tested, other = names.tested_first(pair)
        observed, expected = error.left, error.right
        if tested is not pair[0]:
            observed, expected = expected, observed
        if names.tests(other):  # two results of the package: neither is right by itself
            condition = f"{names.fill(tested)} == {names.fill(other)}"
            return {"kind": "false", "call": condition}
        return {
            "kind": "differs",
            "call": names.fill(tested),
            "observed": _repr(observed),
            "expected": _repr(expected),
        }
    missing = re.fullmatch(r"([\w. ]+) not raised(?: by .*)?", str(error))
    if isinstance(error, AssertionError) and missing:
        if not isinstance(statement, ast.With) or len(statement.body) > 1:
            return {}
        return {"kind": "no error", "call": names.fill(statement.body[0]), "expected": missing[1]}
    if isinstance(error, AssertionError):
        condition = _condition(statement, names)
        return {"kind": "false", "call": condition} if condition else {}
    if isinstance(statement, ast.With | ast.For | ast.If | ast.While | ast.Try):
        return {}
    if isinstance(error, SyntaxError | MemoryError | RecursionError):
        return {}
    value = _given(statement)
    kind = type(error)
    text = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
    found = {
        "kind": "raised",
        "call": names.fill(value or statement),
        "observed": f"{text}: {error}"[:_MAX_RESULT] if str(error) else text,
    }
    if pair := _compared(statement):
        tested, other = names.tested_first(pair)
        if not names.tests(other):
            found |= {"call": names.fill(tested), "expected": names.value(other)}
    return found


def _given(statement: ast.stmt) -> ast.expr | None:
    """The value that a statement returns or gives plain names."""
    if isinstance(statement, ast.Assign):
        targets = [n for target in statement.targets for n in ast.walk(target)]
        if any(isinstance(n, ast.Subscript | ast.Attribute) for n in targets):
            return None  # the assignment itself is what is tested
        return statement.value
    return statement.value if isinstance(statement, ast.Return) else None


def _watched(error: BaseException, statement: ast.stmt, sources: Sources) -> ast.AST:
    if not isinstance(error, Differs):
        return statement
    return ast.Tuple([*sources.watch.pairs[error.place]], ast.Load())


def _compared(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """The two sides, where a statement of a test compares for equality."""
    watch = Watch()
    watch.visit(ast.parse(ast.unparse(statement)))
    return watch.pairs[0] if len(watch.pairs) == 1 else None


def _condition(statement: ast.stmt, names: Names) -> str:
    """What a statement of a test asserts, as an expression; "" if that isn't known."""
    if isinstance(statement, ast.Assert):
        return names.fill(statement.test)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        pattern = _CONDITIONS.get(name, "")
        if pattern and len(call.args) >= pattern.count("{"):
            return pattern.format(*map(names.fill, call.args))
    return ""


class Names(ast.NodeTransformer):
    """Writes values where an expression of a test has names."""

    def __init__(self, frame: Any, package: frozenset[str]) -> None:
        self._values = {**frame.f_globals, **frame.f_locals}
        self._locals, self._package = frame.f_locals, package
        self._bound: set[str] = set()  # names that the expression itself binds
        self._keep = False  # names stay names
        self.named = False  # whether something of the package was named
        self.left: set[str] = set()  # local names of the test that stand for no plain value

    def fill(self, node: ast.AST) -> str:
        """The source of an expression or a statement, with values. What calls nothing keeps its
        names: their values would say the same as what was seen."""
        text = self._fill(node, keep=not any(isinstance(n, ast.Call) for n in ast.walk(node)))
        return text if self.named else self._fill(node, keep=True)

    def value(self, node: ast.AST) -> str:
        """The same of what is expected: names never stay where they have values."""
        return self._fill(node, keep=False)

    def _fill(self, node: ast.AST, *, keep: bool) -> str:
        nodes = list(ast.walk(node))
        self._bound = _bound([node]) | {n.arg for n in nodes if isinstance(n, ast.arg)}
        self._keep = keep
        is_expr = isinstance(node, ast.expr)
        tree = ast.parse(ast.unparse(node), mode="eval" if is_expr else "exec")
        return ast.unparse(self.visit(tree))

    def tests(self, node: ast.AST) -> bool:
        """Whether an expression calls or names what the package has."""
        named = (n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute))
        return any(self._of_package(self._resolve(n)) for n in named)

    def tested_first(self, pair: tuple[ast.expr, ast.expr]) -> tuple[ast.expr, ast.expr]:
        """Two sides of a comparison, the tested one first: it is of the package, or a call."""

        def weight(side: ast.expr) -> tuple[bool, bool, bool]:
            nodes = list(ast.walk(side))
            calls = any(isinstance(node, ast.Call) for node in nodes)
            return self.tests(side), calls, not isinstance(side, ast.Constant)

        left, right = pair
        return (right, left) if weight(right) > weight(left) else (left, right)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not isinstance(node.ctx, ast.Load) or node.id in self._bound:
            return node
        known = node.id in self._values
        value = self._values.get(node.id)
        self.named = self.named or self._of_package(value) or _module(value) in self._package
        text = self._text(self._values[node.id]) if known and not self._keep else ""
        if not text and (node.id in self._locals or not (known or hasattr(builtins, node.id))):
            self.left.add(node.id)
        return ast.parse(text, mode="eval").body if text else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and _is_plain(self._values.get(node.func.id, builtins)):
            self.left.add(node.func.id)  # what should be callable, and isn't
            node.args = [self.visit(argument) for argument in node.args]
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        value = getattr(self._values.get("self"), node.attr, None) if of_self else None
        if of_self and (text := self._text(value)):
            self.named = self.named or self._of_package(value)
            return ast.parse(text, mode="eval").body
        return self.generic_visit(node)

    def in_text(self, text: str) -> str:
        """Source with the names of tested things where the test has them in `self`."""

        def known(found: re.Match[str]) -> str:
            return self._dotted(getattr(self._values.get("self"), found[1], None)) or found[0]

        return re.sub(r"\bself\.(\w+)", known, text)

    def signature(self, node: ast.AST) -> dict[str, str]:
        """How a tested function that is called in `node` is declared, and its docstring."""
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                thing = self._resolve(call.func)
                name = self._dotted(thing) or self._dotted(getattr(thing, "__func__", None))
                if name and inspect.isfunction(getattr(thing, "__func__", thing)):
                    doc = inspect.getdoc(thing) or ""
                    return {
                        "function": name,
                        "signature": f"{thing.__name__}{inspect.signature(thing)}",
                        "doc": " ".join(doc.split("\n\n")[0].split()),
                    }
        return {}

    def _resolve(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self._values.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return getattr(self._values.get(node.value.id), node.attr, None)
        return None

    def _text(self, value: Any) -> str:
        """A value as an expression; "" if it is not plain or too long."""
        if _is_plain(value):
            text = repr(value)
            return text if len(text) <= _MAX_VALUE and text not in ("nan", "inf", "-inf") else ""
        return self._dotted(value)

    def _of_package(self, value: Any) -> bool:
        """A function or class of the package, or an instance of such a class."""
        return bool(self._dotted(value) or self._dotted(type(value)))

    def _dotted(self, value: Any) -> str:
        """The name of a function or class of the package."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            return ""
        if module not in self._package or "<" in name:
            return ""
        return f"{module}.{name}"


def _module(value: Any) -> str:
    return value.__name__ if inspect.ismodule(value) else ""


def _is_plain(value: Any) -> bool:
    if type(value) not in _PLAIN:
        return False
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else True


def _repr(value: Any) -> str:
    text = repr(value)
    if type(value) is set and value:  # in an order that stays
        text = f"{{{', '.join(sorted(map(repr, value)))}}}"
    return text if len(text) <= _MAX_RESULT else f"{text[:_MAX_RESULT]}..."


def _is_unsteady(text: str) -> bool:
    """Whether it reads otherwise in another run: addresses."""
    return " at 0x" in text


def _places(
    tree: ast.Module, line: int
) -> tuple[ast.stmt | None, ast.FunctionDef | ast.AsyncFunctionDef | None]:
    """The smallest statement around a line, and the innermost function."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    around.sort(key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    functions = [n for n in around if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return (around[0] if around else None), (functions[0] if functions else None)


def _dedent(lines: list[str]) -> str:
    text = [line for line in lines if line.strip()]
    width = min((len(line) - len(line.lstrip()) for line in text), default=0)
    return "\n".join(line[width:] for line in text)
