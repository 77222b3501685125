"""The figures of simulations, as PNG for paper: one fleet by group, several fleets side by side.

Owns what is drawn and how it looks. Must not compute beyond smoothing a curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.ticker
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from contracts.files import replacing
from sampler_fleet.simulate.records import Result, sampler_dollars

INK = "#1A1A1A"
QUIET = "#B8BEC6"
# Okabe-Ito and four more, as in the run's report: told apart with any colour vision.
COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C00", "#7B61C4"),
    *("#A0522D", "#3FB8AF"),
)
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.grid": True,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 200,
}
SMOOTHED = 40  # windows along a curve


def draw_fleet(result: Result, path: Path) -> Path:
    """One fleet by group: samplers, utilization, staleness, cost per update."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 5.6), layout="constrained")
        ((samplers, used), (stale, cost)) = figure.subplots(2, 2, sharex=True)
        hours = [sample.at_s / 3600 for sample in result.samples]
        ready = [[sample.num_ready[name] for sample in result.samples] for name in result.groups]
        samplers.stackplot(hours, ready, labels=result.groups, step="post", linewidth=0)
        samplers.set(title="Samplers ready, by group", ylim=(0, None))
        for name in result.groups:
            values = [sample.utilization[name] for sample in result.samples]
            used.plot(*_smooth(hours, values), linewidth=1.2)
        if len(result.groups) > 1:
            overall = [sample.overall_utilization for sample in result.samples]
            used.plot(*_smooth(hours, overall), color=INK, linestyle="--", label="all groups")
        used.set(title="Places taken", ylim=(0, 1.02))
        used.yaxis.set_major_formatter("{x:.0%}")
        ended = [update.ended_s / 3600 for update in result.updates]
        _staleness(stale, result, ended)
        _costs(cost, result, ended)
        for axes in (stale, cost):
            _hours(axes, result.days)
        lines = used.get_legend_handles_labels()
        areas = samplers.get_legend_handles_labels()
        handles, labels = areas[0] + lines[0], areas[1] + lines[1]
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
        return _save(figure, path)


def _staleness(axes: Axes, result: Result, ended: Sequence[float]) -> None:
    mean = [update.staleness_mean for update in result.updates]
    most = [update.staleness_max for update in result.updates]
    for values, color, label in (
        (most, QUIET, "the stalest trajectory"),
        (mean, INK, "mean over tokens"),
    ):
        axes.plot(*_gaps_open(*_smooth(ended, values)), color=color, label=label)
    top = 1.3 * max(np.nanmax(_smooth(ended, most)[1], initial=0.0), 1.0)
    axes.set(title="Staleness of an update's tokens, in versions", ylim=(0, top))
    axes.legend(loc="upper right", ncols=2)


def _costs(axes: Axes, result: Result, ended: Sequence[float]) -> None:
    curves = [
        _smooth(ended, [update.costs[name].dollars for update in result.updates])[1]
        for name in result.groups
    ]
    times = np.asarray(ended, float)
    opened = [_gaps_open(times, curve) for curve in curves]
    axes.stackplot(opened[0][0], [values for _, values in opened], linewidth=0)
    top = _settled_limit([result], [np.sum(curves, axis=0)])
    axes.set(title="Dollars for samplers per update, by group", ylim=(0, top))


