"""The ports of an episode: where tokens come from and where commands run.

Owns the interfaces and the task record. Implementations live beside it; the gateway's entry point
names them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from contracts.types import Completion, GenerateRequest


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
    """A working tree as it stands. Paths are relative, as the sandbox's bytes decode."""

    files: dict[str, bytes]  # regular files
    special: tuple[str, ...]  # everything else that is no directory: links, pipes, unreadable files
    complete: bool  # False: the tree is larger than the sandbox's limits, and this is a part of it


class Sandbox(Protocol):
    """One isolated place with a writable tree at `cwd`. No network.

    Every method but `close` raises SandboxError when the sandbox itself fails.
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """One coding task: a faulty tree, an issue, and hidden tests the policy never sees.

    `tree` maps relative paths to file contents as the policy gets them. `hidden_tests` are run by
    the grader after the submitted patch was applied to a fresh copy; `fail_to_pass` fail before the
    fix, `pass_to_pass` pass both times. `fix` is the reference solution: path to fixed content.
    """

    task_id: str
    split: str  # train or heldout
    template: str  # tasks of one template never straddle the splits
    issue: str
    tree: dict[str, str]
    hidden_tests: dict[str, str]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    fix: dict[str, str] = field(default_factory=dict)
