"""The tables of the report, as text by cell.

Owns what is reported of an arm and how it is pooled over runs. Must not read, draw or lay out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.stability_report.published import (
    ANATOMY,
    BASE,
    EVERY_COLLAPSE,
    FLEETS,
    GROUPS,
    PUBLISHED,
    Published,
)
from tools.stability_report.runs import EARLY_WINDOWS, Run, Scale, paired
from tools.stability_report.statistics import MARGIN, Interval, equivalence, interval_of
from trainer_jax.live import number
from trainer_jax.summary import percent
from trainer_jax.sweep import Arm

OUTSIDE = "share_out_of_reference_band"
FORMAT_ENDINGS = "ending/format_errors"
SIGNS = {
    "reward_falling": "reward falling",
    "kl_rising": "KL rising",
    "format_errors": "format errors",
}
RANGES = "Means over runs, with their range. Start and end are means of 20 updates."
Form = Callable[[float], str]


@dataclass(frozen=True)
class Cell:
    """A number, and what is written small beside it."""

    text: str
    aside: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """`num_names` columns at the left hold words; so does the last if it is `published`."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    num_names: int = 1
    is_published: bool = False


def tables_of(scale: Scale) -> Iterator[Table]:
    """All of a scale with at least one run."""
    yield _learning(scale)
    yield _mismatch(scale)
    yield _policy(scale)
    yield _collapse(scale)
    yield _groups(scale)
    if scale.twins:
        yield _fleets(scale)
    if any(run.head.get("anatomy") for run in scale.runs):
        yield _anatomy(scale)


def prices_table(scales: Sequence[Scale]) -> Table:
    """The prices behind the dollars, each with the date it holds from."""
    rows: dict[tuple[str, ...], None] = {}
    for accelerator, price in (row for scale in scales for row in scale.prices):
        row = (accelerator, f"{price['per_hour']:.2f}", str(price["since"]), price["source"])
        rows[row] = None
    return Table(
        title="Prices",
        note="US dollars per accelerator and hour.",
        columns=("accelerator", "$/h", "since", "source"),
        rows=[[Cell(text) for text in row] for row in rows],
        is_published=True,
    )


def _learning(scale: Scale) -> Table:
    def row(arm: Arm, runs: Sequence[Run]) -> list[Cell]:
        reward = [run.smoothed("reward") for run in runs]
        return [
            Cell(f"{len(runs)} of {scale.num_declared(arm)}"),
            _over(reward, _first),
            _over(reward, max),
            _over(reward, _last),
            *(_pass_cell(runs, k, when) for k in (1, 4) for when in ("before", "after")),
        ]

    return _by_arm(
        scale,
        "Reward and held-out tasks",
        f"{RANGES} The peak is the best mean of 20 updates. Pass rates: BF16, full vocabulary; "
        "mean over runs with its 95 % interval by Student's t, a run (seed and warm start) being "
        "one value; of a single run, its own interval, over tasks.",
        ("runs", "reward start", "peak", "end", "pass@1 before", "after", "pass@4 before", "after"),
        row,
        lambda published: published.evaluation,
        f"published: pass@1 / pass@4 ({BASE})",
    )


def _mismatch(scale: Scale) -> Table:
    def row(_: Arm, runs: Sequence[Run]) -> list[Cell]:
        kl, outside = ([run.smoothed(name) for run in runs] for name in ("kl", OUTSIDE))
        return [
            *(_over(kl, of, _small) for of in (_first, max, _last)),
            _over(kl, lambda values: max(values) / values[0] if values[0] else math.nan, _times),
            *(_over(outside, of, lambda x: percent(x, 2)) for of in (_first, max, _last)),
        ]

    return _by_arm(
        scale,
        "Mismatch between samplers and trainer",
        f"{RANGES} KL(sampler || trainer) per token in nats; outside: share of the tokens with a "
        "ratio outside [0.2, 5], whatever the arm does with them.",
        ("KL start", "max", "end", "max / start", "outside start", "max", "end"),
        row,
        lambda published: published.mismatch,
    )


