import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import jax
import numpy as np
import pytest
from rich.console import Console

from contracts.codec import group_to_pb, trajectory_to_pb
from contracts.errors import AuthError, BadInputError
from contracts.pb import (
    fleet_pb2,
    fleet_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from contracts.types import CandidateSets, Ending, Trajectory, TrajectoryGroup, VersionSpan
from trainer_jax.config import EvaluationSection, load_run
from trainer_jax.evaluate import evaluate
from trainer_jax.hf import load_checkpoint, save_checkpoint
from trainer_jax.loop import refusal, staleness, train
from trainer_jax.metrics import read_metrics
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.parameters import init_params
from trainer_jax.recorded import read_recorded
from trainer_jax.rollouts import GroupStream, RolloutClient
from trainer_jax.run_directory import RunDirectory
from trainer_jax.step import PendingMetrics

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    tie_word_embeddings=True,
)
RUN_FILE = """
[run]
name = "loop"
directory = "{directory}"
gateway = "{address}"
weights = "{address}"
[model]
checkpoint = "{checkpoint}"
[optimizer]
lr = 1e-3
[train]
updates = 5
prompts_per_update = 2
row_tokens = 64
micro_rows = 2
candidate_buckets = [4]
checkpoint_every = 2
[evaluation]
before = false
after = false
[[fleet.groups]]
name = "a"
weight_format = "bf16"
[[fleet.groups]]
name = "b"
weight_format = "nvfp4"
"""


def trajectory(seed: int, *, version: int, reward: float | None, group: str = "a") -> Trajectory:
    """4 prompt tokens and 6 drawn ones from 4 candidates of equal probability."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(MODEL.vocab_size)[:4] for _ in range(6)]).astype(np.int32)
    logp = np.full(24, np.log(0.25), np.float32)
    return Trajectory(
        task_id=f"task-{seed // 100}",
        session_id=f"s{seed}",
        group=group,
        sampler_ids=(f"{group}-0",),
        tokens=np.concatenate([rng.integers(0, 64, 4), ids[:, 0]]).astype(np.int32),
        loss_mask=np.array([False] * 4 + [True] * 6),
        sampler_logp=logp[:6],
        candidates=CandidateSets.from_counts(np.full(6, 4), ids.reshape(-1), logp),
        spans=(VersionSpan(version=version, start=4, end=10),),
        reward=reward,
        ending=Ending.FAILURE if reward is None else Ending.SUBMITTED,
        num_turns=1,
    )


def group_at(sequence: int, version: int) -> TrajectoryGroup:
    return TrajectoryGroup(
        sequence=sequence,
        task_id=f"task-{sequence}",
        trajectories=tuple(
            trajectory(100 * sequence + i, version=version, reward=float(i % 2), group="ab"[i % 2])
            for i in range(4)
        ),
    )


class FakeGateway(
    rollout_pb2_grpc.RolloutServicer,
    fleet_pb2_grpc.FleetServicer,
    weights_pb2_grpc.WeightsServicer,
):
    """Gateway and weight service in one: groups are made as they are asked for."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.streams: list[int] = []
        self.acks: list[tuple[int, int]] = []
        self.freshness: list[rollout_pb2.Freshness | None] = []  # of each
        self.taken = 0
        self.queue_groups = 1  # less than an update takes: progress must not depend on it
        self.evaluations: list[rollout_pb2.EvaluateRequest] = []
        self.reports: list[fleet_pb2.UpdateReport] = []
        self.fails_reports = False
        self.break_after = 10**9  # groups per stream
        self.refuse_at = 10**9  # sequence
        self.refuse_with = grpc.StatusCode.INVALID_ARGUMENT
        self.version_of: Callable[[int], int] = lambda _: self.published[-1]
        self.change: Callable[[TrajectoryGroup], TrajectoryGroup] = lambda group: group
        self.evaluate: Callable[[int], list[Trajectory]] = lambda _: []

    def Publish(self, request_iterator, context):
        version = next(request_iterator).header.version
        assert sum(len(r.data) for r in request_iterator) > 0
        self.published.append(version)
        return weights_pb2.PublishReply(version=version)

    def Status(self, request, context):
        if isinstance(request, weights_pb2.StatusRequest):
            return weights_pb2.StatusReply(latest_version=max(self.published, default=0))
        return fleet_pb2.StatusReply(episodes_in_flight=3, counters={"episodes_failed": 1})

    def StreamGroups(self, request, context):
        self.streams.append(request.after)
        self.taken = request.after
        for number, sequence in enumerate(itertools.count(request.after + 1)):
            while sequence - self.taken > self.queue_groups and context.is_active():
                time.sleep(0.005)
            if number >= self.break_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            if sequence >= self.refuse_at:
                context.abort(self.refuse_with, "no more")
            yield group_to_pb(self.change(group_at(sequence, self.version_of(sequence))))

    def AckGroups(self, request, context):
        self.acks.append((request.sequence, request.taken))
        self.freshness.append(request.freshness if request.HasField("freshness") else None)
        self.taken = max(self.taken, request.taken)
        return rollout_pb2.AckGroupsReply()

    def ReportUpdate(self, request, context):
        self.reports.append(request)
        if self.fails_reports:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older gateway")
        return fleet_pb2.UpdateReportReply()

    def Evaluate(self, request, context):
        self.evaluations.append(request)
        for item in self.evaluate(len(self.evaluations)):
            if item is None:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            yield trajectory_to_pb(item)


