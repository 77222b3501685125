"""`python -m tools.convert_checkpoint SRC DST --format F`: a checkpoint in another weight format.

Owns the command line and what it shows. The conversion is weight_sync's. A run that was killed is
continued by the same command.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from rich.table import Table

from contracts.errors import BadInputError, exits_politely
from contracts.types import WeightFormat
from tools.compare_models import Difference, check_comparable, compare_models
from weight_sync.convert import (
    Options,
    check_destination,
    convert_resumably,
    plan_directory,
    source_bytes,
)
from weight_sync.layouts import RECIPES, Layout
from weight_sync.memory import keep_freed_memory
from weight_sync.modules import classify
from weight_sync.plan import CONFIG_DTYPES, ConversionPlan, Kind, unmatched
from weight_sync.safetensors_file import Checkpoint
from weight_sync.verify import TensorError, compare

_WORST = 10
_FORMATS = [str(name) for name in WeightFormat]
_DTYPES = {name: dtype for dtype, name in CONFIG_DTYPES.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="SRC", help="Hugging Face directory")
    parser.add_argument("destination", type=Path, metavar="DST", help="a directory not yet there")
    parser.add_argument("--format", "--to", required=True, choices=_FORMATS)
    parser.add_argument(
        "--from", dest="source_format", choices=_FORMATS, help="refuse SRC in another format"
    )
    recipes = [f"{of}: {', '.join(names)}" for of, names in RECIPES.items() if names]
    parser.add_argument(
        "--recipe",
        choices=[name for names in RECIPES.values() for name in names],
        help=f"whose rounding; {'; '.join(recipes)}; the first is the default",
    )
    parser.add_argument("--layout", choices=[str(name) for name in Layout], help="tensor names")
    parser.add_argument(
        "--dtype",
        choices=list(_DTYPES),
        default="bfloat16",
        help="of a quantized SRC decoded to bf16; float32 keeps the exact values",
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
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="with --verify, a text: perplexity of both models and KL between them",
    )
    parser.add_argument("--dry-run", action="store_true", help="show sizes, write nothing")
    return parser.parse_args()


def _options(arguments: argparse.Namespace) -> Options:
    format = WeightFormat(arguments.format)
    if arguments.recipe and arguments.recipe not in RECIPES[format]:
        known = " or ".join(RECIPES[format]) or "none"
        raise BadInputError("--recipe", expected=f"{known} for {format}", found=arguments.recipe)
    if arguments.layout and format == WeightFormat.BF16:
        raise BadInputError("--layout", expected="none for bf16", found=arguments.layout)
    if arguments.threads < 1:
        raise BadInputError("--threads", expected="at least 1", found=arguments.threads)
    if arguments.prompts and not arguments.verify:
        raise BadInputError("--prompts", expected="--verify with it", found="it alone")
    return Options(
        format=format,
        recipe=arguments.recipe,
        layout=Layout(arguments.layout) if arguments.layout else None,
        ignore=tuple(arguments.ignore),
        threads=arguments.threads,
        dtype=_DTYPES[arguments.dtype],
        source_format=WeightFormat(arguments.source_format) if arguments.source_format else None,
    )


@exits_politely
def main() -> None:
    keep_freed_memory()
    arguments = _arguments()
    options = _options(arguments)
    if not arguments.dry_run:
        check_destination(arguments.destination, resumes=True)
    if arguments.prompts and not arguments.prompts.is_file():
        raise BadInputError("--prompts", expected="a text file", found=arguments.prompts)
    console = Console()
    plan, checkpoint = plan_directory(arguments.source, options)
    if lost := unmatched(options.ignore, plan, checkpoint.tensors):
        raise BadInputError("--ignore", expected="globs of modules of SRC", found=lost[0])
    console.print(_sizes(plan, checkpoint))
    if arguments.dry_run:
        return
    tokens = []
    if arguments.prompts:
        text = arguments.prompts.read_text(errors="replace")
        memory = _available_bytes()
        tokens = check_comparable(arguments.source, plan, text, available_bytes=memory)
    with _progress(console) as progress:
        total = sum(source_bytes(action, checkpoint) for action in plan.actions)
        task = progress.add_task("convert", total=total)

        def on_start(num_bytes: int) -> None:
            if num_bytes:
                done = "all" if num_bytes == total else f"{num_bytes / 1e6:.1f} MB"
                console.print(f"continuing an interrupted run, {done} were done")
            progress.reset(task, completed=num_bytes)  # so that the speed is that of this run

        def verify(converted: Path) -> None:
            errors: list[TensorError] = []
            task = progress.add_task("verify", total=total)
            for found, num_bytes in compare(plan, checkpoint, Checkpoint(converted)):
                errors += found
                progress.advance(task, num_bytes)
            progress.stop()
            _show_errors(console, errors)
            if tokens:
                console.print(_show(compare_models(arguments.source, converted, tokens)))

        convert_resumably(
            arguments.source,
            arguments.destination,
            options,
            on_start=on_start,
            on_progress=lambda num_bytes: progress.advance(task, num_bytes),
            check=verify if arguments.verify else lambda directory: None,
        )


def _available_bytes() -> int:
    """What the system could give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    """Tensors and bytes before and after, by what they are and what happens to them."""
    tensors: Counter[tuple[str, str]] = Counter()
    before: Counter[tuple[str, str]] = Counter()
    after: Counter[tuple[str, str]] = Counter()
    for action in plan.actions:
        does = _does(action.kind, plan)
        key = (str(classify(action.sources[0].tensor)), does)
        tensors[key] += len(action.sources) if action.kind != Kind.DECODE else 1
        before[key] += source_bytes(action, checkpoint)
        after[key] += sum(s.num_bytes for specs in action.outputs for s in specs)
    sizes = f"{before.total() / 1e6:.1f} MB -> {after.total() / 1e6:.1f} MB"
    table = Table(title=f"{_title(plan)}: {sizes}")
    for column in ("tensors", "action", "number", "MB before", "MB after"):
        left = column in ("tensors", "action")
        table.add_column(column, justify="left" if left else "right")
    for key, num_bytes in before.most_common():
        sizes = f"{num_bytes / 1e6:.2f}", f"{after[key] / 1e6:.2f}"
        table.add_row(*key, str(tensors[key]), *sizes)
    return table


