"""The weight service's commands and its client over mutual TLS, as processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.credentials import read_credentials
from contracts.types import WeightFormat
from tests.contracts.certificates import make_certificates
from tests.weight_sync import tiny_moe
from weight_sync.client import WeightClient

pytestmark = pytest.mark.e2e

TOKEN = "a-token-of-enough-length"
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30.0


async def test_versions_travel_over_mutual_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    token_file, port_file, log_file = (tmp_path / name for name in ("token", "port", "log"))
    token_file.write_text(TOKEN)

    def arguments(name: str) -> list[str]:
        files = {
            "--token-file": token_file,
            "--tls-ca": made / "ca.pem",
            "--tls-cert": made / f"{name}.pem",
            "--tls-key": made / f"{name}.key",
        }
        return [str(part) for pair in files.items() for part in pair]

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "weight_sync", *map(str, command)],
            cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip

    with log_file.open("wb") as log:
        service = subprocess.Popen(
            [
                *(sys.executable, "-m", "weight_sync", "serve", "--listen", "localhost:0"),
                *("--store", str(tmp_path / "store"), "--port-file", str(port_file)),
                *arguments("gateway"),  # the one certified for localhost
            ],
            cwd=ROOT,
            stderr=log,
        )
    try:
        give_up = time.monotonic() + WAIT_S
        while not port_file.exists():
            assert time.monotonic() < give_up and service.poll() is None, log_file.read_text()
            time.sleep(0.02)
        address = f"localhost:{port_file.read_text().strip()}"
        source = tiny_moe.write(tmp_path / "source")
        done = await asyncio.to_thread(
            run, "publish", source, "--version", "3", "--address", address, *arguments("trainer")
        )
        assert done.returncode == 0, done.stderr
        done = await asyncio.to_thread(run, "status", "--address", address, *arguments("trainer"))
        assert json.loads(done.stdout)["versions"] == [3]
        done = await asyncio.to_thread(
            run, "status", "--address", address, *arguments("trainer")[:4]
        )
        assert done.returncode == 2 and f"error: {address}: " in done.stderr
        sampler = read_credentials(
            token_file,
            tls_ca=made / "ca.pem",
            tls_cert=made / "sampler.pem",
            tls_key=made / "sampler.key",
        )
        client = WeightClient(address, sampler, WeightFormat.BF16, tmp_path / "sampler")
        manifests = client.watch(0)
        manifest = await asyncio.wait_for(anext(manifests), WAIT_S)
        await asyncio.wait_for(client.fetch(manifest), WAIT_S)
        assert manifest.version == 3
        assert (tmp_path / "sampler" / "3" / "model.safetensors").is_file()
        await manifests.aclose()
        await client.close()
        service.send_signal(signal.SIGTERM)
        assert service.wait(WAIT_S) == 0
    finally:
        service.kill()
        service.wait()
    said = log_file.read_text() + done.stderr
    key_lines = (made / "gateway.key").read_text().splitlines()[1:-1]
    assert "weight service on port" in said
    assert not any(secret in said for secret in (TOKEN, *key_lines))
