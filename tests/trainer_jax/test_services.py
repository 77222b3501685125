"""Services at given addresses: reached with the token and the certificates of the run file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from contracts.credentials import Credentials, Token
from contracts.errors import BadInputError, RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc
from contracts.rpc import start_server
from tests.contracts.certificates import make_certificates, tls
from trainer_jax.config import parse_run
from trainer_jax.run_directory import RunDirectory
from trainer_jax.services import Services

TOKEN = "a-token-of-enough-length"


class _Gateway(fleet_pb2_grpc.FleetServicer):
    async def Status(self, request, context):
        return fleet_pb2.StatusReply(last_sequence=7)


def services(directory: Path, address: str, **tls_files: str) -> Services:
    (directory / "token").write_text(TOKEN)
    run = {"name": "r", "gateway": address, "weights": address, **tls_files}
    config = parse_run(
        {
            "run": {**run, "token_file": str(directory / "token")},
            "model": {"checkpoint": str(directory)},
            "loss": {"arm": "grpo"},
            "train": {"updates": 1},
        }
    )
    opened = RunDirectory(directory / "run", "fresh", config.sections)
    try:
        return Services(config, opened, say=print)
    finally:
        opened.close()


async def test_a_gateway_elsewhere_is_reached_over_mutual_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    files = {
        "tls_ca": str(made / "ca.pem"),
        "tls_cert": str(made / "trainer.pem"),
        "tls_key": str(made / "trainer.key"),
    }
    server, port = await start_server(
        "localhost:0",
        Credentials(token=Token(TOKEN), tls=tls(made, "gateway")),
        lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(_Gateway(), server),
    )
    try:
        address = f"localhost:{port}"
        found = services(tmp_path, address, **files)
        assert (await asyncio.to_thread(found.client.status)).last_sequence == 7
        found.close()
        without = services(tmp_path, address, tls_ca=files["tls_ca"])
        with pytest.raises(RetryError, match="failed to connect"):
            await asyncio.to_thread(without.client.status)
        without.close()
    finally:
        await server.stop(None)
    with pytest.raises(BadInputError, match="expected a readable file"):
        services(tmp_path, address, tls_ca=str(tmp_path / "none.pem"))