def _title(plan: ConversionPlan) -> str:
    """Format and recipe of the result, and the storage that is written or read."""
    storage = next((action.storage for action in plan.actions if action.storage), None)
    if storage is None:
        return str(plan.format)
    if plan.format == storage.format:
        return f"{' '.join(filter(None, (plan.format, plan.recipe)))}, {storage.layout} layout"
    dtype = plan.config.get("dtype") or plan.config.get("torch_dtype")
    return f"{storage.format}, {storage.layout} layout, to {dtype}"


def _does(kind: Kind, plan: ConversionPlan) -> str:
    return f"to {plan.format}" if kind == Kind.ENCODE else str(kind)


def _show_errors(console: Console, errors: list[TensorError]) -> None:
    """The tensors that lost most. Raises BadInputError if one lost more than its format may."""
    table = Table(title=f"{len(errors)} quantized matrices, largest relative error (RMS) first")
    table.add_column("tensor", overflow="fold")
    table.add_column("relative error", justify="right")
    table.add_column("share of its bound", justify="right")
    for error in sorted(errors, key=lambda e: -e.relative_rms)[:_WORST]:
        table.add_row(error.name, f"{error.relative_rms:.5f}", f"{error.share_of_bound:.3f}")
    if errors:
        console.print(table)
    for error in errors:
        if not error.share_of_bound <= 1:
            raise BadInputError(
                f"tensor {error.name}",
                expected="errors within half a step of its format",
                found=f"{error.share_of_bound:.3f} of that",
            )


def _show(difference: Difference) -> Table:
    table = Table(title=f"{difference.num_tokens} predicted tokens")
    for column in ("", "perplexity", "KL(SRC || DST), mean", "p99"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("SRC", f"{difference.source_perplexity:.4f}", "", "")
    kl = f"{difference.mean_kl:.6f}", f"{difference.p99_kl:.6f}"
    table.add_row("DST", f"{difference.result_perplexity:.4f}", *kl)
    return table


if __name__ == "__main__":
    main()
