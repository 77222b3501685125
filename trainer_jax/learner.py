"""The policy that is trained: its state on the mesh, and trajectory groups in, an update out.

Owns the calls from a run's sections into model, mesh, packing and step. Must not know services,
files of a run, or when an update is due.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.types import TrajectoryGroup
from trainer_jax.advantages import advantages_of
from trainer_jax.batch import Batch, BatchShape, pack
from trainer_jax.cluster import Cluster
from trainer_jax.config import RunConfig
from trainer_jax.hf import load_checkpoint, save_checkpoint
from trainer_jax.mesh import make_mesh
from trainer_jax.parts import own_parts
from trainer_jax.recorded import TrainedTokens, by_trajectory
from trainer_jax.records import RecordRules, RoutingRules, check_trajectory
from trainer_jax.step import PendingMetrics, TrainState, make_update
from trainer_jax.summary import training_groups


class PendingUpdate:
    """An update that was dispatched. `seconds` is known once `metrics` was called."""

    def __init__(self, pending: PendingMetrics, batches: Sequence[Batch], *, record: bool) -> None:
        self._pending = pending
        self._recorded = tuple(batches) if record else ()
        self._started = time.monotonic()
        self._ready: float | None = None
        # of the rows, prompts and observations included
        self.num_tokens = sum(int((batch.segments_BxR > 0).sum()) for batch in batches)

    def is_ready(self) -> bool:
        if self._ready is None and self._pending.is_ready():
            self._ready = time.monotonic()
        return self._ready is not None

    def metrics(self) -> dict[str, float]:
        """Waits for the update. Raises FloatingPointError when the gradient is not finite."""
        values = self._pending.read()
        self._ready = self._ready or time.monotonic()
        return values

    def trained_tokens(self) -> Mapping[int, TrainedTokens]:
        """Of an update that records, by the trajectory's number in all its groups; waits for it."""
        return by_trajectory(self._recorded, self._pending.token_values())

    @property
    def seconds(self) -> float:
        """From dispatch to the first look at which it was done."""
        return (self._ready or time.monotonic()) - self._started


class Learner:
    """The training state and its update function."""

    def __init__(self, config: RunConfig) -> None:
        """Loads the start checkpoint.

        Raises:
            BadInputError: not a checkpoint of this architecture, more devices than there are.
        """
        groups = training_groups(config.sections)
        self.model, params = load_checkpoint(config.model.checkpoint)
        self._train, self._loss = config.train, config.loss
        self._update = make_update(
            self.model,
            config.loss,
            config.optimizer.build(),
            make_mesh(config.mesh.model_dump()),
            group_names=groups,
            temperature=config.sections.get("sampling", {}).get("temperature", 1.0),
            compute=config.model.compute,
            freeze_router=config.optimizer.freeze_router,
            masters=config.optimizer.masters,
            keep_tokens=config.train.record_every > 0,
        )
        self._rules = RecordRules(
            group_names=tuple(groups),
            vocab_size=self.model.vocab_size,
            replay=config.loss.replay,
            max_candidates=config.train.candidate_buckets[-1],
            routing=RoutingRules.of(self.model) if config.replays_routing else None,
        )
        self.state: TrainState = self._update.init(params)
        self._shapes: dict[int, BatchShape] = {}

    @property
    def params(self) -> Any:
        return self.state.params

    def restore(self, state: TrainState) -> None:
        """Takes a state that was restored in the layout of `self.state`."""
        self.state = state

    def check(self, group: TrajectoryGroup) -> None:
        """Raises BadInputError for a record that cannot be trained on, naming its sampler."""
        for trajectory in group.trajectories:
            if trajectory.reward is not None and trajectory.loss_mask.any():
                check_trajectory(trajectory, self._rules)

    def pack(self, groups: Sequence[TrajectoryGroup]) -> list[Batch]:
        """The micro-batches of an update from checked groups, in shapes used before if they fit."""
        batches = pack(
            groups,
            advantages_of(groups, normalize=self._loss.normalize_advantages),
            row_tokens=self._train.row_tokens,
            rows=self._train.micro_rows,
            candidate_buckets=self._train.candidate_buckets,
            rules=self._rules,
            num_shards=self._update.num_shards,
            at_least=tuple(self._shapes.values()),
        )
        self._shapes |= {batch.shape.row_tokens: batch.shape for batch in batches}
        return batches

    def update(
        self, batches: Sequence[Batch], version: int, *, record: bool = False
    ) -> PendingUpdate:
        """Dispatches one optimizer step; the arrays of the state before it are gone.

        `record`: keep what it makes of every token; only in runs with `train.record_every`.
        """
        self.state, pending = self._update(self.state, batches, version=version, record=record)
        return PendingUpdate(pending, batches, record=record)

    def export(self, directory: Path, *, copy_from: Path, cluster: Cluster) -> None:
        """Writes the policy as a Hugging Face directory; tokenizer files from `copy_from`."""
        parts = own_parts(self.params)
        save_checkpoint(directory, self.model, parts, copy_from=copy_from, cluster=cluster)
