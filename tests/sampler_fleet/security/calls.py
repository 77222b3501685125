"""Every call of every service, as the generated descriptors have them, over a real server.

Owns no assertion.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from contracts import codec, rpc
from contracts.credentials import Credentials, Token
from contracts.pb import (
    fleet_pb2,
    rollout_pb2,
    weights_pb2,
    weights_pb2_grpc,
)
from contracts.runfile import validate_section
from sampler_fleet.gateway import add_services
from tests.sampler_fleet.fakes import (
    TOKEN,
    Harness,
    make_trajectory,
    running_gateway,
    token_at,
)
from weight_sync.config import WeightsConfig
from weight_sync.service import WeightService
from weight_sync.store import VersionStore

SAMPLERS, TRAINERS = "a-token-of-the-samplers", "a-token-of-the-trainer"
ROLES = {"sampler": SAMPLERS, "trainer": TRAINERS, "all": TOKEN}
EXPECTED = [token_at(position) for position in range(3, 15)]
Code = grpc.StatusCode
TOO_LATE = "Internal error from Core"  # of this side's gRPC: a refusal was faster than a write


@dataclass(frozen=True)
class Call:
    """One RPC: `/package.Service/Method` and the message it takes."""

    path: str
    message: type[Message]
    takes_stream: bool

    def __str__(self) -> str:
        return self.path


CALLS = [
    Call(
        f"/{service.full_name}/{method.name}",
        GetMessageClass(method.input_type),
        method.client_streaming,
    )
    for module in (fleet_pb2, rollout_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
BY_NAME = {call.path.removeprefix("/"): call for call in CALLS}


async def a_good_episode(task, *, session_id, **_):
    return make_trajectory(session_id, task_id=task.task_id)


@contextlib.asynccontextmanager
async def all_services(
    directory: Path, credentials: Credentials | None = None, *, host: str = "127.0.0.1", **config
) -> AsyncIterator[tuple[Harness, str]]:
    """A gateway and its harness, and the address where all three services of a run answer."""
    (directory / "tokens").write_text(f"sampler {SAMPLERS}\ntrainer {TRAINERS}\n{TOKEN}\n")
    credentials = credentials or Credentials(token=Token(file=directory / "tokens"))
    async with running_gateway(directory, run_episode=a_good_episode, **config) as gateway:
        store = VersionStore(directory / "weights")
        weights = WeightService(store, validate_section(WeightsConfig, "weights", {}))

        def add(server: grpc.aio.Server) -> None:
            add_services(
                server, fleet=gateway.fleet, spool=gateway.spool, producer=gateway.producer
            )
            weights_pb2_grpc.add_WeightsServicer_to_server(weights, server)

        server, port = await rpc.start_server(f"{host}:0", credentials, add)
        weights.start()
        try:
            yield gateway, f"{host}:{port}"
        finally:
            await weights.close()
            await server.stop(None)
            store.close()


@contextlib.asynccontextmanager
async def raw_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that adds nothing and lets messages of any size out."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def answer(
    channel: grpc.aio.Channel,
    call: Call,
    messages: Iterable[bytes] = (b"",),
    *,
    metadata=(),
    timeout_s: float = 5.0,
) -> tuple[grpc.StatusCode, str]:
    """The status that bytes get; a call that takes one message gets the first."""
    code, details = Code.UNKNOWN, TOO_LATE
    while details == TOO_LATE:
        if call.takes_stream:
            started = channel.stream_stream(call.path)(
                iter(list(messages)), metadata=metadata, timeout=timeout_s
            )
        else:
            started = channel.unary_stream(call.path)(
                next(iter(messages)), metadata=metadata, timeout=timeout_s
            )
        with contextlib.suppress(grpc.RpcError):
            async for _ in started:
                pass
        code, details = await started.code(), await started.details() or ""
    return code, details


def registration(gateway: Harness, sampler_id: str, **changes: object) -> fleet_pb2.Register:
    """A registration that the gateway would take; big-0 is there."""
    known = gateway.fleet.registry.get("big-0")
    assert known is not None
    message = codec.sampler_to_pb(dataclasses.replace(known.info, sampler_id=sampler_id))
    for field, value in changes.items():
        setattr(message, field, value)
    return message