@pytest.fixture
def gateway():
    fake = FakeGateway()
    server = grpc.server(ThreadPoolExecutor(8))
    rollout_pb2_grpc.add_RolloutServicer_to_server(fake, server)
    fleet_pb2_grpc.add_FleetServicer_to_server(fake, server)
    weights_pb2_grpc.add_WeightsServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(0).wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    save_checkpoint(path, MODEL, init_params(MODEL, jax.random.key(0)))
    return path


@pytest.fixture
def run(gateway, checkpoint, tmp_path):
    """Runs the loop in this process and returns how it ended."""
    path = tmp_path / "run.toml"
    directory = tmp_path / "run"
    path.write_text(
        RUN_FILE.format(directory=directory, address=gateway.address, checkpoint=checkpoint)
    )

    def run(*overrides: str, mode="new", stop=lambda: False) -> str:
        config = load_run(path, overrides)
        opened = RunDirectory(directory, mode, config.sections)
        try:
            with open("/dev/null", "w") as null:
                console = Console(file=null)
                return train(config, opened, console=console, stop_requested=stop)
        finally:
            opened.close()

    run.directory = directory
    return run


def sequences(records) -> list[list[int]]:
    return [record["sequences"] for record in records]


def test_updates_take_groups_in_order_and_publish_what_they_make(run, gateway, checkpoint):
    gateway.break_after = 3  # the stream is lost again and again
    assert run() == "finished"
    records = read_metrics(run.directory)
    assert sequences(records) == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert [r["version"] for r in records] == [2, 3, 4, 5, 6]
    assert gateway.published[0] == 1 and gateway.published[-1] == 6
    assert gateway.published == sorted(set(gateway.published))
    assert len(gateway.streams) > 2
    for record in records:
        assert record["reward"] == 0.5
        assert record["grad_norm"] > 0 and record["kl"] > 0
        assert record["group/a/kl"] > 0 and record["group/b/kl"] > 0
        assert record["fleet/episodes_in_flight"] == 3
    before, after = load_checkpoint(checkpoint)[1], load_checkpoint(run.directory / "final")[1]
    assert not np.allclose(before["embed"], after["embed"])


def test_every_update_is_reported_to_the_gateway(run, gateway):
    run()
    assert [report.step for report in gateway.reports] == [1, 2, 3, 4, 5]
    assert [list(report.sequences) for report in gateway.reports][:2] == [[1, 2], [3, 4]]
    assert sum(report.num_taken for report in gateway.reports) >= 5 * 2 * 2
    for report, record in zip(gateway.reports, read_metrics(run.directory), strict=True):
        assert report.version == record["version"]
        assert report.kl == pytest.approx(record["kl"])
        assert {group.group for group in report.groups} == {"a", "b"}
        assert report.groups[0].kl == pytest.approx(record["group/a/kl"])
        assert report.update_seconds > 0


def test_a_gateway_that_takes_no_reports_is_trained_with(run, gateway):
    gateway.fails_reports = True
    assert run() == "finished"
    assert len(gateway.reports) == 5


def test_only_durable_groups_are_forgotten(run, gateway):
    run()
    taken = [taken for _, taken in gateway.acks]
    assert taken == sorted(taken) and set(range(1, 10)) <= set(taken)
    durable = [durable for durable, _ in gateway.acks]
    assert durable == sorted(durable) and set(durable) <= {0, 4, 8}
    assert all(durable <= taken for durable, taken in gateway.acks)


