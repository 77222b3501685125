"""`python -m benchmarks.episodes`: what episodes cost when tokens cost nothing.

Real agent, real sandboxes (bubblewrap), real grading of generated tasks; a policy that answers at
once from a list: look, repair, submit.

- `commands`: one command in a running sandbox beside `subprocess.run` of the same on a copy of the
  tree, in turns, each first as often as the other. `added` is the difference of the medians, and of
  the 95th percentiles.
- `start`: from asking for a sandbox to having one with the task's tree in it. None is started in
  advance; the first of all is `cold`.
- `episodes`: episodes per second, `CONCURRENT` at once, each with a sandbox for the policy and one
  for the hidden tests.
- `crowd`: 64 episodes that have their sandboxes at the same moment and a Python in each. `pss_gib`
  is the peak of the proportional memory of this process and all below it, sampled; `groups_gib` the
  sum of the peaks of all sandboxes' control groups, whenever each was: files and kernel memory
  count there, too.

`other_cores` is what everybody else took of the processors meanwhile: where it is not near 0, the
times are of a shared machine, and `best_ms` says more than medians. With `--quick` there is less of
everything: it shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from benchmarks import harness
from contracts.types import (
    CandidateSets,
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
)
from sampler_fleet.episodes.agent import EpisodeLimits, run_episode
from sampler_fleet.episodes.base import GeneratedChunk
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.grading import Grader, tree_bytes
from sampler_fleet.episodes.sandbox import Host, SandboxPool, find_host
from sampler_fleet.episodes.tasks.generate import Problem, generate_problems
from sampler_fleet.episodes.tasks.script import ScriptConfig, play

CHECKPOINT = Path(__file__).resolve().parents[1] / "examples" / "demo-checkpoint"
COMMANDS = {"true": ["true"], "ls and grep": ["sh", "-c", "ls -la && grep -rn def ."]}
CONCURRENT, GRADERS = 4, 2
CROWD = 64
CROWD_COMMAND = "python3 -c 'import asyncio, json, time, unittest; time.sleep(4)'"
FAULTLESS = ScriptConfig(
    wrong_edit=0, far_edit=0, wrong_line=0, look_around=0, malformed=0, early_submit=0
)
WANTED = {  # at most
    "ms added per command": 15.0,
    "ms to start a sandbox": 150.0,
    "GiB of 64 episodes": 4.0,
}
_GIB = 1 << 30


class Answers:
    """A Generator that answers at once: a session's replies are in its list, turn by turn."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._replies: dict[str, list[np.ndarray]] = {}
        self.first_turn = asyncio.Barrier(1)  # episodes wait for each other there

    def script(self, session_id: str, commands: Sequence[str]) -> None:
        self._replies[session_id] = [self._chat.reply(command) for command in commands]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedChunk]:
        turn = int(request.request_id.rpartition("/")[2])
        if not turn:
            await self.first_turn.wait()
        tokens = self._replies[request.session_id][turn]
        num = len(tokens)
        logp = np.full(num, -0.5, np.float32)
        completion = Completion(
            tokens=tokens.astype(np.int32),
            sampler_logp=logp,
            candidates=CandidateSets.from_counts(
                np.ones(num, np.int64), tokens.astype(np.int32), logp
            ),
            spans=(VersionSpan(version=1, start=0, end=num),),
            finish_reason=FinishReason.STOP,
        )
        yield GeneratedChunk(completion=completion, group="scripted", sampler_id="scripted-0")

    async def end_session(self, session_id: str) -> None:
        self._replies.pop(session_id, None)


@contextmanager
def accounted() -> Iterator[dict[str, float]]:
    """Fills in the block's wall seconds, our processor seconds with all processes that ended in
    it, and the cores that went to others."""

    def clocks() -> np.ndarray:
        first, *_ = Path("/proc/stat").read_text().splitlines()
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, first.split()[1:])
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        ours_s = sum(os.times()[:4])
        return np.array([time.perf_counter(), ours_s, busy_s - ours_s])

    took: dict[str, float] = {}
    before = clocks()
    yield took
    took["seconds"], took["cpu_s"], others_s = (clocks() - before).tolist()
    took["other_cores"] = round(others_s / took["seconds"], 2)


