"""What is wrong with the fleet now, in sentences.

Owns the rules. Pure: reads what it is given, remembers nothing. What is wrong with training is the
trainer's to say: its alarms come with its reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sampler_fleet.config import FleetConfig
from sampler_fleet.places import Target
from sampler_fleet.registry import Sampler, SamplerPhase

MAX_LAG = 8  # versions; a sampler that is further behind can't keep up with the trainer


def fleet_alarms(
    config: FleetConfig,
    samplers: Iterable[Sampler],
    targets: Mapping[str, Target],
    *,
    newest_version: int,
) -> Iterator[str]:
    """Groups that serve nothing though they should or get no samplers, and samplers that fall
    behind.

    `targets` holds the samplers each group is to have; a group that is not named has the run
    file's. `newest_version` is the newest that the trainer or any sampler is known to have.
    """
    ready = [s for s in samplers if s.phase == SamplerPhase.READY]
    for group in config.groups:
        target = targets.get(group.name, Target(num=group.samplers))
        if target.problem:
            yield f"group {group.name} is not at {target.num} samplers: {target.problem}"
        if (num := target.num) and not any(s.info.group == group.name for s in ready):
            yield f"group {group.name}: none of its {num} samplers is ready"
    for sampler in ready:
        if (lag := newest_version - sampler.version) > MAX_LAG:
            yield f"sampler {sampler.sampler_id}: {lag} versions behind"
    held: dict[tuple[str, int], dict[str, str]] = {}  # (group, version) -> checksum -> a sampler
    for sampler in ready:
        if checksum := sampler.weights_checksum:
            key = (sampler.info.group, sampler.version)
            held.setdefault(key, {}).setdefault(checksum, sampler.sampler_id)
    for (group, version), samplers_by_checksum in held.items():
        if len(names := sorted(samplers_by_checksum.values())) > 1:
            yield f"group {group}: {' and '.join(names)} hold other weights under version {version}"