def test_a_crash_costs_only_what_no_checkpoint_covers(run, gateway):
    gateway.refuse_at = 8
    with pytest.raises(BadInputError, match="no more"):
        run()
    first = read_metrics(run.directory)
    newest = gateway.published[-1]
    gateway.refuse_at = 10**9
    gateway.streams.clear()

    assert run(mode="resume") == "finished"
    assert gateway.streams[0] == 4, "groups after the checkpoint are delivered again"
    records = read_metrics(run.directory)
    assert records[:2] == first[:2]
    assert sequences(records) == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert records[2]["version"] > newest


def test_recorded_updates_are_of_the_run_as_it_went(run):
    """An update that is made again is recorded again, or no longer."""

    def recorded() -> list[int]:
        updates, records = list(read_recorded(run.directory)), read_metrics(run.directory)
        for update in updates:
            record = records[update.step - 1]
            assert update.version == record["version"] - 1
            assert [group.sequence for group in update.groups] == record["sequences"][:1]
            assert len(update.trained) == 4 and None not in update.trained
        return [update.step for update in updates]

    settings = ("train.updates=3", "train.record_groups=1")
    assert run(*settings, "train.record_every=3") == "finished"
    assert recorded() == [1, 3]
    first = read_metrics(run.directory)[2]["version"]
    for every, left in ((3, [1, 3]), (2, [1])):
        shutil.rmtree(run.directory / "checkpoints" / "3")
        assert run(*settings, f"train.record_every={every}", mode="resume") == "finished"
        assert read_metrics(run.directory)[2]["version"] > first
        assert recorded() == left


def test_nothing_is_recorded_unless_asked_for(run):
    run("train.updates=1")
    assert not (run.directory / "trajectories").exists()


def test_a_resumed_run_computes_what_an_unbroken_one_does(run, gateway, tmp_path):
    gateway.version_of = lambda _: 1
    run()
    unbroken = read_metrics(run.directory)
    run.directory.rename(tmp_path / "unbroken")
    gateway.published.clear()

    run("train.updates=2")
    run(mode="resume")
    records = read_metrics(run.directory)
    for name in ("kl", "grad_norm", "entropy"):
        np.testing.assert_allclose(
            [r[name] for r in records], [r[name] for r in unbroken], rtol=1e-5, err_msg=name
        )


def test_a_stop_is_clean_and_resumable(run, gateway):
    def stop() -> bool:
        return gateway.taken >= 3

    assert run("train.updates=1000", stop=stop) == "interrupted"
    steps = len(read_metrics(run.directory))
    assert 1 <= steps < 1000
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("interrupted", steps)
    assert run(f"train.updates={steps + 1}", mode="resume") == "finished"
    assert sequences(read_metrics(run.directory))[-1] == [2 * steps + 1, 2 * steps + 2]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_staleness_limit_drops_older_groups(run, gateway, limit):
    gateway.version_of = lambda sequence: 1 if sequence % 2 else max(gateway.published)
    assert run(f"train.staleness_limit={limit}", "train.updates=3") == "finished"
    records = read_metrics(run.directory)
    assert all(record["staleness/max"] <= limit for record in records)
    assert records[-1]["dropped/stale_groups"] > 0
    said = [(f.version, f.num_collected) for f in gateway.freshness]
    assert said == sorted(said)
    assert {version for version, _ in said} == {1, 2, 3}
    assert {(f.groups_per_update, f.staleness_limit) for f in gateway.freshness} == {(2, limit)}


def test_without_a_staleness_limit_groups_of_any_age_are_wanted(run, gateway):
    assert run("train.updates=2") == "finished"
    assert set(gateway.freshness) == {None}


def spoiled(group: TrajectoryGroup) -> TrajectoryGroup:
    first = group.trajectories[0]
    logp = np.full_like(first.sampler_logp, np.nan)
    changed = dataclasses.replace(first, sampler_logp=logp)
    return dataclasses.replace(group, trajectories=(changed, *group.trajectories[1:]))


def test_a_bad_record_costs_its_group(run, gateway):
    gateway.change = lambda group: spoiled(group) if group.sequence == 3 else group
    assert run("train.updates=3") == "finished"
    records = read_metrics(run.directory)
    assert sequences(records) == [[1, 2], [4, 5], [6, 7]]
    assert records[-1]["dropped/refused_groups"] == 1


