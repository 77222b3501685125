"""Made-up results of a sweep, in the form of `trainer_jax.sweep_results`, never of real runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer_jax.sweep import PlannedRun, SweepConfig, planned_runs, read_sweep

FLEET = """
[run]
name = "base"
[model]
checkpoint = "start"
[train]
updates = 200
[[fleet.groups]]
name = "{name}"
weight_format = "{format}"
[[fleet.groups]]
name = "second"
weight_format = "bf16"
[[fleet.prices.B200]]
per_hour = 6.25
since = "2026-05-01"
source = "a | list"
"""
SWEEP = """
directory = "{root}/runs"
results = "{root}/results"
[scales.small]
fleets = {{ mixed = "{root}/mixed.toml", homogeneous = "{root}/homogeneous.toml" }}
warm_starts = ["w/one", "w/two"]
seeds = [0, 1]
arms = [
  {{ arm = "grpo", fleet = "mixed" }},
  {{ arm = "sc+mis+top-p", fleet = "mixed" }},
  {{ arm = "grpo", fleet = "homogeneous" }},
  {{ arm = "sc+mis+top-p", fleet = "homogeneous" }},
  {{ arm = "sc", fleet = "mixed" }},
]
[scales.still]
fleets = {{ mixed = "{root}/mixed.toml" }}
seeds = [0]
set = {{ "train.staleness_limit" = 0 }}
arms = [{{ arm = "grpo", fleet = "mixed" }}]
"""


def make_sweep(root: Path) -> SweepConfig:
    """A sweep file under `root` of two scales, 20 runs and 1, without results."""
    for name, format in (("mixed", "nvfp4"), ("homogeneous", "bf16")):
        (root / f"{name}.toml").write_text(FLEET.format(name=f"first-{format}", format=format))
    (root / "sweep.toml").write_text(SWEEP.format(root=root))
    return read_sweep(root / "sweep.toml")


def make_results(
    sweep: SweepConfig, *, seeds: Sequence[int] = (0, 1), scale: str = "small"
) -> None:
    """Results of the runs of these seeds."""
    for run in planned_runs(sweep, scale):
        if run.seed in seeds:
            write_result(sweep.results, run)


def write_result(results: Path, planned: PlannedRun, **head: Any) -> Path:
    path = results / planned.scale / f"{planned.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [head_of(planned) | head, *windows_of(planned)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _length(run: PlannedRun) -> int:
    """Updates made: GRPO collapses, later on the homogeneous fleet."""
    if run.arm.arm == "sc+mis+top-p":
        return 200
    return (100 if run.arm.fleet == "mixed" else 150) + 10 * run.seed


def head_of(run: PlannedRun) -> dict[str, Any]:
    """Pass rates differ from run to run by a few hundredths."""
    length = _length(run)
    collapsed = length - 40 if length < 200 else None
    offset = 0.01 * run.seed + (0.02 if run.warm_start == "two" else 0.0)
    after = (0.3 if collapsed else 0.8) + offset + (0.01 if run.arm.fleet == "mixed" else 0.0)
    first = run.sections["fleet"]["groups"][0]
    return {
        "run": run.name,
        "arm": run.arm.arm,
        "fleet": run.arm.fleet,
        "label": run.arm.name,
        "seed": run.seed,
        "warm_start": run.warm_start,
        "digest": run.digest,
        "status": "collapsed" if collapsed else "finished",
        "updates": length,
        "seconds": 100.0,
        "signs": {
            "reward_falling": collapsed,
            "kl_rising": collapsed and 30,
            "format_errors": None,
        },
        "collapsed": collapsed,
        "groups": {
            first["name"]: {
                "weight_format": first["weight_format"],
                "kv_format": "fp8",
                "share_of_samples": 0.75,
            },
            "second": {"weight_format": "bf16", "kv_format": "fp8", "share_of_samples": 0.25},
        },
        "evaluation": {
            when: {f"pass_at_{k}": rate + 0.05 * (k == 4) for k in (1, 4)}
            | {f"pass_at_{k}_interval": [rate - 0.1, rate + 0.1] for k in (1, 4)}
            for when, rate in (("before", 0.4), ("after", after))
        },
        "cost": {"gpu_hours_per_update": 0.5, "dollars_per_update": 2.0 + run.seed},
        "anatomy": [anatomy_row(1, 0.05), anatomy_row(100, 0.6 if collapsed else 0.04)],
    }


def anatomy_row(step: int, share: float) -> dict[str, Any]:
    return {
        "step": step,
        "share_without_call": share,
        "share_alike": share,
        "share_repeated": share,
        "reply_tokens": 8.0,
        "abs_log_ratio": share,
        "share_masked": None,
        "endings": {"format_errors": share},
    }


def windows_of(run: PlannedRun) -> list[dict[str, Any]]:
    rng = np.random.default_rng([run.seed, len(run.arm.arm), len(run.warm_start)])
    length, start = _length(run), 0.02 if run.arm.fleet == "mixed" else 0.005
    lines = []
    for first in range(1, length, 10):
        x = first / length
        growth = 1.0 if length == 200 else math.exp(2.5 * x)
        reward = 0.4 + 0.4 * min(x, 0.5) - (0.9 * (x - 0.5) if x > 0.5 and length < 200 else 0)
        noise = 1 + 0.05 * rng.standard_normal()
        kl = start * growth * noise
        name = run.sections["fleet"]["groups"][0]["name"]
        line: dict[str, Any] = {
            "first": first,
            "last": first + 9,
            "reward": reward * noise,
            "kl": kl,
            "share_out_of_reference_band": kl / 10,
            "entropy": 1.2 / growth**0.3 * noise,
            "grad_norm": 0.2 * growth * noise,
            "episode_tokens": 100 * noise,
            "episode_turns": 4 * noise,
            "ending/format_errors": min(1.0, 0.02 * growth),
        }
        for group, tokens, part in ((name, 300, 1.3), ("second", 100, 0.1)):
            line[f"group/{group}/sampled_tokens"] = tokens
            line[f"group/{group}/kl"] = kl * part
            line[f"group/{group}/share_out_of_reference_band"] = kl * part / 10
        lines.append(line)
    return lines
