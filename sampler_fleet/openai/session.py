"""One session: a conversation with an agent, and the token buffer behind it.

Owns the turns, how a client's messages are held against them, and the trajectory they make. Token
in, token out: replies are recognized by their text, and their sampled tokens stay as they are. Must
not know HTTP, groups or rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from contracts.errors import RetryError
from contracts.types import (
    Completion,
    Ending,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Trajectory,
)
from sampler_fleet.episodes.agent import EpisodeLimits
from sampler_fleet.episodes.base import GeneratedChunk
from sampler_fleet.episodes.buffer import TokenBuffer, turn_seed
from sampler_fleet.episodes.calls import FormatError
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.openai.reader import Delta, ReplyReader
from sampler_fleet.openai.refusal import Refusal, ended
from sampler_fleet.openai.request import Ask, Call, Message

BRANCH_HEADER = "X-Session-Branch"

Tell = Callable[[Delta], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What all sessions share: where tokens come from, how they are drawn and read.

    `with_tool` says that replies call bash; otherwise they are text, and the agent reads them.
    """

    generate: Callable[[GenerateRequest], AsyncGenerator[GeneratedChunk, None]]
    end_session: Callable[[str], Awaitable[None]]
    chat: ChatFormat
    with_tool: bool
    sampling: SamplingParams
    limits: EpisodeLimits


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A reply, and what was given before it since the reply before that."""

    number: int  # of the draw, also of those that were abandoned
    messages: tuple[Message, ...]
    given: np.ndarray  # int32
    num_before: int  # tokens of the buffer that the reply continues
    chunks: list[GeneratedChunk]
    thought: str
    reply: Message
    closed: bool  # by a stop token
    error: FormatError | None

    @property
    def num_sampled(self) -> int:
        return sum(len(chunk.completion) for chunk in self.chunks)

    @property
    def finish_reason(self) -> str:
        if not self.closed:
            return "length"
        return "tool_calls" if self.reply.calls else "stop"


class Session:
    """Serves one request at a time; what has ended stays ended."""

    def __init__(
        self,
        session_id: str,
        policy: Policy,
        *,
        seed: int,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session_id = session_id
        self.is_running = False
        self.last_active = clock()
        self._policy, self._seed = policy, seed
        self._counters, self._clock = counters, clock
        self._started = clock()
        self._turns: list[Turn] = []
        self._num_draws = 0
        self._has_ended = False
        self._lock = asyncio.Lock()

    async def reply(self, ask: Ask, *, branch: bool, tell: Tell) -> Turn:
        """The next reply; `tell` gets its text as it comes.

        A request that was answered before gets the answer it had: its client may not have seen it.
        With `branch`, a request that goes back to an earlier point is answered from there on, and
        what was sampled after it is abandoned.

        Raises:
            Refusal: the messages don't continue the session, or its buffer is full.
            RetryError: nobody could finish the reply; nothing has changed.
            BadInputError: a message isn't what the chat template renders.
        """
        if ask.has_tools != self._policy.with_tool:
            rule = "offered its tool, bash" if self._policy.with_tool else "offered no tool"
            sentence = f"This run's policy is always {rule}."
            raise Refusal(400, "unsupported_tools", sentence, param="tools")
        async with self._lock:
            self._check_open()
            self.is_running, self.last_active = True, self._clock()
            try:
                num_kept, at = self._align(ask.messages)
                messages = ask.messages[at:]
                if num_kept < len(self._turns) and not branch:
                    turn = self._turns[num_kept]
                    if turn is self._turns[-1] and turn.messages == messages:
                        self._counters["openai_repeats"] += 1
                        return await _tell_again(turn, tell)
                    pairs = zip(messages, turn.messages, strict=False)
                    same = next((n for n, (new, known) in enumerate(pairs) if new != known), 0)
                    raise _conflict(ask.messages, at + same)
                _check_no_reply(ask.messages, at)
                kept = self._turns[:num_kept]
                # tokenizing what a tool said takes a while, and lets other sessions go on
                given = await asyncio.to_thread(self._render, kept, messages)
                self._check_open()
                turn = await self._draw(kept, messages, given, ask.max_tokens, tell)
                self._counters["openai_turns_abandoned"] += len(self._turns) - num_kept
                self._turns = [*kept, turn]
                return turn
            finally:
                self.is_running, self.last_active = False, self._clock()
                if self._has_ended:  # in the meantime: a failover may have found a place anew
                    await self._policy.end_session(self.session_id)

    def end(self) -> None:
        """Refuses what comes, and what runs at its next token."""
        self._has_ended = True

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def trajectory(self, *, task_id: str, reward: float, ending: Ending) -> Trajectory:
        """The record, as `run_episode` makes it. A last reply without a call is no format error
        where it is the answer that was submitted."""
        buffer = TokenBuffer(np.zeros(0, np.int32))
        for turn in self._turns:
            buffer.add_given(turn.given)
            buffer.add_sampled(turn.chunks)
        judged = self._turns[:-1] if ending == Ending.SUBMITTED else self._turns
        errors = [turn.error for turn in judged if turn.error]
        self._counters.update(f"format_error_{error}" for error in errors)
        return Trajectory(
            task_id=task_id,
            session_id=self.session_id,
            **buffer.records(),
            reward=reward,
            ending=ending,
            num_turns=len(self._turns),
            num_format_errors=len(errors),
            seconds=self._clock() - self._started,
        )

    def _check_open(self) -> None:
        if self._has_ended:
            raise ended()

    def _align(self, messages: tuple[Message, ...]) -> tuple[int, int]:
        """How many turns the messages repeat, and the index of the first after those.

        A reply without a call may be missing: agents drop replies that they can't use. It stays in
        the buffer. Raises Refusal for a reply that is none of this session's, and where a reply
        comes last.
        """
        at = 0
        for num_kept, turn in enumerate(self._turns):
            after = at + len(turn.messages)
            if messages[at:after] != turn.messages or after == len(messages):
                return num_kept, at
            at = after
            if messages[at] == turn.reply:
                at += 1
            elif turn.reply.calls or messages[at].role == "assistant":
                raise _conflict(messages, at)
            if at == len(messages):
                raise _unfit("The last message is the tool's or the user's", ["a reply"])
        return len(self._turns), at

    def _render(self, kept: list[Turn], messages: tuple[Message, ...]) -> np.ndarray:
        """What the messages append to the buffer, a missing stop token included."""
        chat, roles = self._policy.chat, [message.role for message in messages]
        if not kept:
            if roles != ["system", "user"]:
                raise _unfit("A session begins with a system and a user message", roles)
            return chat.start(messages[0].content, messages[1].content)
        last = kept[-1]
        if roles not in (["user"], ["tool"]):
            raise _unfit("A reply is followed by one message, of the tool or the user", roles)
        (message,) = messages
        if message.role == "tool":
            if [message.call_id] != [call.id for call in last.reply.calls]:
                found = [message.call_id or "no tool_call_id"]
                raise _unfit("A tool's message answers the call before it", found)
            answer = chat.observe(message.content)
        else:
            answer = chat.observe_error(message.content)
        if not last.closed:  # the template needs a stop token; this one was not sampled
            answer = np.concatenate([chat.stop_token_ids[:1], answer])
        return np.asarray(answer, np.int32)

    async def _draw(
        self,
        kept: list[Turn],
        messages: tuple[Message, ...],
        given: np.ndarray,
        max_tokens: int | None,
        tell: Tell,
    ) -> Turn:
        policy, chat = self._policy, self._policy.chat
        parts = [part for turn in kept for part in (turn.given, *_sampled(turn.chunks))]
        tokens = np.concatenate([*parts, given])
        room = policy.limits.max_context_tokens - len(tokens)
        if room < policy.limits.min_turn_tokens:
            most = policy.limits.max_context_tokens
            sentence = f"This model's maximum context length is {most} tokens. The conversation has"
            sentence += f" {len(tokens)}, and a reply needs {policy.limits.min_turn_tokens}."
            raise Refusal(400, "context_length_exceeded", sentence, param="messages")
        number = self._num_draws
        request = GenerateRequest(
            request_id=f"{self.session_id}/{number}",
            session_id=self.session_id,
            tokens=tokens,
            sampling=replace(
                policy.sampling,
                max_new_tokens=min(policy.sampling.max_new_tokens, room, max_tokens or room),
                stop_token_ids=chat.stop_token_ids,
                seed=turn_seed(self._seed, number),
            ),
        )
        chunks: list[GeneratedChunk] = []
        reader = ReplyReader(chat, tokens, with_tool=policy.with_tool)
        async with contextlib.aclosing(policy.generate(request)) as stream:
            async for chunk in stream:
                self._check_open()
                chunks.append(chunk)
                for delta in reader.feed(chunk.completion.tokens):
                    await tell(delta)
        self._check_open()
        if not chunks or chunks[-1].completion.finish_reason in (None, FinishReason.ABORT):
            raise RetryError(f"turn {number} of session {self.session_id} was cut off")
        self._num_draws += 1
        turn = self._read(number, messages, given, len(tokens), chunks)
        for delta in reader.finish(has_call=bool(turn.reply.calls)):
            await tell(delta)
        return replace(
            turn,
            thought=reader.text["reasoning_content"],
            reply=replace(turn.reply, content=reader.text["content"]),
        )

    def _read(
        self,
        number: int,
        messages: tuple[Message, ...],
        given: np.ndarray,
        num_before: int,
        chunks: list[GeneratedChunk],
    ) -> Turn:
        """The turn, its texts aside."""
        chat = self._policy.chat
        sampled = Completion.concatenate([chunk.completion for chunk in chunks]).tokens
        closed = len(sampled) > 0 and int(sampled[-1]) in chat.stop_token_ids
        calls: tuple[Call, ...] = ()
        error = None if closed else FormatError.CUT_OFF
        if self._policy.with_tool and closed:
            asked = chat.parse(sampled)
            error = asked.kind
            if asked.command is not None:
                arguments = json.dumps({"command": asked.command}, ensure_ascii=False)
                call_id = f"call_{self.session_id}_{number}"
                calls = (Call(id=call_id, name="bash", arguments=arguments),)
        return Turn(
            number=number,
            messages=messages,
            given=given,
            num_before=num_before,
            chunks=chunks,
            thought="",
            reply=Message(role="assistant", content="", calls=calls),
            closed=closed,
            error=error,
        )


async def _tell_again(turn: Turn, tell: Tell) -> Turn:
    for delta in (
        Delta("reasoning_content", turn.thought),
        Delta("content", turn.reply.content),
    ):
        if delta.text:
            await tell(delta)
    return turn


def _sampled(chunks: list[GeneratedChunk]) -> list[np.ndarray]:
    return [chunk.completion.tokens for chunk in chunks]


def _unfit(rule: str, found: list[str]) -> Refusal:
    sentence = f"{rule}; found {', '.join(found) or 'none'}."
    return Refusal(400, "unsupported_messages", sentence, param="messages")


def _check_no_reply(messages: tuple[Message, ...], start: int) -> None:
    for index in range(start, len(messages)):
        if messages[index].role == "assistant":
            raise _conflict(messages, index)


def _conflict(messages: tuple[Message, ...], at: int) -> Refusal:
    role = messages[at].role
    sentence = f"The messages don't continue this session from messages[{at}] ({role}) on. "
    if role == "assistant":
        sentence += "Replies have to come back as they were given, content and tool_calls."
    else:
        sentence += f"To go back to that point, send the header {BRANCH_HEADER}: new."
    return Refusal(409, "session_conflict", sentence, param=f"messages.{at}")
