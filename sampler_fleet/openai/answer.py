"""Replies in OpenAI's shapes: one object, or a stream of events.

Owns their JSON and the writing of a stream. A reader that is gone or takes nothing is written to no
more; the reply goes on without it, since its tokens are to be trained on. Must not know sessions.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from sampler_fleet.openai.reader import Delta
from sampler_fleet.openai.refusal import Refusal
from sampler_fleet.openai.request import MODEL
from sampler_fleet.openai.session import Turn

WRITE_S = 30.0  # a reader that takes nothing for so long is gone


def completion_json(turn: Turn, answer_id: str, created: int) -> dict[str, Any]:
    """A chat.completion."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.reply.content}
    if turn.thought:
        message["reasoning_content"] = turn.thought
    if turn.reply.calls:
        message["content"] = turn.reply.content or None
        message["tool_calls"] = _calls_json(turn)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": turn.finish_reason,
        "logprobs": None,
    }
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": MODEL,
        "choices": [choice],
        "usage": _usage_json(turn),
    }


class EventStream:
    """A chat.completion.chunk for each piece of text; nothing is sent before the first."""

    def __init__(
        self,
        request: web.Request,
        answer_id: str,
        created: int,
        *,
        headers: dict[str, str],
        include_usage: bool,
    ) -> None:
        self._request = request
        self._include_usage = include_usage
        events = {"Content-Type": "text/event-stream"}
        self._response = web.StreamResponse(headers=headers | events)
        self._is_heard = True
        self.has_begun = False  # a status has gone out: what fails now is an event
        self._base = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": MODEL,
        }

    async def tell(self, delta: Delta) -> None:
        """More text."""
        await self._choose({delta.field: delta.text})

    async def finish(self, turn: Turn) -> web.StreamResponse:
        """The call, if there is one, and the end."""
        if turn.reply.calls:
            calls = [{"index": index} | call for index, call in enumerate(_calls_json(turn))]
            await self._choose({"tool_calls": calls})
        await self._choose({}, finish_reason=turn.finish_reason)
        if self._include_usage:
            await self._write(_event(self._base | {"choices": [], "usage": _usage_json(turn)}))
        await self._write(b"data: [DONE]\n\n")
        return self._response

    async def fail(self, refusal: Refusal) -> web.StreamResponse:
        """Ends a stream that has begun."""
        await self._write(_event(refusal.to_json()))
        return self._response

    async def _choose(self, delta: dict[str, Any], finish_reason: str | None = None) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._write(None)
            delta = {"role": "assistant"} | delta
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        await self._write(_event(self._base | {"choices": [choice]}))

    async def _write(self, data: bytes | None) -> None:
        """Sends data; None: the headers."""
        if not self._is_heard:
            return
        try:
            async with asyncio.timeout(WRITE_S):
                if data is None:
                    await self._response.prepare(self._request)
                else:
                    await self._response.write(data)
        except (TimeoutError, ConnectionError):
            self._is_heard = False


def _calls_json(turn: Turn) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in turn.reply.calls
    ]


def _usage_json(turn: Turn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.num_before,
        "completion_tokens": turn.num_sampled,
        "total_tokens": turn.num_before + turn.num_sampled,
    }


def _event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()
