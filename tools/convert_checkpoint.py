"""`python -m tools.convert_checkpoint SRC DST --format F`: a checkpoint in another weight format.

Owns the command line and what it shows. The conversion is weight_sync's.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from rich.table import Table

from contracts.errors import BadInputError, exits_politely
from contracts.types import WeightFormat
from weight_sync.convert import (
    Options,
    check_destination,
    convert_directory,
    plan_directory,
    source_bytes,
)
from weight_sync.formats.nvfp4 import Recipe
from weight_sync.plan import ConversionPlan, unmatched
from weight_sync.safetensors_file import Checkpoint
from weight_sync.verify import TensorError, compare

_WORST = 10


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="SRC", help="Hugging Face directory, BF16")
    parser.add_argument("destination", type=Path, metavar="DST", help="a directory not yet there")
    parser.add_argument("--format", required=True, choices=[str(name) for name in WeightFormat])
    parser.add_argument(
        "--recipe", choices=[str(name) for name in Recipe], help="of nvfp4 (modelopt)"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="GLOB",
        help="modules to leave as they are; may be given several times",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--verify", action="store_true", help="decode the result and compare")
    parser.add_argument("--dry-run", action="store_true", help="show sizes, write nothing")
    return parser.parse_args()


@exits_politely
def main() -> None:
    arguments = _arguments()
    if arguments.recipe and arguments.format != WeightFormat.NVFP4:
        raise BadInputError("--recipe", expected="--format nvfp4", found=arguments.format)
    if arguments.threads < 1:
        raise BadInputError("--threads", expected="at least 1", found=arguments.threads)
    if not arguments.dry_run:
        check_destination(arguments.destination)
    options = Options(
        format=WeightFormat(arguments.format),
        recipe=Recipe(arguments.recipe or Recipe.MODELOPT),
        ignore=tuple(arguments.ignore),
        threads=arguments.threads,
    )
    console = Console()
    plan, checkpoint = plan_directory(arguments.source, options)
    if lost := unmatched(options.ignore, checkpoint.tensors, options.format):
        raise BadInputError("--ignore", expected="globs of modules of SRC", found=lost[0])
    console.print(_sizes(plan, checkpoint))
    if arguments.dry_run:
        return
    with _progress(console) as progress:
        total = sum(source_bytes(action, checkpoint) for action in plan.actions)
        task = progress.add_task("convert", total=total)
        convert_directory(
            arguments.source,
            arguments.destination,
            options,
            on_progress=lambda num_bytes: progress.advance(task, num_bytes),
        )
        if not arguments.verify:
            return
        task = progress.add_task("verify", total=total)
        errors = []
        for error, num_bytes in compare(plan, checkpoint, Checkpoint(arguments.destination)):
            errors += error
            progress.advance(task, num_bytes)
    _show_errors(console, errors)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:8}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeLeftColumn(),
        console=console,
    )


def _sizes(plan: ConversionPlan, checkpoint: Checkpoint) -> Table:
    """Tensors and bytes before and after, by what happens to them."""
    tensors: Counter[str] = Counter()
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for action in plan.actions:
        tensors[action.kind] += len(action.sources)
        before[action.kind] += source_bytes(action, checkpoint)
        after[action.kind] += sum(s.num_bytes for specs in action.outputs for s in specs)
    name = " ".join(filter(None, (plan.format, plan.recipe)))
    table = Table(title=f"{name}: {before.total() / 1e6:.1f} MB -> {after.total() / 1e6:.1f} MB")
    for column in ("action", "matrices", "MB before", "MB after"):
        table.add_column(column, justify="left" if column == "action" else "right")
    for kind, count in tensors.most_common():
        table.add_row(
            str(kind), str(count), f"{before[kind] / 1e6:.2f}", f"{after[kind] / 1e6:.2f}"
        )
    return table


def _show_errors(console: Console, errors: list[TensorError]) -> None:
    """The tensors that lost most. Raises BadInputError if one lost more than its format may."""
    table = Table(title=f"{len(errors)} quantized matrices, largest relative error (RMS) first")
    for column in ("tensor", "relative error", "share of its bound"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    for error in sorted(errors, key=lambda e: -e.relative_rms)[:_WORST]:
        table.add_row(error.name, f"{error.relative_rms:.5f}", f"{error.share_of_bound:.3f}")
    if errors:
        console.print(table)
    for error in errors:
        if error.share_of_bound > 1:
            raise BadInputError(
                f"tensor {error.name}",
                expected="errors within half a step of its format",
                found=f"{error.share_of_bound:.3f} of that",
            )


if __name__ == "__main__":
    main()
