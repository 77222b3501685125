"""A task in an image, for each judge that pytest has a part in."""

from __future__ import annotations

from sampler_fleet.episodes.base import Checkout, Judge, Task
from sampler_fleet.episodes.containers.launch import ContainerLimits
from sampler_fleet.episodes.patch import Patch
from sampler_fleet.episodes.tasks.sources.runners import test_command as command_of

LIMITS = ContainerLimits(output_bytes=4 << 20, patch_bytes=1 << 20, test_seconds=60)
WRONG = "def total(price, count):\n    return price + count\n"
RIGHT = "def total(price, count):\n    return price * count\n"
TREE = {
    "shop/__init__.py": "",
    "shop/cart.py": WRONG,
    "setup.cfg": "[tool:pytest]\naddopts = -q\n",
    "tests/test_old.py": "def test_old():\n    assert True\n",
    "tests/conftest.py": "import sys\nsys.path.insert(0, '.')\n",
}
HIDDEN = """\
import unittest
import pytest
from shop import cart

def test_total():
    assert cart.total(3, 4) == 12

@pytest.mark.parametrize("word", ["a b", "c"])
def test_word(word):
    assert word

@pytest.mark.xfail
def test_expected():
    assert False

@pytest.mark.skip
def test_skipped():
    pass

class TestCase(unittest.TestCase):
    def test_method(self):
        self.assertEqual(cart.total(1, 1), 1)
"""
F2P = ("tests/test_new.py::test_total", "tests/test_new.py::TestCase::test_method")
P2P = (
    *("tests/test_new.py::test_word[a", "tests/test_new.py::test_word[c]"),  # cut at the space
    "tests/test_new.py::test_expected",
)
FIX = """\
--- a/shop/cart.py
+++ b/shop/cart.py
@@ -1,2 +1,2 @@
 def total(price, count):
-    return price + count
+    return price * count
"""
# As R2E-Gym, MiMo and Harbor run tests: by a script that takes the directory for importable.
SCRIPT = "python -B -m pytest -rA -p no:cacheprovider tests"
REWARD = f"{SCRIPT}\n[ $? = 0 ] && reward=1 || reward=0\necho $reward >/logs/verifier/reward.txt"
STATUSES = {
    **dict.fromkeys(("test_total", "TestCase.test_method", "test_old"), "PASSED"),
    **dict.fromkeys(("test_word[a b]", "test_word[c]"), "PASSED"),
    "test_expected": "XFAIL",
}


def new_file(path: str, text: str) -> str:
    lines = text.splitlines()
    head = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    return f"diff --git a/{path} b/{path}\nnew file mode 100644\n{head}" + "".join(
        f"+{line}\n" for line in lines
    )


def a_task(judge: Judge, **changes) -> Task:
    command = {Judge.EXIT_STATUS: SCRIPT, Judge.STATUSES: SCRIPT, Judge.REWARD_FILE: REWARD}
    by_witness, _ = command_of("corner/shop", "", (*F2P, *P2P), "")
    preamble = by_witness.partition("pytest")[0]
    checkout = Checkout(
        image="base",
        workdir="/testbed",
        fix_patch=FIX,
        test_patch=new_file("tests/test_new.py", HIDDEN),
        test_command=preamble + command[judge] if judge in command else by_witness,
        judge=judge,
        expected=STATUSES,
    )
    return Task(
        task_id="cart",
        split="train",
        template="cart",
        issue="",
        fail_to_pass=F2P,
        pass_to_pass=P2P,
        checkout=checkout,
        **changes,
    )


def patch_of(files: dict[str, str]) -> Patch:
    return Patch(changed={path: text.encode() for path, text in files.items()})
