"""`python -m benchmarks.loss`: time and peak memory of the head with the corrected loss.

Forward and backward from hidden states [T, 2048] to the gradients of hidden states and head, in
float32, on all cores. The contenders all compute the default arm (sc+mis):

    replay              trainer_jax, mask replay: the head at the candidates only
    full                trainer_jax without replay: the normalizer over the vocabulary as well
    jax dense           plain jax: log-softmax over [T, V], then the candidates
    torch dense         the same in PyTorch
    torch chunked       PyTorch as Liger does it, and TRL with it: gradients of a chunk of tokens
                        are computed along the way, so that [T, V] never exists. Chunks of
                        1,024 tokens, which is faster than Liger's own rule (64 at these sizes)

None of the peers has mask replay at less than dense cost (a [T, V] mask in logits that exist), so
`replay` too is held against their sc+mis, which is cheaper for them.

Memory is what a contender needs beyond weights, inputs and the gradient of the head: peak resident
memory during the call, minus resident memory just before it, minus V x D x 4 bytes. Each
contender runs in a process of its own, with code compiled and threads started before. The kernel's
high-water mark is set back through /proc/self/clear_refs, so Linux is needed. A contender that asks
for more than the machine has is told so by a limit on its address space, and reported as
`"fits": false`.

With `--quick` everything is small: it shows that the benchmark works, not who is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness

OURS = ("replay", "full")
DENSE = ("jax dense", "torch dense")
PEERS = (*DENSE, "torch chunked")
CHUNK = 1024  # of torch chunked
LIMIT_S = 900
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class Size(NamedTuple):
    """One problem: T tokens, K candidates, V vocabulary, D model."""

    T: int
    K: int
    V: int
    D: int


class Case(NamedTuple):
    size: Size
    contenders: tuple[str, ...]


# The width of sets costs the others nothing, so they run at one. Torch dense does not run at the
# larger vocabulary, to keep the whole within ten minutes on two cores.
D, T = 2048, 4096
CASES = (
    Case(Size(T, 64, 151_936, D), (*OURS, *PEERS)),
    Case(Size(T, 8, 151_936, D), ("replay",)),
    Case(Size(T, 64, 248_320, D), (*OURS, "jax dense", "torch chunked")),
    Case(Size(T, 8, 248_320, D), ("replay",)),
    Case(Size(8 * T, 64, 248_320, D), ("replay", *DENSE)),
)
QUICK = (
    Case(Size(512, 64, 8_192, 128), (*OURS, *PEERS)),
    Case(Size(512, 8, 8_192, 128), ("replay",)),
)
SMALL = Size(96, 8, 640, 32)  # gradients are compared, and threads started, at this size


class Problem(NamedTuple):
    """Numpy arrays of one size; the same for every contender."""

    hidden_TxD: np.ndarray
    head_VxD: np.ndarray
    ids_TxK: np.ndarray
    candidate_sampler_logp_TxK: np.ndarray
    sampled_T: np.ndarray
    sampler_logp_T: np.ndarray
    advantage_T: np.ndarray


def make_problem(size: Size, *, replay: bool) -> Problem:
    """Logits with deviation 2; samplers whose logits are off by 0.5, so that some are masked."""
    T, K, V, D = size
    rng = np.random.default_rng(0)
    hidden_TxD = rng.standard_normal((T, D), np.float32)
    # a few thousand different rows, repeated: values don't change the time
    head_VxD = np.resize(rng.standard_normal((min(V, 4099), D), np.float32) * 2 / D**0.5, (V, D))
    ids_TxK = rng.integers(0, V // K, (T, K)) * K + np.arange(K)  # no id twice
    logits_TxK = np.empty((T, K), np.float32)
    for t in range(T):
        logits_TxK[t] = head_VxD[ids_TxK[t]] @ hidden_TxD[t]
    q_logits_TxK = logits_TxK + 0.5 * rng.standard_normal((T, K), np.float32)
    # the log-normalizer of V normal logits; under replay, that of the set
    lse_T = np.log(np.exp(q_logits_TxK).sum(1)) if replay else np.full(T, np.log(V) + 2.0)
    logq_TxK = (q_logits_TxK - lse_T[:, None]).astype(np.float32)
    slot_T = rng.integers(0, K, T)
    return Problem(
        hidden_TxD,
        head_VxD,
        ids_TxK.astype(np.int32),
        logq_TxK,
        ids_TxK[np.arange(T), slot_T].astype(np.int32),
        logq_TxK[np.arange(T), slot_T],
        rng.standard_normal(T, np.float32),
    )


def jax_call(name: str, problem: Problem) -> Callable[[], tuple]:
    """Compiled, but not run."""
    import jax
    import jax.numpy as jnp

    from trainer_jax.head import Part, token_sum
    from trainer_jax.loss import LogBand, SamplerRecord, token_objective

    replay = name == "replay"
    low, high = np.log([0.2, 5.0]).astype(np.float32)

    def value(logits_TxK, sampled_logit_T, normalizer_T, record: SamplerRecord):
        band = LogBand(jnp.full(len(sampled_logit_T), low), jnp.full(len(sampled_logit_T), high))
        return token_objective(
            logits_TxK, sampled_logit_T, normalizer_T, record,
            importance="masked", band=band, center=True,
        )  # fmt: skip

    def at_candidates(out, tokens):
        record, sampled_T = tokens
        if not replay:
            return value(out.logits_TxK[:, :-1], out.logits_TxK[:, -1], out.normalizer_T, record)
        is_drawn_TxK = record.candidate_ids_TxK == sampled_T[:, None]
        sampled_logit_T = jnp.where(is_drawn_TxK, out.logits_TxK, 0).sum(1)
        return value(out.logits_TxK, sampled_logit_T, None, record)

    def ours(hidden_TxD, head_VxD, record, sampled_T):
        ids = [record.candidate_ids_TxK, *([] if replay else [sampled_T[:, None]])]
        asked = Part(hidden_TxD, jnp.concatenate(ids, axis=1), (record, sampled_T))
        part = jax.tree.map(lambda x: x[None], asked)
        return token_sum(at_candidates, head_VxD, [part], normalizer=not replay)[0]

    def dense(hidden_TxD, head_VxD, record, sampled_T):
        logp_TxV = jax.nn.log_softmax(hidden_TxD @ head_VxD.T)
        asked = jnp.concatenate([record.candidate_ids_TxK, sampled_T[:, None]], axis=1)
        logp = jnp.take_along_axis(logp_TxV, asked, axis=1)
        return value(logp[:, :-1], logp[:, -1], jnp.zeros(len(logp)), record)[0].sum()

    record = SamplerRecord(
        candidate_ids_TxK=jnp.asarray(problem.ids_TxK),
        candidate_sampler_logp_TxK=jnp.asarray(problem.candidate_sampler_logp_TxK),
        sampler_logp_T=jnp.asarray(problem.sampler_logp_T),
        advantage_T=jnp.asarray(problem.advantage_T),
        mask_T=jnp.ones(len(problem.ids_TxK), bool),
    )
    arrays = (jnp.asarray(problem.hidden_TxD), jnp.asarray(problem.head_VxD), record)
    arguments = jax.block_until_ready((*arrays, jnp.asarray(problem.sampled_T)))
    gradient = jax.jit(jax.grad(dense if name == "jax dense" else ours, (0, 1)))
    compiled = gradient.lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def torch_call(name: str, problem: Problem, *, replay: bool = False) -> Callable[[], tuple]:
    import torch

    from benchmarks.torch_loss import TorchRecord, corrected_objective

    torch.set_num_threads(os.cpu_count() or 1)
    hidden_TxD, head_VxD = torch.from_numpy(problem.hidden_TxD), torch.from_numpy(problem.head_VxD)
    record = TorchRecord(
        torch.from_numpy(problem.ids_TxK).long(),
        torch.from_numpy(problem.candidate_sampler_logp_TxK),
        torch.from_numpy(problem.sampled_T).long(),
        torch.from_numpy(problem.sampler_logp_T),
        torch.from_numpy(problem.advantage_T),
    )

    def dense() -> tuple:
        hidden, head = hidden_TxD.detach().requires_grad_(), head_VxD.detach().requires_grad_()
        corrected_objective(hidden @ head.T, record, replay=replay).backward()
        return hidden.grad, head.grad

    def chunked() -> tuple:
        grad_hidden_TxD, grad_head_VxD = torch.empty_like(hidden_TxD), torch.zeros_like(head_VxD)
        for start in range(0, len(hidden_TxD), CHUNK):
            end = min(start + CHUNK, len(hidden_TxD))
            hidden_CxD = hidden_TxD[start:end]
            logits_CxV = (hidden_CxD @ head_VxD.T).requires_grad_()
            value = corrected_objective(logits_CxV, record.part(start, end), replay=replay)
            (slope_CxV,) = torch.autograd.grad(value, logits_CxV)
            del logits_CxV, value
            torch.mm(slope_CxV, head_VxD, out=grad_hidden_TxD[start:end])
            grad_head_VxD.addmm_(slope_CxV.T, hidden_CxD)
        return grad_hidden_TxD, grad_head_VxD

    return dense if name == "torch dense" else chunked


def make_call(name: str, problem: Problem) -> Callable[[], tuple]:
    return (torch_call if name.startswith("torch") else jax_call)(name, problem)


def check_equal() -> None:
    """All contenders' gradients at a small size; `replay` against PyTorch's maths of replay."""
    full, replay = (make_problem(SMALL, replay=replay) for replay in (False, True))
    pairs = [(make_call(name, full)(), make_call("full", full)()) for name in PEERS]
    pairs += [(make_call("replay", replay)(), torch_call("torch dense", replay, replay=True)())]
    for got, want in pairs:
        for g, w in zip(got, want, strict=True):
            g, w = np.asarray(g), np.asarray(w)
            np.testing.assert_allclose(g, w, rtol=0, atol=1e-4 * np.abs(w).max())


def memory(key: str, path: str = "/proc/self/status") -> int:
    """Bytes in the line `key`."""
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def settle() -> None:
    """Waits until what is not needed any more (numpy's copy of an array of jax) is given back."""
    last = 0
    while abs(memory("VmRSS") - last) > 1 << 20:
        last = memory("VmRSS")
        time.sleep(1)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def measure(name: str, size: Size, runs: int) -> dict[str, Any]:
    """In this process, which from here on may not have more memory than is free."""
    free = memory("MemAvailable", "/proc/meminfo")
    resource.setrlimit(resource.RLIMIT_AS, (free, free))
    ctypes.CDLL(None).mallopt(
        M_MMAP_THRESHOLD, 1 << 20
    )  # what is freed goes back, and is not reused unseen
    make_call(name, make_problem(SMALL, replay=name == "replay"))()
    call = make_call(name, make_problem(size, replay=name == "replay"))
    settle()
    Path("/proc/self/clear_refs").write_text("5")
    before, times, cpu_times = memory("VmRSS"), [], []
    for _ in range(runs):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)
    beyond = memory("VmHWM") - before - 4 * size.V * size.D
    return {
        "fits": True,
        "seconds": round(statistics.median(times), 4),
        "cpu_seconds": round(statistics.median(cpu_times), 4),
        "megabytes_beyond_head_and_gradient": round(beyond / 1e6, 1),
    }


