"""What is wrong, by evidence: the likely cause of a mismatch, named with the numbers that say so.

Owns the tests of what was drawn and recorded, and their limits. A sampler's noise (precision,
kernels, age) is no cause: it leaves a record that its own draws agree with, and a policy that the
checkpoint still recognizes.

- A record is of the distribution drawn from if the tokens drawn are as surprising under it as it
  says itself, and lean no more to the checkpoint than it says: the sums of -log q(drawn) - H(q)
  and of log r(drawn) - E_q[log r] have mean 0 and a known variance, whatever the weights. What the
  record is of instead is seen by reading it in other ways.
- Samplers whose records are right are on other weights if the checkpoint prefers other candidates
  than they do, or if they are far from samplers of the same precision at the same versions.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.types import Trajectory
from tools.mismatch_report.tokens import Reading, Setup, Tokens
from trainer_jax.loss_metrics import LOG_RATIO_LIMIT
from trainer_jax.records import MASS_TOLERANCE

MIN_TOKENS = 200  # fewer of a sampler are not judged
_SIGMAS = 5.0
_LEAST_GAP = 0.005  # nats per token between surprise and expectation
_BETTER = 0.9  # another reading must bring |dlogp| below this part
_AGREEMENT = 0.4  # the least correlation with the right weights, whatever the precision
_TIMES_PEERS = 4.0
_LEAST_KL = 1e-3
_TEMPERATURE_OFF = 0.1  # logarithm of the factor, beyond what noise does


class Cause(enum.StrEnum):
    BEFORE_TEMPERATURE = "log-probs before temperature"
    BEFORE_TRUNCATION = "log-probs before truncation"
    BEFORE_BOTH = "log-probs before temperature and truncation"
    OTHER_DISTRIBUTION = "log-probs of another distribution than the one drawn from"
    OTHER_TEMPERATURE = "another sampling temperature"
    OTHER_WEIGHTS = "other weights"
    OTHER_CHECKPOINT = "another checkpoint than the samplers'"
    TOKENIZER = "another tokenizer"
    TEMPLATE = "another chat template"


_RECORD = (
    "Have the sampler record log-probs of the distribution it draws from: after temperature, top-k "
    "and top-p."
)
REMEDY = {
    Cause.BEFORE_TEMPERATURE: _RECORD,
    Cause.BEFORE_TRUNCATION: _RECORD,
    Cause.BEFORE_BOTH: _RECORD,
    Cause.OTHER_DISTRIBUTION: _RECORD,
    Cause.OTHER_TEMPERATURE: "Have sampler and [sampling] agree on the temperature. Of tokens much "
    "older than the checkpoint, training may have sharpened or flattened the policy instead.",
    Cause.OTHER_WEIGHTS: "Replace the sampler, and compare its version and checksums with the "
    "weight service's.",
    Cause.OTHER_CHECKPOINT: "Give the checkpoint of the versions sampled from. If this is it, no "
    "sampler serves what it says.",
    Cause.TOKENIZER: "Give gateway and policy one tokenizer.json.",
    Cause.TEMPLATE: "Give gateway and policy one chat template.",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause, what has it, and the numbers it rests on."""

    cause: Cause
    subject: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is judged as one: a sampler's tokens, of the trajectories that it alone served. Without
    a sampler, the rest of its group: of trajectories that several served, or nobody named, and of
    samplers with fewer than MIN_TOKENS."""

    group: str
    sampler: str
    tokens: Tokens

    @property
    def name(self) -> str:
        return f"sampler {self.sampler}" if self.sampler else "the rest"


KlUnder = Callable[[Unit], Mapping[str, float]]  # mean KL under other checkpoints, by name


def units_of(trajectories: Sequence[Trajectory], tokens: Tokens) -> list[Unit]:
    """Every token's, in the order of groups and samplers."""
    lengths = Counter[tuple[str, str]]()
    for t in trajectories:
        if len(t.sampler_ids) == 1:
            lengths[t.group, t.sampler_ids[0]] += int(t.loss_mask.sum())
    large = {owner for owner, num in lengths.items() if num >= MIN_TOKENS}
    alone_M = [(t.group, t.sampler_ids[0] if len(t.sampler_ids) == 1 else "") for t in trajectories]
    owner_M = [owner if owner in large else (owner[0], "") for owner in alone_M]
    return [
        Unit(
            group=group,
            sampler=sampler,
            tokens=tokens.where(
                np.array([owner == (group, sampler) for owner in owner_M])[tokens.trajectory]
            ),
        )
        for group, sampler in sorted(set(owner_M))
    ]


