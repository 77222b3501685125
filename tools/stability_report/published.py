"""What the published run reports, to stand beside what was measured here.

Owns these values and where they are from: the post, and for evaluations of single steps the run's
public registry. Scores are of SWE-bench Pro V2 with a 35B policy: only directions compare.
"""

from __future__ import annotations

from dataclasses import dataclass

POST = "https://modal.com/blog/toward-rl-on-mixed-precision-mixed-accelerator-samplers"
BASE = "base model .744 / .894"


@dataclass(frozen=True, kw_only=True)
class Published:
    """In the post's words, shortened. "": it says nothing."""

    evaluation: str = ""  # pass@1 / pass@4, at a step
    mismatch: str = ""
    policy: str = ""
    collapse: str = ""


# (arm, fleet) -> what is reported of it
PUBLISHED = {
    ("grpo", "mixed"): Published(
        evaluation=".414 / .754 at step 40",
        mismatch="KL grows 3x or more",
        policy="gradient norm about 20x soon after the start; 62 % format errors at step 40",
        collapse="collapses soon after the start",
    ),
    ("grpo", "homogeneous"): Published(
        evaluation=".779 at step 80, .442 at step 120",
        mismatch="KL starts about 4x lower than mixed, grows 3x or more",
        policy="65 % format errors at step 120",
        collapse="collapses later, from about step 100",
    ),
    ("grpo+mis", "mixed"): Published(
        evaluation=".811 / .916 at step 120, .734 at step 180",
        mismatch="KL and share outside jump more than 10x",
        policy="entropy collapses; 68 % format errors at step 180",
        collapse="collapses later",
    ),
    ("sc", "mixed"): Published(
        evaluation=".402 / .704 at step 60",
        mismatch="KL about 3x before it collapses",
        policy="entropy falls steadily; 73 % format errors at step 60",
        collapse="collapses later",
    ),
    ("grpo+top-p", "mixed"): Published(
        evaluation=".794 at step 40, .483 at step 80",
        mismatch="KL climbs steadily",
        policy="gradient norm 3 to 10x below GRPO's",
        collapse="collapses later",
    ),
    ("sc+mis", "mixed"): Published(
        evaluation=".847 / .942 at step 180",
        mismatch="KL rises about 2x",
        policy="one brief spike of the gradient",
        collapse="stable",
    ),
    ("sc+mis+top-p", "mixed"): Published(
        evaluation=".831 / .942 at step 180",
        mismatch="the lowest KL",
        policy="gradient norm and entropy flat",
        collapse="stable",
    ),
    ("sc+mis+top-p", "homogeneous"): Published(
        evaluation=".839 / .955 at step 180",
        mismatch="KL 4.7x lower than mixed on average",
        policy="entropy rises after about step 160",
        collapse="stable",
    ),
}
# arm -> rows of the comparison of fleets
FLEETS = {
    "grpo": {"kl_start": "about 4"},
    "sc+mis+top-p": {"kl": "4.7", "pass_at_4": "stays close", "cost": "about 0.85"},
}
GROUPS = (
    "The post: a group's share of the extreme tokens follows its KL more than its share of the "
    "samples. H100 FP8: 10 % of the samples, 29 % of these tokens, about 0.3 % of its own; B200 "
    "and B300 NVFP4 (W4A16 there): 47 % and 16 %."
)
ANATOMY = (
    "The post, of GRPO at step 40 on the mixed samplers: 62 % of the episodes end after three "
    "replies in a row without a tool call; the last is empty in 98 % of them, malformed in 6 %."
)
EVERY_COLLAPSE = (
    "The post: in every collapse the reward falls, KL grows 3x or more, and most episodes end on "
    "repeated format errors; the stable runs show none of these."
)
