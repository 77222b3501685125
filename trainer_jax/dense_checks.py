"""What the dense entry of the loss refuses.

Owns the shapes and values that `loss.objective_from_logits` may be handed. Must not repeat a rule
of a token's record: `trainer_jax.records` has them. Looks at values only where they are concrete,
so that the entry can be traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from contracts.errors import BadInputError
from trainer_jax.inputs import is_concrete
from trainer_jax.records import RecordRules, check_padded

if TYPE_CHECKING:
    from trainer_jax.loss import SamplerRecord


def check_dense(
    logits_TxV: jax.Array, sampled_T: jax.Array, record: SamplerRecord, *, replay: bool
) -> None:
    """Refuses what the loss cannot use. `record.mask_T` may still be numbers.

    Raises:
        BadInputError: shapes that disagree, no token, no vocabulary; of concrete arrays also what
            `records.check_padded` refuses, a mask beyond 0 and 1, and in trained rows an advantage
            that is not finite, a logit that is NaN or +inf, nothing but -inf (which bans a token).
    """
    _check_shapes(logits_TxV, sampled_T, record)
    if is_concrete(sampled_T, record):
        _check_record(np.asarray(sampled_T), record, logits_TxV.shape[1], replay)
    if is_concrete(logits_TxV, record):
        _check_logits(np.asarray(logits_TxV), record, replay)


def _check_shapes(logits_TxV: jax.Array, sampled_T: jax.Array, record: SamplerRecord) -> None:
    if logits_TxV.ndim != 2 or not logits_TxV.size:
        raise BadInputError(
            "logits_TxV", expected="[T, V] with a token and a vocabulary", found=logits_TxV.shape
        )
    shapes = {
        "sampled_T": (sampled_T, 1),
        "candidate_ids_TxK": (record.candidate_ids_TxK, 2),
        "candidate_sampler_logp_TxK": (record.candidate_sampler_logp_TxK, 2),
        "sampler_logp_T": (record.sampler_logp_T, 1),
        "advantage_T": (record.advantage_T, 1),
        "mask_T": (record.mask_T, 1),
    }
    for name, (array, ndim) in shapes.items():
        if array.ndim != ndim or array.shape[0] != logits_TxV.shape[0]:
            raise BadInputError(
                name, expected=f"{ndim}-d, of {logits_TxV.shape[0]} tokens", found=array.shape
            )
    if record.candidate_sampler_logp_TxK.shape != record.candidate_ids_TxK.shape:
        raise BadInputError(
            "candidate_sampler_logp_TxK",
            expected=f"the shape of the ids {record.candidate_ids_TxK.shape}",
            found=record.candidate_sampler_logp_TxK.shape,
        )


def _check_record(sampled_T: np.ndarray, record: SamplerRecord, V: int, replay: bool) -> None:
    mask_T, ids_TxK = np.asarray(record.mask_T), np.asarray(record.candidate_ids_TxK)
    _refuse("mask_T", "0 or 1", (mask_T != 0) & (mask_T != 1), mask_T)
    rules = RecordRules(
        group_names=(), vocab_size=V, replay=replay, max_candidates=ids_TxK.shape[1]
    )
    check_padded(
        sampled_T,
        ids_TxK,
        np.asarray(record.candidate_sampler_logp_TxK),
        np.asarray(record.sampler_logp_T),
        mask_T,
        rules,
    )
    advantage_T = np.asarray(record.advantage_T)
    is_bad_T = ~np.isfinite(advantage_T) & (mask_T != 0)
    _refuse("advantage_T", "finite advantages", is_bad_T, advantage_T)


def _check_logits(logits_TxV: np.ndarray, record: SamplerRecord, replay: bool) -> None:
    is_trained_T, ids_TxK = np.asarray(record.mask_T) != 0, np.asarray(record.candidate_ids_TxK)
    top_T = logits_TxV.astype(np.float64).max(1)  # NaN where a row has one
    is_bad_T = np.isnan(top_T) | (top_T == np.inf)
    _refuse("logits_TxV", "no NaN and no +inf", is_bad_T & is_trained_T, top_T)
    if replay:
        known_TxK = np.where(is_trained_T[:, None], np.maximum(ids_TxK, 0), 0)
        picked_TxK = np.take_along_axis(logits_TxV, known_TxK, axis=1)
        top_T = np.where(ids_TxK >= 0, picked_TxK, -np.inf).max(1, initial=-np.inf)
    is_bad_T = np.isneginf(top_T)
    _refuse("logits_TxV", "a token that is not banned (-inf)", is_bad_T & is_trained_T, top_T)


def _refuse(name: str, rule: str, bad_T: np.ndarray, values_T: np.ndarray) -> None:
    if bad_T.any():
        t = int(np.argmax(bad_T))
        raise BadInputError(name, expected=rule, found=f"{values_T[t]} at token {t}")
