"""Which mutations become tasks: those that some tests of the package show and others don't.

Owns the trial of each mutation, the rules by which it is kept, and the order in which they are
tried: the same package, number and seed give the same tasks, however many run at a time. Must not
know how sandboxes isolate or how tasks are written.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import SandboxError, Sandboxes
from sampler_fleet.episodes.tasks.make.hidden import HiddenFile, hidden_files
from sampler_fleet.episodes.tasks.make.issue import write_issue
from sampler_fleet.episodes.tasks.make.mutations import Mutation, find_mutations
from sampler_fleet.episodes.tasks.make.package import Package
from sampler_fleet.episodes.tasks.make.runs import run_graded, run_probe
from sampler_fleet.episodes.tasks.make.write import (
    TEST_SECONDS,
    MadeTask,
    fix_patch,
    visible_tree,
)

NUM_RUNS = 3  # of every set of tests, each in a fresh sandbox
_SECONDS = TEST_SECONDS / 2
_HANG_S = 3.0  # of one file of tests, while those that hang are looked for
_MAX_HANGING = 3  # of a file; then the rest of it is left out


class Outcome(StrEnum):
    """Of one mutation; said to people."""

    KEPT = "kept"
    SURVIVED = "failed no test"
    BROKEN = "broke everything"
    SLOW = "took too long"
    FLAKY = "failed differently in another run"
    REPEATED = "failed the same tests as another on its line"
    LOST = "lost their sandbox"
    UNTOLD = "can't be told in an issue"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A package whose tests are known."""

    package: Package
    files: tuple[HiddenFile, ...]
    hidden: dict[str, str]  # the files' texts
    num_tests: int  # that were found
    tests: tuple[str, ...]  # that pass on the right source, every time
    modules: tuple[str, ...]  # that can be imported
    lines: dict[str, frozenset[int]]  # that these tests run
    seconds: float  # that a mutant's tests may take


async def find_subject(package: Package, sandboxes: Sandboxes) -> Subject:
    """Runs a package's tests on the right source.

    Raises:
        BadInputError: too few of them can be used.
        SandboxError: the infrastructure failed.
    """
    files = hidden_files(package)
    hidden = {file.path: file.text(package) for file in files}
    dotted = [_dotted(path) for path in package.modules]
    probe = await run_probe(sandboxes, package.files, files, names=(), modules=dotted)
    if probe is None:
        raise BadInputError(package.name, expected="tests that can be loaded", found="no answer")
    if probe.copies:
        raise BadInputError(
            package.name,
            expected="a package that the sandboxes' own Python lacks: it would show the answer",
            found=f"{probe.copies[0]} there",
        )
    found = [
        await _passing(sandboxes, package, {file.path: hidden[file.path]}, of_file)
        for file in files
        if (of_file := [name for name in probe.tests if name.split("::")[0] == file.path])
    ]
    tests = sorted(set().union(*(names for names, _ in found)))
    seconds = 0.0
    for _ in range(NUM_RUNS):
        start = time.monotonic()
        results = await run_graded(sandboxes, package.files, hidden, tests, _SECONDS)
        seconds = max(seconds, time.monotonic() - start)
        tests = [name for name in tests if results.get(name) == ""]
    if len(tests) < 2:
        why = [w for _, reasons in found for w in reasons]
        why += [f["observed"] for f in probe.failures.values()]
        raise BadInputError(
            package.name,
            expected="at least two tests that pass each time under the grader's runner",
            found=f"{len(tests)} of {len(probe.tests)}{f'; {why[0]}' if why else ''}",
        )
    modules = [name for name in dotted if name not in probe.unimportable]
    traced = await run_probe(
        sandboxes, package.files, files, names=tests, traced=True, modules=modules
    )
    if traced is None:
        raise BadInputError(package.name, expected="tests that can be traced", found="no answer")
    return Subject(
        package=package,
        files=tuple(files),
        hidden={path: text for path, text in hidden.items() if any(_of(path, tests))},
        num_tests=len(probe.tests),
        tests=tuple(tests),
        modules=tuple(modules),
        lines=traced.lines,
        seconds=min(_SECONDS, 2 + 5 * seconds),
    )


def _of(path: str, tests: Sequence[str]) -> list[str]:
    return [name for name in tests if name.split("::")[0] == path]


async def _passing(
    sandboxes: Sandboxes, package: Package, hidden: dict[str, str], names: Sequence[str]
) -> tuple[set[str], list[str]]:
    """(tests of a file that pass, why others fail); those that hang are left out one by one."""
    left, passing, reasons = sorted(names), set(), []
    for _ in range(_MAX_HANGING + 1):
        results = await run_graded(sandboxes, package.files, hidden, left, _HANG_S)
        passing |= {name for name, why in results.items() if not why}
        reasons += [why for why in results.values() if why]
        left = [name for name in left if name not in results][1:]
        if not left:
            break
    return passing, reasons


