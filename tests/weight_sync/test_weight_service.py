"""Publish, watch and fetch over real gRPC on port 0, with the faults of networks and disks."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from contracts import rpc
from contracts.errors import AuthError, BadInputError, ConflictError, RetryError
from contracts.pb import weights_pb2, weights_pb2_grpc
from contracts.types import Manifest, WeightFormat
from tests.weight_sync import tiny_moe
from tests.weight_sync.served import TOKEN, next_manifest, put, receiving, running
from weight_sync import durable, service
from weight_sync.client import WeightClient, publish, read_manifest, status
from weight_sync.convert import Options, convert_directory
from weight_sync.manifest import describe_directory, verify_directory

BF16, NVFP4, FP8 = WeightFormat.BF16, WeightFormat.NVFP4, WeightFormat.FP8_BLOCK


@pytest.fixture(scope="module")
def contents(tmp_path_factory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("contents")
    return {seed: tiny_moe.write(root / str(seed), seed=seed) for seed in (1, 2)}


@pytest.mark.parametrize("format", list(WeightFormat))
async def test_published_weights_arrive_in_every_format(tmp_path, contents, format):
    async with running(tmp_path / "store") as (address, _):
        await put(address, contents[1], 4)
        async with receiving(address, tmp_path / "sampler", format) as client:
            manifest = await next_manifest(client)
            directory = (await client.fetch(manifest)).directory
    assert (manifest.version, manifest.format) == (4, format)
    assert directory == tmp_path / "sampler" / "4"
    assert read_manifest(directory) == manifest
    verify_directory(directory, manifest)
    convert_directory(contents[1], tmp_path / "expected", Options(format=format))
    expected = describe_directory(
        tmp_path / "expected", version=4, format=format, recipe=manifest.recipe
    )
    assert manifest.tensors == expected.tensors
    assert (directory / "tokenizer.json").exists()


async def test_formats_are_converted_only_when_watched(tmp_path, contents):
    async with running(tmp_path / "store", nvfp4_recipe="4over6") as (address, store):
        await put(address, contents[1], 1)
        async with receiving(address, tmp_path / "sampler", NVFP4) as client:
            manifest = await next_manifest(client)
        await put(address, contents[2], 2)
        async with receiving(address, tmp_path / "other", FP8) as client:
            assert (await next_manifest(client)).version == 2
        assert manifest.recipe == "4over6"
        assert store.formats(1) == [BF16, NVFP4]
        assert store.formats(2) == [BF16, FP8]
        reply = await asyncio.to_thread(status, address, TOKEN)
    assert (reply.latest_version, list(reply.versions)) == (2, [1, 2])
    assert {f.format: f.latest_version for f in reply.formats} == {
        "bf16": 2,
        "nvfp4": 1,
        "fp8-block": 2,
    }
    assert reply.bytes_published == 2 * sum(p.stat().st_size for p in contents[1].iterdir())


async def test_a_slow_watcher_sees_only_the_newest(tmp_path, contents):
    async with (
        running(tmp_path / "store", keep_versions=2) as (address, store),
        receiving(address, tmp_path / "sampler") as client,
    ):
        manifests = client.watch(0)
        await put(address, contents[1], 1)
        assert (await anext(manifests)).version == 1
        for version in range(2, 8):
            await put(address, contents[1 + version % 2], version)
        seen = []
        while not seen or seen[-1] != 7:
            seen.append((await asyncio.wait_for(anext(manifests), 20)).version)
        assert seen == sorted(set(seen))
        assert store.versions() == [6, 7]
        directory = (await client.fetch(await next_manifest(client, after=6))).directory
        assert read_manifest(directory).version == 7
        await manifests.aclose()


async def test_many_watchers_get_one_message(tmp_path, contents, monkeypatch):
    made = []
    original = service.codec.manifest_to_pb
    monkeypatch.setattr(
        service.codec, "manifest_to_pb", lambda m: made.append(m.version) or original(m)
    )
    async with running(tmp_path / "store") as (address, _), contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(receiving(address, tmp_path / str(i)))
            for i in range(12)
        ]
        waiting = [asyncio.create_task(next_manifest(client)) for client in clients]
        await asyncio.sleep(0.1)
        await put(address, contents[1], 1)
        assert {m.version for m in await asyncio.gather(*waiting)} == {1}
    assert made == [1]


async def test_a_format_nobody_watched_while_its_version_was_collected(tmp_path, contents):
    """Its next watcher waits for the newest version; it isn't told of one that is gone."""
    async with (
        running(tmp_path / "store", keep_versions=2) as (address, store),
        receiving(address, tmp_path / "sampler", FP8) as client,
    ):
        await put(address, contents[1], 1)
        assert (await next_manifest(client)).version == 1
        for version in range(2, 5):
            await put(address, contents[1 + version % 2], version)
        assert store.versions() == [3, 4]
        manifest = await next_manifest(client)
        assert manifest.version == 4
        assert read_manifest((await client.fetch(manifest)).directory).version == 4


