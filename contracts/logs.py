"""Log lines of long-lived processes: one line on stderr per event.

Owns both forms of a line, for people and as JSON. Must not know what the events mean.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from contracts.errors import BadInputError


class _LineFormatter(logging.Formatter):
    """One line per record: time, level, process, logger, message; tracebacks are escaped."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        text = text.replace("\\", "\\\\")
        if not text.isprintable():  # a line break, or what a terminal obeys
            text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        level = record.levelname.lower()
        return f"{_moment(record)} {level} {self._process} {record.name}: {text}"


class _JsonFormatter(_LineFormatter):
    """The same fields as one JSON object; a traceback stands apart from its message."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _moment(record: logging.LogRecord) -> str:
    """UTC, to the millisecond."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def log_to_stderr(process: str) -> None:
    """Every event is one line on stderr from now on.

    Environment: LOG_LEVEL (default INFO); MIXED_SAMPLERS_LOG is `text` (default) or `json`.
    """
    level = os.environ.get("LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise BadInputError(
            "environment variable LOG_LEVEL", expected="DEBUG, INFO, WARNING or ERROR", found=level
        )
    form = os.environ.get("MIXED_SAMPLERS_LOG", "text")
    if form not in ("text", "json"):
        raise BadInputError(
            "environment variable MIXED_SAMPLERS_LOG", expected="text or json", found=form
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_JsonFormatter if form == "json" else _LineFormatter)(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
