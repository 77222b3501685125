"""What the page of a run's recorded episodes shows, as plain data.

Owns which episodes are shown, their figures, and what is left out to keep the page small. Must not
know how any of it looks. Numbers are rounded as they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from contracts.errors import BadInputError
from contracts.runfile import read_resolved, validate_section
from contracts.types import CandidateSets, Trajectory, TrajectoryGroup
from sampler_fleet.config import FleetConfig
from trainer_jax.config import ModelSection
from trainer_jax.recorded import RecordedUpdate, TrainedTokens
from trainer_jax.run_directory import RECORD

MAX_CANDIDATES = 16  # of a token, the likeliest; and the one drawn
_PLACES = 4  # of a log-prob


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run's record says: its name, what its groups run on, its tokenizer."""

    name: str
    accelerators: Mapping[str, str]  # "h200, fp8-block" by sampler group
    tokenizer: Tokenizer


def read_facts(run: Path) -> RunFacts:
    """Of a run directory.

    Raises:
        BadInputError: no run there, or its checkpoint has no tokenizer.
    """
    record = run / RECORD
    if not record.exists():
        raise BadInputError(f"run directory {run}", expected=f"a run's {RECORD}", found="none")
    sections = read_resolved(record)
    model = validate_section(ModelSection, "model", sections["model"])
    fleet = validate_section(FleetConfig, "fleet", sections["fleet"])
    path = model.checkpoint / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise BadInputError(str(path), expected="the run's tokenizer", found=error) from None
    return RunFacts(
        name=sections["run"]["name"],
        accelerators={g.name: f"{g.accelerator}, {g.weight_format}" for g in fleet.groups},
        tokenizer=tokenizer,
    )


def content_of(
    facts: RunFacts, updates: Iterable[RecordedUpdate], *, max_episodes: int
) -> dict[str, Any]:
    """The page's data. Of more episodes than `max_episodes` as many are taken from every update,
    the first of each."""
    everything = [(update, list(update.episodes())) for update in updates]
    ranked = sorted(
        (place, number)
        for number, (_, members) in enumerate(everything)
        for place in range(len(members))
    )
    chosen = sorted((number, place) for place, number in ranked[:max_episodes])
    episodes = [
        _episode(everything[number][0], *everything[number][1][place]) for number, place in chosen
    ]
    ids = sorted({i for episode in episodes for name in ("tokens", "ids") for i in episode[name]})
    added = facts.tokenizer.get_added_tokens_decoder()
    return {
        "run": facts.name,
        "num_recorded": len(ranked),
        "accelerators": dict(facts.accelerators),
        "texts": {i: facts.tokenizer.decode([i], skip_special_tokens=False) for i in ids},
        "controls": [i for i in ids if i in added],
        "episodes": episodes,
    }


def _episode(
    update: RecordedUpdate,
    group: TrajectoryGroup,
    trajectory: Trajectory,
    trained: TrainedTokens | None,
) -> dict[str, Any]:
    versions = trajectory.version
    gaps = trained and np.abs(trained.trainer_logp - trajectory.sampler_logp)
    return {
        "update": update.step,
        "version": update.version,
        "sequence": group.sequence,
        "task": trajectory.task_id,
        "session": trajectory.session_id,
        "group": trajectory.group,
        "samplers": list(trajectory.sampler_ids),
        "reward": trajectory.reward,
        "ending": str(trajectory.ending),
        "failure": trajectory.failure,
        "turns": trajectory.num_turns,
        "format_errors": trajectory.num_format_errors,
        "seconds": round(trajectory.seconds, 1),
        "mean_gap": None if gaps is None else _rounded([gaps.mean()])[0],
        "max_gap": None if gaps is None else _rounded([gaps.max()])[0],
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        "tokens": trajectory.tokens.tolist(),
        "sampled": np.flatnonzero(trajectory.loss_mask).tolist(),
        "sampler_logp": _rounded(trajectory.sampler_logp),
        "trainer_logp": None if trained is None else _rounded(trained.trainer_logp),
        "masked": [] if trained is None else np.flatnonzero(trained.masked).tolist(),
        "spans": [[span.version, span.start, span.end] for span in trajectory.spans],
        **_candidates(trajectory),
    }


def _candidates(trajectory: Trajectory) -> dict[str, list[Any]]:
    """The likeliest of each set, in order, and the token drawn; `sizes` are of whole sets."""
    sets = trajectory.candidates
    shown, ids, logp = [], [], []
    for n, token in enumerate(trajectory.tokens[trajectory.loss_mask]):
        own = _likeliest(sets, n, int(token))
        shown.append(len(own))
        ids += sets.ids[own].tolist()
        logp += _rounded(sets.logp[own])
    return {"sizes": sets.counts.tolist(), "shown": shown, "ids": ids, "logp": logp}


def _likeliest(sets: CandidateSets, n: int, token: int) -> np.ndarray:
    start, end = sets.offsets[n : n + 2]
    order = start + np.argsort(-sets.logp[start:end], kind="stable")
    is_drawn = sets.ids[order] == token
    return order[(np.arange(len(order)) < MAX_CANDIDATES) | is_drawn]


def _rounded(values: Sequence[Any] | np.ndarray) -> list[float]:
    return [round(float(value), _PLACES) for value in values]
