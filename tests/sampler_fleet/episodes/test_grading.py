"""Verdicts on honest patches, what hidden tests may do, and whose fault a failure is."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace

import pytest

from sampler_fleet.episodes.base import SandboxError, Task
from sampler_fleet.episodes.grading import Grader, GradingLimits, _Exam, top_level_modules
from sampler_fleet.episodes.patch import Patch
from sampler_fleet.episodes.wire import decode, encode


def fix(**files: str) -> Patch:
    return Patch(changed={f"shop/{name}.py": text.encode() for name, text in files.items()})


class TestVerdict:
    async def test_honest_fix_passes(self, grader, task):
        patch = Patch(changed={path: text.encode() for path, text in task.fix.items()})
        verdict = await grader.grade(task, patch)
        assert verdict.passed, verdict.reason

    async def test_other_honest_fixes_pass(self, grader, task):
        for patch in (
            fix(cart="from shop.helper import times as total", helper="times = lambda a, b: a * b"),
            fix(cart="import functools, operator\ntotal = functools.partial(operator.mul)"),
            replace(
                fix(cart=task.fix["shop/cart.py"]), deleted=("README.md", "tests/test_cart.py")
            ),
        ):
            verdict = await grader.grade(task, patch)
            assert verdict.passed, verdict.reason

    async def test_wrong_fix_fails(self, grader, task):
        verdict = await grader.grade(task, fix(cart="def total(a, b):\n    return a - b\n"))
        assert not verdict.passed
        assert "test_product" in verdict.reason

    async def test_what_passed_must_go_on_passing(self, grader, task):
        verdict = await grader.grade(task, fix(cart=task.fix["shop/cart.py"], text="label = str"))
        assert not verdict.passed
        assert "test_label" in verdict.reason

    async def test_nothing_is_graded_without_need(self, task):
        grader = Grader(sandboxes=None)  # type: ignore[arg-type]
        for patch, reason in (
            (Patch(changed={}), "nothing changed"),
            (Patch(changed={"tests/test_hidden.py": b"", "conftest.py": b""}), "nothing changed"),
            (Patch(changed={"../x.py": b""}), "refused"),
            (Patch(changed={"a.py": b""}, special=("link",)), "refused"),
        ):
            verdict = await grader.grade(task, patch)
            assert not verdict.passed
            assert reason in verdict.reason

    async def test_missing_test_is_no_pass(self, grader, task):
        odd = replace(task, fail_to_pass=("tests/test_hidden.py::test_none",))
        verdict = await grader.grade(odd, fix(cart=task.fix["shop/cart.py"]))
        assert not verdict.passed
        assert "AttributeError" in verdict.reason

    async def test_names_may_have_spaces(self, grader, task):
        names = ("tests/test a.py::test_x", "tests/test a.py::test_y")
        hidden = {
            "tests/test a.py": "from shop import cart\n"
            "def test_x(): assert cart.total(3, 4) == 12\n"
            "def test_y(): pass\n"
        }
        odd = replace(task, hidden_tests=hidden, fail_to_pass=names[:1], pass_to_pass=names[1:])
        verdict = await grader.grade(odd, fix(cart=task.fix["shop/cart.py"]))
        assert verdict.passed, verdict.reason
        verdict = await grader.grade(odd, fix(cart="def total(*a): return 0"))
        assert verdict.reason.startswith("tests/test a.py::test_x: 'AssertionError")

    async def test_dead_sandbox_is_infrastructure(self, pool, task):
        class Dying:
            """Its sandboxes are killed from outside as soon as they run."""

            @contextlib.asynccontextmanager
            async def open(self, tree):
                async with pool.open(tree) as sandbox:
                    os.kill(sandbox.pid, 9)
                    yield sandbox

        with pytest.raises(SandboxError):
            await Grader(Dying()).grade(task, fix(cart=task.fix["shop/cart.py"]))


CODE = """
class StockError(ValueError):
    def __init__(self, item, left):
        super().__init__(f"{item}: {left} left")
        self.left = left

class Point:
    size = 2
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __lt__(self, other): return self.x < other.x
    def __len__(self): return 2
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __repr__(self): return f"Point({self.x}, {self.y})"
    def twice(self): return 2 * self.norm
    @property
    def norm(self): return abs(self.x) + abs(self.y)

from collections import namedtuple
Pair = namedtuple("Pair", "a b")
LIMIT = 3
calls = []

def take(item, n): raise StockError(item, LIMIT - n)
def echo(x): return x
def add_one(items): items.append(1)
def fill(table, tags): table["k"] = [1]; tags.add(2); return len(tags)
def apply(f, items): return [f(x) for x in items]
def count(n):
    for i in range(n): yield i
