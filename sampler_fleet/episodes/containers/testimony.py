"""What the witness of a test run reported, checked: `witness.py` at the host's end.

Owns the keys and what counts as a whole report. Pure: bytes in, sessions out.

A report is lines of a digest and a tuple (number of the key, number of the line, what, ...), each
signed with a key that one session of tests took from the pipe. A session that took a key and did
not report all its tests, a canary that failed and its end was tampered with, or died.
"""

from __future__ import annotations

import ast
import hashlib
import hmac
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

WITNESS = resources.files("sampler_fleet.episodes.containers").joinpath("witness.py").read_bytes()
CHANNEL = (198, 199)  # where the witness looks for keys, and where it writes
INDEX_BYTES, KEY_BYTES = 2, 32  # as it reads them
_NUM_KEYS = 1000  # of pytest runs that one test command may have; all fit into a pipe
_RECORD_BYTES = INDEX_BYTES + KEY_BYTES
_FAILED = ("FAILED", "ERROR")
_SPOILED = "the report of the tests was tampered with"


def new_keys() -> bytes:
    """The content of the pipe of keys."""
    return b"".join(
        index.to_bytes(INDEX_BYTES, "big") + secrets.token_bytes(KEY_BYTES)
        for index in range(_NUM_KEYS)
    )


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of pytest or unittest, seen from inside."""

    statuses: Mapping[str, str]  # by test id; the worst, if there are several of one id
    canary: str  # its status; "": it was not run
    exit_status: int | None  # None: it did not get to its end
    left_out: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By what was skipped or failed as expected: the files that it was doing so in, if known."""

    def problem(self, changed: Collection[str]) -> str:
        """Why its tests count for nothing; "": they count. `changed` are files of the patch."""
        if self.exit_status is None:
            return "the tests were ended from inside"
        if self.statuses and self.canary != "FAILED":
            return f"a test that must fail did not: {self.canary or 'it was not run'}"
        for name, files in sorted(self.left_out.items()):
            if by := sorted(set(files).intersection(changed)):
                return f"{name} was left out by {by[0]}"
        return ""

    def failures(self) -> list[str]:
        return sorted(name for name, status in self.statuses.items() if status in _FAILED)


def read_testimony(report: bytes, keys: bytes, keys_left: bytes) -> list[Session] | str:
    """The sessions in the order of their keys, or what is wrong with the whole."""
    num_taken, rest = divmod(len(keys) - len(keys_left), _RECORD_BYTES)
    if rest or num_taken < 0 or not keys.endswith(keys_left):
        return _SPOILED
    taken = [
        keys[start + INDEX_BYTES : start + _RECORD_BYTES]
        for start in range(0, num_taken * _RECORD_BYTES, _RECORD_BYTES)
    ]
    lines: list[list[tuple[Any, ...]]] = [[] for _ in taken]
    for index, number, *words in _signed(report, taken):
        if number != len(lines[index]):
            return _SPOILED
        lines[index].append(tuple(words))
    return [_session(words) for words in lines]


def _signed(report: bytes, keys: list[bytes]) -> Iterator[tuple[Any, ...]]:
    """The lines that are what the holder of a key wrote; others count for nothing."""
    for line in report.split(b"\n"):
        digest, _, body = line.partition(b" ")
        index = body[1:].partition(b",")[0]
        if not index.isdigit() or int(index) >= len(keys):
            continue
        key = keys[int(index)]
        if hmac.compare_digest(hashlib.sha256(key + body + key).hexdigest().encode(), digest):
            yield ast.literal_eval(body.decode())


def _session(lines: list[tuple[Any, ...]]) -> Session:
    statuses: dict[str, str] = {}
    canaries: list[str] = []
    left_out: dict[str, Collection[str]] = {}
    exit_status = None
    for what, *words in lines:
        if what == "test":
            name, status = words
            known = statuses.get(name, "PASSED")
            statuses[name] = status if known == "PASSED" else known
        elif what == "left out":
            left_out[words[0]] = words[1]
        elif what == "canary":
            canaries += words
        elif what == "done" and lines[-1] == (what, *words):
            exit_status = words[0]
    # One that could not be set up says nothing: then there is another.
    canary = canaries[-1] if set(canaries[:-1]) <= {"ERROR"} and canaries else ""
    return Session(statuses=statuses, canary=canary, exit_status=exit_status, left_out=left_out)


def first_missing(
    sessions: Collection[Session], fail_to_pass: Collection[str], pass_to_pass: Collection[str]
) -> str:
    """The first wanted test that did not pass, and how it ended; "" if all did.

    A test of `pass_to_pass` may also fail as its authors expect it to.
    """
    found: dict[str, set[str]] = {}
    for session in sessions:
        for name, status in session.statuses.items():
            for alias in _aliases(name):
                found.setdefault(alias, set()).add(status)
    for wanted, good in ((fail_to_pass, {"PASSED"}), (pass_to_pass, {"PASSED", "XFAIL"})):
        for name in sorted(wanted):
            statuses = found.get(name, {"missing"})
            if not statuses <= good:
                return f"{name} is {min(statuses - good) or 'unfinished'}"
    return ""


def _aliases(name: str) -> set[str]:
    """Names that data sets have for a test: their readers of logs cut ids at the first space and
    shorten paths and numbers in them."""
    first = (name.split() or [""])[0]
    aliases = {name, first}
    aliases.add(first.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))
    head, bracket, option = first.partition("[")
    option = option.removesuffix("]")
    if bracket and option.startswith("/") and not option.startswith("//") and "*" not in option:
        aliases.add(f"{head}[/{option.rpartition('/')[2]}]")
    return aliases
