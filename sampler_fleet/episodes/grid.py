"""A world without a sandbox: walk over a small grid to a place, with steps that sometimes slip.

Owns the tasks, what a command does, the verdict, and the scripted walker of the warm start. It
stands behind the ports of a real episode, so that everything else (agent, chat format, sessions,
samplers, grading's place in the loop) is what coding tasks use; an episode costs next to nothing
besides its tokens. Made for experiments of thousands of updates on a small machine.

A place is written `3:5`: so many steps are left in both directions, and `0:0` is the goal. Both
directions wrap around.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import product
from random import Random

from pydantic import Field

from contracts.runfile import Section
from sampler_fleet.episodes.base import ExecResult, Sandbox, Sandboxes, Snapshot, Task
from sampler_fleet.episodes.grading import Verdict
from sampler_fleet.episodes.patch import Patch
from sampler_fleet.episodes.prompts import (
    NO_CALL,
    SUBMIT_COMMAND,
    format_error,
    observation,
)
from sampler_fleet.episodes.tasks.script import Turn

SIZE = 8  # in each direction
MOVES = {"x": (1, 0), "X": (3, 0), "y": (0, 1), "Y": (0, 3)}  # command to steps; at most six needed
SLIP = 0.1  # of the moves go a step less far
GRID_PROMPT = f"`{SUBMIT_COMMAND}`"  # all that the system prompt says: few tokens
NOTES = (" at", " by", " far", " off", " one", " side", " up", " way")  # mean nothing here

_PLACE = "place"
_GOAL = (0, 0)
_HELDOUT_EVERY = 4

Place = tuple[int, int]


def grid_tasks(split: str, num: int, seed: int) -> list[Task]:
    """At most `num` tasks in the seed's order; every fourth place to start from is held out."""
    places = [(x, y) for x, y in product(range(SIZE), repeat=2) if (x, y) != _GOAL]
    Random("grid").shuffle(places)  # the split is the same for all seeds
    of_split = [
        place
        for number, place in enumerate(places)
        if (number % _HELDOUT_EVERY == 0) == (split == "heldout")
    ]
    Random(f"{split}/{seed}").shuffle(of_split)
    return [_task(split, place) for place in of_split[:num]]


def _task(split: str, start: Place) -> Task:
    return Task(
        task_id=f"grid-{start[0]}-{start[1]}",
        split=split,
        template="grid",
        environment="grid",
        issue=_written(start),
        tree={_PLACE: _written(start)},
        fail_to_pass=("at the goal",),
        pass_to_pass=(),
    )


def _written(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _read(text: str) -> Place:
    x, y = text.split(":")
    return int(x), int(y)


class GridSandbox(Sandbox):
    """One walker. A command is one of `MOVES`, or the one that submits."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._place = _GOAL

    async def start(self, tree: Mapping[str, bytes]) -> None:
        self._place = _read(tree[_PLACE].decode())

    async def exec(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", max_output: int = 10_000
    ) -> ExecResult:
        returncode, output, self._place = step(command, self._place, self._rng)
        return ExecResult(
            returncode=returncode,
            output=output,
            num_bytes=len(output),
            timed_out=False,
            seconds=0.0,
        )

    async def read(self, path: str) -> bytes:
        raise OSError(f"no file {path} on a grid")

    async def write(self, path: str, data: bytes) -> None:
        raise OSError(f"no file {path} on a grid")

    async def snapshot(self) -> Snapshot:
        files = {_PLACE: _written(self._place).encode()}
        return Snapshot(files=files, special=(), complete=True)

    async def close(self) -> None:
        pass


class GridSandboxes(Sandboxes):
    """Walkers, as many as are wanted. Slips are drawn by the machine."""

    @asynccontextmanager
    async def open(self, tree: Mapping[str, bytes]) -> AsyncIterator[Sandbox]:
        sandbox = GridSandbox(Random())
        await sandbox.start(tree)
        yield sandbox


def step(command: str, place: Place, rng: Random) -> tuple[int, str, Place]:
    """Exit status, output and the new place."""
    if command == SUBMIT_COMMAND:
        return 0, f"{command.removeprefix('echo ')}\n", place
    if command not in MOVES:
        return 1, "", place
    slip = rng.random() < SLIP
    x, y = (
        (left - max(steps - slip, 0)) % SIZE
        for left, steps in zip(place, MOVES[command], strict=True)
    )
    return 0, f"{_written((x, y))}\n", (x, y)


def grade_walk(task: Task, patch: Patch) -> Verdict:
    """Whether a submission is at the goal."""
    place = patch.changed.get(_PLACE, task.tree[_PLACE].encode()).decode()
    return Verdict(passed=place == _written(_GOAL), reason=f"ended at {place}")


class WalkerConfig(Section):
    """How often the scripted walker errs, per turn, and when it gives up."""

    random_move: float = Field(default=0.3, ge=0, le=1)
    early_submit: float = Field(default=0.06, ge=0, le=1)
    malformed: float = Field(default=0.02, ge=0, le=1)  # a reply without a tool call
    note: float = Field(default=0.4, ge=0, le=1)  # another word before the call
    moves: int = Field(default=7, ge=1)  # then it submits wherever it is


def walk(task: Task, config: WalkerConfig, rng: Random) -> list[Turn]:
    """One episode of the walker. Its last turn submits."""
    place, turns, num_moves = _read(task.tree[_PLACE]), [], 0
    while True:
        if rng.random() < config.malformed:
            answer = format_error(NO_CALL)
            turns.append(Turn(command=rng.choice(NOTES), is_call=False, answer=answer))
        note = "".join(_notes(config, rng))
        is_over = place == _GOAL or num_moves == config.moves
        if is_over or rng.random() < config.early_submit:
            return [*turns, Turn(command=SUBMIT_COMMAND, note=note)]
        good = [move for move, steps in MOVES.items() if _is_nearer(place, steps)]
        move = rng.choice(list(MOVES) if rng.random() < config.random_move else good)
        returncode, output, place = step(move, place, rng)
        num_moves += 1
        turns.append(Turn(command=move, note=note, answer=observation(returncode, output)))


def _notes(config: WalkerConfig, rng: Random) -> Iterator[str]:
    while rng.random() < config.note:
        yield rng.choice(NOTES)


def _is_nearer(place: Place, steps: Place) -> bool:
    after = ((place[0] - steps[0]) % SIZE, (place[1] - steps[1]) % SIZE)
    return sum(_MOVES_LEFT[left] for left in after) < sum(_MOVES_LEFT[left] for left in place)


def _moves_left() -> list[int]:
    """The fewest moves in one direction, by the steps that are left in it."""
    lengths = sorted({sum(steps) for steps in MOVES.values()})
    found, frontier = {0: 0}, [0]
    while frontier:
        left = frontier.pop(0)
        for length in lengths:
            before = (left + length) % SIZE
            if before not in found:
                found[before] = found[left] + 1
                frontier.append(before)
    return [found[left] for left in range(SIZE)]


_MOVES_LEFT = _moves_left()
