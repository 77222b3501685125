"""What a person and a program see of simulations: a table, JSON, and the figures' files.

Owns the layout of the table and the names of the files. Must not compute what `records.py` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from contracts.errors import BadInputError
from contracts.files import replacing
from sampler_fleet.simulate.records import Result, summarize
from sampler_fleet.simulate.scenario import read_scenario
from sampler_fleet.simulate.world import simulate

SUMMARY_FILE = "summary.json"


def run_scenarios(paths: Sequence[Path], out: Path | None, console: Console) -> None:
    """Simulates each file, prints the table, and writes JSON and figures under `out`.

    Raises:
        BadInputError: a bad file, two scenarios of one name, no matplotlib for the figures.
        FileNotFoundError: no such file.
    """
    scenarios = [read_scenario(path) for path in paths]  # all, before the first is simulated
    names = [scenario.name for scenario in scenarios]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise BadInputError(
            "scenarios", expected="names that differ", found=f"{doubled[0]!r} twice"
        )
    if out:
        _check_can_draw()
    results = [simulate(scenario) for scenario in scenarios]
    summaries = [summarize(result) for result in results]
    paths = write_results(results, summaries, out) if out else []
    console.print(summary_table(summaries))
    for summary in summaries:
        if len(summary["groups"]) > 1:
            console.print(group_table(summary))
    for path in paths:
        console.print(f"wrote {path}", highlight=False)


def summary_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """One row per scenario."""
    table = Table(title="fleets", title_justify="left")
    table.add_column("fleet")
    for column in (
        *("updates", "per hour", "trainer\nwaits", "places\ntaken", "staleness\nmean"),
        *("staleness\np99", "samplers\nmean", "GPU-h\n/update", "samplers\n$/update"),
        *("trainer\n$/update", "samplers\n$/M tokens", "preempted", "episodes\nretried"),
    ):
        table.add_column(column, justify="right")
    for summary in summaries:
        per_update = summary["per_update"]
        table.add_row(
            summary["name"],
            str(summary["updates"]),
            _number(summary["updates_per_hour"], 2),
            _percent(summary["trainer_wait_share"]),
            _percent(summary["utilization"]),
            _number(summary["staleness_mean"], 2),
            _number(summary["staleness_p99"], 1),
            _number(summary["mean_samplers"], 1),
            _number(per_update["gpu_hours"], 2),
            _number(per_update["sampler_dollars"], 2),
            _number(per_update["trainer_dollars"], 2),
            _number(summary["dollars_per_million_tokens"], 2),
            str(summary["counts"].get("preemptions", 0)),
            str(summary["counts"].get("trajectories_retried", 0)),
        )
    return table


def group_table(summary: Mapping[str, Any]) -> Table:
    """One row per group of a scenario."""
    table = Table(title=summary["name"], title_justify="left")
    table.add_column("group")
    for column in ("samplers, mean", "places taken", "GPU-h/update", "$/update"):
        table.add_column(column, justify="right")
    for name, group in summary["groups"].items():
        table.add_row(
            name,
            _number(group["mean_samplers"], 1),
            _percent(group["utilization"]),
            _number(group["gpu_hours_per_update"], 2),
            _number(group["dollars_per_update"], 2),
        )
    return table


def write_results(
    results: Sequence[Result], summaries: Sequence[Mapping[str, Any]], out: Path
) -> list[Path]:
    """summary.json, and per scenario its records and a figure; two figures of all together."""
    from sampler_fleet.simulate import plots

    out.mkdir(parents=True, exist_ok=True)
    paths = [_write_json(out / SUMMARY_FILE, summaries)]
    for result in results:
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", result.name).strip("-.") or "fleet"
        paths.append(_write_json(out / f"{stem}.json", asdict(result)))
        paths.append(plots.draw_fleet(result, out / f"{stem}.png"))
    if len(results) > 1:
        paths.append(plots.draw_comparison(summaries, out / "comparison.png"))
        paths.append(plots.draw_over_time(results, out / "over-time.png"))
    return paths


def _write_json(path: Path, value: Any) -> Path:
    with replacing(path) as aside:
        aside.write_text(json.dumps(value, indent=1) + "\n")
    return path


def _check_can_draw() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadInputError(
            "--out", expected="matplotlib (pip install 'mixed-samplers[trainer]')", found="none"
        ) from None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
