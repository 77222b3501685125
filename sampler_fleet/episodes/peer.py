"""Two processes that let each other do things: questions and answers over two pipes.

Owns the exchange, its deadline and what becomes of exceptions. What may be asked, and what stands
for a thing that can't cross, is for the two ends to say (`remote.py`). Runs in a sandbox with a
bare interpreter: few imports, all of them cheap.
"""

from __future__ import annotations

import builtins
import os
import select
import time

from sampler_fleet.episodes.wire import decode, encode, frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_MAX_MESSAGE = 16 << 20


class Lost(BaseException):
    """The other process is gone, late or talks nonsense. No Exception: tests can't swallow it."""


class Peer:
    """One end. Either side may ask while it is being asked: a test's function may be called back.

    `deadline` is in seconds of time.monotonic().
    """

    def __init__(self, read_fd: int, write_fd: int, deadline: float | None = None) -> None:
        self.own: list[Any] = []  # what the other side has references to
        self._numbers: dict[int, int] = {}  # id -> place in `own`
        self._read_fd, self._write_fd, self._deadline = read_fd, write_fd, deadline
        self._lost = ""

    def perform(self, verb: str, *arguments: Any) -> Any:
        """What the other side may ask for."""
        raise NotImplementedError

    def refer(self, thing: Any) -> tuple[str, int, Any]:
        """(kind, number, more) of a thing that can't cross."""
        raise NotImplementedError

    def resolve(self, kind: str, number: int, more: Any) -> Any:
        """What stands here for a thing of the other side, or the own thing that comes back."""
        raise NotImplementedError

    def exception(self, kind: Any, arguments: tuple[Any, ...], number: int) -> BaseException:
        """The exception to raise for one that was raised over there."""
        raise NotImplementedError

    def number(self, thing: Any) -> int:
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self.own)
            self.own.append(thing)
        return self._numbers[id(thing)]

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Lets the other side perform `verb`; returns its result or raises its exception."""
        self._write(encode(("ask", verb, arguments), self.refer))
        while True:
            kind, *rest = self.receive()
            if kind == "ask":
                self.answer(*rest)
            elif kind == "value":
                return rest[0]
            else:
                raise self.exception(*rest)

    def answer(self, verb: str, arguments: tuple[Any, ...]) -> None:
        try:
            reply = encode(("value", self.perform(verb, *arguments)), self.refer)
        except Lost:
            raise
        except BaseException as error:
            reply = encode(("error", *self._describe(error)))
        self._write(reply)

    def receive(self) -> Any:
        size = int.from_bytes(self._read(4), "big")
        if size > _MAX_MESSAGE:
            self._lose("a message is too long")
        try:
            return decode(self._read(size), self.resolve)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            self._lose(f"a message can't be read: {error!r}")

    def describe_class(self, kind: type[BaseException]) -> tuple[str, list[tuple[int, str]]]:
        """The built-in class it is or comes from; (number, name) of each class down to it."""
        below: list[tuple[int, str]] = []
        for base in kind.__mro__:
            if getattr(builtins, base.__name__, None) is base:
                return base.__name__, below[::-1]
            below.append((self.number(base), base.__name__))
        raise AssertionError("every exception comes from BaseException")

    def _describe(self, error: BaseException) -> tuple[Any, tuple[Any, ...], int]:
        """An exception as plain values: its class, its arguments, and itself to ask for more."""
        try:
            arguments = error.args
            encode(arguments)
        except Exception:
            arguments = (str(error),)
        return self.describe_class(type(error)), arguments, self.number(error)

    def _write(self, data: bytes) -> None:
        view = memoryview(frame(data))
        while view:
            self._wait(self._write_fd, select.POLLOUT)
            try:
                view = view[os.write(self._write_fd, view[: select.PIPE_BUF]) :]
            except OSError:
                self._lose("the code under test ended its process")

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            self._wait(self._read_fd, select.POLLIN)
            part = os.read(self._read_fd, num_bytes - len(data))
            if not part:
                self._lose("the code under test ended its process")
            data += part
        return data

    def _wait(self, fd: int, event: int) -> None:
        if self._lost:
            raise Lost(self._lost)
        if self._deadline is not None:
            poll = select.poll()
            poll.register(fd, event)
            if not poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000):
                self._lose("the time is up")

    def _lose(self, why: str) -> NoReturn:
        self._lost = why
        raise Lost(why)
