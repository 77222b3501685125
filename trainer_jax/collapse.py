"""A watch for the three signs of a collapsing policy.

Owns their definition. Must not stop anything: the loop decides what an alarm means. The signs, each
on a mean over the last updates: reward well below its best, KL at a multiple of its early level,
most episodes ending on repeated format errors.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from pydantic import Field

from contracts.runfile import Section


class Sign(enum.StrEnum):
    REWARD_FALLING = "reward_falling"
    KL_RISING = "kl_rising"
    FORMAT_ERRORS = "format_errors"


class CollapseLimits(Section):
    """Where a sign begins."""

    window: int = Field(default=10, ge=1)  # updates in a mean, and in the early level of the KL
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
    early_kl: float | None = None  # mean of the first `window` updates
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
    recent = (*watch.recent, (reward, kl, format_error_ending_share))[-limits.window :]
    if len(recent) < limits.window:
        return CollapseWatch(recent=recent), []
    mean_reward, mean_kl, mean_share = (
        math.fsum(x) / len(recent) for x in zip(*recent, strict=True)
    )
    early_kl = mean_kl if watch.early_kl is None else watch.early_kl
    peak = max(watch.peak_reward, mean_reward)
    found = {
        Sign.REWARD_FALLING: (
            peak > 0 and mean_reward < limits.reward_share_of_peak * peak,
            f"reward {mean_reward:.3f} is below {limits.reward_share_of_peak:.0%} of its best, "
            f"{peak:.3f}",
        ),
        Sign.KL_RISING: (
            mean_kl > limits.kl_factor * early_kl,
            f"KL {mean_kl:.4f} is more than {limits.kl_factor:g} times its early level, "
            f"{early_kl:.4f}",
        ),
        Sign.FORMAT_ERRORS: (
            mean_share > limits.format_error_share,
            f"{mean_share:.0%} of the episodes end on repeated format errors",
        ),
    }
    active = frozenset(sign for sign, (is_active, _) in found.items() if is_active)
    alarms = [Alarm(sign=s, sentence=found[s][1]) for s in Sign if s in active - watch.active]
    return CollapseWatch(recent=recent, peak_reward=peak, early_kl=early_kl, active=active), alarms


def is_collapsed(watch: CollapseWatch) -> bool:
    """Two of the three signs together: one alone has innocent causes."""
    return len(watch.active) >= 2
