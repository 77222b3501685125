"""`python -m sampler_fleet tasks`: tasks generated, listed, shown, checked and graded again.

Owns what a person sees of tasks. Imports are inside the commands: this module is loaded with every
command of the package.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.errors import BadInputError, exits_politely
from sampler_fleet.episodes.scrub.command import scrub_command
from sampler_fleet.episodes.tasks.make.command import make_command

if TYPE_CHECKING:
    from rich.console import Console

    from sampler_fleet.episodes.base import Task
    from sampler_fleet.episodes.containers.launch import SandboxConfig
    from sampler_fleet.episodes.tasks.check import Finding
    from sampler_fleet.episodes.tasks.regrade import Regraded

app = typer.Typer(no_args_is_help=True, help="Coding tasks: made, listed, shown, checked, cleaned.")

app.command("make")(make_command)
app.command("scrub")(scrub_command)

Source = Annotated[
    Path,
    typer.Argument(help="File of rows, or directory of such files or of tasks (docs/tasks.md)."),
]


@app.command()
@exits_politely
def generate(
    split: Annotated[str, typer.Option(help="train or heldout.")] = "train",
    num: Annotated[int, typer.Option(help="How many.")] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Generated tasks, one JSON object per line."""
    from sampler_fleet.episodes.tasks.generate import generate_tasks

    for task in generate_tasks(split, num, seed):
        json.dump(asdict(task), sys.stdout)
        sys.stdout.write("\n")


@app.command("list")
@exits_politely
def list_tasks(source: Source) -> None:
    """A table of the tasks of a source, and one of those that can't be read."""
    from rich.markup import escape
    from rich.table import Table

    from sampler_fleet.episodes.tasks.sources import read_tasks

    broken: list[tuple[str, BadInputError]] = []
    tasks = read_tasks(source, lambda *found: broken.append(found))
    table = Table(title=f"tasks: {len(tasks)}", title_justify="left")
    for column in ("task", "data set", "split", "language", "license", "runs in"):
        table.add_column(column, overflow="fold")
    for column in ("fail\nto pass", "pass\nto pass"):
        table.add_column(column, justify="right")
    for task in tasks:
        texts = (task.task_id, task.dataset, task.split, task.language, task.license, _place(task))
        numbers = (len(task.fail_to_pass), len(task.pass_to_pass))
        table.add_row(*map(escape, texts), *map(str, numbers))
    console = _console()
    console.print(table)
    _print_reasons("not tasks", _broken_rows(broken), console)


@app.command()
@exits_politely
def show(source: Source, task_id: Annotated[str, typer.Argument(help="Its id.")]) -> None:
    """One task of a source: what the policy reads, what grades it, what solves it."""
    from sampler_fleet.episodes.tasks.sources import read_tasks

    broken: dict[str, BadInputError] = {}
    tasks = read_tasks(source, broken.__setitem__)
    if task_id in broken:
        raise broken[task_id]
    task = next((task for task in tasks if task.task_id == task_id), None)
    if task is None:
        raise BadInputError(
            "task", expected=f"an id that `tasks list {source}` shows", found=task_id
        )
    sys.stdout.write(_text(task))


