"""The endpoint's routes: chat completions, groups of sessions, and how sessions end.

Owns who may call what, the bounds of requests, and the shape of every failure. No request is
logged: a header may hold a token. Must not decide anything about a session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import hdrs, web

from contracts.credentials import Credentials, Token
from contracts.errors import BadInputError, RetryError
from contracts.roles import may_call
from sampler_fleet.openai.answer import EventStream, completion_json
from sampler_fleet.openai.groups import Group, Groups
from sampler_fleet.openai.reader import Delta
from sampler_fleet.openai.refusal import Refusal
from sampler_fleet.openai.request import (
    MODEL,
    Ask,
    GroupBody,
    Outcome,
    read_ask,
    read_object,
    validated,
)
from sampler_fleet.openai.session import BRANCH_HEADER, Session
from sampler_fleet.process import write_port_file
from sampler_fleet.web.server import HEADERS, Handler, serving, shown_token

log = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-Id"
IGNORED_HEADER = "X-Ignored-Parameters"
BODY_S = 60.0  # to send a body in
AGAIN_S = 5  # until a request that nobody could serve may come again
_TOKEN_BYTES, _BASE_BYTES = 32, 1 << 20  # JSON of a full buffer is seldom longer per token
_FAILURES = {
    404: "There is nothing at this address.",
    405: "This address does not take that method.",
    413: "The body is longer than any conversation that fits this model.",
}


def openai_app(groups: Groups, token: Token, *, max_context_tokens: int) -> web.Application:
    """The application; `token` has to hold one."""
    started = int(time.time())

    async def complete(request: web.Request) -> web.StreamResponse:
        ask = read_ask(await _body(request))
        session_id = request.headers.get(SESSION_HEADER) or ask.session_id
        if not session_id:
            sentence = f"Name the session: {SESSION_HEADER}, metadata.session_id or user."
            raise Refusal(400, "session_missing", sentence)
        branch = request.headers.get(BRANCH_HEADER, "")
        if branch not in ("", "new"):
            raise Refusal(400, "invalid_value", f"{BRANCH_HEADER} is new, or not there.")
        return await _answer(request, groups.session(session_id), ask, branch=bool(branch))

    async def models(_: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": started, "owned_by": "mixed-samplers"}
        return web.json_response({"object": "list", "data": [model]})

    async def open_group(request: web.Request) -> web.Response:
        asked = validated(GroupBody, read_object(await _body(request)))
        return web.json_response(_group_json(groups.open(asked.task_id)))

    async def finish(request: web.Request) -> web.Response:
        outcome = validated(Outcome, read_object(await _body(request)))
        return web.json_response(
            _group_json(await groups.finish(request.match_info["session_id"], outcome))
        )

    most = _BASE_BYTES + _TOKEN_BYTES * max_context_tokens
    app = web.Application(middlewares=[_shaped, _guarded(token)], client_max_size=most)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/groups", open_group)
    app.router.add_post("/v1/sessions/{session_id}/finish", finish)
    return app


@contextlib.asynccontextmanager
async def serving_openai(
    address: str,
    port_file: Path | None,
    groups: Groups,
    *,
    max_context_tokens: int,
    credentials: Credentials,
) -> AsyncIterator[None]:
    """The application at host:port while the block runs; nothing where the address is empty.

    Raises:
        BadInputError: there is no token; or as `serving` does.
    """
    if not address:
        yield
        return
    if not credentials.token:
        raise BadInputError("the OpenAI endpoint", expected="a token file", found="none")
    app = openai_app(groups, credentials.token, max_context_tokens=max_context_tokens)
    async with serving(app, address, credentials.tls) as port:
        write_port_file(port_file, port)
        log.info("OpenAI endpoint on port %d", port)
        yield


async def _answer(
    request: web.Request, session: Session, ask: Ask, *, branch: bool
) -> web.StreamResponse:
    answer_id, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
    headers = {SESSION_HEADER: session.session_id}
    if ask.ignored:
        headers[IGNORED_HEADER] = ", ".join(ask.ignored)
    if not ask.stream:
        turn = await session.reply(ask, branch=branch, tell=_tell_nobody)
        return web.json_response(completion_json(turn, answer_id, created), headers=headers)
    stream = EventStream(
        request,
        answer_id,
        created,
        headers=HEADERS | headers,
        include_usage=ask.include_usage,
    )
    try:
        turn = await session.reply(ask, branch=branch, tell=stream.tell)
    except Exception as error:
        if not stream.has_begun:
            raise
        return await stream.fail(_refusal_of(error, request))
    return await stream.finish(turn)


async def _tell_nobody(_: Delta) -> None:
    pass


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise Refusal(408, "timeout", "The body did not come in time.", again_s=0) from None


def _group_json(group: Group) -> dict[str, object]:
    """`sequence` is the group's place in the trajectory log: 0 if it was dropped, null before."""
    return {
        "id": group.group_id,
        "object": "group",
        "task_id": group.task_id,
        "open_session_ids": list(group.sessions),
        "sequence": group.done.result() if group.done.done() else None,
    }


@web.middleware
async def _shaped(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every answer its headers, and every failure OpenAI's shape."""
    try:
        response = await handler(request)
    except Exception as error:
        refusal = _refusal_of(error, request)
        response = web.json_response(
            refusal.to_json(), status=refusal.status, headers=refusal.headers
        )
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        if refusal.status == 401:
            response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if not response.prepared:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
    return response


def _refusal_of(error: Exception, request: web.Request) -> Refusal:
    match error:
        case Refusal():
            return error
        case web.HTTPException():
            sentence = _FAILURES.get(error.status, f"{error.reason}.")
            return Refusal(error.status, "invalid_request", sentence)
        case BadInputError():
            return Refusal(400, "invalid_value", f"{error}.")
        case RetryError():
            return Refusal(503, "no_sampler", f"{error}.", again_s=AGAIN_S)
        case ConnectionError():  # its sender is gone, and nobody reads this
            return Refusal(400, "connection_lost", "The connection broke.")
    log.error("unexpected error while answering %s", request.path, exc_info=error)
    return Refusal(500, "server_error", "The server failed to answer; its log says why.")


def _guarded(token: Token):
    """Lets only those pass whose token may call the route."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = shown_token(request)
        role = token.role_of(shown)
        if role is None:
            found = "another token" if shown else "none"
            sentence = f"This needs the gateway's bearer token; the request brought {found}."
            raise Refusal(401, "invalid_api_key", sentence)
        resource = request.match_info.route.resource
        if resource and not may_call(role, resource.canonical):
            raise Refusal(403, "wrong_role", f"A {role}'s token may not call {request.path}.")
        return await handler(request)

    return guard
