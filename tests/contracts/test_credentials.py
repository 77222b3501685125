"""TLS and tokens that change, over real sockets, and the files they come from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contracts.credentials import (
    GRACE_S,
    Credentials,
    Role,
    Tls,
    Token,
    read_credentials,
    read_tls,
)
from contracts.errors import AuthError, BadInputError, RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc, rollout_pb2, weights_pb2
from contracts.roles import CALLS, may_call
from contracts.rpc import aio_channel, calling, start_server, sync_channel, token_metadata
from tests.contracts.certificates import make_certificates, run_guide, tls

FIRST, SECOND = "first-token-first-token", "second-token-second-token"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """The same names, certified by another CA."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "others")


@pytest.fixture(autouse=True)
def nothing_secret_is_said(request, caplog, capfd) -> object:
    """Fails a test whose logs, or whose gRPC's, hold a token or a line of a key."""
    caplog.set_level(logging.DEBUG)
    yield
    records = caplog.get_records("call")
    said = "\n".join([record.getMessage() for record in records] + list(capfd.readouterr()))
    assert FIRST not in said and SECOND not in said
    for name in {"certificates", "others"} & set(request.fixturenames):
        for path in request.getfixturevalue(name).glob("*.key"):
            secret_lines = path.read_text().splitlines()[1:-1]
            assert secret_lines and not any(line in said for line in secret_lines)


class _Servicer(fleet_pb2_grpc.FleetServicer):
    async def Status(self, request, context):
        return fleet_pb2.StatusReply(episodes_in_flight=3)

    async def Join(self, request_iterator, context):
        async for message in request_iterator:
            yield fleet_pb2.GatewayMessage(
                abort=fleet_pb2.Abort(request_id=message.register.sampler_id)
            )


@contextlib.asynccontextmanager
async def serving(
    tls: Tls | None, token: Token | None = None, *, listen: str = "localhost:0"
) -> AsyncIterator[str]:
    """A gateway's address, its host as its certificate has it."""
    server, port = await start_server(
        listen,
        Credentials(token=token or Token(FIRST), tls=tls),
        lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(_Servicer(), server),
    )
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(None)


async def _blocking(address: str, credentials: Credentials) -> None:
    def ask() -> None:
        with sync_channel(address, credentials) as channel, calling(address):
            stub = fleet_pb2_grpc.FleetStub(channel)
            assert stub.Status(fleet_pb2.StatusRequest(), timeout=10).episodes_in_flight == 3

    await asyncio.to_thread(ask)


async def _asyncio(address: str, credentials: Credentials) -> None:
    async with aio_channel(address, credentials) as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        with calling(address):
            reply = await stub.Status(fleet_pb2.StatusRequest(), timeout=10)
        assert reply.episodes_in_flight == 3


async def _stream(address: str, credentials: Credentials) -> None:
    """As a sampler joins: the token on the call."""
    register = fleet_pb2.SamplerMessage(register=fleet_pb2.Register(sampler_id="s"))
    async with aio_channel(address, credentials, add_token=False) as channel:
        join = fleet_pb2_grpc.FleetStub(channel).Join
        call = join(iter([register]), metadata=token_metadata(credentials), timeout=10)
        with calling(address):
            assert [message.abort.request_id async for message in call] == ["s"]


WAYS = (_blocking, _asyncio, _stream)


async def passes(address: str, tls: Tls | None, token: str = FIRST) -> None:
    for way in WAYS:
        await way(address, Credentials(token=Token(token), tls=tls))


async def fails(
    address: str,
    tls: Tls | None,
    token: str = FIRST,
    *,
    error: type[Exception] = RetryError,
    match: str = "failed to connect",
) -> None:
    for way in WAYS:
        with pytest.raises(error, match=f"{re.escape(address)}: .*{match}") as refused:
            await way(address, Credentials(token=Token(token), tls=tls))
        assert not token or token not in str(refused.value)


async def test_a_server_with_a_certificate_is_verified_and_still_asks_for_the_token(
    certificates, caplog
) -> None:
    async with serving(tls(certificates, "gateway", ca=False)) as address:
        await passes(address, tls(certificates))
        await fails(
            address, tls(certificates), SECOND, error=AuthError, match="found a different token"
        )
        await fails(address, tls(certificates), "", error=AuthError, match="found no token")
    assert "plain text" not in caplog.text


