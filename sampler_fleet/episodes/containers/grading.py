"""Grading of tasks in images: a fresh container, the screened patch, the hidden tests, a verdict.

Owns the order of these steps and how each kind of judge reads a result. The policy's container is
never graded in. The tests run in the same container as the code under test, with the data set's
own command: code that is imported by tests could forge what they print, which `grading.py` rules
out for trees and nobody can for a data set's harness. Must not know runtimes.
"""

from __future__ import annotations

import io
import json
import math
import re
import tarfile
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from sampler_fleet.episodes.base import (
    Checkout,
    ExecResult,
    Judge,
    Sandbox,
    SandboxError,
    Sandboxes,
    Task,
)
from sampler_fleet.episodes.containers.base import Container
from sampler_fleet.episodes.containers.checkout import run_step
from sampler_fleet.episodes.containers.pool import ContainerPool
from sampler_fleet.episodes.grading import Grader, GradingLimits, Verdict
from sampler_fleet.episodes.patch import Patch, screen

_STEP_S = 300.0
_MAX_LOG = 8 << 20
_APPLY = "git -c safe.directory='*' apply --whitespace=nowarn -"
_NEW_FILE = re.compile(r"^(?:---|\+\+\+) [ab]/(.+?)\t?$", re.MULTILINE)
_RESULTS = "/tmp/output.json"  # of the parser of SWE-bench Pro
_REWARD = "/logs/verifier/reward"
_READ_REWARD = f"cat {_REWARD}.json 2>/dev/null || cat {_REWARD}.txt"
_STATUS = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class GraderByTask(Grader):
    """Grades tasks with a checkout in containers of its own, and others as `Grader`.

    `sandboxes` are for the others; None: there are no others.
    """

    def __init__(
        self,
        sandboxes: Sandboxes | None,
        limits: GradingLimits | None = None,
        *,
        containers: ContainerPool,
    ) -> None:
        super().__init__(sandboxes or _NoSandboxes(), limits)
        self._containers = containers

    async def grade(self, task: Task, patch: Patch) -> Verdict:
        """Runs the hidden tests on the task's tree after `patch`, or says why it need not.

        Raises:
            SandboxError: the infrastructure failed; grading again may succeed.
        """
        if task.checkout is None:
            return await super().grade(task, patch)
        checkout = task.checkout
        screened = screen(patch, {}, protected=_test_paths(checkout))
        if screened.refused:
            return Verdict(passed=False, reason=f"patch refused: {screened.refused}")
        if not screened.patch:
            return Verdict(passed=False, reason="nothing changed")
        async with self._containers.open(checkout, hidden=False) as container:
            try:
                await _apply(container, screened.patch)
            except OSError as error:
                return Verdict(passed=False, reason=f"the patch does not fit the tree: {error}")
            return await self._examine(task, container)

    async def grade_fix(self, task: Task) -> Verdict:
        """Runs the hidden tests after the reference solution. Raises as `grade`."""
        if task.checkout is None:
            return await super().grade_fix(task)
        checkout = task.checkout
        async with self._containers.open(checkout, hidden=False) as container:
            if checkout.fix_patch:
                fix = checkout.fix_patch.encode("utf-8", "surrogateescape")
                result = await container.exec(_APPLY, timeout_s=_STEP_S, stdin=fix)
            else:
                result = await container.exec(checkout.fix_script, timeout_s=_STEP_S)
            if result.returncode:
                words = " ".join(result.output.split())[-300:]
                return Verdict(passed=False, reason=f"it does not fit the tree: {words}")
            return await self._examine(task, container)

    async def _examine(self, task: Task, container: Container) -> Verdict:
        checkout = _checkout(task)
        if checkout.test_patch:
            # Files that the tests bring are new or as the image has them: the screen saw to that.
            tests = checkout.test_patch.encode("utf-8", "surrogateescape")
            await run_step(container, "the tests' patch", _APPLY, _STEP_S, tests)
        files = _tar(checkout.test_files)
        place = "rm -rf /logs/verifier && mkdir -p /tests /logs/verifier && tar -xf - -C /tests"
        await run_step(container, "copying the tests", place, _STEP_S, files)
        result = await container.exec(
            checkout.test_command,
            timeout_s=task.test_seconds or self._containers.limits.test_seconds,
            max_output=_MAX_LOG,
        )
        if result.timed_out:
            return Verdict(passed=False, reason="the tests took too long")
        return await _JUDGES[checkout.judge](task, container, result)


