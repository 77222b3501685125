"""From parameters on a device to a published version, beside the training loop.

Owns the background thread that exports BF16 safetensors and hands them to the weight service, and
the rule that versions only grow. Must not know formats: the service converts.

Of several trainer processes each writes its own parts of the export; the leader hands it over.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.credentials import Credentials
from contracts.errors import RetryError
from contracts.rpc import DEADLINE_S
from trainer_jax.cluster import Cluster
from trainer_jax.hf import save_checkpoint
from trainer_jax.models.config import ModelConfig
from trainer_jax.parts import own_parts
from weight_sync import client

log = logging.getLogger(__name__)

RETRY_S = 0.5


def latest_version(address: str, credentials: Credentials) -> int:
    """The newest version the weight service holds, 0 when empty. Raises RetryError."""
    return client.status(address, credentials).latest_version


class _Item:
    """A version on its way: parts that become host copies once, in whichever thread asks."""

    def __init__(self, version: int, params: Any) -> None:
        self.version = version
        self.parts = own_parts(params)

    def detach(self) -> None:
        """Waits for the update that makes them."""
        for part in self.parts:
            part.on_host()


class Publisher:
    """Publishes parameters in a thread, one version at a time, the newest first.

    A version that is overtaken while it waits is skipped. The service being away is waited out;
    any other error is raised by the next call.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        config: ModelConfig,
        source: Path,
        scratch: Path,
        cluster: Cluster | None = None,
    ) -> None:
        """`source`: the directory whose tokenizer files travel along; `scratch`: for exports.

        All processes of a cluster have the same `scratch`, and submit the same versions.
        """
        self._cluster = cluster or Cluster.alone()
        self._address, self._credentials = address, credentials
        self._config, self._source, self._scratch = config, source, scratch
        self._condition = threading.Condition()
        self._waiting: _Item | None = None
        self._current: _Item | None = None
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self.published = 0  # newest version that the service holds
        self.seconds = 0.0  # of the last publication
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def submit(self, version: int, params: Any) -> None:
        """Queues `params`, which may still be computing. Call `detach` before donating them."""
        self._raise()
        with self._condition:
            if self._cluster.size > 1:  # what one process skips the others would wait for
                self._condition.wait_for(lambda: self._error or not self._waiting)
            self._waiting = _Item(version, params)
            self._condition.notify_all()

    def detach(self) -> None:
        """Returns when no submitted device array is needed any more."""
        with self._condition:
            items = [item for item in (self._current, self._waiting) if item]
        for item in items:
            item.detach()

    def wait(self, poll: Callable[[], None]) -> None:
        """Returns when everything submitted is published. `poll` runs meanwhile, and may raise."""
        while True:
            with self._condition:
                if self._error or not (self._current or self._waiting):
                    break
                self._condition.wait(0.1)
            poll()
        self._raise()

    def close(self) -> None:
        """Stops after the publication under way, or at once while the service is away."""
        self._stopped.set()
        with self._condition:
            self._condition.notify_all()
        self._thread.join(timeout=DEADLINE_S)

    def _raise(self) -> None:
        if self._error:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._condition:
                self._current = None
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._waiting or self._stopped.is_set())
                if self._stopped.is_set() or not self._waiting:
                    return
                self._current, self._waiting = self._waiting, None
            try:
                self._publish(self._current)
            except Exception as error:
                self._cluster.fail(f"version {self._current.version} was not published: {error!r}")
                with self._condition:
                    self._error, self._current = error, None
                    self._condition.notify_all()
                return

    def _publish(self, item: _Item) -> None:
        for part in item.parts[:1]:
            part.on_host()  # the update has ended
        start = time.monotonic()
        directory = self._scratch / f"version-{item.version}"
        save_checkpoint(
            directory, self._config, item.parts, copy_from=self._source, cluster=self._cluster
        )
        if not self._cluster.is_leader:
            self.published = item.version
            return
        try:
            while not self._stopped.is_set():
                try:
                    client.publish(
                        self._address, self._credentials, directory, item.version, patience_s=0
                    )
                except RetryError as error:
                    log.info("version %d waits for the weight service: %s", item.version, error)
                    self._stopped.wait(RETRY_S)
                    continue
                self.published = item.version
                self.seconds = time.monotonic() - start
                return
        finally:
            shutil.rmtree(directory, ignore_errors=True)
