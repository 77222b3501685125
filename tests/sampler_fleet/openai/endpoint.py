"""The endpoint before a real gateway, with a sampler that answers from a script.

Owns no assertion. What is sampled is a function of the request alone: the reply by how many replies
the buffer holds, the log-probs by the seed and the position. So the same request has the same
record, whoever sends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from contracts import codec
from contracts.credentials import Token
from contracts.pb import rollout_pb2, rollout_pb2_grpc
from contracts.types import (
    CandidateSets,
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TrajectoryGroup,
)
from sampler_fleet.episodes.agent import EpisodeLimits
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.openai.app import openai_app
from sampler_fleet.openai.groups import MAX_ENDED, Groups, Limits
from sampler_fleet.openai.session import Policy
from sampler_fleet.spool import Spool
from sampler_fleet.web.server import serving
from tests.sampler_fleet.fakes import FakeEngine, Harness, completion, running_gateway

DEMO = Path(__file__).parents[3] / "examples" / "demo-checkpoint"
TOKEN, AGENT, HARNESS = "everything-everywhere", "only-for-the-agent", "only-for-the-harness"
SAMPLER, TRAINER = "only-for-samplers", "only-for-the-trainer"
SAMPLING = SamplingParams(top_p=0.9, max_new_tokens=512)
LIMITS = EpisodeLimits(max_context_tokens=2048)
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "What to execute"}},
            "required": ["command"],
        },
    },
}
START = (
    {"role": "system", "content": "Fix it."},
    {"role": "user", "content": "add() subtracts"},
)


class ScriptedEngine(FakeEngine):
    """Replies with the n-th of its list to a buffer that holds n replies."""

    def __init__(self, chat: ChatFormat, replies: list[np.ndarray]) -> None:
        super().__init__()
        self.chat, self.replies = chat, replies

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        self.requests.append(request)
        num_ended = int(np.isin(request.tokens, self.chat.stop_token_ids).sum())
        reply = self.replies[min((num_ended - 2) // 2, len(self.replies) - 1)]
        shown = reply[: request.sampling.max_new_tokens]
        end = FinishReason.STOP
        if shown[-1] not in request.sampling.stop_token_ids:
            end = FinishReason.LENGTH
        for index, start in enumerate(range(0, len(shown), self.chunk_tokens)):
            await asyncio.sleep(0)
            if self.before_chunk:
                await self.before_chunk(request, index)
            part = [int(token) for token in shown[start : start + self.chunk_tokens]]
            reason = end if start + self.chunk_tokens >= len(shown) else None
            record = completion(part, version=self.version, reason=reason)
            at = len(request.tokens) + start + np.arange(len(part))
            logp = -((request.sampling.seed + at) % 997 / 997).astype(np.float32)
            candidates = CandidateSets(
                offsets=record.candidates.offsets,
                ids=record.candidates.ids,
                logp=np.repeat(logp, 2),
            )
            yield dataclasses.replace(record, sampler_logp=logp, candidates=candidates)


@dataclass
class Endpoint:
    """A running endpoint, and what a client does with it."""

    gateway: Harness
    engine: ScriptedEngine
    groups: Groups
    http: aiohttp.ClientSession
    url: str
    now: float = 0.0

    async def post(self, path: str, body: object, *, token: str = TOKEN, **headers: str):
        given = {"Authorization": f"Bearer {token}"} | headers
        return await self.http.post(self.url + path, json=body, headers=given)

    async def open(self, task_id: str = "task") -> tuple[str, list[str]]:
        group = await (await self.post("/v1/groups", {"task_id": task_id})).json()
        return group["id"], group["open_session_ids"]

    async def ask(self, session_id: str, messages, *, headers: dict | None = None, **fields):
        body = {"model": "policy", "messages": list(messages), "tools": [BASH]} | fields
        given = {"X-Session-Id": session_id} | (headers or {})
        return await self.post("/v1/chat/completions", body, **given)

    async def reply(self, session_id: str, messages, **fields) -> dict:
        """The message of a reply, as a client sends it back."""
        answer = await self.ask(session_id, messages, **fields)
        body = await answer.json()
        assert answer.status == 200, body
        return body["choices"][0]["message"]

    async def finish(self, session_id: str, reward: float | None, **fields):
        return await self.post(f"/v1/sessions/{session_id}/finish", {"reward": reward} | fields)

    async def group(self, after: int = 0) -> TrajectoryGroup:
        """The next group, as a trainer gets it."""
        async with self.gateway.channel() as channel:
            stub = rollout_pb2_grpc.RolloutStub(channel)
            call = stub.StreamGroups(rollout_pb2.StreamGroupsRequest(after=after))
            message = await asyncio.wait_for(call.read(), 10)
            call.cancel()
        return codec.group_from_pb(message)


def observed(message: dict, content: str = "ok") -> dict:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}


@contextlib.asynccontextmanager
async def running_endpoint(
    directory: Path,
    chat: ChatFormat,
    replies: list[np.ndarray],
    *,
    with_tool: bool = True,
    limits: EpisodeLimits = LIMITS,
    num_sessions: int = 2,
    max_sessions: int = 100,
    max_ended: int = MAX_ENDED,
    idle_s: float = 1000.0,
    group_s: float = 10_000.0,
    spool: Spool | None = None,
    **config: object,
) -> AsyncIterator[Endpoint]:
    """The endpoint, its gateway and one sampler of `replies`."""
    tokens = directory / "tokens"
    roles = (("sampler", SAMPLER), ("trainer", TRAINER), ("agent", AGENT), ("harness", HARNESS))
    tokens.write_text("\n".join([TOKEN, *(" ".join(pair) for pair in roles)]))
    names = itertools.count()
    async with running_gateway(directory, vocab_size=1024, **config) as gateway:
        engine = ScriptedEngine(chat, replies)
        await gateway.start_ready_sampler("big-0", engine=engine)
        endpoint: Endpoint
        groups = Groups(
            Policy(
                generate=gateway.fleet.generate,
                end_session=gateway.fleet.end_session,
                chat=chat,
                with_tool=with_tool,
                sampling=SAMPLING,
                limits=limits,
            ),
            spool or gateway.spool,
            Limits(
                group_size=num_sessions,
                idle_s=idle_s,
                group_s=group_s,
                max_sessions=max_sessions,
                max_ended=max_ended,
                is_behind=lambda: gateway.producer.backlog >= 2,
            ),
            seed=7,
            counters=gateway.fleet.counters,
            new_id=lambda: f"g{next(names)}",
            clock=lambda: endpoint.now,
        )
        app = openai_app(groups, Token(file=tokens), max_context_tokens=limits.max_context_tokens)
        async with serving(app, "127.0.0.1:0", None) as port, aiohttp.ClientSession() as http:
            endpoint = Endpoint(gateway, engine, groups, http, f"http://127.0.0.1:{port}")
            job = asyncio.create_task(groups.run())
            try:
                yield endpoint
            finally:
                job.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await job
