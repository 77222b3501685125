"""The trajectory log: completed groups, kept until the trainer says it no longer needs them.

Owns one SQLite file (write-ahead log, synced on every append) with the groups, their sequence
numbers, the production cursor and the prompts under way. A sequence is never used twice, also after
a kill -9 and after the groups before it were forgotten; a prompt ends with its group or not at all.
Must not know who produces or consumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import sqlite3
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts import codec
from contracts.errors import BadInputError, ConflictError, RetryError
from contracts.pb import rollout_pb2
from contracts.types import Trajectory, TrajectoryGroup

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  sequence INTEGER PRIMARY KEY, -- from 1
  payload BLOB NOT NULL         -- rollout.v1.TrajectoryGroup
);
CREATE TABLE IF NOT EXISTS prompts ( -- under way
  number INTEGER PRIMARY KEY,  -- from 0
  num_starts INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('last_sequence', 0), ('cursor', 0);
"""


@dataclass(frozen=True)
class Prompt:
    """One prompt to produce. `num_starts`: how often that was begun before, and cut off."""

    number: int
    num_starts: int


_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT)


class Spool:
    """The log in one file. Async methods belong to one event loop; writes happen off it."""

    def __init__(self, path: Path, *, owner: str = "") -> None:
        """Opens or creates the log of the run that `owner` names.

        Raises:
            ConflictError: another process has it open.
            BadInputError: it is another run's, or damaged.
        """
        self._path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(path.with_suffix(".lock"), "w")  # noqa: SIM115  held until close
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock_file.close()
            raise ConflictError(
                f"trajectory log {path}: expected it to be free, found another gateway using it"
            ) from None
        try:
            self._open(owner)
        except BaseException:
            self._lock_file.close()
            raise
        self._changed = asyncio.Event()
        self._stopped = False

    def _open(self, owner: str) -> None:
        with self._system_errors(), self._of_a_gateway():
            self._db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            self._check_owner(owner)
            self._last = self._counter("last_sequence")
            left = self._db.execute("SELECT number FROM prompts ORDER BY number").fetchall()
            self._left = deque(number for (number,) in left)

    @contextlib.contextmanager
    def _of_a_gateway(self) -> Iterator[None]:
        """Tables of other columns, or without their rows, are somebody else's."""
        try:
            yield
        except (sqlite3.OperationalError, TypeError) as error:
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) != sqlite3.SQLITE_ERROR:
                raise
            raise BadInputError(
                f"trajectory log {self._path}", expected="that of a gateway", found=str(error)
            ) from None

    @property
    def last_sequence(self) -> int:
        """Of the newest group ever appended; 0 before the first."""
        return self._last

    @property
    def cursor(self) -> int:
        """The number of the next new prompt."""
        return self._counter("cursor")

    @property
    def acknowledged(self) -> int:
        """Groups up to this sequence were acknowledged."""
        return self._last - self.count()

    def next_prompt(self) -> Prompt:
        """The next prompt to produce: first those that an earlier process left, then a new one.

        It is not given out again while this process lives, whatever happens.
        """
        with self._lock, self._transaction():
            if self._left:
                number = self._left[0]
                (num_starts,) = self._db.execute(
                    "UPDATE prompts SET num_starts = num_starts + 1 WHERE number = ? "
                    "RETURNING num_starts",
                    (number,),
                ).fetchone()
            else:
                (after,) = self._db.execute(
                    "UPDATE counters SET value = value + 1 WHERE name = 'cursor' RETURNING value"
                ).fetchone()
                number, num_starts = after - 1, 1
                self._db.execute("INSERT INTO prompts VALUES (?, ?)", (number, num_starts))
        if self._left:
            self._left.popleft()
        return Prompt(number, num_starts - 1)

    def drop(self, prompt: Prompt) -> None:
        """Its group is not coming."""
        with self._lock, self._transaction():
            self._db.execute("DELETE FROM prompts WHERE number = ?", (prompt.number,))

    def count(self) -> int:
        """Groups that are not acknowledged."""
        with self._lock:
            return self._db.execute("SELECT count(*) FROM groups").fetchone()[0]

    async def append(
        self, task_id: str, trajectories: Sequence[Trajectory], prompt: Prompt | None = None
    ) -> int:
        """Makes a group durable, which ends its prompt, and returns its sequence.

        Raises:
            OSError: the disk is full; nothing was appended.
        """
        sequence = await asyncio.to_thread(self._insert, task_id, tuple(trajectories), prompt)
        self._last = max(self._last, sequence)
        self._notify()
        return sequence

    async def follow(self, after: int) -> AsyncGenerator[TrajectoryGroup, None]:
        """Groups above `after` in order, then each new one; never ends.

        Raises:
            RetryError: the log is being closed.
            BadInputError: this log never reached `after`: it is another run's, or it was lost.
        """
        self._check_reached(after)
        while True:
            changed = self._changed
            if self._stopped:
                raise RetryError("the trajectory log is being closed")
            payload = await asyncio.to_thread(self._next, after)
            if payload is None:
                await changed.wait()
                continue
            group = codec.group_from_pb(rollout_pb2.TrajectoryGroup.FromString(payload))
            after = group.sequence
            yield group

    def acknowledge(self, sequence: int) -> None:
        """Forgets groups up to and with `sequence`."""
        self._check_reached(sequence)
        with self._lock, self._transaction():
            self._db.execute("DELETE FROM groups WHERE sequence <= ?", (sequence,))

    def stop(self) -> None:
        """Ends all followers."""
        self._stopped = True
        self._notify()

    def close(self) -> None:
        with self._lock:
            self._db.close()
        self._lock_file.close()

    def _insert(
        self, task_id: str, trajectories: tuple[Trajectory, ...], prompt: Prompt | None
    ) -> int:
        with self._lock, self._transaction():
            (sequence,) = self._db.execute(
                "UPDATE counters SET value = value + 1 WHERE name = 'last_sequence' RETURNING value"
            ).fetchone()
            group = TrajectoryGroup(sequence=sequence, task_id=task_id, trajectories=trajectories)
            payload = codec.group_to_pb(group).SerializeToString()
            self._db.execute("INSERT INTO groups VALUES (?, ?)", (sequence, payload))
            if prompt:
                self._db.execute("DELETE FROM prompts WHERE number = ?", (prompt.number,))
        return sequence

    def _next(self, after: int) -> bytes | None:
        with self._lock:
            row = self._db.execute(
                "SELECT payload FROM groups WHERE sequence > ? ORDER BY sequence LIMIT 1", (after,)
            ).fetchone()
        return row[0] if row else None

    def _counter(self, name: str) -> int:
        with self._lock:
            return self._db.execute(
                "SELECT value FROM counters WHERE name = ?", (name,)
            ).fetchone()[0]

    def _check_owner(self, owner: str) -> None:
        if not owner:
            return
        self._db.execute("INSERT OR IGNORE INTO facts VALUES ('owner', ?)", (owner,))
        (known,) = self._db.execute("SELECT value FROM facts WHERE name = 'owner'").fetchone()
        if known != owner:
            raise BadInputError(
                f"trajectory log {self._path}", expected=f"one of {owner}", found=f"one of {known}"
            )

    def _check_reached(self, sequence: int) -> None:
        if sequence > self._last:
            raise BadInputError(
                f"trajectory log {self._path}",
                expected=f"a sequence up to {self._last}, its newest",
                found=f"{sequence} (was the state directory replaced?)",
            )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._system_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _system_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, "no space left", str(self._path)) from error
            if code in _DAMAGED:
                raise BadInputError(
                    f"trajectory log {self._path}",
                    expected="a sound SQLite file of a gateway",
                    found=str(error),
                ) from None
            if code == sqlite3.SQLITE_CANTOPEN:
                raise OSError(errno.EACCES, "cannot open", str(self._path)) from error
            raise
