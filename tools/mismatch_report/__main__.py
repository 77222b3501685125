"""`python -m tools.mismatch_report RUN_OR_TRAJECTORIES`: what to look at when training goes wrong.

Owns the command line alone. Where trajectories come from, what a checkpoint says of them, which
fault the numbers mean, and how that is shown is in the modules beside it.

RUN_OR_TRAJECTORIES is a run directory (at work or not), a gateway's state directory or
groups.sqlite, or a file of length-delimited TrajectoryGroup messages, such as `--save` writes.
Of a run, settings and the newest trainer checkpoint are taken unless options say otherwise.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from contracts.errors import BadInputError, exits_politely
from contracts.files import replacing
from tools.mismatch_report.page import render
from tools.mismatch_report.report import build_report
from tools.mismatch_report.source import (
    Source,
    input_files,
    read_checkpoint,
    read_source,
    write_groups,
)
from tools.mismatch_report.tables import show
from tools.mismatch_report.tokens import Setup, whole_sets

_TEMPERATURES = (0.01, 100.0)  # float32 logits bear division by these


def setup_of(source: Source, options: argparse.Namespace) -> Setup:
    """The run's settings under the options; what neither says is read from the records.

    Raises:
        BadInputError: a temperature that nobody samples at.
    """
    trajectories = [t for group in source.groups for t in group.trajectories]
    sampling = source.sampling
    whole = whole_sets(trajectories)
    replay = options.replay if options.replay is not None else source.replay
    truncates = sampling.params().truncates if sampling else whole or bool(options.replay)
    temperature = sampling.temperature if sampling else 1.0
    if options.temperature is not None:
        temperature = options.temperature
    low, high = _TEMPERATURES
    if not low <= temperature <= high:
        raise BadInputError("temperature", expected=f"{low:g} to {high:g}", found=temperature)
    names = tuple(sorted({t.group for t in trajectories}))
    loss = source.loss
    bands = {name: band for name, band in loss.bands.items() if name in names}
    return Setup(
        group_names=names,
        log_bands_Gx2=loss.model_copy(update={"bands": bands}).log_bands(names),
        temperature=temperature,
        replay=truncates if replay is None else replay,
        truncates=truncates,
        compute=source.compute,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mismatch-report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_TRAJECTORIES")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="a Hugging Face directory or checkpoints/<step> of a run (the run's newest)",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, help="of sampling (the run's, or 1)")
    parser.add_argument(
        "--replay", action=argparse.BooleanOptionalAction,
        help="compare over the recorded sets (as the run does, or if they hold all the mass)",
    )  # fmt: skip
    parser.add_argument(
        "--other", type=Path, action="append", default=[], metavar="DIR",
        help="weights to try for samplers that this checkpoint doesn't fit; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="extreme tokens of each group (5)"
    )
    parser.add_argument("--html", type=Path, metavar="OUT", help="write the report as a page")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", type=Path, metavar="OUT", help="keep the trajectories in a file")
    return parser.parse_args()


def _check(options: argparse.Namespace) -> None:
    if options.top < 0:
        raise BadInputError("--top", expected="at least 0", found=options.top)
    inputs = [*input_files(options.source), *options.other]
    inputs += [options.checkpoint] if options.checkpoint else []
    for flag in ("html", "save"):
        path = getattr(options, flag)
        if not path:
            continue
        if not path.parent.is_dir() or (path.exists() and not path.is_file()):
            raise BadInputError(f"--{flag}", expected="a file in a directory", found=path)
        if path.exists() and any(path.resolve().is_relative_to(x.resolve()) for x in inputs):
            raise BadInputError(f"--{flag}", expected="another file than those read", found=path)
    if options.html and options.save and options.html.resolve() == options.save.resolve():
        raise BadInputError("--html and --save", expected="two files", found=options.html)
    for path in options.other:
        if not path.is_dir():
            raise BadInputError("--other", expected="a checkpoint directory", found=path)


@exits_politely
def main() -> None:
    options = _arguments()
    _check(options)
    source = read_source(options.source)
    path = options.checkpoint or source.newest_checkpoint
    if path is None:
        raise BadInputError("--checkpoint", expected="one to compare with", found="none")
    checkpoint = read_checkpoint(
        path, start=None if options.checkpoint else source.start_checkpoint
    )
    others = [*options.other, *([source.start_checkpoint] if source.start_checkpoint else [])]
    setup = setup_of(source, options)
    if options.save:
        write_groups(options.save, source.groups)
    report = build_report(source, setup, checkpoint, others=others, num_extremes=options.top)
    if options.html:
        with replacing(options.html) as aside:
            aside.write_text(render(report))
    if options.json:
        print(json.dumps(report))
    else:
        console = Console()
        show(console if console.is_terminal else Console(width=160), report)


if __name__ == "__main__":
    main()