async def test_a_version_that_is_gone_is_not_asked_for_again(tmp_path, contents):
    async with (
        running(tmp_path / "store", keep_versions=1) as (address, _),
        receiving(address, tmp_path / "sampler", patience_s=3600) as client,
    ):
        await put(address, contents[1], 1)
        manifest = await next_manifest(client)
        await put(address, contents[2], 2)
        with pytest.raises(RetryError, match="version 1 is gone"):
            await asyncio.wait_for(client.fetch(manifest), 20)


async def test_only_the_newest_two_versions_stay_with_a_sampler(tmp_path, contents):
    async with (
        running(tmp_path / "store") as (address, _),
        receiving(address, tmp_path / "sampler") as client,
    ):
        for version in (1, 2, 3):
            await put(address, contents[1], version)
            await client.fetch(await next_manifest(client, after=version - 1))
    assert sorted(path.name for path in (tmp_path / "sampler").iterdir()) == ["2", "3"]


async def test_an_older_version_than_those_at_hand_stays_too(tmp_path, contents):
    """As a restarted service may announce, whose newest conversions were not yet made again."""
    async with (
        running(tmp_path / "store", keep_versions=9) as (address, _),
        receiving(address, tmp_path / "sampler") as client,
    ):
        manifests = {}
        for version in (1, 2, 3):
            await put(address, contents[1 + version % 2], version)
            manifests[version] = await next_manifest(client, after=version - 1)
            await client.fetch(manifests[version])
        directory = (await client.fetch(manifests[1])).directory
        verify_directory(directory, manifests[1])
        assert sorted(p.name for p in (tmp_path / "sampler").iterdir()) == ["1", "3"]


async def test_publishing_again_is_idempotent_and_other_content_conflicts(tmp_path, contents):
    async with running(tmp_path / "store") as (address, store):
        await put(address, contents[1], 5)
        await put(address, contents[1], 5)
        with pytest.raises(ConflictError, match="already published with other content"):
            await put(address, contents[2], 5)
        with pytest.raises(ConflictError, match="versions only grow"):
            await put(address, contents[2], 4)
        assert store.versions() == [5]
        assert not list((tmp_path / "store" / "staging").iterdir())


