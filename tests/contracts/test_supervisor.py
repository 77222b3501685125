import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from contracts import supervisor as supervising
from contracts.errors import BadInputError, DirtyProcessError
from contracts.supervisor import STOP_S, Service, Supervisor, restart_delay

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(600)"


NICE = {"gateway": 4, "sampler": 8}


def service(code: str, name: str = "one", kind: str = "sampler", stop_s: float = STOP_S) -> Service:
    command = (sys.executable, "-c", code)
    return Service(name=name, kind=kind, command=command, stop_s=stop_s)


def wait_for(condition, timeout_s: float = 10.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


@pytest.fixture
def supervisor(tmp_path):
    supervisor = Supervisor(tmp_path, nice=NICE, on_restart=lambda _: None)
    yield supervisor
    supervisor.stop()


def test_delays_grow_and_end():
    delays = [restart_delay(n) for n in range(1, supervising.MAX_RESTARTS + 2)]
    assert delays[:3] == [0.5, 1.0, 2.0]
    assert delays[-1] is None
    assert all(delay <= supervising.MAX_BACKOFF_S for delay in delays[:-1])


def test_a_killed_service_comes_back(supervisor):
    supervisor.start([service(SLEEPER)])
    first = wait_for(lambda: supervisor.pids().get("one"))
    os.kill(first, signal.SIGKILL)
    second = wait_for(lambda: (pid := supervisor.pids().get("one")) and pid != first and pid)
    assert supervisor.restarts == {"sampler": 1}
    supervisor.stop()
    assert not psutil.pid_exists(second)


def test_what_the_system_has_no_process_for_is_tried_again(tmp_path):
    said = []
    in_the_way = tmp_path / "logs" / "one.log"
    in_the_way.mkdir(parents=True)
    supervisor = Supervisor(tmp_path, nice=NICE, on_restart=said.append)
    try:
        supervisor.start([service(SLEEPER)])
        wait_for(lambda: said)
        assert "one could not be started" in said[0] and "restarting in 0.5 s" in said[0]
        assert supervisor.held() == {"one"} and not supervisor.pids()
        in_the_way.rmdir()
        wait_for(supervisor.pids)
        supervisor.start([service(SLEEPER, "two")])
        wait_for(lambda: len(supervisor.pids()) == 2)
        assert supervisor.restarts["sampler"] >= 1
    finally:
        supervisor.stop()


def test_what_can_never_be_started_is_given_up_and_can_be_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(supervising, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervising, "MAX_RESTARTS", 2)
    for name in ("one", "two"):
        (tmp_path / "logs" / f"{name}.log").mkdir(parents=True)
    supervisor = Supervisor(tmp_path, nice=NICE, on_restart=lambda _: None)
    try:
        supervisor.start([service(SLEEPER, name) for name in ("one", "two")])
        supervisor.stop_services(["two"])
        with pytest.raises(DirtyProcessError, match="3 times in a row: it could not be started"):
            supervisor.wait_until(lambda: False, what="it", timeout_s=10)
    finally:
        supervisor.stop()


def test_bad_input_is_reported_and_not_retried(supervisor):
    supervisor.start([service("import sys; print('error: no such group'); sys.exit(2)")])
    with pytest.raises(BadInputError, match="no such group"):
        supervisor.wait_until(lambda: False, what="it", timeout_s=10)
    assert not supervisor.restarts


def test_a_service_that_keeps_dying_is_given_up(supervisor, monkeypatch):
    monkeypatch.setattr(supervising, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervising, "MAX_RESTARTS", 2)
    supervisor.start([service("raise SystemExit(1)")])
    with pytest.raises(DirtyProcessError, match="3 times in a row"):
        supervisor.wait_until(lambda: False, what="it", timeout_s=20)


@pytest.mark.parametrize("status", [1, 2])
def test_with_retries_a_bad_service_holds_up_no_other(tmp_path, monkeypatch, status):
    monkeypatch.setattr(supervising, "MAX_RESTARTS", 0)
    monkeypatch.setattr(supervising, "STEADY_S", 0.5)
    said = []
    supervisor = Supervisor(tmp_path, nice=NICE, retry_s=0.2, on_restart=said.append)
    sound = tmp_path / "sound"
    code = (
        "import pathlib, sys, time\n"
        f"if not pathlib.Path({str(sound)!r}).exists():\n"
        f"    print('error: disk full'); sys.exit({status})\n"
        "time.sleep(600)"
    )
    supervisor.start([service(code, "bad"), service(SLEEPER, "good")])
    (error,) = wait_for(supervisor.errors).values()
    assert isinstance(error, BadInputError if status == 2 else DirtyProcessError)
    good = wait_for(lambda: supervisor.pids().get("good"))
    os.kill(good, signal.SIGKILL)
    wait_for(lambda: supervisor.pids().get("good", good) != good)
    supervisor.check()
    sound.touch()
    wait_for(lambda: "bad" in supervisor.pids() and "bad" not in supervisor.errors())
    supervisor.stop()
    assert f"{error}; restarting in 0.2 s" in said


def test_not_ready_in_time_is_an_error(supervisor):
    with pytest.raises(DirtyProcessError, match="the gateway is not ready"):
        supervisor.wait_until(lambda: False, what="the gateway", timeout_s=0.1)


def test_stop_kills_what_ignores_sigterm(supervisor, tmp_path):
    supervisor.start([service(STUBBORN, "deaf", stop_s=0.3), service(SLEEPER, "tame", "gateway")])
    log = tmp_path / "logs" / "deaf.log"
    wait_for(lambda: log.exists() and "deaf" in log.read_text())
    pids = supervisor.pids()
    assert set(pids) == {"deaf", "tame"}
    supervisor.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_one_service_ends_for_good(supervisor):
    supervisor.start([service(SLEEPER, "a"), service(SLEEPER, "b")])
    pid = wait_for(lambda: len(pids := supervisor.pids()) == 2 and pids["a"])
    supervisor.stop_services(["a"])
    assert not psutil.pid_exists(pid)
    time.sleep(3 * supervising.POLL_S)
    assert set(supervisor.pids()) == supervisor.held() == {"b"}


def test_a_service_that_ends_takes_its_time_and_keeps_nobody_waiting(supervisor, tmp_path):
    slow = (
        "import signal, sys, time\n"
        "def drain(*_):\n"
        "    print('drains', flush=True); time.sleep(1.5); sys.exit(0)\n"
        "signal.signal(15, drain); print('ready', flush=True); time.sleep(600)"
    )
    supervisor.start([service(slow, "slow"), service(SLEEPER, "other")])
    log = tmp_path / "logs" / "slow.log"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    other = wait_for(lambda: supervisor.pids().get("other"))
    supervisor.end_services(["slow"])
    supervisor.end_services(["slow"])
    wait_for(lambda: "drains" in log.read_text())
    os.kill(other, signal.SIGKILL)
    supervisor.start([service(SLEEPER, "later")])
    wait_for(lambda: (pid := supervisor.pids().get("other")) and pid != other)
    assert supervisor.pids().keys() == {"slow", "other", "later"}, "it drains, the others go on"
    wait_for(lambda: supervisor.held() == {"other", "later"})
    assert log.read_text() == "ready\ndrains\n", "told once, and not started again"


def test_a_deaf_service_is_killed_when_its_time_is_over(supervisor, tmp_path):
    supervisor.start([service(STUBBORN, stop_s=0.3)])
    log = tmp_path / "logs" / "one.log"
    wait_for(lambda: log.exists() and "deaf" in log.read_text())
    (pid,) = supervisor.pids().values()
    supervisor.stop_services(["one"])
    assert not psutil.pid_exists(pid)


def test_a_service_that_waits_for_its_restart_can_be_given_up(supervisor):
    supervisor.start([service("raise SystemExit(1)"), service(SLEEPER, "unborn")])
    supervisor.end_services(["unborn"])
    wait_for(lambda: supervisor.restarts["sampler"])
    supervisor.stop_services(["one", "unborn"])
    assert not supervisor.held()


def test_services_are_nice_and_single_threaded(supervisor, tmp_path):
    code = "import os, time; print(os.nice(0), os.environ['OMP_NUM_THREADS']); time.sleep(60)"
    before = os.nice(0)
    supervisor.start([service(code)])
    log = tmp_path / "logs" / "one.log"
    nice, threads = wait_for(lambda: log.exists() and log.read_text()).split()
    # somebody else may renice this process meanwhile; 19 is the end of the scale
    assert int(nice) in {min(19, base + NICE["sampler"]) for base in (before, os.nice(0))}
    assert threads == "1"


def test_services_share_the_session_but_not_the_terminal_s_signals(supervisor):
    supervisor.start([service(SLEEPER)])
    (pid,) = wait_for(supervisor.pids).values()
    wait_for(lambda: os.getpgid(pid) == pid)
    assert os.getsid(pid) == os.getsid(0)


def test_services_die_with_a_killed_parent(tmp_path):
    script = textwrap.dedent("""
        import pathlib, sys, time
        from contracts.supervisor import Service, Supervisor
        supervisor = Supervisor(pathlib.Path(sys.argv[1]), nice={"sampler": 1})
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