def describe(seconds: Sequence[float]) -> dict[str, float]:
    p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1]
    values = {"median_ms": statistics.median(seconds), "p95_ms": p95, "best_ms": min(seconds)}
    return {name: round(1000 * value, 2) for name, value in values.items()}


async def measure_commands(host: Host, tree: Mapping[str, bytes], runs: int) -> dict[str, Any]:
    pool, rows = SandboxPool(1, host=host), {}
    with tempfile.TemporaryDirectory() as folder, accounted() as took:
        for path, data in tree.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        async with pool.open(tree) as sandbox:
            for name, argv in COMMANDS.items():
                command = shlex.join(argv)
                inside: list[float] = []
                alone: list[float] = []

                async def in_sandbox(command: str = command) -> None:
                    await sandbox.exec(command, timeout_s=10)

                async def by_itself(argv: list[str] = argv) -> None:
                    subprocess.run(argv, cwd=folder, capture_output=True, check=True)

                both = [(in_sandbox, inside), (by_itself, alone)]
                for _ in range(runs):
                    for call, seconds in both:
                        start = time.perf_counter()
                        await call()
                        seconds.append(time.perf_counter() - start)
                    both.reverse()
                rows[name] = {"sandbox": describe(inside), "subprocess": describe(alone)}
                rows[name]["added"] = {
                    key: round(value - rows[name]["subprocess"][key], 2)
                    for key, value in rows[name]["sandbox"].items()
                }
        await pool.close()
    return rows | {"other_cores": took["other_cores"]}


async def measure_start(host: Host, tree: Mapping[str, bytes], runs: int) -> dict[str, Any]:
    pool = SandboxPool(1, host=host)
    seconds: list[float] = []
    ends: list[float] = []
    with accounted() as took:
        for _ in range(runs + 1):
            start = time.perf_counter()
            async with pool.open(tree):
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
            ends.append(time.perf_counter() - start)
        await pool.close()
    return {
        "start": describe(seconds[1:]),
        "cold_ms": round(1000 * seconds[0], 2),
        "end": describe(ends),
        "cpu_ms": round(1000 * took["cpu_s"] / (runs + 1), 2),
        "other_cores": took["other_cores"],
    }


async def play_all(
    problems: Sequence[Problem], pool: SandboxPool, rooms: SandboxPool, *, at_once: int, crowd: str
) -> None:
    """An episode of each problem; `crowd` is a command that all run at the same time."""
    chat = ChatFormat.load(CHECKPOINT)
    answers, slots = Answers(chat), asyncio.Semaphore(at_once)
    if crowd:
        answers.first_turn = asyncio.Barrier(len(problems))
    grader = Grader(rooms)
    limits = EpisodeLimits(command_seconds=60.0, total_command_seconds=120.0)

    async def one(number: int, problem: Problem) -> None:
        name = f"episode-{number}"
        commands = [turn.command for turn in play(problem, FAULTLESS, Random(number))]
        answers.script(name, [crowd, *commands] if crowd else commands)
        async with slots:
            trajectory = await run_episode(
                problem.task,
                session_id=name,
                generator=answers,
                chat=chat,
                sandboxes=pool,
                grader=grader,
                limits=limits,
                sampling=SamplingParams(max_new_tokens=1000),
            )
        assert trajectory.reward == 1.0, (trajectory.ending, trajectory.failure)

    async with asyncio.TaskGroup() as tasks:
        for number, problem in enumerate(problems):
            tasks.create_task(one(number, problem))


async def measure_episodes(host: Host, problems: Sequence[Problem]) -> dict[str, Any]:
    pool, rooms = SandboxPool(CONCURRENT, host=host), SandboxPool(GRADERS, host=host)
    with accounted() as took:
        await play_all(problems, pool, rooms, at_once=CONCURRENT, crowd="")
        await pool.close()
        await rooms.close()
    return {
        "episodes_per_s": round(len(problems) / took["seconds"], 2),
        "cpu_s_per_episode": round(took["cpu_s"] / len(problems), 3),
        "num_episodes": len(problems),
        "other_cores": took["other_cores"],
    }


