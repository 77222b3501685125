"""What bash would print: an exact stand-in for the few commands that the scripted expert uses.

Owns the simulation, so that demonstrations need no sandbox. Must not run anything; a command that
it doesn't know is a mistake of the script. Episodes of a policy always run real commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sampler_fleet.episodes.tasks.edit import Edit

_SED = re.compile(r"sed -i '(\d+)s\|([^|]+)\|([^|]*)\|' (\S+)")
_GREP = re.compile(r"grep -n -A(\d+) '(def \w+)' (\S+)")


def run_command(command: str, tree: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a command in a tree (path to content), which `sed -i` changes."""
    edit = _SED.fullmatch(command)
    if edit:
        line, old, new, path = edit.groups()
        tree[path] = Edit(path=path, line=int(line), old=old, new=new).apply(tree[path])
        return 0, ""
    grep = _GREP.fullmatch(command)
    if grep:
        after, text, path = grep.groups()
        return _grep(text, int(after), tree[path].splitlines())
    for prefix, act in _ACTS.items():
        if command.startswith(prefix):
            return act(command.removeprefix(prefix), tree)
    raise ValueError(f"not a command of the script: {command}")


def _echo(text: str, tree: dict[str, str]) -> tuple[int, str]:
    return 0, f"{text}\n"


def _number(path: str, tree: dict[str, str]) -> tuple[int, str]:
    lines = tree[path].splitlines()
    return 0, "".join(f"{number:6d}\t{line}\n" for number, line in enumerate(lines, 1))


def _grep(text: str, after: int, lines: list[str]) -> tuple[int, str]:
    """Lines that hold `text`, each with the lines after it; `--` between runs apart."""
    hits = {number for number, line in enumerate(lines, 1) if text in line}
    shown = sorted({n for hit in hits for n in range(hit, min(hit + after, len(lines)) + 1)})
    output = ""
    for position, number in enumerate(shown):
        if position and number != shown[position - 1] + 1:
            output += "--\n"
        output += f"{number}{':' if number in hits else '-'}{lines[number - 1]}\n"
    return (0 if hits else 1), output


def _cat(path: str, tree: dict[str, str]) -> tuple[int, str]:
    return 0, tree[path]


def _list(folder: str, tree: dict[str, str]) -> tuple[int, str]:
    """Sorted by bytes, as in the sandbox's locale."""
    prefix = f"{folder}/" if folder else ""
    inside = (path.removeprefix(prefix) for path in tree if path.startswith(prefix))
    names = sorted({path.split("/")[0] for path in inside})
    return 0, "".join(f"{name}\n" for name in names)


_ACTS: dict[str, Callable[[str, dict[str, str]], tuple[int, str]]] = {
    "echo ": _echo,
    "cat -n ": _number,
    "cat ": _cat,
    "ls ": _list,
    "ls": _list,
}
