"""The service as a process: its commands, its signals, and kill -9 at the worst moments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
import psutil
import pytest

from contracts.pb import weights_pb2, weights_pb2_grpc
from contracts.rpc import token_metadata
from contracts.types import WeightFormat
from tests.weight_sync import tiny_moe
from weight_sync.client import WeightClient, publish, read_manifest, status
from weight_sync.manifest import verify_directory
from weight_sync.store import VersionStore

pytestmark = pytest.mark.e2e

TOKEN = "a-token-of-enough-length"
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30.0


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[int, Path]:
    """Three checkpoints of some 25 MB, so that there is a moment to interrupt; 3 follows from 2."""
    root = tmp_path_factory.mktemp("large")
    arrays = {seed: tiny_moe.tensors(seed=seed, D=512, F=256, E=16) for seed in (1, 2)}
    arrays[3] = tiny_moe.nudged(arrays[2], seed=3)
    return {seed: tiny_moe.write(root / str(seed), arrays[seed]) for seed in arrays}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "weight_sync", *map(str, arguments)]


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


class Service:
    """A real service process on a port that stays the same over restarts."""

    def __init__(self, root: Path, token_file: Path) -> None:
        self.store, self._token_file, self._port_file = root / "store", token_file, root / "port"
        self._listen = "127.0.0.1:0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, prelude: str = "") -> str:
        """Runs the service; `prelude` is Python that it executes before."""
        self._port_file.unlink(missing_ok=True)
        script = f"{prelude}\nfrom weight_sync.__main__ import main\nmain()"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", script),
                *("serve", "--store", str(self.store), "--listen", self._listen),
                *("--token-file", str(self._token_file), "--port-file", str(self._port_file)),
            ],
            cwd=ROOT,
        )
        wait_until(self._port_file.exists, "the service did not start")
        self._listen = f"127.0.0.1:{self._port_file.read_text().strip()}"
        return self._listen

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


@pytest.fixture
def service(tmp_path: Path, token_file: Path) -> Iterator[Service]:
    service = Service(tmp_path, token_file)
    yield service
    service.close()


def staged(store: Path, pattern: str) -> bool:
    """Whether a file that matches has begun to arrive in staging."""
    with contextlib.suppress(FileNotFoundError):
        return any(path.stat().st_size > 0 for path in (store / "staging").glob(pattern))
    return False


def test_terminated_service_leaves_in_order(service, tmp_path, token_file):
    address = service.start()
    assert json.loads(run("status", "--address", address, "--token-file", token_file).stdout) == {
        "latest_version": 0,
        "versions": [],
        "formats": {},
        "bytes_published": 0,
        "bytes_fetched": 0,
        "num_fetching": 0,
        "bytes_per_second": 0.0,
    }
    source = tiny_moe.write(tmp_path / "source")
    done = run(
        *("publish", source, "--version", "3", "--address", address),
        *("--token-file", token_file),
    )
    assert (done.returncode, done.stdout) == (0, "version 3 is published\n")
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(10) == 0
    service.start()
    assert status(address, TOKEN).latest_version == 3


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def test_a_wrong_version_number_is_withdrawn(service, tmp_path, token_file):
    there = ("--address", service.start(), "--token-file", token_file)
    source = tiny_moe.write(tmp_path / "source")
    wrong = str(2**63 - 1)
    for version in ("3", wrong):
        assert run("publish", source, "--version", version, *there).returncode == 0
    assert "versions only grow" in refusal("publish", source, "--version", "4", *there)
    assert "expected it to be the newest" in refusal("withdraw", "--version", "3", *there)
    done = run("withdraw", "--version", wrong, *there)
    assert done.stdout == f"version {wrong} is withdrawn; the newest is 3\n"
    assert run("publish", source, "--version", "4", *there).returncode == 0


def refusal(*arguments: str | Path) -> str:
    """The one sentence of a command that exits with status 2."""
    done = run(*arguments)
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


def test_refusals_are_one_sentence(service, tmp_path, token_file):
    address = service.start()
    wrong = tmp_path / "wrong"
    wrong.write_text("another-token-of-that-length")
    short = tmp_path / "short"
    short.write_text("short")
    run_file = tmp_path / "run.toml"
    run_file.write_text("[weights]\nkeep = 3\n")
    other = tmp_path / "other"
    assert "port" in refusal("serve", "--store", other, "--listen", address)
    assert "it is in use" in refusal("serve", "--store", service.store)
    assert "expected a known key" in refusal("serve", "--store", other, "--config", run_file)
    assert "nowhere.toml" in refusal("serve", "--store", other, "--config", "nowhere.toml")
    assert "16 characters" in refusal("serve", "--store", other, "--token-file", short)
    assert "a different token" in refusal("status", "--address", address, "--token-file", wrong)
    there = ("--address", address, "--token-file", token_file)
    assert "config.json" in refusal("publish", tmp_path, "--version", "1", *there)
    for version in ("0", "-3", str(2**63), str(10**30)):
        expected = f"from 1 to 2^63 - 1, found {version}"
        assert expected in refusal("publish", tmp_path, "--version", version, *there)
        assert expected in refusal("withdraw", "--version", version, *there)
    assert "expected it to be the newest, found 0" in refusal("withdraw", "--version", "1", *there)


async def test_killed_while_a_version_is_published(service, large):
    address = service.start()
    publish(address, TOKEN, large[1], 1)
    second = asyncio.create_task(
        asyncio.to_thread(publish, address, TOKEN, large[2], 2, patience_s=WAIT_S)
    )
    pattern = "*/model.safetensors"
    await asyncio.to_thread(wait_until, lambda: staged(service.store, pattern), "no publication")
    service.kill()
    store = VersionStore(service.store)
    assert store.latest == 1, "killed too late to say anything"
    assert not list((service.store / "staging").iterdir())
    verify_directory(store.directory(1, WeightFormat.BF16), store.manifest(1, WeightFormat.BF16))
    store.close()
    service.start()
    await asyncio.wait_for(second, WAIT_S)
    assert list(status(address, TOKEN).versions) == [1, 2]


async def test_killed_while_a_version_is_converted(service, large, tmp_path):
    address = service.start()
    publish(address, TOKEN, large[1], 1)
    client = WeightClient(address, TOKEN, WeightFormat.NVFP4, tmp_path / "sampler")
    manifests = client.watch(0)
    waiting = asyncio.ensure_future(anext(manifests))
    pattern = "*/.nvfp4.*/model.safetensors"
    await asyncio.to_thread(wait_until, lambda: staged(service.store, pattern), "no conversion")
    service.kill()
    store = VersionStore(service.store)
    assert store.formats(1) == [WeightFormat.BF16], "killed too late to say anything"
    store.close()
    service.start()
    manifest = await asyncio.wait_for(waiting, WAIT_S)
    verify_directory((await client.fetch(manifest)).directory, manifest)
    await manifests.aclose()
    await client.close()


async def test_killed_while_a_sampler_fetches(service, large, tmp_path):
    address = service.start()
    publish(address, TOKEN, large[1], 1)
    arrived = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal arrived
        arrived += num_bytes
        if arrived - num_bytes < 5_000_000 <= arrived:
            service.kill()

    directory = tmp_path / "sampler"
    client = WeightClient(
        address, TOKEN, WeightFormat.BF16, directory, on_bytes=on_bytes, patience_s=WAIT_S
    )
    manifests = client.watch(0)
    manifest = await asyncio.wait_for(anext(manifests), WAIT_S)
    await manifests.aclose()
    fetching = asyncio.create_task(client.fetch(manifest))
    await asyncio.to_thread(
        wait_until, lambda: service.process.poll() is not None, "the fetch did not get that far"
    )
    assert [path.name for path in directory.iterdir()] == [".partial-1"]
    service.start()
    fetched = await asyncio.wait_for(fetching, WAIT_S)
    verify_directory(fetched.directory, manifest)
    assert read_manifest(fetched.directory) == manifest
    total = sum(entry.num_bytes for entry in manifest.files)
    assert total <= arrived < total + 5_000_000, "it went on instead of starting over"
    await client.close()


async def test_killed_sampler_continues_its_fetch(service, large, tmp_path):
    address = service.start()
    publish(address, TOKEN, large[1], 1)
    script = (
        "import asyncio, os, sys\n"
        "from weight_sync.client import WeightClient\n"
        "from contracts.types import WeightFormat\n"
        "seen = 0\n"
        "def on_bytes(n):\n"
        "    global seen\n"
        "    seen += n\n"
        "    if seen > 5_000_000: os.kill(os.getpid(), 9)\n"
        "async def main():\n"
        f"    client = WeightClient({address!r}, {TOKEN!r}, WeightFormat.BF16,\n"
        f"                          {str(tmp_path / 'sampler')!r}, on_bytes=on_bytes)\n"
        "    async for manifest in client.watch(0):\n"
        "        await client.fetch(manifest)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=WAIT_S, check=False)
    assert done.returncode == -signal.SIGKILL
    directory = tmp_path / "sampler"
    assert os.listdir(directory) == [".partial-1"]
    heard: list[int] = []
    client = WeightClient(address, TOKEN, WeightFormat.BF16, directory, on_bytes=heard.append)
    manifests = client.watch(0)
    manifest = await asyncio.wait_for(anext(manifests), WAIT_S)
    verify_directory((await client.fetch(manifest)).directory, manifest)
    await manifests.aclose()
    await client.close()
    assert sum(heard) < sum(entry.num_bytes for entry in manifest.files) - 4_000_000
    assert os.listdir(directory) == ["1"]


# Ends the process in the middle of a file's runs, whichever way they go.
DIES_OVER_A_DELTA = """
import os
from weight_sync import delta
calls = 0
def dying(original):
    def function(*arguments):
        global calls
        calls += 1
        if calls == 20:
            os.kill(os.getpid(), 9)
        return original(*arguments)
    return function
