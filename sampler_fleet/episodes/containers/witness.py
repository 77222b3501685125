"""The witness: it sits in the process that runs the tests and reports what it sees of each.

Owns what is seen, and the secret that its words are signed with. It is loaded by pytest before any
code under test, or runs a unittest program itself (`witness.py PROGRAM ARGUMENTS`). Must not judge:
`testimony.py` does, on the host.

It shares the process with the code under test, so it makes forging hard and not impossible. Its key
comes by a pipe, each key once, and is read before anything of the tree; it is in no file, no
environment and no report, which holds digests only. Whether a test failed is what it raised, not
what a report says of it. In the middle of the tests it runs a canary: a test that must fail.

Runs in images with Python 3.5 and pytest 4 or later, alone: it imports nothing of ours.
"""

import hashlib
import os
import stat
import sys

KEYS_FD, REPORT_FD = 198, 199  # these four as in testimony.py, which can't import this
INDEX_BYTES, KEY_BYTES = 2, 32
_BADNESS = ("", "PASSED", "XPASS", "SKIPPED", "XFAIL", "FAILED", "ERROR")  # what is worse is later


def _open():
    """A function that reports, or None where nobody listens."""
    try:
        if not stat.S_ISFIFO(os.fstat(KEYS_FD).st_mode):
            return None
        record = os.read(KEYS_FD, INDEX_BYTES + KEY_BYTES)
    except OSError:
        return None
    if len(record) != INDEX_BYTES + KEY_BYTES:
        return None
    for fd in (KEYS_FD, REPORT_FD):
        os.set_inheritable(fd, False)  # other programs that the tests start have nothing to say
    index, key = int.from_bytes(record[:INDEX_BYTES], "big"), record[INDEX_BYTES:]
    # Only functions in C: nothing here can be replaced from Python later.
    digest, write, text, getpid = hashlib.sha256, os.write, ascii, os.getpid
    owner, said = getpid(), []

    def say(*fields):
        if getpid() == owner:  # not a child of it
            body = text((index, len(said), *fields)).encode()
            said.append(None)
            write(REPORT_FD, digest(key + body + key).hexdigest().encode() + b" " + body + b"\n")

    say("start")
    return say


def _leave_no_trace():
    """Programs that the tests start run as if there were no witness."""
    folder, file = os.path.split(os.path.abspath(__file__))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    options = os.environ.get("PYTEST_ADDOPTS", "").replace("-p " + file[:-3], "", 1)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != folder)
    os.environ["PYTEST_ADDOPTS"] = options.strip()
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS", "WITNESS"):
        if name == "WITNESS" or not os.environ[name]:
            os.environ.pop(name, None)
    sys.path[:] = [path for path in sys.path if path != folder]


def _random_below(number):
    return int.from_bytes(os.urandom(8), "big") % number


def _must_fail(assertions=()):
    """Fails, unless one of the ways to assert something false doesn't."""
    for assertion, arguments in assertions:
        try:
            assertion(*arguments)
        except BaseException:  # whatever it is by which they fail
            continue
        return
    left, right = os.urandom(8), os.urandom(8)
    assert left == right, "this test has to fail"


def _of_unittest(case):
    """Assertions of a test case that don't hold, with their arguments."""
    wrong = {
        "assertEqual": (1, 2),
        "assertNotEqual": (1, 1),
        "assertTrue": (0,),
        "assertFalse": (1,),
        "assertIs": (1, 2),
        "assertIn": (1, ()),
        "assertIsNone": (1,),
        "assertIsInstance": (1, str),
        "assertListEqual": ([1], [2]),
        "assertRaises": (KeyError, int),
        "fail": (),
    }
    return [(getattr(case, name), arguments) for name, arguments in wrong.items()]


def _worse(one, other):
    return max(one, other, key=_BADNESS.index)


# --- pytest -------------------------------------------------------------------------------------

