"""One event is one line, for people and as JSON."""

from __future__ import annotations

import json
import logging

import pytest

from contracts.errors import BadInputError
from contracts.logs import log_to_stderr


@pytest.fixture
def lines(capsys, monkeypatch):
    """Logs an event with a traceback in a form, and gives the lines."""
    handlers, level = logging.root.handlers[:], logging.root.level

    def log_in(form: str) -> list[str]:
        monkeypatch.setenv("LOG_LEVEL", "INFO")
        monkeypatch.setenv("MIXED_SAMPLERS_LOG", form)
        log_to_stderr("big-0")
        log = logging.getLogger("x")
        log.debug("not this")
        try:
            raise ZeroDivisionError("two\nlines")
        except ZeroDivisionError:
            log.exception("it broke %s\r\nlevel=info", 'at "a\\b"')
        return capsys.readouterr().err.splitlines()

    yield log_in
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def test_a_record_is_one_line(lines):
    (line,) = lines("text")
    assert ' error big-0 x: it broke at "a\\\\b"\\r\\nlevel=info\\nTraceback' in line
    assert "two\\nlines" in line


def test_a_record_is_one_json_object(lines):
    (line,) = lines("json")
    record = json.loads(line)
    assert set(record) == {"time", "level", "process", "logger", "message", "traceback"}
    assert (record["level"], record["process"], record["logger"]) == ("error", "big-0", "x")
    assert record["message"] == 'it broke at "a\\b"\r\nlevel=info'
    assert record["traceback"].endswith("two\nlines") and record["time"].endswith("Z")


@pytest.mark.parametrize(("name", "value"), [("LOG_LEVEL", "LOUD"), ("MIXED_SAMPLERS_LOG", "xml")])
def test_a_setting_nobody_knows_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInputError, match=f"{name}.*found {value}"):
        log_to_stderr("big-0")
