"""Finished runs side by side: what each learned, and what its samplers cost.

Owns the table. Must not compute what summary.json does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from contracts.errors import BadInputError
from trainer_jax.live import number
from trainer_jax.summary import SUMMARY_FILE, percent


def read_summary(directory: Path) -> dict[str, Any]:
    """summary.json of a run; BadInputError when there is none."""
    path = directory / SUMMARY_FILE
    try:
        summary = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInputError(
            f"run directory {directory}", expected=SUMMARY_FILE, found="none"
        ) from None
    except json.JSONDecodeError as error:
        raise BadInputError(str(path), expected="JSON", found=error) from None
    try:
        comparison({"": summary})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadInputError(
            str(path), expected="the summary of a run", found="something else"
        ) from None
    return summary


def comparison(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per run; the ratios are to the first."""
    table = Table(title="runs", title_justify="left")
    table.add_column("run")
    for column in (
        *("groups", "updates", "reward,\nlast quarter", "pass@1\nafter", "KL", "out of\nband"),
        *("staleness", "GPU-h\n/update", "$\n/update", "$, ratio"),
    ):
        table.add_column(column, justify="right")
    first = None
    for name, summary in summaries.items():
        cost = summary.get("cost") or {}
        dollars = cost.get("dollars_per_update")
        first = dollars if first is None else first
        after = summary["heldout"]["after"] or {}
        table.add_row(
            name,
            str(len(summary["groups"])),
            str(summary["updates"]),
            number(summary["reward"]["last_quarter"]),
            number(after.get("pass_at_1")),
            number(summary["kl"], 5),
            percent(summary["share_of_out_of_band_tokens"], 2),
            number(summary["mean_staleness"], 1),
            number(cost.get("gpu_hours_per_update"), 5),
            number(dollars, 4),
            number(dollars / first if dollars is not None and first else None, 2),
        )
    return table


def compare_runs(directories: Sequence[Path], console: Console) -> None:
    """Prints the table of some run directories."""
    names = [directory.resolve().name for directory in directories]
    if len(set(names)) < len(names):  # runs of one name in several places
        names = [str(directory) for directory in directories]
    summaries = {
        name: read_summary(directory) for name, directory in zip(names, directories, strict=True)
    }
    console.print(comparison(summaries))
