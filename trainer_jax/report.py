"""report.html: one self-contained page about a run, drawn from metrics.jsonl and summary.json.

Owns the plots and the page (`report.html`, a Jinja template beside this file). Must not compute
metrics: what is drawn is what the run recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from contracts.errors import BadInputError
from contracts.files import replacing
from contracts.types import Ending
from trainer_jax.collapse import CollapseLimits, collapse_of
from trainer_jax.compare import read_summary
from trainer_jax.metrics import METRICS_FILE, Record, read_metrics
from trainer_jax.plots import COLORS, INK, render_page, svg_of

REPORT_FILE = "report.html"
ENDINGS = {e.replace("_", " "): f"ending/{e}" for e in Ending if e != Ending.FAILURE}
SIGNS = {
    "reward_falling": "reward well below its best",
    "kl_rising": "KL at a multiple of its early level",
    "format_errors": "most episodes end on format errors",
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
        signs=first_signs(summary, records),
    )  # fmt: skip


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


def first_signs(
    summary: Mapping[str, Any], records: Sequence[Record]
) -> list[tuple[str, int | None]]:
    """Each sign of a collapse, and two of them at once, with the first update that showed it."""
    limits = CollapseLimits.model_validate(summary["settings"].get("train", {}).get("collapse", {}))
    told = [record for record in records if "ending/format_errors" in record]
    signs, collapsed = collapse_of(told, limits)
    return [
        *((SIGNS[name], update) for name, update in signs.items()),
        ("two of them at once: a collapse", collapsed),
    ]


def draw_plots(summary: Mapping[str, Any], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each plot's title, note and SVG."""
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
        *_mismatch_plots(list(summary["groups"]), records),
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
        *_episode_plots(records),
    ]
    return [
        {"title": title, "note": note, "svg": Markup(svg_of(title, draw))}
        for title, note, draw in plots
    ]


def _mismatch_plots(groups: Sequence[str], records: Sequence[Record]) -> list[Any]:
    """How far samplers and trainer are apart."""
    by_group = {name: f"group/{name}/kl" for name in groups}
    return [
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
        *_reference_band(groups, records),
        (
            "Effective sample size",
            "Of the weights, as a share of the tokens.",
            lambda axes: _curves(axes, records, {"ess": "ess"}),
        ),
        (
            "Largest difference of log-probs",
            "The largest |log p/q| of the tokens of an update, in nats.",
            lambda axes: _curves(axes, records, {"largest": "abs_dlogp_max"}),
        ),
    ]


def _episode_plots(records: Sequence[Record]) -> list[Any]:
    """What episodes are like."""
    return [
        (
            "How episodes end",
            "Shares of the trajectories of an update.",
            lambda axes: _curves(axes, records, ENDINGS),
        ),
        (
            "Replies with format errors",
            "Share of the turns of an update.",
            lambda axes: _curves(axes, records, {"share": "format_error_share"}),
        ),
        (
            "Length of episodes",
            "Tokens, prompt and observations included; means of an update.",
            lambda axes: _curves(axes, records, {"tokens": "episode_tokens"}),
        ),
        (
            "Turns of episodes",
            "Replies; means of an update.",
            lambda axes: _curves(axes, records, {"turns": "episode_turns"}),
        ),
    ]


def _reference_band(groups: Sequence[str], records: Sequence[Record]) -> list[Any]:
    """The share outside [0.2, 5], where the arm's own bounds are others."""
    name = "share_out_of_reference_band"
    if all(r.get(name) in (None, r.get("share_out_of_band")) for r in records):
        return []
    names = {group: f"group/{group}/{name}" for group in groups} | {"all": name}
    return [
        (
            "Tokens with a ratio outside [0.2, 5]",
            "Share of tokens, whatever the arm does with them.",
            lambda axes: _curves(axes, records, names),
        )
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
            line.set(color=INK, linestyle="--")
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
        color = COLORS[0] if when == "after" else "#9A9A9A"
        axes.bar(place, value, 0.7, color=color)
        axes.errorbar(
            place, value, [[max(0.0, value - low)], [max(0.0, high - value)]], color=INK, capsize=3
        )
        axes.text(place, high + 0.02, f"{value:.3f}", ha="center")
    axes.set_xticks(range(len(bars)), [f"pass@{k}\n{when}" for when, k, _ in bars])
    axes.set_ylim(0, 1.1)
    axes.grid(axis="x", visible=False)
