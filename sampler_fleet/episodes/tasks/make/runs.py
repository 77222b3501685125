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

from sampler_fleet.episodes.base import Sandboxes
from sampler_fleet.episodes.grading import RUN_TESTS, read_report, top_level_modules, tree_bytes
from sampler_fleet.episodes.standalone import standalone
from sampler_fleet.episodes.tasks.make.hidden import HiddenFile
from sampler_fleet.episodes.wire import decode, encode

_PYTHON = "exec python3 -I -S -B -c "
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
            RUN_TESTS, timeout_s=seconds + _GRACE_S, stdin=payload, max_output=_MAX_OUTPUT
        )
    found, _ = read_report(result.output, nonce, names)
    return {
        name: "" if status == "passed" else why
        for name, status, why in found
        if not why[1:].startswith("Lost:")
    }


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