def _policy(scale: Scale) -> Table:
    def row(_: Arm, runs: Sequence[Run]) -> list[Cell]:
        def of(name: str) -> list[list[float]]:
            return [run.smoothed(name) for run in runs]

        norms = [[value for _, value in run.series("grad_norm")] for run in runs]
        return [
            *(_over(of("entropy"), at, _small) for at in (_first, _last)),
            *(_over(norms, at, _small) for at in (_first, max)),
            *(_over(of("episode_tokens"), at, lambda x: number(x, 0)) for at in (_first, _last)),
            *(_over(of("episode_turns"), at, lambda x: number(x, 1)) for at in (_first, _last)),
            *(_over(of(FORMAT_ENDINGS), at, _percent) for at in (_first, max, _last)),
        ]

    return _by_arm(
        scale,
        "The policy and its episodes",
        f"{RANGES} Gradient norms are means of 10 updates; ended by format errors: share of the "
        "episodes.",
        (
            *("entropy start", "end", "gradient norm start", "max", "tokens per episode start"),
            *("end", "turns start", "end", "ended by format errors start", "max", "end"),
        ),
        row,
        lambda published: published.policy,
    )


def _collapse(scale: Scale) -> Table:
    def row(_: Arm, runs: Sequence[Run]) -> list[Cell]:
        num = sum(run.head["collapsed"] is not None for run in runs)
        return [
            Cell(f"{num} of {len(runs)}"),
            _updates([run.head["collapsed"] for run in runs], counted=False),
            *(_updates([run.head["signs"][sign] for run in runs]) for sign in SIGNS),
            _updates([run.head["updates"] for run in runs], counted=False),
        ]

    return _by_arm(
        scale,
        "Collapse",
        "A collapse is two signs at once. The first update at which each was seen: median over the "
        f"runs that showed it, with their range and number. {EVERY_COLLAPSE}",
        ("collapsed", "at update", *SIGNS.values(), "updates made"),
        row,
        lambda published: published.collapse,
    )


def _by_arm(
    scale: Scale,
    title: str,
    note: str,
    columns: tuple[str, ...],
    row: Callable[[Arm, Sequence[Run]], list[Cell]],
    published: Callable[[Published], str],
    header: str = "published",
) -> Table:
    has_published = scale.is_like_published
    rows = []
    for arm in scale.arms:
        runs = scale.runs_of(arm)
        cells = row(arm, runs) if runs else [Cell("-")] * len(columns)
        told = PUBLISHED.get((arm.arm, arm.fleet), Published())
        rows.append([Cell(arm.name), *cells, *([Cell(published(told))] * has_published)])
    return Table(
        title=title,
        note=note,
        columns=("arm", *columns, *([header] * has_published)),
        rows=rows,
        is_published=has_published,
    )


def _groups(scale: Scale) -> Table:
    rows = []
    for arm in scale.arms:
        runs = scale.runs_of(arm)
        names = list(runs[0].head["groups"]) if runs else []
        outside = {name: sum(_tokens_outside(run, name) for run in runs) for name in names}
        for name in names:
            about = [run.head["groups"][name] for run in runs]
            kl = [run.smoothed(f"group/{name}/kl") for run in runs]
            num = sum(_tokens(run, name) for run in runs)
            early = sum(_tokens_outside(run, name, EARLY_WINDOWS) for run in runs)
            whole = sum(_tokens_outside(run, x, EARLY_WINDOWS) for run in runs for x in names)
            rows.append(
                [
                    Cell(arm.name),
                    Cell(name),
                    Cell(f"{about[0]['weight_format']}, KV {about[0]['kv_format']}"),
                    _over([[row["share_of_samples"]] for row in about], _first, _percent),
                    _share(early, whole),
                    _share(outside[name], sum(outside.values())),
                    _share(outside[name], num, 2),
                    *(_over(kl, at, _small) for at in (_first, max, _last)),
                ]
            )
    return Table(
        title="Sampler groups",
        note="Pooled over an arm's runs. Extreme: tokens with a ratio outside [0.2, 5], in the "
        f"first 20 updates and in all. {GROUPS if scale.is_like_published else ''}".strip(),
        columns=(
            *("arm", "group", "weights", "share of samples", "of extreme tokens, start", "all"),
            *("own tokens extreme", "KL start", "max", "end"),
        ),
        rows=rows,
        num_names=3,
    )


