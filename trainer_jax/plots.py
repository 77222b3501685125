"""How the project's pages and plots look: one style, colours, SVG that follows its page.

Owns the style and the way from a drawing to SVG or a page. Must not know what is drawn. The same
drawing is the same bytes: no date, no random ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer_jax.live import number
from trainer_jax.summary import percent

# Stands for the page's text colour while matplotlib draws, so that light and dark both work.
INK = "#010203"
# Okabe-Ito and three more: told apart with any colour vision, on white and on black.
COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C00", "#7B61C4"),
    *("#A0522D", "#3FB8AF"),
)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
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
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "axes.grid": True,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


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


def svg_of(title: str, draw: Callable[[Axes], None]) -> str:
    """An SVG element for the page's body, of one plot."""

    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        draw(axes)

    return element_of(title, drawn(title, fill, size=(5.6, 3.2)))


def drawn(title: str, fill: Callable[[Figure], None], *, size: tuple[float, float]) -> str:
    """A figure as an SVG document without a background, text in `INK`. Size in inches."""
    slug = _slug(title)
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": slug, "svg.id": slug}):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_visible(False)
        fill(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def element_of(title: str, text: str) -> str:
    """The element of a document that `drawn` made: text stays text, ink follows the page's colour,
    the width is the page's. No two elements of a page may have the same title."""
    slug = _slug(title)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    # ids are local to a figure, but share the page
    text = re.sub(r'\bid="([^"]+)"', rf'id="{slug}-\1"', text)
    text = re.sub(r'(url\(#|xlink:href="#)', rf"\1{slug}-", text)
    label = f'<svg role="img" aria-label="{title}"'
    return text.replace("<svg", label, 1).replace(INK, "currentColor")


def _slug(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