def keep(**options): calls.append(options); return calls
"""

TESTS = """
import lib
from lib import Point, StockError, echo
from lib import *
import lib as again

def test_plain():
    for value in (None, True, -5, 10**5000, 2.5, float("inf"), "\\u00e9\\ud800", b"\\0\\xff",
                  [1, (2, {3})], {"a": {1: frozenset([2])}}, "", (), {}, []):
        out = echo(value)
        assert out == value and type(out) is type(value)
    assert echo(float("nan")) != echo(float("nan"))

def test_objects():
    p = Point(1, 2) + Point(3, -4)
    assert p == Point(4, -2) and p != Point(0, 0) and not p == 4
    assert (p.x, p[1], len(p), p.norm, repr(p)) == (4, -2, 2, 6, "Point(4, -2)")
    assert isinstance(p, Point) and not isinstance(3, Point)
    assert max([Point(1, 1), Point(5, 0)]).x == 5
    p.x = 9
    assert p.x == 9 and Point.size == 2
    assert echo(p) is p

def test_builtin_subclass():
    pair = lib.Pair(1, [2])
    assert pair == (1, [2]) and pair.b == [2] and pair[0] == 1 and pair < (2,)

def test_exceptions():
    try:
        lib.take("tea", 1)
    except StockError as error:
        assert str(error) == "tea: 2 left" and error.left == 2
        assert isinstance(error, ValueError)
    else:
        assert False
    try:
        echo([])[0]
    except IndexError:
        pass
    try:
        echo()
    except TypeError as error:
        assert "argument" in str(error)
    try:
        lib.missing
    except AttributeError:
        return
    assert False

def test_arguments_change():
    items, table, tags = [0], {}, {1}
    lib.add_one(items)
    assert items == [0, 1]
    assert lib.fill(table, tags) == 2 and table == {"k": [1]} and tags == {1, 2}

def test_callbacks():
    assert lib.apply(lambda x: x * 2, [1, 2]) == [2, 4]
    assert lib.apply(lambda x: echo(x) + 1, [1]) == [2]
    assert lib.apply(Point.twice, [Point(1, 2)]) == [6]
    def bad(x):
        raise KeyError(x)
    try:
        lib.apply(bad, ["k"])
    except KeyError as error:
        assert error.args == ("k",)
        return
    assert False

def test_iteration():
    assert list(lib.count(3)) == [0, 1, 2] and sum(lib.count(5)) == 10
    it = lib.count(1)
    assert next(it) == 0 and next(it, None) is None

def test_module_state():
    lib.LIMIT = 10
    try:
        lib.take("x", 0)
    except StockError as error:
        assert error.left == 10
    assert lib.keep(a=1) == [{"a": 1}] and again.LIMIT == 10

class TestClass:
    def test_method(self):
        assert take and echo(1) == 1

def test_bigger_message():
    text = "x" * 300_000
    assert echo(text) == text

def test_unsupported_says_so():
    try:
        echo(object())
    except TypeError as error:
        assert "can't be handed" in str(error)
        return
    assert False
"""


async def test_what_hidden_tests_may_do(grader):
    names = [
        line.split("(")[0].removeprefix("def ")
        for line in TESTS.splitlines()
        if line.startswith("def test")
    ]
    hidden = {"t/test_lib.py": TESTS}
    task = Task(
        task_id="lib",
        split="train",
        template="lib",
        issue="",
        tree={"lib.py": CODE + "__all__ = ['take']\n", "other/mod.py": ""},
        hidden_tests=hidden,
        fail_to_pass=tuple(f"t/test_lib.py::{name}" for name in names),
        pass_to_pass=("t/test_lib.py::TestClass::test_method",),
    )
    verdict = await grader.grade(task, Patch(changed={"note.txt": b"x"}))
    assert verdict.passed, verdict.reason
    assert verdict.reason == f"{len(names) + 1} tests passed"


class TestReport:
    """The verdict as a function of the report."""

    @pytest.fixture
    def exam(self, task):
        return _Exam.of(task)

    @staticmethod
    def report(exam, **status):
        lines = [f"{exam.nonce} ready"]
        for number, name in enumerate(exam.names):
            usual = "failed" if name == exam.canary else "passed"
            lines.append(f"{exam.nonce} {status.get(name.split('::')[-1], usual)} {number} ''")
        return [*lines, f"{exam.nonce} done"]

    def test_whole(self, exam):
        assert exam.judge("\n".join(self.report(exam))).passed

    def test_noise_without_the_nonce_counts_for_nothing(self, exam):
        lines = [f"{'0' * 32} failed x y", *self.report(exam), "passed"]
        assert exam.judge("\n".join(lines)).passed

    def test_canary_must_fail(self, exam):
        canary = exam.canary.split("::")[-1]
        verdict = exam.judge("\n".join(self.report(exam, **{canary: "passed"})))
        assert not verdict.passed
        assert "must fail" in verdict.reason

    @pytest.mark.parametrize("status", ["failed", "skipped", "xfailed"])
    def test_only_passed_is_passed(self, exam, status):
        assert not exam.judge("\n".join(self.report(exam, test_label=status))).passed

    def test_every_line_counts(self, exam):
        whole = self.report(exam)
        for place in range(1, len(whole)):
            assert not exam.judge("\n".join(whole[:place] + whole[place + 1 :])).passed
            assert not exam.judge("\n".join([*whole[:place], whole[1], *whole[place:]])).passed

    def test_never_ready_is_infrastructure(self, exam):
        for report in ("", "bash: python3: command not found", f"{'0' * 32} ready"):
            with pytest.raises(SandboxError, match="did not start"):
                exam.judge(report)

    @pytest.mark.parametrize("seconds", [0.0, math.inf, math.nan])
    def test_seconds_are_a_number(self, seconds):
        with pytest.raises(ValueError, match="seconds"):
            GradingLimits(seconds=seconds)

    def test_secrets_differ(self, task):
        exams = [_Exam.of(task) for _ in range(40)]
        assert len({exam.nonce for exam in exams}) == len({exam.canary for exam in exams}) == 40
        assert len({exam.names.index(exam.canary) for exam in exams}) == 3  # it may be anywhere


# Objects that compute, and all that their operators may be asked about.
MONEY = """
from fractions import Fraction

