"""The two ends of weight sync: `publish` for the trainer, `WeightClient` for a sampler.

Owns what a sampler does with the service's answers: which way a version comes, resuming, when to
try again. Never hands out a directory whose every checksum was not just recomputed; the directories
themselves are `weight_sync.held`'s. Knows nothing of engines or training.
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
from typing import TypeVar

import grpc
import grpc.aio

from contracts import codec
from contracts.credentials import Credentials
from contracts.errors import AuthError, BadInputError, RetryError
from contracts.pb import weights_pb2, weights_pb2_grpc
from contracts.rpc import CHUNK_BYTES, DEADLINE_S, aio_channel, calling, sync_channel
from contracts.types import Fetched, FileEntry, Manifest, WeightFormat
from weight_sync import durable
from weight_sync.delta import SUFFIX as DELTA_SUFFIX
from weight_sync.delta import DeltaError, apply_delta
from weight_sync.held import HeldVersions
from weight_sync.manifest import (
    CorruptError,
    checkpoint_files,
    is_plain_name,
    read_manifest,
    verify_file,
)

__all__ = ["WeightClient", "publish", "read_manifest", "status", "withdraw"]

log = logging.getLogger(__name__)

_Message = TypeVar("_Message")

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
        BadInputError: not a whole BF16 checkpoint of finite weights, or no version.
        AuthError: wrong token.
    """
    _check_version(version)
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


def _check_version(version: int) -> None:
    if not 1 <= version < 2**63:
        raise BadInputError("version", expected="a number from 1 to 2^63 - 1", found=version)


def withdraw(address: str, credentials: Credentials | str, version: int) -> int:
    """Takes back the newest version, and returns the newest of those that stay, 0 without any.

    Raises:
        ConflictError: another version is the newest.
        RetryError, AuthError, BadInputError: as `publish`.
    """
    _check_version(version)
    channel = sync_channel(address, credentials)
    try:
        with calling(address):
            request = weights_pb2.WithdrawRequest(version=version)
            stub = weights_pb2_grpc.WeightsStub(channel)
            return stub.Withdraw(request, timeout=DEADLINE_S).latest_version
    finally:
        channel.close()


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
    """Versions of one format, brought into `directory` (which is this client's alone)."""

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
        self._held = HeldVersions(Path(directory), keep=keep)
        self._patience_s, self._on_bytes = patience_s, on_bytes
        self._channel: grpc.aio.Channel | None = None

    def _stub(self) -> weights_pb2_grpc.WeightsStub:
        if self._channel is None:  # made here, as it belongs to the running loop
            self._channel = aio_channel(self._address, self._credentials)
        return weights_pb2_grpc.WeightsStub(self._channel)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """As `calling`. A service with a fault of its own is one that is away, for a sampler."""
        try:
            with calling(self._address):
                yield
        except RuntimeError as error:
            # of exactly this type: a status that stands for no exception of ours
            if type(error) is RuntimeError and isinstance(error.__context__, grpc.RpcError):
                raise RetryError(f"{self._address}: {error}") from None
            raise

    def _parsed(self, message: _Message | None) -> _Message:
        """grpc.aio hands over None where a message does not parse."""
        if message is None:
            raise RetryError(f"{self._address}: a message that does not parse")
        return message

    async def _manifest(self, message: weights_pb2.Manifest | None) -> Manifest:
        return await asyncio.to_thread(codec.manifest_from_pb, self._parsed(message))

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
                with self._calling():
                    async for message in call:
                        manifest = await self._manifest(message)
                        self._check(manifest)
                        if manifest.version <= after:
                            raise RetryError(f"version {manifest.version} after {after}")
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
        with _disk_trouble_is_temporary():
            return await self._fetch(manifest)

    async def _fetch(self, manifest: Manifest) -> Fetched:
        if directory := await asyncio.to_thread(self._held.whole, manifest):
            return Fetched(directory=directory)
        partial = await asyncio.to_thread(self._held.prepare, manifest)
        phases, base = _Phases(), None
        at_hand = await asyncio.to_thread(self._held.newest_below, manifest.version)
        if at_hand and (deltas := await self._chain(at_hand.version, manifest)):
            try:
                await self._follow(deltas, at_hand, manifest, partial, phases)
                base = at_hand
            except (DeltaError, CorruptError, _GoneError, OSError) as error:
                if isinstance(error, OSError) and error.errno in durable.TEMPORARY:
                    raise
                log.warning("version %d: %s; fetching it in full", manifest.version, error)
                await asyncio.to_thread(self._held.remove_if_changed, at_hand)
        if not base:
            for entry in manifest.files:
                await self._fetch_verified(manifest, entry, partial / entry.name, phases)
        with phases.timed("verify"):
            directory = await asyncio.to_thread(self._held.finish, manifest)
        return Fetched(
            directory=directory,
            base_version=base.version if base else 0,
            num_bytes=phases.num_bytes,
            fetch_s=phases.seconds["fetch"],
            apply_s=phases.seconds["apply"],
            verify_s=phases.seconds["verify"],
        )

    # Deltas

    async def _chain(self, have: int, manifest: Manifest) -> list[Manifest]:
        """The deltas to take from a version at hand; none if the files are shorter."""
        request = weights_pb2.ChainRequest(format=self._format, have=have, want=manifest.version)
        give_up, attempt = time.monotonic() + self._patience_s, 0
        while True:
            try:
                with self._calling():
                    reply = await self._stub().Chain(request, timeout=_MAKE_DELTA_S)
                deltas = [await self._manifest(delta) for delta in self._parsed(reply).deltas]
                return deltas if self._leads(deltas, have, manifest.version) else []
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
        self,
        deltas: list[Manifest],
        held: Manifest,
        manifest: Manifest,
        partial: Path,
        phases: _Phases,
    ) -> None:
        """Fills `partial` from the version at hand and the deltas; other files come in full."""
        base = self._held.directory(held.version)
        at_hand = {entry.name: entry for entry in held.files}
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
            with path.open("ab") as file, self._calling():
                async for reply in call:
                    data = self._parsed(reply).data
                    await asyncio.to_thread(file.write, data)
                    missing -= len(data)
                    self._on_bytes(len(data))
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


@contextlib.contextmanager
def _disk_trouble_is_temporary() -> Iterator[None]:
    """What this machine's disk refuses may come right: the sampler goes on with what it has."""
    try:
        yield
    except AuthError:
        raise
    except OSError as error:
        raise RetryError(f"the disk of the sampler: {error}") from error
