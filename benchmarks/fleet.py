"""`python -m benchmarks.fleet`: what a gateway with 500 samplers routes, adds and carries.

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

The gateway's CPU time stands beside each rate, as the load is made on the same two cores; so does
`other_cores`, what everybody else took of them meanwhile: where it is not near 0, the figures are
of a shared machine. What the bytes cost is measured by `benchmarks.wire`. With `--quick` there are
fewer samplers for a shorter time: it shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
# At 45, 90 and 160 tokens/s; the published fleet's samplers were sized for 90
INTERVALS_S = (0.178, 0.089, 0.05)
ROUND_S, ROUNDS = 3.5, 3
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


@contextmanager
def accounted(gateway: Process, samplers: Process) -> Iterator[dict[str, float]]:
    """Fills in what the block took: seconds, the gateway's CPU seconds, and the cores that went to
    processes that are not ours."""

    def clocks() -> np.ndarray:
        first, *_ = Path("/proc/stat").read_text().splitlines()
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, first.split()[1:])
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        gateway_s = gateway.ask("cpu")
        ours_s = gateway_s + samplers.ask("cpu") + time.process_time()
        return np.array([time.perf_counter(), gateway_s, busy_s - ours_s])

    took: dict[str, float] = {}
    before = clocks()
    yield took
    took["seconds"], took["gateway_s"], others_s = (clocks() - before).tolist()
    took["other_cores"] = round(others_s / took["seconds"], 2)


def measure_routes(
    gateway: Process, samplers: Process, num_sessions: int
) -> dict[str, dict[str, Any]]:
    """Through both doors of the gateway."""
    samplers.ask("reply", 1, 1, 0.0)
    rows = {}
    for name, process in (("generator port", gateway), ("Rollout.Generate", samplers)):
        process.ask("sessions", num_sessions // 4)  # warm
        with accounted(gateway, samplers) as took:
            seconds = process.ask("sessions", num_sessions)
        rows[name] = {
            "sessions_per_s": round(num_sessions / seconds),
            "gateway_cpu_us": round(took["gateway_s"] / num_sessions * 1e6),
            "other_cores": took["other_cores"],
        }
    return rows


def measure_latency(
    gateway: Process, samplers: Process, *, interval_s: float, round_s: float, rounds: int
) -> dict[str, Any]:
    """Milliseconds; medians over rounds of each round's percentile."""
    num_tokens = round(round_s / interval_s) * CHUNK
    samplers.ask("reply", num_tokens, CHUNK, interval_s)
    percentiles: dict[str, list[np.ndarray]] = {"direct": [], "gateway": []}
    for way in percentiles:  # warm
        samplers.ask("latency", way, num_tokens)
    gateway_s, seconds, other_cores = 0.0, 0.0, []
    for _ in range(rounds):
        for way, found in percentiles.items():
            with accounted(gateway, samplers) as took:
                latencies = samplers.ask("latency", way, num_tokens)
            found.append(np.percentile(latencies, (50, 99)) * 1e3)
        gateway_s, seconds = gateway_s + took["gateway_s"], seconds + took["seconds"]
        other_cores.append(took["other_cores"])
    row: dict[str, Any] = {
        "chunks_per_s": round(STREAMS / interval_s),
        "gateway_cores": round(gateway_s / seconds, 2),
    }
    for place, name in enumerate(("p50_ms", "p99_ms")):
        direct, through = (
            np.array([values[place] for values in found]) for found in percentiles.values()
        )
        row[f"direct_{name}"] = round(float(np.median(direct)), 2)
        row[f"added_{name}"] = round(float(np.median(through - direct)), 2)
        row[f"added_{name}_by_round"] = np.round(through - direct, 2).tolist()
    return row | {"other_cores_by_round": other_cores}


def measure_path(
    gateway: Process, samplers: Process, address: str, *, chunk_tokens: int, num_groups: int
) -> dict[str, Any]:
    """Groups are checked and packed for a step, and acknowledged, one by one."""
    samplers.ask("reply", REPLY, chunk_tokens, 0.0)
    client = RolloutClient(address, Credentials())
    stream = GroupStream(client, cursor=0)
    gateway.tell("produce")
    _take(client, stream, NUM_WARM)
    num_sampled = gateway.ask("tokens")
    with accounted(gateway, samplers) as took:
        num_taken = _take(client, stream, num_groups)
    num_sampled = gateway.ask("tokens") - num_sampled
    stream.close()
    client.close()
    return {
        "chunk_tokens": chunk_tokens,
        "tokens_per_s": round(num_taken / took["seconds"]),
        "gateway_cpu_us_per_token": round(took["gateway_s"] / num_sampled * 1e6, 2),
        "other_cores": took["other_cores"],
    }


def _take(client: RolloutClient, stream: GroupStream, num_groups: int) -> int:
    """Trained tokens in the arrays of so many groups."""
    rules = RecordRules(
        group_names=tuple(SHARES), vocab_size=VOCAB, replay=True, max_candidates=MAX_CANDIDATES
    )
    num_tokens = 0
    for _ in range(num_groups):
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
        num_tokens += batch.num_tokens
    return num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer samplers, a shorter time")
    arguments = parser.parse_args()
    num_samplers, factor = (100, 1) if arguments.quick else (500, 8)
    rounds = 1 if arguments.quick else ROUNDS
    results: dict[str, Any] = {"router": measure_router(num_samplers, 4000 * factor)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with running(num_samplers, folder / "route") as (gateway, samplers, _):
            results["route"] = measure_routes(gateway, samplers, 1000 * factor)
            results["latency"] = [
                measure_latency(
                    gateway, samplers, interval_s=interval_s, round_s=ROUND_S, rounds=rounds
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
