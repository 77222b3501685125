"""The directories of a sampler's versions: what is at hand, what is being made, what goes.

    <version>/           complete and verified, with manifest.json
    .partial-<version>/  being fetched; resumed after a break

Owns these, and nothing of the network. All methods block.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from contracts.types import Manifest
from weight_sync import durable
from weight_sync.delta import SUFFIX as DELTA_SUFFIX
from weight_sync.manifest import (
    NAME,
    CorruptError,
    extra_files,
    read_manifest,
    verify_directory,
    version_of,
    write_manifest,
)


class HeldVersions:
    """What one sampler holds of one format, in a directory that is its alone."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """Of the finished versions the newest `keep` stay."""
        self._root, self._keep = directory, keep

    def directory(self, version: int) -> Path:
        return self._root / str(version)

    def _partial(self, version: int) -> Path:
        return self._root / f".partial-{version}"

    def whole(self, manifest: Manifest) -> Path | None:
        """The directory that an earlier fetch left of this very version, if it is still intact."""
        directory = self.directory(manifest.version)
        with _unless_damaged():
            if read_manifest(directory) == manifest and not extra_files(directory, manifest):
                verify_directory(directory, manifest)
                return directory
        return None

    def prepare(self, manifest: Manifest) -> Path:
        """Makes room for one version; what remains of other attempts goes.

        The directory to fill: in it stand only files that the version has, and parts of deltas.
        """
        final, partial = self.directory(manifest.version), self._partial(manifest.version)
        self._root.mkdir(parents=True, exist_ok=True)
        durable.remove_tree(final)
        for path in self._root.iterdir():
            is_left_over = path.name.startswith(".") and path != partial
            is_none = version_of(path.name) and not (path / NAME).is_file()
            if is_left_over or is_none:
                durable.remove_tree(path)
        if partial.is_symlink() or not partial.is_dir():
            durable.remove_tree(partial)
        partial.mkdir(exist_ok=True)
        delta = re.compile(rf"\.[0-9]+-.*{re.escape(DELTA_SUFFIX)}")
        for path in extra_files(partial, manifest):
            if not (delta.fullmatch(path.name) and path.is_file() and not path.is_symlink()):
                durable.remove_tree(path)
        return partial

    def finish(self, manifest: Manifest) -> Path:
        """Makes a verified version visible; of the others all but the newest go."""
        final, partial = self.directory(manifest.version), self._partial(manifest.version)
        for path in extra_files(partial, manifest):  # deltas of an attempt that came to nothing
            durable.remove_tree(path)
        write_manifest(partial, manifest)
        durable.move_into_place(partial, final)
        # it may be older than others: a service that was restarted may hold no newer one
        others = [version for version in self._versions() if version != manifest.version]
        for version in others[: max(0, len(others) - self._keep + 1)]:
            durable.remove_tree(self.directory(version))
        return final

    def newest_below(self, version: int) -> Manifest | None:
        """The newest version at hand before `version`. What proves to be none of ours goes."""
        for held in reversed(self._versions()):
            if held < version:
                with _unless_damaged():
                    manifest = read_manifest(self.directory(held))
                    if manifest.version == held:
                        return manifest
                durable.remove_tree(self.directory(held))
        return None

    def remove_if_changed(self, manifest: Manifest) -> None:
        """A version whose bytes are no longer those that were verified helps nobody."""
        directory = self.directory(manifest.version)
        with _unless_damaged():
            verify_directory(directory, manifest)
            return
        durable.remove_tree(directory)

    def _versions(self) -> list[int]:
        """Versions at hand, ascending."""
        return sorted(filter(None, (version_of(path.name) for path in self._root.iterdir())))


@contextlib.contextmanager
def _unless_damaged() -> Iterator[None]:
    """Leaves the block where bytes on disk are missing, unreadable or others than were written."""
    try:
        yield
    except CorruptError:
        pass
    except OSError as error:
        if error.errno in durable.TEMPORARY:
            raise
