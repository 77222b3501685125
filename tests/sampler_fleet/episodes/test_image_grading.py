"""Verdicts on tasks in images whose tests are seen from inside, or leave a log."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from importlib import resources

import pytest

from sampler_fleet.episodes.base import Judge, Task
from sampler_fleet.episodes.tasks.sources.runners import test_command as command_of
from tests.sampler_fleet.episodes.image_tasks import (
    F2P,
    FIX,
    P2P,
    RIGHT,
    WRONG,
    a_task,
    new_file,
    patch_of,
)

JUDGES = (Judge.WITNESS, Judge.EXIT_STATUS, Judge.STATUSES, Judge.REWARD_FILE)


@pytest.mark.parametrize("judge", JUDGES)
async def test_honest(image_grader, judge):
    task = a_task(judge)
    verdict = await image_grader.grade(task, patch_of({"shop/cart.py": RIGHT}))
    assert verdict.passed, verdict.reason
    assert not (await image_grader.grade(task, patch_of({"note.txt": "x"}))).passed
    assert (await image_grader.grade_fix(task)).passed


async def test_files_that_contradict_pytest(image_grader):
    """As somebody who writes after the parser would leave them."""
    tests = [{"name": name, "status": "PASSED"} for name in (*F2P, *P2P)]
    for judge, path, text in (
        (Judge.TESTS, "/tmp/output.json", json.dumps({"tests": tests})),
        (Judge.REWARD_FILE, "/logs/verifier/reward.txt", "1"),
    ):
        task = a_task(Judge.EXIT_STATUS)
        assert task.checkout
        command = f"{task.checkout.test_command}\nprintf %s '{text}' > {path}"
        task = replace(task, checkout=replace(task.checkout, judge=judge, test_command=command))
        assert (await image_grader.grade(task, patch_of({"shop/cart.py": RIGHT}))).passed
        assert not (await image_grader.grade(task, patch_of({"note.txt": "x"}))).passed


async def test_two_rewards(image_grader):
    """The code under test wrote the one, and the tests the other."""
    task = a_task(Judge.REWARD_FILE)
    assert task.checkout
    command = "python3 -B -c 'import shop.cart'; echo 0 > /logs/verifier/reward.txt"
    task = replace(task, checkout=replace(task.checkout, test_command=command))
    module = "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')"
    verdict = await image_grader.grade(task, patch_of({"shop/cart.py": module}))
    assert verdict.reason == "the tests gave 0"


async def test_asking_for_the_version_is_no_run_of_tests(image_grader):
    task = a_task(Judge.EXIT_STATUS)
    assert task.checkout
    command = task.checkout.test_command.replace("python -B", "pytest --version; python -B")
    assert command != task.checkout.test_command
    task = replace(task, checkout=replace(task.checkout, test_command=command))
    verdict = await image_grader.grade(task, patch_of({"shop/cart.py": RIGHT}))
    assert verdict.passed, verdict.reason


# Like Django's: a program of the repository that runs unittest.
RUNTESTS = """\
import sys, unittest
sys.path.insert(0, ".")
suite = unittest.TestSuite()
for name in sys.argv[1:]:
    if not name.startswith("-") and name not in ("1", "2"):
        for group in unittest.defaultTestLoader.loadTestsFromName(name): suite.addTests(group)
result = unittest.TextTestRunner(verbosity=2).run(suite)
sys.exit(bool(result.failures or result.errors))
"""
CASES = """\
import unittest
from shop import cart

class CartTests(unittest.TestCase):
    def test_total(self):
        self.assertEqual(cart.total(3, 4), 12)

    def test_label(self):
        \"\"\"A label is a label.\"\"\"
        for part in "ab":
            with self.subTest(part):
                self.assertTrue(part)

class BrokenTests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise ValueError

    def test_never(self):
        pass
