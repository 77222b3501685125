"""The trainer's own checkpoints: parameters, optimizer state, and where the run stands.

Owns the Orbax manager and the metadata beside the arrays. Must not export weights for samplers
(`trainer_jax.hf`, `trainer_jax.publish`) nor acknowledge groups: it says what is durable.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
                state=ocp.args.StandardSave(state),
                position=ocp.args.JsonSave(asdict(position)),
                checksums=ocp.args.JsonSave(_checksums(state)),
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
        others = [str(other) for other in self._manager.all_steps() if other != step]
        advice = f" (also there: {', '.join(others)})" if others else ""
        expected = f"the model and optimizer of this run, undamaged{advice}"
        with _refusing(self._directory / str(step), expected):
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), position=ocp.args.JsonRestore()
                ),
            )
            position = Position(**restored["position"])
            _check(restored["state"], self._directory / str(step))
        self._durable = position
        return restored["state"], position

    def close(self) -> None:
        """Waits for the save under way."""
        self.wait()
        self._manager.close()


def read_position(checkpoint: Path) -> Position:
    """Of one checkpoint directory (checkpoints/<step>), without its arrays."""
    with _refusing(checkpoint, "checkpoints/<step> of a run"):
        return Position(**_read_json(checkpoint / "position"))


def read_params(checkpoint: Path) -> Any:
    """The parameters of one checkpoint directory as host arrays.

    Raises:
        BadInputError: there are none, or they are damaged.
    """
    read_position(checkpoint)
    path = (checkpoint / "state").resolve()
    with _refusing(checkpoint, "a checkpoint, undamaged"), ocp.PyTreeCheckpointer() as reader:
        metadata = reader.metadata(path).item_metadata
        if metadata is None:
            raise ValueError("no metadata of its arrays")
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=to_host))
        _check({"params": state["params"]}, checkpoint)
        return state["params"]


# --- integrity ----------------------------------------------------------------------------------


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """uint32: the sum of the elements' bits, each times an odd number of its own place.

    The same however the array is laid out over devices, and computed where its parts are. One bit
    that flips changes it, since an odd number times a power of two is not 0 modulo 2^32.
    """
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis, num in enumerate(array.shape):
        place = place * jnp.uint32(num) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    return (bits.astype(jnp.uint32) * (jnp.uint32(2) * place + jnp.uint32(1))).sum(dtype=jnp.uint32)


def _checksums(state: Any) -> dict[str, int]:
    """By the leaf's path, as Orbax names it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    sums = [(_name(path), _checksum(leaf)) for path, leaf in leaves]
    return {name: int(value) for name, value in sums}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _check(state: Any, checkpoint: Path) -> None:
    """Raises ValueError for arrays that are not what was saved."""
    if not (checkpoint / "checksums").exists():  # written by an earlier version
        return
    saved = _read_json(checkpoint / "checksums")
    for name, found in _checksums(state).items():
        if saved.get(name) != found:
            raise ValueError(f"{name} with checksum {found} instead of {saved.get(name)}")


def _read_json(directory: Path) -> Any:
    path = epath.Path(directory.resolve())
    return ocp.JsonCheckpointHandler().restore(path, args=ocp.args.JsonRestore())


@contextlib.contextmanager
def _refusing(checkpoint: Path, expected: str) -> Iterator[None]:
    """Whatever Orbax makes of damage, of many kinds, is a BadInputError."""
    try:
        yield
    except Exception as error:
        raise BadInputError(
            f"checkpoint {checkpoint}",
            expected=expected,
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
        ) from error
