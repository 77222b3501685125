"""Mutations of real source: one small change each, located by the syntax tree, made in the text.

Owns the operators and where they apply. Everything but the changed text stays as it is: formatting,
comments, line ends. The pairs of tokens are those of `tasks/mutate.py`. Must not run code.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sampler_fleet.episodes.tasks.mutate import SWAPS

_OPERATORS = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"},
    **{ast.And: "and", ast.Or: "or"},
    **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
}
_MEMBERSHIP = {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
_EXCEPTIONS = {
    "KeyError": "IndexError",
    "IndexError": "KeyError",
    "ValueError": "TypeError",
    "TypeError": "ValueError",
    "AttributeError": "LookupError",
    "StopIteration": "RuntimeError",
    "RuntimeError": "ValueError",
    "NotImplementedError": "RuntimeError",
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_STRING = re.compile(r"([bBuUrR]{0,2})('''|\"\"\"|'|\")(.*)\2", re.DOTALL)
_UNTOUCHED = ("__all__", "__version__", "__author__", "__slots__", "version")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """Replace `old`, which starts at character `start` of the file, by `new`."""

    path: str
    function: str  # its qualified name; "" at module level
    line: int
    statement_line: int  # where the statement or clause around it starts
    start: int
    old: str
    new: str
    kind: str

    def apply(self, source: str) -> str:
        assert source.startswith(self.old, self.start), self
        return source[: self.start] + self.new + source[self.start + len(self.old) :]


def find_mutations(path: str, source: str) -> list[Mutation]:
    """All of a file, in order of their places. Each gives another syntax tree that still parses."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source), None)
    whole = ast.dump(ast.parse(source))
    found: dict[tuple[int, str, str], Mutation] = {}
    for mutation in finder.found:
        try:
            same = ast.dump(ast.parse(mutation.apply(source))) == whole
        except (SyntaxError, ValueError):
            continue
        if not same:
            found.setdefault((mutation.start, mutation.old, mutation.new), mutation)
    return [found[key] for key in sorted(found)]


