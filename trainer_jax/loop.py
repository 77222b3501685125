"""The training loop: asynchronous, one update after the other, whoever made the trajectories.

Owns the order of things (collect, update, publish, record, save), what is dropped for staleness,
and the end of a run. Must not know precisions, engines or how episodes run; arithmetic belongs to
`trainer_jax.learner`. Synchronous training is the same loop with a staleness limit of 0.

While update n computes, the loop writes the metrics of update n - 1, publishes its weights and
collects the groups of update n + 1.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from contracts.errors import BadInputError, RetryError
from contracts.types import Freshness, TrajectoryGroup
from trainer_jax.advantages import has_signal
from trainer_jax.checkpoint import Position
from trainer_jax.cluster import Cluster
from trainer_jax.collapse import CollapseWatch, is_collapsed, observe_record
from trainer_jax.config import RunConfig
from trainer_jax.evaluate import evaluate_while, write_evaluation
from trainer_jax.learner import PendingUpdate
from trainer_jax.live import LiveView
from trainer_jax.metrics import MetricsLog, Record, batch_statistics
from trainer_jax.recorded import RecordedUpdate, forget_after, is_recorded, write_recorded
from trainer_jax.replica import Replica
from trainer_jax.report import write_report
from trainer_jax.rollouts import GroupStream
from trainer_jax.run_directory import RunDirectory
from trainer_jax.services import Services
from trainer_jax.summary import (
    build_summary,
    is_training,
    print_summary,
    training_groups,
    write_summary,
)
from trainer_jax.update_report import update_report

log = logging.getLogger(__name__)

POLL_S = 0.1
MAX_REFUSED = 5  # groups in a row with a record that cannot be trained on


class StopRequestedError(Exception):
    """Somebody asked the run to stop while it was waiting."""


@dataclass(frozen=True, kw_only=True)
class _Unsettled:
    """An update that was dispatched and whose metrics are not written yet."""

    step: int
    version: int
    update: PendingUpdate
    record: Record
    seconds: float  # since the dispatch before: the pace of the run
    kept: Sequence[TrajectoryGroup]  # the first of its groups, if it is recorded


def staleness(group: TrajectoryGroup, version: int) -> int:
    """Versions between the trainer's `version` and the oldest token of a group."""
    oldest = min((span.version for t in group.trajectories for span in t.spans), default=version)
    return version - oldest


def refusal(group: TrajectoryGroup, *, version: int, limit: int | None, refill: bool) -> str:
    """Why a group is not trained on, as the name of a counter; "" to train on it.

    `refill` drops groups whose rewards are all equal: their advantages are zero.
    """
    if limit is not None and staleness(group, version) > limit:
        return "stale_groups"
    if refill and not has_signal(group):
        return "equal_groups"
    return ""


