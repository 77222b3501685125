"""Grading an evaluation's saved patches again: does each verdict hold?

Owns which patches there are, the runs, and regraded.jsonl, by which a later call goes on. No
sampler, gateway or model takes part. Must not know how a sandbox isolates or what a test is, nor
what verdicts mean for a pass rate.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from contracts.errors import BadInputError
from contracts.evaluations import (
    EPISODES,
    REGRADED,
    SETTINGS,
    RecordFile,
    patch_from_json,
    patch_to_json,
    read_records,
)
from sampler_fleet.episodes.base import SandboxError, Task
from sampler_fleet.episodes.grading import Grader
from sampler_fleet.episodes.patch import Patch
from sampler_fleet.episodes.tasks.check import digest

MAX_RERUNS = 3  # of a grading that the sandbox lost

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Regraded:
    """One patch, graded again. `passed` is None where it could not be; `failure` says why.

    `checksum` is of the patch, its first verdict and the task as they were then.
    """

    task_id: str
    sample: int
    checksum: str
    had_passed: bool
    had_reason: str
    passed: bool | None
    reason: str = ""
    failure: str = ""
    num_lost: int = 0  # gradings that the sandbox lost

    @property
    def holds(self) -> bool:
        """Whether the verdict is the same."""
        return self.passed == self.had_passed


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A patch as an evaluation left it, with its verdict."""

    task_id: str
    sample: int
    patch: Patch
    passed: bool
    reason: str

    def checksum(self, task: Task) -> str:
        """Of all that a second verdict is about."""
        text = json.dumps([digest(task), patch_to_json(self.patch), self.passed, self.reason])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_saved(directory: Path) -> list[Saved]:
    """The patches that have a verdict. Raises BadInputError: a record that is not one."""
    saved = []
    for number, record in enumerate(read_records(directory / EPISODES), 1):
        try:
            if record["reward"] is None or record["patch"] is None:
                continue
            saved.append(
                Saved(
                    task_id=record["task_id"],
                    sample=record["sample"],
                    patch=patch_from_json(record["patch"]),
                    passed=record["reward"] > 0,
                    reason=record["verdict"],
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadInputError(
                f"{directory / EPISODES}, line {number}", expected="an episode", found=repr(error)
            ) from None
    return saved


def check_unchanged(directory: Path, tasks: Mapping[str, Task]) -> None:
    """Raises BadInputError: a task that was evaluated is gone, or not as it was."""
    path = directory / SETTINGS
    try:
        recorded = json.loads(path.read_text())["digests"].items()
    except (ValueError, KeyError, AttributeError, TypeError):
        raise BadInputError(str(path), expected="settings of an evaluation", found="none") from None
    for task_id, was in recorded:
        task = tasks.get(task_id)
        if task is None or digest(task) != was:
            raise BadInputError(
                f"task {task_id}",
                expected="the task that was evaluated",
                found="none of that id" if task is None else "one that has changed since",
            )


async def regrade(
    directory: Path,
    tasks: Mapping[str, Task],
    grader: Grader,
    *,
    num_jobs: int,
    on_graded: Callable[[Regraded], None],
) -> list[Regraded]:
    """Grades `num_jobs` patches at a time, each in a sandbox of its own; returns all verdicts, in
    the order of the episodes. Those that an earlier call found are taken from its record, if patch
    and task are still the same."""
    saved = read_saved(directory)
    file = RecordFile(directory / REGRADED)
    try:
        checksums = {(s.task_id, s.sample): s.checksum(tasks[s.task_id]) for s in saved}
        found = _known(directory / REGRADED, file, checksums)
        slots = asyncio.Semaphore(num_jobs)

        async def one(patch: Saved) -> None:
            async with slots:
                graded = await _grade(grader, tasks[patch.task_id], patch)
            found[patch.task_id, patch.sample] = graded
            file.add(asdict(graded))
            on_graded(graded)

        async with asyncio.TaskGroup() as group:
            for patch in saved:
                if (patch.task_id, patch.sample) not in found:
                    group.create_task(one(patch))
    finally:
        file.close()
    return [found[patch.task_id, patch.sample] for patch in saved]


async def _grade(grader: Grader, task: Task, saved: Saved) -> Regraded:
    failure = ""
    ungraded = Regraded(
        task_id=saved.task_id,
        sample=saved.sample,
        checksum=saved.checksum(task),
        had_passed=saved.passed,
        had_reason=saved.reason,
        passed=None,
    )
    for num_lost in range(MAX_RERUNS + 1):
        try:
            verdict = await grader.grade(task, saved.patch)
        except SandboxError as error:
            failure = str(error)
            _log.warning("%s, sample %d: %s", saved.task_id, saved.sample, failure)
        else:
            return replace(
                ungraded, passed=verdict.passed, reason=verdict.reason, num_lost=num_lost
            )
    return replace(ungraded, failure=failure, num_lost=MAX_RERUNS + 1)


def _known(
    path: Path, file: RecordFile, checksums: Mapping[tuple[str, int], str]
) -> dict[tuple[str, int], Regraded]:
    """What an earlier call decided of patches and tasks that have the same checksum now."""
    known = {}
    for number, record in enumerate(file.records, 1):
        try:
            graded = Regraded(**record)
        except TypeError as error:
            raise BadInputError(
                f"{path}, line {number}", expected="a verdict", found=str(error)
            ) from None
        key = (graded.task_id, graded.sample)
        if graded.passed is not None and graded.checksum == checksums.get(key):
            known[key] = graded
    return known
