"""Tasks are real: an interpreter tells repaired trees from others by their hidden tests."""

from __future__ import annotations

import ast
import itertools
import json
import keyword
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.tasks.domains import DOMAINS
from sampler_fleet.episodes.tasks.edit import Edit
from sampler_fleet.episodes.tasks.evidence import MAX_RIVALS, find_faults
from sampler_fleet.episodes.tasks.generate import SPLITS, generate_problems, generate_tasks
from sampler_fleet.episodes.tasks.grammar import NUM_DRAWN, drawn_templates
from sampler_fleet.episodes.tasks.mutate import SYMPTOMS, find_changes
from sampler_fleet.episodes.tasks.script import CONTEXT_LINES
from sampler_fleet.episodes.tasks.templates import ROLES

TEMPLATES = [template for domain in DOMAINS for template in domain.templates]

RUNNER = """
import importlib.util, json, sys
for tree, ids in json.load(sys.stdin):
    sys.path.insert(0, tree)
    passed = []
    for file in sorted({i.split("::")[0] for i in ids}):
        spec = importlib.util.spec_from_file_location("hidden", f"{tree}/{file}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for i in ids:
            try:
                getattr(module, i.split("::")[1])()
            except Exception:
                continue
            passed.append(i)
    print(json.dumps(passed))
    sys.path.remove(tree)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(tree):
            del sys.modules[name]
"""


def run_hidden_tests(tmp_path: Path, trees: list[tuple[Task, dict[str, str]]]) -> list[set[str]]:
    """Which hidden tests pass in each tree, by one real interpreter."""
    jobs = []
    for number, (task, changes) in enumerate(trees):
        root = tmp_path / f"tree{number}"
        for path, content in (task.tree | changes | task.hidden_tests).items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        jobs.append((str(root), [*task.fail_to_pass, *task.pass_to_pass]))
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", RUNNER],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def read_issue(task: Task) -> tuple[str, ...]:
    """Module, function, arguments, outcome and what was expected."""
    match = re.fullmatch(
        r"([\w.]+)\.(\w+)\((.*)\) ((?:returned|raised) .*), expected (.*?)\. [A-Z].*", task.issue
    )
    assert match
    return match.groups()


