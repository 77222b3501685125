"""The version store: every published version on disk, in each format made of it, and deltas.

    LATEST                        the pointer: the newest version, moved by compare-and-swap
    versions/<v>/<format>/        a checkpoint directory with its manifest.json
    versions/<v>/pinned           there while nobody may collect the version
    deltas/<format>/<base>-<v>/   what turns <base> into <v>, with its manifest.json
    staging/                      what is being written; emptied when the store is opened
    lock                          held by the one process that has the store open

Owns durability and visibility: directories are flushed before they are renamed into place, and the
pointer moves after that. A version above the pointer was never acknowledged; opening the store
removes it. So a kill at any moment leaves the state before or after an operation. All methods
block, and may be called from any thread. Knows no network and no encoder.
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from contracts.errors import BadInputError, ConflictError
from contracts.types import FileEntry, Manifest, WeightFormat
from weight_sync import durable
from weight_sync.chain import Edge
from weight_sync.manifest import (
    CorruptError,
    describe_directory,
    describe_file,
    read_manifest,
    write_manifest,
)


class VersionStore:
    """One open store. Raises BadInputError when another process has it open."""

    def __init__(self, root: Path) -> None:
        self._root, self._versions, self._staging = root, root / "versions", root / "staging"
        self._deltas = root / "deltas"
        self._pointer = root / "LATEST"
        self._mutex = threading.RLock()
        self._manifests: dict[tuple[int, WeightFormat], Manifest] = {}
        self._delta_manifests: dict[WeightFormat, dict[Edge, Manifest]] = {}
        for directory in (root, self._versions, self._staging, self._deltas):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(root / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BadInputError(
                f"store {root}", expected="no other service on it", found="it is in use"
            ) from None
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process open the store."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _recover(self) -> None:
        """Removes what an interrupted operation left."""
        latest = self.latest
        for path in [*self._staging.iterdir(), *self._root.glob(".LATEST.*")]:
            _remove(path)
        for path in self._versions.iterdir():
            if not path.name.isdecimal() or int(path.name) > latest:
                _remove(path)
                continue
            for part in path.iterdir():
                if part.name.startswith("."):
                    _remove(part)
        for format in WeightFormat:
            self._delta_manifests[format] = dict(self._recover_deltas(format, latest))
        if latest and WeightFormat.BF16 not in self.formats(latest):
            raise BadInputError(
                f"store {self._root}", expected=f"version {latest} in bf16", found="it is gone"
            )

    def _recover_deltas(self, format: WeightFormat, latest: int) -> Iterator[tuple[Edge, Manifest]]:
        """Deltas between versions that were acknowledged; the others are removed."""
        folder = self._deltas / format
        for path in folder.iterdir() if folder.is_dir() else ():
            try:
                manifest = read_manifest(path)
                edge = manifest.base_version, manifest.version
            except (FileNotFoundError, BadInputError):
                edge = (0, latest + 1)
            if edge[1] > latest or path.name != f"{edge[0]}-{edge[1]}":
                _remove(path)
            else:
                yield edge, manifest

    @property
    def latest(self) -> int:
        """The newest version; 0 in an empty store."""
        try:
            text = self._pointer.read_text().strip()
        except FileNotFoundError:
            return 0
        if not text.isdecimal():
            raise BadInputError(f"{self._pointer}", expected="a version", found=repr(text))
        return int(text)

    def versions(self) -> list[int]:
        """Visible versions, ascending."""
        latest = self.latest
        names = [path.name for path in self._versions.iterdir() if path.name.isdecimal()]
        return sorted(int(name) for name in names if int(name) <= latest)

    def formats(self, version: int) -> list[WeightFormat]:
        """The formats in which a version is complete."""
        return [f for f in WeightFormat if (self._versions / str(version) / f).is_dir()]

    def directory(self, version: int, format: WeightFormat) -> Path:
        """Raises FileNotFoundError if the store doesn't have it."""
        path = self._versions / str(version) / format
        if version > self.latest or not path.is_dir():
            raise FileNotFoundError(f"version {version} in {format} is not in the store")
        return path

    def manifest(self, version: int, format: WeightFormat) -> Manifest:
        """Raises FileNotFoundError if the store doesn't have it."""
        with self._mutex:
            if (version, format) not in self._manifests:
                manifest = read_manifest(self.directory(version, format))
                self._manifests[version, format] = manifest
            return self._manifests[version, format]

    def stage(self) -> Path:
        """A new empty directory on the store's file system, the caller's to fill or remove."""
        path = self._staging / uuid.uuid4().hex
        path.mkdir()
        return path

    def holds(self, version: int, files: Collection[FileEntry]) -> bool:
        """Whether `version` was published with just these files.

        Raises:
            ConflictError: it was published with others, or a newer version was.
        """
        latest = self.latest
        if version > latest:
            return False
        try:
            published = set(self.manifest(version, WeightFormat.BF16).files)
        except FileNotFoundError:
            published = set()
        if published == set(files):
            return True
        if published:
            raise ConflictError(f"version {version} is already published with other content")
        raise ConflictError(f"version {version} is below the newest, {latest}; versions only grow")

    def commit(self, staged: Path, version: int, files: Collection[FileEntry]) -> Manifest:
        """Publishes a staged BF16 checkpoint directory once its bytes prove to be `files`.

        Publishing the same content again changes nothing.

        Raises:
            CorruptError: the staged bytes are not those announced.
            ConflictError: as `holds`.
            BadInputError: not a checkpoint.
        """
        manifest = describe_directory(staged, version=version, format=WeightFormat.BF16, recipe="")
        if set(manifest.files) != set(files):
            wrong = sorted({entry.name for entry in set(files) ^ set(manifest.files)})
            raise CorruptError(f"version {version}: {', '.join(wrong)} did not arrive as announced")
        write_manifest(staged, manifest)
        durable.flush_tree(staged)
        whole = self.stage()
        try:
            staged.rename(whole / WeightFormat.BF16)
            with self._mutex:
                if not self.holds(version, files):
                    latest, target = self.latest, self._versions / str(version)
                    durable.remove_tree(target)  # there only if an advance failed
                    durable.move_into_place(whole, target)
                    self.advance(latest, version)
        finally:
            durable.remove_tree(whole)
        return manifest

    def advance(self, expected: int, version: int) -> None:
        """Moves the pointer from `expected` to a newer version that is durable.

        Raises:
            ConflictError: the pointer was elsewhere, or `version` is not newer.
        """
        with self._mutex:
            latest = self.latest
            if latest != expected or version <= latest:
                raise ConflictError(
                    f"pointer to version {version}: expected it at {expected}, found it at {latest}"
                )
            durable.write_text(self._pointer, f"{version}\n")

    def add_format(
        self, staged: Path, version: int, format: WeightFormat, *, recipe: str
    ) -> Manifest:
        """Makes a staged, converted checkpoint directory visible beside its source.

        Raises:
            FileNotFoundError: the version was collected meanwhile.
        """
        manifest = describe_directory(staged, version=version, format=format, recipe=recipe)
        write_manifest(staged, manifest)
        with self._mutex:
            target = self.directory(version, WeightFormat.BF16).parent / format
            durable.remove_tree(target)
            durable.move_into_place(staged, target)
            self._manifests[version, format] = manifest
        return manifest

    def discard(self, version: int, format: WeightFormat) -> None:
        """Removes a converted format and the deltas made of it, to be made again."""
        assert format != WeightFormat.BF16, "the source of all formats"
        with self._mutex:
            self._manifests.pop((version, format), None)
            durable.remove_tree(self._versions / str(version) / format)
            touching = [edge for edge in self._delta_manifests[format] if version in edge]
            self.discard_deltas(format, touching)

    # Deltas

    def add_delta(self, staged: Path, base: int, version: int, format: WeightFormat) -> Manifest:
        """Makes a staged directory of delta files visible; it is there once, whoever comes first.

        Raises:
            FileNotFoundError: the version was collected meanwhile.
        """
        files = tuple(describe_file(path)[0] for path in sorted(staged.iterdir()))
        manifest = Manifest(version=version, base_version=base, format=format, files=files)
        write_manifest(staged, manifest)
        with self._mutex:
            self.directory(version, format)
            folder = self._deltas / format
            folder.mkdir(exist_ok=True)
            known = self._delta_manifests[format]
            if (base, version) not in known:
                durable.move_into_place(staged, folder / f"{base}-{version}")
                known[base, version] = manifest
            return known[base, version]

    def deltas(self, format: WeightFormat) -> dict[Edge, Manifest]:
        """All deltas of a format, by (base, version)."""
        with self._mutex:
            return dict(self._delta_manifests[format])

    def delta_directory(self, base: int, version: int, format: WeightFormat) -> Path:
        """Raises FileNotFoundError if the store doesn't have it."""
        if (base, version) not in self._delta_manifests[format]:
            raise FileNotFoundError(f"no delta from version {base} to {version} in {format}")
        return self._deltas / format / f"{base}-{version}"

    def collect_deltas(self, keep: int) -> None:
        """Keeps, in each format, the deltas to the newest `keep` versions that have any."""
        for format in WeightFormat:
            edges = self.deltas(format)
            newest = sorted({version for _, version in edges})[-keep:]
            self.discard_deltas(format, [edge for edge in edges if edge[1] not in newest])

    def discard_deltas(self, format: WeightFormat, edges: Collection[Edge]) -> None:
        """Removes deltas. Files that are open stay readable until they are closed."""
        with self._mutex:
            for base, version in edges:
                if self._delta_manifests[format].pop((base, version), None):
                    durable.remove_tree(self._deltas / format / f"{base}-{version}")

    # Retention

    def pin(self, version: int) -> None:
        """Keeps a version from being collected. Raises FileNotFoundError if it is gone."""
        with self._mutex:
            (self.directory(version, WeightFormat.BF16).parent / "pinned").touch()

    def unpin(self, version: int) -> None:
        (self._versions / str(version) / "pinned").unlink(missing_ok=True)

    def collect(self, keep: int, in_use: Collection[int] = ()) -> list[int]:
        """Removes all but the newest `keep` versions, the pinned and those in use.

        Returns the versions removed. Files that are open stay readable until they are closed.
        """
        with self._mutex:
            removable = [
                version
                for version in self.versions()[: -max(keep, 1)]
                if version not in in_use and not (self._versions / str(version) / "pinned").exists()
            ]
            for version in removable:
                for key in [key for key in self._manifests if key[0] == version]:
                    del self._manifests[key]
                durable.remove_tree(self._versions / str(version))
            return removable


def _remove(path: Path) -> None:
    if path.is_dir():
        durable.remove_tree(path)
    else:
        path.unlink(missing_ok=True)