def judged_of(units: Iterable[Unit]) -> list[Unit]:
    """Those with tokens enough."""
    return [unit for unit in units if len(unit.tokens) >= MIN_TOKENS]


def diagnose(
    units: Sequence[Unit], setup: Setup, *, precision: Mapping[str, str], kl_under: KlUnder
) -> list[Finding]:
    """Causes in the records of units; groups whose units share one are named as a whole.

    Args:
        precision: how each group computes; samplers of groups without one have peers only in their
            own group.
    """
    judged = judged_of(units)
    found: dict[tuple[str, str], tuple[Unit, Cause, str]] = {}
    for unit in judged:
        fault = record_fault(unit.tokens, setup) or temperature_fault(unit.tokens, setup)
        if fault:
            found[unit.group, unit.sampler] = (unit, *fault)
    sound = [unit for unit in judged if (unit.group, unit.sampler) not in found]
    lost = [unit for unit in sound if agreement(unit.tokens) < _AGREEMENT]
    for unit in sound:
        peers = [
            other for other in sound if other is not unit and _are_peers(unit, other, precision)
        ]
        evidence = _unrelated(unit) if unit in lost else _far_from(unit, peers)
        if evidence:
            cause = Cause.OTHER_CHECKPOINT if len(lost) == len(judged) else Cause.OTHER_WEIGHTS
            found[unit.group, unit.sampler] = (unit, cause, evidence + _fits_better(unit, kl_under))
    return _merge(list(found.values()), judged)


def _merge(found: list[tuple[Unit, Cause, str]], judged: Sequence[Unit]) -> list[Finding]:
    """One finding for what all samplers have, or all of a group; the largest speaks for them."""
    findings: list[Finding] = []
    for cause in dict.fromkeys(cause for _, cause, _ in found):
        having = [(unit, evidence) for unit, other, evidence in found if other == cause]
        parts: dict[str, list[tuple[Unit, str]]] = {}
        if len(having) == len(judged):
            parts["every sampler" if len(having) > 1 else f"group {having[0][0].group}"] = having
        else:
            for unit, evidence in having:
                siblings = [other for other in judged if other.group == unit.group]
                whole = all(any(other is have for have, _ in having) for other in siblings)
                name = f"group {unit.group}" if whole else f"{unit.name} of group {unit.group}"
                parts.setdefault(name, []).append((unit, evidence))
        for subject, members in parts.items():
            unit, evidence = max(members, key=lambda pair: len(pair[0].tokens))
            speaker = f"{unit.name}: " if len(members) > 1 else ""
            findings.append(Finding(cause=cause, subject=subject, evidence=speaker + evidence))
    return findings


# Records.


def surprise(tokens: Tokens) -> tuple[float, float]:
    """Mean surprise of the draws beyond what the record says, in nats, and its distance from 0 in
    standard deviations."""
    return _beyond(tokens.surprise, tokens.surprise_var)


def leaning(tokens: Tokens) -> tuple[float, float]:
    """The same for log r of the draws from the sets: positive if they were drawn from something
    nearer to the checkpoint than the record is."""
    inside_T = ~tokens.tail_draw
    moments_TxM = tokens.moments[inside_T].astype(np.float64)
    variance_T = np.maximum(moments_TxM @ np.array([1.0, 1.0, -2.0]), 0.0)
    return _beyond((tokens.log_ratio - tokens.set_log_ratio)[inside_T], variance_T)


def sigmas(tokens: Tokens) -> float:
    """The larger of both distances, with its sign."""
    return max(surprise(tokens)[1], leaning(tokens)[1], key=abs)


def _beyond(excess_T: np.ndarray, variance_T: np.ndarray) -> tuple[float, float]:
    num = max(len(excess_T), 1)
    least = num * (1e-3 * _LEAST_GAP) ** 2  # rounding is not evidence
    total = float(excess_T.sum(dtype=np.float64))
    return total / num, total / float(np.sqrt(max(variance_T.sum(), least)))


