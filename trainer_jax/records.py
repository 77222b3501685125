"""Whether a trajectory's record can be trained on.

Owns the last check before records become arrays of a batch: what passes here cannot be wrong
without the loss noticing. Must not repair anything: a record is used as it is or refused, with its
sampler and trajectory named. The rules of a token's record serve `check_padded` as well, for
callers that hand the loss arrays instead of trajectories.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from contracts.errors import BadInputError
from contracts.routed import check_routed
from contracts.types import CandidateSets, Trajectory
from trainer_jax.models.config import ModelConfig

# Log-probs are float32 of a float32 softmax: what is beyond these is not rounding.
LOGP_TOLERANCE = 1e-3
MASS_TOLERANCE = 1e-2

_Rules = tuple[tuple[str, np.ndarray, np.ndarray], ...]  # rule, where it is broken, what is there


class RoutingRules(NamedTuple):
    """What the routed experts of a run's records must be."""

    num_layers: int
    num_per_token: int
    num_experts: int

    @staticmethod
    def of(model: ModelConfig) -> RoutingRules:
        """Raises BadInputError for a model that routes nothing."""
        if not model.num_experts:
            raise BadInputError(
                "run file, sampling.return_routed_experts",
                expected="a mixture of experts, whose routing is replayed",
                found=f"a {model.model_type}",
            )
        return RoutingRules(model.num_hidden_layers, model.num_experts_per_tok, model.num_experts)


@dataclass(frozen=True, kw_only=True)
class RecordRules:
    """What every record of a run must satisfy."""

    group_names: tuple[str, ...]
    vocab_size: int
    replay: bool  # sets are whole supports and hold the token drawn
    max_candidates: int
    # sampler_logp is the set's own log-prob of the token drawn, if the set has it; False only for a
    # tool that looks for records that contradict themselves
    consistent: bool = True
    routing: RoutingRules | None = None  # None: routed experts are not looked at


class _Sampled(NamedTuple):
    """Sampled tokens with their records."""

    tokens: np.ndarray  # int [T]
    logp: np.ndarray  # [T]
    sets: CandidateSets  # T sets


class _Fault(NamedTuple):
    rule: str
    token: int  # index of the sampled token
    found: object


def describe(trajectory: Trajectory) -> str:
    """The trajectory and its samplers, for an error."""
    samplers = ", ".join(trajectory.sampler_ids) or "unknown"
    return (
        f"record of trajectory {trajectory.session_id} (task {trajectory.task_id}) from sampler "
        f"{samplers} of group {trajectory.group}"
    )


def check_trajectory(trajectory: Trajectory, rules: RecordRules) -> None:
    """Refuses a record the loss cannot use.

    Raises:
        BadInputError: a reward that is not finite, an unknown group, arrays of another kind,
            lengths or offsets that disagree, versions below 1, ids beyond the vocabulary, a trained
            token without context, log-probs not finite or above 0, candidate sets beyond the cap or
            with an id twice, sets with more than all the mass, another log-prob for the token drawn
            than its set has; under replay also a set without the token drawn, or with less than
            all the mass; where routing is replayed no routed experts, of another shape or beyond
            the model's, or of positions out of order.
    """
    check_reward(trajectory)
    subject = describe(trajectory)
    if trajectory.group not in rules.group_names:
        raise BadInputError(
            subject, expected=f"a group of {list(rules.group_names)}", found=repr(trajectory.group)
        )
    _check_kinds(trajectory, subject)
    _check_lengths(trajectory, subject)
    beyond = np.flatnonzero(_beyond(trajectory.tokens, rules.vocab_size))  # given ones as well
    if len(beyond):
        raise BadInputError(
            subject,
            expected="tokens in the vocabulary",
            found=f"{trajectory.tokens[beyond[0]]} at position {beyond[0]}",
        )
    tokens = trajectory.tokens[trajectory.loss_mask]
    sampled = _Sampled(tokens, trajectory.sampler_logp, trajectory.candidates)
    for fault in _faults(sampled, rules):
        raise BadInputError(
            subject, expected=fault.rule, found=f"{fault.found} at sampled token {fault.token}"
        )
    if rules.routing:
        _check_routing(trajectory, rules.routing, subject)


