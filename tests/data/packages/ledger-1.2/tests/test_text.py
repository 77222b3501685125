import sys

import pytest
from ledger import describe, parse_amount

from .amounts import AMOUNTS


@pytest.mark.parametrize("text, cents", AMOUNTS)
def test_parse(text, cents):
    assert parse_amount(text) == cents


@pytest.mark.parametrize("currency", ["EUR", "SEK"])
@pytest.mark.parametrize("amount", [5, 250])
def test_both_ways(amount, currency):
    text = describe(amount, currency)
    assert parse_amount(text.split()[0]) == amount


def test_describe():
    assert describe(-1205) == "-12.05 EUR"


def test_needs_a_file(tmp_path):
    assert describe(1) == (tmp_path / "expected").read_text()


@pytest.mark.skipif(sys.version_info >= (3, 0), reason="for another Python")
def test_of_another_time():
    assert describe(1) == "0.01"