def missing_tail(tokens: Tokens) -> float:
    """How many standard deviations too few draws come from outside the recorded sets; at most 0."""
    tail_T = np.clip(1 - tokens.set_mass, 0, 1)
    deviation = float(np.sqrt((tail_T * (1 - tail_T)).sum()))
    return min(0.0, float(tokens.tail_draw.sum() - tail_T.sum()) / max(deviation, 1.0))


def record_fault(tokens: Tokens, setup: Setup) -> tuple[Cause, str] | None:
    """What the record is of, if not of the distribution drawn from."""
    expected = setup.expected
    surprising, leans = (
        (gap, distance) if abs(distance) > _SIGMAS and abs(gap) > _LEAST_GAP else None
        for gap, distance in (surprise(tokens), leaning(tokens))
    )
    contradicting = float(tokens.contradicts.mean())
    partial = float(np.mean(tokens.set_mass < 1 - MASS_TOLERANCE))
    misses_tail = missing_tail(tokens) < -_SIGMAS
    cut = misses_tail or (setup.truncates and partial > 0.5)
    if not (surprising or leans or cut or contradicting > 0.5):
        return None
    parts = []
    if surprising:
        gap, distance = surprising
        parts.append(
            f"the tokens drawn are {abs(gap):.3f} nats {'more' if gap > 0 else 'less'} surprising "
            f"than the record says itself ({abs(distance):.0f} sigma)"
        )
    if leans:
        gap, distance = leans
        parts.append(
            f"they are {abs(gap):.3f} nats {'nearer to' if gap > 0 else 'farther from'} the "
            f"checkpoint's policy than draws from the record would be ({abs(distance):.0f} sigma)"
        )
    if cut:
        parts.append(
            f"the recorded sets hold {tokens.set_mass.mean():.4f} of the mass, and "
            f"{tokens.tail_draw.mean():.2%} of the tokens were drawn from outside them"
        )
    if contradicting > 0.5:
        parts.append(
            f"for {contradicting:.0%} of the tokens sampler_logp is not the set's own log-prob"
        )
    parts += _ratio_off(tokens)
    best, sentence = _best_reading(tokens, setup, over_set=expected.over_set and not cut)
    warmer = best.temperature != expected.temperature
    truncated = best.over_set != expected.over_set or (misses_tail and not warmer)
    cause = {
        (True, False): Cause.BEFORE_TEMPERATURE,
        (False, True): Cause.BEFORE_TRUNCATION,
        (True, True): Cause.BEFORE_BOTH,
        (False, False): Cause.OTHER_DISTRIBUTION,
    }[warmer, truncated]
    parts += [sentence] if best != expected else []
    return cause, "; ".join(parts)