"""


def a_django_task() -> Task:
    task = a_task(Judge.WITNESS)
    tests = new_file("tests/cart_tests.py", CASES)
    command, judge = command_of("django/django", "3.0", (), tests)
    assert judge == Judge.WITNESS
    name = (
        "(cart_tests.CartTests.test_total)"
        if sys.version_info >= (3, 11)
        else "(cart_tests.CartTests)"
    )
    return replace(
        task,
        fail_to_pass=(f"test_total {name}",),
        pass_to_pass=("A label is a label.",),  # as a log has it
        checkout=replace(task.checkout, test_patch=tests, test_command=command),
    )


async def test_unittest(image_grader, image):
    (image / "base.image" / "tests" / "runtests.py").write_text(RUNTESTS)
    task = a_django_task()
    verdict = await image_grader.grade(task, patch_of({"shop/cart.py": RIGHT}))
    assert verdict.passed, verdict.reason
    verdict = await image_grader.grade(task, patch_of({"note.txt": "x"}))
    assert "test_total" in verdict.reason
    assert "is FAILED" in verdict.reason
    for module, reason in (
        ("import os; os._exit(0)", "ended from inside"),
        ("import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n" + WRONG, "must fail"),
        (
            "import unittest\nunittest.TestCase.run = lambda self, r: r.addSuccess(self)",
            "must fail",
        ),
        (
            "import unittest\nunittest.TestResult.addFailure = lambda s, t, e: s.addSuccess(t)\n"
            + WRONG,
            "must fail",
        ),
        ("import unittest\ndef total(*a): raise unittest.SkipTest('later')", "is SKIPPED"),
    ):
        verdict = await image_grader.grade(task, patch_of({"shop/cart.py": module}))
        assert not verdict.passed
        assert reason in verdict.reason


# Like SymPy's: all that is known of the tests is what a program of the repository prints.
BIN_TEST = """\
#!/usr/bin/python3
import importlib.util, sys
sys.path.insert(0, ".")
for path in sys.argv[1:]:
    if path.startswith("-"): continue
    spec = importlib.util.spec_from_file_location("tests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(f"{path}[1]")
    for name in vars(module):
        if name.startswith("test_"):
            try: getattr(module, name)(); print(name, "ok")
            except Exception: print(name, "F")
"""


async def test_log(image_grader, image):
    program = image / "base.image" / "bin" / "test"
    program.parent.mkdir()
    program.write_text(BIN_TEST)
    program.chmod(0o755)
    task = a_task(Judge.WITNESS)
    tests = new_file(
        "tests/test_sym.py",
        "from shop.cart import total\n\ndef test_sym():\n    assert total(3, 4) == 12\n",
    )
    command, judge = command_of("sympy/sympy", "1.9", (), tests)
    checkout = replace(task.checkout, test_patch=tests, test_command=command, judge=judge)
    task = replace(task, fail_to_pass=("test_sym",), pass_to_pass=(), checkout=checkout)
    assert (await image_grader.grade(task, patch_of({"shop/cart.py": RIGHT}))).passed
    for files, reason in (
        ({"note.txt": "x"}, "test_sym is FAILED"),
        ({"bin/test": "#!/bin/sh\necho test_sym ok\n"}, "nothing changed"),
        ({"shop/cart.py": "print('test_sym ok', flush=True)\nimport os; os._exit(0)"}, "must fail"),
        (
            {"shop/cart.py": "import builtins, re\nreal = print\nbuiltins.print = lambda *a: "
             "real(*[re.sub('^F$', 'ok', str(x)) for x in a])\n" + WRONG},
            "must fail",
        ),
    ):  # fmt: skip
        verdict = await image_grader.grade(task, patch_of(files))
        assert not verdict.passed
        assert reason in verdict.reason


async def test_what_a_fix_needs_is_not_dropped(image_grader):
    """Whatever its name, a file that the reference solution changes is source."""
    fix = FIX + new_file("shop/test/client.py", "x = 1\n") + new_file("conftest.py", "1 / 0\n")
    task = a_task(Judge.EXIT_STATUS)
    command = f"{task.checkout.test_command} && test -e shop/test/client.py -a ! -e conftest.py"
    task = replace(task, checkout=replace(task.checkout, fix_patch=fix, test_command=command))
    verdict = await image_grader.grade_fix(task)
    assert verdict.passed, verdict.reason
    files = {"shop/cart.py": RIGHT, "shop/test/client.py": "", "conftest.py": "1 / 0"}
    assert (await image_grader.grade(task, patch_of(files))).passed
    del files["shop/test/client.py"]
    assert not (await image_grader.grade(task, patch_of(files))).passed


async def test_no_tests_are_no_pass(image_grader):
    """A conftest.py of the tree imports what the patch changes: before there are any tests."""
    tests = new_file("shop/conftest.py", "from shop import cart\n")
    task = a_task(Judge.EXIT_STATUS)
    assert task.checkout
    checkout = replace(task.checkout, test_patch=task.checkout.test_patch + tests)
    checkout = replace(checkout, test_command=checkout.test_command + " shop")
    task = replace(task, checkout=checkout)
    verdict = await image_grader.grade(task, patch_of({"shop/cart.py": RIGHT}))
    assert verdict.passed, verdict.reason
    early = "import _pytest.main\n_pytest.main._main = lambda config, session: 0\n"
    verdict = await image_grader.grade(task, patch_of({"shop/cart.py": early + WRONG}))
    assert verdict.reason == "no test of the task was seen to pass"


def test_the_witness_runs_in_old_pythons():
    source = resources.files("sampler_fleet.episodes.containers").joinpath("witness.py").read_text()
    ast.parse(source, feature_version=(3, 5))
    assert "f'" not in source
    assert 'f"' not in source
