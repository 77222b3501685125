"""A sampler whose disk loses files and bits, fills up, or whose wire flips bits: it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest

from contracts import codec
from contracts.errors import RetryError
from contracts.pb import weights_pb2
from contracts.rpc import start_server
from contracts.types import FileEntry, Manifest, WeightFormat
from tests.weight_sync import tiny_moe
from tests.weight_sync.served import TOKEN, next_manifest, put, receiving, running
from weight_sync import client as client_module
from weight_sync import held
from weight_sync.client import WeightClient
from weight_sync.manifest import is_plain_name, verify_directory

BF16 = WeightFormat.BF16


@pytest.fixture(scope="module")
def contents(tmp_path_factory) -> dict[int, Path]:
    """Consecutive checkpoints of one policy."""
    root = tmp_path_factory.mktemp("contents")
    arrays, written = tiny_moe.tensors(seed=1), {}
    for version in (1, 2, 3):
        written[version] = tiny_moe.write(root / str(version), arrays)
        arrays = tiny_moe.nudged(arrays, version)
    return written


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


# What may befall the directory of a sampler that holds version 1 and is about to fetch version 2.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "base: flipped bit": lambda d: tiny_moe.write_corrupt(d / "1/model.safetensors", 60_000),
    "base: cut": lambda d: cut(d / "1/model.safetensors", 100),
    "base: empty": lambda d: cut(d / "1/model.safetensors", 0),
    "base: no shard": lambda d: (d / "1/model.safetensors").unlink(),
    "base: no config": lambda d: (d / "1/config.json").unlink(),
    "base: other config": lambda d: tiny_moe.write_corrupt(d / "1/config.json", 5),
    "base: no manifest": lambda d: (d / "1/manifest.json").unlink(),
    "base: other manifest": lambda d: tiny_moe.write_corrupt(d / "1/manifest.json", 0),
    "base: shard is a directory": lambda d: (
        (d / "1/model.safetensors").unlink(),
        (d / "1/model.safetensors").mkdir(),
    ),
    "all gone": shutil.rmtree,
    "final: a file": lambda d: (d / "2").write_text("x"),
    "final: half": lambda d: ((d / "2").mkdir(), (d / "2/config.json").write_text("{}")),
    "final: a link": lambda d: (d / "2").symlink_to(d / "nowhere"),
    "partial: a file": lambda d: (d / ".partial-2").write_text("x"),
    "partial: a link": lambda d: (d / ".partial-2").symlink_to(d / "1"),
    "partial: stray files": lambda d: (
        (d / ".partial-2").mkdir(),
        (d / ".partial-2/model-9.safetensors").write_bytes(b"stray"),
        (d / ".partial-2/manifest.json").write_bytes(b"stray"),
    ),
    "partial: directories inside": lambda d: [
        (d / ".partial-2" / name / "inner").mkdir(parents=True)
        for name in ("model.safetensors", ".x", ".1-model.safetensors.delta")
    ],
    "other: junk": lambda d: [
        *((d / name).mkdir() for name in ("9", "0", "abc", ".hidden", "٣", "007")),
        *((d / name).write_text("x") for name in ("5", ".DS_Store", "notes.txt")),
    ],
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_directory_stops_no_version(tmp_path, contents, damage):
    directory = tmp_path / "sampler"
    async with (
        running(tmp_path / "store") as (address, _),
        receiving(address, directory, patience_s=5.0) as client,
    ):
        for version in (1, 2, 3):
            await put(address, contents[version], version)
            if version == 2:
                DAMAGES[damage](directory)
            manifest = await next_manifest(client, after=version - 1)
            fetched = await asyncio.wait_for(client.fetch(manifest), 20)
            verify_directory(fetched.directory, manifest)
            expected = {"manifest.json", *(entry.name for entry in manifest.files)}
            assert set(os.listdir(fetched.directory)) == expected
            is_damaged = version == 2 and damage.startswith(("base", "all"))
            assert fetched.base_version == (0 if is_damaged else version - 1)
        assert not [p for p in directory.iterdir() if p.name.startswith(".")]
        ours = {p.name for p in directory.iterdir() if p.name.isascii() and p.name.isdecimal()}
        assert ours - {"0", "007"} == ({"3"} if "1" not in ours and "2" not in ours else {"2", "3"})


async def test_a_finished_version_with_a_stray_file_is_fetched_again(tmp_path, contents):
    async with (
        running(tmp_path / "store") as (address, _),
        receiving(address, tmp_path / "sampler") as client,
    ):
        await put(address, contents[1], 1)
        manifest = await next_manifest(client)
        directory = (await client.fetch(manifest)).directory
        assert (await client.fetch(manifest)).num_bytes == 0
        (directory / "model-00009-of-00009.safetensors").write_bytes(b"an engine would read it")
        assert (await client.fetch(manifest)).num_bytes > 0
        assert "model-00009-of-00009.safetensors" not in os.listdir(directory)


@pytest.mark.parametrize("place", ["manifest", "copy", "chunk"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO])
async def test_what_the_disk_refuses_is_a_retry(tmp_path, contents, monkeypatch, place, number):
    """And it says nothing of the bytes that are there: the base is still taken."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    async with (
        running(tmp_path / "store") as (address, _),
        receiving(address, tmp_path / "sampler", patience_s=0.3) as client,
    ):
        await put(address, contents[1], 1)
        await client.fetch(await next_manifest(client))
        await put(address, contents[2], 2)
        manifest = await next_manifest(client, after=1)
        with monkeypatch.context() as patch:
            if place == "manifest":
                patch.setattr(held, "write_manifest", refuse)
            elif place == "copy":
                patch.setattr(client_module.shutil, "copyfile", refuse)
                patch.setattr(client, "_fetch_verified", refuse)
            else:
                patch.setattr(client, "_on_bytes", refuse)
            with pytest.raises(RetryError, match="disk of the sampler"):
                await client.fetch(manifest)
        assert (await client.fetch(manifest)).base_version == 1


