"""A watch for the three signs of a collapsing policy.

Owns their definition. Must not stop anything: the loop decides what an alarm means. The signs, each
on a mean over the last updates: reward well below its best, KL at a multiple of its early level,
most episodes ending on repeated format errors.

"Well below" is a share of the largest size a mean reward has had, which is the best itself where
rewards are not negative. An early level counts as at least KL_FLOOR: a trainer and samplers that
agree to rounding have one near 0, and its multiples say nothing. A KL that is not finite is above
every level, and makes no early level.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from contracts.runfile import Section
from contracts.types import Ending

KL_FLOOR = 1e-3  # nats


class Sign(enum.StrEnum):
    REWARD_FALLING = "reward_falling"
    KL_RISING = "kl_rising"
    FORMAT_ERRORS = "format_errors"


class CollapseLimits(Section):
    """Where a sign begins."""

    window: int = Field(default=10, ge=1)  # updates in a mean, and in the early level of the KL
    # of the best mean, or of the largest in size where means are negative
    reward_share_of_peak: float = Field(default=0.75, gt=0, lt=1)
    kl_factor: float = Field(default=3.0, gt=1)
    format_error_share: float = Field(default=0.5, gt=0, le=1)


@dataclass(frozen=True, kw_only=True)
class CollapseWatch:
    """What has to be remembered between updates. A value: `observe` returns the next one.

    `recent` holds (reward, kl, share of episodes that ended on format errors) of the last updates.
    """

    recent: tuple[tuple[float, float, float], ...] = ()
    peak_reward: float = -math.inf  # of the means
    largest_reward: float = 0.0  # of the means' absolute values
    early_kl: float | None = None  # mean of the first `window` updates whose KL is finite
    active: frozenset[Sign] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A sign that has just appeared, with a sentence for the log."""

    sign: Sign
    sentence: str


def observe(
    watch: CollapseWatch,
    limits: CollapseLimits,
    *,
    reward: float,
    kl: float,
    format_error_ending_share: float,
) -> tuple[CollapseWatch, list[Alarm]]:
    """The watch after one more update, and the signs that this update brought.

    Nothing is said before `window` updates. A sign is told once, and again only after it went away.
    """
    kl = kl if math.isfinite(kl) else math.inf
    recent = (*watch.recent, (reward, kl, format_error_ending_share))[-limits.window :]
    if len(recent) < limits.window:
        return CollapseWatch(recent=recent), []
    mean_reward, mean_kl, mean_share = (
        math.fsum(x) / len(recent) for x in zip(*recent, strict=True)
    )
    early_kl = watch.early_kl
    if early_kl is None and math.isfinite(mean_kl):
        early_kl = mean_kl
    level = max(early_kl or 0.0, KL_FLOOR)
    peak = max(watch.peak_reward, mean_reward)
    largest = max(watch.largest_reward, abs(mean_reward))
    allowed = (1 - limits.reward_share_of_peak) * largest
    found = {
        Sign.REWARD_FALLING: (
            peak - mean_reward > allowed,
            f"reward {mean_reward:.3f} is more than {allowed:.3f} below its best, {peak:.3f}",
        ),
        Sign.KL_RISING: (
            mean_kl > limits.kl_factor * level,
            f"KL {mean_kl:.4f} is more than {limits.kl_factor:g} times its early level, "
            f"{level:.4f}",
        ),
        Sign.FORMAT_ERRORS: (
            mean_share > limits.format_error_share,
            f"{mean_share:.0%} of the episodes end on repeated format errors",
        ),
    }
    active = frozenset(sign for sign, (is_active, _) in found.items() if is_active)
    alarms = [Alarm(sign=s, sentence=found[s][1]) for s in Sign if s in active - watch.active]
    seen = CollapseWatch(
        recent=recent,
        peak_reward=peak,
        largest_reward=largest,
        early_kl=early_kl,
        active=active,
    )
    return seen, alarms


def observe_record(
    watch: CollapseWatch, limits: CollapseLimits, record: Mapping[str, Any]
) -> tuple[CollapseWatch, list[Alarm]]:
    """The same of a line of metrics.jsonl; one without a reward or a KL says nothing."""
    if record.get("reward") is None or record.get("kl") is None:
        return watch, []
    return observe(
        watch,
        limits,
        reward=record["reward"],
        kl=record["kl"],
        format_error_ending_share=record[f"ending/{Ending.FORMAT_ERRORS}"],
    )


def is_collapsed(watch: CollapseWatch) -> bool:
    """Two of the three signs together: one alone has innocent causes."""
    return len(watch.active) >= 2


def collapse_of(
    records: Iterable[Mapping[str, Any]], limits: CollapseLimits
) -> tuple[dict[str, int | None], int | None]:
    """By sign, the first update at which it was seen; and the first with two of them."""
    watch, collapsed = CollapseWatch(), None
    signs: dict[str, int | None] = {str(sign): None for sign in Sign}
    for record in records:
        watch, alarms = observe_record(watch, limits, record)
        for alarm in alarms:
            if signs[alarm.sign] is None:
                signs[alarm.sign] = record["step"]
        if collapsed is None and is_collapsed(watch):
            collapsed = record["step"]
    return signs, collapsed
