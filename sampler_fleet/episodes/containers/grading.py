"""Grading of tasks in images: a fresh container, the screened patch, the hidden tests, a verdict.

Owns the order of these steps and how each kind of judge comes to a verdict. The policy's container
is never graded in, and what could steer a test run never gets into the tree that is. Tests and the
code under test share a container and mostly a process, which `grading.py` avoids for trees: a
witness in that process (`witness.py`) and a canary make forging hard; docs/tasks.md says what is
left. Must not know runtimes.
"""

from __future__ import annotations

import io
import logging
import re
import secrets
import shlex
import sys
import tarfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from sampler_fleet.episodes.base import (
    Checkout,
    Judge,
    Sandbox,
    SandboxError,
    Sandboxes,
    Task,
)
from sampler_fleet.episodes.containers import testimony
from sampler_fleet.episodes.containers.base import Container
from sampler_fleet.episodes.containers.checkout import run_step
from sampler_fleet.episodes.containers.pool import ContainerPool
from sampler_fleet.episodes.containers.results import (
    parse_pytest,
    parse_results,
    parse_reward,
    parse_sympy,
)
from sampler_fleet.episodes.grading import Grader, GradingLimits, Verdict
from sampler_fleet.episodes.grid import grade_walk
from sampler_fleet.episodes.patch import Patch, screen
from sampler_fleet.episodes.supervised import GRACE_S, encode_path

_log = logging.getLogger(__name__)

