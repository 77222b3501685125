"""`python -m benchmarks.fleet`: what a gateway routes, adds and carries with 500 samplers connected.

Everything is real but the engines: a gateway in a process of its own (`Fleet`, `Spool`, `Producer`,
both services, SQLite on disk), and a process with 500 connections to it over loopback, each a
`Join` stream with its heartbeats that answers requests with candidate records drawn in advance.

- `route`: sessions of one turn and one token per second: the router alone, through the Generator
  port that episodes use in the gateway, and through `Rollout.Generate` from another process.
- `latency`: from the moment a chunk of 8 tokens leaves a sampler to its arrival, both in one
  process, over 200 paced streams: through the gateway, and on direct streams of the same messages,
  in turns. What the gateway adds is the difference of the percentiles. It includes what the load of
  the second hop does to that process.
- `path`: sampled tokens per second from the samplers through the gateway and the trajectory log
  (synced to disk) over `StreamGroups` to the training step's arrays in a third process.

The gateway's CPU time stands beside each rate, as the load is made on the same two cores. What the
bytes cost is measured by `benchmarks.wire`. With `--quick` there are fewer samplers for a shorter
time: it shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.fleet_processes import (
    GROUP_SIZE,
    IDENTITY,
    IN_FLIGHT,
    PROMPT,
    REPLY,
    SHARES,
    STREAMS,
    TIMEOUT_S,
    Process,
    fleet_config,
    running,
    sampler_info,
)
from benchmarks.wire import MAX_CANDIDATES, VOCAB, WIDTHS
from contracts.credentials import Credentials
from contracts.types import Purpose
from sampler_fleet.registry import Registry
from sampler_fleet.router import Router
from trainer_jax.batch import pack
from trainer_jax.records import RecordRules
from trainer_jax.rollouts import GroupStream, RolloutClient

CHUNK = 8  # tokens, as both engines send
# 8 tokens at 90 tokens/s, what the published fleet's samplers were sized for; and nearly twice that
INTERVALS_S = (0.089, 0.05)
PATH_CHUNKS = (8, 64)
NUM_WARM = 32  # groups: what is in flight at once, and what may be ahead


def measure_router(num_samplers: int, num_sessions: int) -> dict[str, Any]:
    """New sessions per second, each ended when `IN_FLIGHT` more have begun."""
    config = fleet_config()
    registry = Registry(
        config.groups,
        model_fingerprint=IDENTITY.model_fingerprint,
        tokenizer_fingerprint=IDENTITY.tokenizer_fingerprint,
        lease_seconds=config.lease_seconds,
    )
    for index in range(num_samplers):
        registry.register(sampler_info(index), 0.0)
    shares = config.shares(Purpose.TRAIN)
    router = Router({Purpose.TRAIN: shares})
    names = [f"s{i}" for i in range(num_sessions)]
    start = time.perf_counter()
    for i, name in enumerate(names):
        router.route(name, registry, purpose=Purpose.TRAIN, min_version=0, now=0.0)
        if i >= IN_FLIGHT:
            router.end(names[i - IN_FLIGHT])
    seconds = time.perf_counter() - start
    off = [abs(router.num_routed[group] - num_sessions * shares[group]) for group in SHARES]
    assert max(off) < 1, "every group within one session of its share"
    return {"sessions_per_s": round(num_sessions / seconds)}


def measure_routes(
    gateway: Process, samplers: Process, num_sessions: int
) -> dict[str, dict[str, Any]]:
    """Through both doors of the gateway."""
    samplers.ask("reply", 1, 1, 0.0)
    rows = {}
    for name, process in (("generator port", gateway), ("Rollout.Generate", samplers)):
        process.ask("sessions", num_sessions // 4)  # warm
        cpu_s = gateway.ask("cpu")
        seconds = process.ask("sessions", num_sessions)
        cpu_s = gateway.ask("cpu") - cpu_s
        rows[name] = {
            "sessions_per_s": round(num_sessions / seconds),
            "gateway_cpu_us": round(cpu_s / num_sessions * 1e6),
        }
    return rows


def measure_latency(
    gateway: Process, samplers: Process, *, interval_s: float, num_chunks: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds; medians over rounds of each round's percentile."""
    num_tokens = num_chunks * CHUNK
    samplers.ask("reply", num_tokens, CHUNK, interval_s)
    percentiles: dict[str, list[np.ndarray]] = {"direct": [], "gateway": []}
    loads = []
    for way in ("direct", "gateway"):  # warm
        samplers.ask("latency", way, num_tokens)
    for _ in range(rounds):
        for way, found in percentiles.items():
            cpu_s, start = gateway.ask("cpu"), time.perf_counter()
            latencies = samplers.ask("latency", way, num_tokens)
            if way == "gateway":
                loads.append((gateway.ask("cpu") - cpu_s) / (time.perf_counter() - start))
            found.append(np.percentile(latencies, (50, 99)) * 1e3)
    row: dict[str, Any] = {
        "chunks_per_s": round(STREAMS / interval_s),
        "gateway_cores": round(float(np.median(loads)), 2),
    }
    for place, name in enumerate(("p50_ms", "p99_ms")):
        direct, through = (
            np.array([values[place] for values in found]) for found in percentiles.values()
        )
        row[f"direct_{name}"] = round(float(np.median(direct)), 2)
        row[f"gateway_{name}"] = round(float(np.median(through)), 2)
        row[f"added_{name}"] = round(float(np.median(through - direct)), 2)
        row[f"added_{name}_of_rounds"] = np.round(through - direct, 2).tolist()
    return row


