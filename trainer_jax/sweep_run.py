"""Makes the runs of a sweep: several at once, each a `trainer_jax train` of its own.

Owns the processes, their order and what is skipped because it is done. A run that was interrupted
goes on from its last checkpoint, on the machine that has its directory; what is finished stands in
the results and is never made again. Must not know what the runs learn.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contracts.errors import BadInputError, RetryError
from contracts.runfile import write_resolved
from trainer_jax.summary import SUMMARY_FILE
from trainer_jax.sweep import PlannedRun, SweepConfig, record_of
from trainer_jax.sweep_results import finished_digest, is_at_its_end, write_results

log = logging.getLogger(__name__)

POLL_S = 0.5
MAX_ATTEMPTS = 3  # of a run whose process failed


@dataclass(kw_only=True)
class _Job:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    started: float


def run_sweep(
    sweep: SweepConfig,
    runs: Sequence[PlannedRun],
    *,
    jobs: int,
    keep: bool,
    console: Console,
    stop_requested: Callable[[], bool],
) -> bool:
    """Makes all runs that the results lack; False if a stop was requested before the end.

    `keep`: directories of finished runs stay.

    Raises:
        BadInputError: results of a run that was declared otherwise.
        RetryError: a run failed `MAX_ATTEMPTS` times; the others are made first.
    """
    results = sweep.results
    waiting = [run for run in runs if not _is_done(run, results)]
    console.print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them done", highlight=False)
    running: list[_Job] = []
    failures: dict[str, int] = {}
    num_waiting = len(waiting)
    try:
        while waiting or running:
            if stop_requested():
                return False
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                console.print(f"{run.scale}: {run.name}", highlight=False)
                running.append(_start(run, _directory(sweep, run)))
            time.sleep(POLL_S)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                directory = _directory(sweep, job.run)
                if is_at_its_end(directory):
                    write_results(results, job.run, directory)
                    minutes = (time.monotonic() - job.started) / 60
                    num_waiting -= 1
                    console.print(
                        f"{job.run.name}: done in {minutes:.1f} min, {num_waiting} to go",
                        highlight=False,
                    )
                    if not keep:
                        shutil.rmtree(directory)
                    continue
                failures[job.run.name] = failures.get(job.run.name, 0) + 1
                log.warning("%s ended with %s", job.run.name, job.process.returncode)
                if failures[job.run.name] < MAX_ATTEMPTS:
                    waiting.insert(0, job.run)
    finally:
        _stop(running)
    if given_up := [name for name, num in failures.items() if num >= MAX_ATTEMPTS]:
        where = sweep.directory / "logs" / f"{given_up[0]}.log"
        raise RetryError(f"{len(given_up)} runs failed {MAX_ATTEMPTS} times, see {where}")
    return True


def _directory(sweep: SweepConfig, run: PlannedRun) -> Path:
    return sweep.directory / run.scale / run.name


def _is_done(run: PlannedRun, results: Path) -> bool:
    found = finished_digest(results, run)
    if found not in (None, run.digest):
        raise BadInputError(
            f"results of {run.name}",
            expected=f"those of the run as it is declared, {run.digest}",
            found=f"{found}; a sweep that is changed begins in another directory",
        )
    return found is not None


def _start(run: PlannedRun, directory: Path) -> _Job:
    """Starts or resumes a run, which signals to this process's group don't reach."""
    logs = directory.parent.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    record = directory.parent / f"{run.name}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    write_resolved(record, dict(record_of(run, directory)))
    (directory / SUMMARY_FILE).unlink(missing_ok=True)
    mode = ["--resume"] if (directory / "checkpoints").is_dir() else ["--fresh"]
    command = [sys.executable, "-m", "trainer_jax", "train", str(record), *mode]
    with (logs / f"{run.name}.log").open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    return _Job(run=run, process=process, started=time.monotonic())


def _stop(jobs: Sequence[_Job]) -> None:
    """Asks for a checkpoint and an end, and waits for both."""
    for job in jobs:
        os.kill(job.process.pid, signal.SIGINT)
    for job in jobs:
        job.process.wait()
