"""`python -m tools.make_file_tasks OUT`: the simplest tasks there are, in the local format.

Owns five kinds of task on small text files (create, append, rename, copy, delete) and their words.
Each is one bash command. For policies that are too small for repositories; what a task is belongs
to docs/tasks.md. Held-out tasks have files and words of their own.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from contracts.errors import BadInputError, exits_politely

_FILES = {
    "train": (
        "notes",
        "list",
        "plan",
        "menu",
        "names",
        "report",
        "draft",
        "data",
        "color",
        "diary",
    ),
    "heldout": ("recipe", "letter", "journal", "prices", "songs", "cities"),
}
_WORDS = {
    "train": ("red", "blue", "sun", "moon", "tea", "milk", "map", "key", "box", "pen"),
    "heldout": ("green", "star", "salt", "door", "bird", "stone"),
}  # fmt: skip
# kind -> what is asked, and the command that does it; a, b are files, w a word
_WAYS = {
    "create": ("Create a file {b} that contains the word {w}.", "echo {w} > {b}"),
    "append": ("Append the word {w} to the file {a}.", "echo {w} >> {a}"),
    "rename": ("Rename the file {a} to {b}.", "mv {a} {b}"),
    "copy": ("Copy the file {a} to {b}.", "cp {a} {b}"),
    "delete": ("Delete the file {a}.", "rm {a}"),
}
KINDS = tuple(_WAYS)
_MODULE = {"desk.py": '"""Text files lie beside this."""\n'}  # a tree has one; tests have a canary
_TEST = """\
import os


def test_files():
    found = {{name: open(name).read().split() for name in os.listdir() if name.endswith(".txt")}}
    assert found == {want!r}
"""


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """Text files before and after, what is asked for, and a command that does it."""

    name: str
    split: str
    kind: str
    issue: str
    command: str
    before: Mapping[str, str]
    after: Mapping[str, str]


def file_tasks(split: str, num: int, seed: int, kinds: Sequence[str] = KINDS) -> Iterator[FileTask]:
    """`num` tasks of a split, the kinds in turn; the same arguments give the same tasks."""
    rng = Random(f"{split}/{seed}")
    for number in range(num):
        kind = kinds[number % len(kinds)]
        a, b = (f"{name}.txt" for name in rng.sample(_FILES[split], 2))
        was, w = (f"{word}\n" for word in rng.sample(_WORDS[split], 2))
        issue, command = (text.format(a=a, b=b, w=w.strip()) for text in _WAYS[kind])
        after = {
            "create": {a: was, b: w},
            "append": {a: was + w},
            "rename": {b: was},
            "copy": {a: was, b: was},
            "delete": {},
        }[kind]
        yield FileTask(
            name=f"{split}-{number:03d}-{kind}",
            split=split,
            kind=kind,
            issue=issue,
            command=command,
            before={a: was},
            after=after,
        )


def write_task(folder: Path, task: FileTask) -> None:
    """The task's directory, in the local format."""
    test = "tests/test_files.py"
    fields = {
        "issue": task.issue,
        "fail_to_pass": [f"{test}::test_files"],
        "split": task.split,
        "template": f"{task.split}-{task.kind}",
    }
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
    want = {name: text.split() for name, text in task.after.items()}
    files = {"task.toml": toml, test: _TEST.format(want=want), "fix.patch": _diff(task)}
    files |= {f"tree/{name}": text for name, text in {**_MODULE, **task.before}.items()}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _diff(task: FileTask) -> str:
    lines = []
    for name in sorted({*task.before, *task.after}):
        old, new = (files.get(name, "").splitlines(True) for files in (task.before, task.after))
        if old != new:
            before, after = f"a/{name}" if old else "/dev/null", f"b/{name}" if new else "/dev/null"
            lines += [f"diff --git a/{name} b/{name}\n"]
            lines += difflib.unified_diff(old, new, before, after)
    return "".join(lines)


@exits_politely
def main(
    out: Annotated[Path, typer.Argument(help="A directory not yet there, or empty.")],
    num_train: Annotated[int, typer.Option(min=1)] = 80,
    num_heldout: Annotated[int, typer.Option(min=0)] = 20,
    seed: Annotated[int, typer.Option()] = 0,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(KINDS)}; all if not given.")
    ] = None,
) -> None:
    """Tasks of one bash command on small text files: a directory each."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BadInputError("OUT", expected="a new or empty directory", found=out)
    if unknown := set(kind or ()) - set(KINDS):
        raise BadInputError("--kind", expected=", ".join(KINDS), found=min(unknown))
    for split, num in (("train", num_train), ("heldout", num_heldout)):
        for task in file_tasks(split, num, seed, kind or KINDS):
            write_task(out / task.name, task)
    typer.echo(f"{out}: {num_train} tasks to train on, {num_heldout} held out")


if __name__ == "__main__":
    typer.run(main)
