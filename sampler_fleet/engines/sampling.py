"""Drawing tokens, and the record of the distribution they were really drawn from.

Owns temperature, top-k and top-p, the random numbers and the candidate sets. Pure: the same
logits, parameters and uniforms give the same tokens.

Top-k and top-p cut jointly, on the distribution after temperature: sorted by probability, a token
stays if its rank is below top_k and the mass before it is at most top_p, so the token that
crosses the bound stays. What stays is renormalized; that is the recorded distribution.

Shape letters: B sequences, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from contracts.types import SamplingParams

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
    size = z_BxV.shape[1]
    # limits that are off must not cut: cumulative sums may exceed 1 by rounding
    top_k = [p.top_k or size for p in params]
    top_p = [p.top_p if p.top_p < 1 else 2.0 for p in params]
    z_BxC, ids_BxC = z_BxV.topk(min(size, max(top_k)))
    p_BxC = (z_BxC - z_BxV.logsumexp(-1, keepdim=True)).exp().double()
    before = p_BxC.cumsum(-1) - p_BxC
    width = z_BxC.shape[1]
    keep = before <= torch.tensor(top_p, dtype=torch.float64).unsqueeze(-1)
    keep &= torch.arange(width) < torch.tensor(top_k).unsqueeze(-1)
    z_BxC = z_BxC.masked_fill(~keep, -torch.inf)
    logp_BxC = z_BxC.log_softmax(-1)
    column = _invert(logp_BxC.exp(), uniform_B).unsqueeze(-1)
    counts = keep.sum(-1)  # what stays is a prefix: both limits are monotone in the rank
    most = int(counts.max())
    return Draw(
        tokens_B=ids_BxC.gather(1, column).squeeze(-1).int().numpy(),
        logp_B=logp_BxC.gather(1, column).squeeze(-1).numpy(),
        counts_B=counts.numpy(),
        ids_BxC=ids_BxC[:, :most].int().numpy(),
        logp_BxC=logp_BxC[:, :most].contiguous().numpy(),
    )


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