def measure_apart(name: str, size: Size, runs: int) -> dict[str, Any]:
    """In a fresh process."""
    command = [sys.executable, "-m", "benchmarks.loss", "--contender", name]
    command += ["--size", *map(str, size), "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if not done.returncode:
        return json.loads(done.stdout.splitlines()[-1])
    refusals = ("Out of memory", "Cannot allocate memory", "bad_alloc", "MemoryError")
    if any(refusal in done.stderr for refusal in refusals):
        return {"fits": False}
    raise RuntimeError(f"{name} at {size}: {done.stderr[-2000:]}")


def compare(results: dict[str, dict[str, Any]], with_peers: dict[str, dict[str, Any]]) -> None:
    """Adds to ours how often faster and smaller than the best peer they are, by kind of peer."""
    kinds = {"best_dense": DENSE, "best_peer": PEERS}
    for name in set(OURS) & set(results):
        for kind, peers in kinds.items():
            fitting = [with_peers[p] for p in peers if with_peers.get(p, {}).get("fits")]
            for key, what in (
                ("seconds", "times_faster"),
                ("megabytes_beyond_head_and_gradient", "times_less_memory"),
            ):
                if fitting:
                    best = min(peer[key] for peer in fitting)
                    results[name][f"{what}_than_{kind}"] = round(best / results[name][key], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--runs", type=int, default=1, help="timed runs; the median counts")
    parser.add_argument("--check", action="store_true", help="only compare gradients")
    parser.add_argument("--contender", choices=(*OURS, *PEERS), help="one alone, at --size")
    parser.add_argument("--size", type=int, nargs=4, metavar=("T", "K", "V", "D"))
    arguments = parser.parse_args()
    if arguments.check:
        return check_equal()
    if arguments.contender:
        print(json.dumps(measure(arguments.contender, Size(*arguments.size), arguments.runs)))
        return None
    subprocess.run([sys.executable, "-m", "benchmarks.loss", "--check"], check=True)
    results: dict[str, dict[str, Any]] = {}
    peers_of: dict[tuple[int, int], dict[str, Any]] = {}  # by tokens and vocabulary
    for size, contenders in QUICK if arguments.quick else CASES:
        found = {name: measure_apart(name, size, arguments.runs) for name in contenders}
        compare(found, peers_of.setdefault((size.T, size.V), found))
        results[f"{size.T} tokens, K {size.K}, vocabulary {size.V}, hidden {size.D}"] = found
    description = harness.machine(("jax", "jaxlib", "torch", "numpy"))
    harness.report("loss", results, description, arguments.out)


if __name__ == "__main__":
    main()