async def test_another_ca_another_host_and_plain_text_are_refused(certificates, others) -> None:
    async with serving(tls(certificates, "gateway", ca=False)) as address:
        await fails(address, tls(others), match="CERTIFICATE_VERIFY_FAILED")
        by_number = address.replace("localhost", "127.0.0.1")
        await fails(by_number, tls(certificates), match="Hostname Verification Check failed")
        await fails(address, None)
        await passes(address, tls(certificates))
    async with serving(tls(certificates, "weights", ca=False)) as address:
        await fails(address, tls(certificates), match="Hostname Verification Check failed")
    async with serving(None) as address:
        await fails(address, tls(certificates))
        await passes(address, None)


async def test_mutual_tls_refuses_clients_without_a_certificate_of_its_ca(
    certificates, others
) -> None:
    async with serving(tls(certificates, "gateway")) as address:
        await passes(address, tls(certificates, "sampler"))
        await fails(
            address, tls(certificates, "sampler"), SECOND, error=AuthError, match="a different"
        )
        await fails(address, tls(certificates))
        stranger = read_tls(
            ca=certificates / "ca.pem",
            certificate=others / "sampler.pem",
            key=others / "sampler.key",
        )
        await fails(address, stranger)


async def test_a_command_talks_tls(certificates, tmp_path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(FIRST)
    async with serving(tls(certificates, "gateway")) as address:

        async def status(*arguments: str | Path) -> tuple[int | None, str, str]:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "sampler_fleet", "status", "--json"),
                *("--gateway", address, "--token-file", token_file, *arguments),
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, error = await process.communicate()
            return process.returncode, out.decode(), error.decode()

        ca = ("--tls-ca", certificates / "ca.pem")
        code, shown, error = await status(
            *ca,
            *("--tls-cert", certificates / "trainer.pem"),
            *("--tls-key", certificates / "trainer.key"),
        )
        assert code == 0, error
        assert json.loads(shown)["episodes_in_flight"] == 3
        code, _, error = await status(*ca)
        assert code == 2 and f"error: {address}: " in error
        code, _, error = await status(*ca, "--tls-key", certificates / "trainer.key")
        assert code == 2 and "a certificate and its key, or neither, found only" in error


async def test_sides_that_lack_what_they_need(certificates) -> None:
    with pytest.raises(BadInputError, match="server: expected a certificate and its key"):
        async with serving(tls(certificates)):
            pass
    for channel in (sync_channel, aio_channel):
        with pytest.raises(BadInputError, match="client: expected the CA"):
            channel("localhost:1", Credentials(tls=tls(certificates, "sampler", ca=False)))


def test_files_that_are_no_credentials(certificates, others, tmp_path) -> None:
    def refusal(**files: Path) -> str:
        with pytest.raises(BadInputError) as refused:
            read_tls(**files)
        assert not any(line in str(refused.value) for line in key.read_text().splitlines()[1:-1])
        return str(refused.value)

    ca, certificate, key = (
        certificates / name for name in ("ca.pem", "gateway.pem", "gateway.key")
    )
    assert refusal(ca=tmp_path / "none.pem") == (
        f"CA file {tmp_path / 'none.pem'}: expected a readable file, "
        "found No such file or directory"
    )
    assert "expected a readable file" in refusal(ca=tmp_path)
    assert "a PEM block CERTIFICATE, found none in" in refusal(ca=key)
    assert "a PEM block PRIVATE KEY" in refusal(certificate=certificate, key=certificate)
    assert "neither, found only " in refusal(certificate=certificate)
    assert "neither, found only " in refusal(key=key, ca=ca)
    assert refusal(certificate=certificate, key=others / "gateway.key") == (
        f"key file {others / 'gateway.key'}: expected the private key of certificate "
        f"{certificate}, found another one"
    )
    damaged = tmp_path / "damaged.pem"
    damaged.write_text(ca.read_text().replace("M", "?", 3))
    assert "expected certificates in PEM, found" in refusal(ca=damaged)
    locked = tmp_path / "locked.key"
    locked.write_text(key.read_text().replace("BEGIN PRIVATE", "BEGIN ENCRYPTED PRIVATE"))
    assert "a key without a password" in refusal(certificate=certificate, key=locked)
    found = read_tls(ca=ca, certificate=certificate, key=key)
    assert found and found.key == key.read_bytes() and "BEGIN" not in repr(found)
    assert read_tls() is None


