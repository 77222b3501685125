"""A service whose disk loses files and bits, or refuses some: one version suffers, not the rest."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from contracts import rpc
from contracts.errors import BadInputError, RetryError
from contracts.pb import weights_pb2, weights_pb2_grpc
from contracts.types import WeightFormat
from tests.weight_sync import tiny_moe
from tests.weight_sync.served import TOKEN, next_manifest, put, receiving, running
from weight_sync import convert, service
from weight_sync.client import read_manifest, status
from weight_sync.manifest import verify_directory
from weight_sync.store import VersionStore

BF16, NVFP4 = WeightFormat.BF16, WeightFormat.NVFP4


@pytest.fixture(scope="module")
def contents(tmp_path_factory) -> dict[int, Path]:
    """Consecutive checkpoints of one policy."""
    root = tmp_path_factory.mktemp("contents")
    arrays, written = tiny_moe.tensors(seed=1), {}
    for version in (1, 2, 3):
        written[version] = tiny_moe.write(root / str(version), arrays)
        arrays = tiny_moe.nudged(arrays, version)
    return written


@pytest.fixture(scope="module")
def filled(tmp_path_factory, contents) -> Path:
    """A store with versions 1 and 2 in BF16 and NVFP4, nobody in it."""
    root = tmp_path_factory.mktemp("filled") / "store"

    async def fill() -> None:
        async with (
            running(root) as (address, _),
            receiving(address, root.parent / "sampler", NVFP4) as client,
        ):
            for version in (1, 2):
                await put(address, contents[version], version)
                assert (await next_manifest(client, version - 1)).version == version

    asyncio.run(fill())
    return root


@pytest.fixture
def root(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "store"))


def replace(path: Path, pattern: bytes, by: bytes) -> None:
    text, num = re.subn(pattern, by, path.read_bytes(), count=1)
    assert num == 1
    path.write_bytes(text)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "not JSON": lambda path: replace(path, b"^{", b"s"),
    "not UTF-8": lambda path: replace(path, b"version", b"v\xf2rsion"),
    "another version": lambda path: replace(path, b'"version":2', b'"version":1'),
    "a version that is not there": lambda path: replace(path, b'"version":2', b'"version":3'),
    "another format": lambda path: replace(path, b'"nvfp4"', b'"nvfq4"'),
    "another checksum": lambda path: replace(path, b'"checksum":\\["(.)', b'"checksum":["x'),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_format_whose_manifest_is_damaged_is_made_again(root, tmp_path, damage):
    DAMAGES[damage](root / "versions" / "2" / "nvfp4" / "manifest.json")
    async with (
        running(root) as (address, store),
        receiving(address, tmp_path / "sampler", NVFP4) as client,
        contextlib.aclosing(client.watch(1)) as manifests,
    ):
        manifest = await asyncio.wait_for(anext(manifests), 20)
        reply = await asyncio.to_thread(status, address, TOKEN)
        assert reply.latest_version == 2
        directory = (await client.fetch(manifest)).directory
        assert (manifest.version, read_manifest(directory)) == (2, store.manifest(2, NVFP4))


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_manifest_damaged_while_it_is_served_stops_nobody_else(
    root, tmp_path, damage, monkeypatch
):
    """One that the service counted on, and finds damaged when it is asked for."""
    async with running(root) as (address, store):
        store._manifests.clear()
        DAMAGES[damage](root / "versions" / "2" / "nvfp4" / "manifest.json")
        async with (
            receiving(address, tmp_path / "a", NVFP4) as one,
            receiving(address, tmp_path / "b", BF16) as other,
        ):
            damaged = asyncio.create_task(next_manifest(one, after=1))
            assert (await next_manifest(other)).version == 2
            assert (await asyncio.to_thread(status, address, TOKEN)).latest_version == 2
            assert (await asyncio.wait_for(damaged, 20)).version == 2


async def test_a_damaged_bf16_manifest_waits_for_the_next_version(root, tmp_path, contents):
    (root / "versions" / "2" / "bf16" / "manifest.json").unlink()
    async with (
        running(root) as (address, _),
        receiving(address, tmp_path / "sampler") as client,
    ):
        assert (await next_manifest(client)).version == 1
        assert (await asyncio.to_thread(status, address, TOKEN)).latest_version == 2
        await put(address, contents[3], 3)
        assert (await next_manifest(client, after=1)).version == 3


@pytest.mark.parametrize("damage", ["file", "directory", "cut"])
async def test_a_converted_file_that_is_gone_is_made_again(root, tmp_path, damage):
    async with (
        running(root) as (address, store),
        receiving(address, tmp_path / "sampler", NVFP4) as client,
        contextlib.aclosing(client.watch(0)) as manifests,
    ):
        manifest = await asyncio.wait_for(anext(manifests), 20)
        path = store.directory(2, NVFP4) / "model.safetensors"
        if damage == "file":
            path.unlink()
        elif damage == "directory":
            shutil.rmtree(path.parent)
        else:  # behind where this sampler goes on
            partial = tmp_path / "sampler" / ".partial-2"
            partial.mkdir(parents=True)
            (partial / path.name).write_bytes(path.read_bytes()[:20_000])
            path.write_bytes(path.read_bytes()[:10_000])
        watching = asyncio.ensure_future(anext(manifests))  # keeps the format in demand
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(RetryError):
                    directory = (await client.fetch(manifest)).directory
                    break
                await asyncio.sleep(0.05)
        verify_directory(directory, manifest)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("corrupt", [1, 2])
async def test_no_delta_is_made_of_corrupt_bytes(root, tmp_path, corrupt):
    """At either end: every sampler would load it for nothing."""
    async with running(root) as (address, store):
        tiny_moe.write_corrupt(store.directory(corrupt, BF16) / "model.safetensors", -1001)
        async with rpc.aio_channel(address, TOKEN) as channel:
            stub = weights_pb2_grpc.WeightsStub(channel)
            request = weights_pb2.ChainRequest(format="bf16", have=1, want=2)
            for _ in range(2):
                assert not (await stub.Chain(request, timeout=20)).deltas
        assert store.deltas(BF16) == {}


async def test_a_disk_too_full_to_convert_is_waited_for(tmp_path, contents, monkeypatch):
    monkeypatch.setattr(service, "_CONVERT_AGAIN_S", 0.1)
    free = convert.shutil.disk_usage(tmp_path)
    async with (
        running(tmp_path / "store") as (address, _),
        receiving(address, tmp_path / "sampler", NVFP4) as client,
    ):
        await put(address, contents[1], 1)
        with monkeypatch.context() as patch:
            patch.setattr(convert.shutil, "disk_usage", lambda path: free._replace(free=1000))
            waiting = asyncio.create_task(next_manifest(client))
            await asyncio.sleep(0.5)
            assert not waiting.done()
        assert (await waiting).version == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EROFS, errno.ENOENT])
async def test_what_the_disk_refuses_is_temporary(tmp_path, contents, monkeypatch, number):
    async with running(tmp_path / "store") as (address, store):

        def refuse(*_) -> None:
            raise OSError(number, "refused", f"{tmp_path}/store/staging/x")

        monkeypatch.setattr(store, "commit", refuse)
        with pytest.raises(RetryError, match="the disk of the weight store: refused") as told:
            await put(address, contents[1], 1, patience_s=0.1)
        assert str(tmp_path) not in str(told.value)


async def test_no_peer_learns_where_the_store_is(tmp_path, contents):
    odd = tiny_moe.write(tmp_path / "odd")
    (odd / "config.json").write_text("{")
    async with running(tmp_path / "store") as (address, _):
        with pytest.raises(BadInputError, match=r"^config\.json: expected JSON") as told:
            await put(address, odd, 1)
        assert str(tmp_path) not in str(told.value)
        await put(address, tiny_moe.write(tmp_path / "dense", tiny_moe.tensors(D=72)), 1)
        async with receiving(address, tmp_path / "sampler", NVFP4) as client:
            with pytest.raises(BadInputError, match="found 72") as told:
                await next_manifest(client)
        assert str(tmp_path) not in str(told.value)


async def test_nan_reaches_nobody_and_the_trainer_is_told(tmp_path, contents):
    arrays = tiny_moe.tensors()
    arrays["model.norm.weight"][5] = float("nan")
    bad = tiny_moe.write(tmp_path / "nan", arrays)
    async with running(tmp_path / "store") as (address, store):
        with pytest.raises(BadInputError, match=r"model\.norm\.weight: expected finite weights"):
            await put(address, bad, 1)
        assert store.latest == 0
        await put(address, contents[1], 1)


async def test_a_version_that_was_withdrawn_is_announced_to_nobody(root, tmp_path, contents):
    async with (
        running(root) as (address, store),
        receiving(address, tmp_path / "sampler", NVFP4) as client,
    ):
        async with rpc.aio_channel(address, TOKEN) as channel:
            stub = weights_pb2_grpc.WeightsStub(channel)
            reply = await stub.Withdraw(weights_pb2.WithdrawRequest(version=2), timeout=20)
            assert reply.latest_version == 1
            with pytest.raises(grpc.RpcError) as refused:
                await stub.Withdraw(weights_pb2.WithdrawRequest(version=2), timeout=20)
            assert refused.value.code() == grpc.StatusCode.ABORTED
        assert (await next_manifest(client)).version == 1
        await put(address, contents[3], 2)
        manifest = await next_manifest(client, after=1)
        verify_directory((await client.fetch(manifest)).directory, store.manifest(2, NVFP4))


async def test_large_manifests_do_not_stop_the_loop(root, tmp_path, monkeypatch):
    """They are read and packed in threads, whichever call needs them."""
    loop_thread = []
    original = VersionStore.manifest

    def reading(store, version, format):
        with contextlib.suppress(RuntimeError):
            loop_thread.append(asyncio.get_running_loop())
        return original(store, version, format)

    async with running(root) as (address, _):
        monkeypatch.setattr(VersionStore, "manifest", reading)
        async with receiving(address, tmp_path / "sampler") as client:
            await client.fetch(await next_manifest(client))
            async with rpc.aio_channel(address, TOKEN) as channel:
                stub = weights_pb2_grpc.WeightsStub(channel)
                await stub.Chain(weights_pb2.ChainRequest(format="bf16", have=1, want=2))
                await stub.Status(weights_pb2.StatusRequest())
    assert loop_thread == []