@app.command()
@exits_politely
def check(
    source: Source,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the findings; NAME-checked if not given.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 2,
    runtime: Annotated[
        str, typer.Option(help="Of containers: auto, docker, podman or modal.")
    ] = "auto",
) -> int:
    """Grades the empty patch (must fail) and the reference solution (must pass), three times each.

    Writes usable.jsonl and checked.jsonl; run again, it goes on where it was. Status 0 if tasks are
    usable and none is unusable, broken or failed; those that can't be run here don't count.
    """
    from contracts.runfile import validate_section
    from sampler_fleet.episodes.containers.launch import SandboxConfig
    from sampler_fleet.episodes.tasks.check import Outcome
    from sampler_fleet.episodes.tasks.sources import read_tasks

    config = validate_section(SandboxConfig, "episodes.sandbox", {"runtime": runtime})
    broken: list[tuple[str, BadInputError]] = []
    tasks = read_tasks(source, lambda *found: broken.append(found))
    console = _console()
    out = out or Path(f"{source.resolve().name}-checked")
    findings = asyncio.run(_check(tasks, out, jobs, config, console))
    outcomes = [finding.outcome for finding in findings]
    rows = [
        (finding.task_id, finding.outcome, finding.reason)
        for finding in findings
        if finding.outcome != Outcome.USABLE
    ]
    _print_reasons("not usable", rows + _broken_rows(broken), console)
    console.print(
        f"{', '.join(f'{outcomes.count(outcome)} {outcome}' for outcome in Outcome)}, "
        f"{len(broken)} broken; wrote {out}",
        highlight=False,
        markup=False,
    )
    bad = broken or {Outcome.UNUSABLE, Outcome.FAILED}.intersection(outcomes)
    return 1 if bad or Outcome.USABLE not in outcomes else 0


