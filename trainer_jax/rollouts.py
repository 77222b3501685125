"""Client of the trajectory service: completed groups in sequence order, across reconnects.

Owns the connection, its background thread and the small queue between it and the training loop.
Must not judge a group (staleness, rewards): the loop does.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence

import grpc

from contracts.codec import (
    freshness_to_pb,
    group_from_pb,
    samples_to_pb,
    sampling_to_pb,
    trajectory_from_pb,
    update_to_pb,
)
from contracts.credentials import Credentials
from contracts.errors import RetryError
from contracts.pb import fleet_pb2, rollout_pb2
from contracts.pb.fleet_pb2_grpc import FleetStub
from contracts.pb.rollout_pb2_grpc import RolloutStub
from contracts.rpc import DEADLINE_S, calling, error_of, sync_channel
from contracts.types import (
    EvaluationSample,
    Freshness,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    UpdateReport,
)

log = logging.getLogger(__name__)

RECONNECT_S = 0.5
REPORT_S = 2.0
# A group handed out ahead of need only ages, so the queue is short.
QUEUE_GROUPS = 2


class RolloutClient:
    """The gateway as the trainer sees it. Thread-safe."""

    def __init__(self, address: str, credentials: Credentials | str) -> None:
        self.address = address
        self._channel = sync_channel(address, credentials)
        self.rollout = RolloutStub(self._channel)
        self._fleet = FleetStub(self._channel)

    def status(self, *, timeout_s: float = DEADLINE_S) -> fleet_pb2.StatusReply:
        """Fleet state. Raises RetryError when the gateway is away."""
        with calling(self.address):
            return self._fleet.Status(fleet_pb2.StatusRequest(), timeout=timeout_s)

    def acknowledge(self, *, durable: int, taken: int, freshness: Freshness | None = None) -> None:
        """Groups up to `durable` are in a checkpoint and may be forgotten, those up to `taken`
        have left this side's queue and make room for new ones, none of which begins if it would
        be too old by `freshness`. Raises RetryError."""
        request = rollout_pb2.AckGroupsRequest(
            sequence=durable,
            taken=taken,
            freshness=freshness_to_pb(freshness) if freshness else None,
        )
        with calling(self.address):
            self.rollout.AckGroups(request, timeout=DEADLINE_S)

    def report(self, report: UpdateReport) -> None:
        """What an update was, for the fleet's page and autoscaler. Raises RetryError."""
        with calling(self.address):
            self._fleet.ReportUpdate(update_to_pb(report), timeout=REPORT_S)

    def evaluate(
        self, *, num_tasks: int, num_samples: int, min_version: int, sampling: SamplingParams
    ) -> Iterator[Trajectory]:
        """Held-out trajectories as they end; raises RetryError when the stream breaks."""
        return self._evaluate(
            rollout_pb2.EvaluateRequest(
                split="heldout",
                num_tasks=num_tasks,
                num_samples=num_samples,
                min_version=min_version,
                sampling=sampling_to_pb(sampling),
            )
        )

    def evaluate_samples(
        self, samples: Sequence[EvaluationSample], *, min_version: int, sampling: SamplingParams
    ) -> Iterator[Trajectory]:
        """Each of these once, as they end; raises RetryError when the stream breaks."""
        return self._evaluate(
            rollout_pb2.EvaluateRequest(
                min_version=min_version,
                sampling=sampling_to_pb(sampling),
                samples=samples_to_pb(samples),
            )
        )

    def _evaluate(self, request: rollout_pb2.EvaluateRequest) -> Iterator[Trajectory]:
        with calling(self.address):
            for message in self.rollout.Evaluate(request):
                yield trajectory_from_pb(message)

    def close(self) -> None:
        self._channel.close()


class GroupStream:
    """Groups after `cursor`, one at a time and in order, from a background thread.

    A lost connection is dialled again from the last group received. Anything else the service
    answers (a wrong token, a record that cannot be decoded) is raised by `get`.
    """

    def __init__(self, client: RolloutClient, *, cursor: int, compress: bool = False) -> None:
        self._client = client
        self._compress = compress
        self._cursor = cursor
        self._queue: queue.Queue[TrajectoryGroup] = queue.Queue(QUEUE_GROUPS)
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._call: grpc.Future | None = None
        self.num_reconnects = 0
        self._thread = threading.Thread(target=self._run, name="group-stream", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> TrajectoryGroup | None:
        """The next group, or None when there is none within `timeout_s`."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            if self._error:
                raise self._error from None
            return None

    def close(self) -> None:
        self._stopped.set()
        if self._call:
            self._call.cancel()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._receive()
            except grpc.RpcError as error:
                raised = error_of(error)
                if self._stopped.is_set():
                    return
                if not isinstance(raised, RetryError):
                    self._error = raised
                    return
                log.info("trajectory stream lost (%s), dialling again", raised)
            except Exception as error:
                self._error = error
                return
            self.num_reconnects += 1
            self._stopped.wait(RECONNECT_S)

    def _receive(self) -> None:
        request = rollout_pb2.StreamGroupsRequest(after=self._cursor, zstd=self._compress)
        self._call = self._client.rollout.StreamGroups(request, wait_for_ready=True)
        assert self._call is not None
        for message in self._call:  # pyright: ignore[reportGeneralTypeIssues]
            group = group_from_pb(message)
            if group.sequence <= self._cursor:
                continue
            while not self._stopped.is_set():
                try:
                    self._queue.put(group, timeout=0.2)
                except queue.Full:
                    continue
                self._cursor = group.sequence
                break
            if self._stopped.is_set():
                return