class _Finder:
    """Walks the parts of a module that run; keeps what it finds."""

    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutation] = []
        self._path, self._source = path, source
        lines = source.split("\n")
        self._lines = [line.encode() for line in lines]
        self._starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
        self._scope: list[str] = []
        self._statement: ast.AST = ast.Module([], [])

    def visit(self, node: ast.AST, parent: ast.AST | None) -> None:
        if _is_untouched(node):
            return
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            self._statement = node
        named = isinstance(node, (*_FUNCTIONS, ast.ClassDef))
        if named:
            self._scope.append(node.name)  # type: ignore[attr-defined]
        for start, end, new, kind in self._changes(node, parent):
            self._add(node, start, end, new, kind)
        outer = self._statement
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    self._statement = outer
                    self.visit(child, node)
        if named:
            self._scope.pop()

    def _add(self, node: ast.AST, start: int, end: int, new: str, kind: str) -> None:
        line: int = self._source.count("\n", 0, start) + 1
        self.found.append(
            Mutation(
                path=self._path,
                function=".".join(self._scope),
                line=line,
                statement_line=getattr(self._statement, "lineno", line),
                start=start,
                old=self._source[start:end],
                new=new,
                kind=kind,
            )
        )

    def _changes(
        self, node: ast.AST, parent: ast.AST | None
    ) -> Iterator[tuple[int, int, str, str]]:
        """(start, end, new text, kind) of what may be done to one node."""
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for (left, right), op in zip(itertools.pairwise(operands), node.ops, strict=True):
                yield from self._operator(left, right, op)
        elif isinstance(node, ast.BinOp):
            yield from self._operator(node.left, node.right, node.op)
        elif isinstance(node, ast.AugAssign):
            yield from self._operator(node.target, node.value, node.op, suffix="=")
        elif isinstance(node, ast.BoolOp):
            for left, right in itertools.pairwise(node.values):
                yield from self._operator(left, right, node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._start(node), self._start(node.operand), "", "negation"
        elif isinstance(node, ast.Constant):
            yield from self._constant(node, parent)
        elif isinstance(node, ast.Attribute | ast.Name):
            yield from self._name(node, parent)
        elif isinstance(node, ast.Call):
            yield from self._arguments(node)
        elif isinstance(node, ast.Slice):
            yield from self._bounds(node)
        elif isinstance(node, ast.stmt):
            yield from self._statements(node, parent)

    def _operator(
        self, left: ast.expr, right: ast.expr, op: ast.AST, suffix: str = ""
    ) -> Iterator[tuple[int, int, str, str]]:
        token = _OPERATORS.get(type(op), "") + suffix
        start, end = self._end(left), self._start(right)
        pattern = r"\s+".join(map(re.escape, token.split()))
        # parentheses and comments may stand beside it
        gap = re.sub(r"#[^\n]*", lambda found: " " * len(found[0]), self._source[start:end])
        place = re.search(pattern, gap) if token.strip("=") else None
        if place is None:
            return
        for new, kind in SWAPS.get(token, ()):
            yield start + place.start(), start + place.end(), new, kind
        if token in _MEMBERSHIP:
            yield start + place.start(), start + place.end(), _MEMBERSHIP[token], "opposite"

    def _constant(
        self, node: ast.Constant, parent: ast.AST | None
    ) -> Iterator[tuple[int, int, str, str]]:
        start, end = self._start(node), self._end(node)
        text = self._source[start:end]
        kind = "default" if isinstance(parent, ast.arguments) else "constant"
        if text in ("True", "False"):
            yield start, end, "False" if text == "True" else "True", kind
        elif re.fullmatch(r"\d+", text):
            yield start, end, str(int(text) + 1), kind
            if int(text) > 0:
                yield start, end, str(int(text) - 1), kind
        elif isinstance(node.value, str) and (found := _STRING.fullmatch(text)):
            body = found[3]
            if len(body) > 1 and re.search(r"[^\\]\w$", body):
                last = end - len(found[2])
                yield last - 1, last, "", kind if kind == "default" else "text"

    def _name(
        self, node: ast.Attribute | ast.Name, parent: ast.AST | None
    ) -> Iterator[tuple[int, int, str, str]]:
        if not isinstance(node.ctx, ast.Load):
            return
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        start, end = self._end(node) - len(name), self._end(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            for new, kind in SWAPS.get(name, ()):
                yield start, end, new, kind
        raised = isinstance(parent, ast.Raise | ast.ExceptHandler) or (
            isinstance(parent, ast.Call) and parent.func is node
        )
        if raised and name in _EXCEPTIONS and isinstance(node, ast.Name):
            yield start, end, _EXCEPTIONS[name], "exception"

    def _arguments(self, node: ast.Call) -> Iterator[tuple[int, int, str, str]]:
        for left, right in itertools.pairwise(node.args):
            if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                start, end = self._start(left), self._end(right)
                one, other = self._text(left), self._text(right)
                between = self._source[self._end(left) : self._start(right)]
                yield start, end, f"{other}{between}{one}", "argument"
        if node.keywords and node.keywords[-1].arg and (node.args or len(node.keywords) > 1):
            last = node.keywords[-1]
            before = node.keywords[-2].value if len(node.keywords) > 1 else node.args[-1]
            if not any(isinstance(a, ast.Starred) for a in node.args):
                yield self._end(before), self._end(last.value), "", "argument"

    def _bounds(self, node: ast.Slice) -> Iterator[tuple[int, int, str, str]]:
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield self._start(bound), self._end(bound), "", "slice"

    def _statements(
        self, node: ast.stmt, parent: ast.AST | None
    ) -> Iterator[tuple[int, int, str, str]]:
        start, end = self._start(node), self._end(node)
        if isinstance(node, ast.If):
            test = self._text(node.test)
            plain = isinstance(node.test, ast.Name | ast.Call | ast.Attribute)
            negated = f"not {test}" if plain else f"not ({test})"
            if not isinstance(node.test, ast.UnaryOp | ast.Compare):
                yield self._start(node.test), self._end(node.test), negated, "negation"
            if not node.orelse and not isinstance(node.body[0], ast.Pass):
                yield self._start(node.body[0]), self._end(node.body[-1]), "pass", "branch"
        elif isinstance(node, ast.Return) and node.value is not None:
            if isinstance(parent, ast.If):
                yield start, end, "pass", "return"
            elif isinstance(node.value, ast.Name | ast.Call | ast.BinOp | ast.Subscript):
                yield start, end, "return", "return"
        elif isinstance(node, ast.Break | ast.Continue):
            yield start, end, "continue" if isinstance(node, ast.Break) else "pass", "loop"
        elif isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield start, end, "pass", "statement"

    def _text(self, node: ast.AST) -> str:
        return self._source[self._start(node) : self._end(node)]

    def _start(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        """Characters from the start of the file; the tree counts bytes of a line."""
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())


def _is_untouched(node: ast.AST) -> bool:
    """Docstrings, f-strings (whose places Python 3.11 gets wrong), facts about the package."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        return "TYPE_CHECKING" in test or "__name__" in test
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id in _UNTOUCHED for t in node.targets)
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)
