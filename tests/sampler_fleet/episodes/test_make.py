"""Tasks from real packages: what is read, mutated, kept, told, and solved end to end."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from contracts.errors import BadInputError
from contracts.types import Ending, SamplingParams
from sampler_fleet.__main__ import app
from sampler_fleet.episodes.agent import EpisodeLimits, run_episode
from sampler_fleet.episodes.base import SandboxError, Task
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.sandbox import SandboxPool
from sampler_fleet.episodes.tasks.check import Outcome as Checked
from sampler_fleet.episodes.tasks.check import check_task
from sampler_fleet.episodes.tasks.edit import Edit
from sampler_fleet.episodes.tasks.generate import Problem
from sampler_fleet.episodes.tasks.make.issue import write_issue
from sampler_fleet.episodes.tasks.make.make import (
    Outcome,
    choose_mutations,
    find_subject,
    make_tasks,
)
from sampler_fleet.episodes.tasks.make.mutations import find_mutations
from sampler_fleet.episodes.tasks.make.package import Package, SideModule, read_package
from sampler_fleet.episodes.tasks.make.write import write_task
from sampler_fleet.episodes.tasks.script import ScriptConfig, play
from sampler_fleet.episodes.tasks.shell import run_command
from sampler_fleet.episodes.tasks.sources import read_tasks
from tests.sampler_fleet.episodes.test_episode import Scripted

ROOT = Path(__file__).parents[3]
LEDGER = ROOT / "tests" / "data" / "packages" / "ledger-1.2"
# Unpacked sdists of real packages; nothing brings them: pip download --no-binary :all: NAME
SDISTS = sorted(path.parent for path in (ROOT / ".cache" / "sdists").glob("*/PKG-INFO"))


def package(source: str, tests: str, name: str = "subject") -> Package:
    """A package of one module and one file of tests."""
    module = SideModule(path="test_it.py", source=tests, is_tests=True)
    files = {f"{name}.py": source}
    return Package(
        name=name, version="1", license="", url="", files=files, tests={"test_it": module}
    )


async def make(subject, pool, out: Path, num: int, jobs: int = 4) -> tuple[list[Task], Counter]:
    outcomes: Counter[Outcome] = Counter()
    tasks = make_tasks(
        subject,
        pool,
        num=num,
        seed=3,
        num_jobs=jobs,
        on_tried=lambda outcome: outcomes.update((outcome,)),
    )
    out.mkdir()
    async for task in tasks:
        write_task(task, subject.hidden, out)
    return (read_tasks(out) if any(out.iterdir()) else []), outcomes


class TestPackages:
    def test_an_sdist(self):
        ledger = read_package(LEDGER)
        assert (ledger.name, ledger.version, ledger.license) == ("ledger", "1.2", "Apache-2.0")
        assert ledger.url == "https://example.org/ledger"
        assert {*ledger.files} == {
            *("ledger/__init__.py", "ledger/account.py", "ledger/text.py", "README.md", "LICENSE")
        }
        assert {name for name, module in ledger.tests.items() if module.is_tests} == {
            *("tests.test_account", "tests.test_text")
        }
        assert {"tests", "tests.conftest", "tests.amounts"} < ledger.tests.keys()

    def test_a_checkout(self, tmp_path):
        (tmp_path / "pyproject.toml").write_text(
            '[project]\nname = "my-tool"\nversion = "3"\nlicense = {text = "MIT"}\n'
        )
        (tmp_path / "my_tool.py").write_text("x = 1\n")
        (tmp_path / "helper.py").write_text("y = 1\n")
        (tmp_path / "my_tool_test.py").write_text("def test(): pass\n")
        found = read_package(tmp_path)
        assert (found.name, found.version, found.license) == ("my-tool", "3", "MIT")
        assert ({*found.files}, {*found.tests}) == ({"my_tool.py"}, {"my_tool_test"})

    @pytest.mark.parametrize(
        "files, expected",
        [
            ({"it/__init__.py": "", "it/x.py": "x = 1\n"}, "expected tests"),
            ({"it/__init__.py": "", "test_it.py": "", "it/x.pyx": ""}, "pure-Python"),
            ({"test_it.py": "", "setup.py": ""}, "a Python package or module"),
            ({"it.py": "", "test_it.py": "\udcff"}, "expected UTF-8"),
            ({"it.py": "", "PKG-INFO": "Name: ../it\nVersion: 1\n"}, "a package's name"),
        ],
    )
    def test_refusals(self, tmp_path, files, expected):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(BadInputError, match=expected):
            read_package(tmp_path)


SAMPLE = '''\
"""A docstring with 1 < 2."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3

