"""Checking tasks: what is usable, on real sandboxes; what is skipped, kept and tried again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contracts.errors import BadInputError
from sampler_fleet.__main__ import app
from sampler_fleet.episodes.base import Checkout, SandboxError, Task
from sampler_fleet.episodes.grading import Grader, Verdict
from sampler_fleet.episodes.patch import Patch
from sampler_fleet.episodes.tasks.check import (
    CHECKED,
    USABLE,
    Finding,
    Outcome,
    check_task,
    check_tasks,
)

DATA = Path(__file__).parents[2] / "data" / "tasks"


class ScriptedGrader(Grader):
    """Verdicts by rule: whether a patch passes, on its run so and so."""

    def __init__(self, empty=lambda run: False, fixed=lambda run: True) -> None:
        super().__init__(sandboxes=None)  # type: ignore[arg-type]
        self._rules = {"empty": empty, "fixed": fixed}
        self.runs = {"empty": 0, "fixed": 0}

    async def grade(self, task: Task, patch: Patch) -> Verdict:
        kind = "fixed" if set(patch.changed) == set(task.fix) else "empty"
        self.runs[kind] += 1
        return Verdict(passed=self._rules[kind](self.runs[kind]), reason=f"as {kind}")


def none_here() -> str:
    return "there is none"


def lost(run: int) -> bool:
    raise SandboxError("no room")


class TestVerdicts:
    async def test_three_runs_of_each(self, task):
        grader = ScriptedGrader()
        assert (await check_task(task, grader, none_here)).outcome == Outcome.USABLE
        assert grader.runs == {"empty": 3, "fixed": 3}

    @pytest.mark.parametrize("run", [1, 2, 3])
    async def test_one_run_that_differs_is_enough(self, task, run):
        for grader, reason in (
            (ScriptedGrader(empty=lambda r: r == run), f"run {run} of the empty patch: the tests"),
            (ScriptedGrader(fixed=lambda r: r != run), f"run {run} of the reference solution: as"),
        ):
            finding = await check_task(task, grader, none_here)
            assert finding.outcome == Outcome.UNUSABLE
            assert finding.reason.startswith(reason)

    async def test_without_a_solution_the_empty_patch_decides(self, task):
        finding = await check_task(
            replace(task, fix={}), ScriptedGrader(fixed=lambda run: False), none_here
        )
        assert finding.outcome == Outcome.USABLE
        assert "no reference solution" in finding.reason

    async def test_a_failing_sandbox_is_no_verdict(self, task):
        finding = await check_task(task, ScriptedGrader(fixed=lost), none_here)
        assert (finding.outcome, finding.reason) == (Outcome.FAILED, "no room")

    async def test_a_verifier_that_may_use_the_network_is_named(self, task):
        for may, num in ((True, 1), (False, 0)):
            checkout = Checkout(image="i", fix_patch="x", test_command="t", may_use_network=may)
            tested = replace(task, checkout=checkout)
            for grader, outcome in (
                (ScriptedGrader(fixed=lambda run: False), Outcome.UNUSABLE),
                (ScriptedGrader(empty=lost), Outcome.FAILED),
            ):
                finding = await check_task(tested, grader, lambda: "")
                assert finding.outcome == outcome
                assert finding.reason.count("may use the network, which graders don't have") == num

    async def test_the_empty_patch_really_runs_the_tests(self, grader, task):
        solved = replace(task, tree=task.tree | task.fix | {"empty-patch/x.txt": ""})
        finding = await check_task(solved, grader, none_here)
        assert finding.reason == "run 1 of the empty patch: the tests pass"


class TestResuming:
    async def check(self, tasks, out, grader=None) -> tuple[list[Finding], list[Finding]]:
        done: list[Finding] = []
        grader = grader or ScriptedGrader()
        findings = await check_tasks(
            tasks, grader, out, no_containers=none_here, num_jobs=2, on_found=done.append
        )
        return findings, done

    async def test_only_what_is_left_is_done(self, task, tmp_path):
        tasks = [replace(task, task_id=name) for name in ("a", "b", "c")]
        findings, done = await self.check(tasks[:2], tmp_path)
        assert len(done) == 2
        with (tmp_path / CHECKED).open("a") as record:
            record.write('{"task_id": "c", "outc')  # killed while it wrote
        again, done = await self.check(tasks, tmp_path)
        assert again[:2] == findings
        assert [finding.task_id for finding in done] == ["c"]
        ids = [json.loads(line) for line in (tmp_path / USABLE).read_text().splitlines()]
        assert ids == ["a", "b", "c"]
        assert (await self.check(tasks, tmp_path))[1] == []

    async def test_other_tasks_and_lost_ones_are_done_again(self, task, tmp_path):
        _, done = await self.check([task], tmp_path, ScriptedGrader(empty=lost))
        assert done[0].outcome == Outcome.FAILED
        assert (tmp_path / USABLE).read_text() == ""
        _, done = await self.check([task], tmp_path)
        assert done[0].outcome == Outcome.USABLE
        changed = replace(task, hidden_tests=task.hidden_tests | {"tests/more.py": ""})
        _, done = await self.check([changed], tmp_path)
        assert len(done) == 1

    async def test_strange_file_is_left_alone(self, task, tmp_path):
        (tmp_path / CHECKED).write_text("my notes\n{}\n")
        with pytest.raises(BadInputError, match="line 1: expected what a check wrote"):
            await self.check([task], tmp_path)
        assert (tmp_path / CHECKED).read_text().startswith("my notes")


def invoke(*arguments: str | Path):
    return CliRunner().invoke(app, ["tasks", *map(str, arguments)])


class TestCommands:
    def test_check_on_real_sandboxes(self, host, tmp_path):
        out = tmp_path / "found"
        result = invoke("check", DATA / "local", "--out", out, "--jobs", "2")
        assert result.exit_code == 1, result.output
        assert (out / USABLE).read_text() == '"shop-rename"\n"shop-total"\n'
        found = {}
        for line in (out / CHECKED).read_text().splitlines():
            finding = json.loads(line)
            found[finding["task_id"]] = (finding["outcome"], finding["reason"])
        assert found["shop-rename"] == ("usable", "1 tests passed")
        assert found["shop-total"] == ("usable", "2 tests passed")
        assert found["shop-solved"] == ("unusable", "run 1 of the empty patch: the tests pass")
        outcome, reason = found["shop-wrong-fix"]
        assert outcome == "unusable"
        assert "run 1 of the reference solution: tests/test_cart.py::test_total" in reason
        assert "2 usable, 2 unusable, 0 skipped, 0 failed, 0 broken" in result.output
        for name in ("shop-solved", "shop-wrong-fix"):
            assert name in result.output

    def test_status_is_0_when_all_are_usable(self, host, tmp_path):
        result = invoke("check", DATA / "local" / "shop-total", "--out", tmp_path)
        assert result.exit_code == 0, result.output
        assert "not usable" not in result.output

    def test_images_are_skipped_and_broken_tasks_named(self, tmp_path):
        source = tmp_path / "source"
        shutil.copytree(DATA / "harbor" / "pro_v2", source)
        (source / "broken").mkdir()
        (source / "broken" / "task.toml").write_text("")
        result = invoke("check", source, "--out", tmp_path / "found")
        assert result.exit_code == 1, result.output
        assert "0 usable, 0 unusable, 1 skipped, 0 failed, 1 broken" in result.output
        assert "registry.example/pro-v2" in result.output
        assert "instruction.md (Harbor)" in " ".join(result.output.split())

    def test_list(self):
        result = invoke("list", DATA / "local")
        assert result.exit_code == 0, result.output
        assert "tasks: 4" in result.output
        (line,) = (line for line in result.output.splitlines() if "shop-total" in line)
        assert [cell.strip() for cell in line.strip("│").split("│")] == [
            *("shop-total", "local", "train", "python", "Apache-2.0", "a local sandbox", "1", "1")
        ]

    def test_a_broken_task_spoils_no_others(self, tmp_path):
        source = tmp_path / "source"
        shutil.copytree(DATA / "local", source)
        (source / "shop-solved" / "task.toml").write_text("issue")
        result = invoke("list", source)
        assert result.exit_code == 0, result.output
        assert "tasks: 3" in result.output and "valid TOML" in result.output
        (row,) = (line for line in result.output.splitlines() if "│ shop-solved " in line)
        assert "broken" in row
        assert invoke("show", source, "shop-total").exit_code == 0
        ids = tmp_path / "ids"
        ids.write_text("shop-total\n")
        result = invoke("digests", source, "--ids", ids)
        assert result.exit_code == 0 and json.loads(result.stdout).keys() == {"shop-total"}
        ids.write_text("shop-solved\n")
        wanted = (("show", source, "shop-solved"), ("digests", source, "--ids", ids))
        for arguments in (*wanted, ("digests", source)):
            result = invoke(*arguments)
            assert result.exit_code == 2 and "valid TOML" in result.output

    def test_list_says_whose_verifier_may_use_the_network(self):
        for source, may in (("harbor/pro_v2", True), ("local", False)):
            result = invoke("list", DATA / source)
            assert ("network" in result.output) == may
        result = invoke("show", DATA / "harbor" / "pro_v2", "instance_corner__shop-7")
        assert "its verifier may use the network, which graders don't have" in result.output

    @pytest.mark.parametrize(
        ("source", "task_id", "texts"),
        [
            (
                "local",
                "shop-total",
                ("expected 10.", "tests/test_cart.py::test_label", "+    return price * count"),
            ),
            ("mimo", "code-task-000007", ("judged by: exit status", "tests: bash test_command.sh")),
            ("harbor/terminal_bench", "count-lines", ("image built in", "wc -l /app/*")),
        ],
    )
    def test_show(self, source, task_id, texts):
        result = invoke("show", DATA / source, task_id)
        assert result.exit_code == 0, result.output
        for text in texts:
            assert text in result.output

    def test_show_of_nothing(self):
        result = invoke("show", DATA / "local", "shop")
        assert result.exit_code == 2
        assert "expected an id that `tasks list" in result.output

    def test_generate(self):
        result = invoke("generate", "--split", "heldout", "--num", "2", "--seed", "5")
        assert result.exit_code == 0, result.output
        tasks = [json.loads(line) for line in result.stdout.splitlines()]
        assert [task["split"] for task in tasks] == ["heldout"] * 2
        assert all(task["tree"] and task["fix"] for task in tasks)
