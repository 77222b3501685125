"""The ports of an episode: where tokens come from and where commands run.

Owns the interfaces and the task record. Implementations live beside it; the gateway's entry point
names them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
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

    returncode: int  # 124 when timed out
    output: str
    num_bytes: int
    timed_out: bool
    seconds: float


class Sandbox(Protocol):
    """One isolated place with a writable tree at `cwd`. No network."""

    async def start(self, tree: Path) -> None:
        """Copies `tree` in and makes it the working directory."""
        ...

    async def exec(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", max_output: int = 10_000
    ) -> ExecResult:
        """Runs `bash -c command` in a fresh subshell in the working directory."""
        ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def close(self) -> None:
        """Kills everything in it and removes every trace. Safe to call twice."""
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