class _Clock:
    """The time of the file system, and a way past it."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def put(path: Path, text: str) -> None:
    """As docs/operations.md says: whole."""
    draft = path.with_suffix(".new")
    draft.write_text(text + "\n")
    draft.replace(path)


async def test_a_new_token_without_a_restart(tmp_path) -> None:
    path, clock = tmp_path / "token", _Clock()
    put(path, FIRST)
    async with serving(None, Token(file=path, clock=clock)) as address:
        client = Credentials(token=Token(file=path))
        async with aio_channel(address, client) as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            await stub.Status(fleet_pb2.StatusRequest(), timeout=10)
            put(path, SECOND)
            await stub.Status(fleet_pb2.StatusRequest(), timeout=10)
            await passes(address, None, FIRST)  # a client that did not look yet
            clock.ahead_s = GRACE_S + 1
            await fails(address, None, FIRST, error=AuthError, match="a different token")
            await stub.Status(fleet_pb2.StatusRequest(), timeout=10)
        await passes(address, None, SECOND)
        with sync_channel(address, client) as channel, calling(address):
            status = fleet_pb2_grpc.FleetStub(channel).Status
            put(path, FIRST)
            await asyncio.to_thread(status, fleet_pb2.StatusRequest(), timeout=10)


async def test_a_new_certificate_without_a_restart(certificates, others, tmp_path, caplog) -> None:
    files = {"ca": "ca.pem", "certificate": "gateway.pem", "key": "gateway.key"}

    def place(made: Path, *kinds: str) -> None:
        for kind in kinds:
            put(tmp_path / files[kind], (made / files[kind]).read_text())

    place(certificates, *files)
    async with serving(read_tls(**{kind: tmp_path / files[kind] for kind in files})) as address:
        mine = Credentials(token=Token(FIRST), tls=tls(certificates, "sampler"))
        async with aio_channel(address, mine, add_token=False) as channel:
            join = fleet_pb2_grpc.FleetStub(channel).Join(metadata=token_metadata(mine))

            async def echo(name: str) -> str:
                register = fleet_pb2.Register(sampler_id=name)
                await join.write(fleet_pb2.SamplerMessage(register=register))
                return (await join.read()).abort.request_id

            assert await echo("before") == "before"
            place(others, "certificate")  # its key is still to come
            await passes(address, tls(certificates, "sampler"))
            assert caplog.text.count("the certificates stay as they were") == 1
            place(others, "key", "ca")
            await passes(address, tls(others, "sampler"))
            await fails(address, tls(certificates, "sampler"), match="CERTIFICATE_VERIFY_FAILED")
            assert await echo("after") == "after", "a stream that is open stays"
            join.cancel()


def test_the_grace_counts_from_the_change_not_from_when_it_was_seen(tmp_path) -> None:
    path, clock = tmp_path / "token", _Clock()
    put(path, FIRST)
    token = Token(file=path, clock=clock)
    put(path, SECOND)
    clock.ahead_s = GRACE_S + 1
    assert not token.accepts(FIRST)
    assert token.accepts(SECOND)


def test_a_moved_file_of_an_earlier_date_is_a_change_of_now(tmp_path) -> None:
    path = tmp_path / "token"
    put(path, FIRST)
    token = Token(file=path)
    draft = tmp_path / "token.new"
    draft.write_text(SECOND)
    os.utime(draft, (1e9, 1e9))
    draft.replace(path)
    assert token.current() == SECOND
    assert token.accepts(FIRST)


def test_an_unusable_file_leaves_the_token_as_it_was(tmp_path, caplog) -> None:
    path = tmp_path / "token"
    put(path, FIRST)
    token = Token(file=path)
    spoiled = (path.unlink, lambda: path.write_text("short"), lambda: path.write_bytes(b"\xff"))
    for num, spoil in enumerate(spoiled, 1):
        spoil()
        assert token.current() == FIRST and token.accepts(FIRST)
        assert caplog.text.count("the token stays as it was") == num, "once for each change"
    put(path, SECOND)
    assert token.current() == SECOND
    assert FIRST not in repr(token) and SECOND not in repr(Credentials(token=token))


def test_the_guide_makes_a_token(tmp_path) -> None:
    run_guide(tmp_path, "Changing the token")
    path = tmp_path / "token"
    assert path.stat().st_mode & 0o077 == 0
    assert len(read_credentials(path).token.current()) == 64


@pytest.mark.parametrize(
    ("address", "token", "warned"),
    [
        ("warned.example:1", FIRST, True),
        ("192.0.2.1:1", FIRST, True),
        ("unasked.example:1", "", False),
        ("localhost:1", FIRST, False),
        ("127.0.0.2:1", FIRST, False),
        ("[::1]:1", FIRST, False),
    ],
)
def test_a_token_in_plain_text_is_warned_of_once(address, token, warned, caplog) -> None:
    for _ in range(2):
        sync_channel(address, token).close()
    assert caplog.text.count(f"the bearer token goes to {address} in plain text") == warned


def test_no_warning_with_tls(certificates, caplog) -> None:
    credentials = Credentials(token=Token(FIRST), tls=tls(certificates))
    sync_channel("encrypted.example:1", credentials).close()
    assert "plain text" not in caplog.text


async def test_lines_of_a_token_file_have_roles(tmp_path, caplog) -> None:
    path, now = tmp_path / "tokens", time.time()
    path.write_text(f"sampler {FIRST}\ntrainer {SECOND}\n")
    token = Token(file=path, clock=lambda: now)
    assert (token.role_of(FIRST), token.role_of(SECOND)) == (Role.SAMPLER, Role.TRAINER)
    assert token.role_of(f"sampler {FIRST}") is None and token.role_of("") is None
    assert not token.accepts(FIRST), "not of every right"
    assert token.current() == FIRST

    path.write_text(f"trainer {FIRST}\n")
    assert token.role_of(FIRST) == Role.TRAINER, "at once: another role is no replacement"
    assert token.role_of(SECOND) == Role.TRAINER, "taken out: it passes for a while"
    now += GRACE_S + 1
    assert token.role_of(SECOND) is None

    path.write_text(f"sampler {SECOND}\n{FIRST}\n")
    async with serving(None, Token(file=path)) as address:
        await passes(address, None, FIRST)
        for way in (_blocking, _asyncio):
            with pytest.raises(AuthError, match=r"may call .*Fleet/Status, found a sampler"):
                await way(address, Credentials(token=Token(SECOND)))
        await _stream(address, Credentials(token=Token(SECOND)))
    assert "refused: bearer token: expected one that may call" in caplog.text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"samplr {FIRST}", "that begin with sampler, trainer, agent or harness"),
        (f"all {FIRST}", "that begin with sampler, trainer, agent or harness"),
        (f"{FIRST}\n{SECOND}", "that begin with sampler, trainer, agent or harness"),
        (f"sampler\t{FIRST}", "that begin with sampler, trainer, agent or harness"),
        (f"sampler {FIRST}\n\ntrainer {SECOND}", "at least 16 characters, found 0"),
        (f"sampler {FIRST}\ntrainer {FIRST}", "tokens that differ, found one twice"),
        ("sampler short", "at least 16 characters, found 5"),
        ("sampler", "at least 16 characters, found 7"),
    ],
)
def test_token_files_whose_meaning_is_unclear(tmp_path, text, sentence) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(BadInputError, match=sentence):
        Token(file=tmp_path / "tokens")


def test_the_table_of_roles_names_calls_that_exist() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for module in (fleet_pb2, rollout_pb2, weights_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    chat = {"/v1/chat/completions", "/v1/models"}
    methods |= chat | {"/v1/groups", "/v1/sessions/{session_id}/finish"}
    assert CALLS[Role.AGENT] == chat, "it may not reward itself"
    for role, calls in CALLS.items():
        assert calls < methods, role
    assert not any(may_call(role, "/fleet.v1.Fleet/DrainSampler") for role in CALLS)
