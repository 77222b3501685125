"""The agent: one episode from the first prompt to the reward.

Owns the loop, its limits, the one growing token buffer with the samplers' records laid over it, and
how an episode ends. Token in, token out: sampled tokens are never decoded and tokenized again. Must
not know where tokens come from, how a sandbox isolates, or how a patch is graded.

A fault of the policy (no submission, three replies in a row without a valid call, a limit) is a
reward of 0. A fault of the infrastructure has no reward: ending FAILURE.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from contracts.errors import RetryError
from contracts.runfile import Section
from contracts.types import (
    Completion,
    Ending,
    FinishReason,
    GenerateRequest,
    Purpose,
    SamplingParams,
    Trajectory,
    VersionSpan,
)
from sampler_fleet.episodes.base import (
    ExecResult,
    GeneratedChunk,
    Generator,
    Sandbox,
    SandboxError,
    Sandboxes,
    Task,
)
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.grading import Grader, tree_bytes
from sampler_fleet.episodes.patch import Patch, capture
from sampler_fleet.episodes.prompts import (
    OPEN_CALL,
    SUBMIT_COMMAND,
    SYSTEM_PROMPT,
    format_error,
    observation,
    task_prompt,
)

_log = logging.getLogger(__name__)

_MARKER = SUBMIT_COMMAND.removeprefix("echo ")
_SEED_STEP = 0x9E3779B1  # odd: no two turns of an episode share a seed


class EpisodeLimits(Section):
    """[episodes.limits]: when an episode of the policy's own making is over."""

    max_turns: int = Field(default=8, ge=1)
    max_format_errors: int = Field(default=3, ge=1)  # in a row
    max_context_tokens: int = Field(default=4096, ge=16)
    min_turn_tokens: int = Field(default=8, ge=1)  # less room than this ends the episode
    command_seconds: float = Field(default=10.0, gt=0)  # then the command is killed, rc 124
    total_command_seconds: float = Field(default=60.0, gt=0)  # of all commands of an episode
    max_output_bytes: int = Field(default=10_000, ge=100)  # of a command, head and tail
    grading_attempts: int = Field(default=3, ge=1)


class _Buffer:
    """The token buffer of an episode with the samplers' records over its sampled parts."""

    def __init__(self, prompt: np.ndarray) -> None:
        self.tokens = np.asarray(prompt, np.int32)
        self._sampled: list[tuple[int, Completion]] = []  # (start, completion)
        self._chunks: list[GeneratedChunk] = []

    def add_given(self, tokens: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, np.int32)])

    def add_sampled(self, chunks: list[GeneratedChunk]) -> Completion:
        completion = Completion.concatenate([chunk.completion for chunk in chunks])
        self._sampled.append((len(self.tokens), completion))
        self._chunks += chunks
        self.add_given(completion.tokens)
        return completion

    def records(self) -> dict[str, Any]:
        """The fields of a Trajectory that tokens and samplers determine."""
        loss_mask = np.zeros(len(self.tokens), bool)
        spans: list[VersionSpan] = []
        for start, completion in self._sampled:
            loss_mask[start : start + len(completion)] = True
            spans += (
                replace(span, start=start + span.start, end=start + span.end)
                for span in completion.spans
            )
        whole = Completion.concatenate([completion for _, completion in self._sampled])
        return {
            "tokens": self.tokens,
            "loss_mask": loss_mask,
            "sampler_logp": whole.sampler_logp,
            "candidates": whole.candidates,
            "spans": tuple(spans),
            "group": self._chunks[0].group if self._chunks else "",
            "sampler_ids": tuple(dict.fromkeys(chunk.sampler_id for chunk in self._chunks)),
        }


