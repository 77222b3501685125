"""Processes that one process keeps running: started, watched, restarted and ended.

Owns their lives, niceness, environment and logs. Must not know what they are for, nor talk to them.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import BadInputError, DirtyProcessError

log = logging.getLogger(__name__)

POLL_S = 0.2
STOP_S = 8.0  # between SIGTERM and SIGKILL
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
STEADY_S = 30.0  # a process that lived this long is forgiven its earlier deaths
MAX_RESTARTS = 8  # in a row
BAD_INPUT_STATUS = 2  # contracts.errors.exits_politely

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
    """A process: its name, its kind (a key of the supervisor's `nice`) and its command line."""

    name: str
    kind: str
    command: tuple[str, ...]
    stop_s: float = STOP_S  # between SIGTERM and SIGKILL


def restart_delay(num_failures: int) -> float | None:
    """Seconds to wait after the n-th death in a row; None: give up."""
    if num_failures > MAX_RESTARTS:
        return None
    return min(FIRST_BACKOFF_S * 2 ** (num_failures - 1), MAX_BACKOFF_S)


@dataclass
class _Child:
    service: Service
    process: subprocess.Popen[bytes] | OSError  # which kept it from being started
    started: float
    num_failures: int = 0
    error: Exception | None = None  # it was given up, until it has lived for long
    restart_at: float | None = field(default=None)
    kill_at: float | None = field(default=None)  # it was told to end

    def status(self) -> int | OSError | None:
        """How it ended; None while it runs."""
        return self.process if isinstance(self.process, OSError) else self.process.poll()

    def signal(self, number: int) -> None:
        if not isinstance(self.process, OSError):
            self.process.send_signal(number)

    def end(self) -> None:
        """SIGTERM, once: for many processes a second one means to end at once."""
        if self.kill_at is None:
            self.signal(signal.SIGTERM)
            self.kill_at = time.monotonic() + self.service.stop_s


class Supervisor:
    """Keeps services running until `stop`; one that ends, or that the system has no process for, is
    started again after a pause.

    Bad input (exit status 2) and a service that keeps dying give it up: `check` raises, and nothing
    is restarted from then on. With `retry_s` nobody else is held up by it: `errors` says so, and it
    is tried again every so many seconds.

    Every process is started by one thread, which lives as long as the supervisor, because Linux
    ends a child with the thread that started it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nice: Mapping[str, int],
        inherit: Sequence[int] = (),
        retry_s: float | None = None,
        on_restart: Callable[[str], None] = log.warning,
    ) -> None:
        """Logs go to `directory`/logs/<name>.log; file descriptors `inherit` stay open in all.

        `nice` holds each kind's niceness; `stop` ends the kinds in its order.
        """
        self._nice = dict(nice)
        self._inherit = tuple(inherit)
        self._retry_s = retry_s
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

    def errors(self) -> dict[str, Exception]:
        """What keeps services from running that are tried again, by name."""
        with self._lock:
            return {name: child.error for name, child in self._children.items() if child.error}

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
                if not isinstance(child.process, OSError) and child.process.poll() is None
            }

    def held(self) -> set[str]:
        """Names of all services that are not gone for good: those about to start too, and those
        that end."""
        with self._lock:
            return {*self._children, *(service.name for service in self._wanted)}

    def end_services(self, names: Collection[str]) -> None:
        """Tells some services to end for good and returns at once: SIGTERM, later SIGKILL."""
        with self._lock:
            self._wanted = [service for service in self._wanted if service.name not in names]
            for name in names:
                if child := self._children.get(name):
                    child.end()
        self._wake.set()

    def stop_services(self, names: Collection[str]) -> None:
        """Ends some services for good, and returns when they are gone."""
        self.end_services(names)
        while self.held().intersection(names):
            time.sleep(POLL_S / 4)

    def stop(self) -> None:
        """Ends everything, one kind after the other. Repeatable."""
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
            for kind in self._nice:
                _end(c for c in self._children.values() if c.service.kind == kind)
            self._children.clear()
            self._wanted.clear()

    def _tend(self, child: _Child) -> None:
        status = child.status()
        now = time.monotonic()
        service = child.service
        if child.kill_at is not None:
            if status is not None:
                del self._children[service.name]
            elif now >= child.kill_at:
                child.signal(signal.SIGKILL)
            return
        if status is None and now - child.started > STEADY_S:
            child.error = None
        if status is None or self._error:
            return
        if child.restart_at is None:
            child.num_failures = 0 if now - child.started > STEADY_S else child.num_failures
            child.num_failures += 1
            delay = restart_delay(child.num_failures)
            said = f"{service.name} {_how(status)}"
            if status == BAD_INPUT_STATUS or delay is None:
                child.error = self._why(child, status)
                said, delay = str(child.error), self._retry_s
            if delay is None:
                self._error = child.error
                return
            child.restart_at = now + delay
            self._on_restart(f"{said}; restarting in {delay:.1f} s")
        if now >= child.restart_at:
            self.restarts[service.kind] += 1
            self._launch(service, num_failures=child.num_failures, error=child.error)

    def _why(self, child: _Child, status: int | OSError) -> Exception:
        """What is said of a service that is given up."""
        name = child.service.name
        log_file = self._logs / f"{name}.log"
        if status == BAD_INPUT_STATUS:
            return BadInputError(
                f"service {name}", expected="input it accepts", found=_last_line(log_file)
            )
        return DirtyProcessError(
            f"{name} died {child.num_failures} times in a row: it {_how(status)}; see {log_file}"
        )

    def _launch(
        self, service: Service, *, num_failures: int, error: Exception | None = None
    ) -> None:
        nice = str(self._nice[service.kind])
        launcher = (sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), nice)
        try:
            with (self._logs / f"{service.name}.log").open("ab") as output:
                process = subprocess.Popen(
                    (*launcher, *service.command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=service_environment(),
                    pass_fds=self._inherit,
                    # Ctrl-C in the terminal is this process's to handle. Not a session of its own:
                    # the scheduler shares the CPU among sessions first, and niceness counts within
                    # one.
                    process_group=0,
                )
        except OSError as failure:  # no memory, no descriptors, a full disk: it may come right
            process = failure
        self._children[service.name] = _Child(
            service=service,
            process=process,
            started=time.monotonic(),
            num_failures=num_failures,
            error=error,
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


def _end(children: Iterable[_Child]) -> None:
    """SIGTERM to all, SIGKILL to those that do not follow it, and all are waited for."""
    children = list(children)
    for child in children:
        child.end()
    for child in children:
        assert child.kill_at is not None, "set by end()"
        if isinstance(child.process, OSError):
            continue
        try:
            child.process.wait(max(0.0, child.kill_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _how(status: int | OSError | None) -> str:
    if isinstance(status, OSError):
        return f"could not be started ({status})"
    return f"ended (status {status})"


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError as error:
        return f"no log ({error})"
    return lines[-1] if lines else "no message"
