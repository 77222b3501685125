"""The version store: every published version on disk, in each format made of it, and deltas.

    LATEST                        the pointer: the newest version, moved by compare-and-swap
    versions/<v>/<format>/        a checkpoint directory with its manifest.json
    versions/<v>/published        the mark of a version to which the pointer has moved
    deltas/<format>/<base>-<v>/   what turns <base> into <v>, with its manifest.json
    staging/                      what is being written; emptied when the store is opened
    lock                          held by the one process that has the store open

Owns durability and visibility: directories are flushed before they are renamed into place, the
pointer moves after that, then the version gets its mark. A version above the pointer and without a
mark was never acknowledged; opening the store removes it. So a kill at any moment leaves the state
before or after an operation. Pointer and marks hold checksums, and a pointer that is lost is made
again from the marks. All methods block, and may be called from any thread. Knows no network.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from contracts.errors import BadInputError, ConflictError
from contracts.types import FileEntry, Manifest, WeightFormat
from weight_sync import durable
from weight_sync.chain import Edge
from weight_sync.convert import Options, plan_directory
from weight_sync.formats import finite
from weight_sync.manifest import (
    CorruptError,
    describe_directory,
    describe_file,
    read_manifest,
    version_of,
    write_manifest,
)
from weight_sync.safetensors_file import INDEX_NAME

log = logging.getLogger(__name__)

MAX_VERSION = 2**63 - 1  # as the wire has it
_MARK = "published"


class VersionStore:
    """One open store. Raises BadInputError when another process has it open."""

    def __init__(self, root: Path) -> None:
        self.root, self._versions, self._staging = root, root / "versions", root / "staging"
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
        self._latest = latest = self._recover_pointer()
        for path in [*self._staging.iterdir(), *self.root.glob(".LATEST.*")]:
            durable.remove_tree(path)
        for path in self._versions.iterdir():
            version = version_of(path.name)
            if path.name.startswith(".") or (version and version > latest):
                durable.remove_tree(path)
            elif version and path.is_dir():
                for part in path.glob(".*"):
                    durable.remove_tree(part)
        for format in WeightFormat:
            self._delta_manifests[format] = dict(self._recover_deltas(format, latest))
        if latest and not (self._versions / str(latest) / WeightFormat.BF16).is_dir():
            raise BadInputError(
                f"store {self.root}", expected=f"version {latest} in bf16", found="it is gone"
            )
        if latest:
            _write_version(self._mark(latest), latest)

    def _recover_pointer(self) -> int:
        """The newest version that was acknowledged; pointer and marks both tell it.

        Raises BadInputError where neither does, rather than remove a version.
        """
        there = sorted(filter(None, (version_of(path.name) for path in self._versions.iterdir())))
        pointer = _read_version(self._pointer)
        marked = [version for version in there if _read_version(self._mark(version)) == version]
        latest = max(pointer or 0, *marked, 0)
        if pointer is None and there and not latest:
            raise BadInputError(
                f"{self._pointer}",
                expected="the newest version and its checksum",
                found=f"none, while versions/ holds {', '.join(map(str, there))}",
            )
        if pointer is None and self._pointer.exists() and not there:
            raise BadInputError(
                f"{self._pointer}", expected="a version and its checksum", found="something else"
            )
        if pointer != latest:
            if there:
                log.warning("%s is lost; version %d was the newest", self._pointer, latest)
            _write_version(self._pointer, latest)
        return latest

    def _mark(self, version: int) -> Path:
        return self._versions / str(version) / _MARK

    def _recover_deltas(self, format: WeightFormat, latest: int) -> Iterator[tuple[Edge, Manifest]]:
        """Deltas between versions that were acknowledged; the others are removed."""
        folder = self._deltas / format
        for path in folder.iterdir() if folder.is_dir() else ():
            try:
                manifest = read_manifest(path)
                edge = manifest.base_version, manifest.version
            except (OSError, CorruptError):
                edge = (0, latest + 1)
            if edge[1] > latest or path.name != f"{edge[0]}-{edge[1]}":
                durable.remove_tree(path)
            else:
                yield edge, manifest

    @property
    def latest(self) -> int:
        """The newest version; 0 in an empty store."""
        return self._latest

    def versions(self) -> list[int]:
        """Visible versions, ascending."""
        there = [version_of(path.name) for path in self._versions.iterdir()]
        return sorted(version for version in there if version and version <= self._latest)

    def formats(self, version: int) -> list[WeightFormat]:
        """The formats in which a version is complete: its manifest is there and intact."""
        return [format for format in WeightFormat if self.has(version, format)]

    def has(self, version: int, format: WeightFormat) -> bool:
        try:
            self.manifest(version, format)
        except (FileNotFoundError, CorruptError):
            return False
        return True

    def directory(self, version: int, format: WeightFormat) -> Path:
        """Raises FileNotFoundError if the store doesn't have it."""
        path = self._versions / str(version) / format
        if version > self.latest or not path.is_dir():
            raise FileNotFoundError(f"version {version} in {format} is not in the store")
        return path

    def manifest(self, version: int, format: WeightFormat) -> Manifest:
        """Raises FileNotFoundError if the store doesn't have it, CorruptError if it changed."""
        with self._mutex:
            if (version, format) not in self._manifests:
                manifest = read_manifest(self.directory(version, format))
                if (manifest.version, manifest.format) != (version, format):
                    raise CorruptError(
                        f"version {version} in {format} has the manifest of version "
                        f"{manifest.version} in {manifest.format}"
                    )
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
        except CorruptError:
            raise ConflictError(
                f"version {version} is already published, and its manifest is corrupt"
            ) from None
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
            BadInputError: not a whole BF16 checkpoint of finite weights.
        """
        try:
            manifest = describe_directory(
                staged, version=version, format=WeightFormat.BF16, recipe=""
            )
            wrong = {entry.name for entry in set(files) ^ set(manifest.files)}
            if not wrong:
                _check_source(staged, manifest)
        except BadInputError:
            if not (wrong := {e.name for e in files if not _is_file(staged, e)}):
                raise
        if wrong:
            names = ", ".join(sorted(wrong))
            raise CorruptError(f"version {version}: {names} did not arrive as announced")
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
            _write_version(self._pointer, version)
            self._latest = version
            _write_version(self._mark(version), version)

    def withdraw(self, version: int) -> int:
        """Takes back the newest version, and returns the newest of those that stay.

        Raises:
            ConflictError: another one is the newest.
        """
        with self._mutex:
            if version != self._latest or not version:
                raise ConflictError(
                    f"withdrawal of version {version}: expected it to be the newest, found "
                    f"{self._latest}"
                )
            before = max((v for v in self.versions() if v < version), default=0)
            self._mark(version).unlink(missing_ok=True)  # first: marks move a pointer forward
            durable.flush(self._mark(version).parent)
            _write_version(self._pointer, before)
            self._latest = before
            for format in WeightFormat:
                self._manifests.pop((version, format), None)
                touching = [edge for edge in self._delta_manifests[format] if version in edge]
                self.discard_deltas(format, touching)
            durable.remove_tree(self._versions / str(version))
            return before

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

    def collect(self, keep: int, in_use: Collection[int] = ()) -> list[int]:
        """Removes all but the newest `keep` versions and those in use.

        Returns the versions removed. Files that are open stay readable until they are closed.
        """
        with self._mutex:
            removable = [
                version for version in self.versions()[: -max(keep, 1)] if version not in in_use
            ]
            for version in removable:
                for key in [key for key in self._manifests if key[0] == version]:
                    del self._manifests[key]
                durable.remove_tree(self._versions / str(version))
            return removable


def _check_source(staged: Path, manifest: Manifest) -> None:
    """Refuses what is no whole BF16 checkpoint (or float16, float32) of finite weights.

    Raises BadInputError.
    """
    options = Options(format=WeightFormat.BF16, source_format=WeightFormat.BF16)
    _, checkpoint = plan_directory(staged, options)
    shards = [entry.name for entry in manifest.files if entry.name.endswith(".safetensors")]
    read = {header.file for header in checkpoint.tensors.values()}
    if stray := sorted(set(shards) - read):
        raise BadInputError("checkpoint", expected="an index that names each shard", found=stray)
    if len(shards) > 1 and not (staged / INDEX_NAME).is_file():
        raise BadInputError("checkpoint", expected=f"an {INDEX_NAME}", found="shards alone")
    for name, header in checkpoint.tensors.items():
        finite.check(checkpoint.bytes_of(name), header.dtype, name)
        checkpoint.release(name)


def _is_file(directory: Path, entry: FileEntry) -> bool:
    path = directory / entry.name
    return path.is_file() and durable.checksum_file(path) == entry.checksum


def _write_version(path: Path, version: int) -> None:
    durable.write_text(path, f"{version} {durable.checksum(str(version).encode())}\n")


def _read_version(path: Path) -> int | None:
    """What `_write_version` wrote, all of it; None otherwise."""
    try:
        number, _, check = path.read_bytes().decode("ascii").removesuffix("\n").partition(" ")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None
    if check != durable.checksum(number.encode()) or not number.isdecimal():
        return None
    return int(number)
