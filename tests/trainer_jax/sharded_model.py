"""Run as a process with eight virtual devices by test_mesh: meshes against one device."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from contracts.errors import BadInputError
from trainer_jax.mesh import batch_sharding, make_mesh, param_shardings
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import init_params

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, initializer_range=0.2,
)  # fmt: skip
# "blocks" chooses its work at run time; "dense" is what a compiler partitions best
MESHES = (
    ({"data": 2, "fsdp": 2, "tensor": 2}, "auto"),
    ({"fsdp": 2, "expert": 4}, "dense"),
)


def run(params, tokens_BxT, segments_BxT, ffn: str):
    """Log-probs of the next tokens, and the gradient of their sum of squares."""

    def objective(params):
        positions_BxT = jnp.tile(jnp.arange(tokens_BxT.shape[1], dtype=jnp.int32), (8, 1))
        hidden_BxTxD = hidden_states(
            params, CONFIG, tokens_BxT, positions_BxT, segments_BxT, compute=ComputeConfig(ffn=ffn)
        )
        logits_BxTxV = jnp.einsum("btd,vd->btv", hidden_BxTxD, head_weight(params))
        logp_BxTxV = jax.nn.log_softmax(logits_BxTxV, axis=-1)
        logp_BxT = jnp.take_along_axis(logp_BxTxV, jnp.roll(tokens_BxT, -1, 1)[..., None], 2)[
            ..., 0
        ]
        return jnp.square(logp_BxT).mean(), logp_BxT

    (_, logp_BxT), grads = jax.value_and_grad(objective, has_aux=True)(params)
    return logp_BxT, grads


def refuses_what_does_not_divide() -> str:
    mesh = make_mesh({"tensor": 8})
    shapes = jax.eval_shape(lambda: init_params(replace(CONFIG, vocab_size=60), jax.random.key(0)))
    try:
        param_shardings(mesh, shapes)
    except BadInputError as error:
        return str(error)
    return ""


def main() -> None:
    assert jax.device_count() == 8
    rng = np.random.default_rng(0)
    tokens_BxT = rng.integers(0, CONFIG.vocab_size, (8, 24), np.int32)
    segments_BxT = np.repeat(np.array([[1, 2]], np.int32), 12, axis=1).repeat(8, axis=0)
    params = init_params(CONFIG, jax.random.key(0))
    want_logp, want_grads = jax.jit(run, static_argnums=3)(params, tokens_BxT, segments_BxT, "auto")
    devices = []
    for shape, ffn in MESHES:
        mesh = make_mesh(shape)
        shardings = param_shardings(mesh, params)
        placed = jax.device_put(params, shardings)
        batch = jax.device_put((tokens_BxT, segments_BxT), batch_sharding(mesh))
        step = jax.jit(run, static_argnums=3, out_shardings=(batch_sharding(mesh), shardings))
        logp, grads = step(placed, *batch, ffn)
        np.testing.assert_allclose(logp, want_logp, rtol=0, atol=1e-5)
        for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
            atol = 1e-4 * float(np.abs(want).max())
            np.testing.assert_allclose(got, want, rtol=0, atol=atol)
        gate = placed["layers"]["gate"]
        devices.append(gate.size // gate.addressable_shards[0].data.size)
    found = {"gate_parts": devices, "refusal": refuses_what_does_not_divide()}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
