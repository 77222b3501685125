"""Strangers: values put in the place of a test's own, to find objects that answer alike to all.

Owns how a stranger is made of a plain value and when two answers are alike. Pure; must not know
who is asked. Runs in a sandbox with a bare interpreter, so it imports next to nothing.

A *look-alike* has other digits and letters in the same places, so 12.5 becomes 35.0, 58.6, ...: an
object can't tell the test's value from its nine look-alikes. They are the same ones each time, so
that an honest object is judged alike; only the order of asking is random. Each is a *world*: what
a test does with the result, it does there with that world's values.
A *far* stranger is one that what has a range of values does not have.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

NUM_WORLDS = 9  # all in which digits are others
_NEAR = 1e-4
_DIGITS = "0123456789"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FAR = 10**30
_HUGE = 10**300
# Verbs that honest objects answer alike for many values: remainders, bits, truncation. For those
# one answer that differs is enough; of the others |x - 5| may be that of one look-alike.
_LOOSE = ("floordiv", "mod", "and_", "or_", "int", "len", "bool")
_MAY_BE_TRUE = ("len", "bool")  # most things are; only what is empty or zero has to be explained


def look_alike(value: Any, world: int) -> Any:
    """The stranger that stands for `value` in world 0 to 8; things that aren't plain stay."""
    factor, kind = world + 2, type(value)
    if value is None:
        return factor
    if kind is bool:
        return not value
    if kind is int:
        return _number(value, factor) if abs(value) <= _FAR else value * factor
    if kind is float:
        return _number(value, factor) if value - value == 0 else float(factor)
    if kind is str:
        moved = _moved(value, factor)
        return moved if moved != value else value + _LETTERS[factor]
    if kind is bytes:
        return look_alike(value.decode("latin-1"), world).encode("latin-1")
    if kind in (list, tuple, set, frozenset):
        return kind([look_alike(item, world) for item in value] or [factor])
    if kind is dict:
        moved = {look_alike(k, world): look_alike(v, world) for k, v in value.items()}
        return moved or {factor: factor}
    return value


def far(value: Any) -> list[Any]:
    """Values of its kind that nothing has; none where a kind has no such values."""
    kind = type(value)
    if kind in (int, float):
        return [kind(-_FAR), kind(_FAR)]
    if kind is str:
        return [os.urandom(16).hex()]
    if kind is bytes:
        return [os.urandom(16)]
    if kind in (list, tuple, frozenset):
        rows = [far(item) for item in value]
        if rows and all(rows):
            return [kind([row[end] for row in rows]) for end in (0, -1)]
    return []


def shuffled(num: int) -> list[int]:
    """0 to num - 1 in an order that can't be foreseen."""
    return sorted(range(num), key=lambda _: os.urandom(8))


def near(verb: str, mine: Any, other: Any, before: float) -> float:
    """How far apart two answers must be to differ, given the operands (None: there is none) and
    how far those apart must be that they were made from. A millionth of an operand is a lie too."""
    if verb == "truediv":
        return _NEAR
    if verb in ("add", "sub") and _is_number(mine) and _is_number(other):
        spread = min(abs(mine), _FAR) + min(abs(other), _FAR)
        return max(before, _NEAR * spread)
    return before


def is_proven(verb: str, answer: Any, others: Sequence[tuple[Any, float]]) -> bool:
    """Whether `answer` differs from enough of the answers that strangers got, (answer, near)."""
    if verb in _MAY_BE_TRUE and answer:
        return True
    num_alike = sum(_are_alike(answer, other, tolerance) for other, tolerance in others)
    return num_alike < len(others) if verb in _LOOSE else num_alike <= 1


def _are_alike(one: Any, other: Any, tolerance: float) -> bool:
    """An integer too large for a float is near none: its difference is not asked for."""
    if _is_number(one) and _is_number(other) and abs(one) < _HUGE and abs(other) < _HUGE:
        return one == other or -tolerance <= one - other <= tolerance
    return type(one) is type(other) and one == other


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _number(value: Any, factor: int) -> Any:
    return type(value)(_moved(repr(value), factor, letters=False))


def _moved(text: str, factor: int, *, letters: bool = True) -> str:
    # 1 to 10 times 2 to 10 modulo 11 is never itself; and unlike a sum, no difference stays.
    table = {ord(c): _DIGITS[(i + 1) * factor % 11 - 1] for i, c in enumerate(_DIGITS)}
    if letters:
        for alphabet in (_LETTERS, _LETTERS.upper()):
            table |= {ord(c): alphabet[(i + factor) % 26] for i, c in enumerate(alphabet)}
    return text.translate(table)
