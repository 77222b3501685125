"""Exception types that say what recovers them, and the one place where a command fails politely.

Owns nothing else. Must not import anything of the project.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

EXIT_DIRTY = 3  # of a process that is to be replaced
LONGEST_NAME = 200
_LONGEST = 400  # of what a peer gave, in a sentence


def shown(given: object) -> str:
    """What a peer gave, as it may stand in a log line: nothing that breaks one, nor floods it."""
    text = str(given)
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


class BadInputError(ValueError):
    """A person or a peer gave something unusable; trying again won't help."""

    def __init__(self, rule: str, *, expected: object, found: object) -> None:
        super().__init__(f"{shown(rule)}: expected {expected}, found {shown(found)}")
        self.rule, self.expected, self.found = rule, expected, found


class RetryError(RuntimeError):
    """The same call may succeed later: a peer is away, full, or still catching up."""


class ConflictError(RuntimeError):
    """Somebody else moved first: re-read the state, then decide anew."""


class DirtyProcessError(RuntimeError):
    """This process no longer knows what it serves; drain it and start another."""


class AuthError(PermissionError):
    """The token is missing, wrong, or not for this call."""


def check_name(rule: str, name: str) -> None:
    """Refuses a name from a peer that is empty, long, or could not stand in a log line."""
    if not (1 <= len(name) <= LONGEST_NAME and name.isprintable()):
        raise BadInputError(
            rule,
            expected=f"a name of 1 to {LONGEST_NAME} printable characters",
            found=name or "none",
        )


def _sentence(error: OSError) -> str:
    subject = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{subject}the disk is full; free some space and run the same command again"
    if error.errno == errno.EADDRINUSE:
        return f"{subject}the port is in use; choose another or stop what listens there"
    return f"{subject}{error.strerror or error}"


_POLITE = (BadInputError, ConflictError, RetryError, DirtyProcessError, OSError)  # and AuthError


def exits_politely(main: Callable[..., int | None]) -> Callable[..., Any]:
    """Wraps an entry point: bad input and the system's refusals become one sentence and status 2.

    A DirtyProcessError becomes one with status 3. Anything else is a bug and keeps its traceback.
    Set DEBUG=1 to see the traceback of all.
    """

    @functools.wraps(main)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            status = main(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(130)
        except _POLITE as error:
            if os.environ.get("DEBUG"):
                raise
            message = str(error)
            if isinstance(error, OSError) and not isinstance(error, AuthError):
                message = _sentence(error)
            status = EXIT_DIRTY if isinstance(error, DirtyProcessError) else 2
        else:
            sys.exit(status or 0)
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(status)

    return wrapped
