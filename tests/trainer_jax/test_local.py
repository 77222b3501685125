import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from contracts.errors import BadInputError, DirtyProcessError
from trainer_jax import local
from trainer_jax.local import Addresses, Service, Supervisor, fleet_services, restart_delay

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(600)"


def service(code: str, name: str = "one", kind: str = "sampler") -> Service:
    return Service(name=name, kind=kind, command=(sys.executable, "-c", code))


def wait_for(condition, timeout_s: float = 10.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


@pytest.fixture
def supervisor(tmp_path):
    supervisor = Supervisor(tmp_path, on_restart=lambda _: None)
    yield supervisor
    supervisor.stop()


def test_delays_grow_and_end():
    delays = [restart_delay(n) for n in range(1, local.MAX_RESTARTS + 2)]
    assert delays[:3] == [0.5, 1.0, 2.0]
    assert delays[-1] is None
    assert all(delay <= local.MAX_BACKOFF_S for delay in delays[:-1])


def test_a_killed_service_comes_back(supervisor):
    supervisor.start([service(SLEEPER)])
    first = wait_for(lambda: supervisor.pids().get("one"))
    os.kill(first, signal.SIGKILL)
    second = wait_for(lambda: (pid := supervisor.pids().get("one")) and pid != first and pid)
    assert supervisor.restarts == {"sampler": 1}
    supervisor.stop()
    assert not psutil.pid_exists(second)


def test_bad_input_is_reported_and_not_retried(supervisor):
    supervisor.start([service("import sys; print('error: no such group'); sys.exit(2)")])
    with pytest.raises(BadInputError, match="no such group"):
        supervisor.wait_until(lambda: False, what="it", timeout_s=10)
    assert not supervisor.restarts


def test_a_service_that_keeps_dying_is_given_up(supervisor, monkeypatch):
    monkeypatch.setattr(local, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(local, "MAX_RESTARTS", 2)
    supervisor.start([service("raise SystemExit(1)")])
    with pytest.raises(DirtyProcessError, match="3 times in a row"):
        supervisor.wait_until(lambda: False, what="it", timeout_s=20)


def test_not_ready_in_time_is_an_error(supervisor):
    with pytest.raises(DirtyProcessError, match="the gateway is not ready"):
        supervisor.wait_until(lambda: False, what="the gateway", timeout_s=0.1)


def test_stop_kills_what_ignores_sigterm(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "STOP_S", 0.3)
    supervisor.start([service(STUBBORN, "deaf"), service(SLEEPER, "tame", "gateway")])
    log = tmp_path / "logs" / "deaf.log"
    wait_for(lambda: log.exists() and "deaf" in log.read_text())
    pids = supervisor.pids()
    assert set(pids) == {"deaf", "tame"}
    supervisor.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_one_service_ends_for_good(supervisor):
    supervisor.start([service(SLEEPER, "a"), service(SLEEPER, "b")])
    wait_for(lambda: len(supervisor.pids()) == 2)
    supervisor.stop_services(["a"])
    time.sleep(3 * local.POLL_S)
    assert set(supervisor.pids()) == {"b"}


def test_services_are_nice_and_single_threaded(supervisor, tmp_path):
    code = "import os, time; print(os.nice(0), os.environ['OMP_NUM_THREADS']); time.sleep(60)"
    before = os.nice(0)
    supervisor.start([service(code)])
    log = tmp_path / "logs" / "one.log"
    nice, threads = wait_for(lambda: log.exists() and log.read_text()).split()
    # somebody else may renice this process meanwhile; 19 is the end of the scale
    assert int(nice) in {min(19, base + local.NICE["sampler"]) for base in (before, os.nice(0))}
    assert threads == "1"


def test_services_share_the_session_but_not_the_terminal_s_signals(supervisor):
    supervisor.start([service(SLEEPER)])
    (pid,) = wait_for(supervisor.pids).values()
    wait_for(lambda: os.getpgid(pid) == pid)
    assert os.getsid(pid) == os.getsid(0)


def test_services_die_with_a_killed_parent(tmp_path):
    script = textwrap.dedent("""
        import pathlib, sys, time
        from trainer_jax.local import Service, Supervisor
        supervisor = Supervisor(pathlib.Path(sys.argv[1]))
        supervisor.start([Service(name="s", kind="sampler",
                                  command=(sys.executable, "-c", "import time; time.sleep(600)"))])
        while not supervisor.pids():
            time.sleep(0.01)
        time.sleep(0.3)
        print(supervisor.pids()["s"], flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_commands_follow_the_run_file(tmp_path):
    addresses = Addresses(gateway="h:1", weights="h:2", token_file=tmp_path / "token")
    groups = [{"name": "a", "samplers": 2}, {"name": "b"}]
    services = fleet_services(tmp_path, addresses, Path("model"), groups)
    assert [s.name for s in services] == ["gateway", "a-0", "a-1", "b-0"]
    command = " ".join(services[2].command)
    assert "-m sampler_fleet join" in command
    assert "--group a --sampler-id a-1" in command
    assert "--gateway h:1 --weights h:2" in command


def test_the_token_is_private(tmp_path):
    addresses = local.local_addresses(tmp_path)
    assert addresses.token_file
    assert stat.S_IMODE(addresses.token_file.stat().st_mode) == 0o600
    assert len(addresses.token_file.read_text().strip()) >= 32
    assert addresses.gateway != addresses.weights
