"""A made task as a directory in the local format.

Owns what stands in its files; `sources/local.py` reads them. Test files with a failing test are
hidden and not in the tree: the policy works from the issue and can't read what is expected. The
other tests are in both, as the project has them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sampler_fleet.episodes.grading import tree_bytes
from sampler_fleet.episodes.patch import Patch, diff
from sampler_fleet.episodes.tasks.make.hidden import hidden_path
from sampler_fleet.episodes.tasks.make.mutations import Mutation
from sampler_fleet.episodes.tasks.make.package import Package
from sampler_fleet.episodes.tasks.sources.diff import apply_diff

TEST_SECONDS = 20  # of all tests, where a task is graded; half of it where it is made


@dataclass(frozen=True, kw_only=True)
class MadeTask:
    package: Package
    mutation: Mutation
    issue: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]

    @property
    def task_id(self) -> str:
        """Tells the package, and not the place."""
        m = self.mutation
        text = f"{self.package.version}\0{m.path}\0{m.start}\0{m.old}\0{m.new}"
        return f"{self.package.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @property
    def tree(self) -> dict[str, str]:
        return visible_tree(self.package, self.mutation, self.fail_to_pass)


def visible_tree(package: Package, mutation: Mutation, failing: Iterable[str]) -> dict[str, str]:
    """What the policy gets: the mutated package, and test files in which no test fails."""
    hidden = {name.split("::")[0] for name in failing}
    tests = {
        module.path: module.source
        for module in package.tests.values()
        if hidden_path(module.path) not in hidden
    }
    mutated = {mutation.path: mutation.apply(package.files[mutation.path])}
    return package.files | tests | mutated


def fix_patch(package: Package, mutation: Mutation) -> str:
    """The diff that undoes the mutation; "" where a diff can't say it (odd line ends)."""
    right = package.files[mutation.path]
    tree = {mutation.path: mutation.apply(right)}
    text = diff(tree_bytes(tree), Patch(changed=tree_bytes({mutation.path: right}))) + "\n"
    return text if apply_diff(text, tree) == ({mutation.path: right}, ()) else ""


def write_task(task: MadeTask, hidden: Mapping[str, str], out: Path) -> None:
    """Writes the directory; `task.toml`, without which it is no task, comes last."""
    folder = out / task.task_id
    names = {name.split("::")[0] for name in (*task.fail_to_pass, *task.pass_to_pass)}
    files = {f"tree/{path}": data for path, data in tree_bytes(task.tree).items()}
    files |= {path: hidden[path].encode() for path in sorted(names)}
    files["fix.patch"] = fix_patch(task.package, task.mutation).encode()
    files["task.toml"] = _toml(task).encode()
    for path, data in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def _toml(task: MadeTask) -> str:
    package, mutation = task.package, task.mutation
    fields = {
        "issue": task.issue,
        "fail_to_pass": task.fail_to_pass,
        "pass_to_pass": task.pass_to_pass,
        # other tasks of a package have the right source of this one's fault in their trees
        "template": package.name,
        "test_seconds": TEST_SECONDS,
        **({"license": package.license} if package.license else {}),
    }
    lines = [
        f"# {package.name} {package.version}, {package.url or 'no address'}, "
        f"{package.license or 'license unknown'}",
        f"# mutation: {mutation.kind}, {mutation.path}, line {mutation.line}, "
        f"{mutation.function or 'module'}",
    ]
    for key, value in fields.items():
        if isinstance(value, tuple):
            inner = "".join(f"    {_text(item)},\n" for item in value)
            lines.append(f"{key} = [\n{inner}]")
        else:
            lines.append(f"{key} = {_text(value) if isinstance(value, str) else value}")
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """A TOML string; JSON's is one, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
