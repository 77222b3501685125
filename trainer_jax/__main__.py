"""`python -m trainer_jax`: train, plan, evaluate, export, report, compare, sweep, sft.

Owns the command line, logging and signals. Anything else belongs to the modules it calls, which it
imports late: `--help` and a wrong run file should not wait for JAX.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from contracts.errors import BadInputError, exits_politely

app = typer.Typer(
    help="The trainer of a run: one policy, many samplers.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="the run file")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="may be repeated")
]
LOG_WIDTH = 120
XLA_CACHE = Path(".cache") / "xla"


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="check everything, print the plan, stop")] = False,
    resume: Annotated[bool, typer.Option(help="go on from the last checkpoint")] = False,
    fresh: Annotated[bool, typer.Option(help="move an earlier run of this name aside")] = False,
    process: Annotated[int, typer.Option(help="this one's number in [cluster]; 0 leads")] = 0,
) -> None:
    """Train a policy; ends with RUN/report.html and RUN/summary.json."""
    if resume and fresh:
        raise BadInputError("train", expected="--resume or --fresh", found="both")
    _prepare()
    from trainer_jax.config import load_run
    from trainer_jax.plan import check_others, print_plan

    config = load_run(run_file, overrides or ())
    config = config.with_sections(check_others(config))
    console = _console()
    if dry_run:
        print_plan(console, config)
        return
    from trainer_jax.cluster import Cluster

    if process:
        from trainer_jax.replica import Replica

        cluster = Cluster(config.cluster, process)
        with _stop_on_signals():  # the leader's to answer
            Replica(config, config.run.path, cluster=cluster).follow()
        return
    from trainer_jax.run_directory import RunDirectory

    mode = "resume" if resume else "fresh" if fresh else "new"
    directory = RunDirectory(config.run.path, mode, config.sections)
    if directory.changes:
        console.print(f"resuming with {', '.join(directory.changes)}", markup=False, soft_wrap=True)
    cluster = Cluster(config.cluster)
    from trainer_jax.loop import train as train_run

    with _stop_on_signals() as stop_requested:
        status = train_run(
            config, directory, console=console, stop_requested=stop_requested, cluster=cluster
        )
    if status == "interrupted":
        settings = [f"--set {shlex.quote(override)}" for override in overrides or ()]
        again = " ".join(["python -m trainer_jax train", str(run_file), *settings, "--resume"])
        console.print(f"stopped with a checkpoint; go on with: {again}", soft_wrap=True)


@app.command()
def plan(
    run_file: RunFile,
    overrides: Overrides = None,
    memory_gb: Annotated[
        float | None, typer.Option(min=1, help="of one device, in 10^9 bytes: does it fit?")
    ] = None,
) -> None:
    """What a run would do, and what its update costs on devices that need not be here.

    The mesh is that of the run file; model.checkpoint may be a directory with nothing but a
    config.json.
    """
    _prepare()
    from trainer_jax.aot import compile_ahead
    from trainer_jax.config import load_run
    from trainer_jax.plan import check_others, print_plan
    from trainer_jax.plan_devices import print_devices

    config = load_run(run_file, overrides or ())
    config = config.with_sections(check_others(config, here=False))
    console = _console()
    print_plan(console, config)
    with console.status("compiling the update"):
        ahead = compile_ahead(config)
    print_devices(console, config, ahead, memory_gb * 1e9 if memory_gb else None)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="a run file, or the directory of a run")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Hugging Face directory, or checkpoints/<step>; of a run, its newest"),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(metavar="SOURCE", help="all its tasks; not the held-out ones")
    ] = None,
    ids: Annotated[Path | None, typer.Option(help="subset file of --tasks")] = None,
    samples: Annotated[int, typer.Option(min=0, help="per task; 0: as the run says")] = 0,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="its directory; RUN/evaluations/... if not given")
    ] = None,
    regrade: Annotated[
        bool, typer.Option("--regrade", help="grade the saved patches again, play nothing")
    ] = False,
) -> None:
    """Evaluate a policy with a run's evaluation group; run again, it goes on where it was.

    Ends with report.md and evaluation.json. Status 1 if samples are missing, or, with --regrade, if
    a verdict is another one.
    """
    _prepare()
    from trainer_jax.evaluate_checkpoint import directory_of, evaluate_run
    from trainer_jax.evaluate_regrade import regrade as regrade_patches
    from trainer_jax.evaluate_source import Request

    request = Request(
        run=run,
        checkpoint=checkpoint,
        tasks=tasks,
        ids=ids,
        samples=samples,
        overrides=overrides or (),
        out=out,
    )
    if regrade:
        raise typer.Exit(regrade_patches(directory_of(request), _console()))
    with _stop_on_signals() as stop_requested:

        def poll() -> None:
            if stop_requested():
                raise KeyboardInterrupt

        try:
            result = evaluate_run(request, _console(), poll=poll)
        except KeyboardInterrupt:
            print("stopped; the same command goes on", flush=True)
            raise typer.Exit(130) from None
    raise typer.Exit(1 if result.incomplete else 0)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoints/<step> of a run, or a run")],
    out: Annotated[Path, typer.Argument(help="the directory to write")],
    layout: Annotated[
        str | None, typer.Option(help="per-expert or fused; as the start checkpoint has it")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32; as the start checkpoint has it")
    ] = None,
) -> None:
    """Write a trainer checkpoint as a Hugging Face directory."""
    _prepare()
    from trainer_jax.export import export_checkpoint

    export_checkpoint(checkpoint, out, layout=layout, dtype=dtype)
    print(out)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="the directory of a run")],
) -> None:
    """Render RUN/report.html again from what the run recorded."""
    from trainer_jax.report import write_report

    print(write_report(run))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="directories of runs; the first is the base")],
) -> None:
    """Runs side by side: what each learned and what its samplers cost."""
    from trainer_jax.compare import compare_runs

    compare_runs(runs, _console())


@app.command()
def sweep(
    sweep_file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="the sweep file")],
    scale: Annotated[str, typer.Option(help="which of its scales")],
    jobs: Annotated[int, typer.Option(min=1, help="runs at once")] = 2,
    only: Annotated[str, typer.Option(help="runs whose name has this in it")] = "",
    smoke: Annotated[bool, typer.Option("--smoke", help="each arm once, cut short")] = False,
    results: Annotated[Path | None, typer.Option(help="not the sweep file's")] = None,
    directory: Annotated[Path | None, typer.Option(help="of the runs")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="keep directories of finished runs")] = False,
) -> None:
    """Make the runs of a sweep that its results lack; run again, it goes on where it was.

    Status 130 if it was stopped before the end.
    """
    from trainer_jax.sweep import planned_runs, read_sweep
    from trainer_jax.sweep_run import run_sweep

    config = read_sweep(sweep_file)
    config = config.model_copy(
        update={
            "results": results or config.results,
            "directory": directory or config.directory,
        }
    )
    runs = [run for run in planned_runs(config, scale, smoke=smoke) if only in run.name]
    if not runs:
        raise BadInputError("--only", expected=f"a part of a name in {scale}", found=only)
    with _stop_on_signals() as stop_requested:
        is_done = run_sweep(
            config, runs, jobs=jobs, keep=keep, console=_console(), stop_requested=stop_requested
        )
    if not is_done:
        print("stopped; the same command goes on", flush=True)
        raise typer.Exit(130)


@app.command()
def sft(run_file: RunFile, overrides: Overrides = None) -> None:
    """Supervised warm start from demonstrations: the run file's [sft] section."""
    _prepare()
    from contracts.runfile import read_run_file, validate_section
    from trainer_jax.sft import SftConfig, run_sft

    sections = read_run_file(run_file, overrides or ())
    config = validate_section(SftConfig, "sft", sections.get("sft", {}))
    run_sft(config)
    print(config.out)


def _console() -> Console:
    """Standard output; wide enough for the tables where nobody says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


def _prepare() -> None:
    """Logging, and what JAX reads from the environment before it is imported."""
    level = os.environ.get("LOG_LEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise BadInputError(
            "environment variable LOG_LEVEL", expected="DEBUG, INFO, WARNING or ERROR", found=level
        )
    logging.basicConfig(
        level=level,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False)],
    )
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(XLA_CACHE.absolute()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


@contextmanager
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM asks for a clean stop, a second one ends the process at once.

    Local services die with the process, so the second leaves no orphans either.
    """
    requested = False

    def on_signal(number: int, _frame: Any) -> None:
        nonlocal requested
        if requested:
            os._exit(128 + number)
        requested = True
        print("\nstopping after this step (again: at once)", file=sys.stderr)

    earlier = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


main = exits_politely(app)

if __name__ == "__main__":
    main()
