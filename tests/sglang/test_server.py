"""What only a real server shows: its numbers, its labels, its failures, and what brings it back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import DirtyProcessError, RetryError
from contracts.types import (
    Completion,
    KvFormat,
    Manifest,
    SamplingParams,
    WeightFormat,
)
from sampler_fleet.engines.sglang import SglangEngine
from tests.sampler_fleet.engines.engine_checkpoints import CONFIG, random_tensors, write_checkpoint
from tests.sampler_fleet.engines.test_engine_contract import (
    GREEDY,
    MAX_CONTEXT,
    TOLERANCE,
    TOP,
    chunks_of,
    complete,
    distance,
    distribution,
    prompt,
    request_for,
)
from tests.sglang.conftest import local_server

VOCAB_MULTIPLE = 64  # to which SGLang fills up the vocabulary
ALL = SamplingParams(num_candidates=CONFIG["vocab_size"], max_new_tokens=1)


def publish(root: Path, version: int, seed: int | None = None, **changed) -> tuple[Path, Manifest]:
    directory = root / f"v{version}-{seed or version}"
    tensors = random_tensors(seed=seed or version) | changed
    return directory, write_checkpoint(directory, tensors=tensors, version=version)


def attach(server: str) -> SglangEngine:
    return SglangEngine(server, weight_format=WeightFormat.BF16, max_context_tokens=MAX_CONTEXT)


@contextlib.asynccontextmanager
async def attached(server: str):
    engine = attach(server)
    try:
        yield engine
    finally:
        await engine.close()


async def post(server: str, path: str, body: dict) -> dict:
    async with aiohttp.ClientSession(server) as http, http.post(path, json=body) as response:
        return await response.json(content_type=None)


def reference(directory: Path, tokens: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Log-probs of every next token by transformers, float64 [N, V]."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


def tell(capsys, figure: str) -> None:
    """Shown also where the test passes."""
    with capsys.disabled():
        print(f"\n{figure}")  # noqa: T201


async def differences(engine: SglangEngine, directory: Path) -> dict[str, np.ndarray]:
    """|sampler_logp - transformers'| of 300 drawn tokens, and transformers' own error in BF16."""
    whole = await complete(engine, prompt(40), dataclasses.replace(ALL, max_new_tokens=300))
    buffer = np.concatenate([prompt(40), whole.tokens])
    rows = np.arange(39, len(buffer) - 1), whole.tokens
    exact = reference(directory, buffer, torch.float32)[rows]
    rounded = reference(directory, buffer, torch.bfloat16)[rows]
    return {"ours": np.abs(whole.sampler_logp - exact), "theirs": np.abs(rounded - exact)}


async def test_log_probs_in_bf16_are_as_good_as_those_of_transformers(server, tmp_path, capsys):
    directory, manifest = publish(tmp_path, 1)
    async with attached(server) as engine:
        await engine.load(directory, manifest)
        found = await differences(engine, directory)
    for name, error in found.items():
        tell(capsys, f"{name} against float32: max {error.max():.3f}, mean {error.mean():.4f}")
    # Now and then rounding sends a token to another expert, in either. The largest error is one of
    # those, of any size, and weighs on the mean: what most tokens have is compared.
    for part in (0.5, 0.75, 0.9):
        assert np.quantile(found["ours"], part) < 2 * np.quantile(found["theirs"], part)


async def test_every_tensor_is_held_as_the_checkpoint_has_it(server, tmp_path):
    tensors = random_tensors(seed=5)
    async with attached(server) as engine:
        await engine.load(*publish(tmp_path, 4))
        await engine.load(*publish(tmp_path, 5))
        held = (await post(server, "/weights_checker", {"action": "checksum"}))["ranks"][0]
    expected = {}
    for name in held["checksums"]:
        layer = name.rpartition(".self_attn.")[0] or name.rpartition(".mlp.")[0]
        experts = [f"{layer}.mlp.experts.{e}" for e in range(CONFIG["num_experts"])]
        if name.endswith("qkv_proj.weight"):
            parts = [tensors[f"{layer}.self_attn.{x}_proj.weight"] for x in "qkv"]
            tensor = torch.cat(parts)
        elif name.endswith("w13_weight"):
            both = ("gate_proj", "up_proj")
            tensor = torch.stack(
                [torch.cat([tensors[f"{e}.{x}.weight"] for x in both]) for e in experts]
            )
        elif name.endswith("w2_weight"):
            tensor = torch.stack([tensors[f"{e}.down_proj.weight"] for e in experts])
        else:
            tensor = tensors[name]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = -len(tensor) % VOCAB_MULTIPLE  # which no token reaches
            tensor = torch.cat([tensor, tensor.new_zeros(rows, tensor.shape[1])])
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        expected[name] = hashlib.sha256(data).hexdigest()[:16]
    assert len(expected) == 3 + 9 * CONFIG["num_hidden_layers"]
    assert held["checksums"] == expected


async def test_each_token_bears_the_version_that_made_it(server, tmp_path):
    """The server's own label is one token early: the step in flight when decoding pauses."""
    old, new = publish(tmp_path, 1), publish(tmp_path, 2)
    sampling = dataclasses.replace(TOP, max_new_tokens=400)
    async with attached(server) as engine:
        await engine.load(*old)
        requests = [request_for(prompt(30, seed=i), sampling) for i in range(3)]
        replies = [asyncio.create_task(chunks_of(engine, request)) for request in requests]
        while engine.load_now().num_running < len(requests):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        pause_s = await engine.load(*new)
        wholes = [Completion.concatenate(chunks) for chunks in await asyncio.gather(*replies)]
        await engine.load(*old)
        one = dataclasses.replace(TOP, max_new_tokens=1)
        for request, whole in zip(requests, wholes, strict=True):
            assert [span.version for span in whole.spans] == [1, 2]
            switch = whole.spans[0].end
            for position, of_old in ((switch - 1, True), (switch, False)):
                buffer = [*request.tokens.tolist(), *whole.tokens[:position].tolist()]
                fresh = distribution(await complete(engine, buffer, one))
                assert (distance(distribution(whole, position), fresh) < TOLERANCE) == of_old
    assert 0 < pause_s < 30


