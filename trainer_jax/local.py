"""The services of a run on one machine: started, watched, restarted and ended as processes.

Owns their command lines, ports, token file, logs and lives. Must not talk to them beyond asking
whether they answer, and must not know what a group or a version is beyond its name.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError, DirtyProcessError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_S = 0.2
STOP_S = 8.0  # between SIGTERM and SIGKILL
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
STEADY_S = 30.0  # a process that lived this long is forgiven its earlier deaths
MAX_RESTARTS = 8  # in a row
BAD_INPUT_STATUS = 2  # contracts.errors.exits_politely
# The trainer's updates are what everything waits for; samplers take what is left.
NICE = {"weights": 2, "gateway": 4, "sampler": 8}

# Runs the command with a niceness, and dies with the process that started it (also kill -9).
# Not preexec_fn: a fork of a process with JAX's threads may hang.
_LAUNCH = """
import ctypes, os, signal, sys
parent, nice = int(sys.argv[1]), int(sys.argv[2])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    sys.exit(1)
os.nice(nice)
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A process of the run: its name, its kind (a key of NICE) and its command line."""

    name: str
    kind: str
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the services of a run listen, and the file with their bearer token."""

    gateway: str
    weights: str
    token_file: Path | None


def local_addresses(directory: Path) -> Addresses:
    """Two free ports of this machine, and a new token file that only its owner reads."""
    token_file = directory / "token"
    token_file.unlink(missing_ok=True)
    descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.bind((HOST, 0))
        gateway, weights = (f"{HOST}:{sock.getsockname()[1]}" for sock in (first, second))
    return Addresses(gateway=gateway, weights=weights, token_file=token_file)


def weights_service(directory: Path, addresses: Addresses) -> Service:
    """The weight service, its store in the run's directory."""
    return Service(
        name="weights",
        kind="weights",
        command=(
            *_module("weight_sync", "serve", directory, addresses),
            *("--store", str(directory / "weights"), "--listen", addresses.weights),
        ),
    )


def fleet_services(
    directory: Path, addresses: Addresses, checkpoint: Path, groups: Sequence[dict[str, Any]]
) -> list[Service]:
    """The gateway, and each group's `samplers` processes (1 unless it says otherwise)."""
    gateway = Service(
        name="gateway",
        kind="gateway",
        command=(
            *_module("sampler_fleet", "serve", directory, addresses),
            *("--listen", addresses.gateway, "--weights", addresses.weights),
            *("--state-dir", str(directory / "gateway"), "--checkpoint", str(checkpoint)),
        ),
    )
    samplers = [
        Service(
            name=name,
            kind="sampler",
            command=(
                *_module("sampler_fleet", "join", directory, addresses),
                *("--gateway", addresses.gateway, "--weights", addresses.weights),
                *("--group", group["name"], "--sampler-id", name),
                *("--state-dir", str(directory / "samplers" / name)),
            ),
        )
        for group in groups
        for name in sampler_names([group])
    ]
    return [gateway, *samplers]


def sampler_names(groups: Sequence[dict[str, Any]]) -> list[str]:
    """Service names (and ids) of the samplers of [[fleet.groups]] tables."""
    return [
        f"{group['name']}-{number}"
        for group in groups
        for number in range(group.get("samplers", 1))
    ]


def _module(package: str, verb: str, directory: Path, addresses: Addresses) -> tuple[str, ...]:
    record, token_file = directory / "config.json", addresses.token_file
    return (
        *(sys.executable, "-m", package, verb, "--config", str(record)),
        *("--token-file", str(token_file)),
    )


def restart_delay(num_failures: int) -> float | None:
    """Seconds to wait after the n-th death in a row; None: give up."""
    if num_failures > MAX_RESTARTS:
        return None
    return min(FIRST_BACKOFF_S * 2 ** (num_failures - 1), MAX_BACKOFF_S)


@dataclass
class _Child:
    service: Service
    process: subprocess.Popen[bytes]
    started: float
    num_failures: int = 0
    restart_at: float | None = field(default=None)


