"""`python -m benchmarks.sync`: from a published version to eight samplers that have switched to it.

A mixture-of-experts model of 1 GB in BF16 goes through three real updates of the corrected loss at
a learning rate of 1e-6; each checkpoint is published to a weight service (a process of its own) and
taken by eight receivers (processes too) over loopback: the first in full, the next ones as deltas.
Fleets: eight samplers in BF16, and the mixed one (three NVFP4, three FP8, two BF16), one of whose
samplers runs the embedded engine, decoding while it switches.

The peer in the same run is gRPC itself: a server that streams as many bytes in the same chunks from
memory to eight processes that throw them away. It is compared with a full sync in memory as well as
on disk: here eight samplers share one disk, which each of eight machines would have to itself.

With `--quick` the model is small: it shows that the benchmark works, not how fast sync is.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from contracts.credentials import Credentials
from contracts.pb import weights_pb2, weights_pb2_grpc
from contracts.rpc import CHUNK_BYTES, aio_channel, start_server
from contracts.types import GenerateRequest, SamplingParams, WeightFormat
from trainer_jax.models.config import ModelConfig
from weight_sync.client import WeightClient, publish, status

NUM_SAMPLERS, NUM_VERSIONS = 8, 3
LR = 1e-6
FLEETS = {
    "8 x bf16": ["bf16"] * NUM_SAMPLERS,
    "mixed": ["nvfp4"] * 3 + ["fp8-block"] * 3 + ["bf16"] * 2,
}
WITH_ENGINE = "mixed", 0  # the fleet and the sampler that decodes
TIMEOUT_S = 600.0
MEMORY = "/dev/shm"  # a file system in memory, with room for ten times the model


def model_of(quick: bool) -> ModelConfig:
    """1.0 GB in BF16, nine tenths of it experts; 8 MB when it need only work."""
    return ModelConfig(
        vocab_size=2048,
        hidden_size=128 if quick else 768,
        num_hidden_layers=2 if quick else 6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32 if quick else 128,
        num_experts=8 if quick else 64,
        num_experts_per_tok=2,
        moe_intermediate_size=128 if quick else 512,
    )


def train(config: ModelConfig, folder: Path) -> list[Path]:
    """Consecutive checkpoints of a policy: a random one, and what each update makes of it.

    In a process of its own, as it takes five times the model's bytes.
    """
    import jax
    import optax

    from benchmarks.update import make_groups
    from trainer_jax.advantages import advantages_of
    from trainer_jax.batch import pack
    from trainer_jax.hf import save_checkpoint
    from trainer_jax.loss_config import LossConfig
    from trainer_jax.mesh import make_mesh
    from trainer_jax.models.parameters import init_params
    from trainer_jax.records import RecordRules
    from trainer_jax.step import make_update

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(LR, b1=0.9, b2=0.98, weight_decay=0.0)
    )
    update = make_update(config, LossConfig(), optimizer, make_mesh({}), group_names=("sampler",))
    rules = RecordRules(
        group_names=("sampler",), vocab_size=config.vocab_size, replay=True, max_candidates=64
    )
    groups = make_groups(config.vocab_size)
    state = update.init(init_params(config, jax.random.key(0)))
    paths = []
    for version in range(1, NUM_VERSIONS + 1):
        if version > 1:
            batches = pack(
                groups, advantages_of(groups, normalize=False), row_tokens=256, rows=4,
                candidate_buckets=(8, 64), rules=rules,
            )  # fmt: skip
            state, _ = update(state, batches, version=version)
        paths.append(folder / str(version))
        save_checkpoint(paths[-1], config, state.params)
    return paths


class _Gauge:
    """Decodes without end, and knows the longest time between two tokens."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.longest, self._stop = engine, 0.0, False

    async def run(self) -> None:
        turn = 0
        while not self._stop:
            request = GenerateRequest(
                request_id=f"r{turn}", session_id=f"s{turn}",
                tokens=np.array([1, 2, 3], np.int32),
                sampling=SamplingParams(max_new_tokens=200, temperature=1.0),
            )  # fmt: skip
            last = None
            async for _ in self._engine.generate(request):
                now = time.monotonic()
                self.longest = max(self.longest, now - last) if last else self.longest
                last = now
            self._engine.end_session(f"s{turn}")
            turn += 1

    def stop(self) -> None:
        self._stop = True


