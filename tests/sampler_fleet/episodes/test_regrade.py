"""Saved patches graded again: verdicts that hold and that don't, lost gradings, going on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from contracts.errors import BadInputError
from contracts.evaluations import EPISODES, REGRADED, SETTINGS, RecordFile, patch_to_json
from sampler_fleet.episodes.base import SandboxError, Task
from sampler_fleet.episodes.grading import Grader, Verdict
from sampler_fleet.episodes.patch import Patch
from sampler_fleet.episodes.tasks.check import digest
from sampler_fleet.episodes.tasks.regrade import MAX_RERUNS, check_unchanged, read_saved, regrade
from tests.sampler_fleet.fakes import make_task

TASKS = {name: make_task(name) for name in ("a", "b")}


class ByContent(Grader):
    """Passes patches whose file says so; one that says "lost" fails `num_lost` times before."""

    def __init__(self, num_lost: int = 0) -> None:
        super().__init__(sandboxes=None)  # type: ignore[arg-type]
        self._num_lost = num_lost
        self.graded: list[str] = []

    async def grade(self, task: Task, patch: Patch) -> Verdict:
        content = patch.changed["x"].decode()
        self.graded.append(f"{task.task_id} {content}")
        if content == "lost" and self.graded.count(f"{task.task_id} lost") <= self._num_lost:
            raise SandboxError("no room")
        return Verdict(passed=content != "bad", reason=f"it is {content}")


def write(directory, *episodes: tuple[str, int, str | None, float | None]) -> None:
    """(task, sample, content of its patch, reward) each."""
    file = RecordFile(directory / EPISODES)
    for task_id, sample, content, reward in episodes:
        patch = None if content is None else patch_to_json(Patch(changed={"x": content.encode()}))
        record = {"task_id": task_id, "sample": sample, "reward": reward, "verdict": "as then"}
        file.add(record | {"patch": patch})
    file.close()


async def graded(directory, grader: Grader):
    return await regrade(directory, TASKS, grader, num_jobs=2, on_graded=lambda _: None)


async def test_each_saved_patch_is_graded_once_and_compared(tmp_path):
    write(
        tmp_path,
        ("a", 0, "good", 1.0),
        ("a", 1, "bad", 1.0),
        ("b", 0, "good", 0.0),
        ("b", 1, "bad", None),  # lost: graded by nobody
        ("b", 1, None, 0.0),  # nothing was submitted
        ("b", 2, "bad", 0.0),
    )
    grader = ByContent()
    found = await graded(tmp_path, grader)
    assert [(g.task_id, g.sample, g.passed, g.holds) for g in found] == [
        ("a", 0, True, True),
        ("a", 1, False, False),
        ("b", 0, True, False),
        ("b", 2, False, True),
    ]
    assert (found[1].had_reason, found[1].reason) == ("as then", "it is bad")
    assert sorted(grader.graded) == ["a bad", "a good", "b bad", "b good"]


@pytest.mark.parametrize("num_lost", range(MAX_RERUNS + 2))
async def test_a_lost_grading_is_run_again_up_to_three_times(tmp_path, num_lost):
    write(tmp_path, ("a", 0, "lost", 1.0))
    grader = ByContent(num_lost)
    (found,) = await graded(tmp_path, grader)
    assert found.num_lost == num_lost
    if num_lost <= MAX_RERUNS:
        assert (found.passed, found.failure) == (True, "") and found.holds
    else:
        assert (found.passed, found.failure) == (None, "no room") and not found.holds
        assert len(grader.graded) == 1 + MAX_RERUNS


async def test_it_goes_on_with_what_has_no_verdict(tmp_path):
    write(tmp_path, ("a", 0, "good", 1.0), ("b", 0, "lost", 1.0))
    first = await graded(tmp_path, ByContent(num_lost=9))
    assert [g.passed for g in first] == [True, None]
    with (tmp_path / REGRADED).open("a") as file:
        file.write('{"task_id": "a", ')
    write(tmp_path, ("b", 1, "bad", 0.0))  # the evaluation grew
    grader = ByContent()
    assert [g.passed for g in await graded(tmp_path, grader)] == [True, True, False]
    assert sorted(grader.graded) == ["b bad", "b lost"]
    grader = ByContent()
    assert [g.passed for g in await graded(tmp_path, grader)] == [True, True, False]
    assert grader.graded == []


async def test_a_verdict_is_on_its_patch_and_task(tmp_path):
    write(tmp_path, ("a", 0, "good", 1.0), ("b", 0, "good", 1.0))
    await graded(tmp_path, ByContent())
    (tmp_path / EPISODES).unlink()
    write(tmp_path, ("a", 0, "bad", 1.0), ("b", 0, "good", 1.0))
    grader = ByContent()
    assert [g.passed for g in await graded(tmp_path, grader)] == [False, True]
    assert grader.graded == ["a bad"]
    grader = ByContent()
    other = TASKS | {"b": replace(TASKS["b"], hidden_tests={"tests/test_h.py": "x"})}
    await regrade(tmp_path, other, grader, num_jobs=1, on_graded=lambda _: None)
    assert grader.graded == ["b good"]


async def test_a_verdict_is_compared_with_the_one_that_is_there(tmp_path):
    write(tmp_path, ("a", 0, "good", 1.0))
    assert [g.holds for g in await graded(tmp_path, ByContent())] == [True]
    (tmp_path / EPISODES).unlink()
    write(tmp_path, ("a", 0, "good", 0.0))
    assert [g.holds for g in await graded(tmp_path, ByContent())] == [False]


def test_tasks_must_be_those_that_were_evaluated(tmp_path):
    (tmp_path / SETTINGS).write_text(json.dumps({"digests": {"a": digest(TASKS["a"])}}))
    check_unchanged(tmp_path, TASKS)
    changed = {"a": replace(TASKS["a"], issue="another")}
    with pytest.raises(BadInputError, match=r"task a: .* found one that has changed since"):
        check_unchanged(tmp_path, changed)
    with pytest.raises(BadInputError, match=r"task a: .* found none of that id"):
        check_unchanged(tmp_path, {})
    (tmp_path / SETTINGS).write_text("[]")
    with pytest.raises(BadInputError, match="expected settings of an evaluation"):
        check_unchanged(tmp_path, TASKS)


def test_a_damaged_patch_is_named(tmp_path):
    write(tmp_path, ("a", 0, "good", 1.0))
    path = tmp_path / EPISODES
    path.write_text(path.read_text().replace('"complete": true', '"whole": true'))
    with pytest.raises(BadInputError, match="line 1: expected an episode"):
        read_saved(tmp_path)
