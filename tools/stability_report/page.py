"""README.md, index.html and figures/: the report as files, written or compared.

Owns their layout. Must not compute what is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markupsafe import Markup

from contracts.errors import BadInputError
from contracts.files import replacing
from tools.stability_report.figures import Drawing, drawings_of, headline
from tools.stability_report.published import POST
from tools.stability_report.runs import Scale
from tools.stability_report.tables import Cell, Table, prices_table, tables_of
from trainer_jax.plots import element_of, render_page

FINDINGS = "findings.md"
FIGURES = "figures"
TITLE = "Does correction keep mixed-precision samplers stable here too?"
PUBLISHED = (
    f"Columns and sentences marked published are of [the post]({POST}) and its run's registry."
)
HOW = (
    "Made by `python -m tools.stability_report docs/results/stability` from the results of "
    "`python -m trainer_jax sweep examples/stability.toml --scale SCALE`, which declares every run "
    "before it is made. [index.html](index.html) is the same as one page."
)

Part = tuple[Scale, list[Drawing], list[Table]]


def pages_of(scales: Sequence[Scale], findings: str) -> dict[Path, str]:
    """The report's files, by their path in the results' directory."""
    parts: list[Part] = [
        (scale, drawings_of(scale), list(tables_of(scale))) if scale.runs else (scale, [], [])
        for scale in scales
    ]
    prices = prices_table(scales)
    summary = _summary(scales)
    made = [drawing for _, drawings, _ in parts for drawing in drawings]
    first = next((scale for scale in scales if scale.twins), None)
    if first and any(first.runs_of(arm) for pair in first.twins for arm in pair):
        made.append(headline(first))
    files = {Path(FIGURES, f"{drawing.name}.svg"): drawing.file for drawing in made}
    files[Path("README.md")] = _readme(parts, prices, summary, findings)
    files[Path("index.html")] = _index(parts, prices, summary, findings)
    return files


def write(results: Path, pages: Mapping[Path, str]) -> None:
    """Replaces the report in the results' directory, and removes figures that it has no more."""
    for path, text in pages.items():
        (results / path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(results / path) as aside:
            aside.write_text(text, encoding="utf-8")
    for path in _left_over(results, pages):
        path.unlink()


def check(results: Path, pages: Mapping[Path, str]) -> None:
    """Refuses a report that is not what the results give.

    Raises:
        BadInputError: naming the first file that differs.
    """
    remedy = f"run python -m tools.stability_report {results}"
    for path, text in pages.items():
        try:
            found = (results / path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BadInputError(str(results / path), expected=remedy, found="no file") from None
        if found != text:
            raise BadInputError(
                str(results / path), expected=f"what the results give: {remedy}", found="another"
            )
    for path in _left_over(results, pages):
        raise BadInputError(str(path), expected=f"no such figure: {remedy}", found="one")


def _left_over(results: Path, pages: Mapping[Path, str]) -> list[Path]:
    every = sorted((results / FIGURES).glob("*.svg"))
    return [path for path in every if path.relative_to(results) not in pages]


def _summary(scales: Sequence[Scale]) -> str:
    made = sum(len(scale.runs) for scale in scales)
    declared = sum(len(scale.declared) for scale in scales)
    each = ", ".join(f"{scale.name} {len(scale.runs)} of {len(scale.declared)}" for scale in scales)
    return f"{made} of {declared} declared runs are in this report: {each}."


def _readme(parts: Sequence[Part], prices: Table, summary: str, findings: str) -> str:
    blocks = [f"# {TITLE}", HOW, f"**{summary}** {PUBLISHED}", findings.strip()]
    for scale, drawings, tables in parts:
        blocks.append(f"## Scale {scale.name}: {len(scale.runs)} of {len(scale.declared)} runs")
        if not scale.runs:
            blocks.append("No run is finished yet.")
        for drawing in drawings:
            blocks.append(f"![{drawing.title}]({FIGURES}/{drawing.name}.svg)")
            blocks.append(f"{drawing.title}. {drawing.note}")
        for table in tables:
            blocks += [f"### {table.title}", table.note, markdown_of(table)]
    blocks += [f"## {prices.title}", prices.note, markdown_of(prices)]
    return "\n\n".join(blocks) + "\n"


def markdown_of(table: Table) -> str:
    """A table as Markdown; a bar in a cell is escaped."""
    last = len(table.columns) - 1

    def is_words(i: int) -> bool:
        return i < table.num_names or (table.is_published and i == last)

    lines = [
        _line(table.columns),
        _line([":--" if is_words(i) else "--:" for i in range(last + 1)]),
    ]
    lines += [_line([_markdown_cell(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines)


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _markdown_cell(cell: Cell) -> str:
    return f"{cell.text} ({cell.aside})" if cell.aside else cell.text


def _index(parts: Sequence[Part], prices: Table, summary: str, findings: str) -> str:
    return render_page(
        Path(__file__).with_name("page.html"),
        title=TITLE,
        summary=summary,
        intro=_html(f"{HOW.split(' [index')[0]} {PUBLISHED}"),
        findings=_html(findings),
        parts=parts,
        prices=prices,
        element=lambda drawing: Markup(element_of(drawing.title, drawing.text)),
        inline=lambda text: Markup(MarkdownIt("commonmark", {"html": False}).renderInline(text)),
    )


def _html(text: str) -> Markup:
    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))