def _tokens(run: Run, group: str) -> float:
    return sum(window.get(f"group/{group}/sampled_tokens") or 0 for window in run.windows)


def _tokens_outside(run: Run, group: str, num_windows: int | None = None) -> float:
    return sum(
        (window.get(f"group/{group}/sampled_tokens") or 0)
        * (window.get(f"group/{group}/{OUTSIDE}") or 0)
        for window in run.windows[:num_windows]
    )


def _fleets(scale: Scale) -> Table:
    rows = []
    for mixed, other in scale.twins:
        told = FLEETS.get(mixed.arm, {}) if scale.is_like_published else {}
        pairs = paired(scale.runs_of(mixed), scale.runs_of(other))
        for key, label, of, form in _COMPARED:
            sides_of = [(of(x, y), of(y, x)) for x, y in pairs]
            values = [(a, b) for a, b in sides_of if a is not None and b is not None]
            compare = _difference if key.startswith("pass_at") else _ratio
            sides = zip(*values, strict=True) if values else ([], [])
            rows.append(
                [
                    Cell(mixed.arm),
                    Cell(label),
                    Cell(str(len(values))),
                    *(_over([[value] for value in side], _first, form) for side in sides),
                    *compare(values),
                    Cell(told.get(key, "")),
                ]
            )
    return Table(
        title="Mixed against homogeneous",
        note="Runs paired by seed and warm start; KL on average over the updates that both made. "
        "Rates are compared by the mean of the differences, with its 90 % interval by Student's t "
        f"and p of two one-sided tests that it lies within +-{MARGIN} (below 0.05: it does); the "
        "others by the geometric mean and the range of ratios. Accelerator-hours are those of "
        "CPU processes on one machine, so the dollars are nominal: what `python -m sampler_fleet "
        "simulate` says of the published fleets is in [docs/fleet.md](../../fleet.md).",
        columns=(
            *("loss", "of each two runs", "pairs", "mixed", "homogeneous"),
            *("difference or ratio", "p", "published"),
        ),
        rows=rows,
        num_names=2,
        is_published=True,
    )


def _kl(run: Run, other: Run) -> float | None:
    values = [value for _, value in run.series("kl")][: len(other.series("kl"))]
    return statistics.fmean(values) if values else None


def _early_kl(run: Run, _: Run) -> float | None:
    return next(iter(run.smoothed("kl")), None)


def _pass_after(k: int) -> Callable[[Run, Run], float | None]:
    return lambda run, _: run.pass_at(k, "after")


def _cost(name: str) -> Callable[[Run, Run], float | None]:
    return lambda run, _: run.head["cost"].get(name)


def _small(value: float) -> str:
    return f"{value:.3g}"


_COMPARED = (
    ("kl_start", "KL at the start", _early_kl, _small),
    ("kl", "KL on average", _kl, _small),
    ("pass_at_1", "pass@1 after", _pass_after(1), number),
    ("pass_at_4", "pass@4 after", _pass_after(4), number),
    ("hours", "accelerator-hours per update", _cost("gpu_hours_per_update"), _small),
    ("cost", "dollars per update", _cost("dollars_per_update"), _small),
)


def _difference(values: Sequence[tuple[float, float]]) -> tuple[Cell, Cell]:
    differences = [a - b for a, b in values]
    if len(differences) < 2:
        aside = "no interval or test of fewer than two pairs"
        return Cell(f"{differences[0]:+.3f}" if differences else "-", aside), Cell("-")
    found = equivalence(differences)
    interval = found.interval
    aside = f"{interval.low:+.3f} .. {interval.high:+.3f}"
    p = number(found.p) if found.p >= 0.001 else "< 0.001"
    return Cell(f"{interval.mean:+.3f}", aside), Cell(p)


