"""The settings of a run file that people edit while the run goes on.

Owns when the file is read again, what an edit may change, and the copy that new samplers are
started with. Must not act on a setting. The autoscaler and the gateway follow the file each for
itself, and both refuse the same edits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError
from contracts.runfile import write_resolved
from sampler_fleet.config import AutoscalerConfig, FleetConfig, Settings, read_settings

log = logging.getLogger(__name__)

EDITABLE = {"samplers", "min_samplers", "max_samplers", "price_per_hour"}  # of a group


class LiveFile:
    """The newest usable settings of a run file."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises as `read_settings`."""
        self._path = path
        self._seen = self._state()
        self.settings = read_settings(path)
        self.problem = ""  # why the last edit is left out, in a sentence

    def follow(self, take: Callable[[Settings], None]) -> None:
        """Takes over an edit: bounds, prices, [autoscaler]. One that is wrong, changes more of the
        fleet or is refused by `take` (BadInputError) is logged in one sentence, and what was in
        force stays."""
        state = self._state()
        if state == self._seen:
            return
        self._seen, self.problem = state, ""
        try:
            settings = read_settings(self._path)
            _check_edit(self.settings, settings)
            take(settings)
        except (BadInputError, OSError) as error:
            self.problem = f"an edit is left out and the settings stay: {error}"
            log.warning("%s", self.problem)
            return
        self.settings = settings
        log.info("run file %s was edited: taken over", self._path)

    def _state(self) -> tuple[int, int, int] | None:
        """What differs when the file was written or replaced; None when it is not there."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


class LiveSettings:
    """What the autoscaler follows: a run file with [autoscaler], and a copy for new samplers."""

    def __init__(self, path: Path, copy: Path) -> None:
        """Reads the file. `copy` always holds the settings in force, as a run record.

        Raises:
            BadInputError, FileNotFoundError: see `read_settings`; no [autoscaler].
        """
        self._file, self._copy = LiveFile(path), copy
        copy.parent.mkdir(parents=True, exist_ok=True)
        self._take(self._file.settings)

    @property
    def fleet(self) -> FleetConfig:
        return self._file.settings.fleet

    @property
    def problem(self) -> str:
        """Why the last edit is left out, in a sentence; empty if it is not."""
        return self._file.problem

    def follow(self) -> None:
        """As `LiveFile.follow`."""
        self._file.follow(self._take)

    def _take(self, settings: Settings) -> None:
        self.autoscaler = _autoscaler_of(settings)
        write_resolved(self._copy, settings.to_dict())


def _autoscaler_of(settings: Settings) -> AutoscalerConfig:
    if settings.autoscaler is None:
        raise BadInputError("run file", expected="a section [autoscaler]", found="none")
    return settings.autoscaler


def _check_edit(before: Settings, after: Settings) -> None:
    """Refuses what processes that run already would not hear of."""
    if before.autoscaler:
        _autoscaler_of(after)
    now = _fixed(after.fleet)
    for key, was in _fixed(before.fleet).items():
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