def measure_path(
    gateway: Process, samplers: Process, address: str, *, chunk_tokens: int, num_groups: int
) -> dict[str, Any]:
    """Groups are checked and packed for a step, and acknowledged, one by one."""
    samplers.ask("reply", REPLY, chunk_tokens, 0.0)
    rules = RecordRules(
        group_names=tuple(SHARES), vocab_size=VOCAB, replay=True, max_candidates=MAX_CANDIDATES
    )
    client = RolloutClient(address, Credentials())
    stream = GroupStream(client, cursor=0)
    gateway.tell("produce")
    num_taken, num_sampled, cpu_s, start = 0, 0, 0.0, 0.0
    for number in range(NUM_WARM + num_groups):
        if number == NUM_WARM:
            num_sampled, cpu_s = gateway.ask("tokens"), gateway.ask("cpu")
            start = time.perf_counter()
        group = stream.get(TIMEOUT_S)
        if group is None:
            raise SystemExit(f"no group in {TIMEOUT_S:g} s")
        (batch,) = pack(
            [group],
            [np.ones(len(group.trajectories))],
            row_tokens=PROMPT + REPLY,
            rows=GROUP_SIZE,
            candidate_buckets=WIDTHS,
            rules=rules,
        )
        client.acknowledge(durable=group.sequence, taken=group.sequence)
        if number >= NUM_WARM:
            num_taken += batch.num_tokens
    seconds = time.perf_counter() - start
    cpu_s = gateway.ask("cpu") - cpu_s
    num_sampled = gateway.ask("tokens") - num_sampled
    stream.close()
    client.close()
    return {
        "chunk_tokens": chunk_tokens,
        "tokens_per_s": round(num_taken / seconds),
        "gateway_cpu_us_per_token": round(cpu_s / num_sampled * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer samplers, a shorter time")
    arguments = parser.parse_args()
    num_samplers, factor, rounds = (100, 1, 1) if arguments.quick else (500, 8, 5)
    results: dict[str, Any] = {"router": measure_router(num_samplers, 4000 * factor)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with running(num_samplers, folder / "route") as (gateway, samplers, _):
            results["route"] = measure_routes(gateway, samplers, 1000 * factor)
            results["latency"] = [
                measure_latency(
                    gateway, samplers, interval_s=interval_s, num_chunks=5 * factor, rounds=rounds
                )
                for interval_s in INTERVALS_S
            ]
        results["path"] = []
        for chunk_tokens in PATH_CHUNKS:
            with running(num_samplers, folder / f"path-{chunk_tokens}") as processes:
                results["path"].append(
                    measure_path(*processes, chunk_tokens=chunk_tokens, num_groups=12 * factor)
                )
    description = harness.machine(("grpcio", "numpy", "protobuf"))
    harness.report("fleet", results, description, arguments.out)


if __name__ == "__main__":
    main()
