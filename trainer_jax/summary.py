"""A finished or interrupted run in numbers: summary.json and the closing tables in the terminal.

Owns the keys of summary.json and how per-update metrics become one number. Must not draw
(`trainer_jax.report`) nor measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from contracts.files import replacing
from trainer_jax.live import number
from trainer_jax.metrics import Record

SUMMARY_FILE = "summary.json"


def build_summary(
    sections: Mapping[str, Mapping[str, Any]],
    records: Sequence[Record],
    *,
    status: str,
    wall_seconds: float,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    restarts: int,
) -> dict[str, Any]:
    """The content of summary.json.

    `restarts` counts those of this attempt, also since its last update.

    `sections` is the run record, `before` and `after` are evaluations as JSON values. A group's
    `share_of_out_of_band_tokens` is its part of all tokens with a ratio outside the band (compare
    with its `share_of_samples`); its `share_out_of_band` is the part of its own tokens.
    """
    last = records[-1] if records else {}
    return {
        "name": sections["run"]["name"],
        "status": status,
        "wall_seconds": round(wall_seconds, 1),
        "updates": last.get("step", 0),
        "version": last.get("version"),
        "heldout": {"before": before, "after": after},
        "reward": {
            "first_quarter": mean_of(_part(records, 0.0, 0.25), "reward"),
            "last_quarter": mean_of(_part(records, 0.75, 1.0), "reward"),
        },
        "kl": mean_of(records, "kl", "sampled_tokens"),
        "share_of_out_of_band_tokens": mean_of(records, "share_out_of_band", "sampled_tokens"),
        "entropy": mean_of(records, "entropy", "sampled_tokens"),
        "grad_norm": mean_of(records, "grad_norm"),
        "mean_staleness": mean_of(records, "staleness/mean", "sampled_tokens"),
        "max_staleness": max(
            (r["staleness/max"] for r in records if "staleness/max" in r), default=None
        ),
        "format_error_share": mean_of(records, "format_error_share"),
        "sampled_tokens": sum(r.get("sampled_tokens", 0) for r in records),
        "tokens_per_second": {
            "sampled": mean_of(records, "tokens_per_second/sampled"),
            "trained": mean_of(records, "tokens_per_second/trained"),
        },
        "cost": cost_of(records, sections),
        "infrastructure_failures": _last(records, "fleet/infrastructure_failures"),
        "restarts": restarts,
        "groups": group_rows(sections, records),
        "settings": sections,
    }


def group_rows(
    sections: Mapping[str, Mapping[str, Any]], records: Sequence[Record]
) -> dict[str, dict[str, Any]]:
    """Per training group: what it is, its shares, its KL. In the run file's order."""
    settings = [g for g in sections.get("fleet", {}).get("groups", []) if is_training(g)]
    capacities = {g["name"]: g.get("capacity", 1.0) for g in settings}
    is_measured = "measured" in capacities.values()
    capacity = 0.0 if is_measured else sum(capacities.values())
    samples = {g["name"]: _total(records, f"group/{g['name']}/samples") for g in settings}
    outside = {
        g["name"]: sum(
            r.get(f"group/{g['name']}/sampled_tokens", 0)
            * (r.get(f"group/{g['name']}/share_out_of_band") or 0.0)
            for r in records
        )
        for g in settings
    }
    rows = {}
    for group in settings:
        name = group["name"]
        tokens, episodes = f"group/{name}/sampled_tokens", f"group/{name}/samples"
        rows[name] = {
            "accelerator": group.get("accelerator", ""),
            "weight_format": group["weight_format"],
            "kv_format": group.get("kv_format", "fp8"),
            "capacity_share": None if is_measured else capacities[name] / capacity,
            "share_of_samples": _ratio(samples[name], sum(samples.values())),
            "kl": mean_of(records, f"group/{name}/kl", tokens),
            "share_out_of_band": mean_of(records, f"group/{name}/share_out_of_band", tokens),
            "share_of_out_of_band_tokens": _ratio(outside[name], sum(outside.values())),
            "reward": mean_of(records, f"group/{name}/reward", episodes),
            "timeout_share": mean_of(records, f"group/{name}/timeout_share", episodes),
        }
    return rows


