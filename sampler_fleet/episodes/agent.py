"""The agent: one episode from the first prompt to the reward.

Owns the loop, its limits, the one growing token buffer with the samplers' records laid over it, and
how an episode ends. Token in, token out: sampled tokens are never decoded and tokenized again. Must
not know where tokens come from, how a sandbox isolates, or how a patch is graded.

A fault of the policy (no submission, three replies in a row without a valid call, a limit) is a
reward of 0. A fault of the infrastructure has no reward: ending FAILURE. An episode that the clock
ended is the fault of whoever had most of the time: how long commands take is the policy's doing,
how long tokens take the samplers'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from contracts.errors import RetryError, shown
from contracts.runfile import Section
from contracts.types import (
    Completion,
    Ending,
    FinishReason,
    GenerateRequest,
    Purpose,
    SamplingParams,
    Trajectory,
)
from sampler_fleet.episodes.base import (
    ExecResult,
    Generator,
    Sandbox,
    SandboxError,
    Sandboxes,
    SpentError,
    Task,
)
from sampler_fleet.episodes.buffer import TokenBuffer, turn_seed
from sampler_fleet.episodes.calls import FormatError
from sampler_fleet.episodes.chat import ChatFormat, FormatName, Mode
from sampler_fleet.episodes.grading import Grader, Verdict, tree_bytes
from sampler_fleet.episodes.patch import Patch, capture
from sampler_fleet.episodes.prompts import (
    OPEN_CALL,
    SUBMIT_COMMAND,
    SYSTEM_PROMPT,
    format_error,
    observation,
    tagged_observation,
    task_prompt,
)

_log = logging.getLogger(__name__)

_MARKER = SUBMIT_COMMAND.removeprefix("echo ")


class EpisodeLimits(Section):
    """[episodes.limits]: when an episode of the policy's own making is over."""

    max_turns: int = Field(default=8, ge=1)
    max_format_errors: int = Field(default=3, ge=1)  # in a row
    max_context_tokens: int = Field(default=4096, ge=16)
    min_turn_tokens: int = Field(default=8, ge=1)  # less room than this ends the episode
    command_seconds: float = Field(default=10.0, gt=0)  # then the command is killed, rc 124
    total_command_seconds: float = Field(default=60.0, gt=0)  # of all commands of an episode
    episode_seconds: float | None = Field(default=None, gt=0)  # of tasks that don't say it
    max_output_bytes: int = Field(default=10_000, ge=100)  # of a command, head and tail
    grading_attempts: int = Field(default=3, ge=1)


class AgentConfig(Section):
    """[episodes.agent]: what the policy reads besides commands' output, and how it answers.

    `{issue}` in `task_prompt` and `{error}` in `format_error` are filled in.
    """

    chat_format: FormatName = "auto"  # auto: as the checkpoint's template shows
    mode: Mode = "tool"  # text: commands in fenced blocks, no tool
    thinking: bool = True  # opens replies as the template does for policies that think
    system_prompt: str = Field(default=SYSTEM_PROMPT, min_length=1)
    task_prompt: str = "{issue}"
    observation: Literal["plain", "tagged"] = "plain"
    format_error: str = format_error("{error}")
    cut_off: str = ""  # the error of a reply without an end; empty: what its text lacks

    @model_validator(mode="after")
    def _usable(self) -> AgentConfig:
        if "{issue}" not in self.task_prompt:
            raise ValueError("task_prompt with {issue} in it")
        if SUBMIT_COMMAND not in self.system_prompt + self.task_prompt:
            raise ValueError(f"system_prompt or task_prompt with `{SUBMIT_COMMAND}` in it")
        return self

    def load_chat(self, checkpoint: str | Path) -> ChatFormat:
        """The checkpoint's chat format, as configured. Raises as `ChatFormat.load` does."""
        return ChatFormat.load(
            checkpoint, name=self.chat_format, mode=self.mode, thinking=self.thinking
        )

    def start(self, chat: ChatFormat, task: Task) -> np.ndarray:
        """The first prompt."""
        return chat.start(
            self.system_prompt + chat.instructions,
            self.task_prompt.replace("{issue}", task_prompt(task)),
        )

    def show(self, result: ExecResult, timeout_s: float) -> str:
        """The observation of a command."""
        if self.observation == "plain":
            return observation(result.returncode, result.output)
        return tagged_observation(
            result.returncode, result.output, timed_out=result.timed_out, timeout_s=timeout_s
        )


