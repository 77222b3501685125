"""Tokens, error mapping and port conflicts over real sockets."""

from __future__ import annotations

import pytest

from contracts.errors import AuthError, BadInputError, ConflictError, RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc
from contracts.rpc import aio_channel, answering, calling, start_server, sync_channel

TOKEN = "0123456789abcdef"


class _Servicer(fleet_pb2_grpc.FleetServicer):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def Status(self, request, context):
        async with answering(context):
            if self.error:
                raise self.error
        return fleet_pb2.StatusReply(episodes_in_flight=3)

    async def Join(self, request_iterator, context):
        async for message in request_iterator:
            yield fleet_pb2.GatewayMessage(
                abort=fleet_pb2.Abort(request_id=message.register.sampler_id)
            )


async def _serve(error: Exception | None = None):
    return await start_server(
        "127.0.0.1:0",
        TOKEN,
        lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(_Servicer(error), server),
    )


async def test_the_right_token_passes_and_a_wrong_one_is_refused_on_every_arity() -> None:
    server, port = await _serve()
    address = f"127.0.0.1:{port}"
    async with aio_channel(address, TOKEN) as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        assert (await stub.Status(fleet_pb2.StatusRequest())).episodes_in_flight == 3
        call = stub.Join(
            iter([fleet_pb2.SamplerMessage(register=fleet_pb2.Register(sampler_id="s"))])
        )
        assert [m.abort.request_id async for m in call] == ["s"]
    for wrong in ("", "f" * 16):
        async with aio_channel(address, wrong) as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            with pytest.raises(AuthError, match=address), calling(address):
                await stub.Status(fleet_pb2.StatusRequest())
            with pytest.raises(AuthError), calling(address):
                async for _ in stub.Join(iter([])):
                    pass
    await server.stop(None)


@pytest.mark.parametrize(
    "error",
    [
        BadInputError("shape", expected="[2]", found="[3]"),
        ConflictError("someone else published 4"),
        RetryError("still catching up"),
    ],
)
async def test_errors_cross_the_wire_with_type_and_sentence(error) -> None:
    server, port = await _serve(error)
    async with aio_channel(f"127.0.0.1:{port}", TOKEN) as channel:
        with pytest.raises(type(error), match=str(error).split(":")[0]), calling("peer"):
            await fleet_pb2_grpc.FleetStub(channel).Status(fleet_pb2.StatusRequest())
    await server.stop(None)


async def test_a_taken_port_is_one_sentence() -> None:
    server, port = await _serve()
    with pytest.raises(BadInputError, match="free port"):
        await start_server(f"127.0.0.1:{port}", TOKEN, lambda _: None)
    await server.stop(None)


def test_a_dead_peer_is_a_retry() -> None:
    with (
        sync_channel("127.0.0.1:1", TOKEN) as channel,
        pytest.raises(RetryError),
        calling("127.0.0.1:1"),
    ):
        fleet_pb2_grpc.FleetStub(channel).Status(fleet_pb2.StatusRequest(), timeout=2)
