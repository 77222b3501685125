"""Versions that arrive as deltas, over real gRPC on port 0, and what must hold when they can't."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from contracts import rpc
from contracts.pb import weights_pb2, weights_pb2_grpc
from contracts.types import Manifest, WeightFormat
from tests.weight_sync import tiny_moe
from weight_sync import service
from weight_sync.client import WeightClient, publish, read_manifest, status
from weight_sync.config import WeightsConfig
from weight_sync.manifest import verify_directory
from weight_sync.service import serving
from weight_sync.store import VersionStore

TOKEN = "a token of enough length"
BF16, NVFP4 = WeightFormat.BF16, WeightFormat.NVFP4
NUM_VERSIONS = 12


@pytest.fixture(scope="module")
def contents(tmp_path_factory) -> dict[int, Path]:
    """Consecutive checkpoints of one policy, and one of another (0)."""
    root = tmp_path_factory.mktemp("contents")
    arrays = tiny_moe.tensors(seed=1)
    written = {0: tiny_moe.write(root / "0", seed=7)}
    for version in range(1, NUM_VERSIONS + 1):
        written[version] = tiny_moe.write(root / str(version), arrays)
        arrays = tiny_moe.nudged(arrays, version)
    return written


class Sync:
    """A running service and its samplers."""

    def __init__(self, root: Path, contents: dict[int, Path], address: str, store: VersionStore):
        self.root, self.contents, self.address, self.store = root, contents, address, store
        self.stack = contextlib.AsyncExitStack()

    async def put(self, version: int, content: int | None = None) -> None:
        directory = self.contents[version if content is None else content]
        await asyncio.to_thread(publish, self.address, TOKEN, directory, version)

    def sampler(
        self, name: str = "sampler", format: WeightFormat = BF16, address: str = ""
    ) -> WeightClient:
        directory = self.root / name
        client = WeightClient(address or self.address, TOKEN, format, directory, patience_s=5.0)
        self.stack.push_async_callback(client.close)
        return client


@contextlib.asynccontextmanager
async def running(root: Path, contents: dict[int, Path], **settings: Any) -> AsyncIterator[Sync]:
    store = VersionStore(root / "store")
    try:
        config = WeightsConfig(**settings)
        async with serving(store, config, address="127.0.0.1:0", credentials=TOKEN) as (_, port):
            sync = Sync(root, contents, f"127.0.0.1:{port}", store)
            async with sync.stack:
                yield sync
    finally:
        store.close()


async def newest(client: WeightClient, after: int = 0) -> Manifest:
    manifests = client.watch(after)
    try:
        return await asyncio.wait_for(anext(manifests), 20)
    finally:
        await manifests.aclose()


async def take(client: WeightClient, version: int):
    """Fetches the newest version, which must be this one, and looks at every byte of it."""
    manifest = await newest(client, version - 1)
    assert manifest.version == version
    fetched = await client.fetch(manifest)
    assert read_manifest(fetched.directory) == manifest
    verify_directory(fetched.directory, manifest)
    assert not list(fetched.directory.glob(".*"))
    return fetched


def num_bytes(manifest: Manifest) -> int:
    return sum(entry.num_bytes for entry in manifest.files)


@pytest.mark.parametrize("format", list(WeightFormat))
async def test_a_next_version_arrives_as_a_delta(tmp_path, contents, format):
    async with running(tmp_path, contents) as sync:
        client = sync.sampler(format=format)
        await sync.put(1)
        first = await take(client, 1)
        await sync.put(2)
        second = await take(client, 2)
        assert (first.base_version, second.base_version) == (0, 1)
        size = num_bytes(sync.store.manifest(2, format))
        assert first.num_bytes == num_bytes(sync.store.manifest(1, format))
        assert 0 < second.num_bytes < size / 3
        reply = await asyncio.to_thread(status, sync.address, TOKEN)
    (row,) = [row for row in reply.formats if row.format == format]
    assert (row.latest_version, row.snapshot_bytes) == (2, size)
    assert [(d.base_version, d.version) for d in row.deltas] == [(1, 2)]
    assert row.delta_bytes_fetched == second.num_bytes
    assert row.bytes_fetched == first.num_bytes + second.num_bytes


async def test_a_sampler_that_missed_ten_versions_takes_the_chain(tmp_path, contents):
    async with running(tmp_path, contents, keep_versions=2) as sync:
        slow, quick = sync.sampler("slow"), sync.sampler("quick")
        await sync.put(1)
        await take(slow, 1)
        await take(quick, 1)
        for version in range(2, NUM_VERSIONS + 1):
            await sync.put(version)
            assert (await take(quick, version)).base_version == version - 1
        manifest = await newest(slow, NUM_VERSIONS - 1)
        late = await slow.fetch(manifest)
        assert late.base_version == 1, "the deltas outlive the versions"
        chain = [(d, d + 1) for d in range(1, NUM_VERSIONS)]
        assert list(sync.store.deltas(BF16)) == chain
        assert late.num_bytes == sum(map(num_bytes, sync.store.deltas(BF16).values()))
        verify_directory(late.directory, manifest)


async def test_a_version_taken_without_a_byte_is_kept_for_the_next_delta(tmp_path, contents):
    async with running(tmp_path, contents, keep_versions=2) as sync:
        client = sync.sampler()
        await sync.put(1)
        await take(client, 1)
        await sync.put(2, content=1)
        assert (await take(client, 2)).num_bytes == 0
        for version in (3, 4, 5):
            await sync.put(version)
        assert sync.store.versions() == [1, 2, 4, 5]
        assert (await take(client, 5)).base_version == 2


async def test_beyond_the_longest_chain_the_snapshot_is_taken(tmp_path, contents, monkeypatch):
    monkeypatch.setattr(service, "_FETCH_LINGERS_S", 0.0)
    async with running(tmp_path, contents, keep_versions=2, max_deltas=3) as sync:
        slow, quick = sync.sampler("slow"), sync.sampler("quick")
        await sync.put(1)
        await take(slow, 1)
        await take(quick, 1)
        for version in range(2, 6):
            await sync.put(version)
            await take(quick, version)
        assert (await take(slow, 5)).base_version == 0
        await sync.put(6)
        assert list(sync.store.deltas(BF16)) == [(2, 3), (3, 4), (4, 5)], "older ones are gone"


async def test_a_delta_larger_than_the_snapshot_is_not_kept(tmp_path, contents, monkeypatch):
    made = []

    def write_large(old: Path, new: Path, folder: Path) -> int:
        made.append(folder)
        size = sum(path.stat().st_size for path in new.iterdir() if path.name != "manifest.json")
        (folder / "model.safetensors.delta").write_bytes(bytes(size))
        return size

    monkeypatch.setattr(service, "write_deltas", write_large)
    async with running(tmp_path, contents) as sync:
        clients = [sync.sampler(name) for name in ("one", "two")]
        await sync.put(1)
        for client in clients:
            await take(client, 1)
        await sync.put(2)
        for client in clients:
            assert (await take(client, 2)).base_version == 0
        assert sync.store.deltas(BF16) == {}
        assert len(made) == 1 and not made[0].exists()


async def test_a_delta_is_made_once_for_all_samplers(tmp_path, contents, monkeypatch):
    made = []
    original = service.write_deltas
    monkeypatch.setattr(
        service, "write_deltas", lambda *paths: made.append(paths[:2]) or original(*paths)
    )
    async with running(tmp_path, contents) as sync:
        clients = [sync.sampler(f"sampler-{i}", NVFP4) for i in range(8)]
        await sync.put(1)
        await asyncio.gather(*(take(client, 1) for client in clients))
        await sync.put(2)
        fetched = await asyncio.gather(*(take(client, 2) for client in clients))
    assert [result.base_version for result in fetched] == [1] * 8
    assert len(made) == 1


async def test_a_sampler_that_asked_before_a_delta_was_made_gets_that_one(
    tmp_path, contents, monkeypatch
):
    both_asked, is_made = threading.Barrier(2, timeout=30), threading.Event()
    write, missing = service.write_deltas, service.WeightService._missing_delta

    def missing_late(*args):
        edge = missing(*args)
        if both_asked.wait():  # 1 of the two
            assert is_made.wait(30)
        return edge

    written = []
    monkeypatch.setattr(
        service, "write_deltas", lambda *paths: written.append(paths[:2]) or write(*paths)
    )
    monkeypatch.setattr(service.WeightService, "_missing_delta", missing_late)
    async with running(tmp_path, contents) as sync:
        one, two = sync.sampler("one"), sync.sampler("two")
        await sync.put(1)
        for client in (one, two):
            await take(client, 1)
        await sync.put(2)
        late = asyncio.gather(take(one, 2), take(two, 2))
        while not sync.store.deltas(BF16):
            await asyncio.sleep(0.01)
        is_made.set()
        assert [fetched.base_version for fetched in await late] == [1, 1]
    assert len(written) == 1


async def test_a_corrupt_delta_on_disk_is_dropped_and_made_again(tmp_path, contents):
    async with running(tmp_path, contents) as sync:
        one, two = sync.sampler("one"), sync.sampler("two")
        await sync.put(1)
        await take(one, 1)
        await take(two, 1)
        await sync.put(2)
        assert (await take(one, 2)).base_version == 1
        directory = sync.store.delta_directory(1, 2, BF16)
        tiny_moe.write_corrupt(directory / "model.safetensors.delta", 40)
        assert (await take(two, 2)).base_version == 0
        assert sync.store.deltas(BF16) == {}
        await sync.put(3)
        assert (await take(two, 3)).base_version == 2


@pytest.mark.parametrize("where", ["sampler", "service"])
async def test_a_corrupt_base_is_caught_by_the_checksum_of_the_result(tmp_path, contents, where):
    async with running(tmp_path, contents) as sync:
        client = sync.sampler()
        await sync.put(1)
        first = await take(client, 1)
        base = first.directory if where == "sampler" else sync.store.directory(1, BF16)
        tiny_moe.write_corrupt(base / "model.safetensors", -1001)
        await sync.put(2)
        assert (await take(client, 2)).base_version == 0
        await sync.put(3)
        assert (await take(client, 3)).base_version == 2


class FlipsBits(weights_pb2_grpc.WeightsServicer):
    """Stands between a sampler and the service, and flips a bit of the first chunk of each file."""

    def __init__(self, address: str) -> None:
        self.address, self.flipped, self.limit = address, 0, 1
        self._channel = rpc.aio_channel(address, TOKEN)
        self._stub = weights_pb2_grpc.WeightsStub(self._channel)

    async def Watch(self, request, context):
        async for manifest in self._stub.Watch(request):
            yield manifest

    async def Chain(self, request, context):
        return await self._stub.Chain(request)

    async def Fetch(self, request, context):
        async for reply in self._stub.Fetch(request):
            if self.flipped < self.limit and len(reply.data) > 50:
                self.flipped += 1
                content = bytearray(reply.data)
                content[50] ^= 1
                reply = weights_pb2.FetchReply(data=bytes(content))
            yield reply

    async def close(self) -> None:
        await self._channel.close()


async def test_bits_that_flip_on_the_wire_never_arrive(tmp_path, contents):
    async with running(tmp_path, contents) as sync:
        proxy = FlipsBits(sync.address)
        server = grpc.aio.server()
        weights_pb2_grpc.add_WeightsServicer_to_server(proxy, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = sync.sampler(address=f"127.0.0.1:{port}")
        try:
            await sync.put(1)
            assert (await take(client, 1)).base_version == 0
            assert proxy.flipped == 1
            await sync.put(2)
            proxy.limit = 2
            assert (await take(client, 2)).base_version == 1, "the delta came again"
            assert proxy.flipped == 2
        finally:
            await client.close()
            await proxy.close()
            await server.stop(0)


async def test_deltas_survive_a_restart(tmp_path, contents):
    async with running(tmp_path, contents, keep_versions=2) as sync:
        one, two = sync.sampler("one"), sync.sampler("two")
        await sync.put(1)
        await take(one, 1)
        await take(two, 1)
        await sync.put(2)
        await take(one, 2)
    async with running(tmp_path, contents, keep_versions=2) as sync:
        assert list(sync.store.deltas(BF16)) == [(1, 2)]
        await sync.put(3)
        assert (await take(sync.sampler("one"), 3)).base_version == 2
        assert (await take(sync.sampler("two"), 3)).base_version == 1


async def test_what_no_client_of_ours_asks(tmp_path, contents):
    async with running(tmp_path, contents) as sync:
        await sync.put(1)
        async with rpc.aio_channel(sync.address, TOKEN) as channel:
            stub = weights_pb2_grpc.WeightsStub(channel)

            async def ask(have: int, want: int, format: str = "bf16") -> list[Any]:
                request = weights_pb2.ChainRequest(format=format, have=have, want=want)
                return list((await stub.Chain(request)).deltas)

            assert await ask(-3, 1) == await ask(1, 1) == await ask(7, 1) == []
            for have, want, format, code in (
                (1, 9, "bf16", grpc.StatusCode.NOT_FOUND),
                (1, 1, "nvfp4", grpc.StatusCode.NOT_FOUND),
                (1, 1, "fp3", grpc.StatusCode.INVALID_ARGUMENT),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await ask(have, want, format)
                assert refused.value.code() == code
            request = weights_pb2.FetchRequest(
                version=1, format="bf16", file="model.safetensors.delta", base_version=7
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Fetch(request):
                    pass
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
