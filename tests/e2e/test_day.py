"""A day in the life of the sandboxes: 200 episodes, most of which do what they must not.

Real producer, agent, bubblewrap and grading; what is scripted is the policy, and who kills
sandboxes. Every episode ends as its scenario says, with a reward or as a counted failure of the
infrastructure, and the machine is as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from contracts.errors import BadInputError, RetryError
from contracts.types import (
    CandidateSets,
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Trajectory,
    VersionSpan,
)
from sampler_fleet.config import EpisodesConfig
from sampler_fleet.episodes.agent import EpisodeLimits, run_episode
from sampler_fleet.episodes.base import ExecResult, GeneratedChunk
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.grading import Grader
from sampler_fleet.episodes.prompts import SUBMIT_COMMAND as SUBMIT
from sampler_fleet.episodes.sandbox import (
    BubblewrapSandbox,
    Host,
    SandboxLimits,
    SandboxPool,
    find_host,
)
from sampler_fleet.episodes.tasks.generate import Problem, generate_problems
from sampler_fleet.producer import Evaluation, Producer
from sampler_fleet.spool import Spool
from tests.sampler_fleet.episodes.processes import children_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "demo-checkpoint"
NUM_TASKS, NUM_SAMPLES, AT_ONCE, NUM_GRADERS = 20, 10, 12, 4
LIMITS = SandboxLimits(
    memory_bytes=256 << 20,
    disk_bytes=8 << 20,
    num_processes=32,
    cpu_seconds=10,
    output_bytes=4 << 20,
    tree_bytes=1 << 20,
)
EPISODE = EpisodeLimits(
    max_turns=14,
    max_context_tokens=16_000,
    command_seconds=2.0,
    total_command_seconds=20.0,
    max_output_bytes=300,
)
FIX = "the task's repair"  # stands for it in a script; sent again until it is seen to be done
FIXED = "repaired"
FAILURE = None  # of the infrastructure: no reward


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a policy does, what is done to its sandbox, and how the episode must end."""

    num: int  # of episodes
    reward: float | None
    script: tuple[str, ...] = (FIX, SUBMIT)  # the last is said again and again
    kill: str = ""  # whose end comes in the middle of a command: sandbox, supervisor or grading
    with_signal: int = signal.SIGKILL
    always: bool = False  # at every attempt, not only the first
    no_sampler: bool = False


SLOW = ("sleep 1", FIX, SUBMIT)
BOMB = ":(){ :|:& };:"
FORKS = "python3 -c 'import os, time\nwhile os.fork() >= 0: pass' & sleep 0.3"
HANG = (
    "setsid nohup sleep 6000 >/dev/null 2>&1 & nohup sleep 6001 & (trap '' HUP TERM; sleep 6002) &"
)
HOG = "python3 -c 'x = [bytearray(1 << 20) for _ in range(10**5)]'"
HOGS = f"for i in 1 2 3; do {HOG} & done; wait"
NAMES = (
    "d=$(printf 'd%.0s' {1..250}); for i in {1..14}; do mkdir $d && cd $d; done; touch {1..4000}"
)
FULL = "for d in /work /tmp /dev/shm; do head -c 1000000000 /dev/zero > $d/big; done"