def _check_routing(trajectory: Trajectory, routing: RoutingRules, subject: str) -> None:
    num_layers, num_per_token, num_experts = routing
    if not trajectory.routed_experts:
        raise BadInputError(
            subject, expected="routed experts (sampling.return_routed_experts)", found="none"
        )
    before = 0
    for part in trajectory.routed_experts:
        check_routed(part, subject, None)
        if part.ids.shape[1:] != (num_layers, num_per_token) or part.ids.max() >= num_experts:
            raise BadInputError(
                subject,
                expected=f"routed experts of {num_layers} layers, {num_per_token} of "
                f"{num_experts} each",
                found=f"{part.ids.shape[1]} layers, {part.ids.shape[2]} ids up to {part.ids.max()}",
            )
        if part.start < before or part.end >= len(trajectory.tokens):
            raise BadInputError(
                subject,
                expected=f"routed experts of tokens from {before} to {len(trajectory.tokens) - 1}",
                found=f"of {part.start} to {part.end}",
            )
        before = part.end


def check_reward(trajectory: Trajectory) -> None:
    """Refuses a reward that is no finite number; None (a failure of ours) passes."""
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise BadInputError(
            describe(trajectory), expected="a finite reward", found=trajectory.reward
        )


def check_padded(
    sampled_T: np.ndarray,
    candidate_ids_TxK: np.ndarray,
    candidate_sampler_logp_TxK: np.ndarray,
    sampler_logp_T: np.ndarray,
    mask_T: np.ndarray,
    rules: RecordRules,
) -> None:
    """The rules of a token's record for arrays padded with id -1 and log-prob -inf, where `mask_T`.

    Raises:
        BadInputError: as `check_trajectory`, naming the row; padding with another id or log-prob.
    """
    rows = np.flatnonzero(mask_T)
    tokens, ids, logp = sampled_T[rows], candidate_ids_TxK[rows], candidate_sampler_logp_TxK[rows]
    is_padding = ids < 0
    sets = CandidateSets.from_counts((~is_padding).sum(1), ids[~is_padding], logp[~is_padding])
    own_rules: _Rules = (
        ("sampled token in the vocabulary", _beyond(tokens, rules.vocab_size), tokens),
        ("candidate ids in the vocabulary, -1 at padding", np.any(ids < -1, axis=1), ids),
        ("log-prob -inf at padding", np.any(is_padding & ~np.isneginf(logp), axis=1), logp),
    )
    sampled = _Sampled(tokens, sampler_logp_T[rows], sets)
    for fault in itertools.chain(_broken(own_rules), _faults(sampled, rules)):
        raise BadInputError(
            f"record of token {rows[fault.token]}", expected=fault.rule, found=fault.found
        )


def _faults(sampled: _Sampled, rules: RecordRules) -> Iterator[_Fault]:
    """What breaks the rules, the most basic first: a later rule may assume an earlier one."""
    tokens, logp, sets = sampled
    owner = np.repeat(np.arange(len(tokens)), sets.counts)
    most = f"at most {rules.max_candidates} candidates (train.candidate_buckets)"
    yield from _broken(
        (
            ("candidate ids in the vocabulary", _beyond(sets.ids, rules.vocab_size), sets.ids),
            ("candidate log-probs finite and <= 0", _not_logp(sets.logp), sets.logp),
        ),
        owner,
    )
    yield from _broken(
        (
            ("sampler_logp finite and <= 0", _not_logp(logp), logp),
            (most, sets.counts > rules.max_candidates, sets.counts),
        )
    )
    keys = np.sort(owner * np.int64(rules.vocab_size) + sets.ids)
    for twice in keys[1:][keys[1:] == keys[:-1]]:
        token, found = divmod(int(twice), rules.vocab_size)
        yield _Fault("candidate ids once", token, found)
    mass = np.bincount(owner, np.exp(sets.logp.astype(np.float64)), minlength=len(tokens))
    yield from _broken((("candidate mass <= 1", mass > 1 + MASS_TOLERANCE, mass),))
    own_logp = np.full(len(tokens), np.nan)
    hit = sets.ids == tokens[owner]
    own_logp[owner[hit]] = sets.logp[hit]
    if rules.replay:
        yield from _broken(_support(tokens, own_logp, mass))
    if rules.consistent:
        differs = np.abs(own_logp - logp) > LOGP_TOLERANCE  # never where the set lacks the token
        yield from _broken(
            (("sampler_logp equal to the set's log-prob of the token drawn", differs, logp),)
        )


