"""Conversations through the endpoint, and the records that come of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator

import numpy as np
import pytest

from contracts import codec
from contracts.pb import rollout_pb2_grpc
from contracts.types import Completion, Ending, Trajectory
from sampler_fleet.episodes.agent import AgentConfig, run_episode
from sampler_fleet.episodes.base import ExecResult
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.grading import Grader
from sampler_fleet.episodes.prompts import SUBMIT_COMMAND
from sampler_fleet.openai.reader import ReplyReader
from sampler_fleet.producer import episode_seed
from tests.sampler_fleet.episodes import qwen
from tests.sampler_fleet.fakes import make_task
from tests.sampler_fleet.openai.endpoint import (
    BASH,
    DEMO,
    LIMITS,
    SAMPLING,
    START,
    Endpoint,
    observed,
    running_endpoint,
)

COMMANDS = ("cat a.py", "sed -i 's/-/+/' a.py", SUBMIT_COMMAND)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.load(DEMO)


@pytest.fixture(scope="module")
def calls(chat) -> list[np.ndarray]:
    return [chat.reply(command) for command in COMMANDS]


async def converse(endpoint: Endpoint, session_id: str, num_turns: int) -> list[dict]:
    """The messages up to the last reply."""
    messages = list(START)
    for turn in range(num_turns):
        reply = await endpoint.reply(session_id, messages)
        messages.append(reply)
        if turn < num_turns - 1:
            messages.append(observed(reply, f"output {turn}"))
    return messages


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether two records are the same bytes, but for how long they took."""
    return (
        len(
            {
                codec.trajectory_to_pb(dataclasses.replace(t, seconds=0)).SerializeToString()
                for t in (a, b)
            }
        )
        == 1
    )


async def test_a_conversation_with_calls(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, two) = await endpoint.open()
        answer = await endpoint.ask(one, START)
        body = await answer.json()
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function" and call["function"]["name"] == "bash"
        assert json.loads(call["function"]["arguments"]) == {"command": COMMANDS[0]}
        prompt = chat.start(START[0]["content"], START[1]["content"])
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(calls[0]),
            "total_tokens": len(prompt) + len(calls[0]),
        }
        assert answer.headers["X-Session-Id"] == one and body["model"] == "policy"
        for session_id in (one, two):
            await converse(endpoint, session_id, 3)
        assert (await (await endpoint.finish(one, 1.0)).json())["sequence"] is None
        assert (await (await endpoint.finish(two, 0.0)).json())["sequence"] == 1
        group = await endpoint.group()
        assert (group.sequence, group.task_id) == (1, "task")
        assert [t.reward for t in group.trajectories] == [1.0, 0.0]
        whole = [prompt, calls[0], chat.observe("output 0"), calls[1], chat.observe("output 1")]
        whole.append(calls[2])
        for trajectory in group.trajectories:
            assert trajectory.tokens.tolist() == np.concatenate(whole).tolist()
            sampled = np.concatenate(calls).tolist()
            assert trajectory.tokens[trajectory.loss_mask].tolist() == sampled
            assert (trajectory.ending, trajectory.num_turns) == (Ending.SUBMITTED, 3)
        await endpoint.gateway.until(lambda: endpoint.engine.ended == [one, two])


async def test_the_records_are_those_of_generate(tmp_path, chat, calls):
    """Byte for byte, turn for turn, for the same buffer and seed."""
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, sessions = await endpoint.open()
        for session_id in sessions:
            await converse(endpoint, session_id, 3)
            await endpoint.finish(session_id, 1.0)
        ours = (await endpoint.group()).trajectories
        asked = [r for r in endpoint.engine.requests if r.session_id == sessions[0]]
        assert len({request.sampling.seed for request in asked}) == 3
        async with endpoint.gateway.channel() as channel:
            stub = rollout_pb2_grpc.RolloutStub(channel)
            parts = []
            for number, request in enumerate(asked):
                again = dataclasses.replace(request, request_id=f"x/{number}", session_id="x")
                call = stub.Generate(codec.generate_to_pb(again))
                parts += [codec.chunk_from_pb(message) async for message in call]
        whole = Completion.concatenate(parts)
        assert whole.tokens.tobytes() == ours[0].tokens[ours[0].loss_mask].tobytes()
        assert whole.sampler_logp.tobytes() == ours[0].sampler_logp.tobytes()
        for name in ("offsets", "ids", "logp"):
            record = getattr(ours[0].candidates, name)
            assert getattr(whole.candidates, name).tobytes() == record.tobytes()
        assert ours[0].version.tolist() == [1] * len(whole)
        assert ours[0].sampler_logp.tobytes() != ours[1].sampler_logp.tobytes(), "another seed"


