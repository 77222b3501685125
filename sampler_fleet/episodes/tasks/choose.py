"""Which tasks a run trains on and which it holds out.

Owns the splitting of a source. Pure but for reading files: the same settings give the same tasks in
the same order, as a resumed run needs it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.grading import tree_bytes
from sampler_fleet.episodes.grid import grid_tasks
from sampler_fleet.episodes.tasks.generate import SPLITS, generate_tasks
from sampler_fleet.episodes.tasks.sources import read_tasks
from sampler_fleet.episodes.tasks.sources.files import read_text

if TYPE_CHECKING:
    from sampler_fleet.config import TasksConfig

TRAIN, HELDOUT = SPLITS

_log = logging.getLogger(__name__)


def choose_tasks(
    config: TasksConfig, *, tree_limit: int, no_containers: Callable[[], str]
) -> dict[str, list[Task]]:
    """The tasks of both splits, generated or from a source.

    `tree_limit`: bytes of a tree; `no_containers` as for `why_not_here`.

    Raises:
        BadInputError: a bad source or subset, tasks that can't be run here, none to train on.
        FileNotFoundError: no such source or subset.
    """
    numbers = {TRAIN: config.num_train, HELDOUT: config.num_heldout}
    if not config.source:
        make = grid_tasks if config.environment == "grid" else generate_tasks
        return {split: make(split, num, config.seed) for split, num in numbers.items()}
    if config.ids:
        subsets = [config.ids]
    elif config.train_ids and config.heldout_ids:
        subsets = [config.train_ids, config.heldout_ids]
    else:
        subsets = []
    tasks = read_chosen(Path(config.source), subsets)
    splits = _splits(tasks, config)
    chosen: dict[str, list[Task]] = {}
    for split, of_split in splits.items():
        Random(f"{split}/{config.seed}").shuffle(of_split)
        chosen[split] = of_split[: numbers[split]]
    counts = (f"{len(chosen[split])} of {len(splits[split])} {split}" for split in SPLITS)
    _log.info("tasks of %s: %s", config.source, ", ".join(counts))
    if not chosen[TRAIN]:
        raise BadInputError(
            "run file, tasks", expected=f"tasks to train on in {config.source}", found="none"
        )
    for task in (*chosen[TRAIN], *chosen[HELDOUT]):
        _check(task, tree_limit, no_containers)
    return chosen


def _splits(tasks: dict[str, Task], config: TasksConfig) -> dict[str, list[Task]]:
    """By subset files; a split without one has all else, but what says that it's of the other.
    Without any, by what tasks say and the share."""
    files = {TRAIN: config.train_ids, HELDOUT: config.heldout_ids}
    named = {split: _pick(tasks, file) for split, file in files.items() if file}
    if not named:
        heldout = heldout_ids(tasks.values(), config.heldout_share, config.seed)
        return {
            TRAIN: [task for task in tasks.values() if task.task_id not in heldout],
            HELDOUT: [task for task in tasks.values() if task.task_id in heldout],
        }
    if len(named) == len(files) and (in_both := named[TRAIN].keys() & named[HELDOUT].keys()):
        raise BadInputError(
            "run file, tasks.heldout_ids",
            expected="no id that is in tasks.train_ids",
            found=sorted(in_both)[0],
        )
    listed = {task_id for picked in named.values() for task_id in picked}
    rest = [task for task in tasks.values() if task.task_id not in listed]
    return {
        split: list(named[split].values())
        if split in named
        else [task for task in rest if task.split in ("", split)]
        for split in files
    }


def heldout_ids(tasks: Iterable[Task], share: float, seed: int) -> set[str]:
    """The tasks to hold out: those whose split says so, and `share` of those without a split.

    Of the latter whole templates are held out, in an order that the seed gives, until it is enough.
    """
    tasks = list(tasks)
    found = {task.task_id for task in tasks if task.split == HELDOUT}
    templates: dict[str, list[str]] = {}
    for task in tasks:
        if not task.split:
            templates.setdefault(task.template, []).append(task.task_id)
    wanted = round(share * sum(map(len, templates.values())))
    undecided: set[str] = set()
    for template in sorted(templates, key=lambda name: _order(seed, name)):
        if len(undecided) >= wanted:
            break
        undecided.update(templates[template])
    return found | undecided


def read_ids(path: Path) -> list[str]:
    """A subset file: one id per line, plain or as a JSON text; # starts a comment."""
    ids = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        line = line.strip()
        if line.startswith('"'):
            try:
                line = json.loads(line)
            except ValueError as error:
                raise BadInputError(
                    f"{path}, line {number}", expected="an id", found=str(error)
                ) from None
        if line and not line.startswith("#"):
            ids.append(line)
    return ids


def why_not_here(task: Task, no_containers: Callable[[], str]) -> str:
    """Why a task can't be run on this machine; "" if it can.

    `no_containers` says why there is no container runtime; it is asked only where one is needed.
    """
    checkout = task.checkout
    if checkout is None:
        return ""
    if not checkout.image:
        return f"needs a container, and its image is still to be built in {checkout.build_dir}"
    if not checkout.test_command:
        return (
            f"needs a container (image {checkout.image}) "
            "and its data set's own harness to be graded, which is not here"
        )
    reason = no_containers()
    return reason and f"needs a container (image {checkout.image}): {reason}"


def read_chosen(source: Path, subsets: Sequence[str | Path]) -> dict[str, Task]:
    """The tasks of a source by id: all of it, or what subset files name, in their order.

    What no subset file names may be broken.

    Raises:
        BadInputError: a task that is wanted is broken or not there.
    """
    if not subsets:
        return {task.task_id: task for task in read_tasks(source)}
    broken: dict[str, BadInputError] = {}
    tasks = {task.task_id: task for task in read_tasks(source, broken.__setitem__)}
    chosen: dict[str, Task] = {}
    for file in subsets:
        chosen |= _pick(tasks, file, broken)
    return chosen


def _pick(
    tasks: Mapping[str, Task], file: str | Path, broken: Mapping[str, BadInputError] | None = None
) -> dict[str, Task]:
    """The tasks that a subset file names. Raises BadInputError: one is broken or not there."""
    picked: dict[str, Task] = {}
    for task_id in read_ids(Path(file)):
        if broken and task_id in broken:
            raise broken[task_id]
        if task_id not in tasks:
            raise BadInputError(str(file), expected="ids of tasks in the source", found=task_id)
        picked[task_id] = tasks[task_id]
    return picked


def _check(task: Task, tree_limit: int, no_containers: Callable[[], str]) -> None:
    if reason := why_not_here(task, no_containers):
        raise BadInputError(
            "run file, tasks.source",
            expected="tasks that can be run here",
            found=f"{task.task_id}, which {reason}",
        )
    if (size := sum(map(len, tree_bytes(task.tree).values()))) > tree_limit:
        raise BadInputError(
            f"tree of task {task.task_id}",
            expected=f"at most episodes.sandbox.tree_bytes, {tree_limit}",
            found=size,
        )


def _order(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()
