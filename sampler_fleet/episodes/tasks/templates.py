"""What a task is written from: roles of names, domains, function templates.

Owns the notation and its expansion. In a template every all-capitals word is a role: it stands for
a name drawn from a pool (`AMOUNT1 - AMOUNT2` may become `price - fee`), and parameters of a role
get values of its kind. `{5|10}` is a choice of constants, `{K:5|10}` one that `{K}` repeats. The
templates themselves are in `domains.py`. Pools are shared by both splits, templates never are.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random

ROLE = re.compile(r"(?<![A-Za-z])[A-Z]{2,}\d?(?![A-Za-z])")
_CHOICE = re.compile(r"\{(?:([A-Z]):)?([^{}|]+(?:\|[^{}|]+)+)\}")
_TITLE = re.compile(r"# (?P<title>[a-z ]+?)(?P<heldout> \(held out\))?\n(?P<source>def .*)", re.S)

_WORDS = ("red", "blue", "green", "sun", "moon", "tea", "milk", "map", "key", "box", "pen", "net")


@dataclass(frozen=True, kw_only=True)
class Role:
    """A pool of names and, for parameters, how a value is drawn."""

    names: tuple[str, ...]
    value: Callable[[Random], object] | None = None


def _whole(low: int, high: int) -> Callable[[Random], int]:
    return lambda rng: rng.randint(low, high)


def _numbers(rng: Random) -> list[int]:
    return [rng.randint(0, 12) for _ in range(rng.randint(1, 5))]


def _text(rng: Random) -> str:
    word = rng.choice(_WORDS)
    return rng.choice((word, word, word.title(), f" {word}", f"{word} "))


def _words(rng: Random) -> list[str]:
    return [rng.choice(_WORDS) for _ in range(rng.randint(1, 4))]


ROLES: Mapping[str, Role] = {
    # parameters
    "AMOUNT": Role(names=("price", "cost", "fee", "charge", "score"), value=_whole(1, 15)),
    "COUNT": Role(names=("count", "units", "pieces", "guests", "days"), value=_whole(0, 12)),
    "LIMIT": Role(names=("limit", "cap", "bound", "quota"), value=_whole(1, 12)),
    "LOW": Role(names=("low", "least", "start"), value=_whole(1, 7)),
    "HIGH": Role(names=("high", "most", "stop"), value=_whole(6, 13)),
    "RATE": Role(names=("rate", "share", "factor", "step"), value=_whole(1, 6)),
    "ITEMS": Role(names=("items", "values", "rows", "marks", "levels"), value=_numbers),
    "TEXT": Role(names=("text", "word", "line", "title"), value=_text),
    "WORDS": Role(names=("words", "tags", "labels", "keys"), value=_words),
    "PART": Role(names=("part", "piece", "mark"), value=lambda rng: rng.choice("abdegkmnortu")),
    "PLACE": Role(names=("place", "slot", "index"), value=_whole(0, 3)),
    "FLAG": Role(names=("open", "ready", "paid", "member"), value=lambda rng: rng.random() < 0.5),
    # local variables
    "EACH": Role(names=("item", "entry", "value", "one")),
    "ACC": Role(names=("result", "output", "found", "answer")),
    # verbs of function names; NOUN comes from the domain
    "COMPUTE": Role(names=("get", "find", "compute", "calc")),
    "TOTAL": Role(names=("total", "add", "sum", "gather")),
    "TALLY": Role(names=("count", "tally", "num")),
    "CHECK": Role(names=("is", "has", "can", "check")),
    "BOUND": Role(names=("clip", "clamp", "fit", "trim")),
    "FORMAT": Role(names=("format", "show", "render", "print")),
    "PICK": Role(names=("pick", "choose", "select", "take")),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A template with its constants chosen: legal Python whose names are still roles."""

    template: str  # unique: domain and title
    heldout: bool
    source: str
    function: str
    params: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Template:
    name: str
    heldout: bool
    variants: tuple[Variant, ...]

    @staticmethod
    def of(name: str, sources: Iterable[str], *, heldout: bool) -> Template:
        """From the sources of its variants, each one function."""
        variants = []
        for source in sources:
            definition = ast.parse(source).body[0]
            assert isinstance(definition, ast.FunctionDef), source
            variants.append(
                Variant(
                    template=name,
                    heldout=heldout,
                    source=source,
                    function=definition.name,
                    params=tuple(arg.arg for arg in definition.args.args),
                )
            )
        return Template(name=name, heldout=heldout, variants=tuple(variants))


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A field of work: what its packages, modules and things are called, and its templates."""

    packages: tuple[str, ...]
    modules: tuple[str, ...]
    nouns: tuple[str, ...]
    templates: tuple[Template, ...]


def domain(*, packages: str, modules: str, nouns: str, functions: str) -> Domain:
    """A domain from its notation: words apart by spaces, titled functions apart by blank lines."""
    words = packages.split()
    return Domain(
        packages=tuple(words),
        modules=tuple(modules.split()),
        nouns=tuple(nouns.split()),
        templates=tuple(_template(words[0], block) for block in functions.strip().split("\n\n")),
    )


def _template(prefix: str, block: str) -> Template:
    match = _TITLE.fullmatch(block.strip())
    assert match, block
    name = f"{prefix}-{match['title'].replace(' ', '-')}"
    heldout = match["heldout"] is not None
    return Template.of(name, _expand(match["source"]), heldout=heldout)


def _expand(source: str) -> list[str]:
    """All sources that the choices of constants allow."""
    found = list(_CHOICE.finditer(source))
    sources = []
    for picks in itertools.product(*(match[2].split("|") for match in found)):
        text = source
        for match, pick in zip(found, picks, strict=True):
            text = text.replace(match[0], pick, 1)
            if match[1]:
                text = text.replace(f"{{{match[1]}}}", pick)
        sources.append(text)
    return sources


def role_of(name: str) -> Role:
    """The role that an all-capitals word of a template stands for; a digit tells two apart."""
    return ROLES[name.rstrip("0123456789")]


def rename(source: str, names: Mapping[str, str]) -> str:
    """The source with every role replaced by its name."""
    return ROLE.sub(lambda match: names[match[0]], source)