def choose_mutations(subject: Subject, rng: Random) -> list[Mutation]:
    """All that a test could notice, in the order to try them: functions take turns."""
    functions: dict[tuple[str, str], list[Mutation]] = {}
    for path in subject.package.modules:
        ran = subject.lines.get(path, frozenset())
        for mutation in find_mutations(path, subject.package.files[path]):
            if mutation.line in ran or mutation.statement_line in ran:
                functions.setdefault((path, mutation.function), []).append(mutation)
    queues = list(functions.values())
    rng.shuffle(queues)
    turns = itertools.zip_longest(*(_mixed(queue, rng) for queue in queues))
    return [mutation for turn in turns for mutation in turn if mutation is not None]


def _mixed(mutations: list[Mutation], rng: Random) -> list[Mutation]:
    """In an order in which kinds take turns."""
    rng.shuffle(mutations)
    kinds: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        kinds.setdefault(mutation.kind, []).append(mutation)
    turns = itertools.zip_longest(*kinds.values())
    return [mutation for turn in turns for mutation in turn if mutation is not None]


async def make_tasks(
    subject: Subject,
    sandboxes: Sandboxes,
    *,
    num: int,
    seed: int,
    num_jobs: int,
    on_tried: Callable[[Outcome], None],
) -> AsyncIterator[MadeTask]:
    """Up to `num` tasks; fewer where there are no more mutations to try."""
    name = f"{subject.package.name}/{seed}"
    mutations = iter(choose_mutations(subject, Random(name)))
    seen: set[tuple[str, int, tuple[str, ...]]] = set()
    num_made = 0
    while num_made < num and (batch := list(itertools.islice(mutations, num_jobs))):
        async with asyncio.TaskGroup() as group:
            trials = [
                group.create_task(_try(subject, sandboxes, mutation, f"{name}/{mutation}"))
                for mutation in batch
            ]
        for trial in trials:
            outcome, task = trial.result()
            if task is not None:
                key = (task.mutation.path, task.mutation.line, task.fail_to_pass)
                if key in seen:
                    outcome = Outcome.REPEATED
                elif num_made < num:
                    num_made += 1
                    seen.add(key)
                    yield task
                else:
                    break
            on_tried(outcome)


async def _try(
    subject: Subject, sandboxes: Sandboxes, mutation: Mutation, seed: str
) -> tuple[Outcome, MadeTask | None]:
    """Runs the tests on one mutant. One that takes its sandbox down is none to keep."""
    try:
        return await _run_mutant(subject, sandboxes, mutation, seed)
    except SandboxError:
        return Outcome.LOST, None


async def _run_mutant(
    subject: Subject, sandboxes: Sandboxes, mutation: Mutation, seed: str
) -> tuple[Outcome, MadeTask | None]:
    package = subject.package
    if not fix_patch(package, mutation):
        return Outcome.UNTOLD, None
    tree = visible_tree(package, mutation, subject.tests)
    failing: list[str] = []
    for run in range(NUM_RUNS):
        results = await run_graded(sandboxes, tree, subject.hidden, subject.tests, subject.seconds)
        if len(results) != len(subject.tests):
            return Outcome.SLOW, None
        found = [name for name, why in results.items() if why]
        if run and found != failing:
            return Outcome.FLAKY, None
        failing = found
        if not failing:
            return Outcome.SURVIVED, None
        if len(failing) == len(subject.tests):
            return Outcome.BROKEN, None
        tree = visible_tree(package, mutation, failing)
    probe = await run_probe(sandboxes, tree, subject.files, names=failing, modules=subject.modules)
    if probe is None or probe.unimportable:
        return Outcome.BROKEN, None
    failures = probe.failures
    if mutation.kind == "default":  # the signature would show it
        failures = {
            name: {key: text for key, text in failure.items() if key != "signature"}
            for name, failure in failures.items()
        }
    issue = write_issue(failures, Random(seed))
    if not issue:
        return Outcome.UNTOLD, None
    return Outcome.KEPT, MadeTask(
        package=package,
        mutation=mutation,
        issue=issue,
        fail_to_pass=tuple(sorted(failing)),
        pass_to_pass=tuple(sorted(set(subject.tests) - set(failing))),
    )


def count(outcomes: Counter[Outcome]) -> str:
    """What became of the mutations, for people."""
    return ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in Outcome if outcomes[outcome])


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
