"""`python -m sampler_fleet tasks scrub`: cleans the tree of a task, or only looks.

Owns the command's options and what it prints. Imports are inside: this module is loaded with every
command of the package.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.errors import BadInputError, exits_politely

if TYPE_CHECKING:
    from sampler_fleet.episodes.scrub.findings import Leak, Report


@exits_politely
def scrub_command(
    tree: Annotated[Path, typer.Argument(metavar="DIR", help="The working tree of a task.")],
    patch: Annotated[Path, typer.Option(help="The task's gold patch, a unified diff.")],
    root: Annotated[
        list[Path] | None, typer.Option(help="Another directory to clean: a cache, site-packages.")
    ] = None,
    word: Annotated[
        list[str] | None, typer.Option(help="Must be named nowhere: instance id, commit, branch.")
    ] = None,
    audit_only: Annotated[
        bool, typer.Option("--audit-only", help="Looks; changes nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report for machines.")] = False,
    as_script: Annotated[
        bool, typer.Option("--script", help="Prints a script that does it inside a container.")
    ] = False,
) -> int:
    """Takes what gives the answer away out of a task's tree, in place, and proves it.

    Ends with status 1 if leaks are left. Interrupted, it can simply be run again.
    """
    from sampler_fleet.episodes.scrub.audit import Audit
    from sampler_fleet.episodes.scrub.clean import scrub
    from sampler_fleet.episodes.scrub.findings import Refused, Target
    from sampler_fleet.episodes.scrub.ship import script

    text = _read(patch)
    target = Target(str(tree), text, tuple(map(str, root or ())), tuple(word or ()))
    if as_script:
        sys.stdout.write(script(target, audit_only=audit_only))
        return 0
    try:
        report = Audit(target).run() if audit_only else scrub(target)
    except Refused as error:
        raise BadInputError(error.rule, expected=error.expected, found=error.found) from error
    sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n" if as_json else describe(report))
    return 0 if report.clean else 1


def _read(patch: Path) -> str:
    try:
        return patch.read_text()
    except UnicodeDecodeError as error:
        raise BadInputError(str(patch), expected="a unified diff in UTF-8", found=error) from error


def describe(report: Report) -> str:
    """A report for people."""
    looked_at = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in report.looked_at.items())
    lines = [f"looked at {looked_at}"]
    if report.commit:
        counts = Counter(leak.kind for leak in report.removed)
        told = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
        lines += [f"cleaned {told or 'nothing'}", f"commit {report.commit}"]
    lines += [_line("doubtful", leak) for leak in report.doubtful]
    lines += [_line("LEAK", leak) for leak in report.leaks]
    lines.append(f"{len(report.leaks)} leaks {'left' if report.commit else 'found'}")
    return "\n".join(lines) + "\n"


def _line(label: str, leak: Leak) -> str:
    member = f"!{leak.member}" if leak.member else ""
    detail = f" ({leak.detail})" if leak.detail else ""
    text = f"{label} {leak.kind}: {leak.path}{member}{detail}"
    return text.encode("ascii", "backslashreplace").decode()
