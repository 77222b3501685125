"""Whether a trajectory's record can be trained on.

Owns the last check before records become arrays of a batch: what passes here cannot be wrong
without the loss noticing. Must not repair anything: a record is used as it is or refused, with its
sampler and trajectory named.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contracts.errors import BadInputError
from contracts.types import Trajectory

# Log-probs are float32 of a float32 softmax: what is beyond these is not rounding.
LOGP_TOLERANCE = 1e-3
MASS_TOLERANCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class RecordRules:
    """What every record of a run must satisfy."""

    group_names: tuple[str, ...]
    vocab_size: int
    replay: bool  # sets are whole supports and hold the token drawn
    max_candidates: int


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
        BadInputError: an unknown group, lengths that disagree, ids beyond the vocabulary, a trained
            token without context, log-probs not finite or above 0, candidate sets beyond the cap or
            with an id twice, sets with more than all the mass; under replay also a set without the
            token drawn, less than all the mass, or another log-prob for the token drawn.
    """
    subject = describe(trajectory)
    if trajectory.group not in rules.group_names:
        raise BadInputError(
            subject, expected=f"a group of {list(rules.group_names)}", found=repr(trajectory.group)
        )
    _check_lengths(trajectory, subject)
    beyond = np.flatnonzero(_beyond(trajectory.tokens, rules.vocab_size))  # given ones as well
    if len(beyond):
        raise BadInputError(
            subject,
            expected="tokens in the vocabulary",
            found=f"{trajectory.tokens[beyond[0]]} at position {beyond[0]}",
        )
    tokens = trajectory.tokens[trajectory.loss_mask]
    sets, logp = trajectory.candidates, trajectory.sampler_logp
    owner = np.repeat(np.arange(len(tokens)), sets.counts)

    def fail(rule: str, token: int, found: object) -> None:
        raise BadInputError(subject, expected=rule, found=f"{found} at sampled token {token}")

    for rule, bad, values, at in (
        ("candidate ids in the vocabulary", _beyond(sets.ids, rules.vocab_size), sets.ids, owner),
        ("sampler_logp finite and <= 0", _not_logp(logp), logp, None),
        ("candidate log-probs finite and <= 0", _not_logp(sets.logp), sets.logp, owner),
        (
            f"at most {rules.max_candidates} candidates (train.candidate_buckets)",
            sets.counts > rules.max_candidates,
            sets.counts,
            None,
        ),
    ):
        if bad.any():
            where = int(np.argmax(bad))
            fail(rule, where if at is None else int(at[where]), values[where])
    keys = np.sort(owner * np.int64(rules.vocab_size) + sets.ids)
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        token, found = divmod(int(keys[twice[0]]), rules.vocab_size)
        fail("candidate ids once", token, found)
    mass = np.bincount(owner, np.exp(sets.logp.astype(np.float64)), minlength=len(tokens))
    over = mass > 1 + MASS_TOLERANCE
    if over.any():
        fail("candidate mass <= 1", int(np.argmax(over)), mass[np.argmax(over)])
    if rules.replay:
        _check_support(tokens, trajectory, owner, mass, fail)


def _check_support(tokens, trajectory: Trajectory, owner, mass, fail) -> None:
    sets = trajectory.candidates
    own_logp = np.full(len(tokens), np.nan)
    hit = sets.ids == tokens[owner]
    own_logp[owner[hit]] = sets.logp[hit]
    for rule, bad, values in (
        ("the token drawn in its replayed set", np.isnan(own_logp), tokens),
        (
            "a set that holds all of the sampler's mass (log-probs after truncation, loss.replay "
            "only where sampling truncates)",
            mass < 1 - MASS_TOLERANCE,
            mass,
        ),
        (
            "sampler_logp equal to the set's log-prob of the token drawn",
            np.abs(own_logp - trajectory.sampler_logp) > LOGP_TOLERANCE,
            trajectory.sampler_logp,
        ),
    ):
        if bad.any():
            fail(rule, int(np.argmax(bad)), values[np.argmax(bad)])


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
