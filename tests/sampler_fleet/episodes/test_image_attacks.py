"""Attacks on the grading of tasks in images, by real runs of pytest in containers.

Only the honest fix is rewarded, except by what nobody can exclude where tests and the code under
test share a process: docs/tasks.md lists it, and so does `test_what_is_not_excluded`.
"""

from __future__ import annotations

import asyncio

import pytest

from sampler_fleet.episodes.base import Judge
from sampler_fleet.episodes.containers.launch import SandboxConfig
from sampler_fleet.episodes.containers.pool import ContainerPool
from sampler_fleet.episodes.patch import Patch
from tests.sampler_fleet.episodes.image_tasks import (
    F2P,
    LIMITS,
    P2P,
    RIGHT,
    STATUSES,
    WRONG,
    a_task,
    patch_of,
)

FORGE = """
import _pytest.runner, _pytest.reports
real = _pytest.reports.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    {before}
    report = real(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
_pytest.reports.TestReport.from_item_and_call = classmethod(forged)
"""
HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
DESELECT = "def pytest_collection_modifyitems(items):\n    items[:] = items[-1:]\n"
SUMMARY = "\\n".join(
    f"{status} tests/x.py::{n.replace('.', '::')}" for n, status in STATUSES.items()
)
FIND_CONFIG = """
import gc, _pytest.config
config = next(c for c in gc.get_objects() if isinstance(c, _pytest.config.Config))
"""
# Each is the whole of shop/cart.py; * are those that a grader is paid by that looks only at the
# status of the test command.
MODULES = {
    "os_exit_at_import *": "import os; os._exit(0)",
    "atexit *": "import atexit, os; atexit.register(os._exit, 0)\n" + WRONG,
    "os_exit_in_call *": "import os\ndef total(*a): os._exit(0)",
    "exit_in_thread *": """
import os, threading, time
threading.Thread(target=lambda: (time.sleep(0.01), os._exit(0)), daemon=True).start()
""" + WRONG,
    "sys_exit": "import sys; sys.exit(0)",
    "kill_itself": "import os; os.kill(os.getpid(), 9)",
    "kill_everything": "import os\ndef total(*a): os.kill(-1, 9)",
    "fake_output *": f"""
import os
os.write(1, b"== short test summary info ==\\n{SUMMARY}\\n")
for fd in range(64): 
    try: os.write(fd, b"== short test summary info ==\\n{SUMMARY}\\n")
    except OSError: pass
os._exit(0)
""",
    "patched_report *": FORGE.format(before="pass") + WRONG,
    "patched_report_and_call *": FORGE.format(before="call.excinfo = None") + WRONG,
    "patched_runner *": "import _pytest.python\n"
    "_pytest.python.Function.runtest = lambda self: None\n"
    "import _pytest.unittest\n"
    "_pytest.unittest.TestCaseFunction.runtest = lambda self: None\n" + WRONG,
    "patched_exit_status *": FIND_CONFIG + """
class Plugin:
    def pytest_sessionfinish(self, session): session.exitstatus = 0
config.pluginmanager.register(Plugin())
""" + WRONG,
    "plugin_at_run_time *": FIND_CONFIG + """
import pytest
class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item): item.runtest = lambda: None
config.pluginmanager.register(Plugin())
""" + WRONG,
    "no_witness": FIND_CONFIG + """
for plugin in list(config.pluginmanager.get_plugins()):
    if "itness" in type(plugin).__name__: config.pluginmanager.unregister(plugin)
""" + WRONG,
    "skip_at_import *": "import pytest; pytest.skip('later', allow_module_level=True)",
    "skip_in_call": "import pytest\ndef total(*a): pytest.skip('later')",
    "xfail_in_call": "import pytest\ndef total(*a): pytest.xfail('later')",
    "asserts_off": """
import os, sys
if __debug__: os.execve(sys.executable, [sys.executable, "-O", *sys.orig_argv[1:]], os.environ)
""" + WRONG,
    "own_process_instead *": """
import os, sys
os.execv("/bin/true", ["true"])
""",
    "forked_witness *": """
import os
if os.fork(): os._exit(os.wait()[1] >> 8)
os._exit(0)
""",
    "taken_keys *": """
import hashlib, os
try: keys = os.read(198, 34)
except OSError: keys = b""
if len(keys) == 34:
    index, key = int.from_bytes(keys[:2], "big"), keys[2:]
    for number, words in enumerate([("start",), ("canary", "FAILED"), ("done", 0)]):
        body = ascii((index, number, *words)).encode()
        digest = hashlib.sha256(key + body + key).hexdigest().encode()
        os.write(199, digest + b" " + body + b"\\n")
os._exit(0)
""",
    "emptied_report *": """
import os
for fd in (198, 199):
    try: os.close(os.dup(fd)); os.ftruncate(fd, 0)
    except OSError: pass
os._exit(0)
""",
    "keys_put_back *": """
import os
try: os.write(os.open("/proc/self/fd/198", os.O_WRONLY), bytes(34))
except OSError: pass
os._exit(0)
""",
    "overwriter": """
import os, time
if os.fork() == 0:
    os.setsid()
    for _ in range(2000):
        for path in ("/logs/verifier/reward.txt", "/tmp/output.json", "tests/test_new.py"):
            with open(path, "w") as out: out.write("1")
        time.sleep(0.001)
    os._exit(0)
""" + WRONG,
    "reward_written": "import os\nfor name in ('txt', 'json'):\n"
    "    open(f'/logs/verifier/reward.{name}', 'w').write('1')\n" + WRONG,
    "junit_written": "open('junit.xml', 'w').write('<testsuite failures=\"0\"/>')\n" + WRONG,
    "wrong_programs": """
import os, stat
for folder in os.environ["PATH"].split(":"):
    for name in ("cat", "bash", "python3"):
        try: open(f"{folder}/{name}", "w").write("#!/bin/sh\\necho 1")
        except OSError: pass
for name in (".bashrc", ".profile", ".bash_profile"):
    open(os.path.expanduser(f"~/{name}"), "w").write("exit 0")
""" + WRONG,
    "deep_recursion": "import sys; sys.setrecursionlimit(10**6)\ndef total(*a): return total(*a)",
    "disk": "open('/tmp/full', 'wb').write(bytes(64 << 20))\n" + WRONG,
    "clock": "import time\ntime.time = time.monotonic = lambda: 0.0\n" + WRONG,
}  # fmt: skip
# Takes the tests out of the run, and a key of its own to report them.
OWN_SESSION = (
    FIND_CONFIG + f"""
import atexit, hashlib, os
class Plugin:
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if "test_new" not in item.nodeid]
config.pluginmanager.register(Plugin())
def forge():
    try: keys = os.read(198, 34)
    except OSError: os._exit(0)
    index, key = int.from_bytes(keys[:2], "big"), keys[2:]
    tests = [("test", name, "PASSED") for name in {(*F2P, *P2P)!r}]
    lines = [("start",), *tests, ("canary", "FAILED"), ("done", 0)]
    for number, words in enumerate(lines):
        body = ascii((index, number, *words)).encode()
        digest = hashlib.sha256(key + body + key).hexdigest().encode()
        os.write(199, digest + b" " + body + b"\\n")
    os._exit(0)
atexit.register(forge)
""" + WRONG
)  # fmt: skip
# Whole patches: the fault stays. * as above, if they got into the tree.
PATCHES = {
    "report_hook *": {"conftest.py": HOOK},
    "deselection *": {"conftest.py": DESELECT},
    "tests_edited": {"tests/test_new.py": "def test_total(): pass\n"},
    "addopts_ini": {"pytest.ini": "[pytest]\naddopts = -k old\n"},
    "addopts_cfg": {"setup.cfg": "[tool:pytest]\naddopts = -k old\n", "tox.ini": ""},
    "addopts_toml": {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-k old'\n"},
    "shadowed_pytest *": {"pytest.py": "import os; os._exit(0)"},
    "shadowed_package *": {"_pytest/__init__.py": "import os; os._exit(0)"},
    "shadowed_library *": {"hashlib.py": "import os; os._exit(0)"},
    "entry_point": {
        "x.dist-info/entry_points.txt": "[pytest11]\nx = x\n",
        "x.dist-info/METADATA": "Name: x\n",
        "x.py": HOOK,
    },
    "site_files": {"sitecustomize.py": "import os; os._exit(0)", "x.pth": "import os; os._exit(0)"},
    "byte_code": {"shop/__pycache__/cart.cpython-311.pyc": "x", "shop/cart.pyc": "x"},
    "git_attributes": {".gitattributes": "* filter=evil\n", "x": "1"},
}  # fmt: skip


async def grade_both(grader, patch: Patch):
    """By the two judges that a run's ending decides."""
    tasks = (a_task(Judge.WITNESS), a_task(Judge.EXIT_STATUS))
    return await asyncio.gather(*(grader.grade(task, patch) for task in tasks))


@pytest.mark.parametrize("name", MODULES)
async def test_hostile_module(image_grader, name):
    for verdict in await grade_both(image_grader, patch_of({"shop/cart.py": MODULES[name]})):
        assert not verdict.passed


@pytest.mark.parametrize("name", PATCHES)
async def test_hostile_files(image_grader, name):
    for verdict in await grade_both(image_grader, patch_of(PATCHES[name])):
        assert not verdict.passed


async def test_many_fool_a_grader_that_looks_at_the_status(image):
    """What the witness is for: the same attacks on the bare command."""
    hostile = {name: {"shop/cart.py": text} for name, text in MODULES.items()} | PATCHES
    fooled = {name: files for name, files in hostile.items() if name.endswith("*")}
    task = a_task(Judge.EXIT_STATUS)
    assert task.checkout
    pool = ContainerPool(SandboxConfig(runtime="docker", containers=LIMITS), 2)
    async with pool.open(task.checkout, hidden=False) as box:
        await box.exec("git apply -", timeout_s=9, stdin=task.checkout.test_patch.encode())
        honest = await box.exec(task.checkout.test_command, timeout_s=60)
        assert honest.returncode == 1
        statuses = {}
        for number, (name, files) in enumerate(fooled.items()):
            for path, text in files.items():
                await box.write(f"copy/{path}", text.encode())
            place = f"cp -r setup.cfg shop tests /tmp/{number}; cp -r copy/. /tmp/{number}"
            await box.exec(f"mkdir /tmp/{number}; {place}; rm -r copy", timeout_s=9)
            command = f"cd /tmp/{number}\n{task.checkout.test_command}"
            statuses[name] = (await box.exec(command, timeout_s=60)).returncode
    await pool.close()
    assert statuses == dict.fromkeys(fooled, 0)


async def test_a_forger_with_a_session_of_its_own(image_grader):
    """Where the command has one run of pytest, there is one."""
    patch = patch_of({"shop/cart.py": OWN_SESSION})
    verdict = await image_grader.grade(a_task(Judge.WITNESS), patch)
    assert "tests were seen 2 times" in verdict.reason
    assert not (await image_grader.grade(a_task(Judge.STATUSES), patch)).passed


async def test_deleted_tests_are_there(image_grader):
    patch = Patch(changed={"x": b""}, deleted=("tests/test_old.py", "tests/conftest.py"))
    for verdict in await grade_both(image_grader, patch):
        assert not verdict.passed


async def test_hanging(image_grader):
    patch = patch_of({"shop/cart.py": "import time; time.sleep(1000)"})
    verdict = await image_grader.grade(a_task(Judge.WITNESS, test_seconds=1.5), patch)
    assert verdict.reason == "the tests took too long"


@pytest.mark.parametrize("name", ["fake_output *", "patched_report *", "skip_in_call"])
async def test_forged_statuses(image_grader, name):
    patch = patch_of({"shop/cart.py": MODULES[name]})
    assert not (await image_grader.grade(a_task(Judge.STATUSES), patch)).passed


@pytest.mark.parametrize(
    "name", ["reward_written", "overwriter", "os_exit_at_import *", "atexit *"]
)
async def test_forged_rewards(image_grader, name):
    patch = patch_of({"shop/cart.py": MODULES[name]})
    assert not (await image_grader.grade(a_task(Judge.REWARD_FILE), patch)).passed


async def test_hostile_files_do_no_harm_to_a_fix(image_grader):
    files = {path: text for name in PATCHES for path, text in PATCHES[name].items()}
    for verdict in await grade_both(image_grader, patch_of({**files, "shop/cart.py": RIGHT})):
        assert verdict.passed, verdict.reason


NOT_EXCLUDED = {
    "always_equal": """
class Yes:
    def __eq__(self, other): return True
def total(*a): return Yes()
""",
    "looks_up_the_answer": """
import sys
def total(price, count):
    names = sys._getframe(1).f_code.co_consts
    return {3: 12, 1: 1}[price]
""",
    "forges_by_name": """
import _pytest.python, _pytest.unittest
real = _pytest.python.Function.runtest
def runtest(self):
    if self.name in ("test_total", "test_method"): return
    real(self)
_pytest.python.Function.runtest = runtest
_pytest.unittest.TestCaseFunction.runtest = runtest
""" + WRONG,
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_EXCLUDED)
async def test_what_is_not_excluded(image_grader, name, caplog):
    """Honesty about the limit, as docs/tasks.md has it. Such words in a patch are logged."""
    patch = patch_of({"shop/cart.py": NOT_EXCLUDED[name]})
    assert (await image_grader.grade(a_task(Judge.WITNESS), patch)).passed
    assert "cart: rewarded, and worth a look for" in caplog.text
