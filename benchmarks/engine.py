"""`python -m benchmarks.engine`: sampled tokens/s of the embedded engine in each precision.

The peers in the same run are `transformers` generate and its continuous batching on the same
weights, in bfloat16 and float32, with the same top-p and top-k. Sampling counts, and for the engine
the record of every candidate set; rates are with the prompts and without (`decode`). Also the
prefill rate, the pause of an in-flight weight update, and how far float32 log-probs are from those
of a full forward pass.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks import harness
from contracts.types import Completion, GenerateRequest, Manifest, SamplingParams, WeightFormat
from sampler_fleet.engines.embedded import EmbeddedEngine
from weight_sync.convert import Options, convert_directory
from weight_sync.manifest import describe_directory

MODEL = {  # the size of the demo's policy
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
GROUPS = {
    "bf16": (WeightFormat.BF16, {"kv_format": "bf16", "activation_format": "none"}),
    "bf16, fp8 kv": (WeightFormat.BF16, {"kv_format": "fp8", "activation_format": "none"}),
    "fp8": (WeightFormat.FP8_BLOCK, {"kv_format": "fp8", "activation_format": "fp8"}),
    "nvfp4 w4a16": (WeightFormat.NVFP4, {"kv_format": "fp8", "activation_format": "none"}),
    "nvfp4 w4a4": (WeightFormat.NVFP4, {"kv_format": "fp8", "activation_format": "nvfp4"}),
}
TOP_P, TOP_K = 0.97, 64
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
_PAGE = 256  # tokens of a page of continuous batching, its default
_CHUNK = 256  # prompt tokens per step besides those that decode, as in the engine
Call = Callable[[np.ndarray, int], int]  # prompts, new tokens of each: tokens drawn
_names = (f"r{number}" for number in itertools.count())


def make_checkpoints(root: Path) -> dict[WeightFormat, tuple[Path, Manifest]]:
    """Random weights with the vocabulary's distribution far from uniform, in each format."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).bfloat16()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    model.save_pretrained(root / "source")
    checkpoints = {}
    for format in WeightFormat:
        convert_directory(root / "source", root / format, Options(format=format))
        manifest = describe_directory(root / format, version=1, format=format, recipe="")
        checkpoints[format] = (root / format, manifest)
    return checkpoints


async def generate(
    engine: EmbeddedEngine, prompts_BxT: np.ndarray, num_new: int
) -> list[list[Completion]]:
    """One request per row, at once; the chunks of each."""

    async def one(tokens: np.ndarray) -> list[Completion]:
        name = next(_names)
        sampling = SamplingParams(top_p=TOP_P, top_k=TOP_K, max_new_tokens=num_new)
        request = GenerateRequest(
            request_id=name, session_id=name, tokens=tokens, sampling=sampling
        )
        chunks = [chunk async for chunk in engine.generate(request)]
        engine.end_session(name)
        return chunks

    return await asyncio.gather(*(one(tokens) for tokens in prompts_BxT))


async def count(engine: EmbeddedEngine, prompts_BxT: np.ndarray, num_new: int) -> int:
    # not the chunks: asyncio.Runner.run makes a string of what a coroutine returns
    replies = await generate(engine, prompts_BxT, num_new)
    return sum(len(chunk) for chunks in replies for chunk in chunks)


def peer(root: Path, dtype: torch.dtype) -> Call:
    """`generate`: one batch of prompts of one length."""
    model = Qwen3MoeForCausalLM.from_pretrained(root / "source", dtype=dtype).eval()
    options = {"do_sample": True, "top_p": TOP_P, "top_k": TOP_K, "eos_token_id": None}

    def call(prompts_BxT: np.ndarray, num_new: int) -> int:
        ids = torch.from_numpy(prompts_BxT.astype(np.int64))
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=num_new, pad_token_id=0, **options
            )
        return out.numel() - ids.numel()

    return call


