"""The scrub as one script in a sandbox and under a bare interpreter, and as a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import ExecResult
from sampler_fleet.episodes.sandbox import BubblewrapSandbox, Host, SandboxLimits
from sampler_fleet.episodes.scrub.findings import Report, Target
from sampler_fleet.episodes.scrub.ship import script, scrub_inside
from sampler_fleet.episodes.tasks.cli import app
from tests.sampler_fleet.episodes.scrub.adversarial import (
    HONEST,
    INSTANCE,
    PATCH,
    TRACKED,
    Adversary,
    build,
    git,
    write_tree,
)

LIMITS = SandboxLimits(disk_bytes=32 << 20, num_processes=64, tree_bytes=8 << 20)


@pytest.fixture(scope="module")
def adversary(tmp_path_factory: pytest.TempPathFactory) -> Adversary:
    return build(tmp_path_factory.mktemp("shipped"))


def files_of(root: Path) -> dict[str, bytes]:
    """Without links, which a sandbox's tree can't have."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and "modules" not in path.parts
    }


def run(program: str, **environment: str) -> tuple[int, dict[str, object]]:
    command = [sys.executable, "-I", "-S", "-B", "-"]
    env = {"PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        command, input=program.encode(), capture_output=True, env=env, check=False
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


async def test_a_sandbox_is_cleaned_from_within(adversary: Adversary, host: Host):
    git(adversary.root, "config", "--unset", "remote.origin.url")
    (adversary.root / ".git/objects/info/alternates").unlink()  # they aren't in the sandbox
    git(adversary.root, "worktree", "prune")
    tree = files_of(adversary.root)
    sandbox = BubblewrapSandbox(host, LIMITS)
    try:
        await sandbox.start(tree)
        inside = Target("/work", PATCH, (), (INSTANCE, "fix-4711"))
        before = await scrub_inside(sandbox, inside, audit_only=True)
        found = {leak.kind for leak in before.leaks}
        assert {"git-stash", "gold-object", "gold-archive", "bytecode", "stray-pack"} <= found
        assert "network" not in found
        report = await scrub_inside(sandbox, inside)
        assert report.clean and report.commit and report.looked_at["objects"]
        assert (await scrub_inside(sandbox, inside, audit_only=True)).clean
        snapshot = await sandbox.snapshot()
        for path, data in HONEST.items():
            assert snapshot.files[path] == data
        with pytest.raises(BadInputError, match="a unified diff"):
            await scrub_inside(sandbox, replace(inside, patch="none"))
    finally:
        await sandbox.close()


class WithoutPython(BubblewrapSandbox):
    async def exec(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", max_output: int = 10_000
    ) -> ExecResult:
        command = f"PATH=/nowhere; {command}"
        return await super().exec(command, timeout_s=timeout_s, stdin=stdin, max_output=max_output)


async def test_a_container_without_python_is_bad_input(host: Host):
    sandbox = WithoutPython(host, LIMITS)
    try:
        await sandbox.start({})
        with pytest.raises(BadInputError, match=r"Python 3\.9"):
            await scrub_inside(sandbox, Target("/work", PATCH))
    finally:
        await sandbox.close()


def test_the_script_reports_its_own_environment(tmp_path: Path):
    write_tree(tmp_path)
    target = Target(str(tmp_path), PATCH, (), (INSTANCE,))
    status, answer = run(script(target, audit_only=True, network=False), TASK=INSTANCE)
    assert status == 1
    assert ("environment", "TASK") in {
        (leak.kind, leak.path) for leak in Report.from_dict(answer).leaks
    }
    assert not (tmp_path / ".git").exists()
    status, answer = run(script(target, network=False), TASK=INSTANCE)
    report = Report.from_dict(answer)
    assert report.unset == ["TASK"]
    assert report.clean and status == 0
    assert report.to_dict() == answer


def test_a_container_without_git_is_refused_and_left_alone(tmp_path: Path):
    write_tree(tmp_path)
    (tmp_path / "run.log").touch()
    status, answer = run(script(Target(str(tmp_path), PATCH), network=False), PATH="/nowhere")
    assert status == 2 and "git" in str(answer["refused"])
    assert (tmp_path / "run.log").exists()


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, str]:
    root = tmp_path / "tree"
    root.mkdir()
    write_tree(root)
    git(root, "init", "-q")
    git(root, "add", "-f", "--", *TRACKED)
    git(root, "commit", "-qm", "Base")
    (tmp_path / "gold.patch").write_text(PATCH)
    return str(root), str(tmp_path / "gold.patch")


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["scrub", *arguments])
    return result.exit_code, result.output


def test_the_command_looks_cleans_and_tells(paths: tuple[str, str]):
    root, patch = paths
    status, output = command(root, "--patch", patch, "--audit-only")
    assert status == 1 and "LEAK git-hooks: .git/hooks" in output and "leaks found" in output
    status, output = command(root, "--patch", patch)
    assert status == 0 and "0 leaks left" in output
    assert f"commit {git(Path(root), 'rev-parse', 'HEAD')}" in output
    status, output = command(root, "--patch", patch, "--audit-only", "--json")
    assert status == 0 and Report.from_dict(json.loads(output)).clean


def test_leaks_that_stay_are_a_status(paths: tuple[str, str]):
    status, output = command(*paths[:1], "--patch", paths[1], "--word", "tree")
    assert status == 1 and "LEAK telling-name: ." in output


def test_the_command_prints_a_script_for_containers(paths: tuple[str, str]):
    status, program = command("/testbed", "--patch", paths[1], "--root", "/root", "--script")
    assert status == 0
    assert program == script(Target("/testbed", PATCH, ("/root",)))


@pytest.mark.parametrize("what", ["tree", "patch", "empty", "binary"])
def test_bad_input_is_one_sentence(paths: tuple[str, str], what: str):
    root, patch = paths
    if what == "tree":
        root = f"{root}/nowhere"
    elif what == "patch":
        patch = f"{patch}/nowhere"
    else:
        Path(patch).write_bytes(b"" if what == "empty" else b"\xff\xfe\x00")
    status, output = command(root, "--patch", patch)
    assert status == 2
    assert output.startswith("error: ") and output.count("\n") == 1
