"""`python -m tools.upcycle CHECKPOINT OUT`: a dense model as a mixture, its output unchanged.

Owns the command line and what becomes of a layer. A llama becomes a mixtral, a qwen3 a qwen3_moe;
every expert is a copy of the dense feed-forward network (Komatsuzaki et al. 2022, "Sparse
Upcycling", arXiv 2212.05055). The weights of a token's experts add up to one, so that the output is
the dense model's, to float rounding, whatever the router says.

Nothing but the router tells the experts apart. Were it zero, all would be equal: with one expert
per token each token would go to the same one, with more all would get the same gradient, and the
router none. So it is drawn at random. With one expert per token that expert's weight is one, the
router has no gradient ever, and stays the division of the tokens that was drawn.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from contracts.errors import BadInputError, exits_politely
from trainer_jax.hf import DTYPE_NAMES, load_checkpoint, save_checkpoint
from trainer_jax.models.config import Family, ModelConfig
from trainer_jax.models.parameters import Params, count_parameters
from weight_sync.safetensors_file import Checkpoint

_MIXTURES: dict[Family, Family] = {"llama": "mixtral", "qwen3": "qwen3_moe"}  # of dense families


def upcycled(
    config: ModelConfig, params: Params, *, num_experts: int, top_k: int, seed: int
) -> tuple[ModelConfig, Params]:
    """The mixture of a dense model; parameters are numpy float32.

    Raises:
        BadInputError: the model is of no dense family, or has fewer experts than a token sees.
    """
    family = _MIXTURES.get(config.model_type)
    if family is None:
        expected = " or ".join(_MIXTURES)
        raise BadInputError("CHECKPOINT", expected=expected, found=f"a {config.model_type}")
    mixture = replace(
        config,
        model_type=family,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=config.intermediate_size,
        intermediate_size=0,
    )
    layers = dict(params["layers"])
    for name in ("gate", "up", "down"):
        layers[name] = np.repeat(layers.pop(f"mlp_{name}")[:, None], num_experts, axis=1)
    shape = (config.num_hidden_layers, config.hidden_size, num_experts)
    router = np.random.default_rng(seed).normal(0, config.initializer_range, shape)
    layers["router"] = router.astype(np.float32)
    return mixture, params | {"layers": layers}


@exits_politely
def main(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face directory of a dense model.")],
    out: Annotated[Path, typer.Argument(help="A directory not yet there, or empty.")],
    experts: Annotated[int, typer.Option(min=2, help="Of a layer.")] = 2,
    top_k: Annotated[int, typer.Option(min=1, help="Experts that see a token.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the router.")] = 0,
) -> None:
    """A dense model as a mixture of experts: copies of its feed-forward networks, and a router."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BadInputError("OUT", expected="a new or empty directory", found=out)
    config, params = load_checkpoint(checkpoint)
    config, params = upcycled(config, params, num_experts=experts, top_k=top_k, seed=seed)
    dtypes = {header.dtype for header in Checkpoint(checkpoint).tensors.values()}
    dtype = DTYPE_NAMES[dtypes.pop()] if len(dtypes) == 1 else "float32"  # holds every other one
    save_checkpoint(out, config, params, dtype=dtype, copy_from=checkpoint)
    typer.echo(f"{out}: {config.model_type}, {count_parameters(config):,} parameters, {dtype}")


if __name__ == "__main__":
    typer.run(main)
