"""MXFP8 against the bytes of vLLM, and against the definition of its scale for every magnitude."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from contracts.errors import BadInputError
from weight_sync.formats import bf16, mxfp8

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "formats" / "golden.npz")

# Bits of any scale, with equal magnitudes made likely; from 0x7F78 on a code may stand for 2^128.
ELEMENTS = st.one_of(st.integers(0, 0x7F77), st.sampled_from([0, 1, 0x7F, 0x80, 0x3FE0, 0x7F77]))
SIGNED = st.tuples(ELEMENTS, st.booleans()).map(lambda pair: pair[0] | (pair[1] << 15))
MATRICES = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda shape: npst.arrays(np.uint16, (shape[0], shape[1] * 32), elements=SIGNED)
)


@pytest.mark.parametrize("case", ["mx_heavy", "mx_edge", "mx_amax"])
def test_bytes_of_vllm(case):
    found = mxfp8.encode(GOLDEN[f"{case}/x"], name="x")
    np.testing.assert_array_equal(found.codes, GOLDEN[f"{case}/vllm/q"])
    np.testing.assert_array_equal(found.scale, GOLDEN[f"{case}/vllm/scale"])


def test_scale_of_every_magnitude():
    bits = np.zeros((bf16.INFINITY, 32), np.uint16)
    bits[:, 5] = np.arange(bf16.INFINITY)
    amax = np.maximum(bf16.MAGNITUDES.astype(np.float64), 2.0**-140)
    expected = np.maximum(np.ceil(np.log2(amax / 448)), -127) + 127
    np.testing.assert_array_equal(mxfp8.encode(bits, name="x").scale[:, 0], expected)


def test_scale_values():
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(mxfp8.SCALES, expected)


@settings(max_examples=50)
@given(bits=MATRICES)
def test_codes_are_those_of_the_division(bits):
    found = mxfp8.encode(bits, name="x")
    scale = np.repeat(mxfp8.SCALES[found.scale], 32, axis=1)
    with np.errstate(under="ignore"):
        expected = (bf16.widen(bits) / scale).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.codes, expected.view(np.uint8))


@settings(max_examples=50)
@given(bits=MATRICES)
def test_error_is_a_sixteenth_or_half_the_smallest_step(bits):
    found = mxfp8.encode(bits, name="x")
    x = bf16.widen(bits).astype(np.float64)
    steps = np.repeat(mxfp8.SCALES[found.scale], 32, axis=1).astype(np.float64) * 2.0**-9
    assert (np.abs(mxfp8.decode(found) - x) <= np.maximum(np.abs(x) / 16, steps / 2)).all()


def test_what_fits_comes_back():
    """Elements with 4 bits within 15 octaves of the block's largest are exact, at any scale."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(20, 230, (4, 3, 1)) + rng.integers(-13, 1, (4, 3, 32))
    bits = ((exponents << 7) | (rng.integers(0, 7, (4, 3, 32)) << 4)).astype(np.uint16)
    bits = bits.reshape(4, 96) | (rng.integers(0, 2, (4, 96)) << 15).astype(np.uint16)
    np.testing.assert_array_equal(mxfp8.decode(mxfp8.encode(bits, name="x")), bf16.widen(bits))


def test_ties_go_to_the_even_code():
    ties = np.array([448, 1.0625, 1.1875, -1.0625, -1.1875, 2.0**-10, 3 * 2.0**-10], np.float32)
    found = mxfp8.encode(bf16.round_from(np.resize(ties, 32))[None], name="x")
    assert found.scale.tolist() == [[127]]
    assert found.codes[0, :7].tobytes().hex() == "7e383ab8ba0002"


@pytest.mark.parametrize("K", [16, 48, 31, 33])
def test_other_columns_than_multiples_of_32_are_refused(K):
    with pytest.raises(BadInputError, match=rf"tensor x.*multiples of 32.*{K}"):
        mxfp8.encode(np.zeros((2, K), np.uint16), name="x")


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_a_number_that_is_not_finite_names_its_tensor(bad):
    bits = np.zeros((3, 128), np.uint16)
    bits[1, 2] = bad
    with pytest.raises(BadInputError, match=r"model\.w.*1 NaN or infinite of 384.*at 130"):
        mxfp8.encode(bits, name="model.w")