class Money:
    def __init__(self, cents, unit="EUR"): self.cents, self.unit = cents, unit
    def __add__(self, n): return Money(self.cents + 100 * cents(n), self.unit)
    def __sub__(self, n): return Money(self.cents - 100 * cents(n), self.unit)
    def __mul__(self, n): return Money(self.cents * n, self.unit)
    def __truediv__(self, n): return self.cents / 100 / n
    def __floordiv__(self, n): return self.cents // 100 // n
    def __mod__(self, n): return self.cents // 100 % n
    def __neg__(self): return Money(-self.cents, self.unit)
    def __abs__(self): return abs(self.cents) / 100
    def __float__(self): return self.cents / 100
    def __int__(self): return int(self.cents / 100)
    def __bool__(self): return self.cents != 0
    def __eq__(self, other): return self.cents == other.cents
    def __lt__(self, other): return self.cents < other.cents
    def __str__(self): return f"{self.cents / 100:.2f} {self.unit}"

def cents(n): return n.cents / 100 if isinstance(n, Money) else n

class Vector:
    def __init__(self, *parts): self.parts = parts
    def __add__(self, n): return Vector(*(x + n for x in self.parts))
    def __sub__(self, n): return Vector(*(x - n for x in self.parts))
    def __truediv__(self, n): return Vector(*(x / n for x in self.parts))
    def __abs__(self): return sum(x * x for x in self.parts) ** 0.5
    def __len__(self): return len(self.parts)
    def __getitem__(self, i): return self.parts[i]
    def __iter__(self): return iter(self.parts)

class Day:
    def __init__(self, number): self.number = number
    def __sub__(self, n): return self.number - n
    def __add__(self, n): return Day(self.number + n)
    def __index__(self): return self.number

class Size(int):
    def __add__(self, n): return Size(int(self) + n)
    def __sub__(self, n): return Size(int(self) - n)

class Title(str):
    def __add__(self, text): return Title(str(self) + text)

class Flags:
    def __init__(self, bits): self.bits = bits
    def __and__(self, n): return self.bits & n
    def __or__(self, n): return Flags(self.bits | n)
    def __xor__(self, n): return self.bits ^ n
    def __contains__(self, n): return bool(self.bits & n)

class Span:
    def __init__(self, low, high): self.low, self.high = low, high
    def __contains__(self, x): return self.low <= x < self.high

class Words:
    def __init__(self, *words): self.words = words
    def __contains__(self, word): return word in self.words

class Folder:
    def __init__(self, path): self.path = path
    def __truediv__(self, name): return Folder(f"{self.path}/{name}")
    def __str__(self): return self.path

class Template:
    def __init__(self, text): self.text = text
    def __mod__(self, values): return self.text % values

half = Fraction(1, 2)
"""

MONEY_TESTS = """
from money import Day, Flags, Folder, Money, Size, Span, Template, Title, Vector, Words, half

