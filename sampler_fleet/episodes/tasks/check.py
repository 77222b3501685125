"""Are tasks usable? The empty patch must fail and the reference solution pass, every time.

Owns the runs of both, the verdict, and its files. Must not know how a sandbox isolates or what a
test is.

    checked.jsonl   a line per task as it is done, by which a later check goes on
    usable.jsonl    the ids of usable tasks, a JSON text each; what `[tasks] ids` takes
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from contracts.errors import BadInputError
from contracts.files import replacing
from sampler_fleet.episodes.base import SandboxError, Task
from sampler_fleet.episodes.containers.base import NoImageError
from sampler_fleet.episodes.grading import Grader
from sampler_fleet.episodes.patch import Patch
from sampler_fleet.episodes.tasks.choose import why_not_here

NUM_RUNS = 3  # of each patch, each in a fresh sandbox
NO_NETWORK = "its verifier may use the network, which graders don't have"
CHECKED, USABLE = "checked.jsonl", "usable.jsonl"


class Outcome(StrEnum):
    USABLE = "usable"
    UNUSABLE = "unusable"
    SKIPPED = "skipped"  # it can't be run here
    FAILED = "failed"  # the sandbox did; a later check tries again


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found of a task; `digest` is of the task as it was then."""

    task_id: str
    outcome: Outcome
    reason: str
    digest: str


async def check_tasks(
    tasks: Sequence[Task],
    grader: Grader | None,
    out: Path,
    *,
    no_containers: Callable[[], str],
    num_jobs: int,
    on_found: Callable[[Finding], None],
) -> list[Finding]:
    """Checks `num_jobs` tasks at a time; returns findings in the order of the tasks.

    What `out` has of an earlier check of the same tasks is not done again. No grader is needed
    where `why_not_here` has a reason for every task; `no_containers` is for it.
    """
    out.mkdir(parents=True, exist_ok=True)
    found = _known(out / CHECKED, tasks)
    _write(out / CHECKED, (json.dumps(asdict(finding)) for finding in found.values()))
    slots = asyncio.Semaphore(num_jobs)
    with (out / CHECKED).open("a") as record:

        async def check(task: Task) -> None:
            async with slots:
                finding = await check_task(task, grader, no_containers)
            found[task.task_id] = finding
            record.write(json.dumps(asdict(finding)) + "\n")
            record.flush()
            on_found(finding)

        async with asyncio.TaskGroup() as group:
            for task in tasks:
                if task.task_id not in found:
                    group.create_task(check(task))
    findings = [found[task.task_id] for task in tasks]
    usable = (json.dumps(f.task_id) for f in findings if f.outcome == Outcome.USABLE)
    _write(out / USABLE, usable)
    return findings


async def check_task(
    task: Task, grader: Grader | None, no_containers: Callable[[], str]
) -> Finding:
    """Grades the empty patch and the reference solution `NUM_RUNS` times each."""

    def finding(outcome: Outcome, reason: str) -> Finding:
        return Finding(task_id=task.task_id, outcome=outcome, reason=reason, digest=digest(task))

    if reason := why_not_here(task, no_containers):
        return finding(Outcome.SKIPPED, reason)
    assert grader is not None
    checkout = task.checkout
    has_solution = bool(
        checkout.fix_patch or checkout.fix_script if checkout else task.fix or task.fix_deletes
    )
    note = f"; {NO_NETWORK}" if checkout and checkout.may_use_network else ""
    try:
        for run in range(1, NUM_RUNS + 1):
            if (await grader.grade(task, _empty(task))).passed:
                return finding(Outcome.UNUSABLE, f"run {run} of the empty patch: the tests pass")
        if not has_solution:
            reason = f"the empty patch fails{note}; there is no reference solution"
            return finding(Outcome.USABLE, reason)
        for run in range(1, NUM_RUNS + 1):
            verdict = await grader.grade_fix(task)
            if not verdict.passed:
                reason = f"run {run} of the reference solution: {verdict.reason}{note}"
                return finding(Outcome.UNUSABLE, reason)
    except NoImageError as error:
        return finding(Outcome.SKIPPED, str(error))
    except SandboxError as error:  # without a reward file, for one
        return finding(Outcome.FAILED, f"{error}{note}")
    return finding(Outcome.USABLE, verdict.reason)


def digest(task: Task) -> str:
    """Of everything in a task."""
    text = json.dumps(asdict(task), sort_keys=True, default=bytes.hex)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _empty(task: Task) -> Patch:
    """A patch that changes nothing that counts: the grader runs no tests for one without files."""
    name = "empty-patch"
    while any(path.startswith(name) for path in task.tree):
        name += "-"
    return Patch(changed={name: b""})


def _known(path: Path, tasks: Iterable[Task]) -> dict[str, Finding]:
    """Verdicts of an earlier check on tasks that are as they were."""
    digests = {task.task_id: digest(task) for task in tasks}
    known = {}
    lines = path.read_text().split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            finding = Finding(**(fields | {"outcome": Outcome(fields["outcome"])}))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # a check that was killed left part of a line, or nothing
                break
            raise BadInputError(
                f"{path}, line {number}", expected="what a check wrote", found=str(error)
            ) from None
        decided = finding.outcome in (Outcome.USABLE, Outcome.UNUSABLE)
        if decided and digests.get(finding.task_id) == finding.digest:
            known[finding.task_id] = finding
    return known


def _write(path: Path, lines: Iterable[str]) -> None:
    with replacing(path) as aside:
        aside.write_text("".join(f"{line}\n" for line in lines))
