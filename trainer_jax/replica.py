"""What every process of the trainer does of a run: the policy, its checkpoints, its publication.

Owns the calls that all processes make together. The leader makes them (`trainer_jax.loop`), the
others follow at its word; a trainer of one process just makes them. Must not collect trajectories,
nor decide when something is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contracts.credentials import Credentials
from trainer_jax.batch import Batch
from trainer_jax.checkpoint import Checkpoints, Position
from trainer_jax.cluster import Cluster
from trainer_jax.config import RunConfig
from trainer_jax.learner import Learner, PendingUpdate
from trainer_jax.publish import Publisher

FINAL, SCRATCH = "final", "export"


class Replica:
    """One process's part of the run in directory `path`."""

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        *,
        cluster: Cluster,
        weights: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        """Restores the last checkpoint, if there is one, into `position`.

        `weights` and `credentials`: where the leader publishes.
        """
        self._source, self._path, self._cluster = config.model.checkpoint, path, cluster
        self.learner = Learner(config)
        self.checkpoints = Checkpoints(path, keep=config.train.keep_checkpoints)
        self.position: Position | None = None
        if self.checkpoints.latest_step is not None:
            state, self.position = self.checkpoints.restore(self.learner.state)
            self.learner.restore(state)
        self.publisher = Publisher(
            weights,
            credentials or Credentials(),
            config=self.learner.model,
            source=self._source,
            scratch=path / SCRATCH,
            cluster=cluster,
        )

    # Each of these is one command.

    def publish(self, version: int) -> None:
        """Queues the policy as it is for publication as `version`."""
        self._cluster.tell("publish", version)
        self.publisher.submit(version, self.learner.params)

    def update(self, batches: Sequence[Batch], version: int, record: bool = False) -> PendingUpdate:
        """Dispatches an update of `version`, and queues what it makes as the next version."""
        self._cluster.tell("update", batches, version, record)
        self.publisher.detach()  # the update reuses the memory of the parameters before it
        update = self.learner.update(batches, version, record=record)
        self.publisher.submit(version + 1, self.learner.params)
        return update

    def save(self, position: Position) -> None:
        """Begins to write a checkpoint."""
        self._cluster.tell("save", position)
        self.checkpoints.save(self.learner.state, position)

    def export(self) -> None:
        """Writes the policy as the run's result."""
        self._cluster.tell("export")
        directory = self._path / FINAL
        self.learner.export(directory, copy_from=self._source, cluster=self._cluster)

    def close(self) -> None:
        self._cluster.tell("close")
        self.publisher.close()
        self.checkpoints.close()
        self._cluster.close()

    def follow(self) -> None:
        """Takes part until the leader closes.

        Raises whatever made a call fail; the other processes are then ended, too.
        """
        calls: dict[str, Callable[..., Any]] = {
            call.__name__: call for call in (self.publish, self.update, self.save, self.export)
        }
        try:
            while True:
                name, *arguments = self._cluster.hear()
                if name == "close":
                    return
                calls[name](*arguments)
        finally:
            self.close()
