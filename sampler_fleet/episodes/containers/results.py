"""What test commands leave behind: logs, and files with results or a reward.

Owns how each is read. Pure. All of it can be written by the code under test, too.
"""

from __future__ import annotations

import json
import math
import re

_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*)$")
_SYMPY = re.compile(r"^(test_\S+) (?:.* )?(ok|F|E|f|X|s)(?:\s+\[(?:OK|FAIL)\])?$")
_SYMPY_STATUS = {
    **{"ok": "PASSED", "F": "FAILED", "E": "ERROR"},
    **{"f": "XFAIL", "X": "XPASS", "s": "SKIPPED"},
}
_SYMPY_FAILURE = re.compile(r"^_+ \S+\.py:(\S+) _+$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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


def parse_pytest(log: str) -> dict[str, str]:
    """Status by test, of the short summary of `pytest -rA`; a test is named by what follows its
    file."""
    _, _, summary = _COLOUR.sub("", log).rpartition("short test summary info")
    found = {}
    for line in summary.splitlines():
        if match := _PYTEST.match(line.strip()):
            status, rest = match.groups()
            name = ".".join(rest.split("::")[1:]).split(" - ")[0]
            if name:
                found[name] = status
    return found


def parse_sympy(log: str) -> dict[str, str]:
    """Status by function, of `bin/test --verbose`. Of a name in two files the worse one counts."""
    found: dict[str, str] = {}
    for line in _COLOUR.sub("", log).splitlines():
        if match := _SYMPY.match(line.strip()):
            name, status = match[1], _SYMPY_STATUS[match[2]]
        elif match := _SYMPY_FAILURE.match(line.strip()):
            name, status = match[1], "FAILED"
        else:
            continue
        if found.get(name, "PASSED") == "PASSED":
            found[name] = status
    return found
