"""FP8 blocks against golden bytes, E4M3 and BF16 rounding against ml_dtypes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from contracts.errors import BadInputError
from weight_sync.formats import bf16, fp8

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "formats" / "golden.npz")
FLOATS = npst.arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False))


@pytest.mark.parametrize("case", ["f8_odd_130x200", "f8_edge"])
def test_bytes_of_slime(case):
    found = fp8.encode(GOLDEN[f"{case}/x"], name="x")
    np.testing.assert_array_equal(found.codes, GOLDEN[f"{case}/slime/q"])
    np.testing.assert_array_equal(found.scale_inv, GOLDEN[f"{case}/slime/scale"])


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


@settings(max_examples=30, deadline=None)
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
    for call in (bf16.amax, lambda bits, name: fp8.encode(bits, name=name)):
        with pytest.raises(BadInputError, match=r"model\.w.*1 NaN or infinite of 384.*at 130"):
            call(bits, "model.w")


@given(bits=npst.arrays(np.uint16, st.integers(0, 40), elements=st.integers(0, 0xFFFF)))
def test_amax(bits):
    bits = bits[(bits & 0x7FFF) < bf16.INFINITY]
    assert bf16.amax(bits, "x") == np.max(np.abs(bf16.widen(bits)), initial=0)
