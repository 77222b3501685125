"""What test runs leave behind, read on the host: the witness's report, logs, files."""

from __future__ import annotations

import hashlib

import pytest

from sampler_fleet.episodes.base import Judge
from sampler_fleet.episodes.containers.results import (
    parse_pytest,
    parse_results,
    parse_reward,
    parse_sympy,
)
from sampler_fleet.episodes.containers.testimony import (
    INDEX_BYTES,
    KEY_BYTES,
    Session,
    first_missing,
    new_keys,
    read_testimony,
)
from sampler_fleet.episodes.tasks.sources.runners import test_command as command_of

RECORD = INDEX_BYTES + KEY_BYTES
WORDS = (("start",), ("test", "a", "PASSED"), ("canary", "FAILED"), ("done", 0))
KEYS = new_keys()


def lines(index: int, *words: tuple, key: bytes = b"", first: int = 0) -> list[bytes]:
    """As the witness writes them."""
    key = key or KEYS[index * RECORD + INDEX_BYTES : (index + 1) * RECORD]
    bodies = [
        ascii((index, number, *fields)).encode() for number, fields in enumerate(words, first)
    ]
    digests = [hashlib.sha256(key + body + key).hexdigest().encode() for body in bodies]
    return [digest + b" " + body for digest, body in zip(digests, bodies, strict=True)]


def sessions_of(num_taken: int, *reported: bytes) -> list[Session]:
    found = read_testimony(b"\n".join(reported), KEYS, KEYS[num_taken * RECORD :])
    assert isinstance(found, list)
    return found


class TestTestimony:
    def test_whole(self):
        (session,) = sessions_of(1, *lines(0, *WORDS))
        assert session == Session(statuses={"a": "PASSED"}, canary="FAILED", exit_status=0)
        assert session.problem(()) == ""
        assert sessions_of(0) == []

    def test_every_line_counts(self):
        whole = lines(0, *WORDS)
        for place in range(len(whole)):
            broken = [*whole[:place], *whole[place + 1 :]]
            found = read_testimony(b"\n".join(broken), KEYS, KEYS[RECORD:])
            assert isinstance(found, str) or found[0].problem(()), place
            double = [*whole[:place], whole[0], *whole[place:]]
            assert isinstance(read_testimony(b"\n".join(double), KEYS, KEYS[RECORD:]), str)

    def test_only_signed_lines_count(self):
        forged = lines(0, ("test", "b", "PASSED"), key=bytes(KEY_BYTES), first=1)
        noise = (b"", b"x", b"0" * 64 + b" (0, 1)", b"0" * 64 + b" (9999999, 1)", b"\xff \xff")
        (session,) = sessions_of(1, *noise, *forged, *lines(0, *WORDS), *forged)
        assert session.statuses == {"a": "PASSED"}

    def test_taken_key_without_a_report(self):
        first, second = sessions_of(2, *lines(0, *WORDS))
        assert first.problem(()) == ""
        assert "from inside" in second.problem(())

    @pytest.mark.parametrize(
        "left",
        [KEYS + b"x", KEYS[1:], KEYS[RECORD:] + bytes(RECORD), KEYS[:-RECORD], bytes(RECORD)],
    )
    def test_keys_that_were_touched(self, left):
        assert isinstance(read_testimony(b"", KEYS, left), str)

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            ((("start",), ("test", "a", "PASSED"), ("done", 0)), "must fail"),
            ((("start",), ("test", "a", "PASSED"), ("canary", "PASSED"), ("done", 0)), "must fail"),
            ((("start",), ("test", "a", "PASSED"), ("canary", "ERROR"), ("done", 0)), "must fail"),
            ((*WORDS[:3], ("canary", "PASSED"), ("done", 0)), "must fail"),
            ((*WORDS, ("test", "b", "PASSED")), "from inside"),
            ((("start",), ("left out", "a", ["x.py", "t.py"]), ("done", 0)), "left out by x.py"),
            ((("start",), ("left out", "a", ["t.py"]), ("done", 0)), ""),
            ((("start",), ("canary", "ERROR"), *WORDS[1:]), ""),
            ((("start",), ("done", 5)), ""),
        ],
    )
    def test_problems(self, words, problem):
        found = sessions_of(1, *lines(0, *words))[0].problem({"x.py"})
        assert problem in found
        assert bool(problem) == bool(found)


