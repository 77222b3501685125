"""What a run talks to: its weight service, gateway and samplers, local or at given addresses.

Owns the order of start-up (weights, first version, gateway, samplers) and of the end, and the
questions asked about their state. Must not train.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contracts.credentials import read_credentials
from contracts.errors import RetryError
from contracts.pb import fleet_pb2
from contracts.supervisor import Supervisor
from trainer_jax.config import RunConfig
from trainer_jax.local import (
    AUTOSCALER,
    NICE,
    Addresses,
    autoscaler_service,
    gateway_service,
    local_addresses,
    sampler_names,
    sampler_services,
    weights_service,
)
from trainer_jax.publish import latest_version
from trainer_jax.rollouts import RolloutClient
from trainer_jax.run_directory import RunDirectory
from trainer_jax.summary import is_training

START_S = 120.0
STATUS_EVERY_S = 1.0
STATUS_TIMEOUT_S = 2.0


class Services:
    """The services of a run. Local ones live as long as this object is open."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, *, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._directory = directory.path
        self._supervisor: Supervisor | None = None
        run = config.run
        if config.is_local:
            self.addresses = local_addresses(directory.path)
            self._supervisor = Supervisor(
                directory.path, nice=NICE, inherit=(directory.lock_fd,), on_restart=say
            )
        else:
            assert run.gateway and run.weights, "checked by RunSection"
            self.addresses = Addresses(
                gateway=run.gateway, weights=run.weights, token_file=run.token_file
            )
        self.credentials = read_credentials(
            self.addresses.token_file,
            tls_ca=run.tls_ca,
            tls_cert=run.tls_cert,
            tls_key=run.tls_key,
        )
        self.client = RolloutClient(self.addresses.gateway, self.credentials)
        self._status: fleet_pb2.StatusReply | None = None
        self._asked = 0.0
        self._reason = ""  # why the last question stayed without an answer

    def start_weights(self, poll: Callable[[], None]) -> int:
        """Starts the weight service; returns the newest version it holds (0: none)."""
        newest = -1

        def answers() -> bool:
            nonlocal newest
            poll()
            try:
                newest = latest_version(self.addresses.weights, self.credentials)
            except RetryError as error:
                self._reason = str(error)
                return False
            return True

        if self._supervisor:
            self._supervisor.start([weights_service(self._directory, self.addresses)])
        self._wait(answers, what="the weight service")
        return newest

    def start_fleet(
        self,
        checkpoint: Path,
        poll: Callable[[], None],
        groups: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Starts gateway and samplers, once a first version is published.

        They are those of `groups` if given; else those of all groups, in the autoscaler's hands if
        the run has one. `checkpoint` holds the tokenizer of the episodes. Returns when the gateway
        answers; the samplers join as they are ready.
        """

        def answers() -> bool:
            poll()
            try:
                self._status = self.client.status(timeout_s=STATUS_TIMEOUT_S)
            except RetryError as error:
                self._reason = str(error)
                return False
            return True

        if self._supervisor:
            place = (self._directory, self.addresses)
            self._supervisor.start([gateway_service(*place, checkpoint)])
            if groups is None and self._is_scaled:
                self._supervisor.start([autoscaler_service(*place)])
            else:
                chosen = self._groups if groups is None else groups
                self._supervisor.start(sampler_services(*place, chosen))
        self._wait(answers, what="the gateway")

    def _wait(self, ready: Callable[[], bool], *, what: str) -> None:
        if self._supervisor:
            self._supervisor.wait_until(ready, what=what, timeout_s=START_S)
        elif not ready():
            ready_by = time.monotonic() + START_S
            while not ready():
                if time.monotonic() > ready_by:
                    raise RetryError(f"{what} does not answer: {self._reason}")
                time.sleep(STATUS_EVERY_S)

    def check(self) -> None:
        """Raises what keeps a local service from running."""
        if self._supervisor:
            self._supervisor.check()

    def status(self) -> fleet_pb2.StatusReply | None:
        """The fleet's state, at most about a second old; the last known while the gateway is
        away."""
        if time.monotonic() - self._asked > STATUS_EVERY_S:
            with contextlib.suppress(RetryError):
                self._status = self.client.status(timeout_s=STATUS_TIMEOUT_S)
            self._asked = time.monotonic()
        return self._status

    @property
    def num_restarts(self) -> int:
        return self._supervisor.restarts.total() if self._supervisor else 0

    def retire_training_samplers(self) -> None:
        """Ends local samplers that no longer have anything to do, so that evaluation has the
        machine. An autoscaler would start them again: it goes, with all samplers, and those of
        evaluation, whose number is fixed, come back without it."""
        if self._supervisor is None:
            return
        if self._is_scaled:
            self._supervisor.stop_services([AUTOSCALER])
            evaluators = [group for group in self._groups if not is_training(group)]
            self._supervisor.start(sampler_services(self._directory, self.addresses, evaluators))
        else:
            training = [group for group in self._groups if is_training(group)]
            self._supervisor.stop_services(sampler_names(training))

    @property
    def _groups(self) -> Sequence[dict[str, Any]]:
        return self._config.sections["fleet"]["groups"]

    @property
    def _is_scaled(self) -> bool:
        return "autoscaler" in self._config.sections

    def close(self) -> None:
        self.client.close()
        if self._supervisor:
            self._supervisor.stop()
