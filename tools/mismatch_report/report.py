"""The report as JSON values: numbers by group and version, extremes, findings, what is left out.

Owns what it holds and the words of its verdict; must not read files of a run, print or draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from contracts.types import Trajectory
from tools.mismatch_report.causes import (
    MIN_TOKENS,
    REMEDY,
    Unit,
    agreement,
    diagnose,
    judged_of,
    leaning,
    sigmas,
    surprise,
    units_of,
)
from tools.mismatch_report.prompts import text_faults
from tools.mismatch_report.source import Checkpoint, Source, read_checkpoint
from tools.mismatch_report.tokens import Setup, Tokens, Usable, compare, usable

RATIO_EDGES = (0.05, 0.2, 0.5, 0.8, 0.95, 1.05, 1.25, 2.0, 5.0, 20.0)
_CONTEXT_TOKENS = 24  # before an extreme token
_METRICS = (
    "num_tokens",
    "kl",
    "k3",
    "abs_dlogp",
    "abs_dlogp_max",
    "ratio_mean",
    "share_out_of_band",
    "masked_q_mass",
    "masked_p_mass",
    "entropy",
)
Row = dict[str, Any]
Label = tuple[str, str]  # all tokens, a group or a version; and which


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """A token whose ratio is far from 1, with the text around it (ids without a tokenizer)."""

    group: str
    sampler: str
    session: str
    position: int
    version: int
    token: int
    text: str
    before: str
    trainer_logp: float
    sampler_logp: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Sampled tokens of a group that no finding is about, and why."""

    group: str
    num_tokens: int
    reason: str


def rows_of(tokens: Tokens, labels: Mapping[Label, np.ndarray]) -> dict[Label, Row]:
    """The metrics of each label (a mask [T]) by name; see docs/correction.md."""
    metrics = tokens.metrics(np.stack(list(labels.values()), axis=1))
    rows: dict[Label, Row] = {}
    for i, (name, mask_T) in enumerate(labels.items()):
        own = tokens.where(mask_T)
        counts = np.histogram(own.log_ratio, [-np.inf, *np.log(RATIO_EDGES), np.inf])[0]
        rows[name] = {metric: float(metrics[metric][i]) for metric in _METRICS} | {
            "ratio_expected": float(own.expected_ratio.mean()),
            "agreement": agreement(own),
            "surprise_sigmas": surprise(own)[1],
            "leaning_sigmas": leaning(own)[1],
            "sigmas": sigmas(own),
            "ratio_histogram": counts.tolist(),
        }
    return rows


def extremes(
    tokens: Tokens, trajectories: Sequence[Trajectory], directory: Path, num: int
) -> list[Extreme]:
    """The tokens of each group with the largest |log r|, largest first."""
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None

    def spell(ids: np.ndarray) -> str:
        if tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    order_T = np.argsort(-np.abs(tokens.log_ratio), kind="stable")
    chosen = [
        i
        for group in np.unique(tokens.group)
        for i in order_T[tokens.group[order_T] == group][:num]
    ]
    found = []
    for i in chosen:
        trajectory, at = trajectories[int(tokens.trajectory[i])], int(tokens.position[i])
        found.append(
            Extreme(
                group=trajectory.group,
                sampler=", ".join(trajectory.sampler_ids),
                session=trajectory.session_id,
                position=at,
                version=int(tokens.version[i]),
                token=int(trajectory.tokens[at]),
                text=spell(trajectory.tokens[at : at + 1]) or f"#{trajectory.tokens[at]}",
                before=spell(trajectory.tokens[max(0, at - _CONTEXT_TOKENS) : at]),
                trainer_logp=float(tokens.trainer_logp[i]),
                sampler_logp=float(tokens.sampler_logp[i]),
                ratio=float(np.exp(np.clip(tokens.log_ratio[i], -80, 80))),
            )
        )
    return found


def build_report(
    source: Source,
    setup: Setup,
    checkpoint: Checkpoint,
    *,
    others: Sequence[Path],
    num_extremes: int,
) -> dict[str, Any]:
    """Everything that is printed or drawn, as JSON values.

    Raises:
        BadInputError: nothing that this checkpoint could be compared on.
    """
    found = usable(source.groups, checkpoint, setup)
    tokens = compare(found.compared, checkpoint, setup)
    units = units_of(found.compared, tokens)
    readings: dict[Path, Checkpoint] = {}

    def kl_under(unit: Unit) -> dict[str, float]:
        own = [found.compared[i] for i in np.unique(unit.tokens.trajectory)]
        for path in others:
            readings.setdefault(path, read_checkpoint(path, start=source.start_checkpoint))
        return {
            str(path): float(compare(own, other, setup).stat("kl").mean())
            for path, other in readings.items()
            if other.config.vocab_size >= checkpoint.config.vocab_size
        }

    in_text, checked = text_faults(found.compared, checkpoint.tokenizer)
    findings = diagnose(units, setup, precision=source.precision, kl_under=kl_under) + in_text
    omitted = left_out(units, found)
    judged = sum(len(unit.tokens) for unit in judged_of(units))
    return {
        "source": str(source.path),
        "checkpoint": str(checkpoint.path),
        "checkpoint_version": checkpoint.version,
        "temperature": setup.temperature,
        "replay": setup.replay,
        "truncates": setup.truncates,
        "num_groups": len(source.groups),
        "num_trajectories": len(found.compared),
        "refused": {"number": len(found.refused), "first": next(iter(found.refused), None)},
        "findings": [asdict(one) | {"remedy": REMEDY[one.cause]} for one in findings],
        "judged_tokens": judged,
        "left_out": [asdict(part) for part in omitted],
        "verdict": verdict(judged, omitted, faulty=bool(findings), refused=bool(found.refused)),
        "notes": [*_notes(tokens, found.compared, units, checkpoint), *checked],
        **_numbers(tokens, setup, source.precision),
        "extremes": [
            asdict(x) for x in extremes(tokens, found.compared, checkpoint.tokenizer, num_extremes)
        ],
    }


