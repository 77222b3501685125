"""The trainer's processes on several hosts: one leads, the others do as it does.

Owns [cluster], joining (`jax.distributed`), the leader's commands to the others, and barriers. Must
not know what an update is: that is `trainer_jax.replica`'s.

Every process computes its part of every jitted function, so all have to call the same functions in
the same order. Process 0 runs the loop and alone talks to services; what it is about to call it
first tells the others. Waiting for a command costs no device time and knows no timeout shorter
than `PATIENCE_S`; when a process dies, JAX's coordination service ends the others.
"""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from pydantic import Field, model_validator

from contracts.errors import BadInputError, RetryError
from contracts.runfile import Section

log = logging.getLogger(__name__)

PATIENCE_S = 7 * 24 * 3600  # of a barrier: a fleet may give nothing for a long time
START_S = 300  # until all processes are there


class ClusterSection(Section):
    """[cluster]: the trainer's processes, one per host, each started with `train --process N`.

    All read the model from, and write checkpoints and exports to, the same file system.
    """

    processes: int = Field(default=1, ge=1)
    coordinator: str | None = None  # host:port of process 0, which the others reach
    heartbeat_s: int = Field(default=60, gt=0)  # after this long without a word all are ended

    @model_validator(mode="after")
    def _several_meet(self) -> ClusterSection:
        if (self.processes > 1) != (self.coordinator is not None):
            raise ValueError("a coordinator address, and only with several processes")
        return self


class Cluster:
    """This process and the others of its run. Alone, `tell` and `barrier` do nothing."""

    def __init__(self, section: ClusterSection, process: int = 0) -> None:
        """Joins the others, waiting for all of them. Must come before the first use of a device.

        Raises:
            BadInputError: no such process.
            RetryError: not all were there in time.
        """
        self.size, self.process = section.processes, process
        self._num_commands = 0
        if not 0 <= process < self.size:
            raise BadInputError(
                "--process", expected=f"0 to {self.size - 1}, cluster.processes", found=process
            )
        if self.size == 1:
            return
        # across processes a CPU computes by way of gloo; other devices have their own
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                section.coordinator,
                self.size,
                process,
                initialization_timeout=START_S,
                heartbeat_timeout_seconds=section.heartbeat_s,
            )
        except jax.errors.JaxRuntimeError as error:
            raise RetryError(f"{self.size} trainer processes: {error}") from None

    @staticmethod
    def alone() -> Cluster:
        return Cluster(ClusterSection())

    @property
    def is_leader(self) -> bool:
        return self.process == 0

    def barrier(self, name: str) -> None:
        """Returns when all processes are here. `name` is used once; from any thread."""
        if self.size > 1:
            ocp.multihost.sync_global_processes(
                name, timeout=PATIENCE_S, processes=set(range(self.size))
            )

    def tell(self, *command: Any) -> None:
        """The leader has the others do something; of a follower, nothing.

        From the thread that calls jitted functions; waits for those that were called before.
        """
        if self.size > 1 and self.is_leader:
            self._next_command()
            self._broadcast(np.frombuffer(pickle.dumps(command), np.uint8))

    def hear(self) -> tuple[Any, ...]:
        """Follower: waits for the next command."""
        self._next_command()
        return pickle.loads(self._broadcast(np.empty(0, np.uint8)))

    def _next_command(self) -> None:
        self._num_commands += 1
        self.barrier(f"command {self._num_commands}")

    def _broadcast(self, data: np.ndarray) -> bytes:
        """The leader's bytes, in a size that is a power of two, so that few programs compile."""
        size = int(multihost_utils.broadcast_one_to_all(np.int64(len(data))))
        padded = np.zeros(1 << size.bit_length(), np.uint8)
        padded[: len(data)] = data
        return multihost_utils.broadcast_one_to_all(padded)[:size].tobytes()

    def fail(self, reason: str) -> None:
        """Follower: ends this process at once, so that none waits for it. The leader goes on."""
        if not self.is_leader:
            log.critical(reason)
            os._exit(1)

    def close(self) -> None:
        """Leaves. Afterwards this process must compute nothing."""
        if self.size > 1:
            jax.distributed.shutdown()
