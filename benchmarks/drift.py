"""`python -m benchmarks.drift`: the picture of drift in docs/correction.md.

Draws the run of the drift test (tests/trainer_jax/drift.py): a reward that is the same whatever is
drawn, so that every movement of the policy is drift. Owns the picture and no dynamics.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.trainer_jax.drift import GRPO, IS, MIS, STEPS, TIS, drift

# label -> weight, centering, colour (for any colour vision)
MOVING = {
    "grpo": (GRPO, False, "#D55E00"),
    "grpo+mis": (MIS, False, "#E69F00"),
    "grpo+tis": (TIS, False, "#CC79A7"),
    "wrong centering": (MIS, "drawn", "#7A7A7A"),
}
STAYING = {
    "is": (IS, False),
    "sc": (GRPO, True),
    "sc+mis": (MIS, True),
    "sc+tis": (TIS, True),
}
ADVANTAGES = {1.0: "every advantage +1", -1.0: "every advantage -1"}
NOTE = (
    "The two scales differ. Where a line has a kink, the ratio of a token crosses a bound of the "
    "mask: from that update on the token is left out, or let in again."
)
STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def draw_panel(axes: Axes, advantage: float) -> None:
    """One line per arm over the steps, labelled where it ends; the corrected arms lie on 0."""
    steps = range(STEPS + 1)
    names = []
    for label, (weight, center, color) in MOVING.items():
        kl = drift(weight, center=center, replay=False, advantage=advantage)
        axes.plot(steps, [0, *kl], color=color, linewidth=2)
        names.append((float(kl[-1]), label, color))
    for weight, center in STAYING.values():
        kl = drift(weight, center=center, replay=False, advantage=advantage)
        axes.plot(steps, [0, *kl], color="#0072B2", linewidth=3.5, clip_on=False)
    names.append((0.0, f"{', '.join(STAYING)}: 0", "#0072B2"))
    axes.set_title(ADVANTAGES[advantage], loc="left", fontsize=11)
    axes.set_xlabel("update")
    axes.set_xlim(0, STEPS)
    axes.set_ylim(bottom=0)
    height, above = 0.05 * axes.get_ylim()[1], 0.0
    for kl, label, color in sorted(names):
        place = (STEPS, max(kl, above))
        axes.annotate(f" {label}", place, color=color, va="center", annotation_clip=False)
        above = place[1] + height


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/drift.png"))
    arguments = parser.parse_args()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, advantage in zip(panels, ADVANTAGES, strict=True):
            draw_panel(axes, advantage)
            axes.set_ylabel("KL(start ‖ policy), nats")
        figure.supxlabel(NOTE, x=0.01, ha="left", fontsize=9)
        figure.suptitle("Nothing to learn: the reward ignores the tokens", x=0.01, ha="left")
        figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
