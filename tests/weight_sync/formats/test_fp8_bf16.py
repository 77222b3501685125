"""FP8 of every layout against golden bytes, E4M3 and BF16 rounding against ml_dtypes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from contracts.errors import BadInputError
from weight_sync.formats import bf16, fp8
from weight_sync.formats.fp8 import Recipe

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "formats" / "golden.npz")
FLOATS = npst.arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False))


# Bits of any scale, subnormals included; from 0x7F78 on a code may stand for 2^128.
SIGNED = st.integers(0, 0x7F77).flatmap(lambda m: st.sampled_from([m, m | 0x8000]))
MATRICES = st.tuples(st.integers(1, 3), st.integers(1, 40)).flatmap(
    lambda shape: npst.arrays(np.uint16, shape, elements=SIGNED)
)


def encode_all(bits: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(codes, scale of each element, decoded) of each layout and recipe."""
    blocks = [fp8.encode(bits, recipe=recipe, name="x") for recipe in Recipe]
    ones = [fp8.Fp8Block(np.full_like(b.codes, 0x38), b.scale_inv) for b in blocks]
    channel = fp8.encode_channel(bits, name="x")
    tensor = fp8.encode_tensor(bits, amax=bf16.amax(bits, "x"), name="x")
    return [
        *((b.codes, fp8.decode(one), fp8.decode(b)) for b, one in zip(blocks, ones, strict=True)),
        (channel.codes, np.broadcast_to(channel.scale, bits.shape), fp8.decode_channel(channel)),
        (tensor.codes, np.broadcast_to(tensor.scale, bits.shape), fp8.decode_tensor(tensor)),
    ]


@pytest.mark.parametrize("case", ["f8_odd_130x200", "f8_edge"])
@pytest.mark.parametrize(
    ("recipe", "peer"), [(Recipe.F32, "slime"), (Recipe.UE8M0, "sglang_ue8m0")]
)
def test_bytes_of_peers(case, recipe, peer):
    found = fp8.encode(GOLDEN[f"{case}/x"], recipe=recipe, name="x")
    np.testing.assert_array_equal(found.codes, GOLDEN[f"{case}/{peer}/q"])
    np.testing.assert_array_equal(found.scale_inv, GOLDEN[f"{case}/{peer}/scale"])


def test_bytes_of_slime_by_channel_and_by_tensor():
    bits = GOLDEN["randn/x"]
    channel = fp8.encode_channel(bits, name="x")
    tensor = fp8.encode_tensor(bits, amax=bf16.amax(bits, "x"), name="x")
    for found, peer in ((channel, "slime_channel"), (tensor, "slime_tensor")):
        np.testing.assert_array_equal(found.codes, GOLDEN[f"randn/{peer}/q"])
        np.testing.assert_array_equal(found.scale, GOLDEN[f"randn/{peer}/scale"], strict=True)


@settings(max_examples=60)
@given(bits=MATRICES)
def test_codes_are_those_of_the_division(bits):
    for codes, scale, _ in encode_all(bits):
        with np.errstate(under="ignore"):
            expected = (bf16.widen(bits) / scale).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(codes, expected.view(np.uint8))


@settings(max_examples=60)
@given(bits=MATRICES)
def test_scales_of_a_power_of_two_are_the_next_ones(bits):
    exact = fp8.encode(bits, name="x").scale_inv
    power = fp8.encode(bits, recipe=Recipe.UE8M0, name="x").scale_inv
    assert (np.frexp(power)[0] == 0.5).all()
    smallest = np.float32(1e-4) / np.float32(448)
    exact = np.maximum(exact, smallest)
    assert ((exact <= power) & (power < 2 * exact)).all()


def test_scales_of_every_amax_are_powers_of_two_from_the_quotient_on():
    scales = fp8.SCALE_OF[Recipe.UE8M0][: bf16.INFINITY].astype(np.float64)
    quotient = np.maximum(bf16.MAGNITUDES, np.float32(1e-4)).astype(np.float64) / 448
    np.testing.assert_array_equal(scales, 2.0 ** np.ceil(np.log2(quotient)))


def test_matrices_that_an_engine_fuses_share_a_scale():
    halves = [GOLDEN["randn/x"][:32], GOLDEN["randn/x"][32:]]
    shared = max(bf16.amax(half, "x") for half in halves)
    whole = fp8.encode_tensor(GOLDEN["randn/x"], amax=shared, name="x")
    found = [fp8.encode_tensor(half, amax=shared, name="x") for half in halves]
    assert found[0].scale == found[1].scale == whole.scale
    np.testing.assert_array_equal(np.concatenate([f.codes for f in found]), whole.codes)


