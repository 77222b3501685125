"""What an issue of a made task says: one failing test as a user of the package would meet it.

Owns its sentences. It tells what was seen and what was expected, the steps before it, and how the
called function is declared; never where the fault is. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

_SENTENCES: Mapping[str, tuple[str, ...]] = {
    "differs": (
        "{call} gives {observed}, expected {expected}.",
        "{call} should give {expected}, but it gives {observed}.",
        "I expected {expected} from {call} and got {observed}.",
    ),
    "raised": (
        "{call} raises {observed}.",
        "{call} fails with {observed}.",
        "There is an unexpected error in {call}: {observed}.",
    ),
    "other error": (
        "{call} raises {observed} instead of {expected}.",
        "I expected {expected} from {call}, but it is {observed}.",
    ),
    "no error": (
        "{call} should raise {expected}, but nothing is raised.",
        "I expected {expected} from {call}, but there is no error.",
    ),
    "false": (
        "{call} should hold, but it doesn't.",
        "I expected that {call}, but that's not so.",
    ),
}
_SHOULD_GIVE = " It should give {expected}."
_STEPS = (
    "After\n\n```python\n{steps}\n```\n\n",
    "I do this:\n\n```python\n{steps}\n```\n\nThen ",
)
_MAX_STEPS = 15  # lines
_MAX_LENGTH = 1500  # characters of all that is quoted


def write_issue(failures: Mapping[str, Mapping[str, str]], rng: Random) -> str:
    """The issue for failed tests as `probe.py` describes them: the shortest is told.

    "" if none of them can be told.
    """
    tellable = [failure for _, failure in sorted(failures.items()) if _can_tell(failure)]
    if not tellable:
        return ""
    failure = min(tellable, key=_length)
    words = {name: _code(failure.get(name, "")) for name in ("call", "observed", "expected")}
    if failure["kind"] == "no error":
        words["expected"] = failure["expected"]
    text = rng.choice(_SENTENCES[failure["kind"]]).format(**words)
    if failure["kind"] == "raised" and "expected" in failure:
        text += _SHOULD_GIVE.format(**words)
    if failure.get("steps"):
        text = rng.choice(_STEPS).format(steps=failure["steps"]) + text
    if "signature" in failure:
        text += f"\n\nThe function is `{failure['function']}`, `{failure['signature']}`"
        text += f": {failure['doc']}" if failure["doc"] else "."
    return text


def _can_tell(failure: Mapping[str, str]) -> bool:
    code = failure.get("call", "") + failure.get("steps", "")
    return (
        failure.get("kind") in _SENTENCES
        and "self." not in code  # what only the test has
        and failure.get("steps", "").count("\n") < _MAX_STEPS
        and _length(failure) <= _MAX_LENGTH
    )


def _length(failure: Mapping[str, str]) -> int:
    return sum(len(failure.get(name, "")) for name in ("call", "observed", "expected", "steps"))


def _code(text: str) -> str:
    """Quoted code, in a block of its own where it has several lines."""
    return f"`{text}`" if "\n" not in text and "`" not in text else f"\n\n```\n{text}\n```\n\n"
