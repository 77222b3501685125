"""Episode production: which prompts run, how often, and where finished groups go.

Owns the number of episodes in flight, retries of what the infrastructure lost, grouping by prompt,
the pause while the trainer is behind, and evaluations. Must not know how an episode runs or where
its tokens come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from contracts.errors import BadInputError, RetryError
from contracts.types import (
    CandidateSets,
    Ending,
    EvaluationSample,
    Freshness,
    Purpose,
    SamplingParams,
    Trajectory,
    UpdateReport,
)
from sampler_fleet.autoscaler import Demand
from sampler_fleet.config import EpisodesConfig
from sampler_fleet.episodes.base import SandboxError, Task
from sampler_fleet.spool import Prompt, Spool

log = logging.getLogger(__name__)

SMOOTHING = 0.05  # of a session's seconds
RETRY_S = 0.5  # before the first retry; doubles up to 16 times that

_Play = Callable[[], Awaitable[Trajectory]]  # an episode of an evaluation


class RunEpisode(Protocol):
    """`episodes.agent.run_episode` with everything but the episode itself bound."""

    def __call__(
        self,
        task: Task,
        *,
        session_id: str,
        sampling: SamplingParams,
        purpose: Purpose,
        min_version: int,
    ) -> Awaitable[Trajectory]: ...


class OpenSession(Protocol):
    def __call__(
        self, session_id: str, *, purpose: Purpose, min_version: int = 0
    ) -> AbstractAsyncContextManager[None]:
        """A place on a sampler for as long as the block lasts; waits for one."""
        ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which tasks to score: `num_tasks` of a split (0: all), `num_samples` times each; or exactly
    `samples`, if there are any, of tasks of either split."""

    split: str
    num_tasks: int
    num_samples: int
    min_version: int
    sampling: SamplingParams
    samples: tuple[EvaluationSample, ...] = ()


@dataclass
class _Group:
    """The episodes of one prompt as they end."""

    task: Task
    prompt: Prompt
    min_version: int  # what is older would be refused by the trainer
    num_open: int
    trajectories: list[Trajectory] = field(default_factory=list)
    work: list[float] = field(default_factory=list)  # that each found when it started


