"""Rows of R2E-Gym: a commit taken apart into JSON, and the status that every test ends with.

Owns putting the commit together again as a diff, and what its images hold that must be hidden.
"""

from __future__ import annotations

from typing import Any

from sampler_fleet.episodes.base import Checkout, Judge, Task
from sampler_fleet.episodes.tasks.sources.row import Row

FIELDS = (
    *("repo_name", "docker_image", "commit_hash", "problem_statement"),
    *("parsed_commit_content", "expected_output_json"),
)
_SIGNS = {"context": " ", "added": "+", "deleted": "-"}


def read_r2e(row: Row) -> Task:
    """The whole map of statuses decides: `fail_to_pass` can't be told from `pass_to_pass`."""
    repo, commit = row.text("repo_name"), row.text("commit_hash")
    content = row.table("parsed_commit_content")
    expected = row.table("expected_output_json")
    if not expected or not all(isinstance(status, str) for status in expected.values()):
        raise row.wrong("expected_output_json", expected="a status per test", found=repr(expected))
    relevant = set(row.texts("relevant_files"))
    try:
        fix = "".join(
            _diff(change)
            for change in content["file_diffs"]
            if not relevant or change["header"]["file"]["path"] in relevant
        )
    except (KeyError, TypeError) as error:
        raise row.wrong(
            "parsed_commit_content",
            expected="file_diffs with header, minus_file, plus_file and hunks",
            found=f"a change without {error}",
        ) from None
    issue = row.text("problem_statement").strip()
    return Task(
        task_id=row.text("instance_id", f"{repo}__{commit}"),
        split="",
        template=repo,
        issue=issue.removeprefix("[ISSUE]").removesuffix("[/ISSUE]").strip(),
        fail_to_pass=(),
        pass_to_pass=(),
        checkout=Checkout(
            image=row.text("docker_image"),
            workdir="/testbed",
            repo=repo,
            base_commit=f"{commit}^",
            hidden_paths=("/r2e_tests", "/testbed/r2e_tests", "/testbed/run_tests.sh"),
            fix_patch=fix,
            test_command="bash /testbed/run_tests.sh",
            judge=Judge.STATUSES,
            expected=expected,
        ),
        dataset="R2E-Gym",
    )


def _diff(change: dict[str, Any]) -> str:
    """The unified diff of one file; "" if it is binary or has no lines."""
    if not (hunks := change["hunks"]):
        return ""
    path = change["header"]["file"]["path"]
    before, after = change["minus_file"]["path"], change["plus_file"]["path"]
    lines = [f"diff --git a/{path} b/{path}"]
    lines += ["new file mode 100644"] if before == "/dev/null" else []
    lines += ["deleted file mode 100644"] if after == "/dev/null" else []
    lines += [f"--- {before}", f"+++ {after}"]
    for hunk in hunks:
        ranges = (hunk["descriptor"]["old_range"], hunk["descriptor"]["new_range"])
        old, new = (f"{part['start']},{part['length']}" for part in ranges)
        lines.append(f"@@ -{old} +{new} @@")
        for line in hunk["line_group"]["all_lines"]:
            note = line["type"] not in _SIGNS  # that there is no newline at the end of the file
            lines.append(("\\ " if note else _SIGNS[line["type"]]) + line["content"])
    return "\n".join(lines) + "\n"