SCENARIOS = {
    "hung supervisor": Scenario(
        num=2, reward=1, kill="supervisor", script=SLOW, with_signal=signal.SIGSTOP
    ),  # first: nothing else takes so long
    "commands take too long": Scenario(num=2, reward=0, script=("sleep 600",)),
    "honest": Scenario(num=32, reward=1, script=("ls -la; cat README.md", FIX, SUBMIT)),
    "nothing fixed": Scenario(num=10, reward=0, script=("ls", SUBMIT)),
    "wrong fix": Scenario(num=6, reward=0, script=("sed -i 's/return/yield/' */*.py", SUBMIT)),
    "no submission": Scenario(num=4, reward=0, script=(FIX, "ls")),
    "sandbox killed": Scenario(num=8, reward=1, kill="sandbox", script=SLOW),
    "sandbox killed each time": Scenario(
        num=6, reward=FAILURE, kill="sandbox", script=SLOW, always=True
    ),
    "supervisor killed": Scenario(num=4, reward=1, kill="supervisor", script=SLOW),
    "grading killed": Scenario(num=6, reward=1, kill="grading"),
    "no sampler": Scenario(num=4, reward=FAILURE, no_sampler=True),
    "command times out": Scenario(num=10, reward=1, script=("sleep 600", FIX, SUBMIT)),
    "fork bomb": Scenario(num=8, reward=1, script=(BOMB, "ls", FIX, SUBMIT)),
    "fork bomb before the end": Scenario(num=4, reward=1, script=(FIX, BOMB, SUBMIT, SUBMIT)),
    "forks": Scenario(num=4, reward=1, script=(FORKS, "ls", FIX, SUBMIT)),
    "full disk": Scenario(num=6, reward=1, script=(FULL, "rm -f /work/big", FIX, SUBMIT)),
    "full disk at the end": Scenario(num=4, reward=0, script=(FIX, FULL, SUBMIT)),
    "flood": Scenario(num=8, reward=1, script=("head -c 1000000000 /dev/zero", FIX, SUBMIT)),
    "endless flood": Scenario(num=4, reward=1, script=("yes & yes >&2", FIX, SUBMIT)),
    "background": Scenario(num=10, reward=1, script=(HANG, FIX, HANG, SUBMIT)),
    "kill all": Scenario(
        num=6, reward=1, script=("kill -9 -1; kill -9 1; kill -STOP 1", FIX, SUBMIT)
    ),
    "starve the supervisor": Scenario(
        num=4, reward=1, script=("prlimit --pid 1 --as=1 --cpu=1; renice 19 1", FIX, SUBMIT)
    ),
    "memory": Scenario(num=4, reward=1, script=(HOG, FIX, SUBMIT)),
    "memory of many": Scenario(num=4, reward=1, script=(HOGS, FIX, SUBMIT)),
    "tree deleted": Scenario(num=4, reward=0, script=(FIX, "rm -rf /work/* /work", SUBMIT)),
    "system deleted": Scenario(
        num=6, reward=1, script=("rm -rf /usr/bin/python3* /bin /etc /sandbox /dev", FIX, SUBMIT)
    ),
    "system overwritten": Scenario(
        num=4, reward=1, script=("for f in /usr/bin/*; do : > $f; done 2>&1 | tail -1", FIX, SUBMIT)
    ),
    "odd names": Scenario(num=4, reward=0, script=(r"touch $'\xff' $'a\nb' ' '", FIX, SUBMIT)),
    "endless names": Scenario(num=2, reward=0, script=(FIX, NAMES, SUBMIT)),
    "unreadable": Scenario(num=4, reward=0, script=("touch x; chmod 0 x", FIX, SUBMIT)),
    "pipes and nodes": Scenario(
        num=4, reward=0, script=("mkfifo p; mknod c c 0 0; mknod z c 1 5", FIX, SUBMIT)
    ),
    "link": Scenario(num=4, reward=0, script=("ln -s / root", FIX, SUBMIT)),
    "file made a link": Scenario(
        num=2, reward=0, script=(FIX, "mv README.md /tmp; ln -s /tmp/README.md", SUBMIT)
    ),
    "git": Scenario(
        num=4, reward=0, script=("mkdir .git; echo '[core]' > .git/config", FIX, SUBMIT)
    ),
    "test files": Scenario(
        num=2, reward=1, script=("echo 'import os; os._exit(0)' > conftest.py", FIX, SUBMIT)
    ),
}
PLAN = [name for name, scenario in SCENARIOS.items() for _ in range(scenario.num)]


