"""The encoders under jax.jit on a CPU: bytes equal to those of the encoders for numpy arrays."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weight_sync.formats import bf16, device, fp8, mxfp8, nvfp4

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "formats" / "golden.npz")
SHAPE = (293, 224)  # no multiples of 128; as many elements as there are finite numbers
FINITE = np.concatenate([np.arange(0x7F80), np.arange(0x8000, 0xFF80)]).astype(np.uint16)

encode_nvfp4 = jax.jit(device.encode_nvfp4)
encode_channel = jax.jit(device.encode_fp8_channel)
encode_mxfp8 = jax.jit(device.encode_mxfp8)
encode_block = {r: jax.jit(partial(device.encode_fp8, recipe=r)) for r in fp8.Recipe}


def _normal(shape: tuple[int, int], scale: float, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return bf16.round_from(np.clip(values, -3.3e38, 3.3e38).astype(np.float32))


def _octaves_below_each_amax() -> np.ndarray:
    """A row for each mantissa of an amax: every magnitude from 24 octaves below it on."""
    amax = np.arange(0x3F80, 0x4000)[:, None]
    return (amax - np.arange(24 * 128)).astype(np.uint16)


def _cases() -> dict[str, np.ndarray]:
    """All of one shape, so that each encoder is compiled once."""
    rng = np.random.default_rng(0)
    cases = {f"normal {s}": _normal(SHAPE, s) for s in (1e-38, 1e-30, 1e-12, 0.02, 1e10, 1e38)}
    cases["all scales"] = bf16.round_from(
        (rng.standard_normal(SHAPE) * np.exp(rng.uniform(-85, 85, SHAPE))).astype(np.float32)
    )
    blocks = _normal(SHAPE, 1).reshape(SHAPE[0], 7, 32)
    blocks[::3, ::2] = 0
    blocks[1::3, ::2] = 0x8000
    blocks[2::3, ::2] &= 0x807F  # subnormals
    cases["zeros, -0.0, subnormals"] = blocks.reshape(SHAPE)
    # Ties of E2M1 and E4M3 under scales of one.
    ties = bf16.round_from(np.arange(-112, 112, dtype=np.float32) / 16)
    cases["ties"] = np.tile(np.where(np.arange(224) % 32 < 31, ties, 0x43E0), (SHAPE[0], 1))
    cases["every finite number, sorted"] = np.resize(FINITE, SHAPE)
    cases["every finite number, shuffled"] = np.resize(rng.permutation(FINITE), SHAPE)
    cases["only zeros"] = np.zeros(SHAPE, np.uint16)
    for name in GOLDEN.files:
        if name.endswith("/x"):
            cases[name] = np.resize(GOLDEN[name], SHAPE)
    return cases


CASES = _cases()


def _check(found: tuple, expected: tuple) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_the_encoders_for_numpy_arrays(case):
    bits = CASES[case]
    x = jnp.asarray(bits)
    for recipe in fp8.Recipe:
        _check(encode_block[recipe](x), fp8.encode(bits, recipe=recipe, name="x"))
    _check(encode_channel(x), fp8.encode_channel(bits, name="x"))
    _check(encode_mxfp8(x), mxfp8.encode(bits, name="x"))
    amax = bf16.amax(bits, "x")
    for recipe in nvfp4.Recipe:
        expected = nvfp4.encode(bits, amax=amax, recipe=recipe, name="x")
        _check(encode_nvfp4(x, nvfp4.tables(amax, recipe)), expected)


def test_channels_of_every_amax_mantissa():
    """Every quotient that a channel can have, up to powers of two: all ties are among them."""
    bits = _octaves_below_each_amax()
    _check(encode_channel(jnp.asarray(bits)), fp8.encode_channel(bits, name="x"))


def test_a_plain_product_with_the_reciprocal_would_not_do():
    """The negative control of the test above."""
    bits = _octaves_below_each_amax()
    x, amax = bf16.widen(bits), bf16.widen(bits[:, :1])
    product = fp8.to_e4m3(x * (np.float32(1) / (amax / fp8.MAX)))
    assert (product != fp8.encode_channel(bits, name="x").codes).any()


@pytest.mark.parametrize("units", [-6, -1, 1, 6])
def test_a_product_that_is_units_off_gives_the_same_codes(units):
    """So may the products of a device: they need not be rounded as IEEE 754 has it."""
    bits = _octaves_below_each_amax()
    amax = bits[:, :1].astype(np.int32)
    product = bf16.widen(bits) * (np.float32(1) / (bf16.widen(bits[:, :1]) / fp8.MAX))
    codes = device._e4m3(device._settled(product.view(np.int32) + units, amax))
    np.testing.assert_array_equal(codes, fp8.encode_channel(bits, name="x").codes)


def test_weights_as_bf16_are_their_bits():
    bits = CASES["all scales"]
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    tables = nvfp4.tables(bf16.amax(bits, "x"), nvfp4.Recipe.FOUR_OVER_SIX)
    pairs = [
        (encode_nvfp4(x, tables), encode_nvfp4(jnp.asarray(bits), tables)),
        (encode_mxfp8(x), encode_mxfp8(jnp.asarray(bits))),
        (encode_channel(x), encode_channel(jnp.asarray(bits))),
    ]
    for ours, theirs in pairs:
        _check(ours, tuple(map(np.asarray, theirs)))


def test_amax_shows_what_is_not_finite():
    amax = jax.jit(device.amax)
    bits = CASES["all scales"].copy()
    assert amax(jnp.asarray(bits)) == bf16.amax(bits, "x")
    bits[3, 5] = 0xFF80
    assert amax(jnp.asarray(bits)) == np.inf
    bits[7, 9] = 0xFFC0
    assert np.isnan(amax(jnp.asarray(bits)))


def test_one_compilation_serves_all_tensors_of_a_shape():
    traces = []

    def traced(x, tables):
        traces.append(x.shape)
        return device.encode_nvfp4(x, tables)

    jitted = jax.jit(traced)
    for scale in (1.0, 2.5):
        bits = _normal((16, 64), scale)
        amax = bf16.amax(bits, "x")
        expected = nvfp4.encode(bits, amax=amax, name="x")
        _check(jitted(jnp.asarray(bits), nvfp4.tables(amax, nvfp4.Recipe.MODELOPT)), expected)
    assert traces == [(16, 64)]


def test_other_columns_than_whole_blocks_are_refused():
    tables = nvfp4.tables(np.float32(1), nvfp4.Recipe.MODELOPT)
    with pytest.raises(AssertionError, match="multiples of 16"):
        device.encode_nvfp4(jnp.zeros((2, 24), jnp.uint16), tables)
    with pytest.raises(AssertionError, match="multiples of 32"):
        device.encode_mxfp8(jnp.zeros((2, 48), jnp.uint16))
