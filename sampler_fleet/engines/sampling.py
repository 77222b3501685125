"""Drawing tokens, and the record of the distribution they were really drawn from.

Owns temperature, top-k and top-p, the random numbers and the candidate sets. Pure: the same
logits, parameters and uniforms give the same tokens.

Top-k and top-p cut jointly, on the distribution after temperature: sorted by probability, a token
stays if its rank is below top_k and the mass before it is at most top_p, so the token that
crosses the bound stays. What stays is renormalized; that is the recorded distribution.

Shape letters: B sequences, V vocabulary, C candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numba import njit
from torch import Tensor

from contracts.types import SamplingParams
from sampler_fleet.engines.kernels import exp

_compiled = functools.partial(njit, nogil=True, cache=True, error_model="numpy")()
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One token per sequence with its record; row b has counts[b] candidates, best first."""

    tokens_B: np.ndarray  # int32
    logp_B: np.ndarray  # float32
    counts_B: np.ndarray  # int64
    ids_BxC: np.ndarray  # int32
    logp_BxC: np.ndarray  # float32


def stream_seed(request_seed: int, session_id: str, engine_seed: int) -> int:
    """The seed of a request's random numbers, 64 bits.

    A request's own seed alone decides, so that two engines draw alike. Seed 0 means none was
    chosen: then engine and session decide, so that sessions with equal prompts differ.
    """
    if request_seed:
        return xxhash.xxh3_64_intdigest(request_seed.to_bytes(16, "little", signed=True))
    return xxhash.xxh3_64_intdigest(session_id.encode(), seed=engine_seed % 2**64)


def uniforms(seeds_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from stream seeds and buffer positions (splitmix64, counter mode).

    No state: the token at a position depends on the seed and the buffer only, not on the batch.
    """
    x = seeds_B + (positions_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def draw(logits_BxV: Tensor, params: Sequence[SamplingParams], uniform_B: np.ndarray) -> Draw:
    """Draws one token per row by inverting the cumulative distribution at `uniform_B`."""
    temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float32)
    z = logits_BxV / temperature
    truncates = np.array([p.truncates for p in params])
    if truncates.all():
        return _draw_truncated(z, params, uniform_B)
    if not truncates.any():
        return _draw_full(z, params, uniform_B)
    rows = [np.flatnonzero(truncates), np.flatnonzero(~truncates)]
    parts = [
        kind(z[torch.from_numpy(here)], [params[i] for i in here.tolist()], uniform_B[here])
        for kind, here in zip((_draw_truncated, _draw_full), rows, strict=True)
    ]
    width = max(part.ids_BxC.shape[1] for part in parts)
    place = np.argsort(np.concatenate(rows))
    join = lambda name: np.concatenate([getattr(part, name) for part in parts])[place]  # noqa: E731
    pad = lambda name: np.concatenate(  # noqa: E731
        [_widen(getattr(part, name), width) for part in parts]
    )[place]
    return Draw(
        tokens_B=join("tokens_B"),
        logp_B=join("logp_B"),
        counts_B=join("counts_B"),
        ids_BxC=pad("ids_BxC"),
        logp_BxC=pad("logp_BxC"),
    )


def _widen(array: np.ndarray, width: int) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


def _invert(weights_BxC: Tensor, uniform_B: np.ndarray) -> Tensor:
    """int64 [B]: the first column whose cumulative weight exceeds the uniform share of the sum."""
    cumulative = weights_BxC.double().cumsum(-1)
    target = torch.from_numpy(uniform_B).unsqueeze(-1) * cumulative[:, -1:]
    column = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # a product that rounds up to the whole sum lands past the end; take the last with weight
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).squeeze(-1)
    return torch.minimum(column, last)


def _draw_truncated(z_BxV: Tensor, params: Sequence[SamplingParams], uniform_B) -> Draw:
    num, size = z_BxV.shape
    # limits that are off must not cut: cumulative sums may exceed 1 by rounding
    top_k = np.array([min(p.top_k or size, size) for p in params])
    top_p = np.array([p.top_p if p.top_p < 1 else 2.0 for p in params])
    ids_BxC = np.zeros((num, int(top_k.max())), np.int32)
    logp_BxC = np.zeros(ids_BxC.shape, np.float32)
    counts, columns = np.empty(num, np.int64), np.empty(num, np.int64)
    _truncate(z_BxV.numpy(), top_k, top_p, uniform_B, ids_BxC, logp_BxC, counts, columns)
    rows, most = np.arange(num), int(counts.max())
    return Draw(
        tokens_B=ids_BxC[rows, columns],
        logp_B=logp_BxC[rows, columns],
        counts_B=counts,
        ids_BxC=ids_BxC[:, :most],
        logp_BxC=logp_BxC[:, :most],
    )


@_compiled
def _truncate(z_BxV, top_k, top_p, uniform_B, ids_BxC, logp_BxC, counts_B, columns_B):
    """Writes each row's candidates, best first, their number, and the place of the one drawn."""
    size = z_BxV.shape[1]
    weights = np.empty(size, np.float32)
    for row in range(len(z_BxV)):
        z, logp = z_BxV[row], logp_BxC[row]
        best = _best(z, top_k[row])
        largest = z[best[0]]
        for i in range(size):
            weights[i] = exp(np.float32(z[i] - largest))
        total, before, count = float(weights.sum()), 0.0, 0
        while count < top_k[row] and before <= top_p[row]:
            before += weights[best[count]] / total
            count += 1
        kept = 0.0
        for c in range(count):
            ids_BxC[row, c] = best[c]
            kept += weights[best[c]]
        for c in range(count):
            logp[c] = z[best[c]] - largest - np.log(kept)
        # a product that rounds up to the whole sum stays below its last candidate with weight
        target, reached, column = uniform_B[row] * kept, 0.0, 0
        for c in range(count):
            weight = weights[best[c]]
            if weight > 0 and reached <= target:
                column = c
            reached += weight
        counts_B[row], columns_B[row] = count, column


@_compiled
def _best(z_V, num):
    """The `num` largest, best first, of equal ones the first; int64 [num]."""
    size = len(z_V)
    least = np.float32(-np.inf)
    if num < size:
        # halve the range of a bound that `num` pass, until few more do or no number is between
        low, high, passing = z_V.min(), z_V.max(), size
        while passing > num + 16:
            middle = np.float32(low + np.float32(high - low) * np.float32(0.5))
            if not low < middle < high:
                break
            above = 0
            for i in range(size):
                above += z_V[i] >= middle
            if above >= num:
                low, passing = middle, above
            else:
                high = middle
        least = low
    passed = np.empty(size, np.int64)
    count = 0
    for i in range(size):
        passed[count] = i
        count += not z_V[i] < least  # where nothing is a number, everything passes
    passed = passed[:count]
    return passed[np.argsort(-z_V[passed], kind="mergesort")][:num]


def _draw_full(z_BxV: Tensor, params: Sequence[SamplingParams], uniform_B) -> Draw:
    logp_BxV = z_BxV.log_softmax(-1)
    tokens = _invert(logp_BxV.exp(), uniform_B).unsqueeze(-1)
    counts = [min(p.num_candidates, z_BxV.shape[1]) for p in params]
    logp_BxC, ids_BxC = logp_BxV.topk(max(counts))
    return Draw(
        tokens_B=tokens.squeeze(-1).int().numpy(),
        logp_B=logp_BxV.gather(1, tokens).squeeze(-1).numpy(),
        counts_B=np.array(counts),
        ids_BxC=ids_BxC.int().numpy(),
        logp_BxC=logp_BxC.numpy(),
    )