class FakeSandboxes:
    """Sandboxes in which the n-th command says `output n`."""

    @contextlib.asynccontextmanager
    async def open(self, tree) -> AsyncIterator[FakeSandboxes]:
        self.num = -1
        yield self

    async def exec(self, command, **_) -> ExecResult:
        self.num += 1
        return ExecResult(
            returncode=0, output=f"output {self.num}", num_bytes=8, timed_out=False, seconds=0
        )


async def test_the_record_is_that_of_an_episode_of_our_own(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, sessions = await endpoint.open()
        for session_id in sessions:
            await converse(endpoint, session_id, 2)
            await endpoint.finish(session_id, 0.0, ending="turn_limit")
        theirs = (await endpoint.group()).trajectories[0]
        own = await run_episode(
            dataclasses.replace(make_task("task"), issue=START[1]["content"]),
            session_id=sessions[0],
            generator=endpoint.gateway.fleet,
            chat=chat,
            sandboxes=FakeSandboxes(),
            grader=Grader(FakeSandboxes()),
            limits=LIMITS.model_copy(update={"max_turns": 2}),
            sampling=dataclasses.replace(SAMPLING, seed=episode_seed(f"7/{sessions[0]}")),
            agent=AgentConfig.model_construct(
                **(AgentConfig().model_dump() | {"system_prompt": START[0]["content"]})
            ),
        )
        assert own.num_turns == 2 and same(own, theirs)
        assert not same(own, dataclasses.replace(theirs, reward=1.0))


async def test_the_same_request_again_gets_the_same_reply(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, _) = await endpoint.open()
        first, second = await asyncio.gather(*(endpoint.reply(one, START) for _ in range(2)))
        assert first == second and len(endpoint.engine.requests) == 1
        assert endpoint.gateway.fleet.counters["openai_repeats"] == 1


async def test_a_client_that_hangs_up_finds_its_reply_later(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, _) = await endpoint.open()
        reached, resume = asyncio.Event(), asyncio.Event()

        async def wait(request, index):
            reached.set()
            await resume.wait()

        endpoint.engine.before_chunk = wait
        for stream in (False, True):
            gone = asyncio.create_task(endpoint.ask(one, START, stream=stream))
            await reached.wait()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        resume.set()
        message = await endpoint.reply(one, START)
        assert message["tool_calls"] and len(endpoint.engine.requests) == 1
        assert endpoint.engine.aborted == []


async def test_a_conversation_that_was_changed_is_refused_or_branches(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, two) = await endpoint.open()
        messages = await converse(endpoint, one, 3)
        forged = json.loads(json.dumps(messages))
        forged[2]["tool_calls"][0]["function"]["arguments"] = '{"command": "ls"}'
        more = [*messages, observed(messages[-1])]
        changed = [*messages[:3], observed(messages[2], "else")]
        unknown = [*messages[:4], {"role": "assistant", "content": "I did it."}, START[1]]
        for wrong, at in (
            (forged + more[-1:], 2),
            (changed, 3),
            (unknown, 4),
            (START[:1], 0),
            (START, 0),
            (more[1:], 0),
            ([START[0], START[0], *more[2:]], 1),
        ):
            answer = await endpoint.ask(one, wrong)
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (409, "session_conflict"), error
            assert error["param"] == f"messages.{at}"
            assert answer.headers["x-should-retry"] == "false"
        for wrong in (forged + more[-1:], unknown):
            answer = await endpoint.ask(one, wrong, headers={"X-Session-Branch": "new"})
            assert answer.status == 409, "only what this session sampled is a reply"
        reply = await endpoint.reply(one, changed, headers={"X-Session-Branch": "new"})
        assert endpoint.gateway.fleet.counters["openai_turns_abandoned"] == 2
        await endpoint.reply(one, [*changed, reply, observed(reply)])
        seeds = [request.sampling.seed for request in endpoint.engine.requests]
        assert len(set(seeds)) == len(seeds) == 5, "no draw is made twice"
        await converse(endpoint, two, 1)
        for session_id in (one, two):
            await endpoint.finish(session_id, 1.0)
        record = (await endpoint.group()).trajectories[0]
        assert record.num_turns == 3
        text = chat.decode(record.tokens)
        assert "else" in text and "output 0" not in text


async def test_replies_that_agents_drop_stay_in_the_buffer(tmp_path, chat, calls):
    replies = [chat.reply_text("I think."), chat.reply_text("Still."), *calls]
    async with running_endpoint(tmp_path, chat, replies) as endpoint:
        _, sessions = await endpoint.open()
        error = {"role": "user", "content": "There was no tool call."}
        for session_id in sessions:
            answer = await (await endpoint.ask(session_id, START)).json()
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": "I think."}
            kept = await endpoint.reply(session_id, [*START, error])
            reply = await endpoint.reply(session_id, [*START, error, kept, error])
            assert reply["tool_calls"]
            await endpoint.reply(session_id, [*START, error, error, reply, observed(reply)])
            await endpoint.finish(session_id, 1.0)
        record = (await endpoint.group()).trajectories[0]
        assert chat.decode(record.tokens).count("There was no tool call.") == 2
        sampled = chat.decode(record.tokens[record.loss_mask])
        assert sampled.startswith("I think.") and "Still." in sampled
        assert (record.num_turns, record.num_format_errors) == (4, 2)
        assert endpoint.gateway.fleet.counters["format_error_no_call"] == 4


async def test_a_reply_that_is_cut_off_and_a_full_buffer(tmp_path, chat):
    replies = [chat.reply("echo " + "word " * 20)]
    limits = LIMITS.model_copy(update={"max_context_tokens": 260})
    async with running_endpoint(tmp_path, chat, replies, limits=limits) as endpoint:
        _, sessions = await endpoint.open()
        for session_id in sessions:
            answer = await (await endpoint.ask(session_id, START, max_tokens=5)).json()
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
            assert answer["usage"]["completion_tokens"] == 5
            messages = [*START, choice["message"], {"role": "user", "content": "Shorter."}]
            await endpoint.reply(session_id, messages)
            messages[-1] = {"role": "user", "content": "No. " * 100}
            branch = {"X-Session-Branch": "new"}
            answer = await endpoint.ask(session_id, messages, headers=branch)
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (400, "context_length_exceeded"), error
            assert "maximum context length is 260 tokens" in error["message"]
            await endpoint.finish(session_id, 0.0, ending="length")
        record = (await endpoint.group()).trajectories[0]
        assert len(record.tokens) <= 260 and record.ending == Ending.LENGTH
        start = len(chat.start(START[0]["content"], START[1]["content"]))
        assert record.tokens[start + 5] == chat.stop_token_ids[0]
        assert record.loss_mask[start : start + 6].tolist() == [True] * 5 + [False]
        assert endpoint.gateway.fleet.counters["openai_turns_abandoned"] == 0


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
async def test_a_stream_says_what_the_object_says(tmp_path, chat, chunk_tokens):
    replies = [chat.reply_text("Grüße, 世界! 🙂 <tool_call> is a word"), chat.reply("echo '🙂'")]
    async with running_endpoint(tmp_path, chat, replies) as endpoint:
        endpoint.engine.chunk_tokens = chunk_tokens
        _, (one, two) = await endpoint.open()
        for session_id, messages in ((one, list(START)), (two, list(START))):
            for _ in range(2):
                options = {"stream": True, "stream_options": {"include_usage": True}}
                answer = await endpoint.ask(session_id, messages, **options)
                assert answer.status == 200 and answer.content_type == "text/event-stream"
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                *events, done, nothing = (await answer.text()).split("\n\n")
                assert (done, nothing) == ("data: [DONE]", "")
                *chunks, usage = [json.loads(event.removeprefix("data: ")) for event in events]
                assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
                whole = await (await endpoint.ask(session_id, messages)).json()
                assert usage["usage"] == whole["usage"] and usage["choices"] == []
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
                message = whole["choices"][0]["message"]
                assert deltas[0]["role"] == "assistant"
                told = "".join(delta.get("content") or "" for delta in deltas)
                assert told == (message["content"] or "")
                called = [c for delta in deltas for c in delta.get("tool_calls", ())]
                assert called == [{"index": 0} | c for c in message.get("tool_calls", ())]
                reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
                assert reasons[-1] == whole["choices"][0]["finish_reason"]
                assert set(reasons[:-1]) == {None}
                messages += [message, {"role": "user", "content": "Go on."}]
            assert messages[2]["content"] == "Grüße, 世界! 🙂 <tool_call> is a word"
            assert json.loads(messages[4]["tool_calls"][0]["function"]["arguments"]) == {
                "command": "echo '🙂'"
            }


CALL = {
    "qwen3": '{"name": "bash", "arguments": {"command": "ls"}}',
    "qwen3.6": "<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>",
}


@pytest.mark.parametrize("name", ["qwen3", "qwen3.6"])
async def test_thoughts_are_told_apart(tmp_path, name):
    chat = ChatFormat.load(qwen.write_checkpoint(tmp_path / "qwen", name))
    opening = "" if name == "qwen3.6" else "<think>"  # the template writes it, or the policy does
    text = f"{opening}\nLet me <look>.\n</think>\n\nSo:\n<tool_call>\n{CALL[name]}\n</tool_call>"
    tokens = qwen.build_tokenizer().encode(f"{text}<|im_end|>").ids
    reply = np.asarray(tokens, np.int32)
    async with running_endpoint(tmp_path, chat, [reply]) as endpoint:
        _, (one, two) = await endpoint.open()
        for session_id, chunk_tokens in ((one, 1), (two, 50)):
            endpoint.engine.chunk_tokens = chunk_tokens
            message = await endpoint.reply(session_id, START)
            assert message["reasoning_content"] == "\nLet me <look>.\n"
            assert message["content"] == "\n\nSo:\n"
            call = message["tool_calls"][0]["function"]
            assert json.loads(call["arguments"]) == {"command": "ls"}
        del message["reasoning_content"]  # many clients don't send it back
        await endpoint.reply(two, [*START, message, observed(message)])
        first, _, second = (request.tokens for request in endpoint.engine.requests)
        assert second[len(first) :][: len(reply)].tolist() == reply.tolist()


async def test_bytes_that_are_no_text_are_told_at_once(chat):
    """A policy may write them without end; reading stays linear, and nothing is lost."""
    half = next(t for t in range(600) if chat.decode([t]) == "\ufffd")
    reader = ReplyReader(chat, chat.start("a", "b"), with_tool=True)
    told = "".join(d.text for _ in range(50) for d in reader.feed(np.asarray([half], np.int32)))
    assert len(told) >= 46
    told += "".join(delta.text for delta in reader.finish(has_call=False))
    assert told == "\ufffd" * 50 == reader.text["content"]


async def test_without_a_tool_replies_are_text(tmp_path):
    chat = ChatFormat.load(DEMO, mode="text")
    replies = [chat.reply("ls")]
    async with running_endpoint(tmp_path, chat, replies, with_tool=False) as endpoint:
        _, (one, _) = await endpoint.open()
        assert (await endpoint.ask(one, START)).status == 400, "it is offered no tool"
        message = await endpoint.reply(one, START, tools=None)
        assert message == {"role": "assistant", "content": "```bash\nls\n```"}
        answer = {"role": "user", "content": "a.py"}
        assert await endpoint.reply(one, [*START, message, answer], tools=[])


async def test_a_sampler_that_dies_is_followed_by_another(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls, grace_seconds=0.1) as endpoint:
        _, (one, _) = await endpoint.open()
        messages = await converse(endpoint, one, 1)
        messages.append(observed(messages[-1]))
        await endpoint.gateway.members["big-0"].kill()
        answer = await endpoint.ask(one, messages)
        error = (await answer.json())["error"]
        assert (answer.status, error["type"]) == (503, "server_error"), error
        assert answer.headers["Retry-After"]
        await endpoint.gateway.start_ready_sampler("big-1", engine=endpoint.engine)
        assert (await endpoint.reply(one, messages))["tool_calls"]


async def test_the_session_in_the_body(tmp_path, chat, calls):
    async with running_endpoint(tmp_path, chat, calls) as endpoint:
        _, (one, two) = await endpoint.open()
        for fields in ({"user": one}, {"metadata": {"session_id": two}, "user": "somebody"}):
            body = {"model": "policy", "messages": list(START), "tools": [BASH]} | fields
            assert (await endpoint.post("/v1/chat/completions", body)).status == 200
        assert [request.session_id for request in endpoint.engine.requests] == [one, two]
