"""report.html: one self-contained page about a run, drawn from metrics.jsonl and summary.json.

Owns the plots and the page (`report.html`, a Jinja template beside this file). Must not compute
metrics: what is drawn is what the run recorded.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from cycler import cycler
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from contracts.errors import BadInputError
from contracts.files import replacing
from contracts.types import Ending
from trainer_jax.compare import read_summary
from trainer_jax.live import number
from trainer_jax.metrics import METRICS_FILE, Record, read_metrics
from trainer_jax.summary import percent

REPORT_FILE = "report.html"
ENDINGS = {e.replace("_", " "): f"ending/{e}" for e in Ending if e != Ending.FAILURE}
# Stands for the page's text colour while matplotlib draws, so that light and dark both work.
_INK = "#010203"
# Okabe-Ito and three more: told apart with any colour vision, on white and on black.
_COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C00", "#7B61C4"),
    *("#A0522D", "#3FB8AF"),
)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=_COLORS),
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "axes.grid": True,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def write_report(directory: Path) -> Path:
    """Renders the report of a run directory; returns its path.

    Raises:
        BadInputError: not the directory of a run.
    """
    summary = read_summary(directory)
    try:
        page = render(summary, read_metrics(directory))
    except FileNotFoundError:
        raise BadInputError(
            f"run directory {directory}", expected=METRICS_FILE, found="none"
        ) from None
    except (KeyError, jinja2.UndefinedError) as error:
        raise BadInputError(
            f"run directory {directory}",
            expected="the whole summary and metrics of a run",
            found=f"a part of them ({error})",
        ) from None
    path = directory / REPORT_FILE
    with replacing(path) as aside:
        aside.write_text(page)
    return path


def render(summary: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The page as text."""
    return render_page(
        Path(__file__).with_name("report.html"),
        summary=summary, plots=draw_plots(summary, records), settings=_settings(summary),
    )  # fmt: skip


def render_page(template: Path, **values: Any) -> str:
    """A page of a template file; a value it lacks is an error, and text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent}
    return environment.get_template(template.name).render(**values)


def _settings(summary: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Section -> key -> value, lists of tables left to the fleet table."""
    return {
        name: {
            key: json.dumps(value)
            for key, value in section.items()
            if not (isinstance(value, list) and value and isinstance(value[0], dict))
        }
        for name, section in summary["settings"].items()
    }


def draw_plots(summary: Mapping[str, Any], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each plot's title, note and SVG."""
    groups = list(summary["groups"])
    by_group = {name: f"group/{name}/kl" for name in groups}
    plots = [
        (
            "Pass rate on held-out tasks",
            "Unbiased pass@k, BF16 weights and KV cache, full vocabulary; bars are 95 % intervals.",
            lambda axes: _pass_rates(axes, summary["heldout"]),
        ),
        (
            "Reward",
            "Mean reward of the trajectories of an update.",
            lambda axes: _curves(axes, records, {"reward": "reward"}),
        ),
        (
            "KL between sampler and trainer, by group",
            "KL(sampler || trainer) per token over the recorded candidates; logarithmic.",
            lambda axes: _curves(axes, records, by_group | {"all": "kl"}, log=True),
        ),
        (
            "Tokens outside the band",
            "Share of tokens whose importance ratio lies outside the mask's bounds.",
            lambda axes: _curves(
                axes,
                records,
                {n: f"group/{n}/share_out_of_band" for n in groups} | {"all": "share_out_of_band"},
            ),
        ),
        (
            "Entropy",
            "Of the trainer's policy per token, in nats, over the sets replayed.",
            lambda axes: _curves(axes, records, {"entropy": "entropy"}),
        ),
        (
            "Gradient norm",
            "Before clipping; logarithmic.",
            lambda axes: _curves(axes, records, {"gradient norm": "grad_norm"}, log=True),
        ),
        (
            "Staleness",
            "The trainer's version minus the version that made the token.",
            lambda axes: _curves(axes, records, {"mean": "staleness/mean", "max": "staleness/max"}),
        ),
        (
            "How episodes end",
            "Shares of the trajectories of an update.",
            lambda axes: _curves(axes, records, ENDINGS),
        ),
    ]
    return [
        {"title": title, "note": note, "svg": Markup(svg_of(title, draw))}
        for title, note, draw in plots
    ]


def _curves(
    axes: Axes, records: Sequence[Record], names: Mapping[str, str], *, log: bool = False
) -> None:
    """One line per metric over the updates that have it. The line "all" is drawn in ink."""
    drawn = 0
    for label, name in names.items():
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        if log:
            points = [(step, value) for step, value in points if value > 0]
        if not points:
            continue
        drawn += 1
        (line,) = axes.plot(*zip(*points, strict=True), label=label)
        if label == "all":
            line.set(color=_INK, linestyle="--")
        if len(points) < 3:
            line.set_marker("o")
    if not drawn:
        axes.text(0.5, 0.5, "nothing recorded", ha="center", transform=axes.transAxes)
        return
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("update")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(names) > 1:
        figure = axes.get_figure()
        assert isinstance(figure, Figure)
        figure.legend(loc="outside lower center", ncols=min(drawn, 4))


def _pass_rates(axes: Axes, heldout: Mapping[str, Any]) -> None:
    bars = [
        (when, k, evaluation)
        for k in (1, 4)
        for when in ("before", "after")
        if (evaluation := heldout[when]) and evaluation.get(f"pass_at_{k}") is not None
    ]
    if not bars:
        axes.text(0.5, 0.5, "not evaluated", ha="center", transform=axes.transAxes)
        return
    for place, (when, k, evaluation) in enumerate(bars):
        value = evaluation[f"pass_at_{k}"]
        low, high = evaluation[f"pass_at_{k}_interval"]
        color = _COLORS[0] if when == "after" else "#9A9A9A"
        axes.bar(place, value, 0.7, color=color)
        axes.errorbar(
            place, value, [[max(0.0, value - low)], [max(0.0, high - value)]], color=_INK, capsize=3
        )
        axes.text(place, high + 0.02, f"{value:.3f}", ha="center")
    axes.set_xticks(range(len(bars)), [f"pass@{k}\n{when}" for when, k, _ in bars])
    axes.set_ylim(0, 1.1)
    axes.grid(axis="x", visible=False)


def svg_of(title: str, draw: Callable[[Axes], None]) -> str:
    """An SVG element for the page's body: text stays text, ink follows the page's colour."""
    slug = re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": slug, "svg.id": slug}):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    # ids are local to a figure, but share the page
    text = re.sub(r'\bid="([^"]+)"', rf'id="{slug}-\1"', text)
    text = re.sub(r'(url\(#|xlink:href="#)', rf"\1{slug}-", text)
    label = f'<svg role="img" aria-label="{title}"'
    return text.replace("<svg", label, 1).replace(_INK, "currentColor")
