"""Episode production: which prompts run, how often, and where finished groups go.

Owns the number of episodes in flight, retries of what the infrastructure lost, grouping by prompt,
the pause while the trainer is behind, and evaluations. Must not know how an episode runs or where
its tokens come from.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from contracts.errors import BadInputError, RetryError
from contracts.types import CandidateSets, Ending, Purpose, SamplingParams, Trajectory
from sampler_fleet.config import EpisodesConfig
from sampler_fleet.episodes.base import SandboxError, Task
from sampler_fleet.spool import Spool

log = logging.getLogger(__name__)

RETRY_S = 0.5  # before the first retry; doubles up to 16 times that


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


class WaitUntilReady(Protocol):
    def __call__(self, purpose: Purpose, *, min_version: int = 0) -> Awaitable[None]: ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which tasks to score: `num_tasks` of a split (0: all), `num_samples` times each."""

    split: str
    num_tasks: int
    num_samples: int
    min_version: int
    sampling: SamplingParams


@dataclass
class _Group:
    """The episodes of one prompt as they end."""

    task: Task
    num_open: int
    trajectories: list[Trajectory]


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
        wait_until_ready: WaitUntilReady,
        spool: Spool,
        seed: int = 0,
        retry_seconds: float = RETRY_S,
    ) -> None:
        self._config = config
        self._tasks = tasks  # by split
        self._sampling = sampling
        self._run_episode = run_episode
        self._wait_until_ready = wait_until_ready
        self._spool = spool
        self._seed = seed
        self._retry_seconds = retry_seconds
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._evaluation_slots = asyncio.Semaphore(config.max_concurrent_evaluation)
        self._consumed = spool.last_sequence - spool.count()
        self._num_appending = 0
        self._reports_taken = False
        self._room = asyncio.Event()
        self._num_evaluations = 0
        self.num_in_flight = 0
        self.counters: Counter[str] = Counter()

    # Backpressure.

    @property
    def backlog(self) -> int:
        """Completed groups that the trainer has not taken."""
        return self._spool.last_sequence + self._num_appending - self._consumed

    def resumed(self, after: int) -> None:
        """A trainer (re)opened its stream: it has everything up to `after`, and no more."""
        self._consumed = min(after, self._spool.last_sequence)
        self._room.set()

    def sent(self, sequence: int) -> None:
        """A group went out; it counts as taken unless the trainer reports that itself."""
        if not self._reports_taken:
            self._consume(sequence)

    def taken(self, sequence: int) -> None:
        """The trainer has taken everything up to `sequence` off its own queue."""
        self._reports_taken = True
        self._consume(sequence)

    def _consume(self, sequence: int) -> None:
        self._consumed = max(self._consumed, min(sequence, self._spool.last_sequence))
        self._room.set()

    async def _wait_for_room(self) -> None:
        while self.backlog >= self._config.queue_groups:
            self._room.clear()
            await self._room.wait()

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
        await self._wait_for_room()
        await self._wait_until_ready(Purpose.TRAIN)
        index = self._spool.advance()
        task = task_at(self._tasks["train"], index, self._seed)
        group = _Group(task=task, num_open=self._config.group_size, trajectories=[])
        for sample in range(self._config.group_size):
            if sample:
                await self._slots.acquire()
            running.create_task(self._sample(group, f"{index}.{sample}"))

    async def _sample(self, group: _Group, name: str) -> None:
        """One of a prompt's episodes; the last to end closes the group."""
        try:
            trajectory = await self._attempt(
                group.task,
                name=name,
                sampling=self._sampling,
                purpose=Purpose.TRAIN,
                min_version=0,
            )
        finally:
            self._slots.release()
        if trajectory.reward is not None:
            group.trajectories.append(trajectory)
        group.num_open -= 1
        if group.num_open:
            return
        if len(group.trajectories) < 2:
            self.counters["groups_dropped"] += 1
            log.warning(
                "group of task %s dropped: %d of %d episodes have a reward",
                group.task.task_id,
                len(group.trajectories),
                self._config.group_size,
            )
            return
        self._num_appending += 1  # a slow disk must not let production run ahead
        try:
            await self._spool.append(group.task.task_id, group.trajectories)
        finally:
            self._num_appending -= 1
            self._room.set()
        self.counters["groups_completed"] += 1

    async def _attempt(
        self,
        task: Task,
        *,
        name: str,
        sampling: SamplingParams,
        purpose: Purpose,
        min_version: int,
    ) -> Trajectory:
        """An episode, run again while the infrastructure loses it, up to the retry limit.

        Each attempt is a session of its own. What is lost for good comes back without a reward.
        """
        trajectory = None
        for attempt in range(self._config.max_retries + 1):
            if attempt:
                self.counters["episodes_retried"] += 1
                await asyncio.sleep(self._retry_seconds * 2 ** min(attempt - 1, 4))
                await self._wait_until_ready(purpose, min_version=min_version)
            session_id = f"{purpose}.{name}.{attempt}"
            self.num_in_flight += 1
            try:
                trajectory = await self._run_episode(
                    task,
                    session_id=session_id,
                    sampling=replace(sampling, seed=episode_seed(f"{self._seed}/{session_id}")),
                    purpose=purpose,
                    min_version=min_version,
                )
            except (RetryError, SandboxError) as error:
                trajectory = _lost(task, session_id, error)
            except Exception as error:
                log.exception("episode %s of task %s crashed", session_id, task.task_id)
                self.counters["episodes_crashed"] += 1
                trajectory = _lost(task, session_id, error)
            finally:
                self.num_in_flight -= 1
            if trajectory.reward is not None:
                self.counters["episodes_completed"] += 1
                return trajectory
            log.warning(
                "episode %s of task %s lost: %s", session_id, task.task_id, trajectory.failure
            )
        self.counters["episodes_failed"] += 1
        assert trajectory is not None, "at least one attempt was made"
        return trajectory

    # Evaluation.

    async def evaluate(self, evaluation: Evaluation) -> AsyncGenerator[Trajectory, None]:
        """Trajectories as they end; those the infrastructure lost have no reward.

        Raises:
            BadInputError: an unknown split, more tasks than it has, no evaluation group.
        """
        tasks = self._choose(evaluation)
        await self._wait_until_ready(Purpose.EVALUATE, min_version=evaluation.min_version)
        self._num_evaluations += 1
        number = f"{self._spool.last_sequence}-{self._num_evaluations}"

        async def sample(task: Task, name: str) -> Trajectory:
            async with self._evaluation_slots:
                return await self._attempt(
                    task,
                    name=name,
                    sampling=evaluation.sampling,
                    purpose=Purpose.EVALUATE,
                    min_version=evaluation.min_version,
                )

        running = [
            asyncio.create_task(sample(task, f"{number}.{task.task_id}.{index}"))
            for task in tasks
            for index in range(evaluation.num_samples)
        ]
        try:
            for ended in asyncio.as_completed(running):
                yield await ended
        finally:
            for episode in running:
                episode.cancel()
            await asyncio.gather(*running, return_exceptions=True)

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
