"""The simplest tasks: what a command does is what is graded, and the same seed gives the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from sampler_fleet.episodes.grading import tree_bytes
from sampler_fleet.episodes.patch import Patch, apply
from sampler_fleet.episodes.tasks.sources import read_tasks
from tools import make_file_tasks
from tools.make_file_tasks import file_tasks


@pytest.fixture
def run(monkeypatch):
    def run(*arguments: object) -> int | str:
        monkeypatch.setattr(sys, "argv", ["make_file_tasks", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            typer.run(make_file_tasks.main)
        return ended.value.code or 0

    return run


def passes(tests: dict[str, str], folder) -> bool:
    """Whether the hidden tests hold in a directory, as the grader would run them there."""
    call = "\ntest_files()\n"
    done = [
        subprocess.run([sys.executable, "-I", "-c", text + call], cwd=folder, capture_output=True)
        for text in tests.values()
    ]
    return all(process.returncode == 0 for process in done)


def lay_out(folder, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def test_the_command_and_the_reference_solution_do_what_is_asked(tmp_path, run):
    assert run(tmp_path / "tasks", "--num-train", 5, "--num-heldout", 5) == 0
    found = read_tasks(tmp_path / "tasks")
    made = {task.name: task for split in ("train", "heldout") for task in file_tasks(split, 5, 0)}
    tasks = {task.task_id: task for task in found}
    assert tasks.keys() == made.keys() and len(tasks) == 10
    for name, task in tasks.items():
        assert (task.split, task.issue) == (made[name].split, made[name].issue)
        start, here = tree_bytes(task.tree), tmp_path / name
        lay_out(here, start)
        assert not passes(task.hidden_tests, here), name
        subprocess.run(["bash", "-c", made[name].command], cwd=here, check=True)
        assert passes(task.hidden_tests, here), name
        fix = Patch(changed=tree_bytes(task.fix), deleted=task.fix_deletes)
        fixed = tmp_path / f"{name}-fixed"
        lay_out(fixed, apply(start, fix))
        assert passes(task.hidden_tests, fixed), name


def test_splits_share_no_word_and_a_seed_gives_the_same_tasks():
    def words(split: str) -> set[str]:
        tasks = file_tasks(split, 60, 0)
        return {w for t in tasks for files in (t.before, t.after) for x in files.items() for w in x}

    assert not words("train") & words("heldout")
    assert list(file_tasks("train", 9, 3)) == list(file_tasks("train", 9, 3))
    assert list(file_tasks("train", 9, 3)) != list(file_tasks("train", 9, 4))


def test_what_can_not_be_made_is_refused(tmp_path, run, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path) == 2
    assert run(tmp_path / "new", "--kind", "sort") == 2
    shown = capsys.readouterr().err
    assert "error: OUT: expected a new or empty directory" in shown
    assert "--kind: expected create, append, rename, copy, delete, found sort" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