def task_at(tasks: Sequence[Task], index: int, seed: int) -> Task:
    """The task of prompt `index`: every epoch is a permutation of its own, drawn from the seed."""
    epoch, position = divmod(index, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tasks[order[position]]


def episode_seed(session_id: str) -> int:
    """A seed that no other attempt has, 63 bits, the same wherever it is computed."""
    return int.from_bytes(hashlib.sha256(session_id.encode()).digest()[:8], "little") >> 1


class Producer:
    """Keeps episodes in flight and appends completed groups to the log."""

    def __init__(
        self,
        config: EpisodesConfig,
        *,
        tasks: dict[str, list[Task]],
        sampling: SamplingParams,
        run_episode: RunEpisode,
        open_session: OpenSession,
        spool: Spool,
        seed: int = 0,
        retry_seconds: float = RETRY_S,
    ) -> None:
        self._config = config
        self._tasks = tasks  # by split
        self._sampling = sampling
        self._run_episode = run_episode
        self._open_session = open_session
        self._spool = spool
        self._seed = seed
        self._retry_seconds = retry_seconds
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._evaluation_slots = asyncio.Semaphore(config.max_concurrent_evaluation)
        self._consumed = spool.last_sequence - spool.count()
        self._num_appending = 0
        self._num_begun = 0  # groups with open episodes
        self._freshness: Freshness | None = None  # None: the trainer takes groups of any age
        self._reports_taken = False
        self._room = asyncio.Event()
        self._num_evaluations = 0
        self.num_in_flight = 0  # episodes that have a place
        self._num_training = 0  # those of them that are trained on
        self._num_ended = 0  # trajectories of prompts with open episodes
        self._work_of: dict[int, float] = {}  # by sequence, of groups not trained on yet
        self._session_seconds: float | None = None
        self._update: UpdateReport | None = None
        self._update_work: float | None = None
        self.counters: Counter[str] = Counter()

    # Backpressure.

    @property
    def backlog(self) -> int:
        """Completed groups that the trainer has not taken."""
        return self._spool.last_sequence + self._num_appending - self._consumed

    def resumed(self, after: int) -> None:
        """A trainer (re)opened its stream: it has everything up to `after`, and no more."""
        self._consumed = max(min(after, self._spool.last_sequence), self._spool.acknowledged)
        self._room.set()

    def sent(self, sequence: int) -> None:
        """A group went out; it counts as taken unless the trainer reports that itself."""
        if not self._reports_taken:
            self._consume(sequence)

    def taken(self, sequence: int) -> None:
        """The trainer has taken everything up to `sequence` off its own queue."""
        self._reports_taken = True
        self._consume(sequence)

    def wanted_fresh(self, freshness: Freshness | None) -> None:
        """How old groups may be when the trainer comes to them; None: of any age."""
        self._freshness = freshness
        self._room.set()

    def _consume(self, sequence: int) -> None:
        self._consumed = max(self._consumed, min(sequence, self._spool.last_sequence))
        self._room.set()

    async def _wait_for_room(self) -> int:
        """Until a group may begin; the oldest version that it may be drawn from."""
        while (oldest := self._oldest_version()) is None:
            self._room.clear()
            await self._room.wait()
        return oldest

    def _oldest_version(self) -> int | None:
        """None: a group that begins now finds no room, or would be too old in its turn."""
        if self.backlog >= self._config.queue_groups:
            return None
        if self._freshness is None:
            return 0
        return self._freshness.oldest_version(self._num_begun + self.backlog)

    # What the autoscaler goes by.

    def update_done(self, report: UpdateReport) -> None:
        """The trainer made an update."""
        known = [self._work_of[n] for n in report.sequences if n in self._work_of]
        if known:
            self._update_work = sum(known) / len(known)
        newest = max(report.sequences, default=0)
        self._work_of = {n: work for n, work in self._work_of.items() if n > newest}
        self._update = report

    @property
    def update(self) -> UpdateReport | None:
        """The last that was reported."""
        return self._update

    def demand(self, num_queued: int) -> Demand:
        """`num_queued` sessions wait for a place."""
        report = self._update
        pace = None
        if report and report.num_taken and report.update_seconds > 0:
            pace = report.num_taken / report.update_seconds
        return Demand(
            num_queued=num_queued,
            backlog=self._backlog_trajectories,
            taken_per_second=pace,
            session_seconds=self._session_seconds,
            staleness=report.staleness if report else None,
            work=self._update_work,
        )

    @property
    def _backlog_trajectories(self) -> float:
        return self.backlog * self._config.group_size + self._num_ended

    # Training.

    async def run(self) -> None:
        """Produces groups until cancelled. An error of the log (a full disk) ends it."""
        try:
            async with asyncio.TaskGroup() as running:
                while True:
                    await self._start_group(running)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start_group(self, running: asyncio.TaskGroup) -> None:
        """Starts the episodes of the next prompt as slots become free."""
        await self._slots.acquire()  # first: a pause must be seen after the last slot
        min_version = await self._wait_for_room()
        prompt = self._spool.next_prompt()
        task = task_at(self._tasks["train"], prompt.number, self._seed)
        num = self._config.group_size
        group = _Group(task=task, prompt=prompt, min_version=min_version, num_open=num)
        self._num_begun += 1
        for sample in range(self._config.group_size):
            if sample:
                await self._slots.acquire()
            running.create_task(self._sample(group, f"{prompt.number}.{sample}"))

    async def _sample(self, group: _Group, name: str) -> None:
        """One of a prompt's episodes; the last to end closes the group."""
        try:
            trajectory = await self._attempt(
                group.task,
                name=name,
                sampling=self._sampling,
                purpose=Purpose.TRAIN,
                min_version=group.min_version,
                group=group,
            )
        finally:
            self._slots.release()
        if trajectory.reward is not None:
            group.trajectories.append(trajectory)
            self._num_ended += 1
        group.num_open -= 1
        if not group.num_open:
            await self._close_group(group)

    async def _close_group(self, group: _Group) -> None:
        """Appends a prompt's trajectories to the log, unless too few of them have a reward."""
        num = len(group.trajectories)
        self._num_begun -= 1
        if num < 2:
            self._num_ended -= num
            self._room.set()
            self._spool.drop(group.prompt)
            self.counters["groups_dropped"] += 1
            log.warning(
                "group of task %s dropped: %d of %d episodes have a reward",
                group.task.task_id,
                num,
                self._config.group_size,
            )
            return
        self._num_appending += 1  # a slow disk must not let production run ahead
        self._num_ended -= num
        try:
            sequence = await self._spool.append(
                group.task.task_id, group.trajectories, group.prompt
            )
        finally:
            self._num_appending -= 1
            self._room.set()
        self._work_of[sequence] = sum(group.work) / len(group.work)
        self.counters["groups_completed"] += 1

    async def _attempt(
        self,
        task: Task,
        *,
        name: str,
        sampling: SamplingParams,
        purpose: Purpose,
        min_version: int,
        group: _Group | None = None,
    ) -> Trajectory:
        """An episode, run again while the infrastructure loses it, up to the retry limit.

        Each attempt is a session of its own. What is lost for good comes back without a reward.
        An attempt of a `group` notes the sessions and the backlog that it found when it started,
        and its number is none that an earlier process has used.
        """
        trajectory, num_attempts = None, self._config.max_retries + 1
        before = group.prompt.num_starts * num_attempts if group else 0
        for attempt in range(num_attempts):
            if attempt:
                self.counters["episodes_retried"] += 1
                await asyncio.sleep(self._retry_seconds * 2 ** min(attempt - 1, 4))
            session_id = f"{purpose}.{name}.{before + attempt}"
            trajectory = await self._once(
                task,
                session_id=session_id,
                sampling=replace(sampling, seed=episode_seed(f"{self._seed}/{session_id}")),
                purpose=purpose,
                min_version=min_version,
                group=group,
            )
            if trajectory.reward is not None:
                return trajectory
        self.counters["episodes_failed"] += 1
        assert trajectory is not None, "at least one attempt was made"
        return trajectory

    async def _once(
        self,
        task: Task,
        *,
        session_id: str,
        sampling: SamplingParams,
        purpose: Purpose,
        min_version: int,
        group: _Group | None = None,
    ) -> Trajectory:
        """One attempt, as soon as there is a place for it."""
        async with self._open_session(session_id, purpose=purpose, min_version=min_version):
            with self._counted(purpose):
                if group:
                    group.work.append(self._num_training + self._backlog_trajectories)
                trajectory = await self._try(
                    task,
                    session_id=session_id,
                    sampling=sampling,
                    purpose=purpose,
                    min_version=min_version,
                )
        if trajectory.reward is not None:
            self.counters["episodes_completed"] += 1
        else:
            log.warning(
                "episode %s of task %s lost: %s", session_id, task.task_id, trajectory.failure
            )
        return trajectory

    @contextlib.contextmanager
    def _counted(self, purpose: Purpose) -> Iterator[None]:
        """An episode in flight, and how long it was."""
        is_training, start = purpose == Purpose.TRAIN, time.monotonic()
        self.num_in_flight += 1
        self._num_training += is_training
        try:
            yield
        finally:
            self.num_in_flight -= 1
            self._num_training -= is_training
        if is_training:
            seconds, known = time.monotonic() - start, self._session_seconds
            if known is not None:
                seconds = known + SMOOTHING * (seconds - known)
            self._session_seconds = seconds

    async def _try(self, task: Task, *, session_id: str, **arguments: Any) -> Trajectory:
        """One attempt; what went wrong with it is its record."""
        try:
            return await self._run_episode(task, session_id=session_id, **arguments)
        except (RetryError, SandboxError) as error:
            return _lost(task, session_id, error)
        except Exception as error:
            log.exception("episode %s of task %s crashed", session_id, task.task_id)
            self.counters["episodes_crashed"] += 1
            return _lost(task, session_id, error)

    # Evaluation.

    async def evaluate(self, evaluation: Evaluation) -> AsyncGenerator[Trajectory, None]:
        """Trajectories as they end; those the infrastructure lost have no reward.

        Raises:
            BadInputError: an unknown split, more tasks than it has, an unknown task, no evaluation
                group.
        """
        episodes = self._named(evaluation) if evaluation.samples else self._of_split(evaluation)

        async def in_turn(play: _Play) -> Trajectory:
            async with self._evaluation_slots:
                return await play()

        running = [asyncio.create_task(in_turn(play)) for play in episodes]
        try:
            for ended in asyncio.as_completed(running):
                yield await ended
        finally:
            for episode in running:
                episode.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _evaluation_number(self) -> str:
        """A part of session ids that no other evaluation has."""
        self._num_evaluations += 1
        return f"{self._spool.last_sequence}-{self._num_evaluations}"

    def _of_split(self, evaluation: Evaluation) -> list[_Play]:
        tasks, number = self._choose(evaluation), self._evaluation_number()
        return [
            functools.partial(
                self._attempt,
                task,
                name=f"{number}.{task.task_id}.{sample}",
                sampling=evaluation.sampling,
                purpose=Purpose.EVALUATE,
                min_version=evaluation.min_version,
            )
            for task in tasks
            for sample in range(evaluation.num_samples)
        ]

    def _named(self, evaluation: Evaluation) -> list[_Play]:
        tasks = {task.task_id: task for split in self._tasks.values() for task in split}
        for wanted in evaluation.samples:
            if wanted.task_id not in tasks:
                raise BadInputError(
                    "evaluation", expected="tasks that the gateway has", found=wanted.task_id
                )
        number, seed = self._evaluation_number(), evaluation.sampling.seed

        async def play(wanted: EvaluationSample) -> Trajectory:
            name = f"{wanted.task_id}.{wanted.sample}.{wanted.attempt}"
            trajectory = await self._once(
                tasks[wanted.task_id],
                session_id=f"{Purpose.EVALUATE}.{number}.{name}",
                sampling=replace(evaluation.sampling, seed=episode_seed(f"{seed}/{name}")),
                purpose=Purpose.EVALUATE,
                min_version=evaluation.min_version,
            )
            if trajectory.reward is None:
                self.counters["episodes_failed"] += 1
            return replace(trajectory, sample=wanted.sample)

        return [functools.partial(play, wanted) for wanted in evaluation.samples]

    def _choose(self, evaluation: Evaluation) -> list[Task]:
        tasks = self._tasks.get(evaluation.split)
        if tasks is None:
            raise BadInputError(
                "split", expected=" or ".join(sorted(self._tasks)), found=evaluation.split
            )
        for rule, value, least, most in (
            ("num_tasks (0: all)", evaluation.num_tasks, 0, len(tasks)),
            ("num_samples", evaluation.num_samples, 1, 10_000),
        ):
            if not least <= value <= most:
                raise BadInputError(rule, expected=f"{least} to {most}", found=value)
        return tasks[: evaluation.num_tasks or len(tasks)]


def _lost(task: Task, session_id: str, error: Exception) -> Trajectory:
    """The record of an episode that left none."""
    return Trajectory(
        task_id=task.task_id,
        session_id=session_id,
        group="",
        sampler_ids=(),
        tokens=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
        sampler_logp=np.zeros(0, np.float32),
        candidates=CandidateSets.empty(),
        spans=(),
        reward=None,
        ending=Ending.FAILURE,
        failure=f"{type(error).__name__}: {error}",
    )
