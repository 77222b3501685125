"""One connected sampler as a link, and a reply as it grows over the links that contribute to it.

Owns the queues between the stream of a sampler and the turns it serves, and the request that
continues a turn elsewhere. Must not decide who serves a turn, nor know the wire format.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contracts.errors import RetryError
from contracts.types import Completion, FinishReason, GenerateRequest


@dataclass(frozen=True, kw_only=True)
class Abort:
    request_id: str


@dataclass(frozen=True, kw_only=True)
class EndSession:
    session_id: str


@dataclass(frozen=True, kw_only=True)
class Drain:
    reason: str


@dataclass(frozen=True, kw_only=True)
class Expel:
    reason: str


Command = GenerateRequest | Abort | EndSession | Drain | Expel


class SamplerGoneError(RetryError):
    """The sampler cannot finish this request; another one continues it."""


class Link:
    """One connected sampler: commands out, records in, until it is closed with a reason."""

    def __init__(self, sampler_id: str) -> None:
        self.sampler_id = sampler_id
        self.error: Exception | None = None
        self._commands: asyncio.Queue[Command | None] = asyncio.Queue()
        self._inboxes: dict[str, asyncio.Queue[Completion | Exception]] = {}
        self.closed = False
        self.num_failures = 0  # requests in a row that it could not serve

    def send(self, command: Command) -> None:
        if not self.closed:
            self._commands.put_nowait(command)

    async def next_command(self) -> Command | None:
        """The next command to write; None once the link is closed."""
        return await self._commands.get()

    @contextlib.contextmanager
    def request(self, request: GenerateRequest) -> Iterator[asyncio.Queue[Completion | Exception]]:
        """Sends a request and yields its inbox; aborts it unless its last chunk was taken."""
        inbox: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        self._inboxes[request.request_id] = inbox
        self.send(request)
        if self.closed:
            inbox.put_nowait(SamplerGoneError(f"sampler {self.sampler_id} left"))
        try:
            yield inbox
        finally:
            if self._inboxes.pop(request.request_id, None):
                self.send(Abort(request_id=request.request_id))

    def deliver(self, request_id: str, item: Completion | Exception) -> None:
        """Hands a chunk or a failure to its request; one nobody waits for any more is dropped."""
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return
        if isinstance(item, Exception) or item.finish_reason is not None:
            del self._inboxes[request_id]  # the sampler is done with it: nothing to abort
        inbox.put_nowait(item)

    def close(self, error: Exception | None, *, last: Command | None = None) -> None:
        """Ends the link after one `last` command; requests in flight on it go elsewhere."""
        if self.closed:
            return
        self.closed = True
        self.error = error
        for inbox in self._inboxes.values():
            inbox.put_nowait(SamplerGoneError(f"sampler {self.sampler_id}: {error or 'it left'}"))
        self._inboxes.clear()
        while not self._commands.empty():
            self._commands.get_nowait()
        for command in (last, None) if last else (None,):
            self._commands.put_nowait(command)


class Turn:
    """One reply as it grows, over the samplers that contribute to it."""

    def __init__(self, request: GenerateRequest, serials: Iterator[int]) -> None:
        """`serials` are numbers that no other request of this gateway gets."""
        self._request = request
        self._serials = serials
        self._tokens = [request.tokens]
        self._num_attempts = 0
        self.num_sampled = 0
        self.truncates = request.sampling.truncates
        self.min_version = request.min_version

    @property
    def num_tokens(self) -> int:
        """Of the buffer so far."""
        return len(self._request.tokens) + self.num_sampled

    @property
    def num_remaining(self) -> int:
        return self._request.sampling.max_new_tokens - self.num_sampled

    def next_request(self) -> GenerateRequest:
        """The request that continues the grown buffer, under an id of its own: a client may ask
        again under one whose chunks are still on the way.

        Its seed differs, so that a continuation doesn't draw with the numbers already used.
        """
        attempt = self._num_attempts
        self._num_attempts += 1
        sampling = self._request.sampling
        return dataclasses.replace(
            self._request,
            request_id=f"{self._request.request_id}~{next(self._serials)}",
            tokens=np.concatenate(self._tokens) if self.num_sampled else self._request.tokens,
            sampling=dataclasses.replace(
                sampling,
                max_new_tokens=self.num_remaining,
                seed=(sampling.seed + attempt * 0x9E3779B97F4A7C15) % 2**64,
            ),
        )

    def extend(self, completion: Completion) -> None:
        if len(completion):
            self._tokens.append(completion.tokens)
            self.num_sampled += len(completion)

    def ending(self) -> FinishReason | None:
        """Why the reply is over although its last chunk was lost, if it is."""
        if self.num_sampled and int(self._tokens[-1][-1]) in self._request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_remaining <= 0 else None
