"""The two ends of weight sync: `publish` for the trainer, `WeightClient` for a sampler.

Owns resuming, verification and the local directories of a sampler. Never hands out a directory
whose every checksum was not just recomputed. Knows nothing of engines or training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio

from contracts import codec
from contracts.credentials import Credentials
from contracts.errors import BadInputError, RetryError
from contracts.pb import weights_pb2, weights_pb2_grpc
from contracts.rpc import CHUNK_BYTES, DEADLINE_S, aio_channel, calling, sync_channel
from contracts.types import Fetched, FileEntry, Manifest, WeightFormat
from weight_sync import durable
from weight_sync.delta import SUFFIX as DELTA_SUFFIX
from weight_sync.delta import DeltaError, apply_delta
from weight_sync.manifest import (
    CorruptError,
    checkpoint_files,
    is_plain_name,
    read_manifest,
    verify_directory,
    verify_file,
    write_manifest,
)

__all__ = ["WeightClient", "publish", "read_manifest", "status"]

log = logging.getLogger(__name__)

_SLOWEST_BYTES_PER_S = 10e6  # a deadline allows for this rate
_MAKE_DELTA_S = 600.0  # of a large model, on a busy machine
_WATCH_S = 3600.0  # a watch is renewed after an hour, so that none outlives a lost peer for ever


def _backoff(attempt: int) -> float:
    """Seconds before attempt 1, 2, ...; jitter keeps a fleet from returning at once."""
    return min(0.1 * 2**attempt, 5.0) * random.uniform(0.5, 1.0)


# The trainer's end


def publish(
    channel_address: str,
    credentials: Credentials | str,
    directory: Path,
    version: int,
    *,
    patience_s: float = 10.0,
) -> None:
    """Publishes a BF16 checkpoint directory; returns when it is durable at the service.

    Publishing the same content twice succeeds. The service being away is waited out for
    `patience_s`.

    Raises:
        RetryError: no service, or its disk is full.
        ConflictError: the version exists with other content, or a newer one does.
        BadInputError: not a checkpoint.
        AuthError: wrong token.
    """
    paths = checkpoint_files(Path(directory))
    files = [
        FileEntry(
            name=path.name,
            num_bytes=path.stat().st_size,
            checksum=durable.checksum_file(path),
        )
        for path in paths
    ]
    seconds = DEADLINE_S + sum(entry.num_bytes for entry in files) / _SLOWEST_BYTES_PER_S
    give_up = time.monotonic() + patience_s
    channel = sync_channel(channel_address, credentials)
    try:
        stub = weights_pb2_grpc.WeightsStub(channel)
        attempt = 0
        while True:
            try:
                with calling(channel_address):
                    stub.Publish(_publish_requests(version, files, paths), timeout=seconds)
                return
            except RetryError as error:
                attempt += 1
                pause = _backoff(attempt)
                if time.monotonic() + pause > give_up:
                    raise
                log.warning("publish of version %d: %s; trying again", version, error)
                time.sleep(pause)
    finally:
        channel.close()


def _publish_requests(
    version: int, files: list[FileEntry], paths: list[Path]
) -> Iterator[weights_pb2.PublishRequest]:
    header = weights_pb2.PublishHeader(
        version=version, files=[codec.file_to_pb(entry) for entry in files]
    )
    yield weights_pb2.PublishRequest(header=header)
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield weights_pb2.PublishRequest(data=chunk)


def status(address: str, credentials: Credentials | str) -> weights_pb2.StatusReply:
    """What the service holds. Raises RetryError or AuthError."""
    channel = sync_channel(address, credentials)
    try:
        with calling(address):
            stub = weights_pb2_grpc.WeightsStub(channel)
            return stub.Status(weights_pb2.StatusRequest(), timeout=DEADLINE_S)
    finally:
        channel.close()


# A sampler's end


class WeightClient:
    """Versions of one format, brought into `directory` (which is this client's alone).

    directory/<version>/           complete and verified, with manifest.json
    directory/.partial-<version>/  being fetched; resumed after a break
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | str,
        format: WeightFormat,
        directory: Path,
        *,
        keep: int = 2,
        patience_s: float = 30.0,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Keeps the newest `keep` versions; waits `patience_s` for a service that is away."""
        self._address, self._credentials = address, Credentials.of(credentials)
        self._format = WeightFormat(format)
        self._directory = Path(directory)
        self._keep, self._patience_s, self._on_bytes = keep, patience_s, on_bytes
        self._channel: grpc.aio.Channel | None = None

    def _stub(self) -> weights_pb2_grpc.WeightsStub:
        if self._channel is None:  # made here, as it belongs to the running loop
            self._channel = aio_channel(self._address, self._credentials)
        return weights_pb2_grpc.WeightsStub(self._channel)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def watch(self, after: int) -> AsyncIterator[Manifest]:
        """Manifests above `after`, each newer than the one before; never ends by itself.

        A service that restarts or is away is waited for.

        Raises:
            AuthError: wrong token.
            BadInputError: the newest version cannot be converted to this format.
        """
        attempt = 0
        while True:
            request = weights_pb2.WatchRequest(format=self._format, after=after)
            call = self._stub().Watch(request, timeout=_WATCH_S)
            try:
                with calling(self._address):
                    async for message in call:
                        manifest = codec.manifest_from_pb(message)
                        self._check(manifest)
                        attempt, after = 0, manifest.version
                        yield manifest
            except RetryError as error:
                log.warning("watching %s: %s; trying again", self._format, error)
            finally:
                call.cancel()
            attempt += 1
            await asyncio.sleep(_backoff(attempt))

    def _check(self, manifest: Manifest) -> None:
        """Refuses a manifest that could make this client write where it must not."""
        names = [entry.name for entry in manifest.files]
        if (
            manifest.format != self._format
            or manifest.version < 1
            or not names
            or len(set(names)) != len(names)
            or not all(map(is_plain_name, names))
        ):
            raise BadInputError(
                f"manifest from {self._address}",
                expected=f"a version from 1 in {self._format} with plain file names",
                found=f"version {manifest.version} in {manifest.format} with {names[:3]}",
            )

    async def fetch(self, manifest: Manifest) -> Fetched:
        """A complete, verified directory of that version.

        From the newest version at hand the shortest chain of deltas is taken, if it is shorter than
        the files themselves. What an earlier attempt brought is continued. Corrupt bytes are
        discarded and fetched again.

        Raises:
            RetryError: the service is away for longer than the patience, has collected the
                version, or holds corrupt bytes.
            AuthError: wrong token.
            BadInputError: an unusable manifest.
        """
        self._check(manifest)
        final = self._directory / str(manifest.version)
        if await asyncio.to_thread(_is_whole, final, manifest):
            return Fetched(directory=final)
        partial = self._directory / f".partial-{manifest.version}"
        await asyncio.to_thread(self._prepare, final, partial)
        phases, base = _Phases(), 0
        if deltas := await self._chain(manifest):
            try:
                await self._follow(deltas, manifest, partial, phases)
                base = deltas[0].base_version
            except (DeltaError, CorruptError, _GoneError) as error:
                log.warning("version %d: %s; fetching it in full", manifest.version, error)
        if not base:
            for entry in manifest.files:
                await self._fetch_verified(manifest, entry, partial / entry.name, phases)
        with phases.timed("verify"):
            await asyncio.to_thread(self._finish, partial, final, manifest)
        return Fetched(
            directory=final,
            base_version=base,
            num_bytes=phases.num_bytes,
            fetch_s=phases.seconds["fetch"],
            apply_s=phases.seconds["apply"],
            verify_s=phases.seconds["verify"],
        )

    def _prepare(self, final: Path, partial: Path) -> None:
        """Makes room for one version; what remains of other attempts goes."""
        self._directory.mkdir(parents=True, exist_ok=True)
        durable.remove_tree(final)
        for path in self._directory.glob(".*"):
            if path != partial and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        partial.mkdir(exist_ok=True)

    def _finish(self, partial: Path, final: Path, manifest: Manifest) -> None:
        """Makes a verified version visible; of the others all but the newest go."""
        for path in partial.glob(".*"):  # deltas of an attempt that came to nothing
            path.unlink()
        write_manifest(partial, manifest)
        durable.move_into_place(partial, final)
        # it may be older than others: a service that was restarted may hold no newer one
        others = [version for version in self._held() if version != manifest.version]
        for version in others[: max(0, len(others) - self._keep + 1)]:
            durable.remove_tree(self._directory / str(version))

    def _held(self) -> list[int]:
        """Versions at hand, ascending."""
        return sorted(int(p.name) for p in self._directory.iterdir() if p.name.isdecimal())

    # Deltas

    async def _chain(self, manifest: Manifest) -> list[Manifest]:
        """The deltas to take from the newest version at hand; none if the files are shorter."""
        held = [version for version in self._held() if version < manifest.version]
        if not held:
            return []
        request = weights_pb2.ChainRequest(
            format=self._format, have=held[-1], want=manifest.version
        )
        give_up, attempt = time.monotonic() + self._patience_s, 0
        while True:
            try:
                with calling(self._address):
                    reply = await self._stub().Chain(request, timeout=_MAKE_DELTA_S)
                deltas = [codec.manifest_from_pb(message) for message in reply.deltas]
                return deltas if self._leads(deltas, held[-1], manifest.version) else []
            except FileNotFoundError:
                return []
            except RetryError as error:
                attempt += 1
                pause = _backoff(attempt)
                if time.monotonic() + pause > give_up:
                    return []
                log.warning("version %d: %s; trying again", manifest.version, error)
                await asyncio.sleep(pause)

    def _leads(self, deltas: list[Manifest], have: int, want: int) -> bool:
        """Whether the chain is one, and names no file outside its folder."""
        steps = [have, *(delta.version for delta in deltas)]
        return bool(
            steps[-1] == want
            and steps[:-1] == [delta.base_version for delta in deltas]
            and all(is_plain_name(entry.name) for delta in deltas for entry in delta.files)
        )

    async def _follow(
        self, deltas: list[Manifest], manifest: Manifest, partial: Path, phases: _Phases
    ) -> None:
        """Fills `partial` from the version at hand and the deltas; other files come in full."""
        base = self._directory / str(deltas[0].base_version)
        at_hand = {entry.name: entry for entry in read_manifest(base).files}
        for entry in manifest.files:
            target = partial / entry.name
            if at_hand.get(entry.name) == entry:
                with phases.timed("apply"):
                    await asyncio.to_thread(shutil.copyfile, base / entry.name, target)
            elif target.suffix == ".safetensors" and entry.name in at_hand:
                fetched = [
                    await self._fetch_delta(delta, entry.name, partial, phases) for delta in deltas
                ]
                with phases.timed("apply"):
                    await asyncio.to_thread(shutil.copyfile, base / entry.name, target)
                    for path in fetched:
                        await asyncio.to_thread(apply_delta, path, target)
                        path.unlink()
            else:
                await self._fetch_verified(manifest, entry, target, phases)
                continue
            with phases.timed("verify"):
                await asyncio.to_thread(verify_file, target, manifest, entry)

    async def _fetch_delta(
        self, delta: Manifest, name: str, partial: Path, phases: _Phases
    ) -> Path:
        """One file of a delta; it stays beside the files of the version until it was applied."""
        wanted = name + DELTA_SUFFIX
        entry = next((entry for entry in delta.files if entry.name == wanted), None)
        if entry is None:
            raise DeltaError(f"no {wanted} from version {delta.base_version} to {delta.version}")
        path = partial / f".{delta.version}-{wanted}"
        await self._fetch_verified(delta, entry, path, phases)
        return path

    # Files

    async def _fetch_verified(
        self, manifest: Manifest, entry: FileEntry, path: Path, phases: _Phases
    ) -> None:
        attempt, have = 0, -1
        while True:
            if (arrived := _size(path)) > have:  # progress renews the patience
                attempt, have, give_up = 0, arrived, time.monotonic() + self._patience_s
            try:
                with phases.timed("fetch"):
                    phases.num_bytes += await self._continue_file(manifest, entry, path)
                with phases.timed("verify"):
                    await asyncio.to_thread(verify_file, path, manifest, entry)
                return
            except RetryError as error:
                if isinstance(error, _GoneError):
                    raise
                if isinstance(error, CorruptError):
                    path.unlink(missing_ok=True)
                attempt += 1
                pause = _backoff(attempt)
                if time.monotonic() + pause > give_up:
                    raise
                log.warning("version %d: %s; trying again", manifest.version, error)
                await asyncio.sleep(pause)

    async def _continue_file(self, manifest: Manifest, entry: FileEntry, path: Path) -> int:
        """Appends what is missing of a file; its bytes. Raises RetryError where it breaks off."""
        have = _size(path)
        if have > entry.num_bytes:
            path.unlink()
            have = 0
        path.touch()
        missing = entry.num_bytes - have
        if not missing:
            return 0
        request = weights_pb2.FetchRequest(
            version=manifest.version,
            format=manifest.format,
            file=entry.name,
            offset=have,
            base_version=manifest.base_version,
        )
        seconds = DEADLINE_S + missing / _SLOWEST_BYTES_PER_S
        call = self._stub().Fetch(request, timeout=seconds)
        try:
            with calling(self._address), path.open("ab") as file:
                async for reply in call:
                    await asyncio.to_thread(file.write, reply.data)
                    missing -= len(reply.data)
                    self._on_bytes(len(reply.data))
        except FileNotFoundError as error:
            raise _GoneError(f"version {manifest.version} is gone ({error})") from None
        finally:
            call.cancel()
        if missing > 0:
            raise RetryError(f"{self._address}: {entry.name} broke off, {missing} bytes missing")
        return entry.num_bytes - have


class _Phases:
    """Where the time of a fetch goes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - start


class _GoneError(RetryError):
    """The service has collected the version: only a newer one helps."""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_whole(directory: Path, manifest: Manifest) -> bool:
    """Whether an earlier fetch left this very version, still intact."""
    with contextlib.suppress(FileNotFoundError, BadInputError, CorruptError):
        if read_manifest(directory) == manifest:
            verify_directory(directory, manifest)
            return True
    return False
