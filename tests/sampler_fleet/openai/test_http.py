"""Who may use the endpoint, what it refuses and how, and how sessions and groups end."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import ssl

import aiohttp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.credentials import Credentials, Token
from contracts.errors import BadInputError
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.openai.app import openai_app, serving_openai
from sampler_fleet.openai.refusal import Refusal
from sampler_fleet.openai.request import read_ask
from sampler_fleet.spool import Spool
from sampler_fleet.web.server import serving
from tests.contracts.certificates import make_certificates, tls
from tests.sampler_fleet.openai.endpoint import (
    AGENT,
    BASH,
    DEMO,
    HARNESS,
    LIMITS,
    SAMPLER,
    START,
    TOKEN,
    TRAINER,
    Endpoint,
    observed,
    running_endpoint,
)

ASK = {"model": "policy", "messages": list(START), "tools": [BASH]}


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.load(DEMO)


@pytest.fixture(scope="module")
def calls(chat) -> list[np.ndarray]:
    return [chat.reply("ls")]


async def error_of(answer: aiohttp.ClientResponse) -> dict:
    body = await answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert message and "\n" not in message and "Traceback" not in message
    return body["error"]


async def test_what_each_role_may_do(tmp_path, chat, calls, caplog):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, two) = await endpoint.open()
        chats = [("/v1/chat/completions", ASK | {"user": one})]
        judges = [("/v1/groups", {"task_id": "t"})]
        judges += [(f"/v1/sessions/{two}/finish", {"reward": None})]
        for token, may_chat, may_judge in (
            (SAMPLER, False, False),
            (TRAINER, False, False),
            (AGENT, True, False),
            (HARNESS, True, True),
            (TOKEN, True, True),
        ):
            for calls_, may in ((chats, may_chat), (judges, may_judge)):
                for path, body in calls_:
                    answer = await endpoint.post(path, body, token=token)
                    assert answer.status == (200 if may else 403), (token, path)
                    if not may:
                        assert (await error_of(answer))["type"] == "permission_error"
            models = {"Authorization": f"Bearer {token}"}
            answer = await endpoint.http.get(f"{endpoint.url}/v1/models", headers=models)
            assert answer.status == (200 if may_chat else 403)
        assert [model["id"] for model in (await answer.json())["data"]] == ["policy"]
        for headers in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": "Bearer Zürich"},
        ):
            for path in ("/v1/chat/completions", "/v1/groups", "/nowhere"):
                answer = await endpoint.http.post(endpoint.url + path, json=ASK, headers=headers)
                assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
                assert (await error_of(answer))["code"] == "invalid_api_key"
    assert not [t for t in (TOKEN, AGENT, HARNESS, SAMPLER, TRAINER) if t in caplog.text]


async def test_over_tls(tmp_path, chat, calls):
    certificates = make_certificates(tmp_path / "certificates")
    trusted = ssl.create_default_context(cafile=certificates / "ca.pem")
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        app = openai_app(endpoint.groups, Token(TOKEN), max_context_tokens=100)
        async with serving(app, "127.0.0.1:0", tls(certificates, "gateway")) as port:
            _, (one, _) = await endpoint.open()
            endpoint.url = f"https://localhost:{port}"
            headers = {"Authorization": f"Bearer {TOKEN}", "X-Session-Id": one}
            url = f"{endpoint.url}/v1/chat/completions"
            answer = await endpoint.http.post(url, json=ASK, headers=headers, ssl=trusted)
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                await endpoint.http.get(f"http://localhost:{port}/v1/models", headers=headers)


async def test_it_is_off_by_default_and_needs_a_token(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        file, given = tmp_path / "port", {"max_context_tokens": 100, "credentials": Credentials()}
        async with serving_openai("", file, endpoint.groups, **given):
            assert not file.exists()
        with pytest.raises(BadInputError, match="OpenAI endpoint: expected a token file, found no"):
            async with serving_openai("127.0.0.1:0", file, endpoint.groups, **given):
                pass
        given["credentials"] = Credentials(token=Token(TOKEN))
        async with serving_openai("127.0.0.1:0", file, endpoint.groups, **given):
            endpoint.url = f"http://127.0.0.1:{int(file.read_text())}"
            assert len((await endpoint.open())[1]) == 2


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"n": 2}, 400, "unsupported_value", "n"),
        ({"logit_bias": {"5": 100}}, 400, "unsupported_value", "logit_bias"),
        ({"frequency_penalty": 0.5}, 400, "unsupported_value", "frequency_penalty"),
        ({"stop": ["\n"]}, 400, "unsupported_value", "stop"),
        ({"logprobs": True}, 400, "unsupported_value", "logprobs"),
        ({"tool_choice": "required"}, 400, "unsupported_value", "tool_choice"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_value", "response_format"),
        ({"min_p": 0.1}, 400, "unknown_parameter", "min_p"),
        ({"model": "gpt-4o"}, 404, "model_not_found", "model"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": "hello"}, 400, "invalid_value", "messages"),
        ({"messages": [{"role": "robot"}]}, 400, "invalid_value", "messages.0.role"),
        ({"messages": START[1:]}, 400, "unsupported_messages", "messages"),
        ({"messages": [*START, START[1]]}, 400, "unsupported_messages", "messages"),
        ({"messages": [START[0] | {"content": [{"type": "image_url"}]}]}, 400, "invalid_value", ""),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": "many"}, 400, "invalid_value", "max_tokens"),
        ({"stream": "yes"}, 400, "invalid_value", "stream"),
        ({"tools": []}, 400, "unsupported_tools", "tools"),
        ({"tools": [BASH, BASH]}, 400, "unsupported_tools", "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "x"}}]},
            400,
            "unsupported_tools",
            "",
        ),
        ({"user": None}, 400, "session_missing", ""),
        ({"user": "nobody"}, 404, "session_not_found", ""),
        ({"user": "x" * 5000}, 404, "session_not_found", ""),
    ],
)
async def test_what_is_refused(tmp_path, chat, calls, change, status, code, param):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, _) = await endpoint.open()
        answer = await endpoint.post("/v1/chat/completions", ASK | {"user": one} | change)
        error = await error_of(answer)
        assert (answer.status, error["code"]) == (status, code), error
        assert (error["param"] or "").startswith(param)
        assert answer.headers["x-should-retry"] == "false"
        assert endpoint.engine.requests == []


async def test_what_the_run_decides_is_ignored_and_said(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, _) = await endpoint.open()
        fields = {"temperature": 0.0, "top_p": 1, "seed": 3, "n": 1, "stop": None}
        answer = await endpoint.ask(one, START, **fields, parallel_tool_calls=True, store=False)
        assert answer.status == 200
        assert answer.headers["X-Ignored-Parameters"] == "temperature, top_p, seed"
        (request,) = endpoint.engine.requests
        assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 0.9)
        assert "X-Ignored-Parameters" not in (await endpoint.ask(one, START)).headers


async def test_a_tools_message_answers_its_call(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, _) = await endpoint.open()
        reply = await endpoint.reply(one, START)
        wrong = [
            [observed(reply) | {"tool_call_id": "call_7"}],
            [{"role": "tool", "content": "ok"}],
            [observed(reply), START[1]],
            [START[0]],
        ]
        for more in wrong:
            answer = await endpoint.ask(one, [*START, reply, *more])
            assert (await error_of(answer))["code"] == "unsupported_messages"
            assert answer.status == 400
        answer = await endpoint.ask(one, [*START, reply])
        assert "last message" in (await error_of(answer))["message"]
        parts = [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]
        await endpoint.reply(one, [*START, reply, observed(reply) | {"content": parts}])
        assert "\nok\n" in chat.decode(endpoint.engine.requests[1].tokens)


async def test_bodies_of_any_kind(tmp_path, chat, calls, caplog):
    """Never a 500, and never another shape of error."""
    limits = LIMITS.model_copy(update={"max_context_tokens": 512})
    async with running_endpoint(tmp_path, chat, calls, limits=limits) as endpoint:
        _, (one, _) = await endpoint.open()
        paths = ("/v1/chat/completions", "/v1/groups", f"/v1/sessions/{one}/finish")
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Session-Id": one}
        bodies = [b"", b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b'{"messages":' + b"{" * 9999]
        bodies += [b'{"reward": NaN}', b'{"reward": 1e999}', b'{"reward": "1"}', b'{"task_id": ""}']
        bodies += [json.dumps({"task_id": "a\nb"}).encode(), b'{"task_id": "' + b"x" * 999 + b'"}']
        bodies += [json.dumps(ASK | {"messages": [START[0] | {"content": "\ud800"}]}).encode()]
        for path in paths:
            for body in bodies:
                url = endpoint.url + path
                answer = await endpoint.http.post(url, data=body, headers=headers)
                assert answer.status == 400, (path, body[:40])
                await error_of(answer)
            answer = await endpoint.http.post(
                url, data=io.BytesIO(b" " * (2 << 20)), headers=headers
            )
            assert answer.status == 413 and (await error_of(answer))["code"] == "invalid_request"
        for method, path, status in (
            ("GET", "/v1/chat/completions", 405),
            ("POST", "/v1/completions", 404),
            ("POST", "/v1/sessions//finish", 404),
        ):
            answer = await endpoint.http.request(method, endpoint.url + path, headers=headers)
            assert answer.status == status, path
            await error_of(answer)
    assert "unexpected error" not in caplog.text and endpoint.engine.requests == []


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_field = st.sampled_from([*ASK, "stream", "max_tokens", "n", "stop", "user", "metadata", "x"])


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.dictionaries(_field, _json, max_size=4), message=_json)
def test_a_body_is_read_or_refused(changes, message):
    body = ASK | {"messages": [*START, message]} | changes
    try:
        ask = read_ask(json.dumps(body).encode())
    except Refusal as refusal:
        assert refusal.status in (400, 404)
    else:
        assert ask.messages and isinstance(ask.session_id, str)


# How sessions and groups end.


async def judged(endpoint: Endpoint, session_id: str, reward: float | None) -> dict:
    if reward is not None:
        await endpoint.reply(session_id, START)
    answer = await endpoint.finish(session_id, reward)
    assert answer.status == 200, await answer.text()
    return await answer.json()


async def test_what_the_infrastructure_lost_has_no_record(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls, num_sessions=3) as endpoint:
        _, sessions = await endpoint.open("kept")
        for session_id, reward in zip(sessions, (1.0, None, 0.5), strict=True):
            ended = await judged(endpoint, session_id, reward)
        assert ended["sequence"] == 1 and ended["open_session_ids"] == []
        _, sessions = await endpoint.open("dropped")
        for session_id, reward in zip(sessions, (None, 1.0, None), strict=True):
            ended = await judged(endpoint, session_id, reward)
        assert ended["sequence"] == 0
        group = await endpoint.group()
        assert [t.reward for t in group.trajectories] == [1.0, 0.5]
        counters = endpoint.gateway.fleet.counters
        assert (counters["openai_groups_completed"], counters["openai_groups_dropped"]) == (1, 1)
        assert (counters["openai_sessions_finished"], counters["openai_sessions_failed"]) == (3, 3)
        assert endpoint.gateway.spool.count() == 1


async def test_a_session_ends_once(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        group, (one, two) = await endpoint.open()
        answer = await endpoint.finish(one, 1.0)
        assert (await error_of(answer))["code"] == "session_empty" and answer.status == 409
        await endpoint.reply(one, START)
        answer = await endpoint.finish(one, 1.0, group="another")
        assert (await error_of(answer))["code"] == "another_group"
        answer = await endpoint.finish(one, 1.0, ending="failure")
        assert (await error_of(answer))["param"] == "ending"
        for fields in ({"group": group}, {"group": group}, {}, {"ending": "submitted"}):
            answer = await endpoint.finish(one, 1.0, **fields)
            assert (await answer.json())["open_session_ids"] == [two]
        assert endpoint.gateway.fleet.counters["openai_sessions_finished"] == 1
        for answer in (await endpoint.finish(one, 0.0), await endpoint.ask(one, START)):
            assert answer.status == 409 and (await error_of(answer))["code"] == "session_ended"
        ended = await judged(endpoint, two, 0.0)
        assert ended["sequence"] == 1
        for session_id, reward in ((two, 0.0), (one, 1.0)):  # the answer may have been lost
            answer = await endpoint.finish(session_id, reward)
            assert answer.status == 200 and await answer.json() == ended
            answer = await endpoint.finish(session_id, 0.5)
            assert answer.status == 409 and (await error_of(answer))["code"] == "session_ended"
        assert endpoint.gateway.spool.count() == 1
        answer = await endpoint.finish("openai.g9.g9", 1.0)
        assert answer.status == 404 and (await error_of(answer))["code"] == "session_not_found"


async def test_what_ended_long_ago_is_forgotten(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls, max_ended=1) as endpoint:
        opened = [(await endpoint.open())[1] for _ in range(2)]
        for one, two in opened:
            await judged(endpoint, one, None)
            await judged(endpoint, two, None)
        (old, _), (new, _) = opened
        assert (await endpoint.finish(old, None)).status == 404
        assert (await endpoint.finish(new, None, ending="timeout")).status == 200


async def test_no_session_tells_the_id_of_its_sibling(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, sessions = await endpoint.open()
        stem = sessions[0].rpartition(".")[0]
        for index in range(4):
            answer = await endpoint.ask(f"{stem}.{index}", START)
            assert answer.status == 404, "a guess from one's own id"
        assert len({name.rpartition(".")[2] for name in sessions}) == 2


async def test_finishing_stops_a_reply_in_progress(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        endpoint.engine.chunk_tokens = 1
        _, (one, _) = await endpoint.open()
        reached, resume = asyncio.Event(), asyncio.Event()

        async def wait(request, index):
            if index == 2:
                reached.set()
                await resume.wait()

        endpoint.engine.before_chunk = wait
        turns = [asyncio.create_task(endpoint.ask(one, START, stream=s)) for s in (True, False)]
        await reached.wait()
        await endpoint.finish(one, None)
        resume.set()
        stream, answer = [await turn for turn in turns]
        events = (await stream.text()).strip().split("\n\n")
        if stream.status == 200:
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "session_ended"
        assert answer.status == 409
        await endpoint.gateway.until(lambda: endpoint.gateway.fleet.router.place(one) is None)


async def test_sessions_that_nobody_speaks_in_end(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls, idle_s=0.4, num_sessions=3) as endpoint:
        _, sessions = await endpoint.open()
        endpoint.now = 0.3
        for session_id in sessions[:2]:
            await judged(endpoint, session_id, 1.0)
        endpoint.now = 0.5
        group = await endpoint.group()
        assert len(group.trajectories) == 2
        assert endpoint.gateway.fleet.counters["openai_sessions_idle"] == 1
        assert (await endpoint.ask(sessions[2], START)).status == 409
        assert (await endpoint.finish(sessions[2], 1.0)).status == 409


async def test_a_group_that_takes_too_long_ends(tmp_path, chat, calls):
    limits = {"idle_s": 0.4, "group_s": 5.0}
    async with running_endpoint(tmp_path, chat, calls, **limits) as endpoint:
        _, (one, two) = await endpoint.open()
        reached = asyncio.Event()

        async def hang(request, index):
            reached.set()
            await asyncio.Event().wait()

        endpoint.engine.before_chunk = hang
        turn = asyncio.create_task(endpoint.ask(one, START))
        await reached.wait()
        endpoint.now = 4.9
        counters = endpoint.gateway.fleet.counters
        await endpoint.gateway.until(lambda: counters["openai_sessions_idle"] == 1)
        await asyncio.sleep(0.3)
        assert counters["openai_sessions_late"] == 0, "a session that waits for a token isn't idle"
        endpoint.now = 5.1
        await endpoint.gateway.until(lambda: counters["openai_groups_dropped"] == 1)
        assert counters["openai_sessions_late"] == 1
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        assert endpoint.gateway.spool.count() == 0
        assert (await endpoint.ask(two, START)).status == 409


async def test_bounds_of_what_is_open(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls, max_sessions=5) as endpoint:
        _, (one, two) = await endpoint.open()
        await endpoint.open()
        answer = await endpoint.post("/v1/groups", {"task_id": "t"})
        assert answer.status == 429 and answer.headers["Retry-After"]
        assert (await error_of(answer))["code"] == "too_many_sessions"
        for session_id in (one, two):
            await judged(endpoint, session_id, 1.0)
        _, sessions = await endpoint.open()
        for session_id in sessions:
            await judged(endpoint, session_id, 1.0)
        answer = await endpoint.post("/v1/groups", {"task_id": "t"})
        assert answer.status == 429 and (await error_of(answer))["code"] == "trainer_behind"


class FullSpool(Spool):
    """A log whose disk is full."""

    async def append(self, task_id, trajectories, prompt=None) -> int:
        raise OSError(errno.ENOSPC, "no space left")


async def test_a_full_disk_ends_the_gateway(tmp_path, chat, calls):
    """As it does for the gateway's own episodes; nobody is told that the group is safe."""
    spool = FullSpool(tmp_path / "full.sqlite")
    with pytest.raises(OSError, match="no space left"):
        async with running_endpoint(tmp_path, chat, calls, spool=spool) as endpoint:
            _, (one, two) = await endpoint.open()
            await judged(endpoint, one, 1.0)
            await endpoint.reply(two, START)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(endpoint.finish(two, 1.0), 0.5)
    spool.close()
