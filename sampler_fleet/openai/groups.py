"""Groups of sessions: G attempts at one task, which end as one entry of the trajectory log.

Owns which sessions are open, how they end (judged, idle, out of time), and what becomes of their
group: it is appended, as the producer's are, unless fewer than two of its sessions have a reward.
Must not know HTTP, nor what is said in a session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from contracts.errors import check_name
from contracts.types import Trajectory
from sampler_fleet.openai.refusal import Refusal, ended
from sampler_fleet.openai.request import Outcome
from sampler_fleet.openai.session import Policy, Session
from sampler_fleet.producer import episode_seed
from sampler_fleet.spool import Spool

log = logging.getLogger(__name__)

MAX_SESSIONS = 4096
GROUP_S = 24 * 3600.0  # then the sessions that are still open end
SWEEP_S = 1.0
MAX_ENDED = 4096  # groups, for clients that come again
BEHIND_S = 10  # until somebody who was refused may come back


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is open at once and for how long, in seconds; groups wait while `is_behind`.

    The sessions of the last `max_ended` groups stay known.
    """

    group_size: int
    idle_s: float
    group_s: float = GROUP_S
    max_sessions: int = MAX_SESSIONS
    max_ended: int = MAX_ENDED
    is_behind: Callable[[], bool] = lambda: False


@dataclass(kw_only=True)
class Group:
    """The sessions of one task. `done` gets the group's sequence, 0 if it was dropped."""

    group_id: str
    task_id: str
    opened: float
    names: tuple[str, ...]  # of all its sessions
    sessions: dict[str, Session]  # that are open
    done: asyncio.Future[int]
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # as they were judged
    trajectories: list[Trajectory] = field(default_factory=list)


class Groups:
    """All of them. Everything runs on one event loop; `run` beside the rest."""

    def __init__(
        self,
        policy: Policy,
        spool: Spool,
        limits: Limits,
        *,
        seed: int,
        counters: Counter[str],
        new_id: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`new_id` gives names that are never given twice, and that nobody guesses.

        Groups and sessions have them: whoever knows one session does not know its siblings.
        """
        self._policy, self._spool, self._limits = policy, spool, limits
        self._seed, self._counters = seed, counters
        self._new_id, self._clock = new_id, clock
        self._groups: dict[str, Group] = {}
        self._of: dict[str, Group] = {}  # by session
        self._ended: deque[Group] = deque()
        self._complete: asyncio.Queue[Group] = asyncio.Queue()

    def open(self, task_id: str) -> Group:
        """G sessions that nobody has spoken in.

        Raises:
            BadInputError: a task id that no name can be.
            Refusal: too many are open, or the trainer is behind.
        """
        check_name("task_id", task_id)
        num_open = sum(len(group.sessions) for group in self._groups.values())
        if num_open + self._limits.group_size > self._limits.max_sessions:
            sentence = f"{num_open} sessions are open, of {self._limits.max_sessions} at most."
            raise Refusal(429, "too_many_sessions", sentence, again_s=BEHIND_S)
        if self._limits.is_behind():
            sentence = "The trainer has groups enough to train on; open this one later."
            raise Refusal(429, "trainer_behind", sentence, again_s=BEHIND_S)
        group_id = self._new_id()
        size = self._limits.group_size
        names = tuple(f"openai.{group_id}.{self._new_id()}" for _ in range(size))
        group = Group(
            group_id=group_id,
            task_id=task_id,
            opened=self._clock(),
            names=names,
            sessions={name: self._session(name) for name in names},
            done=asyncio.get_running_loop().create_future(),
        )
        self._groups[group_id] = group
        self._of |= dict.fromkeys(names, group)
        self._counters["openai_groups_opened"] += 1
        return group

    def session(self, session_id: str) -> Session:
        """An open session. Raises Refusal."""
        group = self._group_of(session_id)
        if session_id not in group.sessions:
            raise ended()
        return group.sessions[session_id]

    async def finish(self, session_id: str, outcome: Outcome) -> Group:
        """Ends a session as it was judged; whoever ends a group's last waits until it is durable.

        The same outcome again changes nothing, also when the group has ended.

        Raises:
            Refusal: no such session, one that has ended another way or belongs to another group, a
                reward for a session without a reply.
        """
        group = self._group_of(session_id)
        if outcome.group not in (None, group.group_id):
            sentence = f"The session is one of group {group.group_id}."
            raise Refusal(409, "another_group", sentence, param="group")
        if session_id in group.sessions:
            self._judge(group, session_id, outcome)
            await self._policy.end_session(session_id)
        else:
            known = group.outcomes.get(session_id)
            if known is None or known.judged != outcome.judged:
                raise Refusal(409, "session_ended", "The session has ended in another way.")
        if not group.sessions:
            await asyncio.shield(group.done)
        return group

    async def run(self) -> None:
        """Ends what is idle or out of time, and appends complete groups, until cancelled.

        Raises:
            OSError: the disk of the trajectory log is full.
        """
        try:
            async with asyncio.TaskGroup() as jobs:
                jobs.create_task(self._sweep())
                jobs.create_task(self._append())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _session(self, name: str) -> Session:
        return Session(
            name,
            self._policy,
            seed=episode_seed(f"{self._seed}/{name}"),
            counters=self._counters,
            clock=self._clock,
        )

    def _group_of(self, session_id: str) -> Group:
        group = self._of.get(session_id)
        if group is None:
            sentence = (
                "There is no such session: its group ended long ago, or was of another gateway."
            )
            raise Refusal(404, "session_not_found", sentence)
        return group

    def _judge(self, group: Group, session_id: str, outcome: Outcome) -> None:
        session = group.sessions[session_id]
        reward, ending = outcome.judged
        if reward is None:
            self._counters["openai_sessions_failed"] += 1
        elif not session.num_turns:
            sentence = "A session without a reply can't have a reward; finish it with null."
            raise Refusal(409, "session_empty", sentence, param="reward")
        else:
            trajectory = session.trajectory(task_id=group.task_id, reward=reward, ending=ending)
            group.trajectories.append(trajectory)
            self._counters["openai_sessions_finished"] += 1
        group.outcomes[session_id] = outcome
        self._end(group, session_id)

    def _end(self, group: Group, session_id: str) -> None:
        group.sessions.pop(session_id).end()
        if not group.sessions:
            self._complete.put_nowait(group)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, self._limits.idle_s / 4))
            now = self._clock()
            for group in tuple(self._groups.values()):
                is_late = now - group.opened > self._limits.group_s
                for name, session in tuple(group.sessions.items()):
                    is_idle = now - session.last_active > self._limits.idle_s
                    if not (is_late or (is_idle and not session.is_running)):
                        continue
                    kind = "late" if is_late else "idle"
                    self._counters[f"openai_sessions_{kind}"] += 1
                    log.warning("session %s of task %s ended: %s", name, group.task_id, kind)
                    self._end(group, name)
                    await self._policy.end_session(name)

    async def _append(self) -> None:
        while True:
            group = await self._complete.get()
            num, sequence = len(group.trajectories), 0
            if num < 2:
                self._counters["openai_groups_dropped"] += 1
                log.warning(
                    "group of task %s dropped: %d of %d sessions have a reward",
                    group.task_id,
                    num,
                    self._limits.group_size,
                )
            else:
                sequence = await self._spool.append(group.task_id, group.trajectories)
                self._counters["openai_groups_completed"] += 1
            group.trajectories.clear()
            group.done.set_result(sequence)
            del self._groups[group.group_id]
            self._ended.append(group)
            if len(self._ended) > self._limits.max_ended:
                for name in self._ended.popleft().names:
                    del self._of[name]
