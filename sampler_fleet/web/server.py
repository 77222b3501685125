"""An HTTP server on the process's own event loop, and the routes every process has.

Owns listening, TLS, the headers and errors of all answers, `/metrics` and `/healthz`. Must not
know what a page shows. No request is logged: a header may hold a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web
from prometheus_client.registry import Collector

from contracts.credentials import Tls
from contracts.errors import BadInputError
from contracts.rpc import check_listen
from sampler_fleet.metrics import expose

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4096
SHUTDOWN_S = 1.0  # for answers under way
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_SENTENCES = {
    404: "There is nothing at this address.",
    405: "This address does not take that method.",
    413: f"The request's body is longer than {MAX_BODY_BYTES} bytes.",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refusal(status: int, sentence: str, **headers: str) -> web.Response:
    """An answer that says in one sentence, as JSON, why nothing was done."""
    return web.json_response({"error": sentence}, status=status, headers=headers)


@web.middleware
async def _orderly(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every answer its headers, and every failure one sentence."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = refusal(error.status, _SENTENCES.get(error.status, f"{error.reason}."))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
    except Exception:  # a bug: its traceback is for the log alone
        log.exception("unexpected error while answering %s", request.path)
        response = refusal(500, "The server failed to answer; its log says why.")
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def make_app(collector: Callable[[], Collector]) -> web.Application:
    """An application with `/metrics`, of what `collector` gives at each scrape, and `/healthz`."""

    async def metrics(request: web.Request) -> web.Response:
        now = collector()
        body, content_type = await asyncio.to_thread(expose, now, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(middlewares=[_orderly], client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    return app


def shown_token(request: web.Request) -> str:
    """The bearer token of a request, "" without one."""
    scheme, _, shown = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    # header bytes that are no UTF-8 come as lone surrogates, and no token has any
    return shown.encode("utf-8", "replace").decode() if scheme == "Bearer" else ""


@contextlib.asynccontextmanager
async def serving(app: web.Application, address: str, tls: Tls | None) -> AsyncIterator[int]:
    """Serves at host:port (port 0 picks one) and yields the port; HTTPS where there is TLS.

    Clients need no certificate: a browser or a scraper seldom has one.

    Raises:
        BadInputError: not host:port, a port in use, or TLS without a certificate.
    """
    context = _server_context(tls) if tls else None
    await check_listen(address)
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    unheard = logging.Logger("unheard")  # aiohttp's words quote requests that are no HTTP
    unheard.addHandler(logging.NullHandler())
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=unheard,
        handle_signals=False,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, int(port), ssl_context=context).start()
        bound: Any = runner.addresses[0]
        yield bound[1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serving_metrics(
    address: str, collector: Callable[[], Collector], tls: Tls | None
) -> AsyncIterator[None]:
    """Metrics alone at host:port while the block runs; nothing where the address is empty.

    Raises as `serving` does.
    """
    if not address:
        yield
        return
    async with serving(make_app(collector), address, tls) as port:
        log.info("metrics on port %d", port)
        yield


def _server_context(tls: Tls) -> ssl.SSLContext:
    """Each handshake is made with what the files hold then."""
    in_force = tls.current()
    context = newest = _context_of(in_force)

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal in_force, newest
        if (now := tls.current()) is not in_force:
            in_force, newest = now, _context_of(now)
        connection.context = newest

    context.sni_callback = renew
    return context


def _context_of(tls: Tls) -> ssl.SSLContext:
    if tls.certificate is None or tls.key is None:
        raise BadInputError("TLS of a server", expected="a certificate and its key", found="none")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.NamedTemporaryFile() as file:  # ssl reads files only; this one is its owner's
        file.write(tls.certificate + b"\n" + tls.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context