def draw_over_time(results: Sequence[Result], path: Path) -> Path:
    """Several fleets over time: samplers, utilization, staleness, cost per update."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 5.6), layout="constrained")
        ((samplers, used), (stale, cost)) = figure.subplots(2, 2, sharex=True)
        costs = []
        for result in results:
            hours = [sample.at_s / 3600 for sample in result.samples]
            ended = [update.ended_s / 3600 for update in result.updates]
            num = [sum(sample.num_ready.values()) for sample in result.samples]
            samplers.step(hours, num, where="post", label=result.name)
            overall = [sample.overall_utilization for sample in result.samples]
            used.plot(*_smooth(hours, overall))
            stale_mean = [update.staleness_mean for update in result.updates]
            stale.plot(*_gaps_open(*_smooth(ended, stale_mean)))
            spent = [
                sampler_dollars(update, result.trainer)
                + (update.costs[result.trainer].dollars or 0.0)
                for update in result.updates
            ]
            costs.append(_smooth(ended, spent)[1])
            cost.plot(*_gaps_open(np.asarray(ended), costs[-1]))
        samplers.set(title="Samplers ready", ylim=(0, None))
        used.set(title="Places taken", ylim=(0, 1.02))
        used.yaxis.set_major_formatter("{x:.0%}")
        stale.set(title="Staleness, mean over an update's tokens, in versions", ylim=(0, None))
        top = _settled_limit(results, costs)
        cost.set(title="Dollars per update, samplers and trainer", ylim=(0, top))
        for axes in (stale, cost):
            _hours(axes, max(result.days for result in results))
        figure.legend(loc="outside lower center", ncols=min(4, len(results)))
        return _save(figure, path)


def draw_comparison(summaries: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Several fleets in four numbers each, the cheapest per update first."""
    ordered = sorted(summaries, key=_total, reverse=True)
    places = np.arange(len(ordered))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 1.3 + 0.3 * len(ordered)), layout="constrained")
        panels = figure.subplots(1, 4, sharey=True, width_ratios=(2.2, 1, 1, 1))
        colors = [COLORS[0] if _is_mixed(summary) else QUIET for summary in ordered]
        samplers = [summary["per_update"]["sampler_dollars"] or 0.0 for summary in ordered]
        totals = [_total(summary) for summary in ordered]
        panels[0].barh(places, samplers, 0.7, color=colors)
        panels[0].barh(
            *(places, [t - s for t, s in zip(totals, samplers, strict=True)], 0.7, samplers),
            color="none", edgecolor=colors, hatch="////", linewidth=0.0,
        )  # fmt: skip
        panels[0].set_title("Dollars per update")
        panels[0].set_xlabel("solid: samplers, hatched: trainer")
        _write_values(panels[0], totals, [f"{s:.0f} + {t - s:.0f}" for s, t in
                                          zip(samplers, totals, strict=True)])  # fmt: skip
        for axes, key, title, form in (
            (panels[1], "trainer_wait_share", "Trainer waits", "{:.0%}"),
            (panels[2], "utilization", "Places taken", "{:.0%}"),
            (panels[3], "staleness_mean", "Staleness, mean", "{:.1f}"),
        ):
            values = [summary[key] or 0.0 for summary in ordered]
            axes.barh(places, values, 0.7, color=colors)
            axes.set_title(title)
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(2, steps=[1, 2, 5, 10]))
            _write_values(axes, values, [form.format(value) for value in values])
        panels[3].set_xlabel("versions")
        for axes in panels[1:3]:
            axes.xaxis.set_major_formatter("{x:.0%}")
        panels[0].set_ylim(-0.6, len(ordered) - 0.4)
        panels[0].set_yticks(places, [summary["name"] for summary in ordered])
        for axes in panels:
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
        return _save(figure, path)


def _write_values(axes: Axes, values: Sequence[float], texts: Sequence[str]) -> None:
    """Each bar's number at its end, with room for it."""
    for place, (value, text) in enumerate(zip(values, texts, strict=True)):
        axes.annotate(
            text, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlim(0, max(*values, 1e-9) * 1.35)


def _is_mixed(summary: Mapping[str, Any]) -> bool:
    return len(summary["groups"]) > 1


def _total(summary: Mapping[str, Any]) -> float:
    per_update = summary["per_update"]
    return (per_update["sampler_dollars"] or 0.0) + (per_update["trainer_dollars"] or 0.0)


def _hours(axes: Axes, days: float) -> None:
    axes.set(xlabel="hours", xlim=(0, days * 24))
    step = next((s for s in (1, 2, 3, 6, 12, 24, 48) if days * 24 / s <= 9), 96)
    axes.xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(step))


def _smooth(
    times: Sequence[float], values: Sequence[float | None]
) -> tuple[np.ndarray, np.ndarray]:
    """A running median over a fortieth of the curve; nothing where there is no value."""
    numbers = np.array([np.nan if value is None else value for value in values], float)
    half = len(numbers) // SMOOTHED // 2
    if not half:
        return np.asarray(times, float), numbers
    padded = np.pad(numbers, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    known = ~np.isnan(numbers)
    smooth = np.full(len(numbers), np.nan)
    smooth[known] = np.nanmedian(windows[known], axis=1)
    return np.asarray(times, float), smooth


def _gaps_open(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The curve, broken where for a long time nothing happened."""
    steps = np.diff(times)
    after = np.flatnonzero(steps > 8 * np.median(steps)) + 1 if len(steps) else []
    return np.insert(times, after, np.nan), np.insert(values, after, np.nan)


def _settled_limit(results: Sequence[Result], curves: Sequence[np.ndarray]) -> float:
    """The top of an axis: the cold start and outages, in which all is dear, may leave it."""
    usual = [
        np.nanquantile(curve[len(result.updates) - len(result.settled) :], 0.9)
        for result, curve in zip(results, curves, strict=True)
        if len(curve)
    ]
    return 1.6 * max(usual, default=0.0) or 1.0


def _save(figure: Figure, path: Path) -> Path:
    with replacing(path) as aside:
        figure.savefig(aside, format="png", metadata={"Software": None})
    return path
