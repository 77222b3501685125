"""Runs of a package's tests in sandboxes, each in a fresh one.

Owns the two programs' calls: the grader's own runner, whose results decide which tests a task has,
and `probe.py`, which finds and describes them. Must not know mutations.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sampler_fleet.episodes.base import SandboxError, Sandboxes
from sampler_fleet.episodes.grading import top_level_modules, tree_bytes
from sampler_fleet.episodes.standalone import standalone
from sampler_fleet.episodes.tasks.make.hidden import HiddenFile
from sampler_fleet.episodes.wire import decode, encode

_PYTHON = "exec python3 -I -S -B -c "
_RUNNER = _PYTHON + shlex.quote(standalone("wire", "remote", "graderun"))
_PARTS = ("tasks.make.testkit", "tasks.make.describe")
_PROBE = _PYTHON + shlex.quote(standalone("wire", *_PARTS, "tasks.make.probe"))
_MAX_OUTPUT = 8 << 20
_GRACE_S = 10.0
_PROBE_S = 50.0  # tests that are traced are slow; below a sandbox's time on the CPU


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What `probe.py` saw."""

    tests: tuple[str, ...]
    lines: dict[str, frozenset[int]]  # of each file of the package that ran
    unimportable: tuple[str, ...]
    copies: tuple[str, ...]  # modules that the sandboxes' own Python has too
    failures: dict[str, dict[str, str]]


async def run_graded(
    sandboxes: Sandboxes,
    tree: Mapping[str, str],
    hidden: Mapping[str, str],
    names: Sequence[str],
    seconds: float,
) -> dict[str, str]:
    """{test: "" or why it failed}, as grading finds it, of the tests that were done in time.

    They run in the order of their names.

    Raises:
        SandboxError: the infrastructure failed.
    """
    nonce = secrets.token_hex(16)
    names = sorted(names)
    payload = encode((nonce, top_level_modules(tree), dict(hidden), names, seconds))
    async with sandboxes.open(tree_bytes(tree)) as sandbox:
        result = await sandbox.exec(
            _RUNNER, timeout_s=seconds + _GRACE_S, stdin=payload, max_output=_MAX_OUTPUT
        )
    mark = f"{nonce} "
    lines = [line[len(mark) :] for line in result.output.splitlines() if line.startswith(mark)]
    if not lines or lines[0] != "ready":
        raise SandboxError(f"the test runner did not start: {result.output[-500:].strip()!r}")
    results: dict[str, str] = {}
    for line in lines[1:-1]:
        status, name, why = line.split(" ", 2)
        if not why[1:].startswith("Lost:"):
            results[name] = "" if status == "passed" else why
    return results


async def run_probe(
    sandboxes: Sandboxes,
    tree: Mapping[str, str],
    files: Sequence[HiddenFile],
    *,
    names: Sequence[str] | None = None,
    traced: bool = False,
    modules: Sequence[str],
) -> Probe | None:
    """Looks at `names`, or at all tests; None if the probe died or took too long."""
    arguments: tuple[Any, ...] = (
        {file.path: (file.name, file.modules) for file in files},
        None if names is None else list(names),
        traced,
        list(modules),
    )
    async with sandboxes.open(tree_bytes(tree)) as sandbox:
        result = await sandbox.exec(
            _PROBE, timeout_s=_PROBE_S, stdin=encode(arguments), max_output=_MAX_OUTPUT
        )
    _, mark, reply = result.output.rpartition("\nPROBE ")
    if not mark:
        return None
    found = decode(bytes.fromhex(reply.strip()))
    return Probe(
        tests=tuple(found["tests"]),
        lines={path: frozenset(lines) for path, lines in found["lines"].items()},
        unimportable=tuple(found["unimportable"]),
        copies=tuple(found["copies"]),
        failures=found["failures"],
    )
