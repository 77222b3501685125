"""`python -m benchmarks.engine`: sampled tokens/s of the embedded engine in each precision.

The peer in the same run is `transformers` generate on the same weights, in bfloat16 and float32,
with the same top-p and top-k. Everything counts: prompts, sampling, and for the engine the record
of every candidate set. Also the prefill rate, and the pause of an in-flight weight update.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks import harness
from contracts.types import GenerateRequest, Manifest, SamplingParams, WeightFormat
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
PEER = "transformers_bf16"
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


async def generate(engine: EmbeddedEngine, prompts_BxT: np.ndarray, num_new: int) -> int:
    """One request per row, at once; the number of tokens drawn."""

    async def one(tokens: np.ndarray) -> int:
        name = next(_names)
        sampling = SamplingParams(top_p=TOP_P, top_k=TOP_K, max_new_tokens=num_new)
        request = GenerateRequest(
            request_id=name, session_id=name, tokens=tokens, sampling=sampling
        )
        num = sum([len(chunk) async for chunk in engine.generate(request)])
        engine.end_session(name)
        return num

    return sum(await asyncio.gather(*(one(tokens) for tokens in prompts_BxT)))


def peer(root: Path, dtype: torch.dtype) -> Callable[[np.ndarray, int], int]:
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


def measure(
    calls: dict[str, Callable[[np.ndarray, int], int]], batch: int, prompt: int, new: int, runs: int
) -> dict[str, dict]:
    rng = np.random.default_rng(batch)
    prompts = rng.integers(0, MODEL["vocab_size"], (batch, prompt)).astype(np.int32)

    def contender(call: Callable[[np.ndarray, int], int]) -> Callable[[], None]:
        def run() -> None:
            num = call(prompts, new)
            assert num == batch * new, f"{num} tokens instead of {batch * new}"

        return run

    timings = harness.take_turns({name: contender(call) for name, call in calls.items()}, runs)
    return {
        name: {
            "tokens_per_s": round(batch * new / timing.median_s, 1),
            f"times_{PEER}": round(timings[PEER].median_s / timing.median_s, 2),
            **asdict(timing),
        }
        for name, timing in timings.items()
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        root = Path(folder)
        checkpoints = make_checkpoints(root)
        engines = {}
        for name, (format, settings) in GROUPS.items():
            engines[name] = EmbeddedEngine(
                **settings,
                split_k=2,
                max_sessions=max(arguments.batches),
                max_context_tokens=2048,
            )
            runner.run(engines[name].load(*checkpoints[format]))
        calls: dict[str, Callable[[np.ndarray, int], int]] = {
            name: lambda prompts, new, engine=engine: runner.run(generate(engine, prompts, new))
            for name, engine in engines.items()
        }
        calls |= {
            PEER: peer(root, torch.bfloat16),
            "transformers_float32": peer(root, torch.float32),
        }
        for batch in arguments.batches:
            results[f"batch {batch}"] = measure(
                calls, batch, arguments.prompt, arguments.new, arguments.runs
            )
        prefill = measure(calls, 8, 1000, 1, arguments.runs)
        results["prefill of 8 x 1000 tokens, tokens/s"] = {
            name: round(8000 / timing["median_s"]) for name, timing in prefill.items()
        }
        results["in-flight update"] = {
            name: runner.run(switch_seconds(engines[name], checkpoints[format]))
            for name, (format, _) in GROUPS.items()
        }
        for engine in engines.values():
            runner.run(engine.close())
    description = harness.machine(("torch", "transformers"))
    description |= {"threads": torch.get_num_threads(), "model": json.loads(json.dumps(MODEL))}
    harness.report("engine", results, description, arguments.out)


if __name__ == "__main__":
    main()
