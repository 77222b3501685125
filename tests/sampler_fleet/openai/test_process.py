"""`python -m sampler_fleet serve --openai`: the endpoint of a real gateway."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.sampler_fleet.openai.endpoint import BASH, DEMO, HARNESS, START, TOKEN

ROOT = Path(__file__).parents[3]
RUN = {
    "fleet": {"groups": [{"name": "a", "weight_format": "bf16"}], "grace_seconds": 0.1},
    "tasks": {"num_train": 2, "num_heldout": 1},
    "episodes": {"group_size": 2, "max_concurrent": 1},
}


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    run = directory / "run.json"
    run.write_text(json.dumps(RUN))
    return subprocess.Popen(
        [
            sys.executable, "-m", "sampler_fleet", "serve", "--die-with-parent",
            "--config", run, "--state-dir", directory / "state", "--checkpoint", DEMO,
            "--openai", "127.0.0.1:0", "--openai-port-file", directory / "port", *options,
        ],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def post(url: str, body: dict) -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {HARNESS}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_it_serves_and_stops(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\nharness {HARNESS}\n")
    gateway = start(tmp_path, "--token-file", str(tokens))
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "port").exists():
            assert gateway.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        url = f"http://127.0.0.1:{int((tmp_path / 'port').read_text())}/v1"
        status, group = post(f"{url}/groups", {"task_id": "mine"})
        assert status == 200 and len(group["open_session_ids"]) == 2
        (session_id, _) = group["open_session_ids"]
        body = {"model": "policy", "messages": START, "tools": [BASH], "user": session_id}
        status, answer = post(f"{url}/chat/completions", body)
        assert (status, answer["error"]["code"]) == (503, "no_sampler"), answer
        status, group = post(f"{url}/sessions/{session_id}/finish", {"reward": None})
        assert status == 200 and len(group["open_session_ids"]) == 1
    finally:
        gateway.send_signal(signal.SIGTERM)
        _, errors = gateway.communicate(timeout=30)
    assert gateway.returncode == 0 and "Traceback" not in errors, errors


def test_without_a_token_it_does_not_start(tmp_path):
    gateway = start(tmp_path)
    _, errors = gateway.communicate(timeout=60)
    assert gateway.returncode == 2
    assert "error: the OpenAI endpoint: expected a token file, found none" in errors
