"""The gateway's gRPC services, Fleet and Rollout: wire format in, domain values out.

Owns the conversion between streams and the gateway's core (`fleet.py`, `spool.py`, `producer.py`).
Must not decide anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from contracts import codec
from contracts.errors import BadInputError, DirtyProcessError, RetryError, shown
from contracts.pb import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from contracts.rpc import answering
from contracts.types import GenerateRequest
from sampler_fleet.fleet import Fleet
from sampler_fleet.heartbeat import load_from_pb
from sampler_fleet.link import (
    Abort,
    Command,
    Drain,
    EndSession,
    Expel,
    Link,
    SamplerGoneError,
)
from sampler_fleet.places import Target
from sampler_fleet.producer import Evaluation, Producer
from sampler_fleet.snapshot import fleet_status
from sampler_fleet.spool import Spool

HANDSHAKE_S = 10.0
HANG_UP_S = 2.0
WATCH_S, MAX_WATCH_S = 1.0, 3600.0


def command_to_pb(command: Command) -> fleet_pb2.GatewayMessage:
    match command:
        case GenerateRequest():
            return fleet_pb2.GatewayMessage(generate=codec.generate_to_pb(command))
        case Abort():
            return fleet_pb2.GatewayMessage(abort=fleet_pb2.Abort(request_id=command.request_id))
        case EndSession():
            return fleet_pb2.GatewayMessage(
                end_session=fleet_pb2.EndSession(session_id=command.session_id)
            )
        case Drain():
            return fleet_pb2.GatewayMessage(drain=fleet_pb2.Drain(reason=command.reason))
        case Expel():
            return fleet_pb2.GatewayMessage(expel=fleet_pb2.Expel(reason=command.reason))


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """Join, Status, DrainSampler."""

    def __init__(
        self, fleet: Fleet, spool: Spool, producer: Producer, *, weights_address: str = ""
    ) -> None:
        self._fleet = fleet
        self._spool = spool
        self._producer = producer
        self._weights_address = weights_address

    async def Join(
        self,
        request_iterator: AsyncIterator[fleet_pb2.SamplerMessage],
        context: grpc.aio.ServicerContext,
    ) -> None:
        async with answering(context):
            messages = aiter(request_iterator)
            link = self._fleet.join(await _registration(messages))
            reader = asyncio.create_task(self._read(messages, link))
            try:
                await context.write(
                    fleet_pb2.GatewayMessage(
                        welcome=fleet_pb2.Welcome(
                            heartbeat_seconds=self._fleet.config.heartbeat_seconds,
                            weights_address=self._weights_address,
                        )
                    )
                )
                while (command := await link.next_command()) is not None:
                    await context.write(command_to_pb(command))
                if isinstance(link.error, DirtyProcessError):  # let it read why, and hang up first
                    await asyncio.wait({reader}, timeout=HANG_UP_S)
                if link.error:
                    raise link.error
            finally:
                self._fleet.leave(link, "the stream broke")
                reader.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reader

    async def _read(self, messages: AsyncIterator[fleet_pb2.SamplerMessage], link: Link) -> None:
        """Takes a sampler's messages until it closes its side or breaks a rule."""
        try:
            async for message in messages:
                self._take(message, link)
        except BadInputError as error:
            self._fleet.expel(link, "records_refused", error)
        finally:
            self._fleet.leave(link, "it closed the stream")

    def _take(self, message: fleet_pb2.SamplerMessage, link: Link) -> None:
        if link.closed:  # what was under way when it was expelled
            return
        match message.WhichOneof("kind"):
            case "delta" | "deltas" as kind:
                deltas = (message.delta,) if kind == "delta" else message.deltas.deltas
                for delta in deltas:
                    link.deliver(delta.request_id, codec.chunk_from_pb(delta.chunk))
            case "heartbeat":
                beat = message.heartbeat
                switch = codec.switch_from_pb(beat.switch) if beat.HasField("switch") else None
                self._fleet.heartbeat(
                    link, version=beat.version, load=load_from_pb(beat), switch=switch
                )
            case "failed":
                failed = message.failed
                rule = f"sampler {link.sampler_id} could not finish: {shown(failed.reason)}"
                error = (
                    BadInputError(
                        f"request {failed.request_id}",
                        expected="one its sampler can serve",
                        found=failed.reason,
                    )
                    if failed.bad_request
                    else SamplerGoneError(rule)
                )
                self._fleet.failed(link, failed.request_id, error)
            case "leaving":
                self._fleet.drain(link.sampler_id, shown(message.leaving.reason))
            case other:
                raise BadInputError(
                    f"message from sampler {link.sampler_id}",
                    expected="delta, deltas, heartbeat, failed or leaving",
                    found=other,
                )

    async def Status(
        self, request: fleet_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.StatusReply:
        async with answering(context):
            return fleet_status(self._fleet, self._spool, self._producer)
        raise AssertionError("answering() aborts")  # for the type checker

    async def ReportUpdate(
        self, request: fleet_pb2.UpdateReport, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.UpdateReportReply:
        async with answering(context):
            self._producer.update_done(codec.update_from_pb(request))
        return fleet_pb2.UpdateReportReply()

    async def ReportTargets(
        self, request: fleet_pb2.ReportTargetsRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.ReportTargetsReply:
        async with answering(context):
            self._fleet.set_targets(
                {
                    target.group: Target(
                        num=target.num_target,
                        num_held=target.num_held if target.HasField("num_held") else None,
                        problem=target.problem,
                    )
                    for target in request.targets
                }
            )
            self._fleet.problems["autoscaler"] = request.problem
        return fleet_pb2.ReportTargetsReply()

    async def DrainSampler(
        self, request: fleet_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.DrainReply:
        async with answering(context):
            self._fleet.drain(request.sampler_id, "asked to by an operator")
        return fleet_pb2.DrainReply()


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """Generate, StreamGroups, AckGroups, Evaluate."""

    def __init__(self, fleet: Fleet, spool: Spool, producer: Producer) -> None:
        self._fleet = fleet
        self._spool = spool
        self._producer = producer

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with answering(context):
            self._check_foreign(request.session_id)
            chunks = self._fleet.generate(codec.generate_from_pb(request))
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    await context.write(codec.chunk_to_pb(chunk.completion))

    async def StreamGroups(
        self, request: rollout_pb2.StreamGroupsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        groups = self._spool.follow(request.after)
        async with answering(context), contextlib.aclosing(groups):
            self._producer.resumed(request.after)
            async for group in groups:
                message = codec.group_to_pb(group)
                if request.zstd:
                    message = await asyncio.to_thread(codec.compressed, message)
                await context.write(message)
                self._producer.sent(group.sequence)

    async def EndSession(
        self, request: rollout_pb2.EndSessionRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.EndSessionReply:
        async with answering(context):
            self._check_foreign(request.session_id)
            await self._fleet.end_session(request.session_id)
        return rollout_pb2.EndSessionReply()

    def _check_foreign(self, session_id: str) -> None:
        if self._fleet.is_own(session_id):
            raise BadInputError(
                "session id",
                expected="a session of the caller's",
                found=f"{shown(session_id)}, an episode of the gateway",
            )

    async def Watch(
        self, request: rollout_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with answering(context):
            if not 0 <= request.every_seconds <= MAX_WATCH_S:
                raise BadInputError(
                    "every_seconds", expected=f"0 to {MAX_WATCH_S:g}", found=request.every_seconds
                )
            last = None
            while True:
                progress = rollout_pb2.Progress(
                    last_sequence=self._spool.last_sequence,
                    groups_ready=self._spool.count(),
                    episodes_in_flight=self._producer.num_in_flight,
                    episodes_completed=self._producer.counters["episodes_completed"],
                    episodes_failed=self._producer.counters["episodes_failed"],
                )
                if progress != last:
                    await context.write(progress)
                    last = progress
                await asyncio.sleep(request.every_seconds or WATCH_S)

    async def AckGroups(
        self, request: rollout_pb2.AckGroupsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.AckGroupsReply:
        async with answering(context):
            self._spool.acknowledge(request.sequence)
            if request.taken:
                self._producer.taken(request.taken)
            has_limit = request.HasField("freshness")
            self._producer.wanted_fresh(
                codec.freshness_from_pb(request.freshness) if has_limit else None
            )
        return rollout_pb2.AckGroupsReply()

    async def Evaluate(
        self, request: rollout_pb2.EvaluateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with answering(context):
            evaluation = Evaluation(
                split=request.split,
                num_tasks=request.num_tasks,
                num_samples=request.num_samples,
                min_version=request.min_version,
                sampling=codec.sampling_from_pb(request.sampling),
                samples=codec.samples_from_pb(request.samples),
            )
            async with contextlib.aclosing(self._producer.evaluate(evaluation)) as trajectories:
                async for trajectory in trajectories:
                    await context.write(codec.trajectory_to_pb(trajectory))


async def _registration(messages: AsyncIterator[fleet_pb2.SamplerMessage]):
    """The sampler a stream's first message announces."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            first = await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        raise RetryError("the stream brought no registration") from None
    if first.WhichOneof("kind") != "register":
        raise BadInputError(
            "first message of a sampler", expected="register", found=first.WhichOneof("kind")
        )
    return codec.sampler_from_pb(first.register)


def add_services(
    server: grpc.aio.Server,
    *,
    fleet: Fleet,
    spool: Spool,
    producer: Producer,
    weights_address: str = "",
) -> None:
    """Registers both services on a server."""
    fleet_pb2_grpc.add_FleetServicer_to_server(
        FleetServicer(fleet, spool, producer, weights_address=weights_address), server
    )
    rollout_pb2_grpc.add_RolloutServicer_to_server(RolloutServicer(fleet, spool, producer), server)