@contextlib.asynccontextmanager
async def scripted(
    watch: list[bytes], others: Callable[[str, int], bytes]
) -> AsyncIterator[tuple[str, list[int]]]:
    """A service of raw bytes: `watch` is sent on each watch, `others` answers call and attempt."""
    afters: list[int] = []
    attempts: dict[str, int] = {}

    async def announce(request, context):
        afters.append(request.after)
        for message in tuple(watch):
            yield message

    def answer(method: str) -> bytes:
        attempts[method] = attempts.get(method, 0) + 1
        return others(method, attempts[method])

    async def chain(request, context):
        return answer("Chain")

    async def fetch(request, context):
        yield answer("Fetch")

    raw = {"response_serializer": lambda message: message}
    handlers = {
        "Watch": grpc.unary_stream_rpc_method_handler(
            announce, request_deserializer=weights_pb2.WatchRequest.FromString, **raw
        ),
        "Chain": grpc.unary_unary_rpc_method_handler(chain, **raw),
        "Fetch": grpc.unary_stream_rpc_method_handler(fetch, **raw),
    }
    handler = grpc.method_handlers_generic_handler("weights.v1.Weights", handlers)
    server, port = await start_server(
        "127.0.0.1:0", TOKEN, lambda server: server.add_generic_rpc_handlers((handler,))
    )
    try:
        yield f"127.0.0.1:{port}", afters
    finally:
        await server.stop(0)


NO_MESSAGE = b"\x0a\xff\xff\xff\xff\x0f"  # a field longer than the message


def announcement(version: int, *, format: WeightFormat = BF16) -> bytes:
    files = (FileEntry(name="config.json", num_bytes=2, checksum="x"),)
    manifest = Manifest(version=version, format=format, files=files)
    return codec.manifest_to_pb(manifest).SerializeToString()


def flipped(message: bytes, position: int) -> bytes:
    return message[:position] + bytes([message[position] ^ 1]) + message[position + 1 :]


@pytest.mark.parametrize(
    "broken",
    [NO_MESSAGE, b"", flipped(announcement(5), 20), announcement(1)],
    ids=["does not parse", "empty", "flipped", "an old version"],
)
async def test_an_announcement_that_is_none_is_waited_out(tmp_path, broken):
    """Each that is yielded is newer than the one before, whatever is sent, and none is believed."""
    messages = [announcement(2), broken, announcement(7)]
    async with scripted(messages, lambda *_: b"") as (address, afters):
        client = WeightClient(address, TOKEN, BF16, tmp_path / "sampler")
        async with contextlib.aclosing(client.watch(0)) as manifests:
            assert (await anext(manifests)).version == 2
            messages[:] = [announcement(3)]
            assert (await asyncio.wait_for(anext(manifests), 20)).version == 3
        assert afters[:2] == [0, 2]
        await client.close()


async def test_answers_that_do_not_parse_are_asked_for_again(tmp_path, contents):
    whole = (contents[1] / "config.json").read_bytes()
    async with running(tmp_path / "store") as (address, _):
        await put(address, contents[1], 1)
        async with receiving(address, tmp_path / "sampler") as client:
            manifest = await next_manifest(client)
            await client.fetch(manifest)
    wanted = Manifest(
        version=2,
        format=BF16,
        files=tuple(entry for entry in manifest.files if entry.name == "config.json"),
    )
    asked = []

    def answer(method: str, attempt: int) -> bytes:
        asked.append(method)
        if attempt == 1:
            return NO_MESSAGE
        if method == "Chain":
            return b""  # no delta
        return weights_pb2.FetchReply(data=whole).SerializeToString()

    async with (
        scripted([], answer) as (address, _),
        receiving(address, tmp_path / "sampler") as client,
    ):
        directory = (await asyncio.wait_for(client.fetch(wanted), 20)).directory
    assert (directory / "config.json").read_bytes() == whole
    assert asked == ["Chain", "Chain", "Fetch", "Fetch"]


async def test_a_fault_of_the_service_is_waited_out(tmp_path):
    """Its INTERNAL must not end every sampler of the fleet."""

    def fail(*_) -> bytes:
        raise ValueError("a fault of the service")

    manifest = codec.manifest_from_pb(weights_pb2.Manifest.FromString(announcement(1)))
    async with (
        scripted([], fail) as (address, _),
        receiving(address, tmp_path / "sampler", patience_s=0.5) as client,
    ):
        with pytest.raises(RetryError, match=r"UNKNOWN|INTERNAL"):
            await client.fetch(manifest)


def test_plain_names():
    for name in ("config.json", "größe.json", "a b.txt", "x" * 200):
        assert is_plain_name(name)
    for name in ("", ".x", "a/b", "a\\b", "a\0", "a\nb", "x" * 201, "ö" * 101, "\ud800"):
        assert not is_plain_name(name)
