"""One record of a data set, read field by field: text, lists of test ids, tables.

Owns the encodings that data sets use for one and the same thing, and the wording of what is wrong
with a field. Must not know any data set.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError

_MAX_SECONDS = 1e6  # clocks can't wait for inf, nor for 1e300
_LITERAL_ERRORS = (ValueError, SyntaxError, MemoryError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Row:
    """`fields` by their names in lower case; `where` names the file, line and instance."""

    fields: Mapping[str, Any]
    where: str
    folder: Path  # of its file: some data sets keep more beside it

    def text(self, key: str, default: str | None = None) -> str:
        """A text; without a default it must be there and not be empty."""
        value = self.fields.get(key)
        if value is None or value == "":
            if default is None:
                raise self.wrong(key, expected="a text", found="nothing")
            return default
        if not isinstance(value, str):
            raise self.wrong(key, expected="a text", found=repr(value))
        return value

    def seconds(self, key: str) -> float | None:
        """A positive, finite number, or None where there is none."""
        value = self.fields.get(key)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _MAX_SECONDS:
            expected = f"a number of seconds above 0, {_MAX_SECONDS:.0f} at most"
            raise self.wrong(key, expected=expected, found=repr(value))
        return float(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, each once: as a list, as JSON, or as a Python literal in a text."""
        value = self.fields.get(key)
        if value is None:
            return ()
        items = _literal(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise self.wrong(
                key,
                expected="a list of texts, or a text with one as JSON or as a Python literal",
                found=repr(value),
            )
        return tuple(dict.fromkeys(items))

    def some_texts(self, key: str) -> tuple[str, ...]:
        """Like `texts`, but an empty list is wrong."""
        if found := self.texts(key):
            return found
        raise self.wrong(key, expected="at least one", found="none")

    def table(self, key: str) -> dict[str, Any]:
        """A table, or a text with one as JSON."""
        value = self.fields.get(key)
        found = _literal(value) if isinstance(value, str) else value
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise self.wrong(key, expected="a JSON object", found=repr(value))
        return found

    def below(self, key: str, *, instance: str) -> Row:
        """The table at `key` as a row of its own."""
        return Row(
            fields={name.lower(): value for name, value in self.table(key).items()},
            where=f"{self.where}, {instance}" if instance else self.where,
            folder=self.folder,
        )

    def wrong(self, key: str, *, expected: str, found: str) -> BadInputError:
        return BadInputError(f"{self.where}: {key}", expected=expected, found=found)


def _literal(text: str) -> Any:
    """The value of a text in JSON or, failing that, of a Python literal; None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        try:
            return ast.literal_eval(text.strip())
        except _LITERAL_ERRORS:
            return None