def receive(
    results: Connection, address: str, format: str, folder: Path, num_versions: int, decodes: bool
) -> None:
    """A sampler's process: takes each version, and says when it had it and what it cost."""
    asyncio.run(_receive(results, address, format, folder, num_versions, decodes))


async def _receive(
    results: Connection, address: str, format: str, folder: Path, num_versions: int, decodes: bool
) -> None:
    client = WeightClient(address, Credentials(), WeightFormat(format), folder)
    engine = gauge = decoding = None
    if decodes:
        from sampler_fleet.engines.embedded import EmbeddedEngine

        engine = EmbeddedEngine(
            kv_format="bf16", activation_format="none", split_k=1, max_sessions=2,
            max_context_tokens=512, chunk_tokens=1,
        )  # fmt: skip
    async for manifest in client.watch(0):
        fetched = await client.fetch(manifest)
        result: dict[str, Any] = dataclasses.asdict(fetched) | {"directory": ""}
        start = time.monotonic()
        if engine:
            result["pause_s"] = await engine.load(fetched.directory, manifest)
            result["load_s"] = time.monotonic() - start
            if gauge:
                result["longest_between_tokens_s"] = gauge.longest
            else:
                gauge = _Gauge(engine)
                decoding = asyncio.create_task(gauge.run())
            gauge.longest = 0.0
        results.send((manifest.version, time.monotonic(), result))
        if manifest.version == num_versions:
            break
    if gauge and decoding:
        gauge.stop()
        await decoding
    if engine:
        await engine.close()
    await client.close()


def measure_fleet(
    name: str, paths: list[Path], folder: Path, bf16_bytes: int
) -> list[dict[str, Any]]:
    """One row per version."""
    port_file = folder / "port"
    service = subprocess.Popen(
        [sys.executable, "-m", "weight_sync", "serve", "--store", str(folder / "store"),
         "--listen", "127.0.0.1:0", "--port-file", str(port_file)],
    )  # fmt: skip
    spawn = multiprocessing.get_context("spawn")
    samplers, ends = [], []
    try:
        while not port_file.exists():
            time.sleep(0.05)
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        for i, format in enumerate(FLEETS[name]):
            end, other = spawn.Pipe()
            arguments = (
                other, address, format, folder / f"sampler-{i}", len(paths),
                (name, i) == WITH_ENGINE,
            )  # fmt: skip
            samplers.append(spawn.Process(target=receive, args=arguments, daemon=True))
            samplers[-1].start()
            ends.append(end)
        time.sleep(8.0)  # until all of them watch
        rows = []
        for version, path in enumerate(paths, start=1):
            start = time.monotonic()
            publish(address, Credentials(), path, version)
            published = time.monotonic()
            arrived = []
            for end in ends:
                if not end.poll(TIMEOUT_S):
                    raise SystemExit(f"{name}: a sampler did not switch to version {version}")
                arrived.append(end.recv())
            assert {number for number, _, _ in arrived} == {version}
            rows.append(_row(version, start, published, arrived, FLEETS[name], bf16_bytes))
            rows[-1]["service"] = {
                row.format: {"convert_s": row.convert_seconds, "delta_s": row.delta_seconds}
                for row in status(address, Credentials()).formats
            }
        return rows
    finally:
        for process in samplers:
            process.join(10)
            process.kill()
        service.terminate()
        service.wait()