async def test_a_paused_server_keeps_requests_waiting(server, tmp_path):
    async with attached(server) as engine:
        await engine.load(*publish(tmp_path, 1))
        await post(server, "/pause_generation", {"mode": "in_place"})
        reply = asyncio.create_task(complete(engine, prompt(5), GREEDY))
        await asyncio.sleep(0.5)
        assert not reply.done()
        assert (engine.load_now().num_running, engine.load_now().num_waiting) == (0, 1)
        await post(server, "/continue_generation", {})
        assert len(await reply) == GREEDY.max_new_tokens


async def test_a_dirty_engine_says_so_and_another_one_recovers(server, tmp_path):
    old, new = publish(tmp_path, 1), publish(tmp_path, 2)
    # a file that the manifest does not know, and the server reads after the others
    name = "model.layers.1.self_attn.k_norm.weight"
    save_file({name: random_tensors(seed=1)[name]}, new[0] / "z.safetensors", {"format": "pt"})
    complaint = r"model\.layers\.1\.self_attn\.k_norm"
    async with attached(server) as dirty:
        await dirty.load(*old)
        before = distribution(await complete(dirty, prompt(20), ALL))
        endless = dataclasses.replace(TOP, max_new_tokens=10**6)
        running = asyncio.create_task(chunks_of(dirty, request_for([1, 2, 3], endless)))
        while not dirty.load_now().num_running:
            await asyncio.sleep(0.01)
        with pytest.raises(DirtyProcessError, match=complaint):
            await dirty.load(*new)
        for call in (running, complete(dirty, [1, 2]), dirty.load(*old)):
            with pytest.raises(DirtyProcessError, match=complaint):
                await call
    async with attached(server) as fresh:  # what the process that takes over does
        await fresh.load(*old)
        after = distribution(await complete(fresh, prompt(20), ALL))
        assert distance(before, after) < TOLERANCE / 10


async def test_weights_that_somebody_else_loaded_are_not_served(server, tmp_path):
    async with attached(server) as engine:
        await engine.load(*publish(tmp_path, 1))
        await complete(engine, [1, 2])
        body = {"new_version": "default", "abort_all_requests": False}
        await post(server, "/update_weight_version", body)
        with pytest.raises(DirtyProcessError, match="default"):
            await complete(engine, [1, 2])
        with pytest.raises(DirtyProcessError):
            await complete(engine, [1, 2])


async def test_a_server_that_is_away_is_tried_again(tmp_path):
    async with attached("http://127.0.0.1:9") as engine:
        for _ in range(2):
            with pytest.raises(RetryError):
                await engine.load(*publish(tmp_path, 1))


async def test_a_server_that_the_engine_starts_ends_with_it(tmp_path, capsys):
    """Here in float32, where its log-probs are those of transformers, and without overlap."""
    arguments = ("--dtype", "float32", "--kv-cache-dtype", "auto", "--disable-overlap-schedule")
    server = local_server(KvFormat.BF16, *arguments)
    engine = SglangEngine(server, weight_format=WeightFormat.BF16, max_context_tokens=MAX_CONTEXT)
    before = set(psutil.Process().children(recursive=True))
    try:
        directory, manifest = publish(tmp_path, 3)
        assert await engine.load(directory, manifest) == 0
        assert (await complete(engine, prompt(9))).spans[0].version == 3
        error = (await differences(engine, directory))["ours"]
        tell(capsys, f"float32 against transformers: max {error.max():.1e}")
        assert error.max() < 1e-4
        await engine.load(*publish(tmp_path, 4))
        assert (await complete(engine, prompt(9))).spans[0].version == 4
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) > 1
        # it can't read this one, nor take it back: "Rolling back" reads the new directory again
        broken, manifest = publish(tmp_path, 5)
        (broken / "other.safetensors").write_bytes(b"not a safetensors file")
        endless = dataclasses.replace(TOP, max_new_tokens=10**6)
        running = asyncio.create_task(chunks_of(engine, request_for([1, 2, 3], endless)))
        while not engine.load_now().num_running:
            await asyncio.sleep(0.01)
        with pytest.raises(DirtyProcessError):
            await engine.load(broken, manifest)
        with pytest.raises((DirtyProcessError, RetryError)):  # its stream may break first
            await running
        with pytest.raises(DirtyProcessError):
            await complete(engine, [1, 2])
    finally:
        await engine.close()
    _, left = psutil.wait_procs(started, timeout=10)
    # nobody may be there to ask a dead process for its status
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
