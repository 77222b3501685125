"""What a sweep keeps of a run: one small file of JSON lines, made of its metrics and summary.

Owns that format. The first line is about the run, the others about `WINDOW` updates each:

    run, arm, fleet, label, seed, warm_start, digest     as declared
    status, updates, seconds                             how it ended
    signs        sign of a collapse -> the first update at which it was seen, or null
    collapsed    the first update with two signs at once, or null
    groups       sampler group -> accelerator, formats, share of samples and of extreme tokens, KL
    evaluation   before, after: pass@k with intervals on held-out tasks, endings
    cost         accelerator-hours and dollars of the samplers, in all and per update
    anatomy      a row per recorded update, of runs that record: `trainer_jax.anatomy`

A window has the updates it covers and means of what `MEANS` lists, rounded to four digits. Means
per token are weighted by tokens, others by updates. Must not judge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.files import replacing
from trainer_jax.anatomy import anatomy
from trainer_jax.collapse import collapse_of
from trainer_jax.config import TrainSection
from trainer_jax.metrics import Record, read_metrics
from trainer_jax.recorded import DIRECTORY, read_recorded
from trainer_jax.summary import SUMMARY_FILE, mean_of, training_groups
from trainer_jax.sweep import PlannedRun

WINDOW = 10  # updates
DIGITS = 4
TOKENS = "sampled_tokens"
# metric -> what its mean is weighted by
MEANS = {
    "reward": "",
    "kl": TOKENS,
    "k3": TOKENS,
    "share_out_of_reference_band": TOKENS,
    "entropy": TOKENS,
    "grad_norm": "",
    "ess": TOKENS,
    "centering_norm": TOKENS,
    "masked_q_mass": TOKENS,
    "staleness/mean": TOKENS,
    "episode_tokens": "",
    "episode_turns": "",
    "format_error_share": "",
    "ending/submitted": "",
    "ending/format_errors": "",
    "ending/turn_limit": "",
    "ending/length": "",
}
GROUP_MEANS = ("kl", "share_out_of_reference_band")


def results_file(results: Path, run: PlannedRun) -> Path:
    return results / run.scale / f"{run.name}.jsonl"


def is_at_its_end(directory: Path) -> bool:
    """Whether a run has nothing left to do."""
    try:
        summary = json.loads((directory / SUMMARY_FILE).read_text())
    except FileNotFoundError:
        return False
    return summary["status"] in ("finished", "collapsed")


def finished_digest(results: Path, run: PlannedRun) -> str | None:
    """The digest of the run that the results are of; None without results."""
    try:
        with results_file(results, run).open() as file:
            return json.loads(file.readline())["digest"]
    except FileNotFoundError:
        return None


def write_results(results: Path, run: PlannedRun, directory: Path) -> None:
    """Reduces a finished run directory to its file."""
    summary = json.loads((directory / SUMMARY_FILE).read_text())
    records = read_metrics(directory)
    head = _head(run, summary, records)
    if (directory / DIRECTORY).is_dir():
        head["anatomy"] = anatomy(read_recorded(directory))
    lines = [head, *_windows(records, training_groups(run.sections))]
    path = results_file(results, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        aside.write_text("".join(json.dumps(_rounded(line)) + "\n" for line in lines))


def _head(run: PlannedRun, summary: Mapping[str, Any], records: Sequence[Record]) -> Record:
    limits = TrainSection.model_validate(run.sections["train"]).collapse
    signs, collapsed = collapse_of(records, limits)
    return {
        "run": run.name,
        "arm": run.arm.arm,
        "fleet": run.arm.fleet,
        "label": run.arm.name,
        "seed": run.seed,
        "warm_start": run.warm_start,
        "digest": run.digest,
        "status": summary["status"],
        "updates": summary["updates"],
        "seconds": summary["wall_seconds"],
        "signs": signs,
        "collapsed": collapsed,
        "sampled_tokens": summary["sampled_tokens"],
        "mean_staleness": summary["mean_staleness"],
        "infrastructure_failures": summary["infrastructure_failures"],
        "groups": summary["groups"],
        "evaluation": summary["heldout"],
        "cost": summary["cost"],
    }


def _windows(records: Sequence[Record], groups: Sequence[str]) -> Iterator[Record]:
    for start in range(0, len(records), WINDOW):
        part = records[start : start + WINDOW]
        line: Record = {"first": part[0]["step"], "last": part[-1]["step"]}
        line |= {name: mean_of(part, name, weight) for name, weight in MEANS.items()}
        line["seconds"] = mean_of(part, "time/step")
        for group in groups:
            tokens = f"group/{group}/{TOKENS}"
            line[tokens] = sum(record.get(tokens, 0) for record in part)
            for name in GROUP_MEANS:
                key = f"group/{group}/{name}"
                line[key] = mean_of(part, key, tokens)
        yield line


def _rounded(value: Any) -> Any:
    """Floats to `DIGITS` significant digits, wherever they are."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
