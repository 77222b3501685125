"""Grading: does a fresh copy of the tree with the submitted patch pass the hidden tests?

Owns the verdict. It trusts nothing that the policy could write: the patch is screened again, the
tree is pristine, the tests never touch its disk, and the trusted runner (`graderun.py`) keeps the
policy's code in another process. Must not know how a sandbox isolates.

A verdict takes a report of exactly the expected tests, each line marked with a nonce that only the
runner has read, and a canary: a test that compares something of the policy's with a random text and
must fail. Whatever the policy's code breaks after the runner is ready is a reward of 0; a sandbox
that fails, or a runner that never gets ready, is a SandboxError.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from contracts.runfile import Section
from sampler_fleet.episodes.base import SandboxError, Sandboxes, SpentError, Task
from sampler_fleet.episodes.patch import Patch, apply, screen
from sampler_fleet.episodes.standalone import standalone
from sampler_fleet.episodes.wire import encode

_RUNNER = standalone("wire", "peer", "strangers", "remote", "graderun")
RUN_TESTS = f"exec python3 -I -S -B -c {shlex.quote(_RUNNER)}"
_CANARY = """
import {module} as subject
def {function}():
    assert subject.__name__ == {secret!r}
"""
_MAX_REPORT = 1 << 20
_GRACE_S = 10.0  # the runner ends by itself before the sandbox ends it


class GradingLimits(Section):
    """How long hidden tests may take, of tasks that don't say it themselves."""

    seconds: float = Field(default=20.0, gt=0, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    passed: bool
    reason: str


class Grader:
    """Grades in sandboxes of its own; any number at once, as far as the pool has them."""

    def __init__(self, sandboxes: Sandboxes, limits: GradingLimits | None = None) -> None:
        self._sandboxes = sandboxes
        self._limits = limits or GradingLimits()

    async def grade(self, task: Task, patch: Patch) -> Verdict:
        """Runs the hidden tests on the task's tree after `patch`, or says why it need not.

        Raises:
            SandboxError: the infrastructure failed; grading again may succeed.
        """
        start = tree_bytes(task.tree)
        screened = screen(patch, start, protected=task.hidden_tests)
        if screened.refused:
            return Verdict(passed=False, reason=f"patch refused: {screened.refused}")
        if not screened.patch:
            return Verdict(passed=False, reason="nothing changed")
        exam = _Exam.of(task)
        seconds = task.test_seconds or self._limits.seconds
        try:
            async with self._sandboxes.open(apply(start, screened.patch)) as sandbox:
                result = await sandbox.exec(
                    RUN_TESTS,
                    timeout_s=seconds + _GRACE_S,
                    stdin=exam.payload(seconds),
                    max_output=_MAX_REPORT,
                )
        except SpentError as error:  # what is graded did that
            return Verdict(passed=False, reason=str(error))
        return exam.judge(result.output)

    async def grade_fix(self, task: Task) -> Verdict:
        """Grades the reference solution. Raises as `grade`."""
        solution = Patch(changed=tree_bytes(task.fix), deleted=task.fix_deletes)
        return await self.grade(task, solution)


@dataclass(frozen=True, kw_only=True)
class _Exam:
    """One run of the hidden tests: its secrets and what its report must say."""

    nonce: str
    canary: str
    modules: tuple[str, ...]  # top-level modules of the pristine tree
    sources: dict[str, str]
    names: tuple[str, ...]

    @staticmethod
    def of(task: Task) -> _Exam:
        nonce, secret = secrets.token_hex(16), secrets.token_hex(16)
        modules = top_level_modules(task.tree)
        file, function = f"canary_{secret[:8]}.py", f"test_{secret[8:]}"
        source = _CANARY.format(module=modules[0], function=function, secret=secret)
        names = sorted({*task.fail_to_pass, *task.pass_to_pass})
        canary = f"{file}::{function}"
        names.insert(secrets.randbelow(len(names) + 1), canary)
        return _Exam(
            nonce=nonce,
            canary=canary,
            modules=modules,
            sources={**task.hidden_tests, file: source},
            names=tuple(names),
        )

    def payload(self, seconds: float) -> bytes:
        return encode((self.nonce, self.modules, self.sources, self.names, seconds))

    def judge(self, report: str) -> Verdict:
        """The verdict of a report; lines without the nonce count for nothing."""
        found, is_whole = read_report(report, self.nonce, self.names)
        if not is_whole:
            return Verdict(passed=False, reason="the test runner was stopped")
        results = {name: (status, why) for name, status, why in found}
        if len(found) != len(self.names) or results.keys() != set(self.names):
            return Verdict(passed=False, reason="the report has other tests than were asked for")
        if results.pop(self.canary)[0] != "failed":
            return Verdict(passed=False, reason="a test that must fail did not")
        for name, (status, why) in results.items():
            if status != "passed":
                return Verdict(passed=False, reason=f"{name}: {why}")
        return Verdict(passed=True, reason=f"{len(results)} tests passed")


def read_report(
    report: str, nonce: str, names: Sequence[str]
) -> tuple[list[tuple[str, str, str]], bool]:
    """(name, status, why) of each test in what the runner wrote, and whether it came to its end.

    `names` are those that it was given. Raises SandboxError: it never got ready.
    """
    mark = f"{nonce} "
    lines = [line.removeprefix(mark) for line in report.splitlines() if line.startswith(mark)]
    if not lines or lines[0] != "ready":
        raise SandboxError(f"the test runner did not start: {report[-500:].strip()!r}")
    is_whole = lines[-1] == "done"
    results = []
    for line in lines[1:-1]:  # the last one is the end, or may be cut off
        status, number, why = line.split(" ", 2)
        results.append((names[int(number)], status, why))
    return results, is_whole


def top_level_modules(tree: Collection[str]) -> tuple[str, ...]:
    """Names that Python can import from the root of a tree, sorted."""
    names = {
        first.removesuffix(".py")
        for first in (path.split("/")[0] for path in tree if path.endswith(".py"))
    }
    return tuple(sorted(name for name in names if name.isidentifier()))


def tree_bytes(tree: Mapping[str, str]) -> dict[str, bytes]:
    """A task's tree as sandboxes take it."""
    return {path: text.encode("utf-8", "surrogateescape") for path, text in tree.items()}