class _Episode:
    """The dialogue of one session with one sandbox."""

    def __init__(
        self,
        *,
        generator: Generator,
        chat: ChatFormat,
        limits: EpisodeLimits,
        request: GenerateRequest,
    ) -> None:
        """`request` is the first turn's: the prompt and what all turns share."""
        self._generator, self._chat, self._limits = generator, chat, limits
        self._request = request
        self._command_seconds = 0.0
        self.buffer = _Buffer(request.tokens)
        self.num_turns = self.num_format_errors = 0

    async def play(self, sandbox: Sandbox) -> Ending:
        """Takes turns until the episode ends.

        Raises:
            SandboxError, RetryError: the infrastructure failed.
        """
        errors_in_a_row = 0
        while True:
            if self._room() < self._limits.min_turn_tokens:
                return Ending.LENGTH
            completion = await self._sample()
            closed = len(completion) > 0 and completion.tokens[-1] in self._chat.stop_token_ids
            reply = self._chat.parse(completion.tokens)
            if reply.command is None or not closed:
                self.num_format_errors += 1
                errors_in_a_row += 1
                if errors_in_a_row == self._limits.max_format_errors:
                    return Ending.FORMAT_ERRORS
                answer = self._chat.observe_error(format_error(reply.error or OPEN_CALL))
            else:
                errors_in_a_row = 0
                result = await self._run(sandbox, reply.command)
                if _is_submission(result):
                    return Ending.SUBMITTED
                if self._command_seconds >= self._limits.total_command_seconds:
                    return Ending.TIMEOUT
                answer = self._chat.observe(observation(result.returncode, result.output))
            if self.num_turns == self._limits.max_turns:
                return Ending.TURN_LIMIT
            if not closed:  # the template needs a stop token; this one was not sampled
                answer = np.concatenate([self._chat.stop_token_ids[:1], answer])
            if len(answer) + self._limits.min_turn_tokens > self._room():
                return Ending.LENGTH
            self.buffer.add_given(answer)

    def _room(self) -> int:
        return self._limits.max_context_tokens - len(self.buffer.tokens)

    async def _sample(self) -> Completion:
        base, turn = self._request, self.num_turns
        sampling = replace(
            base.sampling,
            max_new_tokens=min(base.sampling.max_new_tokens, self._room()),
            stop_token_ids=self._chat.stop_token_ids,
            seed=(base.sampling.seed + turn * _SEED_STEP) & 0x7FFFFFFF,
        )
        request = replace(
            base,
            request_id=f"{base.session_id}/{turn}",
            tokens=self.buffer.tokens,
            sampling=sampling,
        )
        chunks = [chunk async for chunk in self._generator.generate(request)]
        if not chunks or chunks[-1].completion.finish_reason in (None, FinishReason.ABORT):
            raise RetryError(f"turn {turn} of session {base.session_id} was cut off")
        self.num_turns += 1
        return self.buffer.add_sampled(chunks)

    async def _run(self, sandbox: Sandbox, command: str) -> ExecResult:
        left = self._limits.total_command_seconds - self._command_seconds
        result = await sandbox.exec(
            command,
            timeout_s=min(self._limits.command_seconds, left),
            max_output=self._limits.max_output_bytes,
        )
        self._command_seconds += result.seconds
        return result


def _is_submission(result: ExecResult) -> bool:
    first, _, _ = result.output.partition("\n")
    return result.returncode == 0 and first.strip() == _MARKER


async def run_episode(  # noqa: PLR0913 (everything an episode touches is handed in)
    task: Task,
    *,
    session_id: str,
    generator: Generator,
    chat: ChatFormat,
    sandboxes: Sandboxes,
    grader: Grader,
    limits: EpisodeLimits,
    sampling: SamplingParams,
    purpose: Purpose = Purpose.TRAIN,
    min_version: int = 0,
) -> Trajectory:
    """Plays one episode and grades what it submitted. The session and the sandbox always end.

    `sampling` gives how to draw and the episode's seed; stop tokens come from `chat`. A failure of
    the infrastructure is returned, not raised: ending FAILURE, reward None, `failure` says what.
    """
    started = time.monotonic()
    episode = _Episode(
        generator=generator,
        chat=chat,
        limits=limits,
        request=GenerateRequest(
            request_id=session_id,
            session_id=session_id,
            tokens=chat.start(SYSTEM_PROMPT, task_prompt(task)),
            sampling=sampling,
            min_version=min_version,
            purpose=purpose,
        ),
    )
    reward, failure = None, ""
    try:
        tree = tree_bytes(task.tree)
        try:
            async with sandboxes.open(tree) as sandbox:
                ending = await episode.play(sandbox)
                end = await sandbox.snapshot() if ending == Ending.SUBMITTED else None
        finally:
            with contextlib.suppress(RetryError):
                await generator.end_session(session_id)
        reward = 0.0
        if end is not None:  # the sandbox is closed by now: grading may take its place
            reward = await _grade(grader, task, capture(tree, end), limits.grading_attempts)
    except (SandboxError, RetryError) as error:
        reward, ending, failure = None, Ending.FAILURE, str(error)
        _log.warning("episode %s of %s failed: %s", session_id, task.task_id, error)
    return Trajectory(
        task_id=task.task_id,
        session_id=session_id,
        **episode.buffer.records(),
        reward=reward,
        ending=ending,
        failure=failure,
        num_turns=episode.num_turns,
        num_format_errors=episode.num_format_errors,
        seconds=time.monotonic() - started,
    )


async def _grade(grader: Grader, task: Task, patch: Patch, attempts: int) -> float:
    for attempt in range(1, attempts + 1):
        try:
            verdict = await grader.grade(task, patch)
        except SandboxError:
            if attempt == attempts:
                raise
        else:
            _log.debug("%s: %s", task.task_id, verdict)
            return float(verdict.passed)
    raise AssertionError("unreachable")