def test_many_bad_records_stop_the_run(run, gateway):
    gateway.change = lambda group: spoiled(group) if group.sequence > 2 else group
    with pytest.raises(BadInputError, match="from sampler a-0 of group a"):
        run("train.updates=3")
    assert sequences(read_metrics(run.directory)) in ([], [[1, 2]])


def test_refusals_are_named():
    group = group_at(1, version=3)
    assert staleness(group, 5) == 2
    assert refusal(group, version=5, limit=None, refill=False) == ""
    assert refusal(group, version=5, limit=2, refill=True) == ""
    assert refusal(group, version=5, limit=1, refill=False) == "stale_groups"
    equal = dataclasses.replace(group, trajectories=group.trajectories[:1] * 2)
    assert refusal(equal, version=3, limit=None, refill=True) == "equal_groups"


def test_lost_evaluation_episodes_are_run_again(gateway):
    def episodes(call: int) -> list[Trajectory | None]:
        def one(task, sample, reward):
            values = trajectory(task * 100 + sample, version=2, reward=reward)
            return dataclasses.replace(values, task_id=f"task-{task}")

        if call == 1:  # one failure, then the stream breaks
            return [one(1, 0, 1.0), one(1, 1, None), one(2, 0, 0.0), None]
        return [one(task, sample, float(task == 1)) for task in (1, 2) for sample in (0, 1)]

    gateway.evaluate = episodes
    client = RolloutClient(gateway.address, "")
    section = EvaluationSection(num_tasks=2, num_samples=2)
    counts = []
    result = evaluate(client, section, version=2, progress=counts.append)
    client.close()
    assert len(gateway.evaluations) == 2
    assert {request.min_version for request in gateway.evaluations} == {2}
    assert all(request.sampling.top_p == 1 for request in gateway.evaluations)
    assert result.pass_at[1].value == 0.5 and 4 not in result.pass_at
    assert (result.infrastructure_failures, result.missing_samples) == (1, 0)
    assert counts[-1] == 4


def test_an_extended_run_is_evaluated_anew(run, gateway):
    def episodes(_: int) -> list[Trajectory | None]:
        return [trajectory(i, version=max(gateway.published), reward=1.0) for i in range(4)]

    gateway.evaluate = episodes

    def after() -> tuple[int, int | None]:
        summary = json.loads((run.directory / "summary.json").read_text())
        evaluation = summary["heldout"]["after"]
        return summary["updates"], evaluation and evaluation["version"]

    settings = ("evaluation.after=true", "evaluation.num_tasks=1")
    assert run(*settings, "train.updates=2") == "finished"
    assert after() == (2, 3)
    assert run(*settings, "train.updates=2", mode="resume") == "finished"
    assert (after(), len(gateway.evaluations)) == ((2, 3), 1), "nothing has changed since"

    gateway.published.clear()  # another store: versions grow all the same
    stop = lambda: len(gateway.published) > 2  # noqa: E731
    assert run(*settings, "train.updates=1000", mode="resume", stop=stop) == "interrupted"
    updates, version = after()
    assert updates > 2 and version is None, "the policy of update 2 is not this one"
    assert run(*settings, f"train.updates={updates + 1}", mode="resume") == "finished"
    assert after() == (updates + 1, gateway.published[-1])
    assert len(gateway.evaluations) == 2


def test_a_gradient_that_is_not_finite_is_one_sentence_and_no_checkpoint(run, monkeypatch):
    read = PendingMetrics.read

    def broken(pending):
        metrics = read(pending)
        if len(read_metrics(run.directory)) == 3:
            raise FloatingPointError("grad_norm nan")
        return metrics

    monkeypatch.setattr(PendingMetrics, "read", broken)
    with pytest.raises(
        BadInputError, match=r"update 4: .*lower optimizer\.lr, then --resume.* nan"
    ):
        run()
    monkeypatch.undo()
    saved = {step.name for step in (run.directory / "checkpoints").iterdir()}
    assert saved == {"2"}
    assert run("optimizer.lr=1e-5", mode="resume") == "finished"
    assert len(read_metrics(run.directory)) == 5


def test_a_refused_stream_is_not_dialled_again(gateway):
    gateway.refuse_with = grpc.StatusCode.UNAUTHENTICATED
    gateway.refuse_at = 1
    client = RolloutClient(gateway.address, "")
    groups = GroupStream(client, cursor=0)
    with pytest.raises(AuthError, match="no more"):
        for _ in range(100):
            groups.get(0.1)
    groups.close()
    client.close()
    assert groups.num_reconnects == 0