def _ratio(values: Sequence[tuple[float, float]]) -> tuple[Cell, Cell]:
    ratios = [a / b for a, b in values if a > 0 and b > 0]
    if not ratios:
        return Cell("-"), Cell("")
    form = "{:.2f}".format
    return Cell(f"{form(statistics.geometric_mean(ratios))} x", _range(ratios, form)), Cell("")


def _anatomy(scale: Scale) -> Table:
    rows = []
    for arm in scale.arms:
        every = [found for run in scale.runs_of(arm) if (found := run.head.get("anatomy"))]
        for label, at in (("first", 0), ("last", -1)):
            if not every:
                continue
            records = [found[at] for found in every]

            def cell(of: Callable[[Mapping[str, Any]], float | None], form: Form) -> Cell:
                return _over([[of(row)] for row in records], _first, form)  # noqa: B023

            rows.append(
                [
                    Cell(arm.name),
                    Cell(label),
                    _updates([row["step"] for row in records], counted=False),
                    *(
                        cell(lambda row, name=name: row[name], _percent)
                        for name in ("share_without_call", "share_alike", "share_repeated")
                    ),
                    cell(lambda row: row["reply_tokens"], lambda x: number(x, 1)),
                    cell(lambda row: row["abs_log_ratio"], _small),
                    cell(lambda row: row["share_masked"], lambda x: percent(x, 2)),
                    cell(lambda row: row["endings"].get("format_errors", 0.0), _percent),
                ]
            )
    return Table(
        title="What episodes were like",
        note="Of the episodes recorded in a run's first and last recorded update; means over runs "
        "and their range. Alike: episodes whose replies are all the same; repeated: runs of tokens "
        f"that stood earlier in the episode. {ANATOMY if scale.is_like_published else ''}".strip(),
        columns=(
            *("arm", "record", "update", "replies without a call", "episodes alike", "repeated"),
            *("tokens per reply", "mean |log p/q|", "masked", "ended by format errors"),
        ),
        rows=rows,
        num_names=2,
    )


def _first(values: Sequence[float]) -> float:
    return values[0]


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _over(
    runs: Sequence[Sequence[float | None]], of: Callable[[Any], float], form: Form = number
) -> Cell:
    """One value of each run that has any: mean and range."""
    values = [of(known) for run in runs if (known := [x for x in run if x is not None])]
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return Cell("-")
    return Cell(form(statistics.fmean(values)), _range(values, form))


def _range(values: Sequence[float], form: Form) -> str:
    low, high = form(min(values)), form(max(values))
    return f"{low} .. {high}" if low != high else ""


def _updates(updates: Sequence[int | None], *, counted: bool = True) -> Cell:
    known = [update for update in updates if update is not None]
    if not known:
        return Cell("-")
    parts = [f"{min(known)} .. {max(known)}"] if min(known) < max(known) else []
    parts += [f"{len(known)} of {len(updates)}"] if counted else []
    return Cell(f"{statistics.median(known):g}", "; ".join(parts))


def _pass_cell(runs: Sequence[Run], k: int, when: str) -> Cell:
    values = [value for run in runs if (value := run.pass_at(k, when)) is not None]
    if not values:
        return Cell("-")
    if len(values) > 1:
        found = interval_of(values)
    else:
        own = next(x for run in runs if (x := run.pass_interval(k, when)) is not None)
        found = Interval(mean=values[0], low=own[0], high=own[1])
    low, high = max(0.0, found.low), min(1.0, found.high)
    return Cell(number(found.mean), f"{number(low)} .. {number(high)}")


def _share(part: float, whole: float, digits: int = 1) -> Cell:
    return Cell(percent(part / whole, digits) if whole else "-")


def _percent(value: float) -> str:
    return percent(value, 1)


def _times(value: float) -> str:
    return f"{value:.1f}"
