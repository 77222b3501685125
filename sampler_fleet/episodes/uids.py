"""User ids of this machine's sandboxes: no two that run at once have the same.

Owns which ids there are and who has one. What the kernel counts by user (processes, pipes, watches,
keys) is then counted by sandbox, whichever pool or program started it. An id is held by a name that
the kernel frees with the process; nothing of it is on a disk. Must not start processes.
"""

from __future__ import annotations

import errno
import socket

FIRST_UID = 100_000
_NUM_UIDS = 20_000


class Uid:
    """An id that nobody else on this machine has while this object is open."""

    def __init__(self) -> None:
        """OSError: all are taken."""
        self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for number in range(FIRST_UID, FIRST_UID + _NUM_UIDS):
            try:
                self._name.bind(f"\0mixed-samplers-uid-{number}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                self._name.close()
                raise
            self.number = number
            return
        self._name.close()
        raise OSError(f"all {_NUM_UIDS} user ids for sandboxes are taken")

    def close(self) -> None:
        self._name.close()
