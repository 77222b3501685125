"""The table of launch flags, the command line that is made of it, and the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from contracts.errors import BadInputError, DirtyProcessError
from contracts.types import KvFormat, WeightFormat
from sampler_fleet.config import GroupConfig
from sampler_fleet.engines.launch import TABLE, LocalServer, kernels_for
from sampler_fleet.engines.sglang import SglangEngine
from sampler_fleet.sampler_process import make_engine


def value_of(command: tuple[str, ...], flag: str) -> str:
    """What the server will take: the last one wins."""
    return [command[i + 1] for i, word in enumerate(command) if word == flag][-1]


@pytest.mark.parametrize(("accelerator", "weight_format"), TABLE, ids=str)
def test_every_entry_makes_a_command_that_the_engine_can_use(accelerator, weight_format):
    kernels = kernels_for(accelerator.upper(), weight_format)
    assert kernels.source
    server = LocalServer(
        kernels=kernels,
        kv_format=KvFormat.FP8,
        max_sessions=32,
        max_context_tokens=4096,
        num_accelerators=2,
        python="/env/bin/python",
    )
    command = server.command(Path("/weights/9"), 9, 1234)
    assert command[:3] == ("/env/bin/python", "-m", "sglang.launch_server")
    assert {"--incremental-streaming-output", "--skip-tokenizer-init"} <= set(command)
    for flag, value in {
        "--model-path": "/weights/9",
        "--weight-version": "9",
        "--port": "1234",
        "--host": "127.0.0.1",
        "--tp-size": "2",
        "--kv-cache-dtype": "fp8_e4m3",
        "--max-running-requests": "33",
    }.items():
        assert value_of(command, flag) == value
    assert int(value_of(command, "--context-length")) > 4096
    assert "--attention-backend" in command


def test_what_differs_between_accelerators():
    nvfp4 = kernels_for("b200", WeightFormat.NVFP4)
    assert "modelopt_fp4" in nvfp4.flags
    assert nvfp4.environment == {"SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16": "1"}
    assert "fa3" in kernels_for("h200", WeightFormat.FP8_BLOCK).flags
    assert "0.65" in kernels_for("a100", WeightFormat.BF16).flags
    with pytest.raises(BadInputError, match="b200 nvfp4"):
        kernels_for("a100", WeightFormat.NVFP4)


def test_arguments_win_over_the_table():
    server = LocalServer(
        kernels=kernels_for("h100", WeightFormat.BF16),
        kv_format=KvFormat.BF16,
        max_sessions=1,
        max_context_tokens=64,
        arguments=("--kv-cache-dtype", "auto"),
    )
    assert value_of(server.command(Path("x"), 1, 1), "--kv-cache-dtype") == "auto"


def group(**changed) -> GroupConfig:
    fields = {"name": "a", "accelerator": "h200", "weight_format": "fp8-block"}
    return GroupConfig.model_validate(fields | changed)


def test_a_group_names_its_engine():
    started = make_engine(group(engine="sglang"), 512, 0)
    attached = make_engine(group(engine="sglang", sglang={"address": "http://host:1"}), 512, 0)
    assert isinstance(started, SglangEngine)
    assert isinstance(attached, SglangEngine)
    with pytest.raises(BadInputError, match="launch flags"):
        make_engine(group(engine="sglang", accelerator="abacus"), 512, 0)
    with pytest.raises(ValidationError):
        group(engine="another")


# Stands where the Python of SGLang's environment would: takes its command line, answers /health.
SERVER = """#!{python}
import http.server, signal, sys
if "--fail" in sys.argv:
    sys.exit(7)
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
# A process that starts a server, tells its process id, and waits.
OWNER = """
import asyncio, pathlib, psutil, sys
import tests.sampler_fleet.engines.test_engine_launch as here
async def main():
    server = here.stand_in(pathlib.Path(sys.argv[1]))
    await server.start(pathlib.Path("x"), 1)
    print(psutil.Process().children()[0].pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def stand_in(directory: Path, *arguments: str) -> LocalServer:
    script = directory / "python"
    script.write_text(SERVER.format(python=sys.executable))
    script.chmod(0o755)
    return LocalServer(
        kernels=kernels_for("cpu", WeightFormat.BF16),
        kv_format=KvFormat.BF16,
        max_sessions=1,
        max_context_tokens=64,
        python=str(script),
        arguments=arguments,
        start_s=60,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("arguments", [(), ("--stubborn",)], ids=["polite", "stubborn"])
async def test_a_server_is_started_and_stopped(tmp_path, arguments):
    server = stand_in(tmp_path, *arguments)
    await server.start(tmp_path, 1)
    assert server.address
    assert not server.ended
    await server.stop()
    assert server.ended
    await server.stop()


@pytest.mark.e2e
async def test_a_server_that_does_not_come_up_is_dirty(tmp_path):
    server = stand_in(tmp_path, "--fail")
    with pytest.raises(DirtyProcessError, match="status 7"):
        await server.start(tmp_path, 1)


@pytest.mark.e2e
def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    command = (sys.executable, "-c", OWNER, str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    gone, _ = psutil.wait_procs([server], timeout=20)
    assert gone or server.status() == psutil.STATUS_ZOMBIE
