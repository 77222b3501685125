"""The formulas against counts of traced programs, and the search for what fits."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from contracts.errors import BadInputError
from trainer_jax.budget import Setting, flops_per_token, memory, what_fits
from trainer_jax.models import deltanet
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import init_params

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
MODELS = {
    "qwen3": ModelConfig(model_type="qwen3", intermediate_size=48, **SIZES),
    "qwen3_moe": ModelConfig(**SIZES, **EXPERTS),
    "qwen3_5_moe": ModelConfig(
        model_type="qwen3_5_moe", shared_expert_intermediate_size=24,
        layer_types=("linear_attention",) * 3 + ("full_attention",),
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=8, linear_conv_kernel_dim=4, **SIZES, **EXPERTS,
    ),
}  # fmt: skip
SETTING = Setting(
    mesh={"data": 8, "fsdp": 1, "expert": 1, "tensor": 1, "context": 1},
    micro_rows=32,
    row_tokens=8192,
    optimizer="adamw",
    masters="float32",
    dtype="float32",
    remat=False,
)


def matrix_flops(jaxpr) -> int:
    """Of all products that a traced program runs; loops by their length."""
    total = 0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            ((contracted, _), _) = parameters["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            summed = math.prod(shape[dim] for dim in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * summed
        turns = parameters["length"] if name == "scan" else 1  # a while loop here turns once
        for value in jax.tree.leaves(parameters, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += turns * matrix_flops(inner)
    return total


@pytest.mark.parametrize("family", MODELS)
def test_flops_are_those_of_the_traced_forward_pass(family, monkeypatch):
    monkeypatch.setattr(deltanet, "CPU_CHUNK", deltanet.CHUNK)  # as on an accelerator
    model, T = MODELS[family], 128  # one chunk of attention: a loop that turns once
    compute = ComputeConfig(ffn="dense")  # all experts, and all are chosen

    def logits(params, tokens_BxT):
        ones = jnp.ones_like(tokens_BxT)
        hidden = hidden_states(params, model, tokens_BxT, ones, ones, compute=compute)
        return jnp.einsum("btd,vd->btv", hidden, head_weight(params))

    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    traced = jax.make_jaxpr(logits)(params, jax.ShapeDtypeStruct((1, T), jnp.int32))
    flops = flops_per_token(model, T)
    # the program multiplies all of a chunk's scores, and then masks those of later tokens
    masked = flops.attention * (2 * T / (T + 1) - 1)
    assert matrix_flops(traced.jaxpr) / T == pytest.approx(flops.total + masked, rel=0.01)


def test_an_update_is_three_passes_and_rematerialization_one_more():
    flops = flops_per_token(MODELS["qwen3_5_moe"], 1024)
    assert flops.update(remat=False) == pytest.approx(3 * flops.total)
    more = flops.update(remat=True) - flops.update(remat=False)
    assert more == pytest.approx(flops.total - flops.head)


def test_only_chosen_experts_count():
    model = MODELS["qwen3_moe"]
    some = flops_per_token(replace(model, num_experts_per_tok=1), 64)
    assert some.experts == flops_per_token(model, 64).experts / 4


@pytest.mark.parametrize("family", MODELS)
def test_every_change_that_is_named_does_what_it_says(family):
    """Wherever the limit lies, what is named fits, and nothing is named without need."""
    model = MODELS[family]
    need = memory(model, SETTING).total
    for part in (0.95, 0.5, 0.1, 0.02):
        change = what_fits(model, SETTING, part * need)
        assert change is not None and change.memory.total <= part * need
        assert len(set(change.words)) == len(change.words)
    assert what_fits(model, SETTING, 1.0) is None


def test_the_mildest_change_comes_first():
    model = MODELS["qwen3_moe"]
    need = memory(model, SETTING).total
    first = what_fits(model, SETTING, 0.99 * need)
    assert first is not None and first.words == ("model.compute.remat = true",)
    bare = replace(SETTING, remat=True, dtype="bfloat16")
    second = what_fits(model, bare, 0.99 * memory(model, bare).total)
    assert second is not None and second.words == ("train.micro_rows = 8",)


def test_an_axis_that_does_not_divide_is_not_proposed():
    odd = replace(MODELS["qwen3"], hidden_size=32, intermediate_size=49)  # tensor = 2 cannot
    for part in (0.5, 0.1, 0.02):
        change = what_fits(odd, SETTING, part * memory(odd, SETTING).total)
        assert change is None or "mesh.tensor" not in " ".join(change.words)
    with pytest.raises(ValueError, match="mlp_gate"):
        memory(odd, replace(SETTING, mesh={**SETTING.mesh, "tensor": 2}))


def test_more_of_anything_needs_more():
    model = MODELS["qwen3_5_moe"]
    need = memory(model, SETTING)
    assert memory(model, replace(SETTING, row_tokens=16384)).activations > need.activations
    assert memory(model, replace(SETTING, scale=2.0)).transient == 2 * need.transient
    assert memory(model, replace(SETTING, optimizer="sgd")).moments == 0
    half = memory(model, replace(SETTING, masters="bfloat16")).parameters
    assert need.parameters / 2 <= half < 0.51 * need.parameters  # decays stay float32


@pytest.mark.parametrize(
    ("axis", "size", "sentence"),
    [
        ("tensor", 5, r"mesh axis tensor \(.*\): expected a divisor of \d+, found 5"),
        ("context", 3, r"mesh axis context: expected a divisor of 8192 .*, found 3"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_in_a_sentence(axis, size, sentence):
    setting = replace(SETTING, mesh=SETTING.mesh | {axis: size})
    with pytest.raises(BadInputError, match=sentence):
        memory(MODELS["qwen3_moe"], setting)