delta._planes = dying(delta._planes)
delta._from_planes = dying(delta._from_planes)
"""


async def test_killed_while_a_delta_is_made(service, large, tmp_path):
    address = service.start(DIES_OVER_A_DELTA)
    publish(address, TOKEN, large[2], 1)
    client = WeightClient(
        address, TOKEN, WeightFormat.BF16, tmp_path / "sampler", patience_s=WAIT_S
    )
    manifests = client.watch(0)
    await client.fetch(await anext(manifests))
    publish(address, TOKEN, large[3], 2)
    fetching = asyncio.create_task(client.fetch(await anext(manifests)))
    await asyncio.to_thread(
        wait_until, lambda: service.process.poll() is not None, "no delta was made"
    )
    assert list((service.store / "staging").glob("*/*.delta"))
    assert not list((service.store / "deltas").glob("*/*"))
    service.start()
    fetched = await asyncio.wait_for(fetching, WAIT_S)
    assert fetched.base_version == 1, "the delta was made after all"
    verify_directory(fetched.directory, read_manifest(fetched.directory))
    assert not list((service.store / "staging").iterdir())
    await manifests.aclose()
    await client.close()


async def test_killed_sampler_while_a_delta_is_applied(service, large, tmp_path):
    address = service.start()
    publish(address, TOKEN, large[2], 1)
    directory = tmp_path / "sampler"

    def sampler(prelude: str) -> subprocess.CompletedProcess[bytes]:
        script = (
            f"{prelude}\n"
            "import asyncio\n"
            "from contracts.types import WeightFormat\n"
            "from weight_sync.client import WeightClient\n"
            "async def main():\n"
            f"    client = WeightClient({address!r}, {TOKEN!r}, WeightFormat.BF16,\n"
            f"                          {str(directory)!r})\n"
            "    async for manifest in client.watch(0):\n"
            "        fetched = await client.fetch(manifest)\n"
            "        print(manifest.version, fetched.base_version)\n"
            "        break\n"
            "    await client.close()\n"
            "asyncio.run(main())\n"
        )
        return subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, timeout=WAIT_S, check=False, stdout=-1
        )

    assert sampler("").stdout == b"1 0\n"
    publish(address, TOKEN, large[3], 2)
    assert sampler(DIES_OVER_A_DELTA).returncode == -signal.SIGKILL
    assert sorted(os.listdir(directory)) == [".partial-2", "1"]
    assert (directory / ".partial-2" / "model.safetensors").exists(), "half changed"
    assert sampler("").stdout == b"2 1\n"
    verify_directory(directory / "2", read_manifest(directory / "2"))
    assert sorted(os.listdir(directory)) == ["1", "2"]


async def test_samplers_that_stall_do_not_fill_the_service_s_memory(service, large):
    """Each holds a few chunks, however large the file is."""
    address = service.start()
    publish(address, TOKEN, large[1], 1)
    process = psutil.Process(service.process.pid)
    before, num = process.memory_info().rss, 50
    request = weights_pb2.FetchRequest(version=1, format="bf16", file="model.safetensors")
    metadata = token_metadata(TOKEN)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(num):
            # windows that never grow: those of a slow machine may come to hold the whole file
            channel = grpc.aio.insecure_channel(address, [("grpc.http2.bdp_probe", 0)])
            await stack.enter_async_context(channel)
            call = weights_pb2_grpc.WeightsStub(channel).Fetch(request, metadata=metadata)
            stack.callback(call.cancel)
            await call.read()
        await asyncio.sleep(1.0)
        grown = process.memory_info().rss - before
        assert status(address, TOKEN).num_fetching == num
    assert grown < num * 8e6, "a whole file has 25 MB"
