"""Function templates drawn from a grammar: what training tasks are made of besides `domains.py`.

Owns the productions and their expansion. A policy that saw only written templates learns them by
heart; drawn ones leave it nothing but the issue and the code to reason from. No drawn function,
right or faulty, is a held-out one. Pure: the templates are the same on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from random import Random

from sampler_fleet.episodes.tasks.domains import DOMAINS
from sampler_fleet.episodes.tasks.mutate import find_changes
from sampler_fleet.episodes.tasks.templates import (
    ROLE,
    Domain,
    Template,
    role_of,
)

NUM_DRAWN = 2600

# Bodies by the verb of the function's name. `<rule>` expands to one of a rule's texts; `<number>`,
# like every role in angle brackets, is a parameter, new or used before.
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "COMPUTE": (
        "return <value>",
        "return <value>",
        "if <test>:\n        return <value>\n    return <value>",
        "if <test>:\n        return <sum>\n    return <number>",
        "if <test>:\n        return <constant>\n    return <value>",
        "ACC = <sum>\n    return <of ACC>",
        "if <test>:\n        ACC = <sum>\n    else:\n        ACC = <number>\n    return ACC",
        "return <of list> <add> <of list>",
        "return <of list> <add> <number>",
        "return <of list> <multiply> <of list>",
    ),
    "CHECK": (
        "return <test>",
        "return <test> <and> <test>",
        "return <test> <and> <FLAG>",
        "return <FLAG> <and> <test>",
        "if <test>:\n        return <bool>\n    return <bool>",
        "if <FLAG>:\n        return <bool>\n    return <test>",
        "if <test>:\n        return <bool>\n    return <test>",
        "return <any>(<test of EACH> for EACH in <ITEMS>)",
        "return <of list> <compare> <number>",
        "return len(<WORDS>) <compare> <number>",
        "return len(<TEXT>) <compare> <small> <and> <TEXT>.<with>(<PART>)",
        "return <TEXT>.<case>() == <TEXT>.<case>()",
        "return <TEXT>.<with>(<PART>)",
    ),
    "TOTAL": (
        "ACC = <first>\n    for EACH in <ITEMS>:\n        ACC <add>= <of EACH>\n    return ACC",
        "ACC = <first>\n    for EACH in <ITEMS>:\n        ACC <add>= <of EACH>\n"
        "    return <of ACC>",
        "ACC = <first>\n    for EACH in <ITEMS>:\n        if <test of EACH>:\n"
        "            ACC <add>= <term>\n    return ACC",
        "return sum(<of EACH> for EACH in <ITEMS>)",
        "return sum(<term> for EACH in <ITEMS> if <test of EACH>)",
    ),
    "TALLY": (
        "ACC = <first>\n    for EACH in <ITEMS>:\n        if <test of EACH>:\n"
        "            ACC <add>= <one>\n    return ACC",
        "ACC = <first>\n    for EACH in <ITEMS>:\n        if <test of EACH> <and> <test of EACH>:\n"
        "            ACC <add>= <one>\n    return ACC",
        "ACC = 0\n    for EACH in <WORDS>:\n        if EACH.<with>(<PART>):\n"
        "            ACC <add>= <one>\n    return ACC",
        "ACC = 0\n    for EACH in <WORDS>:\n        if len(EACH) <compare> <number>:\n"
        "            ACC <add>= 1\n    return ACC",
        "return sum(<one> for EACH in <ITEMS> if <test of EACH>)",
        "return len([EACH for EACH in <ITEMS> if <test of EACH>])",
        "return <number> <multiply> <number> <add> <one>",
    ),
    "BOUND": (
        "return <extreme>(<value>, <number>)",
        "return <extreme>(<number>, <sum>)",
        "return <extreme>(<number>, <extreme>(<number>, <number>))",
        "ACC = <sum>\n    return <extreme>(ACC, <number>)",
    ),
    "FORMAT": (
        "return <TEXT>.<strip>().<case>()",
        "return <TEXT>.<case>().<strip>()",
        "return <TEXT>.<strip>() + <TEXT>.<case>()",
        "return <TEXT>.<case>() * <COUNT>",
    ),
    "PICK": (
        "return <ITEMS>[<end>]",
        "return <ITEMS>[<end>] <add> <value>",
        "return <of list>",
        "return <extreme>(<of list>, <number>)",
        "return <WORDS>[:<PLACE> <add> 1]",
        "return <ITEMS>[<PLACE>:]",
        "return <extreme>(<of EACH> for EACH in <ITEMS>)",
        "return <extreme>(len(EACH) for EACH in <WORDS>)",
        "return [EACH for EACH in <ITEMS> if <test of EACH>]",
        "return [<of EACH> for EACH in <ITEMS>]",
        "return sorted(<ITEMS>)[<end>]",
        "if <test>:\n        return <number>\n    return <number>",
        "ACC = <ITEMS>[<end>]\n    for EACH in <ITEMS>:\n        if EACH <compare> ACC:\n"
        "            ACC = EACH\n    return ACC",
    ),
}

_RULES: Mapping[str, tuple[str, ...]] = {
    "number": ("<AMOUNT>", "<AMOUNT>", "<COUNT>", "<LIMIT>", "<RATE>", "<LOW>", "<HIGH>"),
    "sum": (
        "<number> <add> <number>",
        "<number> <multiply> <number>",
        "<number> <add> <small>",
        "<number> <multiply> <large>",
    ),
    "value": (
        "<sum>",
        "<sum>",
        "<number> <multiply> <number> <add> <number>",
        "<number> <add> <number> <multiply> <number>",
        "<number> <add> <number> <add> <number>",
        "<number> <multiply> <number> <add> <small>",
        "(<number> <add> <number>) <multiply> <number>",
        "(<number> <add> <number>) <multiply> <large>",
        "<extreme>(<sum>, <number>)",
        "<extreme>(<number>, <number>) <add> <number>",
        "<extreme>(<number> - <number>, 0)",
        "<extreme>(0, <number> - <number>)",
        "abs(<number> - <number>)",
    ),
    "of ACC": (
        "<extreme>(ACC, <number>)",
        "ACC <add> <number>",
        "ACC <multiply> <number>",
        "ACC <multiply> <large>",
        "<extreme>(ACC, 0)",
    ),
    "of EACH": (
        "EACH <add> <number>",
        "EACH <multiply> <number>",
        "EACH <add> <small>",
        "<extreme>(EACH, <number>)",
        "<extreme>(EACH <add> <number>, 0)",
        "EACH",
    ),
    "term": ("EACH", "EACH", "EACH <add> <number>", "EACH <multiply> <number>", "<number>"),
    "of list": (
        "<measure>(<ITEMS>)",
        "<extreme>(<ITEMS>)",
        "<ITEMS>[<end>]",
    ),
    "test": (
        "<number> <compare> <number>",
        "<number> <compare> <number>",
        "<number> <compare> <small>",
        "<number> <equal> <number>",
        "<number> <equal> 0",
        "<number> % 2 == 0",
        "<number> <add> <number> <compare> <number>",
        "<number> <multiply> <number> <compare> <number>",
    ),
    "test of EACH": (
        "EACH <compare> <number>",
        "EACH <compare> <number>",
        "EACH <compare> <small>",
        "EACH <equal> <number>",
        "EACH % <number> == 0",
    ),
    "add": ("+", "-"),
    "multiply": ("*", "*", "//", "%"),
    "compare": ("<", "<=", ">", ">="),
    "equal": ("==", "!="),
    "and": ("and", "or"),
    "any": ("any", "all"),
    "extreme": ("min", "max"),
    "measure": ("sum", "len"),
    "end": ("0", "-1"),
    "with": ("startswith", "endswith"),
    "case": ("upper", "lower"),
    "strip": ("strip", "lstrip", "rstrip"),
    "bool": ("True", "False"),
    "first": ("0", "0", "<number>"),
    "one": ("1", "1", "1", "2"),
    "constant": ("0", "0", "1", "<small>"),
    "small": ("1", "2", "5", "10"),
    "large": ("2", "5", "7", "10", "12", "20", "24", "60"),
}

_NONTERMINAL = re.compile(r"<([A-Za-z ]+)>")
_MAX_PARAMS = 4
_REUSE = 0.35  # of parameters that are one used before

# Nobody writes these: an operand and itself, `min(a, a)`, the same returned either way.
_SILLY = re.compile(
    r"(?<![\w.])(\w+(?:\[-?\d\])?) \S+ \1(?![\w.(\[])"
    r"|\((\w+), \2\)"
    r"|return (.+)\n +return \3(?:\n|$)"
)


@cache
def drawn_templates() -> tuple[tuple[Domain, Template], ...]:
    """The drawn training templates, each with the domain that names its things."""
    written = [template for domain in DOMAINS for template in domain.templates]
    heldout = {_shape(v.source) for t in written if t.heldout for v in t.variants}
    taken = {_shape(v.source) for t in written for v in t.variants}
    found: list[tuple[Domain, Template]] = []
    for source in _sources():
        shape = _shape(source)
        faulty = (change.apply(source) for change in find_changes(source))
        if shape not in taken and heldout.isdisjoint(map(_shape, faulty)):
            taken.add(shape)
            domain = DOMAINS[len(found) % len(DOMAINS)]
            name = f"{domain.packages[0]}-drawn-{len(found)}"
            found.append((domain, Template.of(name, [source], heldout=False)))
        if len(found) == NUM_DRAWN:
            return tuple(found)
    raise AssertionError("the stream of sources has no end")


def _sources() -> Iterator[str]:
    rng = Random("grammar")
    while True:
        verb = rng.choice(tuple(_FUNCTIONS))
        body = _Expansion(rng).expand(rng.choice(_FUNCTIONS[verb]))
        params = [role for role in dict.fromkeys(ROLE.findall(body)) if role_of(role).value]
        if 0 < len(params) <= _MAX_PARAMS and not _SILLY.search(body):
            yield f"def {verb}_NOUN({', '.join(params)}):\n    {body}"


class _Expansion:
    """One text's expansion, and the parameters that it has used so far."""

    def __init__(self, rng: Random):
        self._rng = rng
        self._params: dict[str, list[str]] = {}  # role -> its parameters

    def expand(self, text: str) -> str:
        while match := _NONTERMINAL.search(text):
            name = match[1]
            part = self._param(name) if name.isupper() else self._rng.choice(_RULES[name])
            text = text[: match.start()] + part + text[match.end() :]
        return text

    def _param(self, role: str) -> str:
        used = self._params.setdefault(role, [])
        if used and (len(used) == 2 or self._rng.random() < _REUSE):
            return self._rng.choice(used)
        used.append(f"{role}{len(used) + 1}")
        return used[-1]


def _shape(source: str) -> str:
    """The body with names numbered by appearance and whole numbers made equal."""
    _, body = source.split("\n", 1)
    numbers: dict[str, str] = {}
    body = re.sub(r"(?<![\w.])\d+", "0", body)
    return ROLE.sub(lambda match: numbers.setdefault(match[0], f"N{len(numbers)}"), body)
