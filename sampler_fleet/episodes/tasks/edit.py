"""The edit that repairs a task: one `sed` substitution on one line.

Owns the command's text and what it does to a file. Must not run it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What `sed` would read as something else than itself; `*` is itself where it comes first.
_SPECIAL = re.compile(r"[.\[\]^$\\|&\n']|(?<!^)\*")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Replace the first `old` of a line by `new`. Lines count from 1."""

    path: str
    line: int
    old: str
    new: str

    def __post_init__(self) -> None:
        assert self.old and not _SPECIAL.search(self.old), self
        assert not _SPECIAL.search(self.new.replace("*", "")), self  # a star is plain over there

    @property
    def command(self) -> str:
        return f"sed -i '{self.line}s|{self.old}|{self.new}|' {self.path}"

    def apply(self, text: str) -> str:
        """The file after the command; a line that is missing or lacks `old` changes nothing."""
        lines = text.split("\n")
        if self.line <= len(lines):
            lines[self.line - 1] = lines[self.line - 1].replace(self.old, self.new, 1)
        return "\n".join(lines)
