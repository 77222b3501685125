import unittest

import ledger
import pytest


def test_put(account):
    account.put(5)
    assert account.balance == 15
    with pytest.raises(ValueError, match="above 0"):
        account.put(0)


def test_take_to_the_limit(account):
    account.take(15)
    assert account.balance == -5


def test_too_much(account):
    with pytest.raises(ledger.OverdrawnError):
        account.take(16)


class TestEntries:
    def setup_method(self):
        self.account = ledger.Account()

    def test_newest_first(self):
        for amount in (1, 2, 3, 4):
            self.account.put(amount)
        assert self.account.last() == [4, 3, 2]

    def test_as_many_as_wanted(self):
        self.account.put(6)
        assert self.account.last(1) == [6]


class OpeningTest(unittest.TestCase):
    def setUp(self):
        self.account = ledger.Account(balance=3)

    def test_balance(self):
        self.assertEqual(self.account.balance, 3)
        self.assertEqual(self.account.last(), [])