class Peak(threading.Thread):
    """The largest proportional memory of this process and all below it, from start to `read`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self._most = self.num_processes = 0

    def run(self) -> None:
        while not self._done.wait(0.1):
            this = psutil.Process()
            processes = [this, *this.children(recursive=True)]
            self.num_processes = max(self.num_processes, len(processes))
            self._most = max(self._most, sum(map(_pss, processes)))

    def read(self) -> int:
        self._done.set()
        self.join()
        return self._most


def _pss(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _group_peaks(host: Host) -> float | None:
    """GiB over all groups of this process; None where there are none, or no such counter."""
    peaks = [
        int(file.read_text())
        for parent in host.cgroup_parents
        for name in ("memory.peak", "memory.max_usage_in_bytes")
        for file in parent.glob(f"*-{os.getpid()}-*/{name}")
    ]
    return round(sum(peaks) / _GIB, 3) if peaks else None


async def measure_crowd(host: Host, problems: Sequence[Problem]) -> dict[str, Any]:
    pool, rooms = SandboxPool(len(problems), host=host), SandboxPool(GRADERS, host=host)
    peak = Peak()
    peak.start()
    with accounted() as took:
        await play_all(problems, pool, rooms, at_once=len(problems), crowd=CROWD_COMMAND)
        groups = _group_peaks(host)
        pss = peak.read()
        await pool.close()
        await rooms.close()
    return {
        "num_episodes": len(problems),
        "pss_gib": round(pss / _GIB, 3),
        "groups_gib": groups,
        "num_processes": peak.num_processes,
        "seconds": round(took["seconds"], 1),
        "other_cores": took["other_cores"],
    }


def judge(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each wanted figure beside the one found: of medians, the worse command's."""
    added = [results["commands"][name]["added"]["median_ms"] for name in COMMANDS]
    crowd = results["crowd"]
    found = {
        "ms added per command": max(added),
        "ms to start a sandbox": results["start"]["start"]["median_ms"],
        "GiB of 64 episodes": max(crowd["pss_gib"], crowd["groups_gib"] or 0.0),
    }
    return {
        name: {"found": found[name], "at_most": most, "met": found[name] < most}
        for name, most in WANTED.items()
    }


def show(results: Mapping[str, Any]) -> None:
    print(f"{'':34}{'median':>9}{'p95':>9}{'best':>9}  ms")

    def line(name: str, row: Mapping[str, float]) -> None:
        print(f"{name:34}" + "".join(f"{row[key]:9.2f}" for key in row))

    for name in COMMANDS:
        for kind, row in results["commands"][name].items():
            line(f"{name}: {kind}", row)
    line("start of a sandbox", results["start"]["start"])
    line("end of a sandbox", results["start"]["end"])
    print(f"{results['episodes']['episodes_per_s']} episodes/s")
    for name, row in results["wanted"].items():
        print(f"{name}: {row['found']}, at most {row['at_most']}: {'met' * row['met'] or 'MISSED'}")


async def measure(quick: bool, runs: int) -> dict[str, Any]:
    host = find_host()
    problems = list(islice(generate_problems("train", 0), CROWD))
    tree = tree_bytes(problems[0].task.tree)
    runs = 20 if quick else runs
    steps: dict[str, Callable[[], Any]] = {
        "commands": lambda: measure_commands(host, tree, runs),
        "start": lambda: measure_start(host, tree, runs // 2),
        "episodes": lambda: measure_episodes(host, problems[: 8 if quick else CROWD]),
        "crowd": lambda: measure_crowd(host, problems[: 8 if quick else CROWD]),
    }
    results = {name: await step() for name, step in steps.items()}
    return results | {"wanted": judge(results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer runs and episodes")
    parser.add_argument("--runs", type=int, default=200, help="of each command")
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments.quick, arguments.runs))
    harness.report("episodes", results, harness.machine(), arguments.out)
    show(results)


if __name__ == "__main__":
    main()
