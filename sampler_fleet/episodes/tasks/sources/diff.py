"""Unified diffs as git writes them: applied to texts, or turned around.

Owns their syntax. Exact: a hunk that doesn't fit its place is refused, not moved. Binary changes
and quoted names are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from contracts.errors import BadInputError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_SAME_NAME = re.compile(r"diff --git a/(.+) b/\1")
_TWO_NAMES = re.compile(r"diff --git a/(.+) b/(.+)")
_INDEX = re.compile(r"index (\w+)\.\.(\w+)(.*)")
_NO_NEWLINE = "\\"
_REVERSED = {
    "new file mode": "deleted file mode",
    "deleted file mode": "new file mode",
    "old mode": "new mode",
    "new mode": "old mode",
    "rename from": "rename to",
    "rename to": "rename from",
}
_UNREADABLE = ("GIT binary patch", "Binary files ", 'diff --git "', '--- "', '+++ "')


@dataclass
class _Hunk:
    start: int  # in the lines of the text before, from 0
    lines: list[tuple[str, str]] = field(default_factory=list)  # ("-", "+" or " ", line)


@dataclass
class _Change:
    """Of one file. None stands for no file."""

    before: str | None
    after: str | None
    hunks: list[_Hunk] = field(default_factory=list)


def apply_diff(text: str, tree: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(changed or new files with their whole contents, deleted ones) of a diff against `tree`.

    Raises:
        BadInputError: no diff, one that does not fit `tree`, or one with binary changes.
    """
    changed: dict[str, str] = {}
    deleted: list[str] = []
    changes = _read(text)
    if not changes:
        raise BadInputError("diff", expected="changes of files", found="none")
    for change in changes:
        if change.before is not None and change.before not in tree:
            raise BadInputError("diff", expected=f"a file {change.before}", found="none")
        if change.after is not None and change.after != change.before and change.after in tree:
            raise BadInputError("diff", expected=f"no file {change.after} yet", found="one")
        content = _patched(change, "" if change.before is None else tree[change.before])
        if change.after is not None:
            changed[change.after] = content
        if change.before is not None and change.before != change.after:
            deleted.append(change.before)
    return changed, tuple(deleted)


def reverse_diff(text: str) -> str:
    """The diff that undoes a diff; BadInputError if it has binary changes."""
    result, minus = [], ""
    num_before = num_after = 0  # lines that the hunk still has
    for line in text.split("\n"):
        if num_before or num_after or line.startswith(_NO_NEWLINE):
            num_before -= line[:1] in ("-", " ", "")
            num_after -= line[:1] in ("+", " ", "")
            line = {"-": "+", "+": "-"}.get(line[:1], line[:1]) + line[1:]
        elif found := _HUNK.fullmatch(line):
            start, length, new_start, new_length, heading = found.groups(default="")
            num_before, num_after = int(length or 1), int(new_length or 1)
            old, new = (f",{length}" if length else ""), (f",{new_length}" if new_length else "")
            line = f"@@ -{new_start}{new} +{start}{old} @@{heading}"
        elif line.startswith(_UNREADABLE):
            raise _unreadable(line)
        elif line.startswith("--- "):
            minus = line[4:]
            continue
        elif line.startswith("+++ "):
            line = f"--- {_renamed(line[4:], 'b/', 'a/')}\n+++ {_renamed(minus, 'a/', 'b/')}"
        elif found := _SAME_NAME.fullmatch(line) or _TWO_NAMES.fullmatch(line):
            names = (*found.groups(), found[1])
            line = f"diff --git a/{names[1]} b/{names[0]}"
        elif found := _INDEX.fullmatch(line):
            line = f"index {found[2]}..{found[1]}{found[3]}"
        else:
            line = next(
                (new + line[len(old) :] for old, new in _REVERSED.items() if line.startswith(old)),
                line,
            )
        result.append(line)
    return "\n".join(result)


def _read(text: str) -> list[_Change]:
    """The changes of a diff, file by file."""
    changes: list[_Change] = []
    lines = iter(text.removesuffix("\n").split("\n"))
    for line in lines:
        if line.startswith(_UNREADABLE):
            raise _unreadable(line)
        if line.startswith("diff --git "):
            same = _SAME_NAME.fullmatch(line)
            name = same[1] if same else None  # else it is renamed, as lines below say
            changes.append(_Change(name, name))
        elif line.startswith("--- "):
            if not changes or changes[-1].hunks:  # no line `diff` before it
                changes.append(_Change(None, None))
            changes[-1].before = _path(line, "a/")
        elif not changes:
            continue
        elif line.startswith("+++ "):
            changes[-1].after = _path(line, "b/")
        elif line.startswith("new file mode"):
            changes[-1].before = None
        elif line.startswith("deleted file mode"):
            changes[-1].after = None
        elif line.startswith("rename from "):
            changes[-1].before = line.removeprefix("rename from ")
        elif line.startswith("rename to "):
            changes[-1].after = line.removeprefix("rename to ")
        elif found := _HUNK.fullmatch(line):
            changes[-1].hunks.append(_hunk(found, lines))
        elif line.startswith(_NO_NEWLINE) and changes[-1].hunks:
            _drop_newline(changes[-1].hunks[-1])
    return [change for change in changes if change.before or change.after]


def _hunk(header: re.Match[str], lines: Iterator[str]) -> _Hunk:
    start, length, _, new_length, _ = header.groups()
    before, after = int(length or 1), int(new_length or 1)
    hunk = _Hunk(int(start) - 1 if length != "0" else int(start))
    while before > 0 or after > 0:
        line = next(lines, None)
        if line is None:
            raise BadInputError("diff", expected=f"the rest of {header[0]!r}", found="its end")
        kind = line[:1] or " "  # an empty line that lost its space
        if kind == _NO_NEWLINE:
            _drop_newline(hunk)
            continue
        if kind not in "+- ":
            raise BadInputError("diff", expected="a line with +, - or a space", found=line)
        before -= kind in "- "
        after -= kind in "+ "
        hunk.lines.append((kind, line[1:] + "\n"))
    return hunk


def _drop_newline(hunk: _Hunk) -> None:
    if not hunk.lines:
        raise BadInputError("diff", expected="a line before it", found="no newline at end of file")
    kind, line = hunk.lines.pop()
    hunk.lines.append((kind, line.removesuffix("\n")))


def _patched(change: _Change, content: str) -> str:
    lines = re.findall(r"[^\n]*\n|[^\n]+", content)
    result, place = [], 0
    for hunk in change.hunks:
        if not place <= hunk.start <= len(lines):
            raise BadInputError(
                "diff", expected="hunks in order and within the file", found=f"{change.before}"
            )
        result += lines[place : hunk.start]
        place = hunk.start
        for kind, line in hunk.lines:
            if kind != "+":
                if place >= len(lines) or lines[place] != line:
                    found = repr(lines[place]) if place < len(lines) else "the end"
                    raise BadInputError(
                        "diff", expected=f"{line!r} at {change.before}:{place + 1}", found=found
                    )
                place += 1
            if kind != "-":
                result.append(line)
    return "".join([*result, *lines[place:]])


def _path(line: str, prefix: str) -> str | None:
    name = line[4:].split("\t")[0]
    if name == "/dev/null":
        return None
    if not name.startswith(prefix):
        raise BadInputError("diff", expected=f"a path that starts with {prefix}", found=line)
    return name.removeprefix(prefix)


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _unreadable(line: str) -> BadInputError:
    return BadInputError("diff", expected="text changes and plain file names", found=line)
