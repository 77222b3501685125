"""What runs inside one container on Modal: a sampler that dials out, kept running until told off.

Owns the class that Modal enters and exits, the sampler's files with secrets, and what happens when
the sampler ends by itself. Must not decide how many containers there are, and holds no engine: the
sampler is a process of its own, `python -m sampler_fleet join`.

**Why a server.** A sampler serves nobody who calls it, so none of Modal's constructs is made for
it. `App.server` fits best:

- `min_containers = max_containers = N` runs N containers "regardless of demand", with autoscaling
  by requests off (no `target_concurrency`). A resize is one call. A preempted or ended container is
  replaced.
- It has no inputs, hence neither the 24 hours an input may take nor anything to start again after
  them. A spawned call per sampler would need a process of ours that spawns, counts and cancels.
- Its exit handler gets `exit_grace_period`, up to an hour. That of an idle `App.cls` gets 30 s,
  less than a turn of a long episode.

What a server demands in return is an answer on a port: a small page that says whether the sampler
runs. It is behind Modal's proxy authentication and nobody needs to call it. Whether the sampler is
ready is the gateway's business.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import modal

from contracts.errors import EXIT_DIRTY, BadInputError
from contracts.logs import log_to_stderr
from sampler_fleet.config import FleetConfig, read_settings

log = logging.getLogger(__name__)

# key of the Modal Secret -> the option of `sampler_fleet join` that takes it as a file
SECRET_KEYS = {
    "SAMPLER_TOKEN": "--token-file",
    "SAMPLER_TLS_CA": "--tls-ca",
    "SAMPLER_TLS_CERT": "--tls-cert",
    "SAMPLER_TLS_KEY": "--tls-key",
}
REQUIRED_KEYS = {
    "none": ("SAMPLER_TOKEN",),
    "server": ("SAMPLER_TOKEN", "SAMPLER_TLS_CA"),
    "mutual": tuple(SECRET_KEYS),
}
GRACE_S = 60.0  # beyond the fleet's drain: the engine stops, Modal commits the volume
SETTLED_S = 600.0  # a sampler that ran so long had no trouble starting
MAX_FAILURES = 4  # in a row, then another machine may do better
_BACKOFF_S = (1.0, 10.0, 60.0)


def secret_files(environment: Mapping[str, str], tls: str, directory: Path) -> list[str]:
    """Writes the secrets of an environment to files; the options that name them.

    Raises:
        BadInputError: one that `tls` needs is missing.
    """
    options = []
    for key in REQUIRED_KEYS[tls]:
        if not environment.get(key):
            raise BadInputError("Modal Secret", expected=f"a value of {key}", found="none")
        path = directory / key.lower()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(environment[key])
        options += [SECRET_KEYS[key], str(path)]
    return options


class Supervisor:
    """Keeps one process running: starts it again when it ends, and gives up when that won't help.

    The same machine is worth another try because it has image, compiled kernels and weights; a
    sampler whose engine became dirty starts at once. One that left because the gateway told it to
    (status 0) gives way to a new container.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        give_up: Callable[[], object],
        backoff_s: Sequence[float] = _BACKOFF_S,
    ) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._give_up = give_up
        self._backoff_s = backoff_s
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # between a start and a stop
        # the process ends with this thread: Linux counts threads as parents
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self.num_starts = 0

    @property
    def running(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Lets the process drain; kills it when it takes longer. Returns when it is gone."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            log.warning("the sampler did not leave within %.0f s and is killed", patience_s)
            process.kill()
        self._thread.join()

    def _keep_running(self) -> None:
        failures = 0
        while True:
            with self._lock:
                if self._stopping.is_set():
                    return
                started = time.monotonic()
                self.num_starts += 1
                try:
                    # A session of its own: a signal for the container's group isn't a second one.
                    self._process = subprocess.Popen(
                        self._command, env=self._environment, start_new_session=True
                    )
                except OSError as error:  # no memory, say: another machine may do better
                    log.error("the sampler could not be started: %s", error)
                    self._process = None
            status = self._process.wait() if self._process else None
            if self._stopping.is_set():
                return
            failures = 1 if time.monotonic() - started >= SETTLED_S else failures + 1
            log.error("the sampler ended with status %s, number %d in a row", status, failures)
            if status == 0 or failures >= MAX_FAILURES:
                self._give_up()
                return
            if status != EXIT_DIRTY:
                self._stopping.wait(self._backoff_s[min(failures, len(self._backoff_s)) - 1])


def _page(supervisor: Supervisor, sampler_id: str) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        """Whether the sampler runs: 200 or 503, with a little JSON."""

        def do_GET(self) -> None:
            running = supervisor.running
            state = {"sampler_id": sampler_id, "running": running, "starts": supervisor.num_starts}
            body = json.dumps(state).encode()
            self.send_response(200 if running else 503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Page


def join_command(
    fleet: FleetConfig, group: str, *, sampler_id: str, record: Path, state_dir: Path
) -> list[str]:
    """The sampler's command line, without the options that name secrets."""
    return [
        *(sys.executable, "-m", "sampler_fleet", "join", "--config", str(record)),
        *("--gateway", fleet.modal.gateway, "--weights", fleet.modal.weights),
        *("--group", group, "--sampler-id", sampler_id),
        *("--state-dir", str(state_dir), "--die-with-parent"),
    ]


class SamplerContainer:
    """One sampler of the group that the environment names (`modal_app.container_environment`).

    Its id holds the container's, so it is stable while the container lives and unique in the run.
    Versions of the weights lie on the container's own disk: the weight client's store has one
    owner, and a volume shared by a group's containers has many.
    """

    @modal.enter()
    def start(self) -> None:
        environment = dict(os.environ)
        group, container = environment["SAMPLER_GROUP"], environment["MODAL_TASK_ID"]
        sampler_id = f"{group}-{container}"
        log_to_stderr(sampler_id)
        record = Path(environment["SAMPLER_RECORD"])
        fleet = read_settings(record).fleet
        directory = Path(tempfile.mkdtemp(prefix="sampler-"))
        command = join_command(
            fleet, group, sampler_id=sampler_id, record=record, state_dir=directory / "state"
        )
        command += secret_files(environment, fleet.modal.tls, directory)
        for key in SECRET_KEYS:
            environment.pop(key, None)
        # Triton, FlashInfer, DeepGEMM and SGLang keep what they compile below the home directory.
        environment["HOME"] = environment["SAMPLER_CACHE"]
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{environment['SAMPLER_CACHE']}/torchinductor"
        # Only this project's source: what Modal adds for itself is not for the engine's Python.
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        self._drain_s = fleet.drain_seconds
        self._supervisor = Supervisor(
            command,
            environment,
            give_up=lambda: os.kill(os.getpid(), signal.SIGTERM),  # as Modal ends a server
        )
        page = _page(self._supervisor, sampler_id)
        server = ThreadingHTTPServer(("", int(environment["SAMPLER_PORT"])), page)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._supervisor.start()

    @modal.exit()
    def stop(self) -> None:
        self._supervisor.stop(self._drain_s + GRACE_S / 2)