class Supervisor:
    """Keeps services running until `stop`; one that ends is started again after a pause.

    Bad input (exit status 2) and a service that keeps dying are not restarted: `check` raises.
    Every process is started by one thread, which lives as long as the supervisor, because Linux
    ends a child with the thread that started it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        inherit: Sequence[int] = (),
        on_restart: Callable[[str], None] = log.warning,
    ) -> None:
        """Logs go to `directory`/logs/<name>.log; file descriptors `inherit` stay open in all."""
        self._inherit = tuple(inherit)
        self._logs = directory / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._on_restart = on_restart
        self._children: dict[str, _Child] = {}
        self._wanted: list[Service] = []
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._error: Exception | None = None
        self.restarts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def start(self, services: Sequence[Service]) -> None:
        """Starts services (at the next turn of the thread, at once)."""
        with self._lock:
            self._wanted += services
        self._wake.set()

    def check(self) -> None:
        """Raises what keeps a service from running: BadInputError or DirtyProcessError."""
        if self._error:
            raise self._error

    def wait_until(self, ready: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Polls `ready` while the services live.

        Raises:
            DirtyProcessError: not ready in time; also what `check` raises.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise DirtyProcessError(
                    f"{what} is not ready after {timeout_s:.0f} s; see {self._logs}"
                )
            time.sleep(POLL_S)

    def pids(self) -> dict[str, int]:
        """Process ids of the running services."""
        with self._lock:
            return {
                name: child.process.pid
                for name, child in self._children.items()
                if child.process.poll() is None
            }

    def stop_services(self, names: Sequence[str]) -> None:
        """Ends some services for good: SIGTERM, then SIGKILL."""
        with self._lock:
            children = [self._children.pop(name) for name in names if name in self._children]
        _end([child.process for child in children])

    def stop(self) -> None:
        """Ends everything, the gateway first: samplers then have nothing to drain. Repeatable."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                wanted, self._wanted = self._wanted, []
                for service in wanted:
                    self._launch(service, num_failures=0)
                for child in list(self._children.values()):
                    self._tend(child)
            self._wake.wait(POLL_S)
            self._wake.clear()
        with self._lock:
            for kind in ("gateway", "sampler", "weights"):
                _end([c.process for c in self._children.values() if c.service.kind == kind])

    def _tend(self, child: _Child) -> None:
        status = child.process.poll()
        now = time.monotonic()
        if status is None or self._error:
            return
        service = child.service
        if child.restart_at is None:
            child.num_failures = 0 if now - child.started > STEADY_S else child.num_failures
            child.num_failures += 1
            delay = restart_delay(child.num_failures)
            if status == BAD_INPUT_STATUS:
                self._error = BadInputError(
                    f"service {service.name}",
                    expected="input it accepts",
                    found=_last_line(self._logs / f"{service.name}.log"),
                )
                return
            if delay is None:
                self._error = DirtyProcessError(
                    f"{service.name} died {child.num_failures} times in a row (status {status}); "
                    f"see {self._logs / service.name}.log"
                )
                return
            child.restart_at = now + delay
            self._on_restart(f"{service.name} ended (status {status}); restarting in {delay:.1f} s")
        if now >= child.restart_at:
            self.restarts[service.kind] += 1
            self._launch(service, num_failures=child.num_failures)

    def _launch(self, service: Service, *, num_failures: int) -> None:
        launcher = (sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), str(NICE[service.kind]))
        with (self._logs / f"{service.name}.log").open("ab") as output:
            process = subprocess.Popen(
                (*launcher, *service.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=service_environment(),
                pass_fds=self._inherit,
                # Ctrl-C in the terminal is the trainer's to handle. Not a session of its own: the
                # scheduler shares the CPU among sessions first, and niceness counts within one.
                process_group=0,
            )
        self._children[service.name] = _Child(
            service=service,
            process=process,
            started=time.monotonic(),
            num_failures=num_failures,
        )


def service_environment() -> dict[str, str]:
    """This process's environment, one thread each, and the packages findable from anywhere."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    )
    return {
        **os.environ,
        **one_thread,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to all, SIGKILL to those that do not follow it, and all are waited for."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
