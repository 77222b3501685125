"""Episode production with fake episodes: grouping, retries, drops, the pause, evaluations."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

from contracts.errors import BadInputError, RetryError
from contracts.types import EvaluationSample, Freshness, Purpose, SamplingParams
from sampler_fleet.config import EpisodesConfig
from sampler_fleet.episodes.base import SandboxError
from sampler_fleet.producer import Evaluation, Producer, episode_seed, task_at
from sampler_fleet.spool import Spool
from tests.sampler_fleet.fakes import make_task, make_trajectory

TASKS = {
    "train": [make_task(f"t{i}") for i in range(4)],
    "heldout": [make_task(f"h{i}", "heldout") for i in range(3)],
}


class Episodes:
    """A fake `run_episode` that counts; `outcome(session_id)` may raise or give a reward."""

    def __init__(self, outcome=lambda session_id: 1.0) -> None:
        self.outcome = outcome
        self.calls: list[tuple[str, str, SamplingParams, Purpose, int]] = []
        self.num_running = self.most_running = 0

    async def __call__(self, task, *, session_id, sampling, purpose, min_version):
        self.calls.append((task.task_id, session_id, sampling, purpose, min_version))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0.001)
            reward = self.outcome(session_id)
            return make_trajectory(session_id, task_id=task.task_id, reward=reward)
        finally:
            self.num_running -= 1


@contextlib.asynccontextmanager
async def any_place(session_id, *, purpose, min_version=0):
    yield


@contextlib.asynccontextmanager
async def producing(tmp_path, episodes: Episodes, *, run: bool = True, **config):
    spool = Spool(tmp_path / "groups.sqlite")
    settings = {"group_size": 3, "max_concurrent": 4, "queue_groups": 2, "max_retries": 2}
    producer = Producer(
        EpisodesConfig(**(settings | config)),
        tasks=TASKS,
        sampling=SamplingParams(top_p=0.9),
        run_episode=episodes,
        open_session=any_place,
        spool=spool,
        retry_seconds=0.0,
    )
    task = asyncio.create_task(producer.run()) if run else None
    try:
        yield producer, spool
    finally:
        if task:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        spool.close()


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def read_all(spool: Spool):
    return await read_groups(spool, spool.count()) if spool.count() else []


async def read_groups(spool: Spool, num: int):
    groups = []
    async for group in spool.follow(0):
        groups.append(group)
        if len(groups) == num:
            return groups


async def test_groups_are_complete_and_production_pauses_while_nobody_takes_them(tmp_path):
    episodes = Episodes()
    async with producing(tmp_path, episodes) as (producer, spool):
        await until(lambda: spool.last_sequence >= 2 and producer.num_in_flight == 0)
        await asyncio.sleep(0.05)
        paused_at = spool.last_sequence
        assert 2 <= paused_at <= 4, "two wait, and at most what was in flight came on top"
        assert episodes.most_running <= 4
        for group in await read_groups(spool, 2):
            assert len(group.trajectories) == 3
            assert {t.task_id for t in group.trajectories} == {group.task_id}
        producer.sent(paused_at)
        await until(lambda: spool.last_sequence >= paused_at + 2)


async def test_no_group_begins_that_the_trainer_would_refuse_as_too_old(tmp_path):
    def fresh(version: int, num_collected: int) -> Freshness:
        return Freshness(
            version=version, groups_per_update=2, num_collected=num_collected, staleness_limit=1
        )

    episodes, taken = Episodes(), 0

    def begun() -> list[int]:
        """The oldest version that each group may be drawn from."""
        first = [call for call in episodes.calls if call[1].split(".")[2] == "0"]
        return [call[4] for call in sorted(first, key=lambda call: int(call[1].split(".")[1]))]

    async with producing(tmp_path, episodes, run=False, queue_groups=99) as (producer, spool):

        async def take(num: int, version: int, num_collected: int) -> None:
            nonlocal taken
            taken += num
            producer.taken(taken)
            producer.wanted_fresh(fresh(version, num_collected))
            await asyncio.sleep(0.05)

        producer.wanted_fresh(fresh(5, 0))
        task = asyncio.create_task(producer.run())
        await until(lambda: spool.last_sequence == 4)
        await asyncio.sleep(0.05)
        assert begun() == [4, 4, 5, 5], "two for the update from version 5, two for that from 6"
        await take(1, 5, 1)
        assert len(begun()) == 4, "one is collected: what is ahead of the next is as before"
        await take(1, 5, 1)
        assert begun() == [4, 4, 5, 5, 5], "one was refused, so there is room for another"
        await take(1, 6, 0)
        assert begun() == [4, 4, 5, 5, 5, 6, 6], "an update later"
        producer.wanted_fresh(None)
        await until(lambda: len(begun()) >= 12)
        assert set(begun()[7:]) == {0}, "a trainer without a limit"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_every_attempt_is_a_session_with_a_seed_of_its_own(tmp_path):
    episodes = Episodes()
    async with producing(tmp_path, episodes, queue_groups=6) as (_, spool):
        await until(lambda: spool.last_sequence >= 6)
    sessions = [call[1] for call in episodes.calls]
    assert len(set(sessions)) == len(sessions)
    assert len({call[2].seed for call in episodes.calls}) == len(sessions)
    assert {call[2].top_p for call in episodes.calls} == {0.9}
    assert {call[3] for call in episodes.calls} == {Purpose.TRAIN}


@pytest.mark.parametrize("error", [RetryError("away"), SandboxError("no fork"), None])
async def test_what_the_infrastructure_lost_is_run_again_and_has_no_reward_of_0(tmp_path, error):
    failed = set()

    def outcome(session_id):
        name, _, attempt = session_id.rpartition(".")
        if attempt == "0":
            failed.add(name)
            if error:
                raise error
            return None
        return 1.0

    async with producing(tmp_path, Episodes(outcome)) as (producer, spool):
        await until(lambda: spool.last_sequence >= 1)
        (group,) = await read_groups(spool, 1)
        assert [t.reward for t in group.trajectories] == [1.0] * 3
        assert all(t.session_id.endswith(".1") for t in group.trajectories)
        assert producer.counters["episodes_retried"] >= 3
        assert producer.counters["episodes_failed"] == 0


async def test_an_episode_lost_for_good_leaves_its_group_and_a_group_of_one_is_dropped(tmp_path):
    def outcome(session_id):
        _, index, sample, _ = session_id.split(".")
        lost = {"0": "0", "1": "01"}.get(index, "")  # prompt 0 loses one sample, prompt 1 two
        if sample in lost:
            raise SandboxError("no memory")
        return float(int(sample) % 2)

    async with producing(tmp_path, Episodes(outcome)) as (producer, spool):
        await until(lambda: spool.last_sequence >= 2 and producer.counters["groups_dropped"])
        groups = await read_groups(spool, 2)
        by_prompt = {g.trajectories[0].session_id.split(".")[1]: g for g in groups}
        assert len(by_prompt["0"].trajectories) == 2
        assert "1" not in by_prompt
        assert producer.counters["episodes_failed"] == 3
        assert producer.counters["groups_dropped"] == 1


async def test_a_crash_is_counted_and_logged_and_does_not_stop_production(tmp_path, caplog):
    def outcome(session_id):
        if session_id.startswith("train.0.0."):
            raise ZeroDivisionError("a bug")
        return 1.0

    async with producing(tmp_path, Episodes(outcome)) as (producer, spool):
        await until(lambda: producer.counters["episodes_crashed"] == 3)
        await until(lambda: spool.last_sequence >= 2)
    assert any(record.exc_info for record in caplog.records)


async def test_a_restarted_gateway_goes_on_with_the_prompts_it_was_at(tmp_path):
    first, second = Episodes(), Episodes()
    async with producing(tmp_path, first) as (_, spool):
        await until(lambda: spool.last_sequence >= 2)
        cursor = spool.cursor
    async with producing(tmp_path, second) as (producer, spool):
        done = [int(g.trajectories[0].session_id.split(".")[1]) for g in await read_all(spool)]
        assert producer.backlog == spool.count() == spool.last_sequence
        await asyncio.sleep(0.03)
        assert second.calls == [], "the trainer has not taken what there is"
        producer.resumed(spool.last_sequence)
        await until(lambda: spool.last_sequence >= len(done) + 2)
        cut_off = sorted(set(range(cursor)) - set(done))
        await until(lambda: len(second.calls) >= 3 * len(cut_off))
    prompts = [int(call[1].split(".")[1]) for call in second.calls]
    assert sorted(set(prompts))[: len(cut_off)] == cut_off, "none is skipped"
    assert not {c[1] for c in first.calls} & {c[1] for c in second.calls}
    assert not {c[2].seed for c in first.calls} & {c[2].seed for c in second.calls}


async def test_a_log_read_again_from_its_start_does_not_stop_production(tmp_path):
    async with producing(tmp_path, Episodes(), run=False) as (producer, spool):
        for name in "abc":
            await spool.append(name, [make_trajectory(name)])
        spool.acknowledge(2)
        producer.resumed(0)
        assert producer.backlog == 1


async def test_a_slow_disk_does_not_let_production_run_ahead(tmp_path):
    async with producing(tmp_path, Episodes(), run=False) as (producer, spool):
        opened, append, waiting = asyncio.Event(), spool.append, []

        async def slow(task_id, *rest):
            waiting.append(task_id)
            await opened.wait()
            return await append(task_id, *rest)

        spool.append = slow
        task = asyncio.create_task(producer.run())
        await until(lambda: len(waiting) >= 2 and producer.num_in_flight == 0)
        await asyncio.sleep(0.05)
        assert len(waiting) <= 4
        opened.set()
        await until(lambda: spool.last_sequence == len(waiting))
        producer.sent(spool.last_sequence)
        await until(lambda: spool.last_sequence >= 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_was_acknowledged_does_not_hold_up_a_restarted_gateway(tmp_path):
    async with producing(tmp_path, Episodes()) as (producer, spool):
        await until(lambda: spool.last_sequence >= 2 and producer.num_in_flight == 0)
        await until(lambda: spool.last_sequence == producer.backlog)
        spool.acknowledge(spool.last_sequence)
        had = spool.last_sequence
    async with producing(tmp_path, Episodes()) as (_, spool):
        await until(lambda: spool.last_sequence >= had + 2)


async def test_a_trainer_that_went_back_finds_production_waiting(tmp_path):
    async with producing(tmp_path, Episodes(), run=False) as (producer, spool):
        for name in "abc":
            await spool.append(name, [make_trajectory(name)])
        producer.resumed(3)
        assert producer.backlog == 0
        producer.resumed(1)
        assert producer.backlog == 2
        producer.sent(3)
        assert producer.backlog == 0
        producer.resumed(0)
        producer.taken(1)
        producer.sent(3)
        assert producer.backlog == 2, "what it reports counts, not what was sent"


async def test_a_full_disk_ends_production(tmp_path):
    async with producing(tmp_path, Episodes(), run=False) as (producer, spool):

        async def full(*_):
            raise OSError(28, "no space left", "groups.sqlite")

        spool.append = full
        with pytest.raises(OSError, match="no space left"):
            await asyncio.wait_for(producer.run(), 5)


async def test_an_evaluation_scores_each_task_so_often_and_says_what_was_lost(tmp_path):
    def outcome(session_id):
        if ".h1.0." in session_id:
            raise RetryError("away")
        return 1.0

    episodes = Episodes(outcome)
    evaluation = Evaluation(
        split="heldout", num_tasks=2, num_samples=2, min_version=7, sampling=SamplingParams(seed=5)
    )
    async with producing(tmp_path, episodes, run=False) as (producer, spool):
        ended = [t async for t in producer.evaluate(evaluation)]
        assert Counter(t.task_id for t in ended) == {"h0": 2, "h1": 2}
        lost = [t for t in ended if t.reward is None]
        assert [(t.task_id, t.failure) for t in lost] == [("h1", "RetryError: away")]
        assert {(call[3], call[4]) for call in episodes.calls} == {(Purpose.EVALUATE, 7)}
        assert spool.count() == 0, "nothing to train on"
        every = dict.fromkeys(["h0", "h1", "h2"], 1)
        whole = Evaluation(
            split="heldout", num_tasks=0, num_samples=1, min_version=0, sampling=SamplingParams()
        )
        assert Counter([t.task_id async for t in producer.evaluate(whole)]) == every
        sessions = [call[1] for call in episodes.calls]
        assert len(set(sessions)) == len(sessions)


def named(*samples: tuple[str, int, int], seed: int = 0) -> Evaluation:
    wanted = tuple(EvaluationSample(task_id=t, sample=s, attempt=a) for t, s, a in samples)
    sampling = SamplingParams(seed=seed)
    return Evaluation(
        split="", num_tasks=0, num_samples=0, min_version=7, sampling=sampling, samples=wanted
    )


async def test_named_samples_are_played_once_each_of_either_split(tmp_path):
    def outcome(session_id):
        if ".t3.5." in session_id:
            raise RetryError("away")
        return 1.0

    episodes = Episodes(outcome)
    async with producing(tmp_path, episodes, run=False) as (producer, _):
        wanted = named(("h1", 0, 0), ("h1", 2, 1), ("t3", 5, 0))
        ended = [t async for t in producer.evaluate(wanted)]
        found = {(t.task_id, t.sample, t.reward) for t in ended}
        assert found == {("h1", 0, 1.0), ("h1", 2, 1.0), ("t3", 5, None)}
        assert len(episodes.calls) == 3, "a lost one is not played again here"
        assert producer.counters["episodes_failed"] == 1
        assert {(call[3], call[4]) for call in episodes.calls} == {(Purpose.EVALUATE, 7)}


async def test_the_seed_of_a_named_sample_follows_from_its_name(tmp_path):
    names = [("h1", 0, 0), ("h1", 1, 0), ("h1", 0, 1), ("h2", 0, 0)]

    async def seeds(producer, episodes, wanted):
        start = len(episodes.calls)
        assert len([t async for t in producer.evaluate(wanted)]) == len(wanted.samples)
        calls = episodes.calls[start:]
        return {call[1].split(".", 2)[2]: call[2].seed for call in calls}

    episodes = Episodes()
    async with producing(tmp_path, episodes, run=False) as (producer, _):
        first = await seeds(producer, episodes, named(*names, seed=3))
        again = await seeds(producer, episodes, named(*names[2:], seed=3))
        other = await seeds(producer, episodes, named(*names, seed=4))
    assert len(set(first.values())) == len(names)
    assert again.items() <= first.items()
    assert not set(first.values()) & set(other.values())
    assert len({call[1] for call in episodes.calls}) == len(episodes.calls)


async def test_an_unknown_task_of_an_evaluation_is_refused(tmp_path):
    async with producing(tmp_path, Episodes(), run=False) as (producer, _):
        with pytest.raises(BadInputError, match="tasks that the gateway has, found h9"):
            await anext(producer.evaluate(named(("h1", 0, 0), ("h9", 0, 0))))


async def test_an_abandoned_evaluation_stops_its_episodes(tmp_path):
    episodes = Episodes()
    evaluation = Evaluation(
        split="train", num_tasks=4, num_samples=50, min_version=0, sampling=SamplingParams()
    )
    async with producing(tmp_path, episodes, run=False) as (producer, _):
        trajectories = producer.evaluate(evaluation)
        await anext(trajectories)
        await trajectories.aclose()
        assert episodes.num_running == producer.num_in_flight == 0
        assert len(episodes.calls) < 200


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"split": "test"}, "split: expected heldout or train, found test"),
        ({"num_tasks": 4}, r"num_tasks \(0: all\): expected 0 to 3, found 4"),
        ({"num_samples": 0}, "num_samples: expected 1 to 10000, found 0"),
    ],
)
async def test_an_evaluation_that_cannot_be_is_refused(tmp_path, change, sentence):
    values = {"split": "heldout", "num_tasks": 1, "num_samples": 1, "min_version": 0}
    evaluation = Evaluation(**(values | {"sampling": SamplingParams()} | change))
    async with producing(tmp_path, Episodes(), run=False) as (producer, _):
        with pytest.raises(BadInputError, match=sentence):
            await anext(producer.evaluate(evaluation))


def test_each_epoch_visits_every_task_once_in_an_order_of_its_own():
    tasks = [make_task(str(i)) for i in range(50)]
    epochs = [[task_at(tasks, 50 * e + i, 3).task_id for i in range(50)] for e in range(2)]
    for epoch in epochs:
        assert sorted(epoch, key=int) == [str(i) for i in range(50)]
    assert epochs[0] != epochs[1]
    assert [task_at(tasks, i, 3) for i in range(50)] != [task_at(tasks, i, 4) for i in range(50)]


def test_seeds_fit_the_wire_and_are_the_same_everywhere():
    assert episode_seed("a") == episode_seed("a") != episode_seed("b")
    assert 0 <= episode_seed("a") < 2**63