class _Episode:
    """The dialogue of one session with one sandbox."""

    def __init__(
        self,
        *,
        generator: Generator,
        chat: ChatFormat,
        agent: AgentConfig,
        limits: EpisodeLimits,
        request: GenerateRequest,
    ) -> None:
        """`request` is the first turn's: the prompt and what all turns share."""
        self._generator, self._chat, self._agent, self._limits = generator, chat, agent, limits
        self._request = request
        self._command_seconds = 0.0
        self.buffer = TokenBuffer(request.tokens)
        self.num_turns = 0
        self.format_errors: Counter[FormatError] = Counter()

    async def play_in_time(self, sandbox: Sandbox, seconds: float | None) -> Ending:
        """As `play`, but for at most that long. RetryError: the samplers took most of it."""
        try:
            async with asyncio.timeout(seconds) as clock:
                return await self.play(sandbox)
        except TimeoutError:
            if seconds is None or not clock.expired():
                raise
            if self._command_seconds >= seconds / 2:
                return Ending.TIMEOUT
            raise RetryError(f"the episode took longer than {seconds:g} s") from None

    async def play(self, sandbox: Sandbox) -> Ending:
        """Takes turns until the episode ends.

        Raises:
            SandboxError, RetryError: the infrastructure failed.
            BadInputError: a turn isn't what the chat template renders.
        """
        errors_in_a_row = 0
        while True:
            if self._room() < self._limits.min_turn_tokens:
                return Ending.LENGTH
            completion = await self._sample()
            closed = len(completion) > 0 and completion.tokens[-1] in self._chat.stop_token_ids
            reply = self._chat.parse(completion.tokens)
            if reply.command is None or not closed:
                self.format_errors[(closed and reply.kind) or FormatError.CUT_OFF] += 1
                errors_in_a_row += 1
                if errors_in_a_row == self._limits.max_format_errors:
                    return Ending.FORMAT_ERRORS
                error = reply.error or OPEN_CALL
                if not closed:
                    error = self._agent.cut_off or error
                text = self._agent.format_error.replace("{error}", error)
                answer = self._chat.observe_error(text)
            else:
                errors_in_a_row = 0
                result, text = await self._run(sandbox, reply.command)
                if _is_submission(result):
                    return Ending.SUBMITTED
                if self._command_seconds >= self._limits.total_command_seconds:
                    return Ending.TIMEOUT
                answer = self._chat.observe(text)
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
            seed=turn_seed(base.sampling.seed, turn),
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

    async def _run(self, sandbox: Sandbox, command: str) -> tuple[ExecResult, str]:
        """What a command did, and what is told of it."""
        left = self._limits.total_command_seconds - self._command_seconds
        timeout_s = min(self._limits.command_seconds, left)
        started = time.monotonic()
        try:
            result = await sandbox.exec(
                command, timeout_s=timeout_s, max_output=self._limits.max_output_bytes
            )
        finally:  # the clock may end the episode in it
            self._command_seconds += time.monotonic() - started
        return result, self._agent.show(result, timeout_s)


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
    agent: AgentConfig | None = None,
    counters: Counter[str] | None = None,
) -> Trajectory:
    """Plays one episode and grades what it submitted. The session and the sandbox always end.

    `sampling` gives how to draw and the episode's seed; stop tokens come from `chat`. A failure of
    the infrastructure is returned, not raised: ending FAILURE, reward None, `failure` says what.
    `counters` counts format errors by kind.

    Raises:
        BadInputError: a turn isn't what the chat template renders.
    """
    agent = agent or AgentConfig()
    started = time.monotonic()
    episode = _Episode(
        generator=generator,
        chat=chat,
        agent=agent,
        limits=limits,
        request=GenerateRequest(
            request_id=session_id,
            session_id=session_id,
            tokens=agent.start(chat, task),
            sampling=sampling,
            min_version=min_version,
            purpose=purpose,
        ),
    )
    reward, failure, patch, verdict = None, "", None, None
    try:
        tree = tree_bytes(task.tree)
        try:
            async with sandboxes.open(tree) as sandbox:
                seconds = task.checkout.episode_seconds if task.checkout else None
                ending = await episode.play_in_time(sandbox, seconds or limits.episode_seconds)
                end = await sandbox.snapshot() if ending == Ending.SUBMITTED else None
        finally:
            if counters is not None:
                counters.update({f"format_error_{k}": n for k, n in episode.format_errors.items()})
            with contextlib.suppress(RetryError):
                await generator.end_session(session_id)
        reward = 0.0
        if end is not None:  # the sandbox is closed by now: grading may take its place
            patch = capture(tree, end)
            verdict = await _grade(grader, task, patch, limits.grading_attempts)
            reward = float(verdict.passed)
    except SpentError as error:
        reward, ending = 0.0, Ending.TIMEOUT
        _log.info("episode %s of %s: %s", session_id, task.task_id, error)
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
        num_format_errors=episode.format_errors.total(),
        seconds=time.monotonic() - started,
        # a trainer has no use for these
        patch=patch if purpose == Purpose.EVALUATE else None,
        verdict=shown(verdict.reason) if verdict and purpose == Purpose.EVALUATE else "",
    )


async def _grade(grader: Grader, task: Task, patch: Patch, attempts: int) -> Verdict:
    for attempt in range(1, attempts + 1):
        try:
            verdict = await grader.grade(task, patch)
        except SandboxError:
            if attempt == attempts:
                raise
        else:
            _log.debug("%s: %s", task.task_id, verdict)
            return verdict
    raise AssertionError("unreachable")
