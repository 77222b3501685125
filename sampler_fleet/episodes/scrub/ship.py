"""The scrub in a container or sandbox, where the trees of real tasks are.

Owns the one self-contained script and reading its report. It needs Python 3.9 and git inside, and
nothing else; the script goes in as the interpreter's input, so that its size has no limit.
"""

from __future__ import annotations

import json

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Sandbox
from sampler_fleet.episodes.scrub.findings import Report, Target
from sampler_fleet.episodes.standalone import standalone

COMMAND = "exec python3 -I -S -B -"  # runs a script that is its input
_MODULES = (
    *("findings", "policy", "gold", "archives", "packages", "repository", "surroundings"),
    *("audit", "clean", "program"),
)
_MAX_REPORT = 16 << 20


def script(target: Target, *, audit_only: bool = False, network: bool = True) -> str:
    """The program with its request in it. `target` has paths as they are inside.

    `network`: it must not be reachable, so public addresses are tried.
    """
    request = json.dumps({**vars(target), "audit_only": audit_only, "network": network})
    program = standalone(*(f"scrub.{name}" for name in _MODULES))
    return f"import sys\nsys.argv[1:] = [{request!r}]\n{program}"


async def scrub_inside(
    sandbox: Sandbox, target: Target, *, audit_only: bool = False, timeout_s: float = 600.0
) -> Report:
    """Cleans a tree in a running sandbox; the network and the environment are those inside.

    Raises:
        BadInputError: bad input, or no Python or git inside; nothing was changed.
        SandboxError: the sandbox failed.
    """
    program = script(target, audit_only=audit_only).encode()
    result = await sandbox.exec(COMMAND, timeout_s=timeout_s, stdin=program, max_output=_MAX_REPORT)
    lines = result.output.strip().split("\n")
    try:
        answer = json.loads(lines[-1])
    except ValueError:
        raise BadInputError(
            "the container", expected="Python 3.9 or later, and git", found=lines[-1]
        ) from None
    if "refused" in answer:
        rule, expected, found = answer["refused"]
        raise BadInputError(rule, expected=expected, found=found)
    return Report.from_dict(answer)
