"""The gateway's web application: a page, the status as JSON, metrics, and draining a sampler.

Owns the routes and who may change something. Must not decide anything about the fleet.

One snapshot serves everybody who reads within SNAPSHOT_S, and is put into JSON beside the event
loop: readers, however many, don't slow down the streams of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from google.protobuf import json_format
from google.protobuf.message import Message

from contracts.credentials import Credentials, Token
from contracts.errors import BadInputError
from contracts.pb import fleet_pb2
from contracts.roles import may_call
from sampler_fleet.metrics import FleetCollector
from sampler_fleet.process import write_port_file
from sampler_fleet.web import page
from sampler_fleet.web.server import make_app, refusal, serving, shown_token

log = logging.getLogger(__name__)

SNAPSHOT_S = 0.5
DRAIN_SAMPLER = "/fleet.v1.Fleet/DrainSampler"  # whoever may call it may do so here


def status_json(reply: fleet_pb2.StatusReply) -> bytes:
    """A status with every field that has a value or a default, by its name in the .proto file."""
    rest = fleet_pb2.StatusReply()
    rest.CopyFrom(reply)
    rest.ClearField("samplers")
    fields = {name: json.dumps(value) for name, value in _fields(rest).items()}
    samplers = []
    for sampler in reply.samplers:
        samplers.append(json.dumps(_fields(sampler)))
        time.sleep(0)  # a thread that computes on would hold up the event loop for 5 ms at a time
    fields["samplers"] = f"[{','.join(samplers)}]"
    return f"{{{','.join(f'{json.dumps(name)}:{text}' for name, text in fields.items())}}}".encode()


def _fields(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


class _Snapshots:
    """The gateway's status as gzipped JSON, made at most once in SNAPSHOT_S."""

    def __init__(
        self, status_now: Callable[[], fleet_pb2.StatusReply], clock: Callable[[], float]
    ) -> None:
        self._status_now = status_now
        self._clock = clock
        self._taken = float("-inf")
        self._making: asyncio.Future[bytes] | None = None

    async def latest(self) -> bytes:
        now = self._clock()
        if self._making is None or now - self._taken >= SNAPSHOT_S:
            reply = self._status_now()
            self._taken = now
            self._making = asyncio.ensure_future(asyncio.to_thread(_packed, reply))
        return await asyncio.shield(self._making)


def _packed(reply: fleet_pb2.StatusReply) -> bytes:
    return gzip.compress(status_json(reply), compresslevel=1)


def fleet_app(
    status_now: Callable[[], fleet_pb2.StatusReply],
    drain: Callable[[str], None],
    token: Token,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """The application.

    `drain` lets a sampler go, and raises BadInputError when there is no such live sampler. Without
    a token nothing can be changed from here.
    """
    app = make_app(lambda: FleetCollector(status_now()))
    snapshots = _Snapshots(status_now, clock)
    html, policy = page.build()

    async def show_page(_: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": policy}
        return web.Response(body=html, content_type="text/html", charset="utf-8", headers=headers)

    async def show_status(request: web.Request) -> web.Response:
        body, headers = await snapshots.latest(), {"Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
        else:
            body = gzip.decompress(body)
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def drain_sampler(request: web.Request) -> web.Response:
        if refused := _refuse(request, token):
            log.warning("a request to drain from %s was refused", request.remote)
            return refused
        sampler_id = _sampler_id(await request.read())
        if sampler_id is None:
            return refusal(400, 'The body has to be JSON of the form {"sampler_id": "..."}.')
        try:
            drain(sampler_id)
        except BadInputError:
            return refusal(404, f"There is no live sampler {sampler_id!r}.")
        return web.json_response({"draining": sampler_id})

    app.router.add_get("/", show_page)
    app.router.add_get("/status.json", show_status)
    app.router.add_post("/drain", drain_sampler)
    return app


@contextlib.asynccontextmanager
async def serving_page(
    address: str,
    port_file: Path | None,
    *,
    status_now: Callable[[], fleet_pb2.StatusReply],
    drain: Callable[[str], None],
    credentials: Credentials,
) -> AsyncIterator[None]:
    """The application at host:port while the block runs; nothing where the address is empty.

    Raises as `serving` does.
    """
    if not address:
        yield
        return
    app = fleet_app(status_now, drain, credentials.token)
    async with serving(app, address, credentials.tls) as port:
        write_port_file(port_file, port)
        log.info("web page on port %d", port)
        yield


def _refuse(request: web.Request, token: Token) -> web.Response | None:
    """Why this caller may not change anything, None if it may."""
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none") or (origin and urlsplit(origin).netloc != request.host):
        return refusal(403, "The request comes from a page of another site.")
    if not token:
        return refusal(403, "This gateway was started without a token, so nobody may change it.")
    shown = shown_token(request)
    role = token.role_of(shown)
    if role is None:
        found = "another token" if shown else "no token"
        sentence = f"Draining needs this gateway's token, and the request brought {found}."
        return refusal(401, sentence, **{hdrs.WWW_AUTHENTICATE: "Bearer"})
    if not may_call(role, DRAIN_SAMPLER):
        return refusal(403, f"A {role}'s token may not drain samplers.")
    return None


def _sampler_id(body: bytes) -> str | None:
    try:
        sampler_id = json.loads(body)["sampler_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return sampler_id if isinstance(sampler_id, str) and sampler_id else None
