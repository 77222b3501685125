"""`python -m tools.episodes RUN`: the recorded episodes of a run, to be read token by token.

Owns the command line alone. A run records when `train.record_every` says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from contracts.errors import BadInputError, exits_politely
from contracts.files import replacing
from tools.episodes.anatomy import table_of
from tools.episodes.content import content_of, read_facts
from tools.episodes.page import render
from trainer_jax.anatomy import anatomy
from trainer_jax.recorded import read_recorded

PAGE = "episodes.html"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def episodes(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="directory of a run, at work or not")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"the page (default RUN/{PAGE})")
    ] = None,
    max_episodes: Annotated[
        int, typer.Option(min=1, help="on the page, from all recorded updates alike")
    ] = 200,
    summary: Annotated[
        bool, typer.Option("--summary", help="print each recorded update's figures instead")
    ] = False,
) -> None:
    """Write a page of a run's recorded episodes: ratios, candidates, versions of every token."""
    updates = read_recorded(run)
    if summary:
        console = Console()
        wide = console if console.is_terminal else Console(width=160)
        wide.print(table_of(anatomy(updates)))
        return
    path = out or run / PAGE
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise BadInputError("--out", expected="a file in a directory", found=path)
    html = render(content_of(read_facts(run), updates, max_episodes=max_episodes))
    with replacing(path) as aside:
        aside.write_text(html, encoding="utf-8")
    print(path)


main = exits_politely(app)

if __name__ == "__main__":
    main()
