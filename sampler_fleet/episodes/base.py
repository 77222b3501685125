"""The ports of an episode: where tokens come from and where commands run.

Owns the interfaces and the task record. Implementations live beside it; the gateway's entry point
names them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from contracts.types import Completion, GenerateRequest

Environment = Literal["code", "grid"]  # of generated tasks


class Generator(Protocol):
    """Where replies come from: the gateway's router, or a fake."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedChunk]:
        """Streams checked chunks, the last with a finish_reason; survives the loss of a sampler.

        Raises:
            RetryError: no sampler could finish it.
        """
        ...

    async def end_session(self, session_id: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class GeneratedChunk:
    """A chunk and who made it."""

    completion: Completion
    group: str
    sampler_id: str


class SandboxError(RuntimeError):
    """The sandbox failed, not the command in it: infrastructure, never a reward."""


class SpentError(SandboxError):
    """Its commands used up what the sandbox itself needs: their doing, so a reward of 0."""


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """What a command did. A timeout is an observation, not an error.

    `output` is stdout and stderr together, cut inside the sandbox to its head and tail;
    `num_bytes` counts what the command wrote.
    """

    returncode: int  # 124 when timed out, 125 when stopped for writing too much
    output: str
    num_bytes: int
    timed_out: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A working tree as it stands. Paths are relative, as the sandbox's bytes decode.

    Of a checkout, `files` and `special` have only what is new or changed since the start.
    """

    files: dict[str, bytes]  # regular files
    special: tuple[str, ...]  # everything else that is no directory: links, pipes, unreadable files
    complete: bool  # False: it is a part of a tree beyond the sandbox's limits, or unreadable
    deleted: tuple[str, ...] = ()  # of a checkout: files that are gone since the start


class Sandbox(Protocol):
    """One isolated place with a writable tree at `cwd`. No network.

    Every method but `close` raises SandboxError when the sandbox itself fails, and SpentError where
    commands are known to have brought that about.
    """

    async def start(self, tree: Mapping[str, bytes]) -> None:
        """Writes `tree` (relative path to content) and makes it the working directory."""
        ...

    async def exec(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", max_output: int = 10_000
    ) -> ExecResult:
        """Runs `bash -c command` in a fresh subshell in the working directory."""
        ...

    async def read(self, path: str) -> bytes:
        """A regular file of the tree; follows no links. OSError if it can't be read."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """A regular file of the tree; follows no links. OSError if it can't be written."""
        ...

    async def snapshot(self) -> Snapshot:
        """Stops everything that runs inside, then reads the tree; follows no links."""
        ...

    async def close(self) -> None:
        """Kills everything in it and removes every trace. Safe to call twice."""
        ...


class Sandboxes(Protocol):
    """Where sandboxes come from."""

    def open(self, tree: Mapping[str, bytes]) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh started sandbox, closed at the end; waits while too many are open.

        Raises:
            SandboxError: none could be started.
        """
        ...


class Judge(StrEnum):
    """What decides whether a task in a container image is solved."""

    WITNESS = "witness"  # fail_to_pass and pass_to_pass pass, as seen in pytest or unittest itself
    LOG = "log"  # they pass by what SymPy's own runner prints; the command ends with test files
    TESTS = "tests"  # they pass by what the data set's own parser writes to a file
    STATUSES = "statuses"  # every test ends exactly as `expected` says
    EXIT_STATUS = "exit status"  # that of the test command is 0
    REWARD_FILE = "reward file"  # the test command writes it below /logs/verifier


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A repository at its base commit inside a container image, and how it is tested there.

    Patches are unified diffs against the base commit. `test_files` are put into /tests when the
    episode is over. An empty `test_command` is known to the data set's own harness, by `repo` and
    `version`.
    """

    image: str  # as a registry names it; "": to be built in build_dir
    build_dir: str = ""  # with a Dockerfile
    workdir: str = ""  # "": the image's own
    repo: str = ""
    version: str = ""
    base_commit: str = "HEAD"
    setup: str = ""  # bash, run before anybody works in it
    hidden_paths: tuple[str, ...] = ()  # of the image, which the policy must not see
    fix_patch: str = ""
    fix_script: str = ""  # bash, where the reference solution is no patch
    test_patch: str = ""
    test_files: dict[str, bytes] = field(default_factory=dict)
    test_command: str = ""  # bash
    may_use_network: bool = False  # the test command, which has none here
    judge: Judge = Judge.TESTS
    expected: dict[str, str] = field(default_factory=dict)  # test to status
    episode_seconds: float | None = None  # None: as the run says


@dataclass(frozen=True, kw_only=True)
class Task:
    """One coding task: a faulty tree, an issue, and hidden tests the policy never sees.

    `tree` maps relative paths to file contents as the policy gets them; bytes that are no UTF-8
    are escaped as surrogates. `hidden_tests` are run by the grader after the submitted patch was
    applied to a fresh copy; `fail_to_pass` fail before the fix, `pass_to_pass` pass both times.
    `fix` is the reference solution: path to fixed content, and `fix_deletes` what it removes.

    With a `checkout` the repository and its tests are in a container image instead: `tree`,
    `hidden_tests` and `fix` are empty. In the environment of a grid there is no
    code at all (`grid.py`).
    """

    task_id: str  # of a data set: its instance id
    split: str  # train or heldout; "" if nobody has decided
    template: str  # tasks of one template never straddle the splits
    issue: str
    tree: dict[str, str] = field(default_factory=dict)
    hidden_tests: dict[str, str] = field(default_factory=dict)
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    fix: dict[str, str] = field(default_factory=dict)
    fix_deletes: tuple[str, ...] = ()
    checkout: Checkout | None = None
    environment: Environment = "code"
    test_seconds: float | None = None  # None: as the run says
    dataset: str = ""
    language: str = "python"  # "": unknown
    license: str = ""  # "": unknown
