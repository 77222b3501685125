"""Names of the model under their earlier place; `decoder` and `parameters` own them."""

from trainer_jax.models.decoder import ComputeConfig, Decoder, head_weight, hidden_states
from trainer_jax.models.parameters import (
    PARAMETERS,
    Params,
    count_parameters,
    init_params,
    nest,
    parameter_shapes,
)

Qwen3Moe = Decoder

__all__ = [
    "PARAMETERS",
    "ComputeConfig",
    "Decoder",
    "Params",
    "Qwen3Moe",
    "count_parameters",
    "head_weight",
    "hidden_states",
    "init_params",
    "nest",
    "parameter_shapes",
]
