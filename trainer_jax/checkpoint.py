"""The trainer's own checkpoints: parameters, optimizer state, and where the run stands.

Owns the Orbax manager and the metadata beside the arrays. Must not export weights for samplers
(`trainer_jax.hf`, `trainer_jax.publish`) nor acknowledge groups: it says what is durable.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from contracts.errors import BadInputError

CHECKPOINTS = "checkpoints"

# Orbax warns, on success, of metadata that a part of a checkpoint read by itself never has.
logging.getLogger("absl").addFilter(lambda r: "Metadata file does not exist" not in str(r.msg))


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands after `step` updates.

    Randomness is a function of the run's seed and the step, so these two restore it.
    """

    run: str
    step: int
    version: int  # policy version of the parameters
    sequence: int  # last trajectory group taken; groups after it are delivered again
    seed: int
    elapsed_seconds: float


class Checkpoints:
    """Checkpoints of one run, each visible only when complete. Saving does not hold up training."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """Opens `directory`/checkpoints and clears away what a kill left half-written."""
        self._directory = (directory / CHECKPOINTS).resolve()
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, cleanup_tmp_directories=True, create=True
            ),
        )
        self._pending: Position | None = None
        self._durable: Position | None = None

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, state: Any, position: Position) -> None:
        """Copies `state` (a pytree of arrays) and writes it in the background.

        A save still under way is waited for first. One that exists for this step is kept.
        """
        self.wait()
        if position.step in self._manager.all_steps():
            return
        self._manager.save(
            position.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(asdict(position))
            ),
        )
        self._pending = position

    def durable(self) -> Position | None:
        """Position of the newest checkpoint this process completed; never waits.

        Raises whatever made the background write fail.
        """
        if self._pending and not self._manager.is_saving_in_progress():
            self.wait()
        return self._durable

    def wait(self) -> None:
        """Returns when the last save is complete; raises what made it fail."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        if self._pending:
            self._durable, self._pending = self._pending, None

    def restore(self, like: Any) -> tuple[Any, Position]:
        """The newest complete checkpoint, laid out like `like` (arrays or their abstract shapes).

        Raises:
            BadInputError: there is none, or it holds another model or optimizer, or is damaged.
        """
        step = self._manager.latest_step()
        if step is None:
            raise BadInputError(
                "--resume", expected=f"a checkpoint in {self._directory}", found="none"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), position=ocp.args.JsonRestore()
                ),
            )
            position = Position(**restored["position"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise BadInputError(
                f"checkpoint {self._directory / str(step)}",
                expected="the model and optimizer of this run, undamaged",
                found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            ) from error
        self._durable = position
        return restored["state"], position

    def close(self) -> None:
        """Waits for the save under way."""
        self.wait()
        self._manager.close()


def read_position(checkpoint: Path) -> Position:
    """Of one checkpoint directory (checkpoints/<step>), without its arrays."""
    try:
        data = ocp.JsonCheckpointHandler().restore(
            epath.Path((checkpoint / "position").resolve()), args=ocp.args.JsonRestore()
        )
        return Position(**data)
    except (FileNotFoundError, TypeError) as error:
        raise BadInputError(
            f"checkpoint {checkpoint}", expected="checkpoints/<step> of a run", found=str(error)
        ) from None


def read_params(checkpoint: Path) -> Any:
    """The parameters of one checkpoint directory as host arrays."""
    read_position(checkpoint)
    path = (checkpoint / "state").resolve()
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=to_host))["params"]