_STEP_S = 300.0
_MAX_LOG = 8 << 20
_APPLY = "git -c safe.directory='*' apply --whitespace=nowarn"
_NEW_FILE = re.compile(r"^(?:---|\+\+\+) [ab]/(.+?)\t?$", re.MULTILINE)
_RESULTS = "/tmp/output.json"  # of the parser of SWE-bench Pro
_REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
# First of a test command: what it leaves behind is its own.
_CLEAR = f"rm -rf /logs/verifier {_RESULTS}; mkdir -p /logs/verifier || exit 1\n"
# Never from a submission, even where the reference solution changes it too.
_STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py"),
    *("*.pth", "*.pyc", "*.pyo", "pyvenv.cfg"),
)
_STEERING_FOLDERS = ("*.dist-info", "*.egg-info", "__pycache__", ".pytest_cache")
# What pytest imports: new at the root of the tree it would be imported from there.
_SHADOWS = sys.stdlib_module_names | {
    *("pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "pygments", "attr", "attrs"),
    *("exceptiongroup", "tomli", "toml", "more_itertools", "six", "wcwidth", "atomicwrites"),
    *("xdist", "execnet", "importlib_metadata", "zipp", "typing_extensions"),
}
_SYMPY_RUNNER = ("bin/", "sympy/testing/", "sympy/utilities/runtests.py")  # part of the tree
_NOTEWORTHY = re.compile(
    rb"_pytest|TestReport|PYTEST_CURRENT_TEST|\bos\._exit|\bsys\._getframe|\binspect\.(?:stack|current)"
    rb"|\bgc\.get_|\batexit\b|/proc/|__eq__\(self, \w+\): return True"
)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What became of a test command; `files` by their paths."""

    returncode: int
    output: str
    files: Mapping[str, str]
    sessions: Sequence[testimony.Session]


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
        if task.environment == "grid":
            return grade_walk(task, patch)
        if task.checkout is None:
            return await super().grade(task, patch)
        checkout = task.checkout
        screened = screen(patch, {}, protected=_test_paths(checkout))
        if screened.refused:
            return Verdict(passed=False, reason=f"patch refused: {screened.refused}")
        counts = _what_counts(checkout, patch, screened.dropped)
        if not counts:
            return Verdict(passed=False, reason="nothing changed")
        async with self._containers.open(checkout, hidden=False) as container:
            try:
                await _apply(container, counts)
            except OSError as error:
                return Verdict(passed=False, reason=f"the patch does not fit the tree: {error}")
            changed = {*counts.changed, *counts.deleted}
            verdict = await self._examine(task, container, changed)
        if verdict.passed and (words := _noteworthy(counts)):
            _log.warning("%s: rewarded, and worth a look for %s", task.task_id, words)
        return verdict

    async def grade_fix(self, task: Task) -> Verdict:
        """Runs the hidden tests after the reference solution, without what no submission may
        change. Raises as `grade`."""
        if task.checkout is None:
            return await super().grade_fix(task)
        checkout = task.checkout
        async with self._containers.open(checkout, hidden=False) as container:
            if checkout.fix_patch:
                fix = checkout.fix_patch.encode("utf-8", "surrogateescape")
                left_out = "".join(
                    f" --exclude={shlex.quote(path)}"
                    for path in sorted(_paths(checkout.fix_patch))
                    if _steers(path)
                )
                apply = f"{_APPLY}{left_out} -"
                result = await container.exec(apply, timeout_s=_STEP_S, stdin=fix)
            else:
                result = await container.exec(checkout.fix_script, timeout_s=_STEP_S)
            if result.returncode:
                words = " ".join(result.output.split())[-300:]
                return Verdict(passed=False, reason=f"it does not fit the tree: {words}")
            return await self._examine(task, container, _paths(checkout.fix_patch))

    async def _examine(self, task: Task, container: Container, changed: Collection[str]) -> Verdict:
        checkout = _checkout(task)
        if checkout.test_patch:
            # Files that the tests bring are new or as the image has them: the screen saw to that.
            tests = checkout.test_patch.encode("utf-8", "surrogateescape")
            await run_step(container, "the tests' patch", f"{_APPLY} -", _STEP_S, tests)
        place = "mkdir -p /tests && tar -xf - -C /tests"
        await run_step(container, "copying the tests", place, _STEP_S, _tar(checkout.test_files))
        seconds = task.test_seconds or self._containers.limits.test_seconds
        command, must_fail = checkout.test_command, ""
        if checkout.judge == Judge.LOG:
            file, must_fail = await _add_canary(container, command)
            command = f"{command} {shlex.quote(file)}"
        run = await _run(container, command, seconds, changed)
        if isinstance(run, Verdict):
            return run
        if must_fail:
            return _by_log(task, run, must_fail)
        return _JUDGES[checkout.judge](task, run)


class _NoSandboxes(Sandboxes):
    def open(self, tree: Mapping[str, bytes]) -> AbstractAsyncContextManager[Sandbox]:
        raise AssertionError("only tasks with a checkout were to be graded")


async def _apply(container: Container, patch: Patch) -> None:
    """OSError: a file can't be where the patch has it."""
    there = (await run_step(container, "ls", "ls -a", _STEP_S)).split("\n")
    for path, data in patch.changed.items():
        root = path.split("/")[0]
        if root in there or root.split(".")[0] not in _SHADOWS:
            await container.write(path, data)
    if patch.deleted:
        names = b"".join(path.encode() + b"\0" for path in patch.deleted)
        remove = "xargs -0 rm -f --"  # of screened names: below the tree
        await run_step(container, "removing files", remove, _STEP_S, names)


async def _add_canary(container: Container, command: str) -> tuple[str, str]:
    """(file, test) that must fail, beside the last file of a test command."""
    folder = PurePosixPath(shlex.split(command)[-1]).parent
    file, name = (f"test_{secrets.token_hex(6)}" for _ in range(2))
    path = str(folder / f"{file}.py")
    await container.write(path, f"def {name}():\n    assert {name!r} == ''\n".encode())
    return path, name


async def _run(
    container: Container, command: str, seconds: float, changed: Collection[str]
) -> _Run | Verdict:
    """Runs tests with a witness; a verdict if that can't count.

    Raises:
        SandboxError: the container failed.
    """
    keys = testimony.new_keys()
    channel = [keys, *testimony.CHANNEL]
    files = [path.encode() for path in (*_REWARDS, _RESULTS)]
    what = (encode_path(_CLEAR + command), seconds, _MAX_LOG, testimony.WITNESS, channel, files)
    try:
        reply = await container.ask("examine", *what, timeout_s=seconds + GRACE_S)
    except OSError as error:
        raise SandboxError(f"the tests were not started: {error}") from error
    returncode, timed_out, _, output, report, keys_left, found = reply
    if timed_out:
        return Verdict(passed=False, reason="the tests took too long")
    sessions = testimony.read_testimony(report, keys, keys_left)
    if isinstance(sessions, str):
        return Verdict(passed=False, reason=sessions)
    for session in sessions:
        if problem := session.problem(changed):
            return Verdict(passed=False, reason=problem)
    return _Run(
        returncode=returncode,
        output=output.decode("utf-8", "replace"),
        files={path.decode(): data.decode("utf-8", "replace") for path, data in found.items()},
        sessions=sessions,
    )


def _by_witness(task: Task, run: _Run) -> Verdict:
    if len(run.sessions) != 1:
        words = " ".join(run.output.split())[-300:]
        return Verdict(passed=False, reason=f"tests were seen {len(run.sessions)} times: {words}")
    if missing := testimony.first_missing(run.sessions, task.fail_to_pass, task.pass_to_pass):
        return Verdict(passed=False, reason=missing)
    return _passed(task)


def _by_log(task: Task, run: _Run, must_fail: str) -> Verdict:
    found = parse_sympy(run.output)
    canary = found.pop(must_fail, "").replace("ERROR", "FAILED")
    seen = testimony.Session(statuses=found, canary=canary, exit_status=run.returncode)
    if reason := seen.problem(()) or testimony.first_missing(
        [seen], task.fail_to_pass, task.pass_to_pass
    ):
        return Verdict(passed=False, reason=reason)
    return _passed(task)


def _by_exit_status(task: Task, run: _Run) -> Verdict:
    """Where that is pytest's, nothing may have failed, and a test that the task brings passed."""
    if run.returncode == 0 and _failed(run):
        return Verdict(passed=False, reason="tests failed, and the command ended with status 0")
    own = {PurePosixPath(path).name for path in _test_paths(_checkout(task))}
    passed = {
        PurePosixPath(name.partition("::")[0]).name
        for session in run.sessions
        for name, status in session.statuses.items()
        if status == "PASSED"
    }
    if run.sessions and not passed & own:
        return Verdict(passed=False, reason="no test of the task was seen to pass")
    reason = f"the tests ended with status {run.returncode}"
    return Verdict(passed=run.returncode == 0, reason=reason)


def _by_reward_file(task: Task, run: _Run) -> Verdict:
    """Of two files the worse one counts: the tests write one, who knows who wrote the other.

    SandboxError: there is no reward, which is nobody's fault that can be told.
    """
    rewards = [parse_reward(run.files[path]) for path in _REWARDS if path in run.files]
    if not (found := [reward for reward in rewards if reward is not None]):
        raise SandboxError(f"no reward in {_REWARDS[-1]}: {run.output.strip()[-300:]!r}")
    reward = min(found)
    wanted = {*task.fail_to_pass, *task.pass_to_pass}
    if reward >= 1 and (_lies(run, wanted) if wanted else _failed(run)):
        return Verdict(passed=False, reason=f"the tests gave {reward:g}, but failed")
    return Verdict(passed=reward >= 1, reason=f"the tests gave {reward:g}")


def _by_tests(task: Task, run: _Run) -> Verdict:
    passed = parse_results(run.files.get(_RESULTS, ""))
    if passed is None:
        return Verdict(passed=False, reason=f"the tests left no {_RESULTS}")
    wanted = {*task.fail_to_pass, *task.pass_to_pass}
    if missing := sorted(wanted - passed):
        return Verdict(passed=False, reason=f"{missing[0]} did not pass")
    if lies := _lies(run, wanted):
        return Verdict(passed=False, reason=f"{lies[0]} did not pass in pytest")
    return _passed(task)


def _by_statuses(task: Task, run: _Run) -> Verdict:
    expected, found = _checkout(task).expected, parse_pytest(run.output)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            has = f"{found.get(name, 'missing')}, not {expected.get(name, 'there')}"
            return Verdict(passed=False, reason=f"{name} is {has}")
    seen = {
        ".".join(name.split("::")[1:]).split(" - ")[0]
        for session in run.sessions[:1]  # a forger may have had the key of a later one
        for name, status in session.statuses.items()
        if status == "PASSED"
    }
    for name, status in sorted(expected.items()):
        if status == "PASSED" and name not in seen:
            return Verdict(passed=False, reason=f"{name} was not seen to pass")
    return Verdict(passed=bool(expected), reason=f"{len(found)} tests as expected")


def _failed(run: _Run) -> bool:
    """Whether pytest ran, and something failed, whatever came of it."""
    return any(session.exit_status or session.failures() for session in run.sessions)


def _lies(run: _Run, wanted: Collection[str]) -> list[str]:
    """Tests that pytest saw fail, where the names are those of pytest."""
    failures = (session.failures() for session in run.sessions)
    return sorted({name for names in failures for name in names}.intersection(wanted))


def _passed(task: Task) -> Verdict:
    num_tests = len({*task.fail_to_pass, *task.pass_to_pass})
    return Verdict(passed=num_tests > 0, reason=f"{num_tests} tests passed")


_JUDGES = {
    Judge.WITNESS: _by_witness,
    Judge.EXIT_STATUS: _by_exit_status,
    Judge.REWARD_FILE: _by_reward_file,
    Judge.TESTS: _by_tests,
    Judge.STATUSES: _by_statuses,
}


def _what_counts(checkout: Checkout, patch: Patch, dropped: Sequence[str]) -> Patch:
    """The part of a screened patch that goes into the tree.

    The screen drops by name what could steer tests. What of it the reference solution changes is
    source after all (`django/test/client.py`, `setup.cfg`), but never what pytest runs by itself.
    """
    needed = _paths(checkout.fix_patch) - _test_paths(checkout)
    runner = _SYMPY_RUNNER if checkout.judge == Judge.LOG else ()
    paths = (*patch.changed, *patch.deleted)
    out = {path for path in paths if path in dropped or path.startswith(runner)} - needed
    out |= {path for path in paths if _steers(path)}
    return Patch(
        changed={path: data for path, data in patch.changed.items() if path not in out},
        deleted=tuple(path for path in patch.deleted if path not in out),
    )


def _steers(path: str) -> bool:
    *folders, name = path.lower().split("/")
    return any(fnmatchcase(name, pattern) for pattern in _STEERING) or any(
        fnmatchcase(folder, pattern) for folder in folders for pattern in _STEERING_FOLDERS
    )


def _noteworthy(patch: Patch) -> str:
    """Words in a patch that a fix rarely needs and a forger does."""
    found = {
        f"{match.decode(errors='replace')} in {path}"
        for path, data in patch.changed.items()
        for match in _NOTEWORTHY.findall(data)
    }
    return ", ".join(sorted(found))


def _checkout(task: Task) -> Checkout:
    assert task.checkout is not None
    return task.checkout


def _test_paths(checkout: Checkout) -> set[str]:
    """Files that the hidden tests bring or change: what a patch has of them doesn't count."""
    return _paths(checkout.test_patch)


def _paths(diff: str) -> set[str]:
    return set(_NEW_FILE.findall(diff))


def _tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
