"""The project's own format: a directory per task, graded on this machine without an image.

    NAME/             the task's id
      task.toml       issue, fail_to_pass, pass_to_pass, ... (all of `_KEYS`)
      tree/           the faulty repository as the policy gets it
      tests/          hidden tests; ids are `tests/FILE.py::FUNCTION` or `...::CLASS::METHOD`
      fix.patch       optional: the reference solution, a unified diff against tree/

Owns that layout and its checks. docs/tasks.md says what hidden tests may do.
"""

from __future__ import annotations

from pathlib import Path

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.grading import top_level_modules
from sampler_fleet.episodes.tasks.generate import SPLITS
from sampler_fleet.episodes.tasks.sources.diff import apply_diff
from sampler_fleet.episodes.tasks.sources.files import read_text, read_toml, walk
from sampler_fleet.episodes.tasks.sources.row import Row

_KEYS = (
    *("issue", "fail_to_pass", "pass_to_pass", "split", "template", "license"),
    "test_seconds",
)


def read_local(folder: Path) -> Task:
    """A task's directory; BadInputError names it and what is wrong with it."""
    fields = read_toml(folder / "task.toml")
    row = Row(fields=fields, where=str(folder / "task.toml"), folder=folder)
    if unknown := sorted(fields.keys() - set(_KEYS)):
        raise row.wrong(unknown[0], expected=f"one of {', '.join(_KEYS)}", found="another key")
    split = row.text("split", "")
    if split not in ("", *SPLITS):
        raise row.wrong("split", expected=" or ".join(SPLITS), found=split)
    tree = {
        path: file.read_bytes().decode("utf-8", "surrogateescape")
        for path, file in walk(folder / "tree")
    }
    if not top_level_modules(tree):
        raise BadInputError(str(folder / "tree"), expected="Python modules in it", found="none")
    for path in tree:
        if any(part.lower() == ".git" for part in path.split("/")):
            raise BadInputError(str(folder / "tree"), expected="no history", found=path)
    tests = {f"tests/{path}": read_text(file) for path, file in walk(folder / "tests")}
    fail_to_pass, pass_to_pass = row.some_texts("fail_to_pass"), row.texts("pass_to_pass")
    for name in (*fail_to_pass, *pass_to_pass):
        path, colons, function = name.partition("::")
        if path not in tests or not colons or not function:
            raise row.wrong(
                "fail_to_pass, pass_to_pass",
                expected="tests/FILE.py::NAME of a file that is there",
                found=name,
            )
    fix, fix_deletes = _fix(folder / "fix.patch", tree)
    return Task(
        task_id=folder.name,
        split=split,
        template=row.text("template", folder.name),
        issue=row.text("issue").strip(),
        tree=tree,
        hidden_tests=tests,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        fix=fix,
        fix_deletes=fix_deletes,
        test_seconds=row.seconds("test_seconds"),
        dataset="local",
        license=row.text("license", ""),
    )


def _fix(path: Path, tree: dict[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    if not path.is_file():
        return {}, ()
    try:
        return apply_diff(read_text(path), tree)
    except BadInputError as error:
        raise BadInputError(
            str(path), expected=f"a diff that fits tree/, with {error.expected}", found=error.found
        ) from None
