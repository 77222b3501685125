"""The anatomy of a run's recorded updates (`trainer_jax.anatomy`) as a table for a terminal.

Owns the table alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table


def table_of(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The rows for a terminal."""
    table = Table(box=None, header_style="", padding=(0, 1))
    for title in (
        "update", "episodes", "reward", "no call", "alike", "repeated", "tokens/reply",
        "|log p/q|", "masked",
    ):  # fmt: skip
        table.add_column(title, justify="right")
    table.add_column("endings")
    for row in rows:
        endings = ", ".join(f"{name} {share:.0%}" for name, share in row["endings"].items())
        table.add_row(
            str(row["step"]),
            str(row["num_episodes"]),
            _number(row["reward"], ".3f"),
            _number(row["share_without_call"], ".1%"),
            _number(row["share_alike"], ".1%"),
            _number(row["share_repeated"], ".1%"),
            _number(row["reply_tokens"], ".1f"),
            _number(row["abs_log_ratio"], ".4f"),
            _number(row["share_masked"], ".2%"),
            endings,
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
