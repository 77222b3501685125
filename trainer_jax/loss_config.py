"""The settings of the loss: arms, importance weights and their bounds, reductions.

Owns [loss] of a run file and what may not be combined. The maths is `trainer_jax.loss`'s.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from contracts.errors import BadInputError
from contracts.runfile import Section
from trainer_jax import loss_metrics
from trainer_jax.inputs import is_number

Importance = Literal["none", "masked", "truncated", "sequence"]
Reduction = Literal["token-mean", "sequence-mean", "constant"]
Center = bool | Literal["drawn"]

DEFAULT_ARM = "sc+mis+top-p"

_MIS = {"importance": "masked", "ratio_low": 0.2, "ratio_high": 5.0}
# Yao et al., 2025, https://fengyao.notion.site/off-policy-rl; 2 is a default of other trainers.
_TIS = {"importance": "truncated", "ratio_high": 2.0}
# The clip of GSPO (arXiv 2507.18071) is on a length-normalized ratio, hence this narrow.
_GSPO = {
    "importance": "sequence",
    "ratio_low": 1 - 3e-4,
    "ratio_high": 1 + 4e-4,
    "reduction": "sequence-mean",
}

# arm -> the settings it stands for; what a run file says beside `arm` wins.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo+mis": _MIS,
    "grpo+tis": _TIS,
    "grpo+top-p": {"replay": True},
    "sc": {"center": True},
    "sc+mis": {**_MIS, "center": True},
    "sc+mis+top-p": {**_MIS, "center": True, "replay": True},
    "drawn-centering": {**_MIS, "center": "drawn"},
    "gspo": _GSPO,
}
_ALIASES = {"mis": "grpo+mis", "tis": "grpo+tis"}


class Band(Section):
    """Bounds of the importance ratio; both are required, differ, and 1 lies between them."""

    ratio_low: float = Field(gt=0, le=1)
    ratio_high: float = Field(ge=1, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_room(self) -> Band:
        _check_bounds(self.ratio_low, self.ratio_high)
        return self


class LossConfig(Section):
    """[loss]: `arm` names a preset, any other key overrides what the preset says.

    arm: a name of `PRESETS`; `mis` and `tis` are short for `grpo+mis` and `grpo+tis`.
    ratio_low, ratio_high: the band of `masked` (both) and `sequence` (both, on the length-
    normalized ratio), the cap of `truncated` (high only). An `importance` that differs from the
    arm's takes neither bounds nor reduction from it. Without importance weighting the bounds only
    serve the metrics.
    center: subtract C. `drawn` is a wrong C for experiments that need one: it takes the weight of
    the token drawn for every v, so that it depends on the draw, and drifts.
    reduction: `token-mean` divides by all trained tokens of the global batch, `sequence-mean`
    averages trajectories' means, `constant` divides by `constant`.
    off_policy_limit: drop trajectories with A < 0 whose mean log(q/p) exceeds it (DeepSeek-V3.2).
    bands: sampler group -> its own band, of `masked`.
    """

    arm: str = DEFAULT_ARM
    importance: Importance = "none"
    ratio_low: float | None = Field(default=None, gt=0, le=1)
    ratio_high: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    center: Center = False
    replay: bool = False
    reduction: Reduction = "token-mean"
    constant: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    normalize_advantages: bool = False
    zero_variance: Literal["keep", "refill"] = "keep"
    off_policy_limit: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    bands: dict[str, Band] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _expand_arm(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        arm = data.get("arm", DEFAULT_ARM)
        arm = _ALIASES.get(arm, arm) if isinstance(arm, str) else arm
        if not isinstance(arm, str) or arm not in PRESETS:
            raise ValueError(f"an arm of {', '.join(PRESETS)}, not {arm!r}")
        preset = dict(PRESETS[arm])
        if data.get("importance", preset.get("importance")) != preset.get("importance"):
            own = ("importance", "ratio_low", "ratio_high", "reduction")
            preset = {key: value for key, value in preset.items() if key not in own}
        return {**preset, **data, "arm": arm}

    @model_validator(mode="after")
    def _composes(self) -> LossConfig:
        check_arm(self.importance, self.ratio_low, self.ratio_high, bool(self.center))
        if self.center and self.off_policy_limit is not None:
            raise ValueError(
                "center without off_policy_limit: dropping a trajectory by the tokens it drew puts "
                "back the drift that centering removes"
            )
        if self.bands and self.importance != "masked":
            raise ValueError(
                "bands with importance = 'masked' (they say which tokens of a group are masked; "
                f"{self.importance!r} masks no token)"
            )
        if (self.constant is not None) != (self.reduction == "constant"):
            raise ValueError("`constant` if and only if reduction = 'constant'")
        return self

    @property
    def band(self) -> Band:
        """The band that applies where no group overrides it; [0.2, 5] for metrics alone."""
        low, high = loss_metrics.REFERENCE_BAND
        return Band(ratio_low=self.ratio_low or low, ratio_high=self.ratio_high or high)

    def log_bands(self, group_names: tuple[str, ...]) -> np.ndarray:
        """log(low), log(high) of each sampler group, float32 [groups, 2].

        Raises:
            BadInputError: a band for a group that does not exist.
        """
        unknown = sorted(set(self.bands) - set(group_names))
        if unknown:
            raise BadInputError(
                "run file, loss.bands", expected=f"groups of {list(group_names)}", found=unknown
            )
        bands = [self.bands.get(name, self.band) for name in group_names]
        return np.log([[b.ratio_low, b.ratio_high] for b in bands]).astype(np.float32)


def check_arm(importance: str, low: float | None, high: float | None, center: bool) -> None:
    """Refuses an importance weight without its bounds, and what centering cannot repair.

    Raises:
        BadInputError: bounds missing, out of order or not around 1, an unknown importance, centered
            GSPO.
    """
    if importance not in ("none", "masked", "truncated", "sequence"):
        raise BadInputError(
            "importance", expected="none, masked, truncated or sequence", found=repr(importance)
        )
    needed = {
        "ratio_low": importance in ("masked", "sequence") and low is None,
        "ratio_high": importance in ("masked", "sequence", "truncated") and high is None,
    }
    missing = [name for name, is_missing in needed.items() if is_missing]
    if missing:
        raise BadInputError(
            f"importance = {importance!r}", expected=" and ".join(missing), found="no value"
        )
    _check_bounds(low, high)
    if center and importance == "sequence":
        raise BadInputError(
            "score centering of a sequence-level weight",
            expected="a weight that depends on one token alone: C averages it over that token",
            found="importance = 'sequence'",
        )


def _check_bounds(low: float | None, high: float | None) -> None:
    for name, bound in (("ratio_low", low), ("ratio_high", high)):
        if bound is not None and not is_number(bound):
            raise BadInputError(name, expected="a number", found=repr(bound))
    least, most = (0.0 if low is None else low), (np.inf if high is None else high)
    if not 0 <= least <= 1 <= most or least == most or high == np.inf:
        rule = "0 <= ratio_low <= 1 <= ratio_high, not both 1, finite"
        raise BadInputError("the band", expected=rule, found=f"[{least}, {most}]")
