"""The gateway's HTTP: what anybody may read, who may drain, and what is refused in one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import ssl

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from google.protobuf import json_format
from prometheus_client.parser import text_string_to_metric_families

from contracts.credentials import Token, read_tls
from contracts.errors import BadInputError
from contracts.pb import fleet_pb2
from sampler_fleet.web.app import SNAPSHOT_S, fleet_app
from sampler_fleet.web.server import MAX_BODY_BYTES, serving
from tests.contracts.certificates import make_certificates, tls
from tests.sampler_fleet.web.statuses import HOSTILE, make_sampler, make_status

TOKEN, SAMPLERS, TRAINERS = "everything-everywhere", "only-for-the-samplers", "only-for-trainers"
DRAIN = {"sampler_id": "b300-nvfp4-0"}


class Gateway:
    """What the application is given, and what came of it."""

    def __init__(self, token: Token | None = None) -> None:
        self.status = make_status(40)
        self.drained: list[str] = []
        self.num_asked = 0
        self.now = 0.0
        self.token = Token(TOKEN) if token is None else token

    def status_now(self) -> fleet_pb2.StatusReply:
        self.num_asked += 1
        return self.status

    def drain(self, sampler_id: str) -> None:
        if sampler_id not in {s.register.sampler_id for s in self.status.samplers}:
            raise BadInputError("sampler id", expected="a live sampler", found=sampler_id)
        self.drained.append(sampler_id)

    @contextlib.asynccontextmanager
    async def client(self):
        app = fleet_app(self.status_now, self.drain, self.token, clock=lambda: self.now)
        async with TestClient(TestServer(app)) as client:
            yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def error_of(answer: aiohttp.ClientResponse) -> str:
    body = await answer.json()
    assert set(body) == {"error"} and body["error"].endswith(".") and "\n" not in body["error"]
    return body["error"]


async def test_the_status_is_there_whole():
    gateway = Gateway()
    gateway.status.samplers.append(make_sampler(HOSTILE, "h200-fp8"))
    async with gateway.client() as client:
        answer = await client.get("/status.json")
        assert answer.content_type == "application/json"
        assert answer.headers["Content-Encoding"] == "gzip"
        fields = await answer.json()
        again = json_format.ParseDict(fields, fleet_pb2.StatusReply())
        assert again == gateway.status
        assert fields["alarms"] == [], "what is empty is said too"
        plain = await client.get("/status.json", headers={"Accept-Encoding": "identity"})
        assert "Content-Encoding" not in plain.headers and await plain.json() == fields


async def test_many_readers_share_a_snapshot():
    gateway = Gateway()
    async with gateway.client() as client:
        await asyncio.gather(*(client.get("/status.json") for _ in range(20)))
        assert gateway.num_asked == 1
        gateway.now += SNAPSHOT_S
        gateway.status = make_status(41)
        later = await (await client.get("/status.json")).json()
        assert gateway.num_asked == 2 and later["seconds"] == 8041


async def test_metrics_and_health():
    async with Gateway().client() as client:
        answer = await client.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = {f.name for f in text_string_to_metric_families(await answer.text())}
        assert "mixed_samplers_tokens_sampled" in families
        assert await (await client.get("/healthz")).json() == {"status": "ok"}


async def test_the_page_is_in_one_piece_and_runs_nothing_else():
    async with Gateway().client() as client:
        answer = await client.get("/")
        html, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert answer.content_type == "text/html"
        for wrong in ("src=", "@import", "url(", "onclick", "onload", "style=", "innerHTML"):
            assert wrong not in html, wrong
        assert "https://" not in html and html.count("http://") == html.count("http://www.w3.org/")
        for rule in ("default-src 'none'", "form-action 'none'", "frame-ancestors 'none'"):
            assert rule in policy
        assert "unsafe" not in policy and policy.count("sha256-") == 2
        for path in ("/", "/status.json", "/metrics", "/healthz", "/nowhere"):
            headers = (await client.get(path)).headers
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] == "no-store"
            assert headers["Content-Security-Policy"].startswith("default-src 'none'")


async def test_no_answer_holds_a_token(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\nsampler {SAMPLERS}\ntrainer {TRAINERS}\n")
    gateway = Gateway(Token(file=file))
    async with gateway.client() as client:
        answers = [await client.get(path) for path in ("/", "/status.json", "/metrics", "/healthz")]
        answers += [
            await client.post("/drain", json=DRAIN, headers=bearer(token))
            for token in (TOKEN, SAMPLERS, TRAINERS, TOKEN + "x")
        ]
        for answer in answers:
            said = str(answer.headers) + await answer.text()
            assert not any(token in said for token in (TOKEN, SAMPLERS, TRAINERS))


async def test_the_token_of_the_run_drains():
    gateway = Gateway()
    async with gateway.client() as client:
        same = str(client.make_url("/")).rstrip("/")
        for headers in ({}, {"Origin": same, "Sec-Fetch-Site": "same-origin"}):
            answer = await client.post("/drain", json=DRAIN, headers=bearer(TOKEN) | headers)
            assert answer.status == 200, await answer.text()
            assert await answer.json() == {"draining": "b300-nvfp4-0"}
    assert gateway.drained == ["b300-nvfp4-0"] * 2


@pytest.mark.parametrize(
    ("headers", "status", "sentence"),
    [
        ({}, 401, "brought no token"),
        (bearer(""), 401, "brought no token"),
        (bearer("x" * 20), 401, "brought another token"),
        (bearer(TOKEN.upper()), 401, "brought another token"),
        (bearer("Zürich-is-no-token"), 401, "brought another token"),
        ({"Authorization": f"Basic {TOKEN}"}, 401, "brought no token"),
        ({"Authorization": TOKEN}, 401, "brought no token"),
        (bearer(SAMPLERS), 403, "A sampler's token may not drain"),
        (bearer(TRAINERS), 403, "A trainer's token may not drain"),
        (bearer(TOKEN) | {"Origin": "https://evil.example"}, 403, "another site"),
        (bearer(TOKEN) | {"Origin": "null"}, 403, "another site"),
        (bearer(TOKEN) | {"Sec-Fetch-Site": "cross-site"}, 403, "another site"),
        (bearer(TOKEN) | {"Sec-Fetch-Site": "same-site"}, 403, "another site"),
    ],
)
async def test_nobody_else_does(tmp_path, headers, status, sentence):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\nsampler {SAMPLERS}\ntrainer {TRAINERS}\n")
    gateway = Gateway(Token(file=file))
    async with gateway.client() as client:
        answer = await client.post("/drain", json=DRAIN, headers=headers)
        assert answer.status == status and sentence in await error_of(answer)
        assert ("WWW-Authenticate" in answer.headers) == (status == 401)
    assert gateway.drained == []


async def test_header_bytes_of_any_kind_are_refused():
    gateway = Gateway()
    async with gateway.client() as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        body = json.dumps(DRAIN).encode()
        writer.write(
            b"POST /drain HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\xe2\x82"
            b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert said.startswith(b"HTTP/1.1 401 ") and gateway.drained == []


async def test_without_a_token_nobody_may_drain():
    gateway = Gateway(Token())
    async with gateway.client() as client:
        for headers in ({}, bearer(""), bearer(TOKEN)):
            answer = await client.post("/drain", json=DRAIN, headers=headers)
            assert answer.status == 403 and "without a token" in await error_of(answer)
    assert gateway.drained == []


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b'{"sampler_id": "nobody"}', 404, "no live sampler 'nobody'"),
        (json.dumps({"sampler_id": HOSTILE}).encode(), 404, "no live sampler"),
        (b'{"sampler_id": 3}', 400, "JSON of the form"),
        (b'{"sampler_id": ""}', 400, "JSON of the form"),
        (b"[]", 400, "JSON of the form"),
        (b"", 400, "JSON of the form"),
        (b"\xff\xfe", 400, "JSON of the form"),
        (b"[" * 4000, 400, "JSON of the form"),
        (b"x" * (MAX_BODY_BYTES + 1), 413, f"longer than {MAX_BODY_BYTES} bytes"),
    ],
)
async def test_a_wrong_body_is_refused(body, status, sentence):
    gateway = Gateway()
    async with gateway.client() as client:
        answer = await client.post("/drain", data=body, headers=bearer(TOKEN))
        assert answer.status == status and sentence in await error_of(answer)
    assert gateway.drained == []


async def test_other_addresses_and_methods():
    async with Gateway().client() as client:
        for path in ("/nowhere", "/page.js", "/../page.py", "/favicon.ico"):
            answer = await client.get(path)
            assert answer.status == 404 and "nothing at this address" in await error_of(answer)
        answer = await client.get("/drain")
        assert answer.status == 405 and answer.headers["Allow"] == "POST"
        assert "method" in await error_of(answer)


async def test_a_bug_is_told_to_the_log_alone(caplog):
    gateway = Gateway()

    def fail() -> fleet_pb2.StatusReply:
        raise ZeroDivisionError("a secret of the inside")

    gateway.status_now = fail
    async with gateway.client() as client:
        answer = await client.get("/status.json")
        assert answer.status == 500 and "secret" not in await error_of(answer)
    assert "a secret of the inside" in caplog.text


async def test_no_token_reaches_a_log(caplog):
    """Also not from requests that are no HTTP, which a library may want to quote."""
    caplog.set_level(logging.DEBUG)
    gateway, wrong = Gateway(), "another-wrong-token"
    app = fleet_app(gateway.status_now, gateway.drain, gateway.token)
    async with serving(app, "127.0.0.1:0", None) as port, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{port}"
        for token in (TOKEN, wrong):
            async with http.post(f"{url}/drain", json=DRAIN, headers=bearer(token)):
                pass
            async with http.get(f"{url}/nowhere?token={token}", headers=bearer(token)):
                pass
            for line in (f"Authorization : Bearer {token}", f"Bearer {token}", "\0" + token):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"GET /{token} HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())
                assert b" 400 " in await reader.readline()
                writer.close()
                await writer.wait_closed()
    assert "a request to drain from 127.0.0.1 was refused" in caplog.text
    assert TOKEN not in caplog.text and wrong not in caplog.text


async def test_a_new_certificate_without_a_restart(tmp_path):
    made = make_certificates(tmp_path / "certificates")
    files = {kind: tmp_path / f"gateway.{kind}" for kind in ("pem", "key")}

    def place(name: str) -> None:
        for kind, path in files.items():
            shutil.copyfile(made / f"{name}.{kind}", draft := path.with_suffix(".new"))
            draft.replace(path)

    place("gateway")
    served = read_tls(certificate=files["pem"], key=files["key"])
    app = fleet_app(Gateway().status_now, Gateway().drain, Token(TOKEN))
    async with serving(app, "127.0.0.1:0", served) as port:
        for name in ("gateway", "weights", "gateway"):
            place(name)
            for host in ("localhost", "127.0.0.1"):  # a host by number is not named in a handshake
                shown = await asyncio.to_thread(ssl.get_server_certificate, (host, port))
                certificate = (made / f"{name}.pem").read_text()
                assert ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(certificate)


async def test_over_tls_without_a_clients_certificate(tmp_path):
    certificates = make_certificates(tmp_path / "certificates")
    gateway = Gateway()
    app = fleet_app(gateway.status_now, gateway.drain, gateway.token)
    trusted = ssl.create_default_context(cafile=certificates / "ca.pem")
    async with (
        serving(app, "127.0.0.1:0", tls(certificates, "gateway")) as port,
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"https://localhost:{port}/healthz", ssl=trusted) as answer:
            assert answer.status == 200
        origin = {"Origin": f"https://localhost:{port}"}
        url, headers = f"https://localhost:{port}/drain", bearer(TOKEN) | origin
        async with http.post(url, json=DRAIN, headers=headers, ssl=trusted) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://localhost:{port}/healthz")


async def test_a_listen_address_that_is_none_is_refused(tmp_path):
    app = fleet_app(Gateway().status_now, Gateway().drain, Token(TOKEN))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for address, found in (
            (f"127.0.0.1:{taken.getsockname()[1]}", "in use"),
            ("7080", "something else"),
            ("127.0.0.1:99999", "99999"),
        ):
            with pytest.raises(BadInputError, match=found):
                async with serving(app, address, None):
                    pass
    certificates = make_certificates(tmp_path / "certificates")
    with pytest.raises(BadInputError, match="a certificate and its key"):
        async with serving(app, "127.0.0.1:0", tls(certificates)):
            pass


async def test_an_ipv6_address():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    app = fleet_app(Gateway().status_now, Gateway().drain, Token(TOKEN))
    async with serving(app, "[::1]:0", None) as port, aiohttp.ClientSession() as http:
        answer = await http.get(f"http://[::1]:{port}/healthz")
        assert answer.status == 200