class Policy:
    """A Generator that follows the session's scenario, and says again what did not work."""

    def __init__(self, chat: ChatFormat, problems: Mapping[str, Problem]) -> None:
        self._chat, self._problems = chat, problems
        self._place: dict[str, int] = {}  # in its script, by session

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedChunk]:
        problem, scenario, _ = self.look_up(request.session_id)
        if scenario.no_sampler:
            raise RetryError("no sampler")
        script, place = scenario.script, self._place.get(request.session_id, 0)
        if place and script[place - 1] == FIX:
            seen = self._chat.decode(request.tokens[-40:])
            place -= FIXED not in seen
        place = min(place, len(script) - 1)
        self._place[request.session_id] = place + 1
        command = script[place]
        if command == FIX:
            command = f"{problem.repair.command} && echo {FIXED[:4]}''{FIXED[4:]}"
        tokens = self._chat.reply(command).astype(np.int32)
        num = len(tokens)
        logp = np.full(num, -0.5, np.float32)
        completion = Completion(
            tokens=tokens,
            sampler_logp=logp,
            candidates=CandidateSets.from_counts(np.ones(num, np.int64), tokens, logp),
            spans=(VersionSpan(version=1, start=0, end=num),),
            finish_reason=FinishReason.STOP,
        )
        yield GeneratedChunk(completion=completion, group="scripted", sampler_id="scripted-0")

    async def end_session(self, session_id: str) -> None:
        self._place.pop(session_id, None)

    def look_up(self, session_id: str) -> tuple[Problem, Scenario, int]:
        """The task, the scenario and the number of the attempt."""
        _, _, rest = session_id.split(".", 2)
        task_id, sample, attempt = rest.rsplit(".", 2)
        return self._problems[task_id], SCENARIOS[self.name_of(task_id, int(sample))], int(attempt)

    def name_of(self, task_id: str, sample: int) -> str:
        return PLAN[list(self._problems).index(task_id) + NUM_TASKS * sample]


class Doomed:
    """A sandbox that meets its end in the middle of its first command."""

    def __init__(self, sandbox: BubblewrapSandbox, kill: Callable[[int], None]) -> None:
        """`kill` is given the process id of all of it."""
        self._sandbox, self._kill, self._is_alive = sandbox, kill, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def exec(self, command: str, **options: Any) -> ExecResult:
        running = asyncio.ensure_future(self._sandbox.exec(command, **options))
        await asyncio.sleep(0)  # it is on its way
        if self._is_alive:
            self._is_alive = False
            self._kill(self._sandbox.pid)
        return await running


class Dangerous:
    """A pool some of whose sandboxes are doomed."""

    def __init__(
        self, pool: SandboxPool, num: int, scenario: Scenario, killed: Counter[str]
    ) -> None:
        """It is the first `num` that are."""
        self._pool, self._left, self._scenario, self._killed = pool, num, scenario, killed

    @contextlib.asynccontextmanager
    async def open(self, tree: Mapping[str, bytes]) -> AsyncIterator[Any]:
        async with self._pool.open(tree) as sandbox:
            self._left -= 1
            yield Doomed(sandbox, self._kill) if self._left >= 0 else sandbox

    def _kill(self, outer: int) -> None:
        (supervisor,) = children_of(outer)
        of_supervisor = self._scenario.kill == "supervisor"
        os.kill(supervisor if of_supervisor else outer, self._scenario.with_signal)
        self._killed["sandboxes_killed"] += 1


