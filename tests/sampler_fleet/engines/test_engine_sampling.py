"""The recorded distribution is the one drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contracts.types import SamplingParams
from sampler_fleet.engines.sampling import draw, stream_seed, uniforms

V = 50
LOGITS = torch.randn(1, V, generator=torch.Generator().manual_seed(0)) * 2


def chi_square(counts, probs):
    """Pearson's statistic in standard deviations above its mean; bins of at least 5 expected."""
    expected = probs * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def support_slow(logits, params):
    """Joint top-k and top-p in float64, token by token: ids and normalized probabilities."""
    z = logits.double().numpy() / params.temperature
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    kept, before = [], 0.0
    for rank, token in enumerate(np.argsort(-p, kind="stable")):
        if (params.top_k and rank >= params.top_k) or before > params.top_p:
            break
        kept.append(int(token))
        before += p[token]
    return kept, p[kept] / p[kept].sum()


CASES = [
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.97, top_k=64),
    SamplingParams(top_p=0.8, top_k=12, temperature=0.7),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_k=1, temperature=2.0),
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_a_truncated_set_is_the_whole_support(params):
    ids, probs = support_slow(LOGITS[0], params)
    drawn = draw(LOGITS, [params], np.array([0.5]))
    count = int(drawn.counts_B[0])
    assert drawn.ids_BxC[0, :count].tolist() == ids
    np.testing.assert_allclose(np.exp(drawn.logp_BxC[0, :count]), probs, rtol=1e-5)
    assert abs(np.exp(drawn.logp_BxC[0, :count].astype(np.float64)).sum() - 1) < 1e-5
    place = ids.index(drawn.tokens_B[0])
    assert drawn.logp_B[0] == drawn.logp_BxC[0, place]


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 40.0])
@pytest.mark.parametrize("top_k", [0, 1, 64, 1999])
def test_of_equally_likely_tokens_the_first_are_kept(spread, top_k):
    """Logits that collide in bfloat16, a vocabulary much larger than the set."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(3, 2000, generator=generator) * spread).bfloat16().float()
    logits[1, 7] = -torch.inf
    params = SamplingParams(top_p=0.98, top_k=top_k)
    drawn = draw(logits, [params] * 3, np.array([0.0, 0.5, 0.999]))
    for row in range(3):
        ids, probs = support_slow(logits[row], params)
        found = drawn.ids_BxC[row, : drawn.counts_B[row]].tolist()
        # one more or less where the mass before it is at the bound but for rounding
        common = min(len(ids), len(found))
        assert found[:common] == ids[:common]
        assert abs(len(found) - len(ids)) <= 1
        logp = drawn.logp_BxC[row, :common]
        np.testing.assert_allclose(np.exp(logp), probs[:common], rtol=2e-3)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9, top_k=12),
        SamplingParams(temperature=1.5, top_k=20),
        SamplingParams(temperature=0.8),
    ],
    ids=str,
)
def test_frequencies_match_the_record(params):
    num = 20_000
    uniform = uniforms(np.full(num, 7, np.uint64), np.arange(num))
    drawn = draw(LOGITS.expand(num, V), [params] * num, uniform)
    counts = np.bincount(drawn.tokens_B, minlength=V)
    ids, kept = support_slow(LOGITS[0], params)
    probs = np.zeros(V)
    probs[ids] = kept
    assert abs(chi_square(counts, probs)) < 4
    assert counts[probs == 0].sum() == 0
    np.testing.assert_allclose(drawn.logp_B, np.log(probs[drawn.tokens_B]), atol=1e-4)
    # the plain softmax, or another temperature, would not pass for the distribution drawn from
    wrong = np.exp(LOGITS[0].double().log_softmax(-1).numpy())
    assert chi_square(counts, wrong) > 20


def test_without_truncation_the_top_candidates_are_recorded_and_others_can_be_drawn():
    params = SamplingParams(num_candidates=4, temperature=1.5)
    logp = (LOGITS[0] / 1.5).log_softmax(-1)
    num = 200
    drawn = draw(LOGITS.expand(num, V), [params] * num, np.arange(num) / num)
    assert (drawn.counts_B == 4).all()
    assert drawn.ids_BxC[0].tolist() == logp.topk(4).indices.tolist()
    np.testing.assert_allclose(drawn.logp_B, logp[drawn.tokens_B].numpy(), atol=1e-6)
    outside = ~(drawn.tokens_B[:, None] == drawn.ids_BxC).any(1)
    assert outside.any()
    assert not outside.all()
    everything = draw(LOGITS, [SamplingParams(num_candidates=10**6)], np.array([0.1]))
    assert everything.counts_B[0] == V


def test_a_mixed_batch_equals_its_rows_alone():
    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(1))
    params = [*CASES, SamplingParams(num_candidates=40), SamplingParams(temperature=0.5)]
    uniform = np.linspace(0.05, 0.95, 8)
    together = draw(logits, params, uniform)
    for row in range(8):
        alone = draw(logits[row : row + 1], [params[row]], uniform[row : row + 1])
        count = alone.counts_B[0]
        assert together.tokens_B[row] == alone.tokens_B[0]
        assert together.counts_B[row] == count
        np.testing.assert_allclose(together.logp_B[row], alone.logp_B[0], atol=1e-6)
        assert (together.ids_BxC[row, :count] == alone.ids_BxC[0, :count]).all()
        np.testing.assert_allclose(
            together.logp_BxC[row, :count], alone.logp_BxC[0, :count], atol=1e-6
        )


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=10)], ids=str)
def test_the_ends_of_the_unit_interval_draw_tokens_with_mass(params):
    logits = torch.full((2, V), -torch.inf)
    logits[:, 10:13] = torch.tensor([0.0, 1.0, -300.0])
    drawn = draw(logits, [params] * 2, np.array([0.0, 1 - 2.0**-53]))
    assert set(drawn.tokens_B.tolist()) <= {10, 11}
    assert drawn.tokens_B[0] != drawn.tokens_B[1]


def test_uniforms_are_reproducible_independent_and_uniform():
    seeds = np.array([stream_seed(seed, "", 0) for seed in range(1, 201)], np.uint64)
    u = np.stack([uniforms(seeds, np.full(200, position)) for position in range(100)])
    assert (u[3] == uniforms(seeds, np.full(200, 3))).all()
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert abs(chi_square(counts, np.full(50, 0.02))) < 4
    noise = 4 / np.sqrt(u.size)
    assert abs(np.corrcoef(u[1:].ravel(), u[:-1].ravel())[0, 1]) < noise
    assert abs(np.corrcoef(u[:, 1:].ravel(), u[:, :-1].ravel())[0, 1]) < noise


def test_requests_without_a_seed_differ_by_session_and_engine():
    assert stream_seed(5, "a", 0) == stream_seed(5, "b", 1)
    assert stream_seed(0, "a", 0) != stream_seed(0, "b", 0)
    assert stream_seed(0, "a", 0) != stream_seed(0, "a", 1)
    assert stream_seed(-1, "a", 0) != stream_seed(1, "a", 0)
