"""`python -m benchmarks.trainer`: time and memory of the trainer's model, forward and backward.

In float32, each contender in a process of its own that waits there for its turn, with the same
number of threads (`--threads`, 2 or 1):

    models      tokens/s of a tiny model of either family with the next tokens' cross-entropy over
                the whole vocabulary, beside `transformers`' two ways to compute experts. A device
                of the data axis for each thread, as in the trainer
    experts     the experts' feed-forward network alone, beside a dense einsum over all experts and
                jax.lax.ragged_dot
    deltanet    the gated delta rule alone, with the published model's head dimensions, beside
                `torch_chunk_gated_delta_rule` of `transformers`: what it computes without a GPU
    lengths     one layer of either kind with one sequence of 1 K to 64 K tokens, nobody beside it

Planned megabytes are what XLA says before anything runs.

Norms of all gradients are compared before anything is timed; a contender's first call, with
compilation, is not counted (`first_call_s` says what it took). CPU seconds (of all threads) stand
beside wall seconds. On a machine that does other work, compare those, with one thread: PyTorch's
threads wait for each other by spinning, which is CPU time too.

Memory is what a call needs beyond weights and inputs, gradients included, found as in
`benchmarks.loss`: peak resident memory of a call minus resident memory before it. It is measured
after all turns. Linux is needed.

With `--quick` everything is small: it shows that the benchmark works, not who is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.loss import M_MMAP_THRESHOLD, memory, settle
from trainer_jax.head import candidate_logits
from trainer_jax.hf import save_checkpoint
from trainer_jax.mesh import by_data_shard, make_mesh
from trainer_jax.models import deltanet
from trainer_jax.models.config import ATTENTION, DELTANET, ModelConfig
from trainer_jax.models.decoder import hidden_states
from trainer_jax.models.experts import grouped_ffn, route
from trainer_jax.models.parameters import init_params

OURS = "ours"


class Work(NamedTuple):
    """One contender's work: arrays of gradients per call; what XLA planned, where it did."""

    call: Callable[[], Iterable[Any]]
    planned_bytes: int | None = None
    largest_array_bytes: int | None = None


class Case(NamedTuple):
    """`make(name)` in the contender's own process; `peers` are whom ours are held against."""

    make: Callable[[str], Work]
    num_tokens: int
    peers: tuple[str, ...] = ()
    own: tuple[str, ...] = (OURS,)
    num_devices: int = 1
    max_runs: int | None = None


def compiled(function: Callable[..., jax.Array], argnums: tuple[int, ...], *arguments) -> Work:
    """The gradients of a scalar function of jax arrays."""
    executable = jax.jit(jax.grad(function, argnums)).lower(*arguments).compile()
    plan = executable.memory_analysis()
    assert plan is not None
    return Work(
        lambda: jax.tree.leaves(jax.block_until_ready(executable(*arguments))),
        plan.temp_size_in_bytes + plan.output_size_in_bytes,
        largest_array(executable.as_text() or ""),
    )


def largest_array(module: str) -> int:
    """Bytes of the largest array that a compiled module names."""
    shapes = re.findall(r"\b(pred|[su]8|[subf]+16|[suf]32|[suf]64)\[([\d,]+)\]", module)
    width = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
    width |= {"s64": 8, "u64": 8, "f64": 8}
    return max(width.get(kind, 4) * math.prod(map(int, dims.split(","))) for kind, dims in shapes)


# --- models ---

MOE = ModelConfig(
    vocab_size=2_048, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=64,
)  # fmt: skip
HYBRID = replace(
    MOE, model_type="qwen3_5_moe", partial_rotary_factor=0.25,
    layer_types=(DELTANET,) * 3 + (ATTENTION,), shared_expert_intermediate_size=64,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32, linear_conv_kernel_dim=4,
)  # fmt: skip


def random_tokens(config: ModelConfig, rows: int, row: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocab_size, (rows, row), np.int32)


