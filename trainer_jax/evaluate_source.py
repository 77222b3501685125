"""What to evaluate: a run's settings, a policy's weights, the tasks.

Owns finding them from what a command line names, and the checksum that tells policies apart. The
tasks are the fleet's: it is asked for them as a process. Must not start services.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import xxhash

from contracts.errors import BadInputError
from contracts.runfile import read_resolved, read_run_file, write_resolved
from trainer_jax.checkpoint import CHECKPOINTS, read_params
from trainer_jax.export import newest_checkpoint
from trainer_jax.hf import load_checkpoint, load_config
from trainer_jax.models.config import ModelConfig
from trainer_jax.plan import ask
from trainer_jax.run_directory import RECORD

FINAL = "final"
TASKS_S = 600.0  # to read a source
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ALL = 10**9


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for. None and 0: as the run has it."""

    run: Path  # a run file, or the directory of a run
    checkpoint: Path | None = None
    tasks: Path | None = None
    ids: Path | None = None
    samples: int = 0
    overrides: Sequence[str] = ()
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights on disk. `base` is the Hugging Face directory of model and tokenizer: `place`
    itself, or where its training started."""

    place: Path
    base: Path

    @property
    def name(self) -> str:
        """For a directory's name."""
        place = self.place.resolve()
        return f"step-{place.name}" if place.parent.name == CHECKPOINTS else place.name

    def load(self) -> tuple[ModelConfig, Any]:
        """Model and parameters."""
        if self.place == self.base:
            return load_checkpoint(self.place)
        return load_config(self.base), read_params(self.place)

    def checksum(self, model: ModelConfig, params: Any) -> str:
        """Of what samplers are given: BF16 weights, tokenizer, chat template; 32 hex digits."""
        digest = xxhash.xxh3_128(json.dumps(model.to_hf(), sort_keys=True).encode())
        for path, leaf in sorted(
            (jax.tree_util.keystr(path), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        ):
            weights = np.ascontiguousarray(np.asarray(leaf).astype(ml_dtypes.bfloat16))
            digest.update(f"{path} {weights.shape}".encode())
            digest.update(weights.view(np.uint16).data)
        for name in _TEXTS:
            file = self.base / name
            digest.update(f"{name} ".encode())
            digest.update(file.read_bytes() if file.is_file() else b"")
        return digest.hexdigest()


def read_sections(request: Request) -> dict[str, dict[str, Any]]:
    """The run's sections, with what the command line changes of them but the tasks.

    Raises:
        BadInputError: not a run file, or the directory of no run.
    """
    if request.run.is_dir() or request.run.suffix == ".json":
        if request.overrides:
            raise BadInputError("--set", expected="a TOML run file", found=request.run)
        record = request.run / RECORD if request.run.is_dir() else request.run
        if not record.exists():
            raise BadInputError(f"run directory {request.run}", expected=RECORD, found="none")
        sections = read_resolved(record)
    else:
        sections = read_run_file(request.run, request.overrides)
    if request.samples:
        evaluation = {**sections.get("evaluation", {}), "num_samples": request.samples}
        sections = {**sections, "evaluation": evaluation}
    return sections


def find_policy(request: Request) -> Policy:
    """The checkpoint that is named; else the newest of the run directory.

    Raises:
        BadInputError: there is none.
    """
    place = request.checkpoint
    if place is None:
        if not request.run.is_dir():
            raise BadInputError(
                "--checkpoint", expected="one, or the directory of a run as RUN", found="none"
            )
        place = _newest(request.run)
    if (place / "config.json").is_file():
        return Policy(place=place, base=place)
    resolved = place.resolve()
    record = resolved.parent.parent / RECORD
    if resolved.parent.name == CHECKPOINTS and resolved.is_dir() and record.exists():
        return Policy(place=place, base=Path(read_resolved(record)["model"]["checkpoint"]))
    raise BadInputError(
        "--checkpoint",
        expected=f"a Hugging Face directory with a config.json, or {CHECKPOINTS}/<step> of a run",
        found=place if place.exists() else f"no directory {place}",
    )


def _newest(run: Path) -> Path:
    """The last checkpoint of a run; its final policy where no checkpoint is left."""
    try:
        return newest_checkpoint(run)
    except BadInputError:
        if not (run / FINAL).is_dir():
            raise
        return run / FINAL


def find_tasks(
    request: Request, sections: dict[str, dict[str, Any]], num_tasks: int
) -> dict[str, str]:
    """Checksums of the tasks by id: all of the source or subset named; else the run's held-out
    ones, at most `num_tasks` (0: all).

    Raises:
        RemoteInputError: the fleet's sentence about the first thing wrong.
        BadInputError: ids without a source, no tasks.
    """
    if request.ids and not request.tasks:
        raise BadInputError("--ids", expected="--tasks SOURCE that they are of", found="none")
    with tempfile.TemporaryDirectory() as scratch:
        if request.tasks:
            arguments = [str(request.tasks), *(("--ids", str(request.ids)) if request.ids else ())]
        else:
            record = Path(scratch) / RECORD
            write_resolved(record, sections)
            arguments = ["--config", str(record)]
        found = ask("sampler_fleet", "tasks", "digests", *arguments, timeout_s=TASKS_S)
    digests = list(found.items())
    if not request.tasks and num_tasks:
        digests = digests[:num_tasks]
    if not digests:
        raise BadInputError("evaluation", expected="tasks", found="none")
    return dict(digests)


def tasks_section(section: dict[str, Any], source: Path, ids: Path) -> dict[str, Any]:
    """[tasks] of a gateway that has the tasks of a subset file, whatever split they say."""
    return {
        "seed": section.get("seed", 0),
        "source": str(source.resolve()),
        "ids": str(ids.resolve()),
        "train_ids": str(ids.resolve()),  # the gateway finds samples in either split
        "num_train": _ALL,
    }