def _best_reading(tokens: Tokens, setup: Setup, *, over_set: bool) -> tuple[Reading, str]:
    """The reading that sampler_logp fits best, and by how much.

    A set says by itself whether it is truncated (`over_set`), so only the temperature is open. If
    it contradicts sampler_logp it is taken as right, and shows the sampler's noise.
    """
    expected, readings_TxR = setup.expected, tokens.readings
    options, noise_T = [r for r in setup.readings if r.over_set == over_set], np.zeros(1)
    if tokens.contradicts.mean() > 0.5:
        options = list(setup.readings)
        noise_T = np.nan_to_num(tokens.set_logp - readings_TxR[:, 0])
    errors = {
        reading: float(np.abs(tokens.sampler_logp - readings_TxR[:, i] - noise_T).mean())
        for i, reading in enumerate(setup.readings)
    }
    usual = expected if expected in options else Reading(expected.temperature, over_set)
    best = min(options, key=lambda reading: errors[reading])
    if errors[best] > _BETTER * errors[usual]:
        best = usual
    log_ratio_T = readings_TxR[:, setup.readings.index(best)] - tokens.sampler_logp
    ratio = float(np.exp(np.clip(log_ratio_T, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).mean())
    return best, (
        f"mean |dlogp| is {errors[expected]:.4f} against the checkpoint at {expected}, "
        f"{errors[best]:.4f} at {best}, where E[r] is {ratio:.3f}"
    )


def _ratio_off(tokens: Tokens) -> list[str]:
    """A sentence on the mean ratio if it is evidence: other than that of a right record."""
    ratio_T, right = tokens.stat("ratio"), float(tokens.expected_ratio.mean())
    mean, error = float(ratio_T.mean()), float(ratio_T.std() / np.sqrt(len(tokens)))
    if abs(mean - right) < max(3 * error, _LEAST_GAP):
        return []
    return [f"E[r] is {mean:.3f} +- {error:.3f} where {right:.3f} is right"]


# Weights.


def agreement(tokens: Tokens) -> float:
    """Correlation of log q and log p over the candidates, weighted by q, around each token's means:
    whether the checkpoint prefers the candidates that the samplers prefer. 0 for unrelated ones."""
    q, p, both = tokens.moments.sum(0, dtype=np.float64)
    return float(both / np.sqrt(p * q)) if min(p, q) > 0 else 1.0


def temperature_fault(tokens: Tokens, setup: Setup) -> tuple[Cause, str] | None:
    """Whether the two policies' logits differ by a factor. Noise in either moves the slope of log p
    on log q between the squared correlation and its inverse; a temperature moves it beyond."""
    q, p, both = tokens.moments.sum(0, dtype=np.float64)
    correlation = agreement(tokens)
    if min(p, q) <= 0 or correlation < _AGREEMENT:
        return None
    slope = float(both / q)
    if abs(np.log(slope)) < _TEMPERATURE_OFF - 2 * np.log(min(correlation, 1.0)):
        return None
    if leaning(tokens)[1] > _SIGMAS / 2:
        return None  # perhaps the record is what is wrong; more tokens would tell
    return Cause.OTHER_TEMPERATURE, (
        f"the checkpoint's logits are {slope:.3f} times the sampler's at a correlation of "
        f"{correlation:.4f}: drawn at about {slope * setup.temperature:.3f}, compared at "
        f"{setup.temperature:g}; the record agrees with its own draws ({sigmas(tokens):+.1f} sigma)"
    )


def _unrelated(unit: Unit) -> str:
    return (
        f"the correlation of log p and log q over the candidates is {agreement(unit.tokens):.2f} "
        f"(precision and age leave far more than {_AGREEMENT}), KL "
        f"{unit.tokens.stat('kl').mean():.4f}; the record agrees with its own draws "
        f"({sigmas(unit.tokens):+.1f} sigma)"
    )


def _are_peers(unit: Unit, other: Unit, precision: Mapping[str, str]) -> bool:
    known = precision.get(unit.group)
    return unit.group == other.group or (known is not None and known == precision.get(other.group))


def _far_from(unit: Unit, peers: Iterable[Unit]) -> str:
    """Evidence that a sampler is unlike its peers on the versions they share; "" if it isn't."""
    others = list(peers)
    if not others:
        return ""
    own_kl, own_version = unit.tokens.stat("kl"), unit.tokens.version
    kl = np.concatenate([other.tokens.stat("kl") for other in others])
    version = np.concatenate([other.tokens.version for other in others])
    shared = np.intersect1d(own_version, version)
    keep = np.isin(own_version, shared)
    num = int(keep.sum())
    if num < MIN_TOKENS:
        return ""
    mean, variance = 0.0, float(own_kl[keep].var()) / num
    for v in shared:  # the peers as if they had drawn as much from each version
        share, theirs = np.count_nonzero(own_version == v) / num, kl[version == v]
        mean += share * float(theirs.mean())
        variance += share**2 * float(theirs.var()) / len(theirs)
    ours = float(own_kl[keep].mean())
    far = (ours - mean) / max(np.sqrt(variance), 1e-9)
    if ours < _LEAST_KL or ours < _TIMES_PEERS * max(mean, 0.0) or far < _SIGMAS:
        return ""
    return (
        f"KL {ours:.4f}, {ours / max(mean, 1e-6):.1f} times the {mean:.4f} of {len(others)} other "
        f"sampler{'s' if len(others) > 1 else ''} of its precision on the same versions "
        f"({far:.0f} sigma); the record agrees with its own draws "
        f"({sigmas(unit.tokens):+.1f} sigma)"
    )


def _fits_better(unit: Unit, kl_under: KlUnder) -> str:
    own = float(unit.tokens.stat("kl").mean())
    others = kl_under(unit)
    if not others:
        return ""
    name = min(others, key=lambda key: others[key])
    if others[name] < own / 2:
        return f"; under {name} its KL falls to {others[name]:.4f}"
    return f"; {name} fits no better (KL {others[name]:.4f})"
