"""The grid: its tasks, what a move does, verdicts, and whole episodes of the real agent."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest

from contracts.runfile import validate_section
from contracts.types import Ending, FinishReason, SamplingParams
from sampler_fleet.config import TasksConfig
from sampler_fleet.episodes.agent import AgentConfig, EpisodeLimits, run_episode
from sampler_fleet.episodes.base import GeneratedChunk
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.containers.grading import GraderByTask
from sampler_fleet.episodes.containers.pool import SandboxesByTask
from sampler_fleet.episodes.grid import (
    GRID_PROMPT,
    MOVES,
    SIZE,
    SLIP,
    WalkerConfig,
    grid_tasks,
    step,
    walk,
)
from sampler_fleet.episodes.prompts import SUBMIT_COMMAND
from sampler_fleet.episodes.tasks.choose import choose_tasks
from sampler_fleet.episodes.tasks.demonstrations import build_demonstrations
from tests.sampler_fleet.episodes.test_episode import completion

CHECKPOINT = Path("examples/demo-checkpoint")
SURE = WalkerConfig(random_move=0, early_submit=0, malformed=0, note=0)


class NoSlip(Random):
    def random(self) -> float:
        return 0.999


class AlwaysSlips(Random):
    def random(self) -> float:
        return 0.0


def test_the_splits_share_no_place_and_do_not_depend_on_the_seed():
    names = {
        (split, seed): {task.task_id for task in grid_tasks(split, 100, seed)}
        for split, seed in product(("train", "heldout"), (0, 1))
    }
    assert names["train", 0] == names["train", 1]
    assert not names["train", 0] & names["heldout", 0]
    assert len(names["train", 0] | names["heldout", 0]) == SIZE**2 - 1
    orders = [[task.task_id for task in grid_tasks("train", 100, seed)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_the_run_file_chooses_it():
    config = TasksConfig(environment="grid", num_train=5, num_heldout=2, seed=3)
    chosen = choose_tasks(config, tree_limit=10, no_containers=lambda: "")
    assert chosen == {"train": grid_tasks("train", 5, 3), "heldout": grid_tasks("heldout", 2, 3)}
    with pytest.raises(Exception, match="environment of code"):
        validate_section(TasksConfig, "tasks", {"environment": "grid", "source": "somewhere"})


@pytest.mark.parametrize(
    ("command", "rng", "after"),
    [
        ("x", NoSlip(), (1, 0)),
        ("X", NoSlip(), (7, 0)),
        ("y", NoSlip(), (2, 7)),
        ("Y", NoSlip(), (2, 5)),
        ("x", AlwaysSlips(), (2, 0)),
        ("Y", AlwaysSlips(), (2, 6)),
    ],
)
def test_a_move(command, rng, after):
    assert step(command, (2, 0), rng) == (0, f"{after[0]}:{after[1]}\n", after)


@pytest.mark.parametrize("command", ["", "z", "xx", "x ", "ls"])
def test_what_is_no_move_stays_where_it_is(command):
    assert step(command, (2, 3), NoSlip()) == (1, "", (2, 3))


def test_moves_slip_as_often_as_they_should():
    rng, num = Random(0), 4000
    slipped = sum(step("X", (5, 5), rng)[2] != (2, 5) for _ in range(num))
    assert abs(slipped / num - SLIP) < 4 * (SLIP * (1 - SLIP) / num) ** 0.5


def test_a_walker_who_never_errs_gets_everywhere():
    for task in grid_tasks("train", 100, 0) + grid_tasks("heldout", 100, 0):
        turns = walk(task, SURE, NoSlip())
        assert turns[-1].command == SUBMIT_COMMAND
        assert len(turns) <= 7 and all(turn.command in MOVES for turn in turns[:-1])
        assert turns[-2].answer == "0:0"


def test_a_walker_gives_up():
    turns = walk(grid_tasks("train", 1, 0)[0], WalkerConfig(random_move=1, moves=3), Random(5))
    assert len([turn for turn in turns if turn.is_call]) <= 4


class Scripted:
    """A Generator whose replies are a script's."""

    def __init__(self, replies: list[np.ndarray]) -> None:
        self.replies = list(replies)

    async def generate(self, request):
        tokens = self.replies.pop(0)
        chunk = completion(tokens, version=1, reason=FinishReason.STOP)
        yield GeneratedChunk(completion=chunk, group="g", sampler_id="s")

    async def end_session(self, session_id: str) -> None:
        pass


def play(commands: list[str]):
    chat = ChatFormat.load(CHECKPOINT)
    task = next(t for t in grid_tasks("train", 100, 0) + grid_tasks("heldout", 100, 0))
    places = SandboxesByTask(None, None)  # type: ignore[arg-type]
    trajectory = run_episode(
        task,
        session_id="s",
        generator=Scripted([chat.reply(command) for command in commands]),
        chat=chat,
        sandboxes=places.of(task),
        grader=GraderByTask(None, containers=None),  # type: ignore[arg-type]
        limits=EpisodeLimits(max_turns=8),
        sampling=SamplingParams(max_new_tokens=16),
        agent=AgentConfig(system_prompt=GRID_PROMPT),
    )
    return task, asyncio.run(trajectory), chat


def test_an_episode_that_submits_at_once_has_no_reward():
    _, trajectory, _ = play([SUBMIT_COMMAND])
    assert (trajectory.reward, trajectory.ending) == (0.0, Ending.SUBMITTED)


def test_an_episode_to_the_goal(monkeypatch):
    monkeypatch.setattr("sampler_fleet.episodes.grid.Random", lambda *_: NoSlip())
    task = grid_tasks("train", 100, 0)[0]
    commands = [turn.command for turn in walk(task, SURE, NoSlip())]
    played, trajectory, chat = play(commands)
    assert played == task and trajectory.num_turns == len(commands)
    assert (trajectory.reward, trajectory.ending) == (1.0, Ending.SUBMITTED)
    assert task.issue in chat.decode(trajectory.tokens)


def test_demonstrations_are_what_a_policy_would_write():
    arrays = build_demonstrations(CHECKPOINT, 200, 3, environment="grid")
    chat = ChatFormat.load(CHECKPOINT)
    commands = []
    for start, end in zip(arrays["offsets"][:-1], arrays["offsets"][1:], strict=True):
        mask, tokens = arrays["loss_mask"][start:end], arrays["tokens"][start:end]
        begins = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
        ends = np.flatnonzero(np.diff(mask.astype(int), append=0) == -1) + 1
        replies = [chat.parse(tokens[a:b]) for a, b in zip(begins, ends, strict=True)]
        assert replies[-1].command == SUBMIT_COMMAND
        commands += [reply.command for reply in replies]
        assert all(tokens[b - 1] in chat.stop_token_ids for b in ends)
    assert set(commands) == {*MOVES, SUBMIT_COMMAND, None}
    assert 0.005 < commands.count(None) / len(commands) < 0.05
