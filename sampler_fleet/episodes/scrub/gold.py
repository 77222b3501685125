"""The gold patch, and the lines that tell it from the tree it is for.

Owns what *distinctive* means and how such text is found in bytes of any kind. Pure: it sees texts
and opens nothing. Runs inside containers too: standard library of Python 3.9, cheap imports.

Texts are compared in a canonical form without white space, quotes, escapes and non-ASCII bytes.
So a line is found again indented, behind the `+` of a patch, in JSON, in XML, and in UTF-16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from sampler_fleet.episodes.scrub.policy import CHANGELOG_ENDINGS, CHANGELOG_FOLDERS, CHANGELOGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

MIN_LENGTH = 12  # canonical bytes of a line
MIN_NAME = 8  # of a name that compiled files are searched for
MIN_SENTENCE = 5  # words of a line in a changelog: headings recur
MAX_NEEDLES = 64  # of lines; more would prove little and cost a pass over all bytes each
_DROPPED = bytes(range(33)) + b"\"'`" + bytes(range(127, 256))
_ESCAPE = re.compile(rb"\\+(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[abfnrtv])?")
_ENTITY = re.compile(rb"&(?:(lt)|(gt)|(amp)|quot|apos|#\d+|#x[0-9a-fA-F]+);")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_WORD = re.compile(rb"[A-Za-z0-9_]+")
_NAME = re.compile(rf"[A-Za-z_]\w{{{MIN_NAME - 1},}}", re.ASCII)
_TEXT = re.compile(r"\"([^\"\\]{8,})\"|'([^'\\]{8,})'")
_BOILERPLATE = re.compile(
    r"""(from\s+[\w.]+\s+)?import\b.* | (use|using|package|module|namespace|include|require)\b.*
    | \#\s*include\b.* | return\b\s*(None|True|False|null|nil|self|this|true|false|result)?;?
    | raise\s+NotImplementedError\b.* | if\s+__name__\s*==.* | @[\w.]+(\(\))?
    | (public|private|protected|export|static|async|default|final|void|function|\s)*[{(]?
    | (def|func|function)\s+(__init__|setUp|tearDown|main|init)\b\(?\w*\)?\W*
    | \#!.* | \#\s*-\*-.* | .*\b(Copyright|License|eslint-disable|noqa)\b.*""",
    re.VERBOSE,
)
_KEYWORD = re.compile(
    r"""and | as | assert | async | await | bool | break | case | catch | char | class | const |
    continue | def | default | del | do | elif | else | end | enum | except | export | extends
    | False | false | final | finally | fn | for | from | func | function | global | if | impl
    | implements | import | in | int | is | isinstance | len | let | match | mut | new | nil |
    None | not | null | or | pass | private | protected | pub | public | raise | range |
    return | self | static | str | string | struct | super | switch | then | this | throw |
    throws | True | true | try | type | typeof | undefined | unless | use | val | var | void |
    while | with | yield""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Needle:
    """Text that only the gold patch holds. `anchor` is a word of it that no encoding changes."""

    text: str
    canonical: bytes
    anchor: bytes


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file. Each hunk is its lines with their ` `, `+` or `-`."""

    path: str  # after the patch; before it where the patch deletes it
    is_new: bool
    hunks: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Gold:
    """What to look for."""

    paths: tuple[str, ...]  # files that the patch touches
    needles: tuple[Needle, ...]
    names: tuple[bytes, ...]  # new names and texts, canonical: what compilers keep of lines


def parse_patch(patch: str) -> tuple[FileChange, ...]:
    """The files of a unified diff, as `git diff` or `diff -u` write it."""
    changes: list[FileChange] = []
    lines = patch.split("\n")
    path, is_new, hunks, position = "", False, [], 0

    def finish() -> None:
        if path:
            changes.append(FileChange(path, is_new, tuple(hunks)))

    while position < len(lines):
        line = lines[position]
        position += 1
        hunk = _HUNK.match(line)
        if line.startswith("diff --git "):
            finish()
            path, is_new, hunks = _header_path(line), False, []
        elif line.startswith("new file mode"):
            is_new = True
        elif line.startswith("--- ") and lines[position : position + 1] != [""]:
            if hunks:  # a diff without git's headers
                finish()
                path, is_new, hunks = "", False, []
            old = _file_name(line[4:])
            new = _file_name(lines[position][4:]) if position < len(lines) else ""
            is_new = is_new or old == "/dev/null"
            path = old if new == "/dev/null" else new
            position += 1
        elif hunk:
            left = [int(number) if number else 1 for number in hunk.groups()]
            body: list[str] = []
            while position < len(lines) and (left[0] > 0 or left[1] > 0):
                text = lines[position] or " "
                position += 1
                left[0] -= text[0] in " -"
                left[1] -= text[0] in " +"
                if text[0] in " +-":
                    body.append(text)
            hunks.append(tuple(body))
    finish()
    return tuple(changes)


def _header_path(line: str) -> str:
    halves = line[len("diff --git ") :]
    return _file_name(halves[len(halves) // 2 + 1 :])


def _file_name(field: str) -> str:
    name = field.split("\t")[0].strip()
    if name.startswith('"') and name.endswith('"'):
        name = name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8")
    return name[2:] if name[:2] in ("a/", "b/") else name


def canonical(data: bytes) -> bytes:
    """The form in which texts are compared: the same for a line however it is written down."""
    if b"\0" in data:
        data = data.replace(b"\0", b"")
    if b"\\" in data:
        data = _ESCAPE.sub(b"", data)
    if b"&" in data:
        data = _ENTITY.sub(_entity, data)
    return data.translate(None, _DROPPED)


def _entity(match: re.Match[bytes]) -> bytes:
    return (b"<", b">", b"&")[match.lastindex - 1] if match.lastindex else b""


def is_changelog(path: str) -> bool:
    """Whether a file tells of changes, by its name or its directory's."""
    *folders, name = path.lower().split("/")
    if PurePosixPath(name).suffix not in CHANGELOG_ENDINGS:
        return False
    inside = any(_like(folder, CHANGELOG_FOLDERS) for folder in folders)
    return inside or _like(name, CHANGELOGS)


def _like(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_boilerplate(line: str) -> bool:
    """Whether unrelated programs hold this line too: too short, an import, no word of its own."""
    text = line.strip()
    if len(canonical(text.encode())) < MIN_LENGTH or _BOILERPLATE.fullmatch(text):
        return True
    words = {word for word in re.findall(r"[A-Za-z_]\w+", text) if not _KEYWORD.fullmatch(word)}
    return len(words) < 2 and not any(len(word) >= MIN_LENGTH for word in words)


def distinctive(patch: str, base: Iterable[bytes]) -> Gold:
    """What the gold patch adds that no file of the base tree holds.

    A line is distinctive if it is added by the patch, has at least MIN_LENGTH bytes in canonical
    form, is no boilerplate, and its canonical form is in no file of `base`. Where none of a run of
    added lines is, and where lines are only removed, it is the run with its neighbours, as the
    fixed file and as the patch show it. Of a changelog, which is no part of the base, it is every
    added line of MIN_SENTENCE words. At most MAX_NEEDLES, the longest of each file first.

    `base` has the content of each file of the base tree; it is read once.
    """
    changes = parse_patch(patch)
    runs = [run for change in changes for run in _runs(change)]
    candidates = {canonical(text.encode()) for run in runs for text in (*run.lines, *run.windows)}
    code = [change for change in changes if not is_changelog(change.path)]
    names = {
        name
        for change in code
        for run in _runs(change)
        for line in run.lines
        for name in _names(line)
    }
    wanted = candidates | names
    for data in base:
        text = canonical(data)
        wanted -= {one for one in wanted if one in text}
    found: list[list[Needle]] = []
    for change in changes:
        texts: set[str] = set()
        for run in _runs(change):
            lines = [line for line in run.lines if canonical(line.encode()) in wanted]
            texts.update(lines or (w for w in run.windows if canonical(w.encode()) in wanted))
        needles = [needle for needle in map(make_needle, sorted(texts)) if needle is not None]
        found.append(sorted(needles, key=lambda needle: -len(needle.canonical)))
    return Gold(
        tuple(change.path for change in changes),
        tuple(_round_robin(found))[:MAX_NEEDLES],
        tuple(sorted(names & wanted)),
    )


@dataclass(frozen=True)
class _Run:
    """Neighbouring changed lines of a hunk: what of them may be distinctive."""

    lines: tuple[str, ...]
    windows: tuple[str, ...]


def _runs(change: FileChange) -> Iterator[_Run]:
    told = is_changelog(change.path)
    for hunk in change.hunks:
        start = 0
        while start < len(hunk):
            end = start + 1
            while hunk[start][0] != " " and end < len(hunk) and hunk[end][0] != " ":
                end += 1
            if told:
                yield _Run(tuple(filter(_is_sentence, _added(hunk[start:end]))), ())
            elif hunk[start][0] != " ":
                yield _run(hunk, start, end)
            start = end


def _run(hunk: tuple[str, ...], start: int, end: int) -> _Run:
    changed = hunk[start:end]
    around = [*hunk[max(0, start - 2) : start], *changed, *hunk[end : end + 2]]
    fixed = "\n".join(line[1:] for line in around if line[0] != "-")
    return _Run(
        tuple(line for line in _added(changed) if not is_boilerplate(line)),
        tuple(
            text
            for text in (fixed, "\n".join(changed))
            if len(canonical(text.encode())) >= MIN_LENGTH
        ),
    )


def _added(lines: tuple[str, ...]) -> Iterator[str]:
    return (line[1:] for line in lines if line[0] == "+")


def _is_sentence(line: str) -> bool:
    return len(re.findall(r"\w{2,}", line)) >= MIN_SENTENCE


def _names(line: str) -> Iterator[bytes]:
    """Names and texts of a line as a compiler keeps them; no words of plain English."""
    for name in _NAME.findall(line):
        if "_" in name.strip("_") or re.search(r"[a-z][A-Z0-9]", name):
            yield name.encode()
    for match in _TEXT.finditer(line):
        text = canonical((match[1] or match[2]).encode())
        if len(text) >= MIN_LENGTH:
            yield text


def _round_robin(lists: list[list[Needle]]) -> Iterator[Needle]:
    for place in range(max(map(len, lists), default=0)):
        yield from (one[place] for one in lists if place < len(one))


def make_needle(text: str) -> Needle | None:
    """A text to look for; None if it has no word to find it by."""
    raw = text.encode()
    words = _WORD.findall(_ESCAPE.sub(b" ", raw))
    if not words:
        return None
    return Needle(text.strip(), canonical(raw), max(words, key=len))


def already_applied(change: FileChange, data: bytes | None) -> bool:
    """Whether a file of the tree (None: it isn't there) is as the patch leaves it."""
    if change.is_new:
        return data is not None and bool(change.hunks)
    if data is None:
        return False
    text = canonical(data)
    for hunk in change.hunks:
        before, after = (
            canonical("\n".join(line[1:] for line in hunk if line[0] != sign).encode())
            for sign in "+-"
        )
        if before != after and after in text and before not in text:
            return True
    return False


class Scanner:
    """Finds needles in bytes: `lines` in any file, `names` in compiled ones."""

    def __init__(self, needles: Collection[Needle], names: Collection[bytes]) -> None:
        self._needles = tuple(needles)
        anchors: set[bytes] = set()
        for needle in sorted(needles, key=lambda needle: -len(needle.anchor)):
            if not any(anchor in needle.anchor for anchor in anchors):
                anchors.add(needle.anchor)
        self._anchors = tuple(anchors)
        self._names = tuple(names)

    def lines(self, data: bytes) -> list[Needle]:
        """The needles that are in it."""
        flat = data.translate(None, _DROPPED)  # much faster than the canonical form
        if not any(anchor in flat for anchor in self._anchors):
            return []
        text = canonical(data)
        return [needle for needle in self._needles if needle.canonical in text]

    def names(self, data: bytes) -> list[bytes]:
        flat = data.translate(None, _DROPPED)
        return [name for name in self._names if name in flat]
