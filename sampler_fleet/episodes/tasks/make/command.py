"""`python -m sampler_fleet tasks make`: tasks from a package's own source and tests.

Owns the command's options and what it prints. Imports are inside: this module is loaded with every
command of the package.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.errors import BadInputError, exits_politely

if TYPE_CHECKING:
    from sampler_fleet.episodes.tasks.make.make import Outcome
    from sampler_fleet.episodes.tasks.make.package import Package


@exits_politely
def make_command(
    package_dir: Annotated[Path, typer.Argument(help="An unpacked sdist, or a checkout.")],
    out: Annotated[Path, typer.Option(help="A new directory for the tasks.")],
    num: Annotated[int, typer.Option(min=1, help="How many, at most.")] = 20,
    seed: Annotated[int, typer.Option()] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Mutations tried at a time.")] = 2,
) -> int:
    """Mutates a pure-Python package and keeps what some of its tests show, as tasks.

    Every task is proven in fresh sandboxes, three times. Status 1 if none was made.
    """
    from sampler_fleet.episodes.tasks.make.package import read_package

    package = read_package(package_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInputError(str(out), expected="no such directory yet, or an empty one", found=out)
    return asyncio.run(_make(package, out, num, seed, jobs))


async def _make(package: Package, out: Path, num: int, seed: int, jobs: int) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from sampler_fleet.episodes.sandbox import SandboxPool
    from sampler_fleet.episodes.tasks.make.make import count, find_subject, make_tasks
    from sampler_fleet.episodes.tasks.make.write import write_task

    console = Console()
    start = time.monotonic()
    outcomes: Counter[Outcome] = Counter()
    pool = SandboxPool(jobs)
    num_made = 0
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("making", total=num)
            subject = await find_subject(package, pool)
            made = make_tasks(
                subject,
                pool,
                num=num,
                seed=seed,
                num_jobs=jobs,
                on_tried=lambda outcome: outcomes.update((outcome,)),
            )
            async for task in made:
                write_task(task, subject.hidden, out)
                num_made += 1
                progress.advance(bar)
    finally:
        await pool.close()
    console.print(
        f"{package.name} {package.version} ({package.license or 'license unknown'}): "
        f"{len(subject.tests)} of {subject.num_tests} tests can be used; of "
        f"{outcomes.total()} mutations {count(outcomes)}; wrote {num_made} tasks to {out} "
        f"in {time.monotonic() - start:.0f} s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0 if num_made else 1