__version__ = "1.0"


def clip(value: "int", low=0, *, name="größe"):  # 1 < 2
    """More than 1 < 2."""
    if (value) < low and not name:  # kept
        raise ValueError(f"{value + 1} is too low")
    ä = value[1:low]; return max(ä, low * 2,  low+1)
'''


class TestMutations:
    def test_only_the_text_of_one_place_changes(self):
        original = ast.dump(ast.parse(SAMPLE))
        for mutation in find_mutations("a.py", SAMPLE):
            mutant = mutation.apply(SAMPLE)
            end = mutation.start + len(mutation.old)
            assert SAMPLE[mutation.start : end] == mutation.old
            assert mutant == SAMPLE[: mutation.start] + mutation.new + SAMPLE[end:]
            assert ast.dump(ast.parse(mutant)) != original
            assert mutation.function == "clip"  # not the docstrings, the version, or for types

    def test_operators(self):
        found = {(m.old, m.new, m.kind) for m in find_mutations("a.py", SAMPLE)}
        assert found >= {
            ("<", "<=", "boundary"),
            ("<", ">", "reversed"),
            ("and", "or", "combine"),
            ("not ", "", "negation"),
            ("0", "1", "default"),
            ("e", "", "default"),
            ("ValueError", "TypeError", "exception"),
            ("1", "", "slice"),
            ("low", "", "slice"),
            ("1", "2", "constant"),
            ("max", "min", "end"),
            ("*", "//", "scale"),
            ("+", "-", "direction"),
            ("low * 2,  low+1", "low+1,  low * 2", "argument"),
        }
        assert not any("int" in old or old == "value + 1" for old, _, _ in found)

    def test_statements(self):
        source = "def f(x, log):\n    for a in x:\n        if a: # why\n            break\n"
        source += "        log(a)\n    if not x:\n        return 0\n    return len(x)\n"
        mutants = [(m.kind, m.apply(source)) for m in find_mutations("a.py", source)]
        assert ("loop", source.replace("break", "continue")) in mutants
        assert ("branch", source.replace("break", "pass")) in mutants
        assert ("statement", source.replace("log(a)\n", "pass\n")) in mutants
        assert ("branch", source.replace("return 0", "pass")) in mutants
        assert ("return", source.replace("return len(x)", "return")) in mutants
        assert ("negation", source.replace("if a:", "if not a:")) in mutants


class TestIssues:
    def test_the_shortest_failure_is_told(self):
        told = {"kind": "differs", "call": "m.f(1)", "observed": "2", "expected": "3"}
        longer = told | {"call": "m.f(1000)"}
        for seed in range(9):
            text = write_issue({"a": longer, "b": told}, Random(seed))
            assert all(part in text for part in ("`m.f(1)`", "`2`", "`3`"))

    @pytest.mark.parametrize(
        "change",
        [
            {"kind": "load"},
            {"steps": "x\n" * 30},
            {"observed": "9" * 2000},
            {"call": "self.thing()"},
        ],
    )
    def test_what_would_not_be_understood_is_not_told(self, change):
        told = {"kind": "differs", "call": "m.f(1)", "observed": "2", "expected": "3"}
        assert write_issue({"a": told | change, "b": {}}, Random(0)) == ""


class TestSubjects:
    async def test_tests_of_every_style(self, pool):
        subject = await find_subject(read_package(LEDGER), pool)
        names = {name.removeprefix("tests/") for name in subject.tests}
        assert subject.num_tests == 16  # one is left out: its fixture is pytest's own
        assert names == {
            *(f"test_account.py::test_{n}" for n in ("put", "take_to_the_limit", "too_much")),
            "test_account.py::TestEntries::test_newest_first",
            "test_account.py::TestEntries::test_as_many_as_wanted",
            "test_account.py::OpeningTest::test_balance",
            *(f"test_text.py::test_parse[{n}]" for n in range(4)),
            *(f"test_text.py::test_both_ways[{n}]" for n in range(4)),
            "test_text.py::test_describe",
        }

    async def test_only_what_tests_run_is_mutated(self, pool):
        subject = await find_subject(read_package(LEDGER), pool)
        mutations = choose_mutations(subject, Random(0))
        assert {m.path for m in mutations} == {"ledger/account.py", "ledger/text.py"}
        assert "amount + 1" in subject.package.files["ledger/text.py"]
        assert not any(m.function == "never_tested" for m in mutations)
        assert mutations == choose_mutations(subject, Random(0))
        assert mutations != choose_mutations(subject, Random(1))

    async def test_more_of_pytest(self, pool):
        source = "def half(x):\n    return x / 2\n"
        tests = """
import pytest
from subject import half
seen = []

@pytest.fixture(autouse=True, scope="module")
def always():
    seen.append(1)

@pytest.fixture(name="two")
def _two(one):
    return one + 1

@pytest.fixture
def one():
    return 1

def test_fixtures(two):
    assert half(two) == 1 and seen

@pytest.mark.parametrize("x", [1, pytest.param(3, marks=pytest.mark.xfail), (0.1 + 0.2)])
class TestHalf:
    @pytest.mark.parametrize(["y"], [(1,), (2,)])
    @pytest.mark.slow
    def test_near(self, x, y):
        assert half(x) * 2 * y == pytest.approx(x * y)
        assert half(x) != pytest.approx(x)

    @pytest.mark.skip
    def test_not(self, x):
        pass

def test_wrong():
    with pytest.raises(TypeError):
        half(4)

def test_other_error():
    with pytest.raises((KeyError, ValueError)) as caught:
        half("a")

def test_message():
    with pytest.raises(TypeError, match="unsupported") as caught:
        half("a")
    assert "str" in str(caught.value)
    pytest.raises(TypeError, half, None)
"""
        subject = await find_subject(package(source, tests), pool)
        near = [f"TestHalf::test_near[{n}]" for n in range(4)]
        assert {name.partition("::")[2] for name in subject.tests} == {
            *("test_fixtures", "test_message", *near)
        }

    @pytest.mark.parametrize(
        "source, tests, found",
        [
            ("x = 1", "import subject\ndef test_a(): assert subject.x == 2", "0 of 1"),
            ("x = 1", "import absent\ndef test_a(): pass\n", "No module named 'absent'"),
            ("import random\nx = random.random()", "import subject\ndef test_a():\n"
             "    assert subject.x < 0\ndef test_b(): pass", "1 of 2"),
        ],
    )  # fmt: skip
    async def test_tests_that_do_not_pass(self, pool, source, tests, found):
        with pytest.raises(BadInputError, match=f"at least two tests that pass.*{found}"):
            await find_subject(package(source, tests), pool)

    async def test_a_package_that_the_sandbox_has(self, pool):
        with pytest.raises(BadInputError, match=r"own Python lacks.*json"):
            await find_subject(package("x = 1", "def test_a(): pass", name="json"), pool)


class TestTasks:
    @pytest.mark.slow
    async def test_all_of_a_package(self, pool, grader, tmp_path):
        original = read_package(LEDGER)
        subject = await find_subject(original, pool)
        tasks, outcomes = await make(subject, pool, tmp_path / "out", num=100)
        assert outcomes[Outcome.KEPT] == len(tasks) >= 10
        assert outcomes[Outcome.SURVIVED] > 0 and outcomes[Outcome.REPEATED] > 0
        for task in tasks:
            assert task.license == "Apache-2.0" and task.template == "ledger"
            assert task.tree["LICENSE"] == original.files["LICENSE"]
            assert {*task.fail_to_pass, *task.pass_to_pass} == {*subject.tests}
            assert task.fail_to_pass and task.pass_to_pass
            ((path, fixed),) = task.fix.items()
            assert fixed == original.files[path] and task.tree[path] != fixed
            hidden = {name.split("::")[0] for name in task.fail_to_pass}
            assert not hidden & task.tree.keys()
            shown = {"tests/test_account.py", "tests/test_text.py"} - hidden
            assert shown <= task.tree.keys()
            assert "line" not in task.issue and path not in task.issue
        sample = Random(0).sample(tasks, 3)
        assert [(await check_task(t, grader, str)).outcome for t in sample] == [Checked.USABLE] * 3

    async def test_the_same_however_many_run_at_a_time(self, pool, tmp_path):
        subject = await find_subject(read_package(LEDGER), pool)
        one, _ = await make(subject, pool, tmp_path / "one", num=3, jobs=1)
        four, _ = await make(subject, pool, tmp_path / "four", num=3, jobs=4)
        assert one == four and len(one) == 3

    async def test_what_is_not_kept(self, pool, tmp_path):
        source = "n = 0\ndef count(x):\n    n = 0\n    while n < x:\n        n += 1\n    return n\n"
        tests = "import subject\ndef test_a(): assert subject.count(2) == 2\n"
        tests += "def test_b(): assert subject.count(2) == 2\n"
        subject = await find_subject(package(source, tests), pool)
        tasks, outcomes = await make(subject, pool, tmp_path / "out", num=9)
        assert not tasks
        assert outcomes[Outcome.SLOW] > 0 and outcomes[Outcome.BROKEN] > 0

    async def test_a_mutant_that_takes_its_sandbox_down(self, pool, tmp_path):
        class Lost(SandboxPool):
            def open(self, tree):
                raise SandboxError("gone")

        source, tests = "def f():\n    return 1\n", "import subject\n"
        tests += "def test_a(): assert subject.f() == 1\ndef test_b(): pass\n"
        subject = await find_subject(package(source, tests), pool)
        tasks, outcomes = await make(subject, Lost(1, host=pool._host), tmp_path / "out", num=9)
        assert not tasks and {*outcomes} == {Outcome.LOST}

    async def told(self, pool, out, source: str, tests: str) -> list[str]:
        tests = f"import pytest\nimport subject\n{tests}\ndef test_b(): pass\n"
        subject = await find_subject(package(source, tests), pool)
        tasks, outcomes = await make(subject, pool, out, num=9)
        return [task.issue for task in tasks] or [*outcomes]

    @pytest.mark.parametrize(
        "source, test, parts",
        [
            (  # a value is told by the steps to it
                "def f(x):\n    return [x + 1]\n",
                "    out = subject.f(3)\n    assert out == [4]",
                ["out = subject.f(3)", "`out`", "`[4]`"],
            ),
            (
                "def f(x):\n    if not x:\n        raise ValueError(x)\n",
                "    with pytest.raises(ValueError):\n        subject.f(0)",
                ["`subject.f(0)`", "ValueError"],
            ),
            (
                "class A:\n    def __init__(self): self.n = 7\n    def up(self): self.n += 2\n",
                "    assert made.n == 7\n    made.up()\n    assert made.n == 9\n"
                "@pytest.fixture\ndef made():\n    return subject.A()\n",
                ["made = subject.A()\n", "`made.n`", "`9`"],
            ),
            (  # an assignment may be the call
                "class A(dict):\n    def __setitem__(self, k, v):\n"
                "        if k == 4:\n            super().__setitem__(k, v)\n"
                "        else:\n            raise KeyError(k)\n",
                "    a = subject.A()\n    a[4] = 7\n    assert len(a) == 1",
                ["a = subject.A()", "`a[4] = 7`", "KeyError"],
            ),
            (  # values alone would tell nothing
                "def f(x):\n    return [x, x + 1]\n",
                "    seen = subject.f(3)\n    assert len(seen) == 2 and seen\n"
                "    assert sum(seen) == 7",
                ["seen = subject.f(3)", "`sum(seen)`", "`7`"],
            ),
            (
                "def f(x):\n    return x < 3\n",
                "    for n in (1, 2):\n        assert subject.f(n)\n    assert not subject.f(3)",
                ["subject.f("],
            ),
        ],
    )
    async def test_what_is_told(self, pool, tmp_path, source, test, parts):
        given = "made" if "fixture" in test else ""
        issues = await self.told(pool, tmp_path / "out", source, f"def test_a({given}):\n{test}\n")
        assert any(all(part in issue for part in parts) for issue in issues), issues

    @pytest.mark.parametrize(
        "test",
        [
            "    try:\n        subject.f(3)\n    except ValueError as e:\n"
            "        assert e.args[0] == 4",
            "    for n in (3, 5):\n        out = subject.g(n)\n        assert out == [n]",
        ],
    )
    async def test_what_is_not_told(self, pool, tmp_path, test):
        source = "def f(x):\n    raise ValueError(x + 1)\ndef g(x):\n    return [x * 1]\n"
        issues = await self.told(pool, tmp_path / "out", source, f"def test_a():\n{test}\n")
        assert Outcome.UNTOLD in issues or not any("`e" in i or "`out" in i for i in issues)

    async def test_a_default_is_not_shown_by_the_signature(self, pool, tmp_path):
        source = "def f(x=5):\n    return [x]\n"
        tests = "import subject\ndef test_a(): assert subject.f() == [5]\n"
        tests += "def test_b(): assert subject.f(2) == [2]\n"
        subject = await find_subject(package(source, tests), pool)
        tasks, _ = await make(subject, pool, tmp_path / "out", num=9)
        (task,) = tasks  # 5 to 4 or to 6: the same tests fail
        assert "subject.f()" in task.issue and "x=" not in task.issue


class TestCommand:
    def test_tasks_are_written(self, host, tmp_path):
        out = tmp_path / "out"
        command = ["tasks", "make", str(LEDGER), "--out", str(out), "--num", "1"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "15 of 16 tests can be used" in result.output and "wrote 1 tasks" in result.output
        assert [task.dataset for task in read_tasks(out)] == ["local"]

        again = CliRunner().invoke(app, command)
        assert again.exit_code != 0 and "an empty one" in again.output


class TestReferenceAgent:
    """The demo's scripted expert on made tasks: sandbox, patch, grading, all real."""

    @pytest.mark.slow
    async def test_solves_a_share(self, pool, grader, tokenizer_files, tmp_path):
        chat = ChatFormat.load(tokenizer_files)
        subject = await find_subject(read_package(LEDGER), pool)
        tasks, _ = await make(subject, pool, tmp_path / "out", num=14)
        problems = [problem for task in tasks if (problem := as_problem(task))]
        assert len(problems) >= 4
        rewards = []
        for number, problem in enumerate(problems):
            turns = play(problem, ScriptConfig(wrong_edit=0.4), Random(number))
            tree = dict(problem.task.tree)
            for turn in turns:
                run_command(turn.command, tree)
            replies = [
                chat.reply(turn.command) if turn.is_call else chat.reply_text(turn.command)
                for turn in turns
            ]
            trajectory = await run_episode(
                problem.task,
                session_id=f"session-{number}",
                generator=Scripted(replies),
                chat=chat,
                sandboxes=pool,
                grader=grader,
                limits=EpisodeLimits(max_context_tokens=1 << 16, max_turns=8),
                sampling=SamplingParams(max_new_tokens=2000, seed=1),
            )
            assert trajectory.ending == Ending.SUBMITTED
            assert trajectory.reward == float(tree == problem.task.tree | problem.task.fix)
            rewards.append(trajectory.reward)
        assert 0 < sum(rewards) < len(rewards)


def as_problem(task: Task) -> Problem | None:
    """What the scripted expert needs; None where one substitution by `sed` isn't the repair."""
    ((path, fixed),) = task.fix.items()
    wrong = task.tree[path].split("\n")
    right = fixed.split("\n")
    changed = [n for n, (a, b) in enumerate(zip(wrong, right, strict=False)) if a != b]
    if len(wrong) != len(right) or len(changed) != 1:
        return None
    (line,) = changed
    repair = find_edit(path, line + 1, wrong[line], right[line])
    functions = [
        node.name
        for node in ast.walk(ast.parse(fixed))
        if isinstance(node, ast.FunctionDef) and node.lineno - 1 <= line < (node.end_lineno or 0)
    ]
    if repair is None or not functions:
        return None
    return Problem(
        task=task,
        path=path,
        function=functions[-1],
        repair=repair,
        near_misses=(),
        far_misses=(),
    )


def find_edit(path: str, line: int, wrong: str, right: str) -> Edit | None:
    """The shortest text whose first replacement makes one line the other."""
    for length in range(1, len(wrong) + 1):
        for start in range(len(wrong) - length + 1):
            old, rest = wrong[start : start + length], wrong[start + length :]
            if not (right.startswith(wrong[:start]) and right.endswith(rest)):
                continue
            new = right[start : len(right) - len(rest)]
            if len(right) < start + len(rest) or wrong.replace(old, new, 1) != right:
                continue
            try:
                return Edit(path=path, line=line, old=old, new=new)
            except AssertionError:  # what `sed` would read otherwise
                continue
    return None


@pytest.mark.slow
@pytest.mark.parametrize("sdist", SDISTS, ids=lambda path: path.name)
async def test_real_packages(pool, grader, sdist, tmp_path):
    """Of each sdist that somebody unpacked into .cache/sdists."""
    subject = await find_subject(read_package(sdist), pool)
    tasks, _ = await make(subject, pool, tmp_path / "out", num=3)
    assert len(tasks) == 3
    assert [(await check_task(task, grader, str)).outcome for task in tasks] == [Checked.USABLE] * 3
