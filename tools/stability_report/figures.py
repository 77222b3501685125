"""The figures of the report: curves over updates, one panel per quantity, one line per arm.

Owns what is drawn and in which colours. A drawing serves twice: as a file, readable on white and
on dark pages, and as a part of the page. Must not pool but by mean and range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tools.stability_report.runs import Run, Scale
from tools.stability_report.tables import FORMAT_ENDINGS, OUTSIDE
from trainer_jax.plots import COLORS, INK, drawn
from trainer_jax.sweep import Arm

# as far from white as from GitHub's dark page
_GREY = "#76808a"
_DASHED = {"mixed": "-", "homogeneous": "--"}  # fleet -> line


@dataclass(frozen=True)
class Panel:
    title: str
    metric: str
    is_log: bool = False


REWARD = Panel("Reward", "reward")
KL = Panel("KL(sampler || trainer), nats", "kl", True)
PANELS = (
    REWARD,
    KL,
    Panel("Share of tokens outside [0.2, 5]", OUTSIDE, True),
    Panel("Entropy, nats", "entropy"),
    Panel("Gradient norm", "grad_norm", True),
    Panel("Tokens per episode", "episode_tokens"),
    Panel("Share of episodes ended by format errors", FORMAT_ENDINGS),
)
NOTE = (
    "Lines are means over an arm's runs, bands their range; a line goes on thin where the first of "
    "its runs has ended, and the last panel says how many are left."
)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """`text` is what `plots.drawn` made."""

    name: str
    title: str
    note: str
    text: str

    @property
    def file(self) -> str:
        return self.text.replace(INK, _GREY)


def drawings_of(scale: Scale) -> list[Drawing]:
    """Of a scale with at least one run: the two fleets with the same losses, all losses mixed."""
    twins = [arm for pair in scale.twins for arm in pair]
    mixed = [arm for arm in scale.arms if arm.fleet == "mixed"]
    found = []
    for name, title, arms in (
        ("fleets", f"Mixed and homogeneous, scale {scale.name}", twins),
        ("arms", f"Losses on the mixed fleet, scale {scale.name}", mixed),
    ):
        if name == "arms" and all(arm in twins for arm in arms):
            continue
        if any(scale.runs_of(arm) for arm in arms):
            fill = _filled(scale, arms, PANELS, num_columns=2, with_runs=True)
            text = drawn(title, fill, size=(9.0, 10.5))
            found.append(Drawing(name=f"{scale.name}-{name}", title=title, note=NOTE, text=text))
    return found


def headline(scale: Scale) -> Drawing:
    """Reward and KL of the two fleets, with and without the correction."""
    arms = [arm for pair in scale.twins for arm in pair]
    title = "Reward and KL with and without correction"
    text = drawn(
        title,
        _filled(scale, arms, (REWARD, KL), num_columns=2, with_runs=False),
        size=(9.0, 3.6),
    )
    return Drawing(name="headline", title=title, note=NOTE, text=text)


def _filled(
    scale: Scale, arms: Sequence[Arm], panels: Sequence[Panel], *, num_columns: int, with_runs: bool
) -> Callable[[Figure], None]:
    losses = list(dict.fromkeys(arm.arm for arm in scale.arms))
    styles: dict[str, dict[str, Any]] = {
        arm.name: {
            "color": COLORS[losses.index(arm.arm) % len(COLORS)],
            "linestyle": _DASHED.get(arm.fleet, ":"),
        }
        for arm in arms
    }

    def fill(figure: Figure) -> None:
        num = len(panels) + with_runs
        every = figure.subplots(-(-num // num_columns), num_columns, squeeze=False).flat
        for axes, panel in zip(every, panels, strict=False):
            axes.set_title(panel.title)
            for arm in arms:
                _curve(axes, scale.runs_of(arm), panel.metric, styles[arm.name])
            if panel.is_log and axes.lines:
                axes.set_yscale("log", nonpositive="mask")
        if with_runs:
            axes = every[len(panels)]
            axes.set_title("Runs that a point has")
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_ylim(0, 1.05 * max(len(scale.runs_of(arm)) for arm in arms))
            for arm in arms:
                counts = _points(scale.runs_of(arm), REWARD.metric)
                axes.plot(list(counts), [len(x) for x in counts.values()], **styles[arm.name])
        for axes in every[:num]:
            axes.patch.set_visible(False)
            axes.set_xlabel("update")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in every[num:]:
            axes.set_visible(False)
        lines = [figure.axes[0].plot([], [], label=name, **styles[name])[0] for name in styles]
        figure.legend(handles=lines, loc="outside lower center", ncols=min(4, len(lines)))

    return fill


def _points(runs: Sequence[Run], metric: str) -> dict[int, list[float]]:
    """Update -> the values of the runs that have one there; a run's last window may be short."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for update, value in run.series(metric):
            found.setdefault(update, []).append(value)
    return dict(sorted(found.items()))


def _curve(axes: Axes, runs: Sequence[Run], metric: str, style: Mapping[str, Any]) -> None:
    points = _points(runs, metric)
    if not points:
        return
    updates = list(points)
    means = [sum(values) / len(values) for values in points.values()]
    num_whole = next(
        (i for i, values in enumerate(points.values()) if len(values) < len(runs)), len(points)
    )
    (line,) = axes.plot(updates[:num_whole], means[:num_whole], **style)
    axes.plot(updates[max(0, num_whole - 1) :], means[max(0, num_whole - 1) :], lw=0.7, **style)
    if len(updates) < 3:
        line.set_marker("o")
    if len(runs) > 1:
        low, high = ([of(values) for values in points.values()] for of in (min, max))
        axes.fill_between(updates, low, high, color=style["color"], alpha=0.12, linewidth=0)