@contextlib.contextmanager
def batching_peer(root: Path, dtype: torch.dtype, batch: int, length: int) -> Iterator[Call]:
    """Continuous batching, its manager running, with room for `batch` sequences of `length`."""
    model = Qwen3MoeForCausalLM.from_pretrained(root / "source", dtype=dtype).eval()
    manager = model.init_continuous_batching(
        GenerationConfig(
            do_sample=True, top_p=TOP_P, top_k=TOP_K, eos_token_id=-1, max_new_tokens=length
        ),
        ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=batch * (1 + -(-length // _PAGE)),
            max_batch_tokens=batch + _CHUNK,
            max_requests_per_batch=batch,
            allow_block_sharing=False,  # else a repeated prompt costs nothing
        ),
    )
    manager.start()

    def call(prompts_BxT: np.ndarray, num_new: int) -> int:
        manager.add_requests(prompts_BxT.tolist(), max_new_tokens=num_new)
        num, waiting = 0, len(prompts_BxT)
        while waiting:
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None, result
            if result.is_finished():
                num, waiting = num + len(result.generated_tokens), waiting - 1
        return num

    try:
        yield call
    finally:
        manager.stop(block=True)


def measure(calls: dict[str, Call], batch: int, prompt: int, new: int, runs: int) -> dict:
    """Rates, and times as fast as the peers of each dtype.

    `decode` counts what comes after the first token of each reply: the difference to a run that
    draws only that one.
    """
    rng = np.random.default_rng(batch)
    prompts = rng.integers(0, MODEL["vocab_size"], (batch, prompt)).astype(np.int32)

    def contender(call: Call, num_new: int) -> Callable[[], None]:
        def run() -> None:
            num = call(prompts, num_new)
            assert num == batch * num_new, f"{num} tokens instead of {batch * num_new}"

        return run

    firsts = {f"{name}, first token": contender(call, 1) for name, call in calls.items()}
    wholes = {name: contender(call, new) for name, call in calls.items()}
    timings = harness.take_turns(wholes | (firsts if new > 1 else {}), runs)
    seconds = {name: {"all": timings[name].median_s} for name in calls}
    if new > 1:
        for name, times in seconds.items():
            times["decode"] = times["all"] - timings[f"{name}, first token"].median_s
    counts = {"all": batch * new, "decode": batch * (new - 1)}
    peers = [name for name in calls if name not in GROUPS]
    return {
        name: {
            "tokens_per_s": {part: round(counts[part] / took) for part, took in times.items()},
            "times": {
                other: {part: round(seconds[other][part] / times[part], 2) for part in times}
                for other in peers
            },
            **asdict(timings[name]),
        }
        for name, times in seconds.items()
    }


async def logp_difference(root: Path, checkpoint: tuple[Path, Manifest]) -> float:
    """Largest, of `sampler_logp` and candidates, to one float32 pass of transformers over all."""
    peer = Qwen3MoeForCausalLM.from_pretrained(root / "source", dtype=torch.float32).eval()
    engine = EmbeddedEngine(
        kv_format="bf16",
        activation_format="none",
        split_k=2,
        max_sessions=32,
        max_context_tokens=256,
        exact=True,
    )
    await engine.load(*checkpoint)
    prompts = np.random.default_rng(1).integers(0, MODEL["vocab_size"], (32, 64)).astype(np.int32)
    largest = 0.0
    for prompt, chunks in zip(prompts, await generate(engine, prompts, 64), strict=True):
        found = Completion.concatenate(chunks)
        buffer = torch.from_numpy(np.concatenate([prompt, found.tokens])).long()
        with torch.inference_mode():
            logits = peer(buffer[None]).logits[0, len(prompt) - 1 : -1]
        sets = found.candidates
        for position, row in enumerate(logits):
            here = slice(sets.offsets[position], sets.offsets[position + 1])
            ids = sets.ids[here]
            expected = row[torch.from_numpy(ids).long()].log_softmax(-1).numpy()
            drawn = expected[ids == found.tokens[position]].item()
            largest = max(
                largest,
                abs(expected - sets.logp[here]).max(),
                abs(drawn - found.sampler_logp[position]),
            )
    await engine.close()
    return float(largest)


async def switch_seconds(engine: EmbeddedEngine, checkpoint: tuple[Path, Manifest]) -> dict:
    """How long an update takes while a session decodes, and its longest wait for a chunk."""
    waits: list[float] = []

    async def watch() -> None:
        tokens = np.arange(64, dtype=np.int32)
        request = GenerateRequest(
            request_id=next(_names),
            session_id="watched",
            tokens=tokens,
            sampling=SamplingParams(top_k=TOP_K, max_new_tokens=10**6),
        )
        last = time.perf_counter()
        async for _ in engine.generate(request):
            now = time.perf_counter()
            waits.append(now - last)
            last = now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.3)
    usual, start = sorted(waits)[len(waits) // 2], time.perf_counter()
    waits.clear()
    await engine.load(*checkpoint)
    seconds = time.perf_counter() - start
    await asyncio.sleep(0.2)  # until the chunk that the switch may have held up is here
    longest = max(waits)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return {
        "load_s": round(seconds, 4),
        "longest_chunk_wait_s": round(longest, 4),
        "usual_chunk_wait_s": round(usual, 4),
    }


def compare(
    root: Path, calls: dict[str, Call], batch: int, prompt: int, new: int, runs: int
) -> dict:
    """`measure` with peers of continuous batching sized for this."""
    with contextlib.ExitStack() as stack:
        batching = {
            f"continuous {name}": stack.enter_context(
                batching_peer(root, dtype, batch, prompt + new)
            )
            for name, dtype in DTYPES.items()
        }
        return measure(calls | batching, batch, prompt, new, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        root = Path(folder)
        checkpoints = make_checkpoints(root)
        engines = {}
        for name, (format, settings) in GROUPS.items():
            engines[name] = EmbeddedEngine(
                **settings,
                split_k=2,
                max_sessions=max(*arguments.batches, 8),
                max_context_tokens=2048,
            )
            runner.run(engines[name].load(*checkpoints[format]))

        def call(engine: EmbeddedEngine, prompts: np.ndarray, new: int) -> int:
            return runner.run(count(engine, prompts, new))

        calls: dict[str, Call] = {
            name: functools.partial(call, engine) for name, engine in engines.items()
        }
        calls |= {f"generate {name}": peer(root, dtype) for name, dtype in DTYPES.items()}
        for batch in arguments.batches:
            results[f"batch {batch}"] = compare(
                root, calls, batch, arguments.prompt, arguments.new, arguments.runs
            )
        prefill = compare(root, calls, 8, 1000, 1, arguments.runs)
        results["prefill of 8 x 1000 tokens, tokens/s"] = {
            name: round(8000 / found["median_s"]) for name, found in prefill.items()
        }
        results["in-flight update"] = {
            name: runner.run(switch_seconds(engines[name], checkpoints[format]))
            for name, (format, _) in GROUPS.items()
        }
        results["float32 log-probs, largest difference to a full pass"] = runner.run(
            logp_difference(root, checkpoints[WeightFormat.BF16])
        )
        for engine in engines.values():
            runner.run(engine.close())
    description = harness.machine(("torch", "transformers"))
    description |= {"threads": torch.get_num_threads(), "model": json.loads(json.dumps(MODEL))}
    harness.report("engine", results, description, arguments.out)


if __name__ == "__main__":
    main()
