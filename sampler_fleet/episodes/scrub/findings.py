"""The vocabulary of the scrub: what is looked at, what is found, what is refused.

Runs inside containers too: standard library of Python 3.9.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Refused(ValueError):
    """Bad input, found before anything was changed: trying again won't help."""

    def __init__(self, rule: str, expected: str, found: str) -> None:
        super().__init__(f"{rule}: expected {expected}, found {found}")
        self.rule, self.expected, self.found = rule, expected, found


@dataclass(frozen=True)
class Target:
    """What to clean. All paths are absolute; the tree's parents are none of it."""

    root: str  # the working tree
    patch: str  # the gold patch
    extra_roots: tuple[str, ...] = ()  # caches, site-packages: cleaned too, the rest is not touched
    words: tuple[str, ...] = ()  # instance id, fix commit, branch, tag: must be named nowhere


@dataclass(frozen=True)
class Leak:
    """One way to the answer: a class of `policy.py`, where it is, and what was seen."""

    kind: str
    path: str  # relative to the tree; absolute outside
    detail: str = ""
    member: str = ""  # of an archive; `a.tar!b` in nested ones


@dataclass
class Report:
    """What an audit looked at and found; what a scrub did before it."""

    leaks: list[Leak] = field(default_factory=list)
    doubtful: list[Leak] = field(default_factory=list)  # seen, but likely not of the gold patch
    looked_at: dict[str, int] = field(default_factory=dict)
    removed: list[Leak] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)  # environment variables the container must lose
    commit: str = ""  # of a scrub: the one commit there is

    @property
    def clean(self) -> bool:
        return not self.leaks

    def to_dict(self) -> dict[str, Any]:
        def plain(leaks: list[Leak]) -> list[dict[str, str]]:
            return [vars(leak) for leak in leaks]

        lists = {name: plain(getattr(self, name)) for name in ("leaks", "doubtful", "removed")}
        return {**vars(self), **lists, "clean": self.clean}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        lists = {
            name: [Leak(**leak) for leak in data[name]] for name in ("leaks", "doubtful", "removed")
        }
        rest = {name: data[name] for name in ("looked_at", "unset", "commit")}
        return Report(**lists, **rest)
