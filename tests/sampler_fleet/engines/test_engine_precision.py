"""Formats against slow decoders and rounding by search; products against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from contracts.errors import BadInputError
from contracts.types import KvFormat, WeightFormat
from sampler_fleet.engines import kernels
from sampler_fleet.engines.precision import (
    ActivationFormat,
    KvCache,
    Linear,
    Precision,
    Weight,
    decode_nvfp4,
    quantize_fp8,
    quantize_nvfp4,
)
from tests.sampler_fleet.engines.engine_checkpoints import (
    E2M1,
    fp8_channel_slow,
    fp8_slow,
    mxfp8_slow,
    nvfp4_slow,
)


def e4m3_slow(byte: int) -> float:
    """OCP E4M3FN: exponent bias 7, subnormals, no infinity."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


E4M3 = [e4m3_slow(byte) for byte in range(256) if byte & 127 != 127]


def random(*shape, seed=0, scale=1.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.bfloat16().float()


def test_nvfp4_decoder_equals_a_slow_one():
    weight = random(6, 64, scale=0.02)
    weight[2, 16:32] = 0
    packed, scale, _ = nvfp4_slow(weight)
    packed[5] = np.arange(32) * 8 + 5  # every code in both nibbles
    packed[4] = (np.arange(32) % 16) * 16 + (np.arange(32) % 16)
    found = decode_nvfp4(torch.from_numpy(packed), scale)
    scale_bytes = scale.view(torch.uint8).numpy()
    for row in range(6):
        for column in range(64):
            code = packed[row, column // 2] >> (4 * (column % 2)) & 15
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            assert found[row, column] == value * e4m3_slow(int(scale_bytes[row, column // 16]))


@njit
def apply(function, x):
    return np.array([function(value) for value in x])


def test_round_e4m3_is_the_nearest_value_with_ties_to_even():
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = every[every.abs() <= 464]
    ties = torch.tensor(sorted(E4M3))
    x = torch.cat([x, (ties[1:] + ties[:-1]) / 2, random(4096, scale=0.01) * 1.0001])
    expected = x.to(torch.float8_e4m3fn)
    assert (apply(kernels.round_e4m3, x.numpy()) == expected.float().numpy()).all()
    assert (apply(kernels.code_e4m3, x.numpy()) == expected.view(torch.uint8).numpy()).all()
    beyond = np.float32([1e4, -1e4, np.inf, np.nan])
    assert apply(kernels.round_e4m3, beyond)[:3].tolist() == [448, -448, 448]
    assert np.isnan(apply(kernels.round_e4m3, beyond)[3])
    assert apply(kernels.code_e4m3, beyond).tolist() == [0x7E, 0xFE, 0x7E, 0x7F]


def test_round_e2m1_is_the_nearest_value_with_ties_to_even():
    x = np.arange(-8, 8.001, 1 / 64, dtype=np.float32)
    for value, found in zip(x, apply(kernels.round_e2m1, x), strict=True):
        nearest = min(range(8), key=lambda i: (abs(E2M1[i] - min(abs(value), 6)), i % 2))
        assert abs(found) == E2M1[nearest]
        assert found * value >= 0


def test_round_bf16_is_the_nearest_value_with_ties_to_even():
    step = 2.0**-8
    x = np.float32([1 + step * i / 2 for i in range(9)] + [-3e38, 1e-40, -np.inf, np.nan])

    @njit
    def rounded(x, exact):
        return np.array([kernels.round_bf16(value, exact) for value in x])

    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounded(x, False), expected)
    np.testing.assert_array_equal(rounded(x, True), x)


def test_exp_is_right_to_a_few_units_in_the_last_place():
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    found = apply(kernels.exp, x)
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=2e-7)
    assert found.dtype == np.float32
    ends = apply(kernels.exp, np.float32([0, -1e30, -np.inf, np.nan]))
    assert ends[0] == 1
    assert 0 <= ends[1] == ends[2] < 1e-37
    assert np.isnan(ends[3])


EXACT = {split_k: Precision(split_k=split_k, exact=True) for split_k in (1, 2, 4)}


def weight_of(format: WeightFormat, w: torch.Tensor) -> tuple[Weight, torch.Tensor]:
    """The packed weight and what it means, float64."""
    if format == WeightFormat.BF16:
        return Weight(format=format, values_OxI=w), w.double()
    if format == WeightFormat.FP8_BLOCK:
        codes, scale = fp8_slow(w)
        rows = scale.double().repeat_interleave(128, 0)[: w.shape[0]]
        full = rows.repeat_interleave(128, 1)[:, : w.shape[1]]
        weight = Weight(format=format, values_OxI=codes.float(), scale=scale)
        return weight, codes.double() * full
    if format == WeightFormat.FP8_CHANNEL:
        codes, scale = fp8_channel_slow(w)
        weight = Weight(format=format, values_OxI=codes.float(), scale=scale)
        return weight, codes.double() * scale.double()
    if format == WeightFormat.MXFP8:
        codes, exponent = mxfp8_slow(w)
        values = codes.float() * torch.exp2(exponent.float() - 127).repeat_interleave(32, dim=1)
        return Weight(format=format, values_OxI=values), values.double()
    packed, scale, scale_2 = nvfp4_slow(w)
    values = decode_nvfp4(torch.from_numpy(packed), scale)
    weight = Weight(format=format, values_OxI=values, scale=torch.tensor(scale_2))
    return weight, values.double() * float(scale_2)


@pytest.mark.parametrize("format", list(WeightFormat))
@pytest.mark.parametrize("split_k", [1, 2, 4])
@pytest.mark.parametrize("size", [96, 128, 320])
def test_products_equal_float64(format, split_k, size):
    """Fused outputs that end inside a scale block, reductions that do too."""
    parts = [weight_of(format, random(rows, size, seed=rows, scale=0.1)) for rows in (24, 40)]
    linear = Linear.of([weight for weight, _ in parts], EXACT[split_k])
    x = random(5, size)
    expected = x.double() @ torch.cat([full for _, full in parts]).T
    assert (linear(x) - expected).abs().max() < 1e-4 * expected.abs().max()
    other = Linear.of([weight_of(format, random(64, size, seed=9))[0]], EXACT[split_k])
    idle = Linear.of([weight_of(format, random(64, size, seed=8))[0]], EXACT[split_k])
    stacked = Linear.stack([linear, idle, other])
    rows, bounds = np.array([4, 0, 1, 0]), np.array([0, 1, 1, 4])
    both = stacked(x, rows=rows, bounds=bounds)
    assert torch.allclose(both[:1], linear(x[4:]), rtol=1e-4, atol=1e-5)
    assert torch.allclose(both[1:], other(x[[0, 1, 0]]), rtol=1e-4, atol=1e-5)
    sorted_already = stacked(x[rows], bounds=bounds)
    assert torch.allclose(both, sorted_already, atol=1e-5)


@pytest.mark.parametrize("format", list(WeightFormat))
@pytest.mark.parametrize("split_k", [1, 2])
def test_products_are_rounded_to_bf16_once(format, split_k):
    weight, _ = weight_of(format, random(40, 320, seed=1, scale=0.1))
    x = random(5, 320)
    exact = Linear.of([weight], EXACT[split_k])(x)
    rounded = Linear.of([weight], Precision(split_k=split_k))(x)
    assert torch.equal(rounded, exact.bfloat16().float())


@pytest.mark.parametrize(
    ("format", "activation_format"),
    [
        (WeightFormat.FP8_BLOCK, ActivationFormat.FP8),
        (WeightFormat.NVFP4, ActivationFormat.NVFP4),
    ],
)
@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("size", [96, 320])
def test_products_with_quantized_activations(format, activation_format, split_k, size):
    weight, full = weight_of(format, random(40, size, seed=1, scale=0.1))
    precision = Precision(split_k=split_k, activation_format=activation_format, exact=True)
    linear = Linear.of([weight], precision)
    x = random(7, size) * torch.logspace(-3, 2, 7).unsqueeze(-1)
    x[3] = 0
    if format == WeightFormat.FP8_BLOCK:
        values, scale = quantize_fp8(x)
        meant = values.double() * scale.double().repeat_interleave(128, 1)[:, :size]
        assert set(values.flatten().tolist()) <= set(E4M3)
        bound = 2.0**-4  # three mantissa bits
    else:
        values, scale = quantize_nvfp4(x)
        meant = values.double() * scale.double()
        bound = 0.2  # one mantissa bit, and the block scale's rounding
    peak = x.abs().amax(-1, keepdim=True)
    assert ((meant - x).abs() <= bound * peak + 1e-12).all()
    assert ((meant - x).abs() > 0).float().mean() > 0.3
    expected = meant @ full.T
    error = (linear(x) - expected).abs().amax(-1)
    assert (error <= 1e-5 * expected.abs().amax(-1) + 1e-12).all()
    rows, bounds = np.array([2, 6, 2]), np.array([0, 1, 3])
    stacked = Linear.stack([linear, linear])(x, rows=rows, bounds=bounds)
    assert torch.allclose(stacked, linear(x[rows]), rtol=1e-5, atol=1e-6)


def test_nvfp4_activations_use_a_scale_per_block_of_sixteen():
    x = torch.ones(1, 32)
    x[0, :16] = 600
    values, scale = quantize_nvfp4(x)
    assert torch.allclose(values * scale, x, rtol=0.07)
    strided = random(3, 32, 5)
    for kind in (quantize_fp8, quantize_nvfp4):
        found = kind(strided.transpose(1, 2))
        for i in range(3):
            alone = kind(strided[i].T.contiguous())
            assert all(torch.equal(a[i], b) for a, b in zip(found, alone, strict=True))


def test_split_k_moves_a_few_results_to_the_next_bf16_value():
    weight = weight_of(WeightFormat.BF16, random(256, 512, seed=1))[0]
    x = random(128, 512)
    once, split = (
        Linear.of([weight], Precision(split_k=split_k))(x).bfloat16().view(torch.int16).int()
        for split_k in (1, 4)
    )
    steps = (once - split).abs()
    assert steps.max() == 1
    assert 0 < (steps > 0).float().mean() < 1e-2


def test_split_k_must_divide_and_formats_must_match():
    weight = weight_of(WeightFormat.BF16, random(8, 96))[0]
    with pytest.raises(BadInputError, match="divisor of 96"):
        Linear.of([weight], Precision(split_k=5))
    other = weight_of(WeightFormat.FP8_BLOCK, random(8, 96))[0]
    with pytest.raises(BadInputError, match="one format"):
        Linear.of([weight, other], Precision())
    with pytest.raises(BadInputError, match="split_k"):
        Precision(split_k=0)


def test_fp8_cache_gives_back_every_value():
    cache = KvCache(
        num_layers=1,
        num_slots=2,
        num_kv_heads=1,
        max_context=4,
        head_dim=len(E4M3),
        precision=Precision(kv_format=KvFormat.FP8),
    )
    for value in (torch.tensor(E4M3), torch.full((len(E4M3),), -448.0)):
        cache.data[0, 3, 0, 2] = value.to(torch.float8_e4m3fn)
        keys, values = cache.read(0, 1, 3)
        assert values[0, 2].tolist() == value.tolist()
        assert not values[0, :2].any()
        assert not keys.any()
    cache.data[0, 1, 0, 1] = float("nan")
    assert cache.read(0, 1, 3)[0, 0, 1].isnan().all()


def test_an_nvfp4_cache_holds_blocks_of_16_with_a_scale_each():
    """Held against the decoder of packed weights: the same codes and scales by another way."""
    size, heads, num = 32, 2, 3
    cache = KvCache(
        num_layers=1,
        num_slots=2,
        num_kv_heads=heads,
        max_context=num,
        head_dim=size,
        precision=Precision(kv_format=KvFormat.NVFP4),
    )
    qkv = random(num, 1 + 2 * heads, size) * 10 ** random(num, 1 + 2 * heads, 1)
    qkv = qkv.bfloat16().float()
    still = np.stack([np.ones((num, size // 2)), np.zeros((num, size // 2))]).astype(np.float32)
    kernels.rotate_and_store(
        qkv.numpy(),
        np.empty((0, size), np.float32),
        still,
        np.float32(1e-6),
        False,
        np.stack([np.zeros(num, np.int64), np.arange(num)]),
        cache.stored_as,
        cache.layers[0],
        np.empty((num, 1, size), np.float32),
    )
    stored = cache.read(0, 0, num)
    given = qkv[:, 1:].unflatten(1, (2, heads)).permute(1, 2, 0, 3)
    blocks = given.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (blocks.abs().unsqueeze(-1) / scale.unsqueeze(-1) - table).abs().argmin(-1)
    expected = (table[nearest] * blocks.sign() * scale).flatten(-2)
    wrong = (stored != expected).float().mean()
    assert wrong < 0.02  # values halfway between two codes
    assert (stored - given).abs().max() <= given.abs().max() / 5
    assert (stored != given).any()


def test_an_nvfp4_cache_needs_whole_blocks():
    with pytest.raises(BadInputError, match="multiple of 16"):
        KvCache(
            num_layers=1,
            num_slots=1,
            num_kv_heads=1,
            max_context=1,
            head_dim=24,
            precision=Precision(kv_format=KvFormat.NVFP4),
        )
