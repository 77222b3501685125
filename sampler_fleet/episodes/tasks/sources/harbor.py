"""Harbor's directories: terminal-bench 2, SWE-bench Pro V2.

Owns what of `task.toml`, `instruction.md`, `environment/`, `tests/` and `solution/` becomes the
record. The verdict is what `tests/test.sh` writes to a file. The resources that a task asks for are
no part of it: containers have what the run gives them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Checkout, Judge, Task
from sampler_fleet.episodes.tasks.sources.files import read_json, read_text, read_toml, walk
from sampler_fleet.episodes.tasks.sources.row import Row

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)", re.MULTILINE | re.IGNORECASE)


def read_harbor(folder: Path) -> Task:
    """A task's directory; BadInputError names it and what is wrong with it."""
    fields = read_toml(folder / "task.toml")
    whole = Row(fields=fields, where=str(folder / "task.toml"), folder=folder)
    environment, verifier, agent, task = (
        whole.below(name, instance="") if name in fields else _none(whole)
        for name in ("environment", "verifier", "agent", "task")
    )
    dockerfile = folder / "environment" / "Dockerfile"
    image = environment.text("docker_image", "")
    if not image and not dockerfile.is_file():
        raise whole.wrong(
            "[environment]", expected="docker_image, or environment/Dockerfile", found="neither"
        )
    tests = {path: file.read_bytes() for path, file in walk(folder / "tests")}
    if "test.sh" not in tests:
        raise BadInputError(str(folder), expected="tests/test.sh", found="none")
    config = _config(folder)
    workdirs = _WORKDIR.findall(read_text(dockerfile)) if dockerfile.is_file() else []
    diffs = sorted((folder / "solution").glob("*.diff"))
    patches = [file for file in diffs if file.is_file()]
    script = folder / "solution" / "solve.sh"
    test_patch = folder / "tests" / "test_patch.patch"
    return Task(
        task_id=folder.name,
        split="",
        template=config.text("repo", folder.name),
        issue=read_text(folder / "instruction.md").strip(),
        fail_to_pass=config.texts("fail_to_pass"),
        pass_to_pass=config.texts("pass_to_pass"),
        checkout=Checkout(
            image=image,
            build_dir="" if image else str(dockerfile.parent),
            workdir=workdirs[-1] if workdirs else "",
            repo=config.text("repo", ""),
            base_commit=config.text("base_commit", "HEAD"),
            fix_patch=read_text(patches[0]) if patches else "",
            fix_script=read_text(script) if script.is_file() and not patches else "",
            test_patch=read_text(test_patch) if test_patch.is_file() else "",
            test_files=tests,
            test_command=_exports(verifier) + "bash /tests/test.sh",
            may_use_network=_may_use_network(verifier, environment),
            judge=Judge.REWARD_FILE,
            episode_seconds=agent.seconds("timeout_sec"),
        ),
        test_seconds=verifier.seconds("timeout_sec"),
        dataset=task.text("name", "").rpartition("/")[0] or "Harbor",
        language=config.text("repo_language", ""),
    )


def _config(folder: Path) -> Row:
    """What SWE-bench Pro V2 keeps of an instance's row; terminal-bench has nothing like it."""
    path = folder / "tests" / "config.json"
    fields = read_json(read_text(path), str(path)) if path.is_file() else {}
    fields = fields if isinstance(fields, dict) else {}
    lower = {name.lower(): value for name, value in fields.items()}
    return Row(fields=lower, where=str(path), folder=folder)


def _exports(verifier: Row) -> str:
    """`[verifier] env` as bash, of values that the task gives itself."""
    env = verifier.table("env") if "env" in verifier.fields else {}
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name) or not isinstance(value, str) or "${" in value:
            raise verifier.wrong(
                "[verifier] env",
                expected="variables and their texts, none of them from outside (${...})",
                found=f"{name} = {value!r}",
            )
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def _may_use_network(verifier: Row, environment: Row) -> bool:
    """By Harbor's rule: the verifier's mode, else the environment's, else the public network."""
    if environment.fields.get("allow_internet") is False:  # an earlier spelling
        return False
    mode = verifier.text("network_mode", "") or environment.text("network_mode", "public")
    return mode != "no-network"


def _none(row: Row) -> Row:
    return Row(fields={}, where=row.where, folder=row.folder)
