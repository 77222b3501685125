"""No token is said, whatever strangers and broken peers send."""

from __future__ import annotations

import logging

import pytest

from tests.sampler_fleet.security.calls import ROLES


@pytest.fixture(autouse=True)
def no_token_is_said(caplog) -> object:
    """Fails a test whose logs, at any level, hold a token."""
    caplog.set_level(logging.DEBUG)
    yield
    said = "\n".join(record.getMessage() for record in caplog.get_records("call"))
    assert not [token for token in ROLES.values() if token in said]
