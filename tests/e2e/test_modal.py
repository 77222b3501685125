"""A group on Modal, as far as it goes without an account.

It is deployed to a stand-in of Modal's API, then one container of it is run by Modal's own entry
point until it served episodes, and told to go.

The gateway, the weight service and the sampler are real processes on loopback; the engine is the
embedded one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from modal_proto import api_pb2

from sampler_fleet.providers.modal_app import CACHE, RECORD
from tests.sampler_fleet.providers.modal_stand_in import ModalStandIn, modal_stand_in

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
GROUP = "on-modal"
TOKEN = "a-token-for-tests-only"
TASK = "ta-0123456789"
WAIT_S = 90.0
RUN_FILE = f"""
[sampling]
max_new_tokens = 12
[episodes]
group_size = 2
max_concurrent = 4
queue_groups = 64
[episodes.limits]
max_turns = 3
max_context_tokens = 1000
[tasks]
num_train = 8
num_heldout = 4
[fleet]
max_context_tokens = 1024
drain_seconds = 5
[fleet.modal]
gateway = "gateway.example.com:7000"
weights = "weights.example.com:7001"
tls = "none"
[[fleet.groups]]
name = "{GROUP}"
provider = "modal"
weight_format = "bf16"
samplers = 1
modal = {{ cpu = 2 }}
"""


@pytest.fixture
def stand_in() -> Iterator[ModalStandIn]:
    with modal_stand_in() as served:
        yield served


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def run_module(*arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Processes:
    """Modules that run until the test ends, each with a log."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: object, **environment: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *map(str, arguments)],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def port(self, name: str) -> int:
        path = self.directory / f"{name}.port"
        wait_until(path.exists, f"{name} did not come up")
        return int(path.read_text())

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()


@pytest.fixture
def processes(tmp_path) -> Iterator[Processes]:
    running = Processes(tmp_path)
    yield running
    for process in reversed(running.started):
        process.terminate()
    for process in running.started:
        process.wait(30)


def mounted(stand_in: ModalStandIn, path: str) -> bytes:
    """What the containers of the deployed group find at a path."""
    for mount_id in stand_in.deployed[GROUP].mount_ids:
        for file in stand_in.mounts[mount_id]:
            if file.filename == path:
                return stand_in.files[file.sha256_hex]
    raise AssertionError(f"{path} is in no mount")


def container_arguments(stand_in: ModalStandIn) -> bytes:
    """What Modal hands a container of the deployed group."""
    function_id = stand_in.function_id(GROUP)
    metadata = api_pb2.FunctionHandleMetadata(function_name=GROUP)
    return api_pb2.ContainerArguments(
        task_id=TASK,
        function_id=function_id,
        app_id="ap-1",
        function_def=stand_in.deployed[GROUP],
        app_layout=api_pb2.AppLayout(
            objects=[api_pb2.Object(object_id=function_id, function_handle_metadata=metadata)],
            function_ids={GROUP: function_id},
        ),
    ).SerializeToString()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_deployed_group_serves_from_its_container_and_drains(
    tiny_checkpoint, tmp_path, stand_in, processes
):
    run_file, token_file = tmp_path / "run.toml", tmp_path / "token"
    run_file.write_text(RUN_FILE)
    token_file.write_text(TOKEN)
    account = {
        "MODAL_SERVER_URL": stand_in.address,
        "MODAL_TOKEN_ID": "ak-test",
        "MODAL_TOKEN_SECRET": "as-test",
    }
    run_module("sampler_fleet", "deploy", "modal", run_file, "--insecure", **account)

    common = ("--token-file", token_file, "--port-file")
    weights = ("weight_sync", "serve", "--store", tmp_path / "store", *common)
    processes.start("weights", *weights, tmp_path / "weights.port")
    weights_at = f"127.0.0.1:{processes.port('weights')}"
    publish = ("publish", tiny_checkpoint, "--version", 1, "--address", weights_at)
    run_module("weight_sync", *publish, "--token-file", token_file)
    gateway = ("--config", run_file, "--state-dir", tmp_path / "state", *common)
    gateway = ("sampler_fleet", "serve", "--checkpoint", tiny_checkpoint, *gateway)
    processes.start("gateway", *gateway, tmp_path / "gateway.port")
    gateway_at = f"127.0.0.1:{processes.port('gateway')}"

    # What Modal does with a deployed container, except that its addresses lead to loopback.
    record = json.loads(mounted(stand_in, RECORD))
    assert TOKEN not in json.dumps(record)
    record["fleet"]["modal"] |= {"gateway": gateway_at, "weights": weights_at}
    (tmp_path / "record.json").write_text(json.dumps(record))
    (tmp_path / "arguments").write_bytes(container_arguments(stand_in))
    environment: dict[str, str] = {}
    for secret_id in stand_in.deployed[GROUP].secret_ids:
        environment |= stand_in.secrets[secret_id]
    assert environment["SAMPLER_RECORD"] == RECORD and environment["SAMPLER_CACHE"] == CACHE
    page = free_port()
    environment |= {
        "SAMPLER_RECORD": str(tmp_path / "record.json"),
        "SAMPLER_CACHE": str(tmp_path / "cache"),
        "SAMPLER_PORT": str(page),
        "SAMPLER_TOKEN": TOKEN,
        "MODAL_TASK_ID": TASK,
        "MODAL_IS_REMOTE": "1",
        "MODAL_SERVER_URL": stand_in.address,
        "MODAL_CONTAINER_ARGUMENTS_PATH": str(tmp_path / "arguments"),
    }
    container = processes.start("container", "modal._container_entrypoint", **environment)

    def status() -> dict:
        options = ("--gateway", gateway_at, "--token-file", token_file, "--json")
        return json.loads(run_module("sampler_fleet", "status", *options))

    def num_tokens() -> int:
        return sum(int(group.get("tokens_sampled", 0)) for group in status()["groups"])

    def answers() -> bool:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{page}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert json.load(answer)["sampler_id"] == f"{GROUP}-{TASK}"
                return True
        return False

    wait_until(answers, "the container's page did not come up")
    wait_until(num_tokens, "the sampler served nothing")
    (sampler,) = status()["samplers"]
    assert sampler["register"]["sampler_id"] == f"{GROUP}-{TASK}"
    assert stand_in.requests["ContainerServerLifecycleReady"]

    container.send_signal(signal.SIGTERM)  # as Modal tells a server's container to go
    assert container.wait(WAIT_S) == 0, processes.log("container")
    assert "drains: it was told to stop" in processes.log("gateway")
    (commit,) = stand_in.requests["VolumeCommit"]
    assert commit.volume_id == stand_in.deployed[GROUP].volume_mounts[0].volume_id
    assert all(TOKEN not in processes.log(name) for name in ("container", "gateway"))