async def test_two_publishers_with_one_version(tmp_path, contents):
    async with running(tmp_path / "store") as (address, store):
        results = await asyncio.gather(
            *(put(address, contents[seed], 1) for seed in (1, 2)), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == ["ConflictError", "NoneType"]
        winner = contents[1 + results.index(None)]
        expected = describe_directory(winner, version=1, format=BF16, recipe="")
        assert store.manifest(1, BF16) == expected


async def test_a_wrong_token_is_refused(tmp_path, contents):
    async with running(tmp_path / "store") as (address, store):
        wrong = "another token of that length"
        with pytest.raises(AuthError, match="a different token"):
            await asyncio.to_thread(publish, address, wrong, contents[1], 1)
        client = WeightClient(address, wrong, BF16, tmp_path / "sampler")
        with pytest.raises(AuthError, match="a different token"):
            await next_manifest(client)
        await client.close()
        with pytest.raises(AuthError, match="no token"):
            await asyncio.to_thread(status, address, "")
        assert store.latest == 0


async def raw_publish(address: str, requests: list[weights_pb2.PublishRequest]) -> None:
    channel = rpc.aio_channel(address, TOKEN)
    try:
        with rpc.calling(address):
            await weights_pb2_grpc.WeightsStub(channel).Publish(iter(requests), timeout=20)
    finally:
        await channel.close()


def header(version: int, *files: tuple[str, bytes]) -> weights_pb2.PublishRequest:
    entries = [
        weights_pb2.FileEntry(name=name, num_bytes=len(data), checksum=durable.checksum(data))
        for name, data in files
    ]
    return weights_pb2.PublishRequest(
        header=weights_pb2.PublishHeader(version=version, files=entries)
    )


def data(content: bytes) -> weights_pb2.PublishRequest:
    return weights_pb2.PublishRequest(data=content)


CONFIG = ("config.json", b"{}")


@pytest.mark.parametrize(
    ("requests", "error", "message"),
    [
        ([], BadInputError, "a header first"),
        ([data(b"x")], BadInputError, "a header first"),
        ([header(0, CONFIG), data(b"{}")], BadInputError, "a version from 1"),
        ([header(1)], BadInputError, "plain file names"),
        ([header(1, ("../x", b"1")), data(b"1")], BadInputError, "plain file names"),
        ([header(1, CONFIG, CONFIG), data(b"{}{}")], BadInputError, "plain file names"),
        ([header(1, CONFIG), data(b"{")], RetryError, "ended 1 bytes before config.json"),
        ([header(1, CONFIG), data(b"{}}")], BadInputError, "found more"),
        ([header(1, CONFIG), data(b"{}")], BadInputError, "expected tensors, found none"),
        ([header(1, CONFIG), data(b"[]")], RetryError, "config.json did not arrive"),
        ([header(1, ("x.bin", b"1")), data(b"1")], BadInputError, "plain file names"),
        ([header(1, ("x" * 300 + ".json", b"1")), data(b"1")], BadInputError, "plain file names"),
        ([header(1, ("a.json", b"1")), data(b"1")], BadInputError, "config.json"),
    ],
)
async def test_a_publication_that_is_none_leaves_nothing(tmp_path, requests, error, message):
    async with running(tmp_path / "store") as (address, store):
        with pytest.raises(error, match=message):
            await raw_publish(address, requests)
        assert store.latest == 0
        assert not list((tmp_path / "store" / "staging").iterdir())


async def test_bytes_that_changed_on_the_wire_are_refused(tmp_path, contents):
    paths = sorted(contents[1].iterdir())
    files = [(path.name, path.read_bytes()) for path in paths]
    changed = [content for _, content in files]
    changed[1] = changed[1][:-1] + bytes([changed[1][-1] ^ 1])
    async with running(tmp_path / "store") as (address, store):
        with pytest.raises(RetryError, match=r"model\.safetensors did not arrive as announced"):
            await raw_publish(address, [header(1, *files), *map(data, changed)])
        assert store.latest == 0


async def test_files_may_share_a_message(tmp_path, contents):
    files = [(path.name, path.read_bytes()) for path in sorted(contents[1].iterdir())]
    joined = b"".join(content for _, content in files)
    async with running(tmp_path / "store") as (address, store):
        await raw_publish(address, [header(1, *files), data(joined[:100]), data(joined[100:])])
        assert store.latest == 1


async def test_a_corrupt_converted_byte_is_caught_and_made_again(tmp_path, contents):
    async with (
        running(tmp_path / "store") as (address, store),
        receiving(address, tmp_path / "sampler", NVFP4) as client,
    ):
        await put(address, contents[1], 1)
        manifest = await next_manifest(client)
        stored = store.directory(1, NVFP4) / "model.safetensors"
        tiny_moe.write_corrupt(stored)
        keep_demand = asyncio.create_task(next_manifest(client, after=1))
        directory = (await client.fetch(manifest)).directory
        verify_directory(directory, manifest)
        keep_demand.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keep_demand


async def test_a_corrupt_source_reaches_nobody(tmp_path, contents):
    async with running(tmp_path / "store") as (address, store):
        await put(address, contents[1], 1)
        tiny_moe.write_corrupt(store.directory(1, BF16) / "model.safetensors")
        async with receiving(address, tmp_path / "plain", patience_s=0.5) as client:
            manifest = await next_manifest(client)
            with pytest.raises(RetryError):
                await client.fetch(manifest)
            assert not (tmp_path / "plain" / "1").exists()
        async with receiving(address, tmp_path / "sampler", NVFP4) as client:
            waiting = asyncio.create_task(next_manifest(client))
            await asyncio.sleep(0.5)
            assert store.formats(1) == [BF16]
            await put(address, contents[2], 2)  # a good version ends it
            assert (await waiting).version == 2


async def test_a_fetch_goes_on_where_it_broke_off(tmp_path, contents):
    heard: list[int] = []
    async with (
        running(tmp_path / "store") as (address, _),
        receiving(address, tmp_path / "sampler", on_bytes=heard.append) as client,
    ):
        await put(address, contents[1], 1)
        manifest = await next_manifest(client)
        partial = tmp_path / "sampler" / ".partial-1"
        partial.mkdir(parents=True)
        whole = (contents[1] / "model.safetensors").read_bytes()
        (partial / "model.safetensors").write_bytes(whole[:1000])
        (tmp_path / "sampler" / ".partial-0").mkdir()
        directory = (await client.fetch(manifest)).directory
        assert sum(heard) == sum(entry.num_bytes for entry in manifest.files) - 1000
        assert [path.name for path in (tmp_path / "sampler").iterdir()] == ["1"]
        heard.clear()
        assert (await client.fetch(manifest)).directory == directory  # verified where it is
        assert heard == []
        tiny_moe.write_corrupt(directory / "model.safetensors")
        verify_directory((await client.fetch(manifest)).directory, manifest)
        assert sum(heard) > 0


@pytest.mark.parametrize("rest", [b"\0" * 1000, b"\0" * 10_000_000])
async def test_a_wrong_partial_file_is_discarded(tmp_path, contents, rest):
    async with (
        running(tmp_path / "store") as (address, _),
        receiving(address, tmp_path / "sampler") as client,
    ):
        await put(address, contents[1], 1)
        manifest = await next_manifest(client)
        partial = tmp_path / "sampler" / ".partial-1"
        partial.mkdir(parents=True)
        (partial / "model.safetensors").write_bytes(rest)
        verify_directory((await client.fetch(manifest)).directory, manifest)


async def test_a_collected_version_is_a_retry(tmp_path, contents):
    async with (
        running(tmp_path / "store") as (address, store),
        receiving(address, tmp_path / "sampler", patience_s=0.3) as client,
    ):
        await put(address, contents[1], 1)
        manifest = await next_manifest(client)
        await put(address, contents[2], 2)
        store.collect(1)
        with pytest.raises(RetryError, match="version 1 is gone"):
            await client.fetch(manifest)
        assert (await next_manifest(client, after=1)).version == 2


async def test_a_fetch_outside_the_manifest_is_refused(tmp_path, contents):
    async with running(tmp_path / "store") as (address, _):
        await put(address, contents[1], 1)
        channel = rpc.aio_channel(address, TOKEN)
        stub = weights_pb2_grpc.WeightsStub(channel)
        for name, offset in (("../../../lock", 0), ("manifest.json", 0), ("config.json", 10**6)):
            request = weights_pb2.FetchRequest(version=1, format="bf16", file=name, offset=offset)
            with pytest.raises(grpc.RpcError, match="a file and an offset of its manifest"):
                await stub.Fetch(request, timeout=10).read()
        with pytest.raises(grpc.RpcError, match="weight format: expected bf16"):
            await stub.Watch(weights_pb2.WatchRequest(format="int3"), timeout=10).read()
        await channel.close()


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".hidden", ""])
async def test_a_manifest_that_points_outside_is_refused(tmp_path, contents, name):
    manifest = describe_directory(contents[1], version=1, format=BF16, recipe="")
    bad = Manifest(
        version=1,
        format=BF16,
        files=(type(manifest.files[0])(name=name, num_bytes=1, checksum="0"),),
    )
    async with receiving("127.0.0.1:1", tmp_path / "sampler") as client:
        with pytest.raises(BadInputError, match="plain file names"):
            await client.fetch(bad)


