"""Attacks on the grader by objects that take the place of a plain result and answer its operators.

`test_grading.py` has the objects that honestly compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sampler_fleet.episodes.tasks.make.runs import run_graded

# Tests of a plain number, text or set, in ways that leave the last word to an operator.
COMPUTING = """
from shop import cart

def test_close(): assert abs(cart.total(3, 4) - 12.5) < 1e-6
def test_close_from_the_left(): assert abs(12.5 - cart.total(3, 4)) < 1e-6
def test_difference(): assert cart.total(3, 4) - 12.5 == 0
def test_sum(): assert cart.total(3, 4) + -12.5 == 0
def test_no_difference(): assert not cart.total(3, 4) - 12.5
def test_float(): assert float(cart.total(3, 4) - 12.5) == 0
def test_int(): assert int(cart.total(3, 4) - 12) == 0
def test_negated(): assert abs(-(cart.total(3, 4) - 12.5)) < 1e-6
def test_ratio(): assert cart.total(3, 4) / 12.5 == 1
def test_relative(): assert abs((cart.total(3, 4) - 12.5) / 12.5) < 1e-6
def test_scaled(): assert abs((cart.total(3, 4) - 12.5) * 100) < 1e-4
def test_multiple(): assert cart.total(3, 4) % 12 == 0
def test_bits(): assert cart.total(3, 4) ^ 12 == 0
def test_member(): assert "tea" in cart.total(3, 4)
def test_number(): assert 12 in cart.total(3, 4)
def test_pair(): assert ("tea", 12) in cart.total(3, 4)
def test_nothing_left(): assert len(cart.total(3, 4) - {"tea"}) == 0
def test_text(): assert str(cart.total(3, 4) - 12.5) == "0.0"
def test_order(): assert cart.total(3, 4) - 12.5 < 1e-6
def test_rounded(): assert round(cart.total(3, 4) - 12.5, 7) == 0
def test_often():
    for _ in range(20): assert abs(cart.total(3, 4) - 12.5) < 1e-6
"""
RESULTS = ("12.5", "12", "{'tea', 12, ('tea', 12)}", "{'tea'}")  # each test is right for one
FAKES = {
    "zero": "return 0.0",
    "nearly_zero": "return o * 1e-12 if type(o) in (int, float) else 0.0",
    "another_object": "return Fake({content})",
    "one_object": "return ONE",
    "a_number_of_a_subclass": "return Zero()",
    "an_object_that_remembers": "made = Fake({content}); made.o = o; return made",
}
FAKE = """
class Fake{base}:
    def __sub__(s, o): {body}
    __add__ = __mul__ = __mod__ = __xor__ = __sub__
    def __truediv__(s, o): return {ratio}
    def __contains__(s, x): return isinstance(x, (str, int, tuple))
    def __neg__(s): return Fake({content})
    def __abs__(s): return 0.0
    __float__ = __abs__
    def __int__(s): return 0
    __len__ = __int__
    def __bool__(s): return False
    def __str__(s): return "0.0"
    def __lt__(s, o): return True
    def __round__(s, n): return 0
    __rsub__ = __radd__ = __sub__
class Zero(float):
    __abs__ = __float__ = lambda s: 0.0
    __bool__ = lambda s: False
    __neg__ = lambda s: Zero()
    __sub__ = __add__ = __mul__ = __truediv__ = lambda s, o: Zero()
ONE = Fake({content})
def total(price, count): return Fake({content})
"""


async def tried(pool, module: str, names: Sequence[str]) -> dict[str, str]:
    """{test of COMPUTING: "" or why it failed} with a shop/cart.py."""
    tree = {"shop/__init__.py": "", "shop/cart.py": module}
    ids = [f"t/test_h.py::{name}" for name in names]
    found = await run_graded(pool, tree, {"t/test_h.py": COMPUTING}, ids, 5.0)
    assert found.keys() == set(ids)
    return {name.partition("::")[2]: why for name, why in found.items()}


COMPUTING_TESTS = [
    line.partition("(")[0].removeprefix("def ")
    for line in COMPUTING.splitlines()
    if line.startswith("def ")
]


async def test_results_that_need_no_fake(pool):
    """Each test that follows can be passed."""
    passed = set()
    for result in RESULTS:
        found = await tried(pool, f"def total(*a): return {result}\n", COMPUTING_TESTS)
        passed |= {name for name, why in found.items() if not why}
    assert passed == set(COMPUTING_TESTS)


@pytest.mark.parametrize(
    ("base", "content"),
    [("", ""), ("(float)", "7.5"), ("(str)", "'x'"), ("(frozenset)", "[8]")],
)
@pytest.mark.parametrize("name", FAKES)
async def test_objects_that_fake_a_result(pool, name, base, content):
    """No operator of an object passes for the value that a test means."""
    body = FAKES[name].format(content=content)
    for ratio in ("1.0", f"Fake({content})"):
        module = FAKE.format(body=body, base=base, content=content, ratio=ratio)
        found = await tried(pool, module, COMPUTING_TESTS)
        assert [test for test, why in found.items() if not why] == []
        assert "Unproven" in found["test_close"] or base in ("(str)", "(frozenset)")


async def test_the_first_question_need_not_be_the_test_s(pool):
    """An object that is zero once, then not, is found out by chance; of twenty, one is."""
    body = "s.__dict__['n'] = s.__dict__.get('n', 0) + 1; return float(s.n - 1)"
    found = await tried(
        pool, FAKE.format(body=body, base="", content="", ratio="1.0"), ["test_often"]
    )
    assert "Unproven" in found["test_often"] or "AssertionError" in found["test_often"]