def positions_and_segments(tokens_BxT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows that are one segment each."""
    positions_T = np.arange(tokens_BxT.shape[1], dtype=np.int32)
    return np.tile(positions_T, (len(tokens_BxT), 1)), np.ones_like(tokens_BxT)


def model_work(config: ModelConfig, rows: int, row: int, name: str) -> Work:
    tokens_BxT = random_tokens(config, rows, row)
    params = init_params(config, jax.random.key(0))
    return (our_model if name == OURS else peer_model)(config, params, tokens_BxT, name)


def our_model(config: ModelConfig, params, tokens_BxT: np.ndarray, name: str) -> Work:
    mesh = make_mesh({"data": jax.device_count()})
    model = by_data_shard(lambda params, *rows: hidden_states(params, config, *rows), mesh)
    S = jax.device_count()

    def cross_entropy(params, tokens_BxT, positions_BxT, segments_BxT) -> jax.Array:
        hidden_BxTxD = model(params, tokens_BxT, positions_BxT, segments_BxT)[:, :-1]
        hidden_SxNxD = hidden_BxTxD.reshape(S, -1, hidden_BxTxD.shape[-1])
        next_SxNx1 = tokens_BxT[:, 1:].reshape(S, -1, 1)
        out = candidate_logits(hidden_SxNxD, params["head"], next_SxNx1, normalizer=True)
        assert out.normalizer_T is not None
        return (out.normalizer_T - out.logits_TxK[..., 0]).mean()

    rows = (jnp.asarray(x) for x in (tokens_BxT, *positions_and_segments(tokens_BxT)))
    return compiled(cross_entropy, (0,), params, *rows)


def peer_model(config: ModelConfig, params, tokens_BxT: np.ndarray, name: str) -> Work:
    import torch
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), config, params, dtype="float32")
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation=name.split()[1]
        ).train()
    tokens, weights = torch.from_numpy(tokens_BxT).long(), list(model.parameters())

    def call() -> tuple:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        return torch.autograd.grad(loss, weights)

    return Work(call)


# --- experts ---


def experts_work(N: int, E: int, X: int, name: str, D: int = 256, F: int = 128) -> Work:
    keys = jax.random.split(jax.random.key(0), 5)
    x_NxD, router_DxE = jax.random.normal(keys[0], (N, D)), jax.random.normal(keys[1], (D, E))
    shapes = (E, D, F), (E, D, F), (E, F, D)
    matrices = [
        jax.random.normal(key, shape) / shape[1] ** 0.5
        for key, shape in zip(keys[2:], shapes, strict=True)
    ]
    weights_NxX, experts_NxX = route(x_NxD, router_DxE, X, normalize=True)
    ffn = {
        "dense einsum": dense_einsum,
        "ragged_dot": ragged,
        OURS: functools.partial(grouped_ffn, impl="blocks"),
    }[name]

    def objective(x_NxD, weights_NxX, experts_NxX, *matrices) -> jax.Array:
        return jnp.square(ffn(x_NxD, weights_NxX, experts_NxX, *matrices)).sum()

    return compiled(objective, (0, 1, 3, 4, 5), x_NxD, weights_NxX, experts_NxX, *matrices)


def dense_einsum(x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD) -> jax.Array:
    """Every expert for every token."""
    is_of_NxXxE = jax.nn.one_hot(experts_NxX, len(gate_ExDxF), dtype=x_NxD.dtype)
    weights_NxE = jnp.einsum("nx,nxe->ne", weights_NxX, is_of_NxXxE)
    hidden_NxExF = jax.nn.silu(jnp.einsum("nd,edf->nef", x_NxD, gate_ExDxF))
    hidden_NxExF = hidden_NxExF * jnp.einsum("nd,edf->nef", x_NxD, up_ExDxF)
    return jnp.einsum("nef,efd,ne->nd", hidden_NxExF, down_ExFxD, weights_NxE)


def ragged(x_NxD, weights_NxX, experts_NxX, gate_ExDxF, up_ExDxF, down_ExFxD) -> jax.Array:
    """Assignments sorted by expert, then jax.lax.ragged_dot."""
    X, E = experts_NxX.shape[1], len(gate_ExDxF)
    order_M = jnp.argsort(experts_NxX.reshape(-1))
    sizes_E = jnp.bincount(experts_NxX.reshape(-1), length=E).astype(jnp.int32)
    x_MxD = x_NxD[order_M // X]
    hidden_MxF = jax.nn.silu(jax.lax.ragged_dot(x_MxD, gate_ExDxF, sizes_E))
    hidden_MxF = hidden_MxF * jax.lax.ragged_dot(x_MxD, up_ExDxF, sizes_E)
    y_MxD = jax.lax.ragged_dot(hidden_MxF, down_ExFxD, sizes_E)
    y_MxD = y_MxD * weights_NxX.reshape(-1)[order_M][:, None]
    return jnp.zeros_like(x_NxD).at[order_M // X].add(y_MxD)


# --- DeltaNet ---


def delta_arguments(B: int, T: int, J: int, H: int, A: int) -> list[np.ndarray]:
    """q and k of length 1, v, g, beta, as a layer that starts training has them."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, B, T, J, A), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((B, T, H, A), np.float32)
    g = -rng.uniform(0, 16, H) * np.log1p(np.exp(1 + 0.5 * rng.standard_normal((B, T, H))))
    return [q, k, v, g.astype(np.float32), rng.random((B, T, H), np.float32)]


def delta_work(B: int, T: int, J: int, H: int, A: int, name: str) -> Work:
    arguments = delta_arguments(B, T, J, H, A)
    weight = np.random.default_rng(1).standard_normal((B, T, H, A), np.float32)
    return (our_delta if name == OURS else peer_delta)(arguments, weight)


def our_delta(arguments: list[np.ndarray], weight: np.ndarray) -> Work:
    B, T, _, A = arguments[0].shape
    mesh = make_mesh({"data": jax.device_count()})
    rule = by_data_shard(lambda _, *rows: deltanet.delta_rule(*rows), mesh)

    def objective(q, k, v, g, beta, segments_BxT, weight) -> jax.Array:
        return (rule((), q * A**-0.5, k, v, g, beta, segments_BxT) * weight).sum()

    arrays = (*arguments, np.ones((B, T), np.int32), weight)
    return compiled(objective, tuple(range(5)), *map(jnp.asarray, arrays))


def peer_delta(arguments: list[np.ndarray], weight: np.ndarray) -> Work:
    import torch
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

    J, H = arguments[0].shape[2], arguments[2].shape[2]
    arrays = [torch.from_numpy(x).requires_grad_() for x in arguments]
    slope = torch.from_numpy(weight)

    def call() -> tuple:
        q, k, *rest = arrays
        q, k = (x.repeat_interleave(H // J, dim=2) for x in (q, k))  # as its layer does
        out, _ = torch_chunk_gated_delta_rule(q, k, *rest)
        return torch.autograd.grad((out * slope).sum(), arrays)

    return Work(call)


# --- lengths ---

NARROW = replace(
    HYBRID, vocab_size=256, hidden_size=32, num_hidden_layers=1, layer_types=(DELTANET,),
    num_attention_heads=1, num_key_value_heads=1, head_dim=16, num_experts=4,
    num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=16,
    linear_value_head_dim=16,
)  # fmt: skip


def layer_work(kind: str, T: int, name: str) -> Work:
    config = replace(NARROW, layer_types=(kind,))
    tokens_BxT = random_tokens(config, 1, T)

    def objective(params, *rows) -> jax.Array:
        return jnp.square(hidden_states(params, config, *rows)).mean()

    rows = (jnp.asarray(x) for x in (tokens_BxT, *positions_and_segments(tokens_BxT)))
    return compiled(objective, (0,), init_params(config, jax.random.key(0)), *rows)


# --- all cases ---

MODEL_PEERS = ("torch eager", "torch grouped_mm")
EXPERT_PEERS = ("dense einsum", "ragged_dot")
DELTA_PEERS = ("torch chunked",)


def cases(quick: bool, threads: int) -> dict[str, dict[str, Case]]:
    """Part -> case by name."""
    rows, row = (4, 64) if quick else (8, 256)
    models = {
        f"{config.model_type}, {rows} rows of {row}": Case(
            functools.partial(model_work, config, rows, row),
            rows * row,
            MODEL_PEERS,
            num_devices=threads,
        )
        for config in (MOE, HYBRID)
    }
    shapes = ((128, 4, 2),) if quick else ((4096, 16, 2), (512, 64, 8))
    experts = {
        f"{N} tokens, {X} of {E} experts": Case(
            functools.partial(experts_work, N, E, X), N, EXPERT_PEERS
        )
        for N, E, X in shapes
    }
    T, J, H, A = (128, 1, 2, 16) if quick else (2048, 2, 4, 128)
    delta = {
        f"2 rows of {T}, {H} heads of {A}": Case(
            functools.partial(delta_work, 2, T, J, H, A),
            2 * T,
            DELTA_PEERS,
            num_devices=threads,
        )
    }
    lengths = {
        f"{kind}, {T} tokens": Case(
            functools.partial(layer_work, kind, T), T, max_runs=1 if T > 16_384 else None
        )
        for kind in (DELTANET, ATTENTION)
        for T in ((256, 1024) if quick else (1024, 4096, 16_384, 65_536))
    }
    return {"models": models, "experts": experts, "deltanet": delta, "lengths": lengths}


def serve(turns: Connection, case: Case, name: str, threads: int) -> None:
    """A contender's process: does what it is asked, until asked to stop."""
    jax.config.update("jax_num_cpu_devices", case.num_devices)
    if name.startswith("torch"):
        import torch

        torch.set_num_threads(threads)
    start = time.perf_counter()
    work = case.make(name)
    total = sum(float(np.square(np.asarray(grad)).sum()) for grad in work.call())
    turns.send((math.sqrt(total), time.perf_counter() - start, work[1:]))
    while asked := turns.recv():
        turns.send(cpu_seconds(work) if asked == "time" else peak_bytes(work))


def cpu_seconds(work: Work) -> float:
    start = time.process_time()
    work.call()
    return time.process_time() - start


def peak_bytes(work: Work) -> int:
    """What is freed goes back to the system first, and is not reused unseen."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    settle()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    work.call()
    return memory("VmHWM") - before


def measure(case: Case, runs: int, threads: int) -> dict[str, dict[str, Any]]:
    """All contenders of a case, in turns."""
    spawn = multiprocessing.get_context("spawn")
    ends: dict[str, Any] = {}
    for name in (*case.own, *case.peers):
        ends[name], other = spawn.Pipe()
        spawn.Process(target=serve, args=(other, case, name, threads), daemon=True).start()
    first = {name: end.recv() for name, end in ends.items()}
    for norm, *_ in first.values():
        np.testing.assert_allclose(norm, first[OURS][0], rtol=1e-3)
    cpu_s: dict[str, list[float]] = {name: [] for name in ends}

    def take_turn(name: str) -> None:
        ends[name].send("time")
        cpu_s[name].append(ends[name].recv())

    calls = {name: functools.partial(take_turn, name) for name in ends}
    timings = harness.take_turns(calls, min(runs, case.max_runs or runs))
    results = {}
    for name, end in ends.items():
        end.send("memory")
        num_bytes, timing = end.recv(), timings[name]
        end.send(None)
        _, first_call_s, (planned, largest) = first[name]
        results[name] = {
            "tokens_per_s": round(case.num_tokens / timing.median_s, 1),
            **{key: round(value, 4) for key, value in asdict(timing).items()},
            "cpu_s": round(statistics.median(cpu_s[name][1:]), 4),  # the first warms up
            "first_call_s": round(first_call_s, 1),
            "megabytes": round(num_bytes / 1e6, 1),
        }
        if planned is not None:
            results[name]["planned_megabytes"] = round(planned / 1e6, 1)
            results[name]["largest_array_megabytes"] = round(largest / 1e6, 1)
    if case.peers:
        compare(results, case)
    return results


def compare(results: dict[str, dict[str, Any]], case: Case) -> None:
    """Adds to ours how often faster and smaller than the best peer it is."""
    for name in case.own:
        for key, what in (
            ("median_s", "times_best_peer"),
            ("best_s", "times_best_peer_by_best"),
            ("cpu_s", "times_best_peer_by_cpu"),
            ("megabytes", "times_less_memory"),
        ):
            best = min(results[peer][key] for peer in case.peers)
            results[name][what] = round(best / results[name][key], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="small sizes, one run")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each contender")
    parser.add_argument("--threads", type=int, default=2, choices=(1, 2))
    parser.add_argument("--part", action="append", choices=tuple(cases(True, 1)), help="all")
    arguments = parser.parse_args()
    runs, threads = 1 if arguments.quick else arguments.runs, arguments.threads
    # of the contenders' processes: XLA's pool, and what PyTorch starts with
    os.environ |= {"NPROC": str(threads), "OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu"}
    results: dict[str, dict[str, Any]] = {}
    for part, of_part in cases(arguments.quick, threads).items():
        for name, case in of_part.items() if part in (arguments.part or [part]) else ():
            results.setdefault(part, {})[name] = measure(case, runs, threads)
            print(f"{part}, {name}:", results[part][name], file=sys.stderr)
    description = harness.machine(("jax", "jaxlib", "torch", "transformers"))
    harness.report("trainer", results, description | {"threads": threads}, arguments.out)


if __name__ == "__main__":
    main()
