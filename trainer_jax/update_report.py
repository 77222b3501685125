"""What the gateway hears of an update: a part of its metrics.

Owns which metrics those are. Must not compute any.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.types import GroupUpdate, UpdateReport
from trainer_jax.metrics import Record


def update_report(
    record: Record, groups: Sequence[str], *, num_taken: int, alarms: Sequence[str]
) -> UpdateReport:
    """The report of one line of metrics.jsonl, for the training `groups` of the run.

    `num_taken` trajectories left the queue since the report before, also those dropped.
    """
    return UpdateReport(
        step=record["step"],
        version=record["version"],
        seconds=record["time/step"],
        update_seconds=record["time/update"],
        num_taken=num_taken,
        sequences=tuple(record["sequences"]),
        staleness=record.get("staleness/mean"),
        kl=record.get("kl"),
        share_out_of_band=record.get("share_out_of_band"),
        reward=record.get("reward"),
        groups=tuple(
            GroupUpdate(
                group=name,
                num_trajectories=record[f"group/{name}/samples"],
                num_tokens=record[f"group/{name}/sampled_tokens"],
                kl=record.get(f"group/{name}/kl"),
                share_out_of_band=record.get(f"group/{name}/share_out_of_band"),
            )
            for name in groups
            if f"group/{name}/samples" in record
        ),
        alarms=tuple(alarms),
    )