def _traces() -> set[str]:
    """What of this process is on the machine: after the day, nothing that was not there before."""
    gc.collect()
    return {
        *(f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        *(f"open file {name}" for name in _open_files()),
        *(f"process {child.pid}" for child in psutil.Process().children(recursive=True)),
        *(f"temporary file {name}" for name in os.listdir(tempfile.gettempdir())),
        *(f"task {task.get_name()}" for task in asyncio.all_tasks()),
    }


def _open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            found.append(f"{entry.name} {entry.readlink()}")
    return found


def _processes_of(uids: set[int]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid in uids:
                found.append(int(entry.name))
    return found


@pytest.fixture
def host() -> Host:
    try:
        return find_host()
    except BadInputError as error:
        pytest.skip(f"no sandboxes on this machine: {error}")


@pytest.fixture
def own_temporary(tmp_path, monkeypatch) -> None:
    """A directory for temporary files that nobody else uses."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)


def make_problems() -> dict[str, Problem]:
    """That many different tasks."""
    problems: dict[str, Problem] = {}
    for problem in islice(generate_problems("train", 0), 200):
        problems.setdefault(problem.task.task_id, problem)
    return dict(islice(problems.items(), NUM_TASKS))


async def play_day(
    pool: SandboxPool, rooms: SandboxPool, directory: Path
) -> tuple[dict[tuple[str, float | None], int], Counter[str]]:
    """How many episodes of which scenario ended with which reward; the producer's counters, and
    sandboxes_killed."""
    problems = make_problems()
    chat = ChatFormat.load(CHECKPOINT)
    policy = Policy(chat, problems)
    killed: Counter[str] = Counter()

    async def play(task: Any, *, session_id: str, **arguments: Any) -> Trajectory:
        _, scenario, attempt = policy.look_up(session_id)
        is_due = scenario.kill != "" and (scenario.always or not attempt)
        is_grading = scenario.kill == "grading"
        return await run_episode(
            task,
            session_id=session_id,
            generator=policy,
            chat=chat,
            sandboxes=Dangerous(pool, int(is_due and not is_grading), scenario, killed),
            grader=Grader(Dangerous(rooms, int(is_due and is_grading), scenario, killed)),
            limits=EPISODE,
            **arguments,
        )

    @contextlib.asynccontextmanager
    async def open_session(session_id: str, **_: Any) -> AsyncIterator[None]:
        yield

    spool = Spool(directory / "groups.sqlite")
    sampling = SamplingParams(max_new_tokens=2000)
    producer = Producer(
        EpisodesConfig(max_concurrent_evaluation=AT_ONCE, max_retries=1),
        tasks={"train": [problem.task for problem in problems.values()]},
        sampling=sampling,
        run_episode=play,
        open_session=open_session,
        spool=spool,
        retry_seconds=0.01,
    )
    day = Evaluation(
        split="train",
        num_tasks=NUM_TASKS,
        num_samples=NUM_SAMPLES,
        min_version=0,
        sampling=sampling,
    )
    ends: Counter[tuple[str, float | None]] = Counter()
    try:
        async for trajectory in producer.evaluate(day):
            sample = int(trajectory.session_id.rsplit(".", 2)[1])
            ends[policy.name_of(trajectory.task_id, sample), trajectory.reward] += 1
            assert (trajectory.reward is None) == bool(trajectory.failure)
    finally:
        spool.stop()
        spool.close()
    return dict(ends), producer.counters + killed


@pytest.fixture
def tell(capsys):
    """Says what the figures are, also where the test passes."""

    def tell(ends: Mapping[tuple[str, float | None], int], counters: Counter[str]) -> None:
        rewards = Counter()
        for (_, reward), num in ends.items():
            rewards["failures" if reward is None else f"reward {reward:g}"] += num
        with capsys.disabled():
            sys.stdout.write(f"\na day of {len(PLAN)} episodes: {dict(rewards)} {dict(counters)}\n")

    return tell


async def test_a_day(host, tmp_path, own_temporary, tell):
    assert len(PLAN) == NUM_TASKS * NUM_SAMPLES == 200
    before = _traces()
    memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = SandboxPool(AT_ONCE, LIMITS, host=host)
    rooms = SandboxPool(NUM_GRADERS, LIMITS, host=host)
    try:
        ends, counters = await play_day(pool, rooms, tmp_path)
    finally:
        uids = {uid.number for each in (pool, rooms) for uid in each._uids.values()}
        await pool.close()
        await rooms.close()

    tell(ends, counters)
    assert ends == {(name, s.reward): s.num for name, s in SCENARIOS.items()}
    num_failed = sum(s.num for s in SCENARIOS.values() if s.reward is FAILURE)
    in_command = [s for s in SCENARIOS.values() if s.kill in ("sandbox", "supervisor")]
    assert counters == {
        "episodes_completed": len(PLAN) - num_failed,
        "episodes_failed": num_failed,
        "sandboxes_killed": sum(s.num * (1 + s.always) for s in SCENARIOS.values() if s.kill),
        "episodes_retried": sum(s.num for s in in_command) + SCENARIOS["no sampler"].num,
    }

    for _ in range(100):  # the kernel takes a moment for what was killed
        if not _processes_of(uids):
            break
        await asyncio.sleep(0.05)
    assert not _processes_of(uids)
    assert len(uids) == (AT_ONCE + NUM_GRADERS if host.drop_uid else 0)
    assert not [g for p in host.cgroup_parents for g in p.glob(f"*-{os.getpid()}-*")]
    assert not _traces() - before
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib
    assert grown_kib < 128 << 10, "floods of 1 GB stay inside"
