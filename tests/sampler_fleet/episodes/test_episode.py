"""Whole episodes: scripted replies, real chat format, real sandbox, real grading."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from contracts.errors import RetryError
from contracts.types import (
    CandidateSets,
    Completion,
    Ending,
    FinishReason,
    GenerateRequest,
    Purpose,
    SamplingParams,
    VersionSpan,
)
from sampler_fleet.episodes.agent import EpisodeLimits, run_episode
from sampler_fleet.episodes.base import GeneratedChunk, SandboxError, SpentError
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.grading import Grader
from sampler_fleet.episodes.prompts import SUBMIT_COMMAND
from sampler_fleet.episodes.sandbox import SandboxPool
from tests.sampler_fleet.episodes.processes import started

FIX = "sed -i 's/+/*/' shop/cart.py"
LIMITS = EpisodeLimits(max_turns=6, command_seconds=5)


@pytest.fixture(scope="session")
def chat(tokenizer_files) -> ChatFormat:
    return ChatFormat.load(tokenizer_files)


class Scripted:
    """A Generator that replies from a list, in chunks of three tokens; turn n is of version n."""

    def __init__(self, replies: list[np.ndarray], fails_at: int = -1) -> None:
        self.replies, self.fails_at = replies, fails_at
        self.requests: list[GenerateRequest] = []
        self.ended: list[str] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedChunk]:
        turn = len(self.requests)
        self.requests.append(request)
        if turn == self.fails_at:
            raise RetryError("no sampler left")
        tokens = self.replies[min(turn, len(self.replies) - 1)]
        shown = tokens[: request.sampling.max_new_tokens]
        end = FinishReason.STOP
        if len(shown) < len(tokens) or shown[-1] not in request.sampling.stop_token_ids:
            end = FinishReason.LENGTH
        for start in range(0, len(shown), 3):
            part = shown[start : start + 3]
            last = start + 3 >= len(shown)
            yield GeneratedChunk(
                completion=completion(part, version=1 + turn, reason=end if last else None),
                group="g",
                sampler_id=f"s{min(start // 3, 1)}",
            )

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)


def completion(tokens: np.ndarray, version: int, reason: FinishReason | None) -> Completion:
    """Every record can be told apart: logp is -token/1e6, its candidate set (token, token + 1)."""
    num = len(tokens)
    pairs = np.stack([tokens, tokens + 1], 1).ravel().astype(np.int32)
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        sampler_logp=(-tokens / 1e6).astype(np.float32),
        candidates=CandidateSets.from_counts(
            np.full(num, 2, np.int64), pairs, (-pairs / 1e6).astype(np.float32)
        ),
        spans=(VersionSpan(version=version, start=0, end=num),),
        finish_reason=reason,
    )


@pytest.fixture
def play(chat, pool, grader, task) -> Callable:
    async def play(
        *replies,
        limits=LIMITS,
        fails_at=-1,
        sandboxes=pool,
        grader=grader,
        purpose=Purpose.TRAIN,
        **sampling,
    ):
        """An episode of commands (str), or of replies given as tokens."""
        tokens = [chat.reply(r) if isinstance(r, str) else np.asarray(r) for r in replies]
        generator = Scripted(tokens, fails_at)
        trajectory = await run_episode(
            task,
            session_id="session",
            generator=generator,
            chat=chat,
            sandboxes=sandboxes,
            grader=grader,
            limits=limits,
            sampling=SamplingParams(max_new_tokens=200, seed=3, **sampling),
            purpose=purpose,
            min_version=1,
        )
        assert generator.ended == ["session"]
        check_records(trajectory, generator, chat)
        return trajectory, generator

    return play


def check_records(trajectory, generator, chat) -> None:
    """What holds for any trajectory: one buffer, records exactly over its sampled tokens."""
    num_sampled = int(trajectory.loss_mask.sum())
    assert len(trajectory.tokens) == len(trajectory.loss_mask)
    assert len(trajectory.sampler_logp) == len(trajectory.candidates) == num_sampled
    assert len(trajectory.version) == num_sampled
    covered = np.zeros(len(trajectory.tokens), bool)
    for span in trajectory.spans:
        assert not covered[span.start : span.end].any()
        covered[span.start : span.end] = True
    assert (covered == trajectory.loss_mask).all()
    sampled = trajectory.tokens[trajectory.loss_mask]
    assert (trajectory.sampler_logp == (-sampled / 1e6).astype(np.float32)).all()
    assert (trajectory.candidates.ids[::2] == sampled).all()
    for request in generator.requests:
        assert (trajectory.tokens[: len(request.tokens)] == request.tokens).all()
        assert request.sampling.stop_token_ids == chat.stop_token_ids
        assert (request.session_id, request.min_version) == ("session", 1)
    assert len({r.request_id for r in generator.requests}) == len(generator.requests)
    assert len({r.sampling.seed for r in generator.requests}) == len(generator.requests)


class TestRewards:
    async def test_honest_fix(self, play, chat, task):
        trajectory, generator = await play("cat shop/cart.py", FIX, SUBMIT_COMMAND)
        assert (trajectory.reward, trajectory.ending) == (1.0, Ending.SUBMITTED)
        assert (trajectory.num_turns, trajectory.num_format_errors) == (3, 0)
        assert (trajectory.group, trajectory.sampler_ids) == ("g", ("s0", "s1"))
        assert trajectory.failure == ""
        assert list(np.unique(trajectory.version)) == [1, 2, 3]
        second = chat.decode(generator.requests[1].tokens)
        assert task.issue in second
        assert "return price + count" in second
        assert (trajectory.tokens[-len(generator.replies[2]) :] == generator.replies[2]).all()

    async def test_wrong_fix(self, play):
        trajectory, _ = await play("sed -i 's/+/-/' shop/cart.py", SUBMIT_COMMAND)
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.SUBMITTED)

    async def test_no_change(self, play):
        trajectory, _ = await play(SUBMIT_COMMAND)
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.SUBMITTED)

    async def test_an_evaluation_hands_over_the_patch_and_training_does_not(self, play):
        evaluated, _ = await play(FIX, "rm README.md", SUBMIT_COMMAND, purpose=Purpose.EVALUATE)
        assert evaluated.patch and evaluated.verdict.endswith("tests passed")
        assert list(evaluated.patch.changed) == ["shop/cart.py"]
        assert b"return price * count" in evaluated.patch.changed["shop/cart.py"]
        unsubmitted, _ = await play(FIX, "ls", purpose=Purpose.EVALUATE)
        assert unsubmitted.patch is None and unsubmitted.verdict == ""
        trained, _ = await play(FIX, SUBMIT_COMMAND)
        assert trained.patch is None and trained.verdict == ""

    async def test_no_submission(self, play):
        trajectory, _ = await play(FIX, "ls")
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.TURN_LIMIT)
        assert trajectory.num_turns == LIMITS.max_turns
        assert trajectory.loss_mask[-1]  # nothing is observed that nobody reads

    @pytest.mark.parametrize(
        "command", [f"echo no; {SUBMIT_COMMAND}", f"{SUBMIT_COMMAND}; false", "echo COMPLETE"]
    )
    async def test_only_the_marker_on_the_first_line_submits(self, play, command):
        trajectory, _ = await play(FIX, command, "ls")
        assert trajectory.ending == Ending.TURN_LIMIT

    async def test_hostile_tree(self, play):
        trajectory, _ = await play(FIX, "ln -s / root", SUBMIT_COMMAND)
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.SUBMITTED)
        trajectory, _ = await play(FIX, "head -c 6000000 /dev/zero > big", SUBMIT_COMMAND)
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.SUBMITTED)
        trajectory, _ = await play(FIX, "touch tests/test_hidden.py conftest.py", SUBMIT_COMMAND)
        assert trajectory.reward == 1.0


class TestFormatErrors:
    async def test_three_in_a_row_end_it(self, play, chat):
        trajectory, generator = await play(chat.reply_text("I can't."))
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.FORMAT_ERRORS)
        assert trajectory.num_format_errors == trajectory.num_turns == 3
        assert trajectory.loss_mask.sum() == 3 * len(generator.replies[0])
        assert "There was no tool call." in chat.decode(trajectory.tokens)

    async def test_a_call_between_resets_the_count(self, play, chat):
        bad = chat.reply_text("Hm.")
        trajectory, _ = await play(bad, bad, FIX, bad, bad, SUBMIT_COMMAND)
        assert (trajectory.reward, trajectory.ending) == (1.0, Ending.SUBMITTED)
        assert trajectory.num_format_errors == 4

    async def test_unfinished_reply(self, play, chat):
        """No stop token: an error, whatever it says; the buffer gets the token unsampled."""
        cut = chat.reply(FIX)[:-1]
        trajectory, generator = await play(cut, FIX, SUBMIT_COMMAND)
        assert trajectory.num_format_errors == 1
        assert trajectory.reward == 1.0
        place = len(generator.requests[0].tokens) + len(cut)
        assert trajectory.tokens[place] == chat.stop_token_ids[0]
        assert not trajectory.loss_mask[place]
        whole = np.concatenate([generator.requests[0].tokens, chat.reply(FIX)])
        assert (trajectory.tokens[: len(whole)] == whole).all()


class TestLimits:
    async def test_command_timeout_is_an_observation(self, play, chat):
        limits = LIMITS.model_copy(update={"command_seconds": 0.2})
        trajectory, generator = await play("sleep 30", FIX, SUBMIT_COMMAND, limits=limits)
        assert trajectory.reward == 1.0
        assert "(exit status 124)" in chat.decode(generator.requests[1].tokens)

    async def test_time_of_all_commands(self, play):
        limits = LIMITS.model_copy(update={"total_command_seconds": 0.4})
        trajectory, _ = await play("sleep 0.3", limits=limits)
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.TIMEOUT)
        assert trajectory.num_turns == 2

    async def test_context(self, play, chat):
        limits = LIMITS.model_copy(update={"max_context_tokens": 300, "max_output_bytes": 2000})
        trajectory, _ = await play("ls -la /usr/bin", limits=limits)
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.LENGTH)
        assert len(trajectory.tokens) <= 300
        assert trajectory.loss_mask[-1]

    async def test_no_room_for_the_prompt(self, play):
        limits = LIMITS.model_copy(update={"max_context_tokens": 16})
        trajectory, generator = await play("ls", limits=limits)
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.LENGTH)
        assert not generator.requests
        assert trajectory.group == ""

    async def test_replies_fit_the_context(self, play, chat):
        prompt = len((await play("ls"))[1].requests[0].tokens)
        limits = LIMITS.model_copy(update={"max_context_tokens": prompt + 10})
        trajectory, generator = await play("echo " + "x" * 200, limits=limits)
        assert generator.requests[0].sampling.max_new_tokens == 10
        assert trajectory.ending == Ending.LENGTH
        assert trajectory.loss_mask.sum() == 10


class TestFailures:
    async def test_no_sampler(self, play):
        trajectory, _ = await play("ls", fails_at=1)
        assert (trajectory.reward, trajectory.ending) == (None, Ending.FAILURE)
        assert trajectory.failure == "no sampler left"
        assert trajectory.num_turns == 1

    async def test_sandbox_killed_from_outside(self, play, host):
        pool = SandboxPool(1, host=host)

        async def kill():
            assert await started("61.25", 1)
            (sandbox,) = pool._open
            os.kill(sandbox.pid, 9)

        killer = asyncio.create_task(kill())
        trajectory, _ = await play("sleep 61.25", SUBMIT_COMMAND, sandboxes=pool)
        await killer
        await pool.close()
        assert (trajectory.reward, trajectory.ending) == (None, Ending.FAILURE)
        assert "sandbox" in trajectory.failure

    async def test_grading_is_retried(self, play, grader):
        class Flaky:
            def __init__(self, num_failures):
                self.num_failures = num_failures

            async def grade(self, task, patch):
                self.num_failures -= 1
                if self.num_failures >= 0:
                    raise SandboxError("no room")
                return await grader.grade(task, patch)

        trajectory, _ = await play(FIX, SUBMIT_COMMAND, grader=Flaky(2))
        assert trajectory.reward == 1.0
        trajectory, _ = await play(FIX, SUBMIT_COMMAND, grader=Flaky(3))
        assert (trajectory.reward, trajectory.ending) == (None, Ending.FAILURE)
        assert trajectory.failure == "no room"

    async def test_a_spent_sandbox_is_the_policys_doing(self, play, pool):
        """Wherever its commands, or its patch, did that."""

        class Spent:
            num_opened = 0

            @contextlib.asynccontextmanager
            async def open(self, tree):
                self.num_opened += 1
                async with pool.open(tree) as box:
                    yield box
                    raise SpentError("no memory")

        trajectory, _ = await play(FIX, SUBMIT_COMMAND, sandboxes=Spent())
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.TIMEOUT)
        assert trajectory.failure == ""
        rooms = Spent()
        trajectory, _ = await play(FIX, SUBMIT_COMMAND, grader=Grader(rooms))
        assert (trajectory.reward, trajectory.ending) == (0.0, Ending.SUBMITTED)
        assert rooms.num_opened == 1

    async def test_cancelled(self, play, pool):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await play("sleep 30", limits=LIMITS.model_copy(update={"command_seconds": 60}))
        assert not pool._open

    async def test_one_sandbox_is_enough(self, play, host, grader):
        """An episode gives its place back before it is graded: no deadlock."""
        pool = SandboxPool(1, host=host)
        grader = type(grader)(pool)
        async with asyncio.timeout(20):
            runs = await asyncio.gather(
                *(play(FIX, SUBMIT_COMMAND, sandboxes=pool, grader=grader) for _ in range(4))
            )
        assert [trajectory.reward for trajectory, _ in runs] == [1.0] * 4
        await pool.close()