def test_results():
    assert Money(500) + 2 == Money(700) and Money(500) - 7 < Money(0)
    assert (Money(500) + 2).cents == 700 and (Money(500) - 5).unit == "EUR"
    assert Money(500) / 2 == 2.5 and Money(9000) // 60 == 1 and Money(500) % 2 == 1
    assert Money(6000) % 2 == 0 and Money(500) * 0 == Money(0)
    assert Day(5) - 3 == 2 and Day(5) - 5 == 0 and (Day(5) + 2) - 7 == 0
    assert abs(Day(12) - 12.5) < 0.6 and Day(0) - 0 == 0

def test_chains():
    assert abs(Money(500) - 3) == 2 and abs(Money(1250) - 12.5) < 1e-6
    assert float(Money(500) - 5) == 0.0 and int(Money(550) - 2) == 3 and int(Money(500) - 5) == 0
    assert str(Money(500) + 1) == "6.00 EUR" and str(Money(0) * 3) == "0.00 EUR"
    assert not Money(500) - 5 and Money(500) - 4 and abs(-(Money(500) - 8)) == 3
    assert abs(((Money(1250) - 12.5) + 1) / 1 - 1) < 1e-9
    assert [1, 2, 3][Day(0) + 2] == 3
    assert float(half - 3) == -2.5 and float(abs(half - 1)) == 0.5 and float(half / 4) == 0.125

def test_vectors():
    v = Vector(3, 4) + 1
    assert list(v) == [4, 5] and len(v) == 2 and v[1] == 5 and [x for x in v / 2] == [2, 2.5]
    assert abs(Vector(3, 4) - 0) == 5 and abs(Vector(3, 3) - 3) < 1e-9

def test_builtin_subclasses():
    assert Size(5) + 3 == 8 and Size(5) - 5 == 0 and abs(Size(5) - 7) == 2 and Size(0) * 3 == 0
    assert Size(7) & 4 == 4 and Size(0) & 4 == 0 and Size(5) // 60 == 0 and not Size(5) - 5
    assert Title("a") + "b" == "ab" and len(Title("a") + "b") == 2 and Title("a") + "b" < "b"

def test_bits_and_texts():
    assert Flags(7) & 4 == 4 and Flags(3) & 4 == 0 and Flags(3) ^ 1 == 2
    assert (Flags(1) | 2) & 2 == 2 and 2 in Flags(2) and 4 not in Flags(2)
    assert str(Folder("/a") / "b" / "c") == "/a/b/c"
    assert Template("%s is %d") % ("x", 3) == "x is 3" and Template("%(a)s") % {"a": 1} == "1"

def test_members():
    assert 5 in Span(0, 10) and 10 not in Span(0, 10) and 2.5 in Span(0, float("inf"))
    assert -3 in Span(float("-inf"), 0) and "b" in Span("a", "c")
    assert "x" in Words("x") and "y" not in Words("x") and (1, 2) in Words((1, 2))
    assert None in Words(None) and None not in Words(3)

def test_errors():
    for wrong in (lambda: Money(5) - "x", lambda: Money(5) / 0, lambda: Day(1) % 2):
        try:
            wrong()
        except (TypeError, ZeroDivisionError):
            continue
        assert False
"""


async def test_objects_may_compute(grader):
    names = [
        line.split("(")[0].removeprefix("def ")
        for line in MONEY_TESTS.splitlines()
        if line.startswith("def test")
    ]
    task = Task(
        task_id="money",
        split="train",
        template="money",
        issue="",
        tree={"money.py": MONEY},
        hidden_tests={"t/test_money.py": MONEY_TESTS},
        fail_to_pass=tuple(f"t/test_money.py::{name}" for name in names),
        pass_to_pass=(),
    )
    verdict = await grader.grade(task, Patch(changed={"note.txt": b"x"}))
    assert verdict.passed, verdict.reason


def test_top_level_modules():
    tree = ("a.py", "b/c.py", "b/__init__.py", "README.md", "d/data.txt", "no-name.py", "e/f/g.py")
    assert top_level_modules(tree) == ("a", "b", "e")


class TestWire:
    @pytest.mark.parametrize(
        "data",
        [
            *(b"", b"i", b"i1:", b"i3:zzz", b"s9:abc", b"l2:n0:", b"q1:x", b"n0:n0:", b"s-1:"),
            *(b"m1:l0:n0:", b"r1:n0:", b"l1:" * 100_000, b"i99999999999999999999999999:1"),
        ],
    )
    def test_nonsense_is_refused(self, data):
        with pytest.raises((ValueError, TypeError, LookupError, RecursionError)):
            decode(data)

    def test_round_trip(self):
        value = [None, True, -3, 1e-300, "\ud800x", b"\0", (1, {"k": {2}}), frozenset({3})]
        assert decode(encode(value)) == value

    def test_exact_types_only(self):
        class Number(int):
            pass

        for value in (Number(3), object(), 1j, range(3)):
            with pytest.raises(TypeError, match="no plain value"):
                encode([value])
