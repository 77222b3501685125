"""The corrected loss in PyTorch: the peer of `trainer_jax.loss`, default arm (sc+mis).

Owns the same maths from logits that PyTorch has already computed, dense as its users compute them.
Must not use trainer_jax: gradients of both are compared before anything is timed.

Shape letters: T tokens, K candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

BAND = (0.2, 5.0)
TAIL_FLOOR = 1e-6


class TorchRecord(NamedTuple):
    """What the samplers said; candidate id -1 is padding. Every token is trained."""

    ids_TxK: torch.Tensor
    candidate_sampler_logp_TxK: torch.Tensor
    sampled_T: torch.Tensor
    sampler_logp_T: torch.Tensor
    advantage_T: torch.Tensor

    def part(self, start: int, end: int) -> TorchRecord:
        return TorchRecord(*(x[start:end] for x in self))


def corrected_objective(
    logits_TxV: torch.Tensor, record: TorchRecord, *, replay: bool
) -> torch.Tensor:
    """Sum over tokens, to be maximized: A [w log p(a) - sum_K c log p], [0.2, 5] and centered."""
    valid_TxK = record.ids_TxK >= 0
    ids_TxK = record.ids_TxK.clamp(min=0)
    if replay:  # as cheap as dense logits allow: log-softmax over the candidates alone
        picked_TxK = logits_TxV.gather(1, ids_TxK).masked_fill(~valid_TxK, -torch.inf)
        logp_TxK = picked_TxK.log_softmax(1).masked_fill(~valid_TxK, 0.0)
        is_drawn_TxK = (record.ids_TxK == record.sampled_T[:, None]) & valid_TxK
        logp_T = (logp_TxK * is_drawn_TxK).sum(1)
    else:
        asked = torch.cat([ids_TxK, record.sampled_T[:, None]], dim=1)
        logp = logits_TxV.log_softmax(1).gather(1, asked)
        logp_TxK, logp_T = logp[:, :-1].masked_fill(~valid_TxK, 0.0), logp[:, -1]
    with torch.no_grad():
        weight_T, centering_TxK = _coefficients(logp_TxK, logp_T, valid_TxK, record, replay=replay)
    objective_T = weight_T * logp_T - (centering_TxK * logp_TxK).sum(1)
    return (record.advantage_T * objective_T).sum()


def _coefficients(logp_TxK, logp_T, valid_TxK, record: TorchRecord, *, replay: bool):
    low, high = np.log(BAND)

    def inside(log_ratio: torch.Tensor) -> torch.Tensor:
        return (low <= log_ratio) & (log_ratio <= high)

    p_TxK = torch.where(valid_TxK, logp_TxK.exp(), 0.0)
    log_ratio_TxK = torch.where(valid_TxK, logp_TxK - record.candidate_sampler_logp_TxK, 0.0)
    kept_TxK = inside(log_ratio_TxK).float()
    log_ratio_T = logp_T - record.sampler_logp_T
    kept_T = inside(log_ratio_T)
    weight_T = torch.where(kept_T, torch.where(kept_T, log_ratio_T, 0.0).exp(), 0.0)
    if not replay:
        q_tail_T = (1 - record.candidate_sampler_logp_TxK.exp().sum(1)).clamp(min=0)
        p_tail_T = (1 - p_TxK.sum(1)).clamp(min=0)
        rho_T = q_tail_T / p_tail_T.clamp(min=TAIL_FLOOR)
        kept_TxK = kept_TxK - inside(-rho_T.log()).float()[:, None]
    return weight_T, p_TxK * kept_TxK