def test_wanted_tests():
    statuses = {
        "t.py::a[x y]": "PASSED",
        "t.py::a[x z]": "PASSED",
        "t.py::b[/long/way/file]": "PASSED",
        "t.py::c[MouseButton.LEFT]": "PASSED",
        "t.py::d": "XFAIL",
        "t.py::e[x y]": "FAILED",
        "t.py::e[x z]": "PASSED",
        "t.py::f": "SKIPPED",
        "t.py::g": "",
    }
    seen = [Session(statuses=statuses, canary="FAILED", exit_status=0)]
    good = ("t.py::a[x", "t.py::a[x y]", "t.py::b[/file]", "t.py::c[1]")
    assert first_missing(seen, good, (*good, "t.py::d")) == ""
    assert first_missing(seen, ["t.py::d"], []) == "t.py::d is XFAIL"
    for name, status in (
        ("e[x", "FAILED"),
        ("f", "SKIPPED"),
        ("g", "unfinished"),
        ("h", "missing"),
    ):
        assert first_missing(seen, [], [f"t.py::{name}"]) == f"t.py::{name} is {status}"


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1\n", 1.0), ("0.5", 0.5), ('{"reward": 1}', 1.0), ("", None), ("yes", None), ("NaN", None)],
)
def test_rewards(text, reward):
    assert parse_reward(text) == reward


def test_results():
    text = '{"tests": [{"name": "a", "status": "PASSED"}, {"name": "b", "status": "FAILED"}]}'
    assert parse_results(text) == {"a"}
    assert parse_results("{}") is None


def test_log_of_pytest():
    log = (
        "PASSED t.py::early\n== short test summary info ==\n"
        "\x1b[32mPASSED\x1b[0m t.py::Case::test_a\nFAILED t.py::test_b - assert 1 == 2\n"
        "ERROR t.py::test_c - KeyError\nSKIPPED [1] t.py:3: no\n"
        "XFAIL t.py::test_d[a b] - bug\n== 2 =="
    )
    assert parse_pytest(log) == {
        "Case.test_a": "PASSED",
        "test_b": "FAILED",
        "test_c": "ERROR",
        "test_d[a b]": "XFAIL",
    }
    assert parse_pytest("no summary: FAILED t.py::x") == {}


def test_log_of_sympy():
    log = """\
============================= test process starts ==============================
sympy/core/tests/test_basic.py[5]
test_aresame ok
test_structure F
test_equality E
test_later f
test_slow s                                                              [FAIL]

sympy/core/tests/test_expr.py[3]
test_basic ok
test_double \x1b[0;32mok\x1b[0m
test_noise /lib/x.py:1: SomeWarning: here is some
  text                                                                    ok
test_last ok                                                              [OK]
________________________________________________________________________________
___________ sympy/core/tests/test_expr.py:test_double ____________
Traceback (most recent call last):
"""
    assert parse_sympy(log) == {
        **dict.fromkeys(("test_aresame", "test_basic", "test_last"), "PASSED"),
        **dict.fromkeys(("test_structure", "test_double"), "FAILED"),
        "test_equality": "ERROR",
        "test_later": "XFAIL",
        "test_slow": "SKIPPED",
    }


PATCH = """\
--- a/tests/forms/test_x.py
+++ b/tests/forms/test_x.py
--- a/tests/forms/data.json
+++ b/tests/forms/data.json
--- /dev/null
+++ b/sympy/core/tests/test_new.py
"""


def test_commands():
    ids = ("tests/a.py::T::b[x]", "tests/a.py::c", "tests/d e.py::f")
    for patch in ("", PATCH):
        command, judge = command_of("astropy/astropy", "5.0", ids, patch)
        assert judge == Judge.WITNESS
        assert "conda activate testbed" in command
        assert command.endswith("-p no:cacheprovider tests/a.py 'tests/d e.py'")
    own, _ = command_of("x/y", "", ids, "", "pytest -n 3")
    assert own.endswith("\npytest -n 3 tests/a.py 'tests/d e.py'")
    mypy, _ = command_of("python/mypy", "1", ("m/t.py::S::c.test::testA", "m/t.py::S::testB"), "")
    assert mypy.endswith(" -k 'testA or testB' m/t.py")

    django, judge = command_of("django/django", "3.1", ("test_a (forms.X)",), PATCH)
    assert judge == Judge.WITNESS
    assert django.endswith(
        " tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
        " forms.test_x sympy.core.tests.test_new"
    )
    assert "--settings" not in command_of("django/django", "1.9", (), PATCH)[0]
    sympy, judge = command_of("sympy/sympy", "1.1", ("test_a",), PATCH)
    assert judge == Judge.LOG
    assert sympy.endswith("--verbose tests/forms/test_x.py sympy/core/tests/test_new.py")

    assert command_of("some/other", "1", ("test_a (x.Y)",), PATCH) == ("", Judge.TESTS)