def _numbers(tokens: Tokens, setup: Setup, precision: Mapping[str, str]) -> dict[str, Any]:
    """The report's rows, by group and by version, and what belongs to them."""
    names = setup.group_names
    groups = {("group", name): tokens.group == i for i, name in enumerate(names)}
    versions = {("version", str(v)): tokens.version == v for v in np.unique(tokens.version)}
    labels = {("", "all"): np.ones(len(tokens), bool)} | groups | versions
    rows = rows_of(tokens, {label: mask_T for label, mask_T in labels.items() if mask_T.any()})

    def rows_by(kind: str) -> dict[str, Row]:
        return {name: row for (other, name), row in rows.items() if other == kind}

    bands_Gx2 = np.exp(setup.log_bands_Gx2.astype(float)).round(4)
    kl_T = tokens.stat("kl")
    return {
        "versions": [int(tokens.version.min()), int(tokens.version.max())],
        "ratio_edges": list(RATIO_EDGES),
        "bands": dict(zip(names, bands_Gx2.tolist(), strict=True)),
        "precision": {name: precision[name] for name in names if name in precision},
        "overall": rows_by("")["all"],
        "groups": rows_by("group"),
        "by_version": rows_by("version"),
        "kl_by_version": {
            name: {
                str(v): float(kl_T[mask_T & (tokens.version == v)].mean())
                for v in np.unique(tokens.version[mask_T])
            }
            for (_, name), mask_T in groups.items()
            if mask_T.any()
        },
    }


def left_out(units: Sequence[Unit], found: Usable) -> list[LeftOut]:
    """What the findings say nothing of: too few tokens, unusable records, no reward."""
    num = Counter[tuple[str, str]]()
    for unit in units:
        if len(unit.tokens) < MIN_TOKENS:
            num[unit.group, f"fewer than {MIN_TOKENS}"] += len(unit.tokens)
    for reason, trajectories in (
        ("records that the trainer refuses", found.broken),
        ("no reward", found.unrewarded),
    ):
        for trajectory in trajectories:
            num[trajectory.group, reason] += int(trajectory.loss_mask.sum())
    return [
        LeftOut(group=group, num_tokens=tokens, reason=reason)
        for (group, reason), tokens in num.items()
    ]


def verdict(judged: int, omitted: Sequence[LeftOut], *, faulty: bool, refused: bool) -> str:
    """What the findings, or their absence, are worth, in a sentence; "" if they say it all."""
    total = judged + sum(part.num_tokens for part in omitted)
    parts = ", ".join(f"{x.num_tokens:,} of group {x.group} ({x.reason})" for x in omitted)
    if not judged:
        return f"Nothing was judged. Tokens left out: {parts}."
    if faulty:
        return f"Judged {judged:,} of {total:,} tokens. Left out: {parts}." if omitted else ""
    if omitted:
        return f"No fault found in {judged:,} of {total:,} tokens. Not judged: {parts}."
    if refused:
        return "No cause found, but the trainer refuses some of the records."
    return "No fault found: records agree with their draws, and the checkpoint with the records."


def _notes(
    tokens: Tokens,
    trajectories: Sequence[Trajectory],
    units: Sequence[Unit],
    checkpoint: Checkpoint,
) -> list[str]:
    """What limits the conclusions."""
    first, last = int(tokens.version.min()), int(tokens.version.max())
    which = f"version {first}" if first == last else f"versions {first} to {last}"
    if checkpoint.version is None:
        notes = [
            f"tokens are of {which}, and nothing says which the checkpoint is: "
            "part of the mismatch may be age"
        ]
    else:
        age_T = checkpoint.version - tokens.version
        notes = [
            f"tokens are of {which}, the checkpoint is {checkpoint.version}: "
            f"on average {np.abs(age_T).mean():.1f} versions apart"
            + (f", {np.mean(age_T < 0):.0%} of the tokens newer than it" if age_T.min() < 0 else "")
        ]
    for unit in judged_of(units):
        if not unit.sampler:
            own = [trajectories[i] for i in np.unique(unit.tokens.trajectory)]
            names = sorted({name for t in own for name in t.sampler_ids})
            notes.append(
                f"judged as one in group {unit.group}: {len(own)} trajectories of "
                + (", ".join(names) if names else "samplers that nobody named")
            )
    return notes