async def test_watchers_of_an_impossible_format_are_told_why(tmp_path):
    odd = tiny_moe.write(tmp_path / "odd", tiny_moe.tensors(D=72))
    good = tiny_moe.write(tmp_path / "good")
    async with (
        running(tmp_path / "store") as (address, _),
        receiving(address, tmp_path / "sampler", NVFP4) as client,
    ):
        await put(address, odd, 1)
        with pytest.raises(BadInputError, match="columns in multiples of 16, found 72"):
            await next_manifest(client)
        await put(address, good, 2)
        assert (await next_manifest(client)).version == 2


async def test_a_restarted_service_is_found_again(tmp_path, contents):
    async with running(tmp_path / "store") as (address, _):
        await put(address, contents[1], 1)
        client = WeightClient(address, TOKEN, NVFP4, tmp_path / "sampler")
        manifests = client.watch(0)
        assert (await anext(manifests)).version == 1
        waiting = asyncio.ensure_future(anext(manifests))
    publishing = asyncio.create_task(put(address, contents[2], 2, patience_s=20))
    await asyncio.sleep(0.3)
    async with running(tmp_path / "store", address=address):
        await publishing
        manifest = await asyncio.wait_for(waiting, 20)
        assert manifest.version == 2
        verify_directory((await client.fetch(manifest)).directory, manifest)
        await client.close()


async def test_no_service_is_a_retry(tmp_path, contents):
    with pytest.raises(RetryError, match=r"127\.0\.0\.1:1"):
        await put("127.0.0.1:1", contents[1], 1, patience_s=0.3)


async def test_a_full_disk_is_a_retry_and_leaves_nothing(tmp_path, contents, monkeypatch):
    async with running(tmp_path / "store") as (address, store):
        with monkeypatch.context() as patch:

            def full(*_):
                raise OSError(28, "No space left on device")

            patch.setattr(store, "commit", full)
            with pytest.raises(RetryError, match="the disk of the weight store is full"):
                await put(address, contents[1], 1, patience_s=0.1)
        assert not list((tmp_path / "store" / "staging").iterdir())
        await put(address, contents[1], 1)
        assert store.latest == 1
