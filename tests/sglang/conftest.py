"""A real SGLang server for the tests of this folder, which run only by `make test-sglang`."""

from __future__ import annotations

import asyncio
import os

import pytest

from contracts.types import KvFormat, WeightFormat
from sampler_fleet.engines.launch import LocalServer, kernels_for
from tests.sampler_fleet.engines.engine_checkpoints import write_checkpoint
from tests.sampler_fleet.engines.test_engine_contract import MAX_CONTEXT

PYTHON = os.environ.get("SGLANG_PYTHON", "")  # of the environment that has SGLang
if not PYTHON:
    collect_ignore_glob = ["test_*.py"]


def local_server(kv_format: KvFormat = KvFormat.BF16, *arguments: str) -> LocalServer:
    return LocalServer(
        kernels=kernels_for("cpu", WeightFormat.BF16),
        kv_format=kv_format,
        max_sessions=16,
        max_context_tokens=MAX_CONTEXT,
        python=PYTHON,
        arguments=arguments,
        start_s=400,
    )


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The address of a server that all tests share; each loads what it needs."""
    directory = tmp_path_factory.mktemp("first weights")
    write_checkpoint(directory)
    server = local_server()
    with asyncio.Runner() as runner:
        runner.run(server.start(directory, 1))
        try:
            yield server.address
        finally:
            runner.run(server.stop())
