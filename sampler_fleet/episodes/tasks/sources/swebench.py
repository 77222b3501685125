"""Rows of SWE-bench and its relatives: SWE-bench (all, Lite, Verified), SWE-Gym, SWE-smith.

Owns their names of images and where the fix is in them. How tests are run is in `runners.py`: few
rows say it.
"""

from __future__ import annotations

from dataclasses import replace

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Checkout, Task
from sampler_fleet.episodes.tasks.sources.diff import reverse_diff
from sampler_fleet.episodes.tasks.sources.row import Row
from sampler_fleet.episodes.tasks.sources.runners import test_command

WORKDIR = "/testbed"
_EOL = "\n"
SWEBENCH_FIELDS = (
    *("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"),
    *("fail_to_pass", "pass_to_pass"),
)
SMITH_FIELDS = (
    *("instance_id", "repo", "image_name", "problem_statement", "patch"),
    *("fail_to_pass", "pass_to_pass"),
)


def read_swebench(row: Row) -> Task:
    """A row with an image of its own keeps it; so do other sets that use SWE-bench's fields."""
    instance = row.text("instance_id")
    # SWE-Gym has lists where SWE-bench has texts, and not the commit of the environment
    is_gym = not isinstance(row.fields["fail_to_pass"], str) and not row.text(
        "environment_setup_commit", ""
    )
    image = row.text("docker_image", "") or row.text("image_name", "")
    if image:
        dataset = "SWE-bench's fields"
    elif is_gym:
        dataset = "SWE-Gym"
        image = f"xingyaoww/sweb.eval.x86_64.{instance.replace('__', '_s_').lower()}:latest"
    else:
        dataset = "SWE-bench Verified" if row.text("difficulty", "") else "SWE-bench"
        image = f"swebench/sweb.eval.x86_64.{instance.replace('__', '_1776_').lower()}:latest"
    return _task(
        row,
        dataset,
        Checkout(
            image=image,
            workdir=WORKDIR,
            repo=row.text("repo"),
            version=row.text("version", ""),
            base_commit=row.text("base_commit"),
            fix_patch=row.text("patch"),
            test_patch=row.text("test_patch"),
        ),
    )


def read_smith(row: Row) -> Task:
    """`patch` is the bug: the image has the repository without it, the fix undoes it."""
    bug = row.text("patch")
    test_files = {name.partition("::")[0] for name in row.some_texts("fail_to_pass")}
    try:
        fix = reverse_diff(bug)
    except BadInputError as error:
        raise row.wrong("patch", expected=str(error.expected), found=str(error.found)) from None
    return _task(
        row,
        "SWE-smith",
        Checkout(
            image=row.text("image_name"),
            workdir=WORKDIR,
            repo=row.text("repo"),
            base_commit=row.text("base_commit", "HEAD"),
            setup=f"git apply - <<'END OF THE PATCH'\n{bug.removesuffix(_EOL)}\nEND OF THE PATCH\n",
            hidden_paths=tuple(f"{WORKDIR}/{file}" for file in sorted(test_files)),
            fix_patch=fix,
        ),
    )


def _task(row: Row, dataset: str, checkout: Checkout) -> Task:
    fail_to_pass, pass_to_pass = row.some_texts("fail_to_pass"), row.texts("pass_to_pass")
    command, judge = test_command(
        checkout.repo,
        checkout.version,
        (*fail_to_pass, *pass_to_pass),
        checkout.test_patch,
        *_own_pytest(row),
    )
    return Task(
        task_id=row.text("instance_id"),
        split="",
        template=checkout.repo,
        issue=row.text("problem_statement"),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        checkout=replace(checkout, test_command=command, judge=judge),
        dataset=dataset,
        language=row.text("language", "python"),
        license=row.text("license_name", "") or row.text("license", ""),
    )


def _own_pytest(row: Row) -> tuple[str, ...]:
    """What SWE-rebench's rows have for it."""
    if not row.fields.get("install_config"):
        return ()
    command = row.table("install_config").get("test_cmd")
    if isinstance(command, str) and command.split()[:1] == ["pytest"]:
        return (command,)
    return ()
