"""Which changes of a template are faults, proven by running both versions on drawn inputs.

Owns the examples: calls on which the reference and the faulty function differ or agree. Results
are per template variant, names not yet chosen, and cached: writing a task executes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from sampler_fleet.episodes.tasks.mutate import Change, find_changes
from sampler_fleet.episodes.tasks.templates import Variant, role_of

NUM_INPUTS = 160
MIN_FAILING = 4  # one for the issue, three for the hidden tests
MAX_RIVALS = 1  # other places in the function where the same symptom could come from


@dataclass(frozen=True, kw_only=True)
class Example:
    """A call as Python text: its arguments, what is right, what the faulty function does."""

    arguments: str
    expected: str
    outcome: str  # "returned 3" or "raised IndexError"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A faulty version of a variant. Names are still roles."""

    source: str
    undo: Change
    num_rivals: int
    failing: tuple[Example, ...]
    passing: tuple[Example, ...]


@cache
def find_faults(variant: Variant) -> tuple[Fault, ...]:
    """The changes that show, and that an issue can tell from most others.

    Enough inputs differ, no constant function passes them all, and few other changes of the faulty
    function share the symptom.
    """
    examples = find_examples(variant)
    inputs = _inputs(variant)
    faults = []
    for change in find_changes(variant.source):
        source = change.apply(variant.source)
        function = _load(source, variant.function)
        failing, passing = [], []
        for example, values in zip(examples, inputs, strict=True):
            if example is None:
                continue
            outcome = _call(function, values)
            if outcome == f"returned {example.expected}":
                passing.append(example)
            else:
                failing.append(
                    Example(arguments=example.arguments, expected=example.expected, outcome=outcome)
                )
        undo = replace(change, old=change.new, new=change.old)
        rivals = [c for c in find_changes(source) if c.kind == undo.kind and c != undo]
        varied = len({example.expected for example in (*failing, *passing)}) > 1
        if len(failing) >= MIN_FAILING and varied and len(rivals) <= MAX_RIVALS:
            faults.append(
                Fault(
                    source=source,
                    undo=undo,
                    num_rivals=len(rivals),
                    failing=tuple(failing),
                    passing=tuple(passing),
                )
            )
    return tuple(faults)


@cache
def find_examples(variant: Variant) -> tuple[Example | None, ...]:
    """What the reference returns for each drawn input; None where it raises."""
    function = _load(variant.source, variant.function)
    found: list[Example | None] = []
    for values in _inputs(variant):
        outcome = _call(function, values)
        arguments = ", ".join(repr(value) for value in values)
        if outcome.startswith("returned "):
            expected = outcome.removeprefix("returned ")
            found.append(Example(arguments=arguments, expected=expected, outcome=outcome))
        else:
            found.append(None)
    return tuple(found)


@cache
def _inputs(variant: Variant) -> tuple[tuple[Any, ...], ...]:
    """Distinct argument tuples, drawn by the roles of the parameters."""
    rng = Random(variant.source)
    drawn: dict[str, tuple[Any, ...]] = {}
    for _ in range(NUM_INPUTS):
        values = []
        for param in variant.params:
            draw = role_of(param).value
            assert draw is not None, param
            values.append(draw(rng))
        drawn[repr(values)] = tuple(values)
    return tuple(drawn.values())


def _load(source: str, function: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace[function]


def _call(function: Callable[..., Any], values: tuple[Any, ...]) -> str:
    try:
        # a function may change its lists, and theirs are flat
        copies = [[*value] if isinstance(value, list) else value for value in values]
        return f"returned {function(*copies)!r}"
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return f"raised {type(error).__name__}"