class _NoSandboxes(Sandboxes):
    def open(self, tree: Mapping[str, bytes]) -> AbstractAsyncContextManager[Sandbox]:
        raise AssertionError("only tasks with a checkout were to be graded")


async def _apply(container: Container, patch: Patch) -> None:
    """OSError: a file can't be where the patch has it."""
    for path, data in patch.changed.items():
        await container.write(path, data)
    if patch.deleted:
        names = b"".join(path.encode() + b"\0" for path in patch.deleted)
        remove = "xargs -0 rm -f --"  # of screened names: below the tree
        await run_step(container, "removing files", remove, _STEP_S, names)


async def _by_exit_status(task: Task, container: Container, result: ExecResult) -> Verdict:
    passed = result.returncode == 0
    return Verdict(passed=passed, reason=f"the tests ended with status {result.returncode}")


async def _by_reward_file(task: Task, container: Container, result: ExecResult) -> Verdict:
    found = await container.exec(_READ_REWARD, timeout_s=_STEP_S)
    reward = parse_reward(found.output) if found.returncode == 0 else None
    if reward is None:
        raise SandboxError(f"no reward in {_REWARD}.txt: {result.output.strip()[-300:]!r}")
    return Verdict(passed=reward >= 1, reason=f"the tests gave {reward:g}")


async def _by_tests(task: Task, container: Container, result: ExecResult) -> Verdict:
    found = await container.exec(f"cat {_RESULTS}", timeout_s=_STEP_S, max_output=_MAX_LOG)
    passed = parse_results(found.output) if found.returncode == 0 else None
    if passed is None:
        return Verdict(passed=False, reason=f"the tests left no {_RESULTS}")
    wanted = {*task.fail_to_pass, *task.pass_to_pass}
    if missing := sorted(wanted - passed):
        return Verdict(passed=False, reason=f"{missing[0]} did not pass")
    return Verdict(passed=bool(wanted), reason=f"{len(wanted)} tests passed")


async def _by_statuses(task: Task, container: Container, result: ExecResult) -> Verdict:
    expected, found = _checkout(task).expected, parse_statuses(result.output)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            has = f"{found.get(name, 'missing')}, not {expected.get(name, 'there')}"
            return Verdict(passed=False, reason=f"{name} is {has}")
    return Verdict(passed=bool(expected), reason=f"{len(found)} tests as expected")


_JUDGES = {
    Judge.EXIT_STATUS: _by_exit_status,
    Judge.REWARD_FILE: _by_reward_file,
    Judge.TESTS: _by_tests,
    Judge.STATUSES: _by_statuses,
}


def parse_reward(text: str) -> float | None:
    """The number of reward.txt, or that under "reward" in reward.json; None if it has none."""
    try:
        value = json.loads(text)
        reward = float(value["reward"] if isinstance(value, dict) else value)
    except (ValueError, TypeError, KeyError):
        return None
    return reward if math.isfinite(reward) else None


def parse_results(text: str) -> set[str] | None:
    """Names of tests that passed, of {"tests": [{"name", "status"}]}; None if it isn't that."""
    try:
        tests = json.loads(text)["tests"]
        return {test["name"] for test in tests if test["status"] == "PASSED"}
    except (ValueError, TypeError, KeyError):
        return None


def parse_statuses(log: str) -> dict[str, str]:
    """Status by test, of pytest's short summary; a test is named by what follows its file."""
    _, _, summary = _COLOUR.sub("", log).rpartition("short test summary info")
    found = {}
    for line in summary.splitlines():
        if match := _STATUS.match(line.strip()):
            status, rest = match.groups()
            name = ".".join(rest.split("::")[1:]).split(" - ")[0]
            if name:
                found[name] = status
    return found


def _checkout(task: Task) -> Checkout:
    assert task.checkout is not None
    return task.checkout


def _test_paths(checkout: Checkout) -> set[str]:
    """Files that the hidden tests bring or change: what a patch has of them doesn't count."""
    return set(_NEW_FILE.findall(checkout.test_patch))


def _tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
