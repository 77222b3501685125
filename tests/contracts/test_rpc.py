"""Tokens, error mapping and port conflicts over real sockets."""

from __future__ import annotations

import pytest

from contracts.credentials import read_tokens
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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_taken_port_is_one_sentence(host, capfd) -> None:
    server, port = await _serve()
    with pytest.raises(BadInputError, match="expected a free port, found it in use"):
        await start_server(f"{host}:{port}", TOKEN, lambda _: None)
    await server.stop(None)
    assert capfd.readouterr().err == "", "gRPC says nothing of its own"


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:99999", "a port from 0 to 65535, found 99999"),
        ("127.0.0.1:65536", "a port from 0 to 65535, found 65536"),
        ("127.0.0.1:-1", "a port from 0 to 65535, found -1"),
        ("127.0.0.1:", "a port from 0 to 65535, found none"),
        ("50051", "expected HOST:PORT"),
        ("::1:50051", "expected HOST:PORT"),
        ("192.0.2.1:0", "a host of this machine, found not an address of this machine"),
        ("a..b:0", "a host name or address"),
    ],
)
async def test_listen_addresses_that_are_none(address, sentence, capfd) -> None:
    with pytest.raises(BadInputError, match=sentence):
        await start_server(address, TOKEN, lambda _: None)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "127.0.0.1"])
async def test_listen_addresses_that_are_some(host) -> None:
    server, port = await start_server(f"{host}:0", TOKEN, lambda _: None)
    assert port
    await server.stop(None)


@pytest.mark.parametrize(
    "content", [b"\xff" * 32, b"0123456789abcdef\n0123", "\u00e9".encode() * 16]
)
def test_token_files_that_no_header_can_carry(tmp_path, content) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(BadInputError, match="one line of ASCII text"):
        read_tokens(tmp_path / "token")


def test_a_dead_peer_is_a_retry() -> None:
    with (
        sync_channel("127.0.0.1:1", TOKEN) as channel,
        pytest.raises(RetryError),
        calling("127.0.0.1:1"),
    ):
        fleet_pb2_grpc.FleetStub(channel).Status(fleet_pb2.StatusRequest(), timeout=2)
