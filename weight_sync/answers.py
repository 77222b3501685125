"""What peers of the weight service are told of an error.

Owns that: whatever the disk of the store refuses is temporary, and no peer learns where it is.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from contracts.errors import AuthError, BadInputError, ConflictError, RetryError

_STAGED = re.compile(r"\bstaging/[0-9a-f]{32}(/?)")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def for_a_peer(error: Exception, root: Path) -> Exception:
    """The error to send; `root` is the store's directory, which may stand in the one that arose."""

    def clean(given: object) -> str:
        inside = str(given).replace(f"{root}/", "").replace(str(root), "the store")
        return _STAGED.sub(lambda staged: "" if staged[1] else "as it arrived", inside)

    match error:
        case AuthError():
            return error
        case BadInputError():
            return BadInputError(
                clean(error.rule), expected=clean(error.expected), found=clean(error.found)
            )
        case RetryError() | ConflictError():
            return type(error)(clean(error))
        case FileNotFoundError() if error.errno is None:  # the store has no such version
            return error
        case OSError() if error.errno in _FULL:
            return RetryError("the disk of the weight store is full")
        case OSError():
            return RetryError(f"the disk of the weight store: {error.strerror or type(error)}")
    return error
