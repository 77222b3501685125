"""The scrub as a program of its own inside a container: a request as its argument, a report out.

Owns nothing but that. `ship.py` makes the program. Standard library of Python 3.9, and git.
"""

from __future__ import annotations

import json
import os
import sys

from sampler_fleet.episodes.scrub.audit import Audit
from sampler_fleet.episodes.scrub.clean import scrub
from sampler_fleet.episodes.scrub.findings import Refused, Target


def main() -> int:
    """Status 0: nothing is left; 1: leaks are; 2: bad input. The last line printed is JSON."""
    request = json.loads(sys.argv[1])
    environment = dict(os.environ)
    try:
        target = Target(
            request["root"],
            request["patch"],
            tuple(request["extra_roots"]),
            tuple(request["words"]),
        )
        if request["audit_only"]:
            report = Audit(target).run(environment=environment, network=request["network"])
        else:
            report = scrub(target, environment=environment, network=request["network"])
    except (Refused, OSError) as error:
        found = ("the container", "a tree that can be cleaned", str(error))
        if isinstance(error, Refused):
            found = (error.rule, error.expected, error.found)
        sys.stdout.write(f"{json.dumps({'refused': found})}\n")
        return 2
    sys.stdout.write(f"{json.dumps(report.to_dict())}\n")
    return 0 if report.clean else 1
