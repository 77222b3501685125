"""`python -m tools.stability_report docs/results/stability`: the report of a sweep's results.

Owns the command line alone. README.md, index.html and figures/ are made from the results that are
there, however many, and from findings.md, which people write; `--check` says whether they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import exits_politely
from tools.stability_report.page import FINDINGS, check, pages_of, write
from tools.stability_report.runs import read_scales
from trainer_jax.sweep import read_sweep

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="what the sweep kept")],
    sweep: Annotated[
        Path, typer.Option(metavar="FILE", help="the sweep as it was declared")
    ] = Path("examples/stability.toml"),
    is_check: Annotated[
        bool, typer.Option("--check", help="write nothing; fail where the report is another")
    ] = False,
) -> None:
    """Write the report of a sweep beside its results."""
    scales = read_scales(read_sweep(sweep), results)
    num_made = sum(len(scale.runs) for scale in scales)
    num_declared = sum(len(scale.declared) for scale in scales)
    pages = pages_of(scales, (results / FINDINGS).read_text())
    if is_check:
        check(results, pages)
    else:
        write(results, pages)
    print(f"{results}: {num_made} of {num_declared} declared runs")


main = exits_politely(app)

if __name__ == "__main__":
    main()