def _row(
    version: int,
    start: float,
    published: float,
    arrived: list[tuple[int, float, dict[str, Any]]],
    formats: list[str],
    bf16_bytes: int,
) -> dict[str, Any]:
    by_format: dict[str, Any] = {}
    for format, (_, at, result) in zip(formats, arrived, strict=True):
        row = by_format.setdefault(format, {})
        row["share_of_bf16_bytes"] = round(result["num_bytes"] / bf16_bytes, 5)
        row["base_version"] = result["base_version"]
        for key in ("fetch_s", "apply_s", "verify_s", "load_s", "pause_s",
                    "longest_between_tokens_s"):  # fmt: skip
            if key in result:
                row[key] = round(max(row.get(key, 0.0), result[key]), 4)
        row["switched_s"] = round(max(row.get("switched_s", 0.0), at - start), 3)
    return {
        "version": version,
        "publish_s": round(published - start, 3),
        "all_switched_s": round(max(at for _, at, _ in arrived) - start, 3),
        "num_bytes": sum(result["num_bytes"] for _, _, result in arrived),
        "slowest_by_format": by_format,
    }


class _Stream(weights_pb2_grpc.WeightsServicer):
    """gRPC alone: bytes from memory, in the service's chunks."""

    def __init__(self, num_bytes: int) -> None:
        self._num_chunks = num_bytes // CHUNK_BYTES
        self._chunk = bytes(CHUNK_BYTES)

    async def Fetch(self, request, context):
        for _ in range(self._num_chunks):
            yield weights_pb2.FetchReply(data=self._chunk)


def _serve_stream(port: Connection, num_bytes: int) -> None:
    async def serve() -> None:
        server, number = await start_server(
            "127.0.0.1:0",
            Credentials(),
            lambda server: weights_pb2_grpc.add_WeightsServicer_to_server(
                _Stream(num_bytes), server
            ),
        )
        port.send(number)
        await server.wait_for_termination()

    asyncio.run(serve())


def _drain_stream(turns: Connection, port: int) -> None:
    async def drain() -> None:
        async with aio_channel(f"127.0.0.1:{port}", Credentials()) as channel:
            stub = weights_pb2_grpc.WeightsStub(channel)
            turns.send("ready")
            turns.recv()
            async for _ in stub.Fetch(weights_pb2.FetchRequest()):
                pass
            turns.send("done")

    asyncio.run(drain())


def measure_grpc(num_bytes: int) -> float:
    """Seconds of plain gRPC for `num_bytes` to each of eight processes."""
    spawn = multiprocessing.get_context("spawn")
    end, other = spawn.Pipe()
    server = spawn.Process(target=_serve_stream, args=(other, num_bytes), daemon=True)
    server.start()
    port = end.recv()
    ends, clients = [], []
    for _ in range(NUM_SAMPLERS):
        end, other = spawn.Pipe()
        clients.append(spawn.Process(target=_drain_stream, args=(other, port), daemon=True))
        clients[-1].start()
        ends.append(end)
    for end in ends:
        end.recv()
    start = time.monotonic()
    for end in ends:
        end.send("go")
    for end in ends:
        end.recv()
    seconds = time.monotonic() - start
    for process in (*clients, server):
        process.kill()
        process.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="a small model")
    arguments = parser.parse_args()
    config = model_of(arguments.quick)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            paths = pool.apply(train, (config, folder / "checkpoints"))
        bf16_bytes = sum(path.stat().st_size for path in paths[0].iterdir())
        results["bf16_bytes"] = bf16_bytes
        results["grpc_alone_s"] = round(measure_grpc(bf16_bytes), 3)
        for name in FLEETS:
            place = folder / name.replace(" ", "")
            place.mkdir()
            results[name] = measure_fleet(name, paths, place, bf16_bytes)
        with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
            results["8 x bf16, in memory"] = measure_fleet(
                "8 x bf16", paths[:1], Path(temporary), bf16_bytes
            )
    for name in ("8 x bf16", "8 x bf16, in memory"):
        full = results[name][0]
        seconds = full["all_switched_s"] - full["publish_s"]
        full["share_of_grpc_rate"] = round(results["grpc_alone_s"] / seconds, 3)
    description = harness.machine(("grpcio", "numpy", "zstandard"))
    harness.report("sync", results, description, arguments.out)


if __name__ == "__main__":
    main()
