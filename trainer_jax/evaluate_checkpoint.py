"""Evaluation of a checkpoint by itself: `python -m trainer_jax evaluate`.

Owns the services that this needs and their end. The estimate belongs to `trainer_jax.evaluate`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from contracts.errors import BadInputError
from trainer_jax.config import RunConfig
from trainer_jax.evaluate import Evaluation, evaluate_while
from trainer_jax.hf import load_checkpoint
from trainer_jax.publish import Publisher
from trainer_jax.run_directory import RunDirectory
from trainer_jax.services import Services
from trainer_jax.summary import is_training


def evaluate_checkpoint(
    config: RunConfig, console: Console, *, stop_requested: Callable[[], bool]
) -> Evaluation:
    """Evaluates `config.model.checkpoint` on the evaluation groups alone.

    Services that it starts live in a temporary directory. With addresses given, the checkpoint is
    published there under the next version.

    Raises:
        BadInputError: no evaluation group in the run file.
    """
    groups = config.sections["fleet"]["groups"]
    evaluators = [group for group in groups if not is_training(group)]
    if not evaluators:
        raise BadInputError("run file, fleet.groups", expected="an evaluation group", found="none")
    model, params = load_checkpoint(config.model.checkpoint)

    with tempfile.TemporaryDirectory(prefix=f"{config.run.name}-evaluate-") as scratch:
        directory = RunDirectory(Path(scratch), "new", config.sections)
        services = Services(config, directory, say=console.print)
        publisher = Publisher(
            services.addresses.weights,
            services.credentials,
            config=model,
            source=config.model.checkpoint,
            scratch=Path(scratch) / "export",
        )

        def poll() -> None:
            if stop_requested():
                raise KeyboardInterrupt
            services.check()

        try:
            version = services.start_weights(poll) + 1
            publisher.submit(version, params)
            publisher.wait(poll)
            services.start_fleet(config.model.checkpoint, poll, groups=evaluators)
            return evaluate_while(
                services.client, config.evaluation, version=version, poll=lambda _: poll()
            )
        finally:
            publisher.close()
            services.close()
            directory.close()