def cost_of(records: Sequence[Record], sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the samplers of all groups held until the last update: GPU-hours and dollars, in all,
    per update and by group. The gateway's account is of the whole run. Dollars are of the groups
    that have a price; `unpriced` names the others that held something, and dollars are null where
    that is all of them."""
    groups = {}
    for group in sections.get("fleet", {}).get("groups", []):
        name = group["name"]
        groups[name] = {
            "gpu_hours": _last(records, f"group/{name}/gpu_hours"),
            "dollars": next(
                (
                    r.get(f"group/{name}/dollars")
                    for r in reversed(records)
                    if f"group/{name}/gpu_hours" in r
                ),
                None,
            ),
        }
    updates = max((record["step"] for record in records), default=0)
    gpu_hours = sum(group["gpu_hours"] for group in groups.values())
    priced = [g["dollars"] for g in groups.values() if g["dollars"] is not None]
    dollars = sum(priced) if priced else None
    unpriced = [n for n, g in groups.items() if g["gpu_hours"] and g["dollars"] is None]
    return {
        "gpu_hours": gpu_hours,
        "dollars": dollars,
        "gpu_hours_per_update": _ratio(gpu_hours, updates),
        "dollars_per_update": None if dollars is None else _ratio(dollars, updates),
        "unpriced": unpriced,
        "groups": groups,
    }


def is_training(group: Mapping[str, Any]) -> bool:
    """Whether a [[fleet.groups]] table serves training episodes."""
    return group.get("purpose", "train") == "train"


def training_groups(sections: Mapping[str, Any]) -> list[str]:
    """Names of the groups that serve training episodes, as the run file has them."""
    return [group["name"] for group in sections["fleet"]["groups"] if is_training(group)]


def _part(records: Sequence[Record], start: float, end: float) -> Sequence[Record]:
    first, last = int(len(records) * start), int(np.ceil(len(records) * end))
    return records[first:last]


def mean_of(records: Sequence[Record], name: str, weight: str = "") -> float | None:
    """Of the records that have it; weighted by another of their values."""
    pairs = [
        (r[name], r.get(weight, 0) if weight else 1.0) for r in records if r.get(name) is not None
    ]
    total = sum(w for _, w in pairs)
    return float(sum(value * w for value, w in pairs) / total) if total else None


def _total(records: Sequence[Record], name: str) -> float:
    return sum(r.get(name, 0) for r in records)


def _last(records: Sequence[Record], name: str) -> Any:
    return next((r[name] for r in reversed(records) if name in r), 0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def write_summary(directory: Path, summary: Mapping[str, Any]) -> None:
    path = directory / SUMMARY_FILE
    with replacing(path) as aside:
        aside.write_text(json.dumps(summary, indent=2) + "\n")


def print_summary(console: Console, summary: Mapping[str, Any], report: Path) -> None:
    """The closing tables."""
    table = Table(title="held-out tasks (BF16, full vocabulary)", title_justify="left")
    for column in ("", "pass@1", "95 %", "pass@4", "95 %", "format errors", "tasks"):
        table.add_column(column, justify="left" if not column else "right")
    for when in ("before", "after"):
        if evaluation := summary["heldout"][when]:
            cells = []
            for k in (1, 4):
                cells.append(number(evaluation.get(f"pass_at_{k}")))
                low, high = evaluation.get(f"pass_at_{k}_interval", (None, None))
                cells.append(f"{number(low)} .. {number(high)}")
            errors = number(evaluation["format_error_share"])
            table.add_row(when, *cells, errors, str(evaluation["num_tasks"]))
    if table.row_count:
        console.print(table)

    fleet = Table(title="sampler groups", title_justify="left")
    columns = ("group", "weights", "KV", "capacity", "samples", "KL", "out of band", "of all those")
    for column in columns:
        fleet.add_column(column, justify="left" if column in columns[:3] else "right")
    for name, row in summary["groups"].items():
        fleet.add_row(
            *(name, row["weight_format"], row["kv_format"]),
            percent(row["capacity_share"]),
            percent(row["share_of_samples"]),
            number(row["kl"], 5),
            percent(row["share_out_of_band"], 2),
            percent(row["share_of_out_of_band_tokens"]),
        )
    console.print(fleet)
    console.print(cost_sentence(summary["cost"]), highlight=False)
    console.print(
        f"{summary['updates']} updates in {summary['wall_seconds']:,.0f} s"
        f" ({summary['status']}), mean staleness {number(summary['mean_staleness'], 1)}"
        f" versions, {summary['sampled_tokens']:,} tokens trained on",
        highlight=False,
    )
    console.print(f"report: {report}", highlight=False, soft_wrap=True)


def cost_sentence(cost: Mapping[str, Any]) -> str:
    """What the samplers cost, as one line."""
    text = f"samplers: {number(cost['gpu_hours'], 3)} accelerator-hours"
    if (hours := cost["gpu_hours_per_update"]) is not None:
        text += f", {number(hours, 5)} per update"
    if cost["dollars"] is None:
        return text + "; no prices"
    text += f"; {cost['dollars']:,.2f} $, {number(cost['dollars_per_update'], 4)} $ per update"
    return text + (f", without {', '.join(cost['unpriced'])}" if cost["unpriced"] else "")


def percent(share: float | None, digits: int = 0) -> str:
    """A share in [0, 1] as text."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"