@app.command()
@exits_politely
def digests(
    source: Annotated[Path | None, typer.Argument(help="As for `list`.")] = None,
    ids: Annotated[
        Path | None, typer.Option(help="Subset file: only these, in this order.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="In place of a source: a run's held-out tasks.")
    ] = None,
) -> None:
    """The ids of tasks and a checksum of everything in each, as one JSON object."""
    from sampler_fleet.episodes.tasks.check import digest
    from sampler_fleet.episodes.tasks.choose import read_chosen

    if (source is None) == (config is None) or (config and ids):
        found = "neither" if source is None and config is None else "both"
        raise BadInputError("digests", expected="a source (with ids) or --config", found=found)
    if config:
        tasks = _of_run(config, lambda: "")["heldout"]
    else:
        assert source
        tasks = list(read_chosen(source, [ids] if ids else []).values())
    json.dump({task.task_id: digest(task) for task in tasks}, sys.stdout)


@app.command()
@exits_politely
def regrade(
    directory: Annotated[Path, typer.Argument(help="Of an evaluation, with its episodes.jsonl.")],
) -> int:
    """Grades the patches that an evaluation saved once more, in fresh sandboxes.

    Writes regraded.jsonl; run again, it goes on where it was. Status 1 if a verdict is another one
    or a patch could not be graded.
    """
    from contracts.evaluations import CONFIG, EPISODES, lock_evaluation

    if not (directory / EPISODES).is_file():
        raise BadInputError(
            str(directory), expected=f"an evaluation, with {EPISODES}", found="none"
        )
    with lock_evaluation(directory):
        found = asyncio.run(_regrade(directory, directory / CONFIG, _console()))
    return 0 if all(graded.holds for graded in found) else 1


async def _regrade(directory: Path, config: Path, console: Console) -> list[Regraded]:
    from rich.progress import Progress

    from sampler_fleet.config import read_settings
    from sampler_fleet.episodes.containers.grading import GraderByTask
    from sampler_fleet.episodes.containers.pool import ContainerPool
    from sampler_fleet.episodes.sandbox import SandboxPool
    from sampler_fleet.episodes.tasks.regrade import check_unchanged, read_saved, regrade

    episodes = read_settings(config).episodes
    num_jobs = episodes.num_graders
    containers = ContainerPool(episodes.sandbox, num_jobs)
    splits = _of_run(config, containers.missing)
    tasks = {task.task_id: task for split in splits.values() for task in split}
    check_unchanged(directory, tasks)
    is_local = any(task.checkout is None for task in tasks.values())
    pool = SandboxPool(num_jobs, episodes.sandbox) if is_local else None
    grader = GraderByTask(pool, episodes.grading, containers=containers)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("grading", total=len(read_saved(directory)))
        try:
            return await regrade(
                directory,
                tasks,
                grader,
                num_jobs=num_jobs,
                on_graded=lambda graded: progress.advance(bar),
            )
        finally:
            await containers.close()
            if pool:
                await pool.close()


def _of_run(config: Path, no_containers: Callable[[], str]) -> dict[str, list[Task]]:
    """The tasks of a run by split, as its gateway has them."""
    from sampler_fleet.config import read_settings
    from sampler_fleet.episodes.tasks.choose import choose_tasks

    settings = read_settings(config)
    limit = settings.episodes.sandbox.tree_bytes
    return choose_tasks(settings.tasks, tree_limit=limit, no_containers=no_containers)


async def _check(
    tasks: Sequence[Task], out: Path, jobs: int, config: SandboxConfig, console: Console
) -> list[Finding]:
    from rich.progress import Progress

    from sampler_fleet.episodes.containers.grading import GraderByTask
    from sampler_fleet.episodes.containers.pool import ContainerPool
    from sampler_fleet.episodes.sandbox import SandboxPool
    from sampler_fleet.episodes.tasks.check import check_tasks

    containers = ContainerPool(config, jobs)
    pool = SandboxPool(jobs) if any(task.checkout is None for task in tasks) else None
    grader = GraderByTask(pool, containers=containers)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("checking", total=len(tasks))
        try:
            return await check_tasks(
                tasks,
                grader,
                out,
                no_containers=containers.missing,
                num_jobs=jobs,
                on_found=lambda finding: progress.advance(bar),
            )
        finally:
            await containers.close()
            if pool:
                await pool.close()


def _broken_rows(broken: Sequence[tuple[str, BadInputError]]) -> list[tuple[str, str, str]]:
    return [(task_id, "broken", str(error)) for task_id, error in broken]


def _print_reasons(title: str, rows: Sequence[tuple[str, str, str]], console: Console) -> None:
    """A table of (task, what it is, why), if there are any."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("task", "is", "because"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    if rows:
        console.print(table)


def _text(task: Task) -> str:
    """A task for people, complete but for the contents of its tree."""
    from sampler_fleet.episodes.grading import tree_bytes
    from sampler_fleet.episodes.patch import Patch, diff

    checkout = task.checkout
    facts = {
        "task": task.task_id,
        "data set": task.dataset,
        "split": task.split,
        "language": task.language,
        "license": task.license,
        "runs in": _place(task),
        "test seconds": task.test_seconds,
    }
    if checkout:
        facts |= {
            "directory": checkout.workdir,
            "repository": checkout.repo,
            "base commit": checkout.base_commit,
            "setup": checkout.setup,
            "tests": checkout.test_command,
            "judged by": checkout.judge,
            "test files": ", ".join(checkout.test_files),
            "hidden": ", ".join(checkout.hidden_paths),
        }
        tests, fix = checkout.test_patch, checkout.fix_patch or checkout.fix_script
    else:
        facts |= {"tree": ", ".join(task.tree)}
        tests = "\n".join(f"{path}:\n{text}" for path, text in task.hidden_tests.items())
        solution = Patch(changed=tree_bytes(task.fix), deleted=task.fix_deletes)
        fix = diff(tree_bytes(task.tree), solution)
    parts = {
        "issue": task.issue,
        "fail to pass": "\n".join(task.fail_to_pass),
        "pass to pass": "\n".join(task.pass_to_pass),
        "hidden tests": tests,
        "reference solution": fix,
    }
    lines = [f"{name}: {value}" for name, value in facts.items() if value]
    lines += [f"\n--- {name}\n{text.rstrip()}" for name, text in parts.items() if text]
    return "\n".join(lines).encode(errors="replace").decode() + "\n"


def _place(task: Task) -> str:
    from sampler_fleet.episodes.tasks.check import NO_NETWORK

    if task.checkout is None:
        return "a local sandbox"
    place = task.checkout.image or f"an image built in {task.checkout.build_dir}"
    return f"{place}; {NO_NETWORK}" if task.checkout.may_use_network else place


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)  # a file has no width
