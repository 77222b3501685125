"""Inside a container: secrets become files; a sampler that ends is started again, or given up."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from contracts.errors import EXIT_DIRTY, BadInputError
from sampler_fleet.providers.modal_container import (
    MAX_FAILURES,
    SECRET_KEYS,
    SamplerContainer,
    Supervisor,
    join_command,
    secret_files,
)
from tests.sampler_fleet.fakes import make_fleet_config

SECRETS = {key: f"content of {key}" for key in SECRET_KEYS}


def test_secrets_become_files_that_only_their_owner_reads(tmp_path):
    options = secret_files(SECRETS, "mutual", tmp_path)
    assert options[::2] == ["--token-file", "--tls-ca", "--tls-cert", "--tls-key"]
    for key, path in zip(SECRET_KEYS, map(Path, options[1::2]), strict=True):
        assert path.read_text() == SECRETS[key]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("tls", "num"), [("none", 1), ("server", 2), ("mutual", 4)])
def test_only_the_secrets_of_the_mode_are_used(tmp_path, tls, num):
    assert len(secret_files(SECRETS, tls, tmp_path)) == 2 * num


def test_a_missing_secret_is_named(tmp_path):
    with pytest.raises(BadInputError, match="a value of SAMPLER_TLS_CA, found none"):
        secret_files({"SAMPLER_TOKEN": "x"}, "server", tmp_path)


def test_the_command_joins_the_group_at_the_fleets_addresses(tmp_path):
    fleet = make_fleet_config(modal={"gateway": "g.example:1", "weights": "w.example:2"})
    command = join_command(
        fleet, "big", sampler_id="big-ta-1", record=tmp_path / "r.json", state_dir=tmp_path / "s"
    )
    text = " ".join(command)
    for part in ("join", "--gateway g.example:1", "--weights w.example:2", "--group big"):
        assert part in text


def supervise(tmp_path, script: str) -> tuple[Supervisor, threading.Event]:
    gave_up = threading.Event()
    command = [sys.executable, "-c", script]
    supervisor = Supervisor(
        command,
        {**os.environ, "LOG": str(tmp_path / "log")},
        give_up=gave_up.set,
        backoff_s=(0.01,),
    )
    return supervisor, gave_up


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


FAILS_TWICE = """
import os, sys, time
with open(os.environ["LOG"], "a") as log:
    log.write("x")
if os.path.getsize(os.environ["LOG"]) < 3:
    sys.exit({status})
time.sleep(60)
"""


@pytest.mark.parametrize("status", [1, 2, EXIT_DIRTY])
def test_a_sampler_that_ends_is_started_again_where_it_was(tmp_path, status):
    supervisor, gave_up = supervise(tmp_path, FAILS_TWICE.format(status=status))
    supervisor.start()
    wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "xxx")
    wait_until(lambda: supervisor.num_starts == 3)
    assert supervisor.running
    supervisor.stop(10)
    assert not supervisor.running and not gave_up.is_set()


def test_one_that_keeps_failing_takes_its_container_with_it(tmp_path):
    supervisor, gave_up = supervise(tmp_path, "raise SystemExit(2)")
    supervisor.start()
    assert gave_up.wait(30)
    assert supervisor.num_starts == MAX_FAILURES
    supervisor.stop(1)


def test_one_that_cannot_be_started_takes_its_container_with_it(tmp_path):
    gave_up = threading.Event()
    supervisor = Supervisor([str(tmp_path)], {}, give_up=gave_up.set, backoff_s=(0.01,))
    supervisor.start()
    assert gave_up.wait(30)
    assert supervisor.num_starts == MAX_FAILURES and not supervisor.running
    supervisor.stop(1)


def test_one_that_was_told_to_leave_is_not_started_again(tmp_path):
    supervisor, gave_up = supervise(tmp_path, "pass")
    supervisor.start()
    assert gave_up.wait(30)
    assert supervisor.num_starts == 1


DRAINS = """
import os, signal, sys, time
def leave(*_):
    time.sleep(0.3)
    open(os.environ["LOG"], "w").write("drained")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(os.environ["LOG"], "w").write("ready")
time.sleep(60)
"""
IGNORES = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.environ["LOG"], "w").write("ready")
time.sleep(60)
"""


def test_stopping_waits_for_the_drain(tmp_path):
    supervisor, gave_up = supervise(tmp_path, DRAINS)
    supervisor.start()
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and log.read_text() == "ready")
    supervisor.stop(10)
    assert log.read_text() == "drained" and not gave_up.is_set()


def test_a_drain_without_end_is_cut(tmp_path):
    supervisor, _ = supervise(tmp_path, IGNORES)
    supervisor.start()
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and log.read_text() == "ready")
    supervisor.stop(0.2)
    assert not supervisor.running


def test_stopping_before_anything_ran():
    supervisor = Supervisor(["false"], {}, give_up=lambda: None)
    supervisor.stop(1)
    assert not supervisor.running


def test_the_class_that_modal_enters_has_nothing_to_call():
    """A server's class may have no methods for calls and no constructor."""
    import modal

    app = modal.App("a", include_source=False)
    assert app.server(name="one")(SamplerContainer)
    assert app.server(name="two")(SamplerContainer)
