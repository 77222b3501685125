"""Grading an evaluation's saved patches again: `python -m trainer_jax evaluate --regrade`.

Owns what the verdicts of a second grading make of the pass rates. The grading is the fleet's: it
runs as a process, without a sampler, gateway or model.

    regraded.jsonl   the verdicts (see `contracts.evaluations`)
    regraded.md      those that changed, and the pass rates by the second grading
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from contracts.evaluations import EPISODES, REGRADED, read_records
from contracts.files import replacing
from contracts.supervisor import service_environment
from trainer_jax.evaluate import Evaluation, summarize
from trainer_jax.evaluate_records import Episode, Settings, read_episodes, read_settings
from trainer_jax.evaluate_report import RATES, markdown, rates_rows, rates_table

REPORT = "regraded.md"
_CHANGED = 1  # exit status of a grading that found another verdict, or could not find one
_COLUMNS = ("task", "sample", "was", "is", "because")

Key = tuple[str, int]


def regrade(directory: Path, console: Console) -> int:
    """Grades, reports; the exit status: 0 if every verdict is as it was.

    Raises:
        BadInputError: no evaluation in `directory`, or tasks that are no longer those.
    """
    settings = read_settings(directory)
    num_before = len(read_records(directory / REGRADED))
    command = [sys.executable, "-m", "sampler_fleet", "tasks", "regrade", str(directory)]
    status = subprocess.run(command, check=False, env=service_environment()).returncode
    if status not in (0, _CHANGED):
        return status
    records = read_records(directory / EPISODES)
    episodes = read_episodes(directory, records)
    regraded = read_records(directory / REGRADED)
    verdicts = latest(regraded, records)
    num_now = sum(record["passed"] is not None for record in regraded[num_before:])
    changed = changes(verdicts)
    evaluation = by_verdicts(settings, episodes, verdicts)
    with replacing(directory / REPORT) as aside:
        aside.write_text("\n".join(_report(settings, evaluation, verdicts, changed)) + "\n")
    if changed:
        for row in changed:
            console.print(" ".join(row), markup=False, highlight=False, soft_wrap=True)
    console.print(rates_table("pass rates by the second grading", evaluation))
    console.print(
        f"{_sentence(verdicts, changed)}; {num_now} graded in this call; "
        f"report: {directory / REPORT}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return _CHANGED if changed else 0


def latest(
    regraded: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> dict[Key, Mapping[str, Any]]:
    """The last verdict on each sample of which `records` of episodes have a patch to grade."""
    graded = {
        (record["task_id"], record["sample"])
        for record in records
        if record["reward"] is not None and record["patch"] is not None
    }
    keyed = {(record["task_id"], record["sample"]): record for record in regraded}
    return {key: record for key, record in keyed.items() if key in graded}


def changes(verdicts: Mapping[Key, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Task, sample, verdict before and now, and why, of those that differ or could not be had."""
    names = {True: "passed", False: "failed", None: "not graded"}
    return [
        (
            task_id,
            str(sample),
            names[verdict["had_passed"]],
            names[verdict["passed"]],
            verdict["failure"] or verdict["reason"],
        )
        for (task_id, sample), verdict in sorted(verdicts.items())
        if verdict["passed"] != verdict["had_passed"]
    ]


def by_verdicts(
    settings: Settings, episodes: Sequence[Episode], verdicts: Mapping[Key, Mapping[str, Any]]
) -> Evaluation:
    """The pass rates by the second grading. An episode without a patch stays at its reward; one
    whose patch could not be graded doesn't count."""
    by_task: dict[str, list[Episode]] = {task_id: [] for task_id in settings.digests}
    for episode in episodes:
        verdict = verdicts.get((episode.task_id, episode.sample))
        if episode.reward is not None and verdict:
            passed = verdict["passed"]
            episode = replace(episode, reward=None if passed is None else float(passed))
        if episode.reward is not None:
            by_task[episode.task_id].append(episode)
    return summarize(
        by_task,
        version=max((episode.version for episode in episodes), default=0),
        num_samples=settings.samples,
        num_failures=sum(verdict["num_lost"] for verdict in verdicts.values()),
        seconds=sum(episode.seconds for episode in episodes),
    )


def _sentence(verdicts: Mapping[Key, Any], changed: Sequence[Any]) -> str:
    num_lost = sum(verdict["num_lost"] for verdict in verdicts.values())
    return (
        f"{len(verdicts)} patches graded again, {len(verdicts) - len(changed)} verdicts as before, "
        f"{len(changed)} not; {num_lost} gradings lost to the infrastructure"
    )


def _report(
    settings: Settings,
    evaluation: Evaluation,
    verdicts: Mapping[Key, Mapping[str, Any]],
    changed: Sequence[Sequence[str]],
) -> Iterator[str]:
    yield f"# Second grading of {settings.checkpoint}"
    yield ""
    yield f"{_sentence(verdicts, changed)}."
    yield ""
    yield from markdown(RATES, rates_rows(evaluation))
    if changed:
        yield "## Verdicts that differ"
        yield ""
        yield from markdown(_COLUMNS, changed)