def _support(tokens: np.ndarray, own_logp: np.ndarray, mass: np.ndarray) -> _Rules:
    whole = (
        "a set that holds all of the sampler's mass (log-probs after truncation, loss.replay only "
        "where sampling truncates)"
    )
    return (
        ("the token drawn in its replayed set", np.isnan(own_logp), tokens),
        (whole, mass < 1 - MASS_TOLERANCE, mass),
    )


def _broken(rules: _Rules, owner: np.ndarray | None = None) -> Iterator[_Fault]:
    """The first place where each rule is broken; `owner` maps places to tokens."""
    for rule, bad, values in rules:
        if bad.any():
            place = int(np.argmax(bad))
            found: Any = values[place]
            found = found.tolist() if isinstance(found, np.ndarray) else found
            yield _Fault(rule, place if owner is None else int(owner[place]), found)


def _check_kinds(trajectory: Trajectory, subject: str) -> None:
    sets = trajectory.candidates
    for name, array, kind, word in (
        ("tokens", trajectory.tokens, np.integer, "integers"),
        ("loss_mask", trajectory.loss_mask, np.bool_, "booleans"),
        ("sampler_logp", trajectory.sampler_logp, np.floating, "floating-point numbers"),
        ("candidate offsets", sets.offsets, np.integer, "integers"),
        ("candidate ids", sets.ids, np.integer, "integers"),
        ("candidate log-probs", sets.logp, np.floating, "floating-point numbers"),
    ):
        if array.ndim != 1 or not np.issubdtype(array.dtype, kind):
            raise BadInputError(
                subject,
                expected=f"{name} as a list of {word}",
                found=f"an array of {array.dtype} with {array.ndim} dims",
            )
    if not len(sets.offsets) or sets.offsets[0] != 0 or (np.diff(sets.offsets) < 0).any():
        raise BadInputError(
            subject,
            expected="candidate offsets that start at 0 and never fall",
            found=sets.offsets.tolist()[:8],
        )
    for span in trajectory.spans:
        if span.version < 1 or span.end <= span.start:
            raise BadInputError(
                subject, expected="spans of one token or more, with versions from 1", found=span
            )


def _check_lengths(trajectory: Trajectory, subject: str) -> None:
    num = int(np.count_nonzero(trajectory.loss_mask))
    sets = trajectory.candidates
    found = {
        "loss_mask": (len(trajectory.loss_mask), len(trajectory.tokens)),
        "sampler_logp": (len(trajectory.sampler_logp), num),
        "candidate sets": (len(sets), num),
        "candidate ids": (len(sets.ids), int(sets.offsets[-1])),
        "candidate log-probs": (len(sets.logp), int(sets.offsets[-1])),
        "token versions": (len(trajectory.version), num),
    }
    for name, (length, wanted) in found.items():
        if length != wanted:
            raise BadInputError(subject, expected=f"{wanted} {name}", found=length)
    if num and trajectory.loss_mask[0]:
        raise BadInputError(
            subject, expected="a prompt before the first trained token", found="none"
        )


def _beyond(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    return (ids < 0) | (ids >= vocab_size)


def _not_logp(logp: np.ndarray) -> np.ndarray:
    return ~np.isfinite(logp) | (logp > LOGP_TOLERANCE)
