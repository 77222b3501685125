"""Who is in the fleet: samplers, their leases and their states.

Owns admission and the life of a sampler (ready, draining, lost). Pure state: every method takes
`now`, nothing here reads a clock or a socket. After a restart of the gateway it starts empty and is
rebuilt by the samplers that register again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from contracts.errors import BadInputError, ConflictError, check_name
from contracts.types import PROTOCOL_VERSION, SamplerInfo, Switch
from sampler_fleet.config import GroupConfig
from sampler_fleet.engines.base import EngineLoad

BUSY = 0.9  # of max_sessions
MAX_AHEAD = 1000  # versions beyond the newest that anybody in the fleet has: nobody made those
SMOOTHING = 0.1  # of a new rate, per heartbeat
IDLE = EngineLoad(num_running=0, num_waiting=0, tokens_per_second=0.0, kv_used_fraction=0.0)


class SamplerPhase(enum.StrEnum):
    """READY takes turns; DRAINING finishes what runs; LOST is remembered for the status only."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """One sampler as the gateway knows it. `lease_until` is in the seconds of `now`."""

    info: SamplerInfo
    phase: SamplerPhase
    version: int
    load: EngineLoad
    lease_until: float
    reason: str = ""  # why it is not ready
    switch: Switch | None = None  # to `version`
    tokens_per_second: float = 0.0  # it can draw: measured at its join, then while it is busy

    @property
    def sampler_id(self) -> str:
        return self.info.sampler_id

    @property
    def weights_checksum(self) -> str:
        """Of the weights it holds, if it told that of the version it has."""
        switch = self.switch
        return switch.weights_checksum if switch and switch.version == self.version else ""


class Registry:
    """The samplers of one run."""

    def __init__(
        self,
        groups: Sequence[GroupConfig],
        *,
        model_fingerprint: str,
        tokenizer_fingerprint: str,
        lease_seconds: float,
    ) -> None:
        self._groups = {group.name: group for group in groups}
        self._fingerprints = (model_fingerprint, tokenizer_fingerprint)
        self._lease_seconds = lease_seconds
        self._samplers: dict[str, dict[str, Sampler]] = {name: {} for name in self._groups}
        self._group_of: dict[str, str] = {}
        self._newest = 0
        self._ready: dict[str, list[Sampler]] = {}  # by group, until one of its samplers changes

    def __iter__(self) -> Iterator[Sampler]:
        for samplers in self._samplers.values():
            yield from samplers.values()

    def get(self, sampler_id: str) -> Sampler | None:
        group = self._group_of.get(sampler_id)
        return self._samplers[group][sampler_id] if group else None

    def ready(self, group: str) -> list[Sampler]:
        """Samplers of a group that take turns now: the same list until one of the group changes."""
        ready = self._ready.get(group)
        if ready is None:
            ready = [s for s in self._samplers[group].values() if s.phase == SamplerPhase.READY]
            self._ready[group] = ready
        return ready

    def register(self, info: SamplerInfo, now: float) -> Sampler:
        """Admits a sampler, or one that comes back.

        Raises:
            BadInputError: it speaks another protocol or would serve another policy or precision
                than its group does.
            ConflictError: a live sampler has this id.
        """
        self._check(info)
        self._newest = max(self._newest, info.version)
        known = self.get(info.sampler_id)
        if known and known.phase != SamplerPhase.LOST and known.lease_until > now:
            raise ConflictError(
                f"sampler id {info.sampler_id}: expected one that is free, found a live sampler "
                f"under it (its lease ends in {known.lease_until - now:.1f} s)"
            )
        if known:
            del self._samplers[known.info.group][info.sampler_id]
            self._ready.pop(known.info.group, None)
        return self._put(
            Sampler(
                info=info,
                phase=SamplerPhase.READY,
                version=info.version,
                load=IDLE,
                lease_until=now + self._lease_seconds,
                tokens_per_second=info.tokens_per_second,
            )
        )

    def heartbeat(
        self,
        sampler_id: str,
        *,
        version: int,
        load: EngineLoad,
        now: float,
        switch: Switch | None = None,
    ) -> None:
        """Renews a lease. A lost sampler stays lost: it has to register again.

        Raises:
            BadInputError: numbers that cannot be.
        """
        sampler = self.get(sampler_id)
        if sampler:
            self._check_beat(sampler, version, load)
            self._newest = max(self._newest, version)
            self._put(
                replace(
                    sampler,
                    version=version,
                    load=load,
                    lease_until=now + self._lease_seconds,
                    switch=switch,
                    tokens_per_second=_tracked(sampler, load),
                )
            )

    @property
    def newest_version(self) -> int:
        """That any sampler is known to have or to have had."""
        return self._newest

    def check_version(self, rule: str, version: int) -> None:
        """BadInputError on a version that the trainer cannot have made yet."""
        if self._newest and version > self._newest + MAX_AHEAD:
            raise BadInputError(
                rule,
                expected=f"a version up to {self._newest + MAX_AHEAD}, the fleet being at "
                f"{self._newest}",
                found=version,
            )

    def odd_weights(self, group: str) -> list[tuple[str, str]]:
        """Samplers of a group that hold other weights than most that have their version, and what
        is wrong with them, in words.

        Two that agree convict a third. Of two that differ, nobody knows which is right.
        """
        held: dict[int, dict[str, list[str]]] = {}  # version -> checksum -> samplers
        for sampler in self._samplers[group].values():
            if sampler.phase != SamplerPhase.LOST and (checksum := sampler.weights_checksum):
                by_checksum = held.setdefault(sampler.version, {})
                by_checksum.setdefault(checksum, []).append(sampler.sampler_id)
        odd = []
        for version, by_checksum in held.items():
            num, most = max((len(names), checksum) for checksum, names in by_checksum.items())
            for checksum, names in by_checksum.items():
                if num >= 2 and len(names) < num:
                    why = f"version {version} has checksum {checksum}, in {num} others {most}"
                    odd += [(name, why) for name in names]
        return odd

    def drain(self, sampler_id: str, reason: str) -> None:
        """No new turns for it. BadInputError when there is no such live sampler."""
        sampler = self.get(sampler_id)
        if sampler is None or sampler.phase == SamplerPhase.LOST:
            live = ", ".join(s.sampler_id for s in self if s.phase != SamplerPhase.LOST)
            raise BadInputError(
                "sampler id",
                expected=f"a live sampler ({live or 'there is none'})",
                found=sampler_id,
            )
        self._put(replace(sampler, phase=SamplerPhase.DRAINING, reason=reason))

    def lose(self, sampler_id: str, reason: str) -> None:
        """It is gone; kept for the status until its place is taken."""
        if sampler := self.get(sampler_id):
            self._put(replace(sampler, phase=SamplerPhase.LOST, load=IDLE, reason=reason))

    def expire(self, now: float) -> list[str]:
        """Marks samplers whose lease ran out as lost and returns their ids."""
        expired = [s for s in self if s.phase != SamplerPhase.LOST and s.lease_until <= now]
        for sampler in expired:
            self.lose(sampler.sampler_id, f"no heartbeat for {self._lease_seconds:g} s")
        return [sampler.sampler_id for sampler in expired]

    def _put(self, sampler: Sampler) -> Sampler:
        self._samplers[sampler.info.group][sampler.sampler_id] = sampler
        self._ready.pop(sampler.info.group, None)
        self._group_of[sampler.sampler_id] = sampler.info.group
        return sampler

    def _check_beat(self, sampler: Sampler, version: int, load: EngineLoad) -> None:
        rule = f"heartbeat of sampler {sampler.sampler_id}"
        if version < sampler.version:
            raise BadInputError(
                f"{rule}, version", expected=f"{sampler.version} or newer", found=version
            )
        self.check_version(f"{rule}, version", version)
        for field, value, most in (
            ("running", load.num_running, math.inf),
            ("waiting", load.num_waiting, math.inf),
            ("tokens_per_second", load.tokens_per_second, math.inf),
            ("kv_used_fraction", load.kv_used_fraction, 1.001),  # a float32 on its way
        ):
            if not (0 <= value <= most and math.isfinite(value)):
                found = f"{value:g}"
                raise BadInputError(f"{rule}, {field}", expected="a share or a number", found=found)

    def _check(self, info: SamplerInfo) -> None:
        check_name("sampler id", info.sampler_id)
        check_name(f"sampler {info.sampler_id}, accelerator", info.accelerator)
        rule = f"sampler {info.sampler_id}"
        if info.protocol_version != PROTOCOL_VERSION:
            raise BadInputError(
                f"{rule}, protocol", expected=PROTOCOL_VERSION, found=info.protocol_version
            )
        group = self._groups.get(info.group)
        if group is None:
            raise BadInputError(
                f"{rule}, group", expected=f"one of {', '.join(self._groups)}", found=info.group
            )
        model, tokenizer = self._fingerprints
        for field, expected, found in (
            ("weight format", group.weight_format, info.weight_format),
            ("KV format", group.kv_format, info.kv_format),
            ("model fingerprint", model, info.model_fingerprint),
            ("tokenizer fingerprint", tokenizer, info.tokenizer_fingerprint),
            (
                "weight formats",
                f"{group.weight_format} among them",
                ", ".join(info.formats)
                if info.formats and group.weight_format not in info.formats
                else None,
            ),
            ("loaded policy version", "at least 1", info.version if info.version < 1 else None),
            ("max_sessions", "at least 1", info.max_sessions if info.max_sessions < 1 else None),
            ("tokens_per_second", "a number from 0", _unless_amount(info.tokens_per_second)),
            ("price_per_hour", "a number from 0", _unless_amount(info.price_per_hour or 0.0)),
        ):
            if found is not None and expected != found:
                raise BadInputError(
                    f"{rule} of group {info.group}, {field}", expected=expected, found=found
                )


def _unless_amount(value: float) -> float | None:
    return None if 0 <= value < math.inf else value


def measured_capacities(ready: Mapping[str, Sequence[Sampler]]) -> dict[str, float]:
    """Tokens/s that the ready samplers of each group can draw.

    One that doesn't say what it can is taken to draw per session what the others do on average.
    """
    known = [s for samplers in ready.values() for s in samplers if s.tokens_per_second]
    places = sum(s.info.max_sessions for s in known)
    per_place = sum(s.tokens_per_second for s in known) / places if places else 1.0
    return {
        group: sum(s.tokens_per_second or per_place * s.info.max_sessions for s in samplers)
        for group, samplers in ready.items()
    }


def _tracked(sampler: Sampler, load: EngineLoad) -> float:
    """What it can draw. A higher rate than was known always counts; a lower one only when it had as
    much to do as it serves well."""
    known, rate = sampler.tokens_per_second, load.tokens_per_second
    is_busy = load.num_running >= BUSY * sampler.info.max_sessions
    if rate <= 0 or (rate < known and not is_busy):
        return known
    return known + SMOOTHING * (rate - known) if known else (rate if is_busy else 0.0)
