"""The settings of a run file that people edit while the run goes on.

Owns when the file is read again, what an edit may change, and the copy that new samplers are
started with. Must not act on a setting.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError
from contracts.runfile import write_resolved
from sampler_fleet.config import AutoscalerConfig, FleetConfig, Settings, read_settings

log = logging.getLogger(__name__)

EDITABLE = {"samplers", "min_samplers", "max_samplers", "price_per_hour"}  # of a group


class LiveSettings:
    """The newest usable settings of a run file with [autoscaler]."""

    def __init__(self, path: Path, copy: Path) -> None:
        """Reads the file. `copy` always holds the settings in force, as a run record.

        Raises:
            BadInputError, FileNotFoundError: see `read_settings`; no [autoscaler].
        """
        self._path, self._copy = path, copy
        self._seen = self._state()
        self._settings = read_settings(path)
        self.autoscaler = _autoscaler_of(self._settings)
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_resolved(copy, self._settings.to_dict())

    @property
    def fleet(self) -> FleetConfig:
        return self._settings.fleet

    def follow(self) -> None:
        """Takes over an edit: bounds, prices, [autoscaler]. One that is wrong, or changes more of
        the fleet, is logged in one sentence, and what was in force stays."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            settings = read_settings(self._path)
            autoscaler = _autoscaler_of(settings)
            _check_edit(self.fleet, settings.fleet)
        except (BadInputError, OSError) as error:
            log.warning("an edit is left out and the settings stay: %s", error)
            return
        self._settings, self.autoscaler = settings, autoscaler
        write_resolved(self._copy, settings.to_dict())
        log.info("run file %s was edited: taken over", self._path)

    def _state(self) -> tuple[int, int, int] | None:
        """What differs when the file was written or replaced; None when it is not there."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def _autoscaler_of(settings: Settings) -> AutoscalerConfig:
    if settings.autoscaler is None:
        raise BadInputError("run file", expected="a section [autoscaler]", found="none")
    return settings.autoscaler


def _check_edit(before: FleetConfig, after: FleetConfig) -> None:
    """Refuses what processes that run already would not hear of."""
    now = _fixed(after)
    for key, was in _fixed(before).items():
        if now.get(key) != was:
            raise BadInputError(
                f"run file in mid-run, fleet.{key}",
                expected=f"{was} (only bounds, prices and [autoscaler] may change)",
                found=now.get(key),
            )


def _fixed(fleet: FleetConfig) -> dict[str, Any]:
    """What of [fleet] holds for the whole run, by key; first of all which groups there are."""
    fields: dict[str, Any] = {"groups": ", ".join(group.name for group in fleet.groups)}
    fields |= fleet.model_dump(mode="json", exclude={"groups", "prices"})
    for group in fleet.groups:
        own = group.model_dump(mode="json", exclude=EDITABLE)
        fields |= {f"groups.{group.name}.{key}": value for key, value in own.items()}
    return fields
