"""What is particular to the embedded engine: its configuration and how it fails."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import torch

from contracts.errors import BadInputError, DirtyProcessError
from contracts.types import Completion, GenerateRequest, SamplingParams, WeightFormat
from sampler_fleet.engines.embedded import EmbeddedEngine
from tests.sampler_fleet.engines.engine_checkpoints import (
    CONFIG,
    random_tensors,
    write_checkpoint,
)

SETTINGS = {
    "kv_format": "fp8",
    "activation_format": "none",
    "split_k": 1,
    "max_sessions": 2,
    "max_context_tokens": 64,
}


async def generate(engine, name="r", **sampling):
    request = GenerateRequest(
        request_id=name,
        session_id=name,
        tokens=np.array([1, 2, 3], np.int32),
        sampling=SamplingParams(**sampling),
    )
    return [chunk async for chunk in engine.generate(request)]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kv_format", "fp4"),
        ("activation_format", "int8"),
        ("split_k", 0),
        ("max_sessions", 0),
        ("max_context_tokens", 0),
        ("num_threads", 0),
        ("chunk_tokens", 0),
    ],
)
def test_settings_are_checked(setting, value):
    with pytest.raises(BadInputError, match=setting):
        EmbeddedEngine(**(SETTINGS | {setting: value}))


async def test_float32_log_probs_are_those_of_a_full_pass(tmp_path):
    """Many sessions at once, in two turns, against transformers over each whole buffer."""
    from transformers import Qwen3MoeForCausalLM

    settings = {"max_sessions": 8, "max_context_tokens": 160, "split_k": 2, "exact": True}
    engine = EmbeddedEngine(**(SETTINGS | settings))
    await engine.load(tmp_path, write_checkpoint(tmp_path))
    peer = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rng = np.random.default_rng(0)
    samplings = [
        SamplingParams(top_p=0.95, top_k=12, max_new_tokens=20),
        SamplingParams(temperature=0.7, num_candidates=CONFIG["vocab_size"], max_new_tokens=30),
    ]

    async def check(session: int) -> int:
        sampling, buffer = samplings[session % 2], np.zeros(0, np.int32)
        for turn in range(2):
            new = rng.integers(0, CONFIG["vocab_size"], 3 + 5 * session).astype(np.int32)
            buffer = np.concatenate([buffer, new])
            request = GenerateRequest(
                request_id=f"{session} {turn}",
                session_id=str(session),
                tokens=buffer,
                sampling=sampling,
            )
            found = Completion.concatenate([chunk async for chunk in engine.generate(request)])
            start, buffer = len(buffer), np.concatenate([buffer, found.tokens])
            with torch.inference_mode():
                logits = peer(torch.from_numpy(buffer).long()[None]).logits[0, start - 1 : -1]
            for position, row in enumerate(logits / sampling.temperature):
                here = slice(*found.candidates.offsets[position : position + 2])
                ids = found.candidates.ids[here]
                expected = row[torch.from_numpy(ids).long()].log_softmax(-1).numpy()
                assert np.abs(found.candidates.logp[here] - expected).max() < 1e-4
                (drawn,) = expected[ids == found.tokens[position]]
                assert abs(found.sampler_logp[position] - drawn) < 1e-4
        return len(buffer)

    lengths = await asyncio.gather(*(check(session) for session in range(8)))
    assert min(lengths) > 40
    await engine.close()


@pytest.mark.parametrize(
    ("activation_format", "wanted"), [("fp8", "fp8-block"), ("nvfp4", "nvfp4")]
)
async def test_activations_are_quantized_only_with_weights_of_their_format(
    tmp_path, activation_format, wanted
):
    engine = EmbeddedEngine(**(SETTINGS | {"activation_format": activation_format}))
    with pytest.raises(BadInputError, match=f"expected {wanted}, found bf16"):
        await engine.load(tmp_path, write_checkpoint(tmp_path))
    format = WeightFormat(wanted)
    await engine.load(tmp_path, write_checkpoint(tmp_path, format=format))
    assert await generate(engine)
    await engine.close()


async def test_chunks_have_the_configured_size(tmp_path):
    engine = EmbeddedEngine(**SETTINGS, chunk_tokens=3)
    await engine.load(tmp_path, write_checkpoint(tmp_path))
    chunks = await generate(engine, max_new_tokens=8)
    assert [len(chunk) for chunk in chunks] == [3, 3, 2]
    await engine.close()


async def test_the_pause_of_a_switch_is_logged(tmp_path, caplog):
    engine = EmbeddedEngine(**SETTINGS)
    with caplog.at_level(logging.INFO):
        await engine.load(tmp_path, write_checkpoint(tmp_path, version=4))
    assert "version 4" in caplog.text
    assert "paused for" in caplog.text
    await engine.close()


@pytest.mark.parametrize(
    "name",
    [
        "lm_head",
        "model.layers.0.self_attn.q_norm",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.mlp.gate",
    ],
)
async def test_weights_that_give_no_numbers_stop_the_process(tmp_path, name):
    """NaN never becomes a record: every stream and every later call says so."""
    engine = EmbeddedEngine(**SETTINGS)
    tensors = random_tensors()
    tensors[f"{name}.weight"][-1] = float("nan")
    await engine.load(tmp_path, write_checkpoint(tmp_path, tensors=tensors))
    streams = await asyncio.gather(
        *(generate(engine, str(i)) for i in range(3)), return_exceptions=True
    )
    assert [type(stream) for stream in streams] == [DirtyProcessError] * 3
    with pytest.raises(DirtyProcessError, match="not finite"):
        await generate(engine)
    with pytest.raises(DirtyProcessError):
        await engine.load(tmp_path, write_checkpoint(tmp_path, version=2))
    await engine.close()


class _FailingMemory(EmbeddedEngine):
    """Flips a bit of the loaded bytes between their check and the switch."""

    def _prepare(self, directory, manifest):
        checkpoint, model = super()._prepare(directory, manifest)
        checkpoint.tensor("model.norm.weight", (64,), "BF16")[0] += 1
        return checkpoint, model


async def test_bytes_that_changed_after_the_switch_stop_the_process(tmp_path):
    engine = _FailingMemory(**SETTINGS)
    with pytest.raises(DirtyProcessError, match=r"model\.norm\.weight"):
        await engine.load(tmp_path, write_checkpoint(tmp_path))
    with pytest.raises(DirtyProcessError):
        await generate(engine)
    await engine.close()
