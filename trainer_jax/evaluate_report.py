"""An evaluation for people: evaluation.json, report.md and the closing table in the terminal.

Owns their content, also of a regrading. Must not estimate (`trainer_jax.evaluate`) nor play.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from contracts.files import replacing
from trainer_jax.evaluate import Evaluation
from trainer_jax.evaluate_records import Episode, Settings
from trainer_jax.live import number
from trainer_jax.summary import percent

EVALUATION, REPORT = "evaluation.json", "report.md"
_LONGEST = 120  # characters of a reason
_MOST_REASONS = 3  # of a task
RATES = ("", "value", "95 % interval", "standard error", "tasks")
_INTERVALS = "Intervals: 95 %, bootstrap over tasks."


@dataclass(frozen=True, kw_only=True)
class Result:
    """An evaluation, and what it is of."""

    evaluation: Evaluation
    settings: Settings
    episodes: Sequence[Episode]  # lost ones too

    @property
    def incomplete(self) -> list[str]:
        """Tasks that lack samples."""
        found = Counter(e.task_id for e in self.episodes if e.reward is not None)
        return [name for name in self.settings.digests if found[name] < self.settings.samples]

    def rows(self) -> dict[str, dict[str, Any]]:
        """Per task: how many samples were scored, passed and lost, how long they were, why the
        others failed."""
        rows = {}
        for task_id in self.settings.digests:
            own = [episode for episode in self.episodes if episode.task_id == task_id]
            scored = [episode for episode in own if episode.reward is not None]
            passed = sum((episode.reward or 0) > 0 for episode in scored)
            rows[task_id] = {
                "samples": len(scored),
                "passed": passed,
                "pass_at_1": passed / len(scored) if scored else None,
                "turns": _mean(episode.num_turns for episode in scored),
                "tokens": _mean(episode.num_tokens for episode in scored),
                "seconds": _mean(episode.seconds for episode in scored),
                "reasons": dict(Counter(map(_reason, scored)).most_common()),
                "lost": len(own) - len(scored),
            }
            rows[task_id]["reasons"].pop("", None)
        return rows


def _reason(episode: Episode) -> str:
    """Why an episode failed; "" if it passed."""
    if (episode.reward or 0) > 0:
        return ""
    return episode.verdict or episode.ending.replace("_", " ")


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def write_result(directory: Path, result: Result) -> None:
    """Both files, each whole or not at all."""
    settings = result.settings
    content = {
        **result.evaluation.to_json(),
        "checkpoint": settings.checkpoint,
        "tasks_source": settings.source,
        "tasks_ids": settings.ids,
        "settings": settings.same,
        "incomplete_tasks": result.incomplete,
        "tasks": result.rows(),
    }
    with replacing(directory / EVALUATION) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n")
    with replacing(directory / REPORT) as aside:
        aside.write_text("\n".join(_report(result)) + "\n")


def print_result(console: Console, directory: Path, result: Result) -> None:
    """The pass rates, what was lost, where the rest is."""
    console.print(rates_table("pass rates", result.evaluation))
    for line in (*_losses(result), f"report: {directory / REPORT}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def rates_table(title: str, evaluation: Evaluation) -> Table:
    """pass@k with intervals, for a terminal."""
    table = Table(title=escape(title), title_justify="left")
    for column in RATES:
        table.add_column(column, justify="left" if column == RATES[0] else "right")
    for row in rates_rows(evaluation):
        table.add_row(*row)
    return table


def rates_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """pass@k, its interval and error, and the tasks that have k samples."""
    return [
        (
            f"pass@{k}",
            number(rate.value),
            f"{number(rate.low)} .. {number(rate.high)}",
            number(rate.standard_error),
            str(rate.num_tasks),
        )
        for k, rate in evaluation.pass_at.items()
    ]


def _losses(result: Result) -> Iterator[str]:
    evaluation, num_incomplete = result.evaluation, len(result.incomplete)
    yield (
        f"{evaluation.num_tasks} tasks, {evaluation.num_samples} samples each; "
        f"{evaluation.infrastructure_failures} episodes lost to the infrastructure and run again, "
        f"{evaluation.missing_samples} samples still missing"
    )
    if num_incomplete:
        yield (
            f"{num_incomplete} tasks lack samples: pass@k is over the tasks that have k; the same "
            "command runs what is missing"
        )


def _report(result: Result) -> Iterator[str]:
    evaluation, settings = result.evaluation, result.settings
    source = settings.source or "the run's generated tasks"
    source += f", subset {settings.ids}" if settings.ids else ""
    sampling = settings.same["sampling"]
    yield f"# Evaluation of {_cell(settings.checkpoint)}"
    yield ""
    yield f"Tasks: {_cell(source)}. {' '.join(f'{line}.' for line in _losses(result))}"
    yield ""
    yield (
        f"Samplers: {', '.join(settings.same['samplers'])}. Temperature "
        f"{sampling['temperature']:g}, full vocabulary. Weights {settings.same['weights']}. "
        f"{_INTERVALS}"
    )
    yield ""
    yield from markdown(RATES, rates_rows(evaluation))
    yield "## How episodes end"
    yield ""
    endings = [(name.replace("_", " "), percent(s, 1)) for name, s in evaluation.endings.items()]
    yield from markdown(("ending", "share"), endings)
    yield (
        f"{number(evaluation.episode_turns, 1)} turns per episode, format errors in "
        f"{percent(evaluation.format_error_share, 1)} of them."
    )
    yield ""
    if lost := Counter(e.failure for e in result.episodes if e.reward is None):
        yield "## Episodes lost to the infrastructure"
        yield ""
        yield from markdown(
            ("because", "episodes"), [(reason, str(num)) for reason, num in lost.most_common()]
        )
    yield "## Tasks"
    yield ""
    columns = ("task", "samples", "passed", "pass@1", "turns", "why others failed", "lost")
    yield from markdown(columns, [_task_row(name, row) for name, row in result.rows().items()])


def _task_row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    reasons = [f"{num} x {_short(reason)}" for reason, num in row["reasons"].items()]
    if len(reasons) > _MOST_REASONS:
        reasons[_MOST_REASONS:] = [f"and {len(reasons) - _MOST_REASONS} more"]
    return (
        name,
        str(row["samples"]),
        str(row["passed"]),
        number(row["pass_at_1"], 2),
        number(row["turns"], 1),
        "; ".join(reasons),
        str(row["lost"]),
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, and an empty one."""
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(map(_cell, cells))} |"
    yield ""


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _cell(text: str) -> str:
    """Text that a policy may have had a part in, as nothing but text."""
    plain = " ".join(str(text).split())
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("`", "'")
