"""Experts as samplers have them: the values are those that weight_sync's bytes decode to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trainer_jax.models.config import ComputeConfig
from trainer_jax.models.rounding import fp8_block_values, nvfp4_values, prepare_layer
from weight_sync.formats import fp8, nvfp4


def random_matrices(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 that BF16 holds, of very different sizes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def bits(x_IxO: np.ndarray) -> np.ndarray:
    """As encoders take a matrix: [O, I], BF16 bits."""
    return np.ascontiguousarray(x_IxO.T).astype(ml_dtypes.bfloat16).view(np.uint16)


def decoded_nvfp4(x_IxO: np.ndarray, amax: float) -> np.ndarray:
    encoded = nvfp4.encode(bits(x_IxO), amax=np.float32(amax), name="x")
    return nvfp4.decode(encoded).T


def assert_nearly_all_equal(found, expected) -> None:
    same = np.isclose(found, expected, rtol=3e-7, atol=0)  # scales may differ in the last bit
    assert same.mean() > 0.999, f"{(~same).sum()} of {same.size} differ"
    np.testing.assert_allclose(found, expected, rtol=0.5, atol=np.abs(expected).max() * 1e-3)


def test_nvfp4_values_are_those_of_the_encoder():
    x_ExIxO = random_matrices(3, 64, 48)
    x_ExIxO[1, 16:32] = 0  # blocks whose scale is 0
    amax = np.abs(x_ExIxO).max((1, 2), keepdims=True) * np.float32(1.5)
    found = nvfp4_values(jnp.asarray(x_ExIxO), jnp.asarray(amax))
    expected = np.stack([decoded_nvfp4(x, a.item()) for x, a in zip(x_ExIxO, amax, strict=True)])
    assert_nearly_all_equal(found, expected)


@pytest.mark.parametrize("shape", [(256, 128), (130, 200)])
def test_fp8_values_are_those_of_the_encoder(shape):
    x_IxO = random_matrices(*shape, seed=1)
    expected = fp8.decode(fp8.encode(bits(x_IxO), name="x")).T
    assert_nearly_all_equal(fp8_block_values(jnp.asarray(x_IxO)), expected)


def test_of_a_layer_only_experts_are_quantized_and_gradients_pass():
    shapes = {"gate": (2, 32, 16), "up": (2, 32, 16), "down": (2, 16, 32), "router": (32, 2)}
    layer = {
        leaf: jnp.asarray(random_matrices(*shape, seed=number))
        for number, (leaf, shape) in enumerate(shapes.items())
    }
    compute = ComputeConfig(round_weights=True, quantize_experts="nvfp4")
    found = prepare_layer(layer, compute)
    np.testing.assert_array_equal(found["router"], layer["router"])
    amax = max(np.abs(layer[leaf][1]).max() for leaf in ("gate", "up"))
    assert_nearly_all_equal(found["up"][1], decoded_nvfp4(np.asarray(layer["up"][1]), amax))
    assert len(np.unique(np.asarray(found["down"][0]))) < 200

    def total(layer):
        return sum((leaf * 3.0).sum() for leaf in jax.tree.leaves(prepare_layer(layer, compute)))

    for leaf in jax.tree.leaves(jax.grad(total)(layer)):
        np.testing.assert_array_equal(leaf, 3.0)