def test_a_magnitude_above_the_shared_amax_is_refused():
    bits = bf16.round_from(np.array([[1, -3]], np.float32))
    with pytest.raises(BadInputError, match=r"tensor w.*magnitudes up to 2.*3"):
        fp8.encode_tensor(bits, amax=np.float32(2), name="w")


def test_zeros_keep_their_signs_and_scales_stay_positive():
    bits = np.tile(np.array([0, 0x8000], np.uint16), (3, 2))
    for codes, scale, decoded in encode_all(bits):
        np.testing.assert_array_equal(codes, (bits >> 8).astype(np.uint8))
        assert (scale > 0).all()
        assert not decoded.any()


def test_the_largest_and_subnormals():
    """Near the largest BF16, and what is so far below it that it vanishes."""
    bits = np.array([[0x7F77, 0xFF77, 0x0001, 0x8001]], np.uint16)
    for codes, _, decoded in encode_all(bits):
        largest = int(codes[0, 0])
        assert codes[0].tolist() == [largest, largest | 0x80, 0, 0x80]
        assert largest in (0x7E, 0x77)  # 448; 240 under the next power of two
        np.testing.assert_allclose(decoded[0, :2], bf16.widen(bits)[0, :2], rtol=2**-4)


def test_a_matrix_without_rows_or_columns():
    for shape in ((0, 256), (3, 0)):
        bits = np.zeros(shape, np.uint16)
        assert fp8.encode(bits, name="x").codes.shape == shape
        assert fp8.encode_channel(bits, name="x").codes.shape == shape


def test_e4m3_of_every_bf16_in_range():
    values = bf16.widen(np.arange(65536, dtype=np.uint32).astype(np.uint16))
    values = values[np.abs(values) <= 448]
    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(fp8.to_e4m3(values), expected)


@given(values=npst.arrays(np.float32, 64, elements=st.floats(-448, 448, width=32)))
def test_e4m3_of_any_float(values):
    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(fp8.to_e4m3(values), expected)


def test_e4m3_values():
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(fp8.VALUES, expected)


@settings(max_examples=30)
@given(shape=st.tuples(st.integers(1, 140), st.integers(1, 270)), seed=st.integers(0, 99))
def test_error_is_a_sixteenth_or_half_the_smallest_step(shape, seed):
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal(shape) * np.exp(rng.uniform(-60, 60, shape))
    bits = bf16.round_from(wide.astype(np.float32))
    found = fp8.encode(bits, name="x")
    assert found.scale_inv.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    x = bf16.widen(bits)
    steps = fp8.decode(fp8.Fp8Block(np.ones_like(found.codes), found.scale_inv))
    bound = np.maximum(np.abs(x) / 16, steps / 2)
    assert (np.abs(fp8.decode(found) - x) <= bound * 1.00001).all()


def test_codes_survive_a_round_trip():
    """What E4M3 holds exactly comes back exactly: every code, under a block maximum of 448."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    block = np.resize(codes, (128, 128))
    bits = bf16.round_from(fp8.VALUES[block])
    found = fp8.encode(bits, name="x")
    np.testing.assert_array_equal(found.codes, block)
    np.testing.assert_array_equal(found.scale_inv, 1)


@given(values=FLOATS)
def test_bf16_rounding(values):
    with np.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(bf16.round_from(values), expected)


def test_bf16_nan_stays_nan():
    nans = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(bf16.widen(bf16.round_from(nans))).all()


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_a_number_that_is_not_finite_names_its_tensor(bad):
    bits = np.zeros((3, 128), np.uint16)
    bits[1, 2] = bad
    calls = [
        partial(bf16.amax, bits),
        *(partial(fp8.encode, bits, recipe=recipe) for recipe in Recipe),
        partial(fp8.encode_channel, bits),
        partial(fp8.encode_tensor, bits, amax=np.float32(1)),
    ]
    for call in calls:
        with pytest.raises(BadInputError, match=r"model\.w.*1 NaN or infinite of 384.*at 130"):
            call(name="model.w")


@given(bits=npst.arrays(np.uint16, st.integers(0, 40), elements=st.integers(0, 0xFFFF)))
def test_amax(bits):
    bits = bits[(bits & 0x7FFF) < bf16.INFINITY]
    assert bf16.amax(bits, "x") == np.max(np.abs(bf16.widen(bits)), initial=0)
