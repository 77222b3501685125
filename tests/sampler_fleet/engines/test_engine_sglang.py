"""The engine against a server that answers as SGLang does, and then as it should not."""

from __future__ import annotations

import asyncio
import contextlib
import json

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from contracts.errors import BadInputError, DirtyProcessError, RetryError
from contracts.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    WeightFormat,
    check_completion,
)
from sampler_fleet.engines.sglang import SglangEngine
from sampler_fleet.engines.sglang_weights import server_module
from tests.sampler_fleet.engines.engine_checkpoints import random_tensors, write_checkpoint

TOP = SamplingParams(top_p=0.9, top_k=4, max_new_tokens=20)
ENDLESS = SamplingParams(top_p=0.9, top_k=4, max_new_tokens=400)


class FakeSglang:
    """Token 5 for ever, each with one candidate; weights are the manifest's checksums."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[dict] = []  # of /generate
        self.info = {
            "incremental_streaming_output": True,
            "skip_tokenizer_init": True,
            "max_req_input_len": 512,
            "max_total_num_tokens": 1000,
            "sampling_mask_max_tokens": 64,
            "disable_overlap_schedule": True,
        }
        self.label = "default"
        self.checksums: dict[str, str] = {}
        self.next_checksums: dict[str, str] = {}  # what an update brings
        self.update = {"success": True}
        self.probe: float | None = -1.0
        self.status = 200  # of /generate
        self.silent = False  # ends a stream before its end
        self.aborted: set[str] = set()
        self.app = web.Application()
        self.app.router.add_route("*", "/{name}", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.calls.append(name)
        body = await request.json() if request.can_read_body else {}
        if name == "generate":
            return await self._generate(request, body)
        if name == "update_weights_from_disk" and self.update["success"]:
            self.label, self.checksums = body["weight_version"], self.next_checksums
            assert body["flush_cache"] is False
        if name == "abort_request":
            self.aborted.add(body["rid"])
        replies = {
            "server_info": self.info,
            "model_info": {"weight_version": self.label},
            "weights_checker": {"success": True, "ranks": [{"checksums": self.checksums}]},
            "update_weights_from_disk": self.update,
        }
        failed = name == "update_weights_from_disk" and not self.update["success"]
        return web.json_response(replies.get(name), status=400 if failed else 200)

    async def _generate(self, request: web.Request, body: dict) -> web.StreamResponse:
        if "logprob_start_len" in body:
            rows = [[self.probe, token, None] for token in body["input_ids"]]
            return web.json_response({"meta_info": {"input_token_logprobs": rows}})
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        num = body["sampling_params"]["max_new_tokens"]
        with contextlib.suppress(ConnectionError):
            for index in range(num):
                aborted = body["rid"] in self.aborted
                finish = {"type": "abort"} if aborted else {"type": "length"}
                last = aborted or index == num - 1
                meta = {
                    "finish_reason": finish if last else None,
                    "weight_version": self.label,
                    "output_token_sampling_mask": [[5]],
                    "output_token_sampling_logprobs": [[0.0]],
                }
                event = json.dumps({"output_ids": [5], "meta_info": meta}).encode()
                await response.write(b"data: " + event + b"\n\n")
                if self.silent or last:
                    break
                await asyncio.sleep(0.001)
            if not self.silent:
                await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def fake():
    fake = FakeSglang()
    async with TestServer(fake.app) as server:
        fake.address = str(server.make_url("")).rstrip("/")
        yield fake


@pytest.fixture
async def engine(fake):
    engine = SglangEngine(
        fake.address, weight_format=WeightFormat.BF16, max_context_tokens=500, chunk_tokens=4
    )
    yield engine
    await engine.close()


@pytest.fixture
def publish(fake, tmp_path):
    """Writes a version, and has the fake hold it after the next update."""

    def publish(version: int):
        directory = tmp_path / f"v{version}"
        tensors = random_tensors(seed=version)
        manifest = write_checkpoint(directory, tensors=tensors, version=version)
        fake.next_checksums = {
            f"{server_module(tensor.name)}.weight": tensor.checksum for tensor in manifest.tensors
        }
        return directory, manifest

    return publish


def request_for(sampling=TOP, session="s", name="r") -> GenerateRequest:
    tokens = np.int32([1, 2, 3])
    return GenerateRequest(request_id=name, session_id=session, tokens=tokens, sampling=sampling)


async def complete(engine, request=None) -> Completion:
    return Completion.concatenate([c async for c in engine.generate(request or request_for())])


@pytest.fixture
async def loaded(fake, engine, publish):
    # the server comes with weights of the same architecture
    publish(9)
    fake.checksums = fake.next_checksums
    await engine.load(*publish(1))
    return engine


async def test_a_switch_goes_in_order(fake, loaded, publish):
    fake.calls.clear()
    pause_s = await loaded.load(*publish(2))
    assert fake.calls == [
        "pause_generation",
        "update_weights_from_disk",
        "continue_generation",
        "model_info",
        "weights_checker",
        "generate",
    ]
    assert pause_s > 0
    assert (await complete(loaded)).spans[0].version == 2


async def test_a_stream_is_cut_into_chunks(loaded):
    chunks = [chunk async for chunk in loaded.generate(request_for())]
    assert [len(chunk) for chunk in chunks] == [4] * 5
    whole = Completion.concatenate(chunks)
    check_completion(whole, sampler_id="test", truncates=True)
    assert whole.finish_reason == FinishReason.LENGTH


async def test_sessions_share_a_cache_only_with_those_that_began_under_the_same_weights(
    fake, loaded, publish
):
    for session in ("a", "b"):
        await complete(loaded, request_for(session=session))
    await loaded.load(*publish(2))
    for session in ("a", "c"):
        await complete(loaded, request_for(session=session))
    loaded.end_session("a")
    await complete(loaded, request_for(session="a"))
    first, second, continued, later, again = (body["extra_key"] for body in fake.bodies)
    assert first == second == continued
    assert later == again != first
    assert len({body["rid"] for body in fake.bodies}) == 5


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda fake: fake.update.update(success=False, message="no space"), "no space"),
        (lambda fake: setattr(fake, "probe", None), "not finite"),
        (lambda fake: fake.next_checksums.update({"model.rotary.scale": "?"}), r"model\.rotary"),
        (
            lambda fake: fake.next_checksums.update(
                {"lm_head.weight": fake.checksums["lm_head.weight"]}
            ),
            "lm_head",
        ),
        (lambda fake: setattr(fake, "next_checksums", fake.checksums), "embed_tokens|lm_head"),
    ],
    ids=["failed update", "NaN", "one more change", "one less change", "no change"],
)
async def test_after_a_wrong_switch_nothing_is_served(fake, loaded, publish, spoil, complaint):
    stream = asyncio.create_task(complete(loaded, request_for(ENDLESS, name="runs")))
    await asyncio.sleep(0.05)
    version = publish(2)
    spoil(fake)
    fake.calls.clear()
    with pytest.raises(DirtyProcessError, match=complaint):
        await loaded.load(*version)
    for call in (stream, complete(loaded), loaded.load(*version)):
        with pytest.raises(DirtyProcessError, match=complaint):
            await call
    if not fake.update["success"]:
        assert "continue_generation" not in fake.calls


async def test_weights_of_somebody_else_are_not_served(fake, loaded):
    for label in ("3", "default"):
        fake.label = label
        with pytest.raises(DirtyProcessError):
            await complete(loaded)


@pytest.mark.parametrize(("status", "error"), [(400, BadInputError), (503, RetryError)])
async def test_a_refused_request_leaves_the_engine_as_it_was(fake, loaded, status, error):
    fake.status = status
    with pytest.raises(error):
        await complete(loaded)
    fake.status = 200
    await complete(loaded)
    assert loaded.load_now().num_running == loaded.load_now().num_waiting == 0


async def test_a_stream_that_breaks_is_tried_again_by_others(fake, loaded):
    fake.silent = True
    with pytest.raises(RetryError, match="without saying why"):
        await complete(loaded)


async def test_what_is_left_is_aborted_at_the_server(fake, loaded):
    async with contextlib.aclosing(loaded.generate(request_for(ENDLESS))) as stream:
        await anext(stream)
    async with asyncio.timeout(5):
        while not fake.aborted:
            await asyncio.sleep(0.01)
    assert fake.aborted == {fake.bodies[0]["rid"]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("incremental_streaming_output", False),
        ("skip_tokenizer_init", False),
        ("max_req_input_len", 499),
    ],
)
async def test_a_server_started_otherwise_is_refused(fake, engine, publish, field, value):
    publish(9)
    fake.checksums = fake.next_checksums
    fake.info[field] = value
    with pytest.raises(BadInputError):
        await engine.load(*publish(1))
    assert "update_weights_from_disk" not in fake.calls


async def test_a_tensor_that_the_server_would_skip_is_refused(fake, engine, publish):
    publish(9)
    fake.checksums = {n: c for n, c in fake.next_checksums.items() if "q_norm" not in n}
    with pytest.raises(BadInputError, match="q_norm"):
        await engine.load(*publish(1))
    assert "pause_generation" not in fake.calls
