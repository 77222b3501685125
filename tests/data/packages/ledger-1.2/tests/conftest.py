import ledger
import pytest


@pytest.fixture
def account():
    account = ledger.Account(balance=10, limit=5)
    yield account
    assert account.balance >= -5
