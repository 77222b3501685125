"""A gateway, a weight service and a sampler as real processes, watched over HTTP and by their logs.

Owns that the command lines serve what they say, and that no log holds a token.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
TOKENS = {"all": "the-token-of-every-right", "wrong": "a-token-of-somebody-else"}
RUN = {
    "fleet": {
        "groups": [{"name": "small", "weight_format": "bf16", "kv_format": "bf16"}],
        "max_context_tokens": 1024,
    },
    "episodes": {"max_concurrent": 2, "limits": {"max_context_tokens": 1000}},
    "tasks": {"num_train": 4, "num_heldout": 2},
}
pytestmark = pytest.mark.e2e


class Watched:
    """The processes of one small run, and their logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str) -> None:
        environment = os.environ | {"MIXED_SAMPLERS_LOG": "json", "LOG_LEVEL": "DEBUG"}
        command = [sys.executable, "-m", *arguments, "--token-file", str(self.directory / "token")]
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=log
            )
        self.processes.append(process)

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            dead = [process.args for process in self.processes if process.poll() is not None]
            assert not dead, f"{dead} ended\n{self.logs()}"
            assert time.monotonic() < deadline, f"{what}: not in time\n{self.logs()}"
            time.sleep(0.1)

    def port(self, name: str) -> int:
        file = self.directory / f"{name}.port"
        self.until(file.exists, f"{name}.port")
        return int(file.read_text())

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    def records(self, name: str) -> list[dict[str, str]]:
        lines = (self.directory / f"{name}.log").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


@pytest.fixture
def watched(tmp_path) -> Iterator[Watched]:
    (tmp_path / "token").write_text(TOKENS["all"])
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    watched = Watched(tmp_path)
    yield watched
    watched.stop()


def fetch(url: str, body: dict | None = None, token: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=10
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_run_is_watched(watched):
    checkpoint = ROOT / "examples" / "demo-checkpoint"
    place, config = watched.directory, ("--config", str(watched.directory / "run.json"))
    state, file = (lambda name: str(place / name)), (lambda name: str(place / f"{name}.port"))
    watched.start(
        "weights", "weight_sync", "serve", "--store", state("store"),
        "--port-file", file("weights"), *config,
    )  # fmt: skip
    weights = f"127.0.0.1:{watched.port('weights')}"
    subprocess.run(
        [sys.executable, "-m", "weight_sync", "publish", str(checkpoint), "--version", "1",
         "--address", weights, "--token-file", str(place / "token")],
        check=True, cwd=ROOT, capture_output=True,
    )  # fmt: skip
    watched.start(
        "gateway", "sampler_fleet", "serve", *config, "--state-dir", state("gateway"),
        "--checkpoint", str(checkpoint), "--port-file", file("gateway"),
        "--web", "127.0.0.1:0", "--web-port-file", file("web"),
    )  # fmt: skip
    page = f"http://127.0.0.1:{watched.port('web')}"
    watched.start(
        "sampler", "sampler_fleet", "join", *config, "--group", "small", "--sampler-id", "small-0",
        "--gateway", f"127.0.0.1:{watched.port('gateway')}", "--weights", weights,
        "--state-dir", state("sampler"), "--metrics", "127.0.0.1:0",
    )  # fmt: skip

    def tokens() -> int:
        return int(json.loads(fetch(f"{page}/status.json")[1])["groups"][0]["tokens_sampled"])

    watched.until(tokens, "tokens")
    assert "<title>Sampler fleet</title>" in fetch(page)[1]
    status = json.loads(fetch(f"{page}/status.json")[1])
    assert status["samplers"][0]["register"]["sampler_id"] == "small-0"
    assert "mixed_samplers_newest_version 1.0" in fetch(f"{page}/metrics")[1]

    (told,) = (r for r in watched.records("sampler") if r["message"].startswith("metrics on port"))
    text = fetch(f"http://127.0.0.1:{told['message'].split()[-1]}/metrics")[1]
    own = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert own["mixed_samplers_engine_version"] == 1
    assert own["mixed_samplers_engine_tokens_drawn_total"] >= 1
    assert own["mixed_samplers_engine_switch_bytes"] > 0

    sampler = {"sampler_id": "small-0"}
    assert fetch(f"{page}/drain", sampler)[0] == 401
    assert fetch(f"{page}/drain", sampler, TOKENS["wrong"])[0] == 401
    assert fetch(f"{page}/drain", sampler, TOKENS["all"])[0] == 200
    assert watched.processes[-1].wait(60) == 0, "it finished and left"
    state_of = json.loads(fetch(f"{page}/status.json")[1])["samplers"][0]["state"]
    assert state_of in ("draining", "lost")

    watched.stop()
    for name in ("weights", "gateway", "sampler"):
        records = watched.records(name)
        assert records and all({"time", "level", "message"} <= set(r) for r in records)
    assert not any(token in watched.logs() for token in TOKENS.values())