if __name__ != "__main__":
    import pytest
    from _pytest.runner import runtestprotocol
    from _pytest.unittest import TestCaseFunction

    _say = _open()
    _leave_no_trace()
    _taken = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_cmdline_main(config):
        """Tests run in this process, not in others."""
        if _say is not None and (config.option.version or config.option.help):
            _say("done", 0)  # there will be no tests
        for name, off in (("numprocesses", None), ("dist", "no"), ("tx", []), ("forked", False)):
            if hasattr(config.option, name):
                setattr(config.option, name, off)
        yield

    def pytest_configure(config):
        if _say is not None and not _taken:  # not a run inside of a test
            _taken.append(None)
            config.pluginmanager.register(_Witness(_say))

    def _function_must_fail():
        _must_fail([(pytest.raises, (KeyError, int)), (_approximately, ()), (pytest.fail, ("",))])

    def _approximately():
        assert pytest.approx(2.0) == 1.0

    class _Function(pytest.Function):
        def setup(self):
            """Without the fixtures that all tests of its place have."""

    class _Canary(pytest.Item):
        def runtest(self):
            _must_fail()

        def reportinfo(self):
            return self.fspath, 0, self.name

    class _Witness:
        def __init__(self, say):
            self._say = say
            self._status = {}  # by item id of the test that runs
            self._may_xfail = frozenset()
            self._until_canary = 0

        def pytest_collection_finish(self, session):
            marked = (item.nodeid for item in session.items if item.get_closest_marker("xfail"))
            self._may_xfail = frozenset(marked)
            self._until_canary = _random_below(max(1, len(session.items)))

        @pytest.hookimpl(hookwrapper=True)
        def pytest_make_collect_report(self, collector):
            outcome = yield
            report = outcome.get_result()
            call = getattr(report, "call", None)
            if report.outcome == "skipped" and call is not None and call.excinfo is not None:
                self._say("left out", collector.nodeid, _way_to(call.excinfo))

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_protocol(self, item, nextitem):
            if self._until_canary == 0:
                self._run_canary(item)
            self._until_canary -= 1
            yield
            self._say("test", item.nodeid, self._status.pop(item.nodeid, ""))

        def _run_canary(self, item):
            """One like the test before which it runs; where it could not be set up, another."""
            original = getattr(item, "originalname", None) or item.name.partition("[")[0]
            name = original + "_" + str(2 + _random_below(98))
            kind, more = _Canary, {}
            group = getattr(item.parent, "obj", None)
            if isinstance(item, TestCaseFunction):
                setattr(group, name, lambda case: _must_fail(_of_unittest(case)))
                kind, more = TestCaseFunction, {"callobj": getattr(group, name)}
            elif isinstance(item, pytest.Function):
                kind, more = _Function, {"callobj": _function_must_fail}
            make = getattr(kind, "from_parent", None)
            parent = item.parent
            canary = make(parent, name=name, **more) if make else kind(name, parent, **more)
            runtestprotocol(canary, log=False, nextitem=item)
            if kind is TestCaseFunction:
                delattr(group, name)
            status = self._status.pop(canary.nodeid, "")
            self._say("canary", status)
            self._until_canary = 1 if status == "ERROR" else 0

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item, call):
            outcome = yield
            report = outcome.get_result()
            status = self._seen(item, call, report)
            by_call = (pytest.skip.Exception, pytest.xfail.Exception)
            if call.excinfo is not None and isinstance(call.excinfo.value, by_call):
                self._say("left out", item.nodeid, _way_to(call.excinfo))
            if call.when == "setup":
                self._status[item.nodeid] = "" if status == "PASSED" else status
            elif call.when == "call" or status != "PASSED":
                self._status[item.nodeid] = _worse(self._status.get(item.nodeid, ""), status)

        def pytest_runtest_logreport(self, report):
            if report.failed:  # also of a part of a test
                self._status[report.nodeid] = _worse(self._status.get(report.nodeid, ""), "FAILED")

        def _seen(self, item, call, report):
            expected = hasattr(report, "wasxfail")
            if call.excinfo is None:
                if report.outcome == "passed":
                    return "XPASS" if expected else "PASSED"
                return "SKIPPED" if report.outcome == "skipped" else "FAILED"
            if report.outcome == "skipped" and not expected:
                return "SKIPPED"
            if report.outcome == "skipped" and (
                item.nodeid in self._may_xfail or _raised_by_test(item, call)
            ):
                return "XFAIL"
            return "FAILED" if call.when == "call" else "ERROR"

        @pytest.hookimpl(hookwrapper=True)
        def pytest_sessionfinish(self, session):
            yield
            self._say("done", int(session.exitstatus))

    def _way_to(excinfo):
        """Files of the tree on the way to what was raised, as far as that is known."""
        here = os.getcwd()
        paths = {os.path.relpath(str(entry.path), here) for entry in excinfo.traceback}
        return sorted(path for path in paths if not path.startswith(".."))

    def _raised_by_test(item, call):
        """Whether the test itself called pytest.xfail, or unittest expects it, and not what it
        tests."""
        last = [str(entry.path) for entry in call.excinfo.traceback[-2:]]
        return str(item.fspath) in last or sys.modules["_pytest.unittest"].__file__ in last


# --- unittest -----------------------------------------------------------------------------------


def _watch_unittest(say):
    """From now on every result of unittest is seen, and there is a canary in what is run."""
    import unittest

    result, runner = unittest.TestResult, unittest.TextTestRunner
    status, canaries = {}, []

    class Canary(unittest.TestCase):
        def runTest(self):
            _must_fail(_of_unittest(self))

    def watched(name, seen):
        real = getattr(result, name)

        def method(self, test, *arguments):
            found = seen
            if name == "addSubTest":  # (subtest, what it raised or None)
                found = "PASSED" if arguments[-1] is None else "FAILED"
            status[id(test)] = _worse(status.get(id(test), ""), found)
            if id(test) not in running:  # a class or module could not be set up
                say("test", str(test), status.pop(id(test)))
            return real(self, test, *arguments)

        setattr(result, name, method)

    running = set()
    real_start, real_stop, real_run = result.startTest, result.stopTest, runner.run

    def start(self, test):
        running.add(id(test))
        real_start(self, test)

    def stop(self, test):
        running.discard(id(test))
        found = status.pop(id(test), "")
        if test in canaries:
            say("canary", found)
        else:
            # A log names a test by the last line of its description.
            describe = getattr(self, "getDescription", str)
            say("test", str(test), found)
            if describe(test) != str(test):
                say("test", describe(test).splitlines()[-1], found)
        real_stop(self, test)

    def run(self, test):
        tests = getattr(test, "_tests", None)
        if tests is not None and not canaries:
            canaries.append(Canary())
            between = [
                place
                for place in range(len(tests) + 1)
                if place in (0, len(tests)) or type(tests[place - 1]) is not type(tests[place])
            ]
            tests.insert(between[_random_below(len(between))], canaries[0])
        return real_run(self, test)

    for name, seen in (
        ("addSuccess", "PASSED"),
        ("addFailure", "FAILED"),
        ("addError", "ERROR"),
        ("addSkip", "SKIPPED"),
        ("addExpectedFailure", "XFAIL"),
        ("addUnexpectedSuccess", "XPASS"),
        ("addSubTest", ""),
    ):
        watched(name, seen)
    result.startTest, result.stopTest, runner.run = start, stop, run


def main():
    import runpy

    say = _open()
    _leave_no_trace()
    if say is not None:
        _watch_unittest(say)
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if say is not None:
        say("done", code)
    sys.exit(code)


if __name__ == "__main__":
    main()
