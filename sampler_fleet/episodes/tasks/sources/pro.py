"""Rows of SWE-bench Pro, version 1. Version 2 comes as Harbor directories.

Owns the name of the image, and how the set's own runner and parser of an instance are called. They
are no part of a row: they are found where the set's repository has them, in
`run_scripts/INSTANCE/` beside the file of the rows or in a folder above it.
"""

from __future__ import annotations

import shlex

from sampler_fleet.episodes.base import Checkout, Task
from sampler_fleet.episodes.tasks.sources.row import Row

FIELDS = (
    *("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"),
    *("fail_to_pass", "pass_to_pass", "dockerhub_tag", "before_repo_set_cmd"),
    "selected_test_files_to_run",
)
_LONGEST_TAG = 128
_SCRIPTS = ("run_script.sh", "parser.py")


def read_pro(row: Row) -> Task:
    instance = row.text("instance_id")
    tag = row.text("dockerhub_tag").removesuffix("-vnan")[:_LONGEST_TAG]
    *setup, checkout_tests = row.text("before_repo_set_cmd").strip().split("\n")
    scripts = _scripts(row, instance)
    tests = ",".join(row.texts("selected_test_files_to_run"))
    run_tests = "\n".join(
        (
            checkout_tests.strip(),
            f"bash /tests/run_script.sh {shlex.quote(tests)} >/tmp/stdout.log 2>/tmp/stderr.log",
            "python3 /tests/parser.py /tmp/stdout.log /tmp/stderr.log /tmp/output.json",
        )
    )
    parts = [row.text("problem_statement")]
    for title, key in (("Requirements", "requirements"), ("New interfaces", "interface")):
        if text := row.text(key, ""):
            parts.append(f"{title}:\n{text}")
    return Task(
        task_id=instance,
        split="",
        template=row.text("repo"),
        issue="\n\n".join(parts),
        fail_to_pass=row.some_texts("fail_to_pass"),
        pass_to_pass=row.texts("pass_to_pass"),
        checkout=Checkout(
            image=f"jefzda/sweap-images:{tag}",
            workdir="/app",
            repo=row.text("repo"),
            base_commit=row.text("base_commit"),
            setup="".join(f"{line.strip()}\n" for line in setup),
            fix_patch=row.text("patch"),
            test_patch=row.text("test_patch"),
            test_files=scripts,
            test_command=run_tests if scripts else "",
        ),
        dataset="SWE-bench Pro V1",
        language=row.text("repo_language", ""),
    )


def _scripts(row: Row, instance: str) -> dict[str, bytes]:
    for folder in (row.folder, *row.folder.resolve().parents):
        found = folder / "run_scripts" / instance
        if all((found / name).is_file() for name in _SCRIPTS):
            return {name: (found / name).read_bytes() for name in _SCRIPTS}
    return {}
