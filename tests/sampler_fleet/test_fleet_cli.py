"""The fleet's commands and what its processes do at start: bad input, port file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sampler_fleet.__main__ import app
from sampler_fleet.process import write_port_file

ROOT = Path(__file__).parents[2]
GOOD = {
    "fleet": {
        "groups": [
            {"name": "a", "weight_format": "nvfp4", "capacity": 3},
            {"name": "b", "weight_format": "bf16"},
            {"name": "eval", "weight_format": "bf16", "kv_format": "bf16", "purpose": "evaluate"},
        ]
    },
    "sampling": {"top_p": 0.97, "top_k": 64},
    "model": {"not": "ours"},
}


def run_check(tmp_path: Path, sections: dict):
    record = tmp_path / "run.json"
    record.write_text(json.dumps(sections))
    return CliRunner().invoke(app, ["check", "--config", str(record)])


def test_check_prints_its_own_sections_resolved(tmp_path):
    result = run_check(tmp_path, GOOD)
    assert result.exit_code == 0, result.output
    resolved = json.loads(result.stdout)
    assert set(resolved) == {"fleet", "sampling", "episodes", "tasks"}
    assert resolved["fleet"]["groups"][0]["kv_format"] == "fp8"
    assert resolved["sampling"]["top_p"] == 0.97
    again = run_check(tmp_path, resolved)
    assert json.loads(again.stdout) == resolved, "a resolved record resolves to itself"


def group(**changes):
    return {"name": "a", "weight_format": "bf16"} | changes


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({}, "fleet.groups: expected a value, found nothing"),
        ({"fleet": {"groups": [group(size=1)]}}, "fleet.groups.0.size: expected a known key"),
        ({"fleet": {"groups": [group(weight_format="int4")]}}, "found 'int4'"),
        ({"fleet": {"groups": [group(capacity=0)]}}, "fleet.groups.0.capacity: expected"),
        ({"fleet": {"groups": [group(), group()]}}, "found 'a' twice"),
        ({"fleet": {"groups": [group(purpose="evaluate")]}}, "expected a group with purpose train"),
        ({"fleet": {"groups": [group()], "lease_seconds": 1}}, "at least two heartbeats"),
        ({"fleet": {"groups": [group()], "max_context_tokens": 100}}, "fleet.max_context_tokens"),
        ({"fleet": {"groups": [group()]}, "sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"fleet": {"groups": [group()]}, "episodes": {"group_size": 1}}, "episodes.group_size"),
    ],
)
def test_check_names_what_is_wrong_in_one_sentence(tmp_path, sections, sentence):
    result = run_check(tmp_path, sections)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--gateway", "127.0.0.1:1"],
        ["drain", "--gateway", "127.0.0.1:1", "--sampler-id", "x"],
        ["check", "--config", "/nowhere/run.toml"],
        ["status", "--gateway", "127.0.0.1:1", "--token-file", "/nowhere/token"],
    ],
)
def test_what_is_not_there_is_one_sentence_and_status_2(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_gateway_does_not_import_an_engine():
    """Nor does the trainer's model library come in with it."""
    script = (
        "import sys\n"
        "import sampler_fleet.gateway, sampler_fleet.__main__, sampler_fleet.episodes.agent\n"
        "print([m for m in ('torch', 'jax', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    child = (
        "import time\n"
        "from sampler_fleet.process import die_with_parent\n"
        "die_with_parent()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = sorted(process.stdout.readline().strip() for _ in range(2))
    assert lines[1] == "ready"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while is_running(int(lines[0])) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(int(lines[0]))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_port_file_appears_complete(tmp_path):
    write_port_file(tmp_path / "new" / "port", 4321)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["port"]
    assert (tmp_path / "new" / "port").read_text() == "4321\n"
    write_port_file(None, 1)
