"""The report as one self-contained page.

Owns its plots and what its template is given. Must not compute what is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from tools.mismatch_report.report import Row
from tools.mismatch_report.tables import COLUMNS, band_of, last_versions, ratio_bins
from trainer_jax.plots import render_page, svg_of

# of one contrast on white and on the dark page
_COLOURS = ("#2f84c8", "#c4761b", "#2a9272", "#b9639a", "#8a7a1f", "#7a72c9", "#c0584a", "#5b8790")
_MARKERS = {
    "o": "\u25cf",
    "s": "\u25a0",
    "^": "\u25b2",
    "D": "\u25c6",
    "v": "\u25bc",
    "*": "\u2605",
}
_WIDTH_INCHES = 3.8  # so narrow that letters keep their size on a phone
_LEAST_KL = 1e-8
_FEW_VERSIONS = 20  # leave room for markers
_NAME_LENGTH = 20  # of a group, beside a plot
_SIGNS = {"\n": "\u23ce", "\t": "\u21e5"}  # of text on one line


def render(report: Mapping[str, Any]) -> str:
    """The page, as HTML."""
    groups = report["groups"]
    plots: list[dict[str, Any]] = []
    if len(groups) > 1:
        plots.append(
            _plot(
                "KL between sampler and trainer",
                "KL(sampler || trainer) per token, in nats.",
                lambda axes: _dots(axes, groups),
            )
        )
    if len(report["by_version"]) > 1:
        plots.append(
            _plot(
                "KL by version",
                "By version of the weights drawn from, in nats; lines join successive ones.",
                lambda axes: _by_version(axes, report["kl_by_version"]),
            )
        )
    glyphs = list(_MARKERS.values())
    return render_page(
        Path(__file__).with_name("report.html"),
        report=report,
        plots=plots,
        columns=COLUMNS,
        bins=ratio_bins(),
        shades={name: shades(row) for name, row in groups.items()},
        versions=last_versions(report["by_version"]),
        marks={
            name: {"glyph": glyphs[i % len(glyphs)], "colour": _COLOURS[i % len(_COLOURS)]}
            for i, name in enumerate(groups)
        },
        bands={name: band_of(report, name) for name in groups},
        visible=visible,
    )


def shades(row: Row) -> list[tuple[str, int]]:
    """Each bin's share of the tokens, as text in percent and as a strength of colour in percent."""
    counts = row["ratio_histogram"]
    shares = [100 * count / sum(counts) for count in counts]
    return [(f"{x:.2f}" if x else "", round(60 * (x / 100) ** 0.5)) for x in shares]


def visible(text: str) -> str:
    """Text on one line, with signs for what isn't printable."""
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else "\ufffd") for c in text)


def _plot(title: str, note: str, draw: Callable[[Axes], None]) -> dict[str, Any]:
    return {"title": title, "note": note, "svg": Markup(svg_of(title, draw))}


def _prepare(axes: Axes, num_groups: int) -> None:
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.set_size_inches(_WIDTH_INCHES, 1.0 + 0.3 * max(num_groups, 4))


def _logarithmic(axes: Axes, which: str, values: Sequence[float]) -> None:
    low = np.floor(np.log10(min(values)))
    high = max(np.ceil(np.log10(max(values))), low + 1)
    limits = {f"{which}scale": "log", f"{which}lim": (10 ** (low - 0.3), 10 ** (high + 0.3))}
    axes.set(**limits)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())


def _style(i: int) -> dict[str, Any]:
    return {"color": _COLOURS[i % len(_COLOURS)], "marker": list(_MARKERS)[i % len(_MARKERS)]}


def _dots(axes: Axes, rows: Mapping[str, Row]) -> None:
    _prepare(axes, len(rows))
    values = [max(row["kl"], _LEAST_KL) for row in rows.values()]
    for i, value in enumerate(values):
        axes.plot([value], [i], linestyle="", markersize=7, **_style(i))
    names = [visible(name) for name in rows]
    short = [x if len(x) <= _NAME_LENGTH else x[: _NAME_LENGTH - 1] + "\u2026" for x in names]
    axes.set_yticks(range(len(rows)), short, parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _logarithmic(axes, "x", values)


def _by_version(axes: Axes, groups: Mapping[str, Mapping[str, float]]) -> None:
    _prepare(axes, len(groups))
    every = [int(version) for by_version in groups.values() for version in by_version]
    first, last = min(every), max(every)
    size = 6 if last - first < _FEW_VERSIONS else 2.5
    for i, by_version in enumerate(groups.values()):
        versions = np.array([int(v) for v in by_version])
        aside = 0.3 * (i / max(len(groups) - 1, 1) - 0.5)  # equal values stay visible
        values = np.maximum(list(by_version.values()), _LEAST_KL)
        breaks = np.flatnonzero(np.diff(versions) > 1) + 1
        for x, y in zip(np.split(versions, breaks), np.split(values, breaks), strict=True):
            axes.plot(x + aside, y, markersize=size, **_style(i))
    axes.set_xlabel("version")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    margin = 0.4 + 0.03 * (last - first)
    axes.set_xlim(first - margin, last + margin)
    kls = [max(kl, _LEAST_KL) for by_version in groups.values() for kl in by_version.values()]
    _logarithmic(axes, "y", kls)
