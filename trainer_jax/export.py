"""From a trainer checkpoint to a Hugging Face directory, without the run's services.

Owns finding the checkpoint's run record, model and tokenizer. Must not write formats itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contracts.errors import BadInputError
from contracts.runfile import read_resolved
from trainer_jax.checkpoint import CHECKPOINTS, read_params
from trainer_jax.hf import load_config, save_checkpoint
from trainer_jax.run_directory import RECORD


def export_checkpoint(checkpoint: Path, out: Path, *, layout: Any, dtype: str | None) -> None:
    """Writes `checkpoint` (checkpoints/<step> of a run, or the run: its newest) to `out`, in the
    layout and dtypes of the checkpoint that the run began with where None is given.

    Raises:
        BadInputError: no checkpoint there, or `out` exists.
    """
    if out.exists():
        raise BadInputError("export", expected=f"a new directory, not {out}", found="it exists")
    run = checkpoint.resolve()
    if run.parent.name == CHECKPOINTS:
        run = run.parent.parent
    else:
        checkpoint = newest_checkpoint(run)
    if not (run / RECORD).exists():
        raise BadInputError(
            f"checkpoint {checkpoint}",
            expected="checkpoints/<step> of a run",
            found="no run record",
        )
    start = Path(read_resolved(run / RECORD)["model"]["checkpoint"])
    save_checkpoint(
        out,
        load_config(start),
        read_params(checkpoint),
        layout=layout,
        dtype=dtype,
        copy_from=start,
    )


def newest_checkpoint(run: Path) -> Path:
    """checkpoints/<step> of the last step that was saved. Raises BadInputError: none was."""
    steps = [p for p in (run / CHECKPOINTS).glob("*") if p.name.isdigit()]
    if not steps:
        raise BadInputError(
            f"run directory {run}", expected=f"a checkpoint in {CHECKPOINTS}/", found="none"
        )
    return max(steps, key=lambda path: int(path.name))