class Loop:
    """One attempt at a run, from start or from its last checkpoint to its end or a stop."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        *,
        console: Console,
        stop_requested: Callable[[], bool],
        cluster: Cluster,
    ) -> None:
        self._config = config
        self._path = directory.path
        self._stop_requested = stop_requested
        self._console = console
        self._started = time.monotonic()
        self._elapsed_before = 0.0
        self._groups = training_groups(config.sections)
        self._view = LiveView(self._groups, config.train.updates, console)
        self._services = Services(config, directory, say=self._view.say)
        self._replica = replica = Replica(
            config,
            self._path,
            cluster=cluster,
            weights=self._services.addresses.weights,
            credentials=self._services.credentials,
        )
        self._learner, self._checkpoints = replica.learner, replica.checkpoints
        self._publisher = replica.publisher
        self._step = self._sequence = self._version = 0  # where the last checkpoint left off
        if position := replica.position:
            self._step, self._sequence = position.step, position.sequence
            self._version = position.version
            self._elapsed_before = position.elapsed_seconds
        self._metrics = MetricsLog(self._path, last_step=self._step)
        forget_after(self._path, self._step)
        self._watch = CollapseWatch()
        self._collapsed: int | None = None  # the first update that made two signs
        for record in self._metrics.records:
            self._observe(record)
        self._stream: GroupStream | None = None
        self._taken = self._sequence  # last group off the stream, trained on or not
        self._num_taken = 0  # trajectories off the stream since the last report
        self._acknowledged: tuple[int, int, Freshness | None] = (0, 0, None)
        self._refused_in_a_row = 0
        self._unsettled: _Unsettled | None = None
        self._dropped: Counter[str] = Counter()

    @property
    def elapsed_seconds(self) -> float:
        """Of this attempt and, up to their last checkpoint, those before it."""
        return self._elapsed_before + time.monotonic() - self._started

    def run(self) -> str:
        """Trains to the end or until a stop is requested; returns how it ended.

        Whatever happens, all that was started is ended.
        """
        try:
            with self._view:
                try:
                    status = self._run()
                except StopRequestedError:
                    status = "interrupted"
                    self._view.phase("stopping: saving a checkpoint")
                self._settle()
                self._save(wait=True)
            self._conclude(status)
            return status
        finally:
            self._close()

    def _run(self) -> str:
        self._start()
        if self._config.evaluation.before and not self._step:
            self._evaluate("before")
        status = self._train()
        self._publisher.wait(self._poll)
        if status in ("finished", "collapsed"):
            self._save(wait=True)
            self._replica.export()
            if self._config.evaluation.after:
                self._services.retire_training_samplers()
                self._evaluate("after")
        return status

    def _start(self) -> None:
        """Starts the services around the first version of this attempt.

        Versions only grow: the store may hold later ones than the checkpoint, from updates that
        are about to be made again, or none if it is another store.
        """
        self._view.phase("starting the weight service")
        newest = self._services.start_weights(self._poll_stop)
        self._version = max(newest, self._version) + 1
        self._view.phase(f"publishing version {self._version}")
        self._replica.publish(self._version)
        self._publisher.wait(self._poll)
        self._view.phase("starting the gateway and the samplers")
        self._services.start_fleet(self._config.model.checkpoint, self._poll_stop)

    def _evaluate(self, when: str) -> None:
        if self._evaluation(when):
            return
        self._view.phase(f"evaluating version {self._version} on held-out tasks, {when} training")

        def poll(num_scored: int) -> None:
            self._poll()
            self._view.status(evaluated=f"{num_scored} episodes")

        result = evaluate_while(
            self._services.client, self._config.evaluation, version=self._version, poll=poll
        )
        write_evaluation(self._path / f"evaluation-{when}.json", result)
        rates = ", ".join(f"pass@{k} {e.value:.3f}" for k, e in result.pass_at.items())
        self._view.say(f"held-out tasks {when} training: {rates} ({result.seconds:.0f} s)")

    def _evaluation(self, when: str) -> dict[str, Any] | None:
        """The evaluation on disk; not one after training that went on since."""
        path = self._path / f"evaluation-{when}.json"
        if not path.exists():
            return None
        evaluation = json.loads(path.read_text())
        newest = max((record["version"] for record in self._metrics.records), default=0)
        return None if when == "after" and evaluation["version"] < newest else evaluation

    def _train(self) -> str:
        self._stream = GroupStream(
            self._services.client, cursor=self._sequence, compress=self._config.run.compress
        )
        dispatched_before = time.monotonic()
        train = self._config.train
        while self._step < train.updates:
            self._view.phase(f"update {self._step + 1} of {train.updates}")
            begun = time.monotonic()
            groups = self._collect(train.prompts_per_update)
            collected = time.monotonic()
            batches = self._learner.pack(groups)
            record = batch_statistics(groups, self._version)
            is_kept = is_recorded(self._step + 1, every=train.record_every)
            update = self._replica.update(batches, self._version, is_kept)
            self._step, self._version = self._step + 1, self._version + 1
            self._sequence = groups[-1].sequence
            self._settle()
            dispatched = time.monotonic()
            # dispatch: packing, the end of the update before this one, compilation
            record |= {"time/collect": collected - begun, "time/dispatch": dispatched - collected}
            self._unsettled = _Unsettled(
                step=self._step,
                version=self._version,
                update=update,
                record=record,
                seconds=dispatched - dispatched_before,
                kept=groups[: train.record_groups] if is_kept else (),
            )
            dispatched_before = dispatched
            if self._step % train.checkpoint_every == 0:
                self._save(wait=False)
            if train.stop_on_collapse and self._is_over():
                return "collapsed"
        self._settle()
        return "finished"

    def _is_over(self) -> bool:
        """Whether the policy collapsed, long enough ago."""
        more = self._config.train.collapse_updates
        return self._collapsed is not None and self._step >= self._collapsed + more

    def _collect(self, count: int) -> list[TrajectoryGroup]:
        """The next groups in sequence order, without those that are refused."""
        assert self._stream, "opened by _train"
        groups: list[TrajectoryGroup] = []
        while len(groups) < count:
            self._poll()
            self._acknowledge(num_collected=len(groups))
            group = self._stream.get(POLL_S)
            if group is None:
                continue
            self._taken = group.sequence
            self._num_taken += len(group.trajectories)
            reason = refusal(
                group,
                version=self._version,
                limit=self._config.train.staleness_limit,
                refill=self._config.loss.zero_variance == "refill",
            )
            reason = reason or self._check(group)
            if reason:
                self._dropped[reason] += 1
            else:
                groups.append(group)
        return groups

    def _check(self, group: TrajectoryGroup) -> str:
        """A record that cannot be trained on costs its group; many in a row stop the run."""
        try:
            self._learner.check(group)
        except BadInputError as error:
            self._refused_in_a_row += 1
            if self._refused_in_a_row > MAX_REFUSED:
                raise
            self._view.say(f"group {group.sequence} is left out: {error}")
            return "refused_groups"
        self._refused_in_a_row = 0
        return ""

    def _poll(self) -> None:
        """Between any two waits: services alive, metrics out, the view up to date, a stop seen."""
        self._poll_stop()
        if self._unsettled and self._unsettled.update.is_ready():
            self._settle()
        if status := self._services.status():
            ready = sum(sampler.state == "ready" for sampler in status.samplers)
            self._view.status(
                samplers=f"{ready}/{len(status.samplers)} ready",
                in_flight=str(status.episodes_in_flight),
                groups=str(status.last_sequence),
                tokens_per_s=f"{sum(g.tokens_per_second for g in status.groups):.0f}",
                published=f"version {self._publisher.published}",
                elapsed=f"{self.elapsed_seconds:.0f} s",
            )

    def _poll_stop(self) -> None:
        if self._stop_requested():
            raise StopRequestedError
        self._services.check()

    def _settle(self) -> None:
        """Writes the metrics of the update dispatched last, waiting for it if need be."""
        if self._unsettled is None:
            return
        done, self._unsettled = self._unsettled, None
        try:
            metrics = done.update.metrics()
        except FloatingPointError as error:
            raise BadInputError(
                f"update {done.step}",
                expected="a finite gradient and update (lower optimizer.lr, then --resume)",
                found=error,
            ) from error
        now = self.elapsed_seconds
        record = {
            "step": done.step,
            "version": done.version,
            "elapsed_seconds": now,
            **done.record,
            **metrics,
            **self._fleet_record(),
            "time/update": done.update.seconds,
            "time/publish": self._publisher.seconds,
            "time/step": done.seconds,
            "tokens_per_second/sampled": done.record.get("sampled_tokens", 0) / done.seconds,
            "tokens_per_second/trained": done.update.num_tokens / max(done.update.seconds, 1e-9),
            **{f"dropped/{name}": num for name, num in self._dropped.items()},
        }
        self._metrics.write(record)
        if done.kept:
            self._keep(done)
        self._view.show(record)
        alarms = self._observe(record)
        for alarm in alarms:
            log.warning("update %d: %s", done.step, alarm)
            self._view.say(f"alarm at update {done.step}: {alarm}")
        self._report(record, alarms)

    def _keep(self, done: _Unsettled) -> None:
        """Records the update: the first of its groups, and what it made of their tokens."""
        trained = done.update.trained_tokens()
        num = sum(len(group.trajectories) for group in done.kept)
        update = RecordedUpdate(
            step=done.step,
            version=done.version - 1,
            groups=tuple(done.kept),
            trained=tuple(trained.get(number) for number in range(num)),
        )
        write_recorded(self._path, update)

    def _report(self, record: Record, alarms: list[str]) -> None:
        """Tells the gateway, for its page and its autoscaler; a report that is lost is lost."""
        report = update_report(record, self._groups, num_taken=self._num_taken, alarms=alarms)
        try:
            self._services.client.report(report)
        except Exception as error:  # no report is worth the run
            log.warning("update %d was not reported: %s", report.step, error)
        else:
            self._num_taken = 0

    def _observe(self, record: Record) -> list[str]:
        """Feeds the collapse watch; returns the alarms of this update."""
        limits = self._config.train.collapse
        self._watch, alarms = observe_record(self._watch, limits, record)
        if self._collapsed is None and is_collapsed(self._watch):
            self._collapsed = record["step"]
        return [alarm.sentence for alarm in alarms]

    def _fleet_record(self) -> Record:
        record: Record = {"fleet/restarts": self._services.num_restarts}
        if status := self._services.status():
            record |= {
                "fleet/episodes_in_flight": status.episodes_in_flight,
                "fleet/groups_ready": status.groups_ready,
                "fleet/infrastructure_failures": status.counters["episodes_failed"],
                **{f"fleet/{name}": int(num) for name, num in sorted(status.counters.items())},
            }
            for group in status.groups:
                record[f"group/{group.group}/tokens_per_second"] = group.tokens_per_second
                record[f"group/{group.group}/sessions_routed"] = group.sessions_routed
                record[f"group/{group.group}/gpu_hours"] = group.cost.gpu_hours
                if group.cost.HasField("dollars"):
                    record[f"group/{group.group}/dollars"] = group.cost.dollars
        return record

    def _acknowledge(self, *, num_collected: int = 0) -> None:
        """Tells the gateway what is taken, which makes room for more, what a durable checkpoint
        lets it forget, and how fresh groups must be; again and again until it was heard."""
        durable, train = self._checkpoints.durable(), self._config.train
        freshness = None
        if train.staleness_limit is not None:
            freshness = Freshness(
                version=self._version,
                groups_per_update=train.prompts_per_update,
                num_collected=num_collected,
                staleness_limit=train.staleness_limit,
            )
        news = (durable.sequence if durable else 0, self._taken, freshness)
        if news == self._acknowledged:
            return
        try:
            self._services.client.acknowledge(durable=news[0], taken=news[1], freshness=freshness)
        except RetryError as error:
            log.info("not acknowledged yet: %s", error)
        else:
            self._acknowledged = news

    def _save(self, *, wait: bool) -> None:
        self._settle()  # the metrics up to this step are on disk before the step is durable
        self._replica.save(
            Position(
                run=self._config.run.name,
                step=self._step,
                version=self._version,
                sequence=self._sequence,
                seed=self._config.run.seed,
                elapsed_seconds=self.elapsed_seconds,
            )
        )
        if wait:
            self._checkpoints.wait()

    def _conclude(self, status: str) -> None:
        """Summary, report and the closing tables."""
        summary = build_summary(
            self._config.sections,
            self._metrics.records,
            status=status,
            wall_seconds=self.elapsed_seconds,
            before=self._evaluation("before"),
            after=self._evaluation("after"),
            restarts=self._services.num_restarts,
        )
        write_summary(self._path, summary)
        print_summary(self._console, summary, write_report(self._path))

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:  # each, whatever another one raises
            stack.callback(self._metrics.close)
            stack.callback(self._services.close)
            stack.callback(self._replica.close)
            if self._stream:
                stack.callback(self._stream.close)


def train(
    config: RunConfig,
    directory: RunDirectory,
    *,
    console: Console,
    stop_requested: Callable[[], bool],
    cluster: Cluster | None = None,
) -> str:
    """Runs or resumes the run of a directory; returns finished, interrupted or collapsed.

    Raises:
        BadInputError, RetryError, DirtyProcessError: what made it impossible; the last durable
            checkpoint stands.
    """
    if not any(is_training(group) for group in config.sections.get("fleet", {}).get("groups", [])):
        raise BadInputError("run file, fleet.groups", expected="a training group", found="none")
    loop = Loop(
        config,
        directory,
        console=console,
        stop_requested=stop_requested,
        cluster=cluster or Cluster.alone(),
    )
    return loop.run()
