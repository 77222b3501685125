"""The scripted expert: reads the module, edits one line, submits; and errs as often as it is told.

Owns what a demonstration does, turn by turn, as text. The errors are the point: a policy cloned
from it solves about as many tasks as the script does and keeps its doubts, so that reinforcement
learning has something to sharpen. Must not know tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from pydantic import Field

from contracts.runfile import Section
from sampler_fleet.episodes.prompts import NO_CALL, SUBMIT_COMMAND, format_error, observation
from sampler_fleet.episodes.tasks.edit import Edit
from sampler_fleet.episodes.tasks.generate import Problem
from sampler_fleet.episodes.tasks.shell import run_command

CONTEXT_LINES = 5  # after a `def`: enough for every template


class ScriptConfig(Section):
    """How often the expert errs, as probabilities per episode."""

    wrong_edit: float = Field(default=0.35, ge=0, le=1)
    far_edit: float = Field(default=0.15, ge=0, le=1)  # of the wrong ones: in another function
    wrong_line: float = Field(default=0.15, ge=0, le=1)  # of the wrong ones: a line off
    look_around: float = Field(default=0.05, ge=0, le=1)  # a command that helps nobody
    malformed: float = Field(default=0.015, ge=0, le=1)  # a reply without a tool call
    early_submit: float = Field(default=0.015, ge=0, le=1)  # nothing edited


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A reply of the expert and what it is answered; the last turn has no answer."""

    command: str
    note: str = ""  # said before the call
    is_call: bool = True  # False: the bare command, without a tool call
    answer: str | None = None


def play(problem: Problem, config: ScriptConfig, rng: Random) -> list[Turn]:
    """One episode. Its last turn submits."""
    tree = dict(problem.task.tree)
    turns = []
    for command in _commands(problem, config, rng):
        if rng.random() < config.malformed:
            answer = format_error(NO_CALL)
            turns.append(Turn(command=command, is_call=False, answer=answer))
        turns.append(Turn(command=command, answer=observation(*run_command(command, tree))))
    return [*turns, Turn(command=SUBMIT_COMMAND)]


def _commands(problem: Problem, config: ScriptConfig, rng: Random) -> Iterator[str]:
    path = problem.path
    if rng.random() < config.look_around:
        folder = path.split("/")[0]
        yield rng.choice(("ls", f"ls {folder}", "cat README.md", f"cat -n {path}"))
    yield f"grep -n -A{CONTEXT_LINES} 'def {problem.function}' {path}"
    if rng.random() >= config.early_submit:
        yield _choose_edit(problem, config, rng).command


def _choose_edit(problem: Problem, config: ScriptConfig, rng: Random) -> Edit:
    if rng.random() >= config.wrong_edit:
        return problem.repair
    draw = rng.random()
    if draw < config.wrong_line:
        return _off_by_a_line(problem, rng)
    misses: Sequence[Edit] = problem.near_misses
    if not misses or draw < config.wrong_line + config.far_edit:
        misses = problem.far_misses or misses
    return rng.choice(misses) if misses else _off_by_a_line(problem, rng)


def _off_by_a_line(problem: Problem, rng: Random) -> Edit:
    line = problem.repair.line
    return replace(problem.repair, line=rng.choice([n for n in (line - 1, line + 1) if n > 0]))
