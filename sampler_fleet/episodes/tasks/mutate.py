"""Faults: single-token edits of a function, each with the symptom a person would report.

Owns the mutation operators and their symptom kinds. Works on source text with AST positions, so
that formatting survives. All operators but the constants are involutions: what undoes a fault is
the operator itself. Must not execute code.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

# token -> what replaces it, by symptom kind
_SWAPS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "direction": (("+", "-"), ("+=", "-=")),
    "scale": (("*", "//"),),
    "remainder": (("%", "//"),),
    "boundary": (("<", "<="), (">", ">=")),
    "reversed": (("<", ">"), ("<=", ">=")),
    "opposite": (("==", "!="), ("True", "False")),
    "end": (("min", "max"), ("0", "-1"), ("startswith", "endswith"), ("lstrip", "rstrip")),
    "combine": (("and", "or"), ("any", "all")),
    "case": (("upper", "lower"),),
    "measure": (("sum", "len"),),
}

# A constant is one of the keys; its faults are numbers that are not, 0 and 1 apart.
_CONSTANTS: Mapping[int, tuple[int, ...]] = {
    0: (1,),
    1: (0,),
    2: (3,),
    5: (4, 6),
    7: (8,),
    10: (9, 11),
    12: (13,),
    20: (19, 21),
    24: (23, 25),
    60: (59, 61),
    100: (99, 101),
}

SYMPTOMS: Mapping[str, tuple[str, ...]] = {
    "direction": (
        "The result moves in the wrong direction.",
        "Something counts with the wrong sign.",
    ),
    "scale": ("The result has the wrong scale.", "The size of the result is far off."),
    "remainder": ("Quotient and remainder are mixed up.",),
    "boundary": ("Only the boundary case is wrong.", "It fails exactly at the limit."),
    "reversed": (
        "Large and small are treated the wrong way round.",
        "It looks at the wrong side of the limit.",
    ),
    "opposite": ("The answer is the opposite.", "Yes and no are swapped."),
    "end": ("It picks the wrong end.", "It takes the other extreme."),
    "combine": ("The conditions are combined wrongly.", "One condition decides too much."),
    "case": ("The letters have the wrong case.",),
    "measure": ("Counting and adding are mixed up.",),
    "offset": ("A number is off by one.", "It is slightly off."),
    "argument": ("The wrong argument is used.", "Two arguments are mixed up."),
}


def _swap_table() -> dict[str, tuple[tuple[str, str], ...]]:
    """token -> (replacement, kind) pairs, both ways."""
    table: dict[str, tuple[tuple[str, str], ...]] = {}
    for kind, pairs in _SWAPS.items():
        for one, other in pairs:
            table[one] = (*table.get(one, ()), (other, kind))
            table[other] = (*table.get(other, ()), (one, kind))
    return table


SWAPS = _swap_table()


_SPACED = frozenset({"+", "-", "//", "%", "<", "<=", ">", ">=", "==", "!=", "+=", "-="})


@dataclass(frozen=True, kw_only=True)
class Change:
    """Replace `old` by `new` at one place of a source. Lines count from 1, columns from 0."""

    line: int
    column: int
    old: str
    new: str
    kind: str

    def with_spaces(self, source: str) -> Change:
        """The same change with the spaces around a binary operator: what stands in the file.

        ` * ` stays bare: after a space, `sed` reads the star as a repetition.
        """
        text = source.split("\n")[self.line - 1]
        end = self.column + len(self.old)
        if self.old in _SPACED and text[self.column - 1] == " " == text[end : end + 1]:
            return replace(self, column=self.column - 1, old=f" {self.old} ", new=f" {self.new} ")
        return self

    def apply(self, source: str) -> str:
        lines = source.split("\n")
        text = lines[self.line - 1]
        assert text.startswith(self.old, self.column), (text, self)
        lines[self.line - 1] = text[: self.column] + self.new + text[self.column + len(self.old) :]
        return "\n".join(lines)


def find_changes(source: str) -> tuple[Change, ...]:
    """Every single-token change of a function's body that the operators allow, in source order."""
    lines = source.split("\n")
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    params = [arg.arg for arg in definition.args.args]
    changes = {
        Change(line=line, column=column, old=token, new=new, kind=kind)
        for statement in definition.body
        for line, column, token, is_index in _tokens(statement, lines)
        for new, kind in (*_swaps(token, is_index), *_arguments(token, params))
    }
    return tuple(sorted(changes, key=lambda c: (c.line, c.column, c.old, c.new, c.kind)))


def _swaps(token: str, is_index: bool) -> Iterator[tuple[str, str]]:
    for new, kind in SWAPS.get(token, ()):
        if is_index or token not in ("0", "-1"):
            yield new, kind
    if token.isdigit() and not is_index:
        for new in _CONSTANTS.get(int(token), ()):
            yield str(new), "offset"


def _arguments(token: str, params: list[str]) -> Iterator[tuple[str, str]]:
    """Another parameter of the same role: `AMOUNT1` for `AMOUNT2`."""
    if token in params:
        role = token.rstrip("0123456789")
        for other in params:
            if other != token and other.rstrip("0123456789") == role:
                yield other, "argument"


def _tokens(tree: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, str, bool]]:
    """(line, column, token, whether it is an index) of whatever an operator could change."""
    negative = {node.operand for node in ast.walk(tree) if isinstance(node, ast.UnaryOp)}
    indices = {node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            yield _operator(node.left, node.right, lines)
        elif isinstance(node, ast.AugAssign):
            yield _operator(node.target, node.value, lines)
        elif isinstance(node, ast.Compare):
            yield _operator(node.left, node.comparators[0], lines)
        elif isinstance(node, ast.BoolOp):
            for left, right in itertools.pairwise(node.values):
                yield _operator(left, right, lines)
        elif isinstance(node, ast.Attribute):
            assert node.end_col_offset is not None
            yield node.lineno, node.end_col_offset - len(node.attr), node.attr, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.lineno, node.col_offset, node.id, False
        elif isinstance(node, ast.Constant | ast.UnaryOp) and node not in negative:
            text = ast.unparse(node)
            if re.fullmatch(r"-?\d+|True|False", text):
                yield node.lineno, node.col_offset, text, node in indices


def _operator(left: ast.expr, right: ast.expr, lines: list[str]) -> tuple[int, int, str, bool]:
    """The operator between two operands of one line; parentheses may stand beside it."""
    assert left.end_lineno == right.lineno and left.end_col_offset is not None
    gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    token = gap.strip(" ()")
    return right.lineno, left.end_col_offset + gap.index(token), token, False