class _Anonymous(ast.NodeTransformer):
    """Parameters and variables numbered in order of appearance, whole numbers made equal."""

    def __init__(self, function: ast.FunctionDef) -> None:
        stored = (
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        names = dict.fromkeys([*(arg.arg for arg in function.args.args), *stored])
        self.names = {name: f"n{number}" for number, name in enumerate(names)}

    def visit_arg(self, node):
        return ast.arg(self.names[node.arg])

    def visit_Name(self, node):
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_Constant(self, node):
        return ast.Constant(0 if type(node.value) is int else node.value)


def shapes_of(source: str) -> set[str]:
    """The functions of a module, whatever their names and constants."""
    shapes = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            node.name = "f"
            shapes.add(ast.dump(_Anonymous(node).visit(node)))
    return shapes


def shapes_of_split(split: str) -> set[str]:
    return {
        shape
        for template in TEMPLATES
        if template.heldout == (split == "heldout")
        for variant in template.variants
        for shape in shapes_of(variant.source)
    }


class TestTemplates:
    def test_enough_and_a_fifth_held_out(self):
        heldout = [template for template in TEMPLATES if template.heldout]
        assert len(DOMAINS) >= 10
        assert len(TEMPLATES) >= 60
        assert len({template.name for template in TEMPLATES}) == len(TEMPLATES)
        assert 0.2 <= len(heldout) / len(TEMPLATES) <= 0.25

    def test_no_function_in_both_splits(self):
        assert not shapes_of_split("train") & shapes_of_split("heldout")

    @pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
    def test_every_variant_has_telling_faults(self, template):
        for variant in template.variants:
            faults = find_faults(variant)
            assert faults
            for fault in faults:
                assert fault.undo.apply(fault.source) == variant.source
                assert fault.num_rivals <= MAX_RIVALS
                assert fault.undo.kind in SYMPTOMS

    def test_names_are_no_keywords(self):
        verbs = {"COMPUTE", "TOTAL", "TALLY", "CHECK", "BOUND", "FORMAT", "PICK"}
        pools = [role.names for word, role in ROLES.items() if word not in verbs]
        pools += [(*d.packages, *d.modules, *d.nouns) for d in DOMAINS]
        for name in itertools.chain.from_iterable(pools):
            assert name.isidentifier()
            assert not keyword.iskeyword(name)


class TestDrawn:
    def test_none_is_held_out_whether_right_or_faulty(self):
        heldout = shapes_of_split("heldout")
        for _, template in drawn_templates():
            for variant in template.variants:
                assert not template.heldout
                assert heldout.isdisjoint(shapes_of(variant.source))
                for change in find_changes(variant.source):
                    assert heldout.isdisjoint(shapes_of(change.apply(variant.source)))

    def test_all_differ_and_fit_what_an_expert_reads(self):
        templates = [template for _, template in drawn_templates()]
        sources = [variant.source for template in templates for variant in template.variants]
        assert len(templates) == NUM_DRAWN
        assert len({template.name for template in templates}) == len(set(sources)) == NUM_DRAWN
        assert max(source.count("\n") for source in sources) <= CONTEXT_LINES

    def test_most_have_a_telling_fault(self):
        templates = [template for _, template in drawn_templates()[:: NUM_DRAWN // 100]]
        useful = [t for t in templates if any(find_faults(variant) for variant in t.variants)]
        assert len(useful) > 0.8 * len(templates)


class TestChanges:
    def test_positions_and_kinds(self):
        source = (
            "def F(AMOUNT1, AMOUNT2):\n    if (AMOUNT1 + 1) <= AMOUNT2:\n        return [0][-1]"
        )
        found = {(c.line, c.old, c.new, c.kind) for c in find_changes(source)}
        assert found == {
            (2, "+", "-", "direction"),
            (2, "1", "0", "offset"),
            (2, "<=", "<", "boundary"),
            (2, "<=", ">=", "reversed"),
            (2, "AMOUNT1", "AMOUNT2", "argument"),
            (2, "AMOUNT2", "AMOUNT1", "argument"),
            (3, "0", "1", "offset"),
            (3, "-1", "0", "end"),
        }
        for change in find_changes(source):
            ast.parse(change.apply(source))
            assert change.apply(source) != source


class TestTasks:
    @pytest.mark.parametrize(("split", "num_tasks"), [("train", 400), ("heldout", 100)])
    def test_distinct_and_deterministic(self, split, num_tasks):
        tasks = generate_tasks(split, num_tasks, 7)
        assert tasks == generate_tasks(split, num_tasks, 7)
        assert tasks != generate_tasks(split, num_tasks, 8)
        assert tasks[:50] == generate_tasks(split, 50, 7)
        assert len({task.task_id for task in tasks}) == num_tasks
        assert len({json.dumps(task.tree, sort_keys=True) for task in tasks}) == num_tasks
        assert {task.split for task in tasks} == {split}
        written = {t.name for t in TEMPLATES if t.heldout == (split == "heldout")}
        found = {task.template for task in tasks}
        assert written <= found
        assert (found == written) == (split == "heldout")

    def test_same_on_every_machine(self):
        """Hash randomization changes nothing."""
        code = (
            "from sampler_fleet.episodes.tasks.generate import generate_tasks;"
            "print([t.task_id for t in generate_tasks('heldout', 20, 3)])"
        )
        outputs = {
            subprocess.run(
                [sys.executable, "-c", code],
                env={"PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        }
        assert outputs == {f"{[t.task_id for t in generate_tasks('heldout', 20, 3)]}\n"}

    @pytest.mark.parametrize("split", SPLITS)
    def test_held_out_functions_never_in_training_trees(self, split):
        found = {
            shape
            for task in generate_tasks(split, 300, 1)
            for path, content in (task.tree | task.fix).items()
            if path.endswith(".py") and not path.startswith("tests/")
            for shape in shapes_of(content)
        }
        heldout = shapes_of_split("heldout")
        assert (found & heldout) == (heldout if split == "heldout" else set())

    @pytest.mark.parametrize("split", SPLITS)
    def test_hidden_tests_tell_the_repair(self, split, tmp_path):
        tasks = generate_tasks(split, 80, 11)
        faulty = run_hidden_tests(tmp_path / "faulty", [(task, {}) for task in tasks])
        fixed = run_hidden_tests(tmp_path / "fixed", [(task, task.fix) for task in tasks])
        for task, before, after in zip(tasks, faulty, fixed, strict=True):
            assert task.fail_to_pass
            assert task.pass_to_pass
            assert before == set(task.pass_to_pass), task.task_id
            assert after == {*task.fail_to_pass, *task.pass_to_pass}, task.task_id

    def test_visible_tests_pass_in_the_faulty_tree(self, tmp_path):
        trees = []
        for task in generate_tasks("train", 40, 5):
            (path,) = (path for path in task.tree if path.startswith("tests/"))
            names = re.findall(r"def (test_\w+)", task.tree[path])
            ids = tuple(f"{path}::{name}" for name in names)
            trees.append((replace(task, fail_to_pass=ids, pass_to_pass=()), {}))
        for (task, _), passed in zip(trees, run_hidden_tests(tmp_path, trees), strict=True):
            assert passed == set(task.fail_to_pass)

    def test_cheating_with_the_issue_fails(self, tmp_path):
        """Neither returning what the issue expects always, nor for its call alone, passes."""
        trees = []
        for task in generate_tasks("train", 60, 3) + generate_tasks("heldout", 30, 3):
            _, name, arguments, _, expected = read_issue(task)
            (path,) = task.fix
            for cheat in (
                f"def {name}(*args):\n    return {expected}\n",
                f"honest = {name}\ndef {name}(*args):\n"
                f"    return {expected} if args == ({arguments},) else honest(*args)\n",
            ):
                trees.append((task, {path: f"{task.tree[path]}\n{cheat}"}))
        for (task, _), passed in zip(trees, run_hidden_tests(tmp_path, trees), strict=True):
            assert passed < {*task.fail_to_pass, *task.pass_to_pass}, task.task_id

    def test_the_issue_tells_what_happens(self, tmp_path):
        """Its call really gives what it says, and what it expects after the repair."""
        trees = []
        for task in generate_tasks("train", 60, 9):
            module, name, arguments, outcome, expected = read_issue(task)
            call = f"{name}({arguments})"
            says = (
                f"    assert repr({call}) == {outcome.removeprefix('returned ')!r}\n"
                if outcome.startswith("returned")
                else f"    try:\n        {call}\n    except {outcome.split()[1]}:\n        return\n"
                "    raise AssertionError\n"
            )
            test = (
                f"from {module} import {name}\n"
                f"def test_before():\n{says}"
                f"def test_after():\n    assert repr({call}) == {expected!r}\n"
            )
            changed = replace(
                task,
                hidden_tests={"t.py": test},
                fail_to_pass=("t.py::test_before", "t.py::test_after"),
                pass_to_pass=(),
            )
            trees += [(changed, {}), (changed, task.fix)]
        passed = run_hidden_tests(tmp_path, trees)
        assert passed == [{"t.py::test_before"}, {"t.py::test_after"}] * (len(trees) // 2)

    def test_bad_requests(self):
        with pytest.raises(BadInputError, match="train or heldout"):
            generate_tasks("test", 1, 0)
        assert generate_tasks("train", 0, 0) == []


class TestProblems:
    @pytest.mark.parametrize("split", SPLITS)
    def test_one_edit_repairs_and_the_misses_do_not(self, split):
        for problem in itertools.islice(generate_problems(split, 2), 300):
            before, after = problem.task.tree[problem.path], problem.task.fix[problem.path]
            assert problem.repair.apply(before) == after
            changed = [
                pair
                for pair in zip(before.split("\n"), after.split("\n"), strict=True)
                if pair[0] != pair[1]
            ]
            assert len(changed) == 1
            for miss in (*problem.near_misses, *problem.far_misses):
                assert miss.apply(before) not in (before, after)

    def test_edits_refuse_what_sed_reads_otherwise(self):
        for old in (".", "[0]", "a|b", "a*", "", "^a"):
            with pytest.raises(AssertionError):
                Edit(path="a.py", line=1, old=old, new="x")
