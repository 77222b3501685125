"""The gRPC face of the version store: publish, watch, fetch, status.

Owns what runs when: receiving into staging, one conversion at a time in a worker thread for the
formats that somebody watches, waking watchers, collecting old versions. Whatever touches the disk
or a whole manifest runs in a thread. Decides nothing about bytes: that is the store's, the
converter's and the manifest's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc.aio
import xxhash

from contracts import codec
from contracts.credentials import Credentials
from contracts.errors import BadInputError, RetryError
from contracts.pb import weights_pb2, weights_pb2_grpc
from contracts.rpc import answering, start_server
from contracts.types import FileEntry, Manifest, WeightFormat
from weight_sync import durable
from weight_sync.answers import for_a_peer
from weight_sync.chain import Edge, missing_delta, shortest_chain
from weight_sync.config import WeightsConfig
from weight_sync.convert import Options, StoppedError, convert_directory
from weight_sync.delta import write_deltas
from weight_sync.manifest import CorruptError, verify_directory
from weight_sync.store import VersionStore
from weight_sync.streams import check_header, check_space, read_chunks, write_files
from weight_sync.traffic import Traffic

log = logging.getLogger(__name__)

_FETCH_LINGERS_S = 60.0  # a version fetched this recently is not collected
_CONVERT_AGAIN_S = 5.0  # after a full disk and the like


def _format(name: str) -> WeightFormat:
    if name not in set(WeightFormat):
        raise BadInputError("weight format", expected=", ".join(WeightFormat), found=name)
    return WeightFormat(name)


class WeightService(weights_pb2_grpc.WeightsServicer):
    """Serves one store, between `start` and `close`."""

    def __init__(self, store: VersionStore, config: WeightsConfig) -> None:
        self._store, self._config = store, config
        self._changed = asyncio.Condition()
        self._work = asyncio.Event()
        self._closing = False
        self._background: set[asyncio.Task[None]] = set()
        self._watchers: Counter[WeightFormat] = Counter()
        self._fetches: Counter[int] = Counter()  # open streams by version
        self._fetched_at: dict[int, float] = {}
        self._newest = dict.fromkeys(WeightFormat, 0)
        self._failures: dict[WeightFormat, tuple[int, Exception]] = {}  # version it is about
        # The newest version's manifest, made once for all watchers.
        self._messages: dict[WeightFormat, tuple[int, weights_pb2.Manifest]] = {}
        self._making_message = asyncio.Lock()
        self._making: dict[tuple[WeightFormat, Edge], asyncio.Task[None]] = {}  # deltas
        self._refused: set[tuple[WeightFormat, Edge]] = set()  # deltas not to be made
        self._traffic = Traffic()
        for version in store.versions():
            for format in store.formats(version):
                self._newest[format] = version
        if self._newest[WeightFormat.BF16] < store.latest:
            log.error("version %d in bf16 is damaged; the next one helps", store.latest)

    def start(self) -> None:
        self._background.add(asyncio.create_task(self._convert_forever()))

    async def close(self) -> None:
        """Ends the watches, then waits for the conversion and the commits under way."""
        self._closing = True
        self._work.set()
        await self._wake()
        await asyncio.gather(*self._background)

    @contextlib.asynccontextmanager
    async def _answering(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        async with answering(context):
            try:
                yield
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                told = for_a_peer(error, self._store.root)
                if str(told) != str(error):
                    log.warning("%s; a peer was told: %s", error, told)
                raise told from error

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # Publish

    async def Publish(self, request_iterator, context):
        async with self._answering(context):
            first = await anext(aiter(request_iterator), None)
            if first is None or first.WhichOneof("kind") != "header":
                raise BadInputError("publish", expected="a header first", found="none")
            version = first.header.version
            files = [codec.file_from_pb(entry) for entry in first.header.files]
            check_header(version, files)
            if not await asyncio.to_thread(self._store.holds, version, files):
                await self._receive(request_iterator, version, files)
            return weights_pb2.PublishReply(version=version)

    async def Withdraw(self, request, context):
        async with self._answering(context):
            latest = await asyncio.to_thread(self._store.withdraw, request.version)
            log.warning("version %d was withdrawn; the newest is %d", request.version, latest)
            self._refused = {known for known in self._refused if request.version not in known[1]}
            for format in WeightFormat:
                if self._newest[format] == request.version:
                    await self._look_again(format)
            self._work.set()
            return weights_pb2.WithdrawReply(latest_version=latest)

    async def _receive(
        self,
        requests: AsyncIterator[weights_pb2.PublishRequest],
        version: int,
        files: list[FileEntry],
    ) -> None:
        staged = await asyncio.to_thread(self._store.stage)
        try:
            check_space(staged, files)
            await write_files(requests, staged, files)
            # Once the bytes are here the commit and its announcement belong together, even if the
            # publisher leaves before the answer.
            commit = asyncio.create_task(self._commit(staged, version, files))
            self._background.add(commit)
            commit.add_done_callback(self._background.discard)
            await asyncio.shield(commit)
        finally:
            await asyncio.to_thread(durable.remove_tree, staged)

    async def _commit(self, staged: Path, version: int, files: list[FileEntry]) -> None:
        await asyncio.to_thread(self._store.commit, staged, version, files)
        num_bytes = sum(entry.num_bytes for entry in files)
        log.info("version %d published, %d bytes", version, num_bytes)
        self._traffic.bytes_published += num_bytes
        await self._announce(version, WeightFormat.BF16)

    async def _announce(self, version: int, format: WeightFormat) -> None:
        self._newest[format] = max(version, self._newest[format])
        recent = {
            version
            for version, at in self._fetched_at.items()
            if time.monotonic() - at < _FETCH_LINGERS_S
        }
        removed = await asyncio.to_thread(
            self._store.collect, self._config.keep_versions, recent | set(+self._fetches)
        )
        await asyncio.to_thread(self._store.collect_deltas, self._config.max_deltas)
        for old in removed:
            self._fetched_at.pop(old, None)
        self._refused = {known for known in self._refused if known[1][0] not in removed}
        for other, newest in list(self._newest.items()):
            if newest in removed:  # nobody has watched this format for a while
                await self._look_again(other)
        self._work.set()
        await self._wake()

    async def _look_again(self, format: WeightFormat) -> None:
        """What was the newest version in a format is there no more."""
        held = await asyncio.to_thread(self._held, format)
        self._newest[format] = max(held, default=0)
        self._messages.pop(format, None)

    def _held(self, format: WeightFormat) -> list[int]:
        """Versions at hand in a format."""
        return [v for v in self._store.versions() if self._store.has(v, format)]

    # Convert

    async def _convert_forever(self) -> None:
        while not self._closing:
            pending = self._next_conversion()
            if pending is None:
                self._work.clear()
                await self._work.wait()
                continue
            version, format = pending
            try:
                await asyncio.to_thread(self._convert, version, format)
            except StoppedError:
                return
            except (RetryError, OSError) as error:
                log.warning("version %d to %s: %s; trying again", version, format, error)
                with contextlib.suppress(TimeoutError):
                    self._work.clear()
                    await asyncio.wait_for(self._work.wait(), _CONVERT_AGAIN_S)
            except Exception as error:
                # Only another version can help; watchers of the format are told why.
                log.error("version %d to %s: %s", version, format, error)
                self._failures[format] = (version, error)
                await self._wake()
            else:
                await self._announce(version, format)

    def _next_conversion(self) -> tuple[int, WeightFormat] | None:
        """The newest version in the first watched format that lacks it."""
        latest = self._newest[WeightFormat.BF16]
        for format, watchers in self._watchers.items():
            behind = self._newest[format] < latest
            if watchers and behind and not self._failure(format):
                return latest, format
        return None

    def _convert(self, version: int, format: WeightFormat) -> None:
        source = self._store.directory(version, WeightFormat.BF16)
        verify_directory(source, self._store.manifest(version, WeightFormat.BF16))
        options = Options(
            format=format,
            recipe=self._config.nvfp4_recipe,
            ignore=self._config.ignore,
            threads=self._config.convert_threads,
        )
        start = time.monotonic()
        staged = self._store.stage()
        try:
            target = staged / format
            plan = convert_directory(source, target, options, should_stop=lambda: self._closing)
            self._store.add_format(target, version, format, recipe=plan.recipe)
        finally:
            durable.remove_tree(staged)
        seconds = time.monotonic() - start
        self._traffic.convert_seconds[format] = seconds
        log.info("version %d in %s after %.2f s", version, format, seconds)

    # Watch

    async def Watch(self, request, context):
        async with self._answering(context):
            format, sent = _format(request.format), request.after
            self._watchers[format] += 1
            self._work.set()
            try:
                while not self._closing:
                    if self._newest[format] > sent:
                        version = self._newest[format]
                        try:
                            message = await self._message(version, format)
                        except (FileNotFoundError, CorruptError) as error:
                            # collected a moment ago, or damaged: then it is made again
                            log.warning("version %d in %s: %s", version, format, error)
                            await self._look_again(format)
                            self._work.set()
                        else:
                            sent = version
                            yield message
                        continue
                    if failure := self._failure(format):
                        raise failure
                    async with self._changed:
                        await self._changed.wait_for(partial(self._has_news, format, sent))
            finally:
                self._watchers[format] -= 1

    def _has_news(self, format: WeightFormat, sent: int) -> bool:
        return self._closing or self._newest[format] > sent or self._failure(format) is not None

    def _failure(self, format: WeightFormat) -> Exception | None:
        """Why the newest version cannot be had in a format."""
        version, failure = self._failures.get(format, (0, None))
        return failure if version == self._newest[WeightFormat.BF16] else None

    async def _message(self, version: int, format: WeightFormat) -> weights_pb2.Manifest:
        async with self._making_message:
            known, message = self._messages.get(format, (0, None))
            if message is None or known != version:
                manifest = await asyncio.to_thread(self._store.manifest, version, format)
                message = await asyncio.to_thread(codec.manifest_to_pb, manifest)
                self._messages[format] = version, message
            return message

    # Fetch

    async def Chain(self, request, context):
        async with self._answering(context):
            format = _format(request.format)
            deltas = await self._chain(format, request.have, request.want)
            # kept as if fetched, which it is not where nothing changed: the next delta starts there
            self._fetched_at[request.want] = time.monotonic()
            return weights_pb2.ChainReply(deltas=[codec.manifest_to_pb(delta) for delta in deltas])

    async def _chain(self, format: WeightFormat, have: int, want: int) -> list[Manifest]:
        """The shortest chain of deltas, made if need be; none where the snapshot is shorter."""
        snapshot = await asyncio.to_thread(self._store.manifest, want, format)
        chain = await asyncio.to_thread(self._known_chain, format, have, want)
        if chain is None:
            edge = await asyncio.to_thread(self._missing_delta, format, have, want)
            if edge is None or (format, edge) in self._refused:
                return []
            await self._make_delta(format, edge)
            chain = await asyncio.to_thread(self._known_chain, format, have, want)
        known = await asyncio.to_thread(self._store.deltas, format)
        deltas = [known[edge] for edge in chain or () if edge in known]
        if len(deltas) != len(chain or ()) or sum(map(_size, deltas)) >= _size(snapshot):
            return []
        return deltas

    def _delta_sizes(self, format: WeightFormat) -> dict[Edge, int]:
        return {edge: _size(manifest) for edge, manifest in self._store.deltas(format).items()}

    def _known_chain(self, format: WeightFormat, have: int, want: int) -> list[Edge] | None:
        sizes = self._delta_sizes(format)
        return shortest_chain(sizes, have, want, max_deltas=self._config.max_deltas)

    def _missing_delta(self, format: WeightFormat, have: int, want: int) -> Edge | None:
        sizes, held = self._delta_sizes(format), self._held(format)
        return missing_delta(sizes, held, have, want, max_deltas=self._config.max_deltas)

    async def _make_delta(self, format: WeightFormat, edge: Edge) -> None:
        """Makes a delta once, however many samplers wait for it; none if it would be too large."""
        key = (format, edge)
        if key not in self._making:
            task = asyncio.create_task(asyncio.to_thread(self._write_delta, format, *edge))
            self._making[key] = task
            self._background.add(task)
            task.add_done_callback(lambda _: self._making.pop(key, None))
            task.add_done_callback(self._background.discard)
        await asyncio.shield(self._making[key])

    def _write_delta(self, format: WeightFormat, base: int, version: int) -> None:
        edge = base, version
        if edge in self._store.deltas(format) or (format, edge) in self._refused:
            return  # made since this sampler's chain was looked for
        start = time.monotonic()
        old, new = (self._store.directory(v, format) for v in (base, version))
        try:  # what is made of changed bytes would lead every sampler astray
            for v, directory in ((base, old), (version, new)):
                verify_directory(directory, self._store.manifest(v, format))
        except CorruptError as error:
            log.error("no delta from version %d to %d in %s: %s", base, version, format, error)
            self._refused.add((format, edge))
            return
        staged = self._store.stage()
        try:
            size = write_deltas(old, new, staged)
            if size is None or size >= _size(self._store.manifest(version, format)):
                self._refused.add((format, edge))
                return
            self._store.add_delta(staged, base, version, format)
        finally:
            durable.remove_tree(staged)
        seconds = time.monotonic() - start
        self._traffic.delta_seconds[format] = seconds
        log.info(
            "%s from version %d to %d: %.1f MB after %.2f s",
            *(format, base, version, size / 1e6, seconds),
        )

    async def Fetch(self, request, context):
        async with self._answering(context):
            version, format = request.version, _format(request.format)
            manifest = await asyncio.to_thread(self._find, version, format, request.base_version)
            entry = next((e for e in manifest.files if e.name == request.file), None)
            if entry is None or not 0 <= request.offset <= entry.num_bytes:
                raise BadInputError(
                    f"fetch from version {version} in {format}",
                    expected="a file and an offset of its manifest",
                    found=f"{request.file!r} at {request.offset}",
                )
            self._fetches[version] += 1
            hasher, left = xxhash.xxh3_128(), entry.num_bytes - request.offset
            try:
                path = await asyncio.to_thread(self._path, manifest, entry)
                async for chunk in read_chunks(path, request.offset):
                    hasher.update(chunk)
                    left -= len(chunk)
                    self._traffic.fetched(format, len(chunk), is_delta=manifest.base_version > 0)
                    yield weights_pb2.FetchReply(data=chunk)
            except FileNotFoundError:
                await self._repair(manifest, entry.name)
            finally:
                self._fetches[version] -= 1
                self._fetched_at[version] = time.monotonic()
            if left or (request.offset == 0 and hasher.hexdigest() != entry.checksum):
                await self._repair(manifest, entry.name)

    def _find(self, version: int, format: WeightFormat, base: int) -> Manifest:
        """What is fetched from: a version, or the delta to it. Raises FileNotFoundError."""
        if not base:
            return self._store.manifest(version, format)
        manifest = self._store.deltas(format).get((base, version))
        if manifest is None:
            raise FileNotFoundError(f"no delta from version {base} to {version} in {format}")
        return manifest

    def _path(self, manifest: Manifest, entry: FileEntry) -> Path:
        version, format, base = manifest.version, manifest.format, manifest.base_version
        if base:
            return self._store.delta_directory(base, version, format) / entry.name
        return self._store.directory(version, format) / entry.name

    async def _repair(self, manifest: Manifest, name: str) -> None:
        """Stored bytes have changed, or are there no more: raises CorruptError.

        What was made is made again; BF16 waits for a new version.
        """
        version, format, base = manifest.version, manifest.format, manifest.base_version
        what = f"version {version} in {format}" + (f" from {base}" if base else "")
        try:
            known = await asyncio.to_thread(self._find, version, format, base)
        except FileNotFoundError:  # collected, or repaired for another sampler, a moment ago
            known = None
        if known is not manifest:
            raise CorruptError(f"{what}: {name} is there no more")
        log.error("%s: %s is corrupt on disk", what, name)
        if base:
            await asyncio.to_thread(self._store.discard_deltas, format, [(base, version)])
        elif format != WeightFormat.BF16:
            await asyncio.to_thread(self._store.discard, version, format)
            self._refused = {
                known for known in self._refused if known[0] != format or version not in known[1]
            }
            await self._look_again(format)
            self._work.set()
        raise CorruptError(f"{what}: {name} is corrupt on disk")

    # Status

    async def Status(self, request, context):
        async with self._answering(context):
            return await asyncio.to_thread(self._status)

    def _status(self) -> weights_pb2.StatusReply:
        traffic = self._traffic
        return weights_pb2.StatusReply(
            latest_version=self._store.latest,
            versions=self._store.versions(),
            formats=[self._format_status(f) for f in WeightFormat if self._is_known(f)],
            bytes_published=traffic.bytes_published,
            bytes_fetched=(traffic.snapshot_bytes + traffic.delta_bytes).total(),
            num_fetching=self._fetches.total(),
            bytes_per_second=traffic.bytes_per_second(),
        )

    def _is_known(self, format: WeightFormat) -> bool:
        return bool(self._newest[format] or format in self._watchers)

    def _format_status(self, format: WeightFormat) -> weights_pb2.FormatStatus:
        newest, traffic = self._newest[format], self._traffic
        return weights_pb2.FormatStatus(
            format=format,
            latest_version=newest,
            num_watchers=self._watchers[format],
            snapshot_bytes=self._snapshot_bytes(newest, format),
            convert_seconds=traffic.convert_seconds.get(format, 0.0),
            delta_seconds=traffic.delta_seconds.get(format, 0.0),
            bytes_fetched=traffic.snapshot_bytes[format] + traffic.delta_bytes[format],
            delta_bytes_fetched=traffic.delta_bytes[format],
            deltas=[
                weights_pb2.Delta(base_version=base, version=version, num_bytes=size)
                for (base, version), size in sorted(self._delta_sizes(format).items())
            ],
        )

    def _snapshot_bytes(self, version: int, format: WeightFormat) -> int:
        try:
            return _size(self._store.manifest(version, format))
        except (FileNotFoundError, CorruptError):  # there is none, or it is about to be made again
            return 0


def _size(manifest: Manifest) -> int:
    return sum(entry.num_bytes for entry in manifest.files)


@contextlib.asynccontextmanager
async def serving(
    store: VersionStore, config: WeightsConfig, *, address: str, credentials: Credentials | str
) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    """A running server and its port; stops within about a second on leaving."""
    service = WeightService(store, config)
    server, port = await start_server(
        address,
        credentials,
        lambda server: weights_pb2_grpc.add_WeightsServicer_to_server(service, server),
    )
    service.start()
    try:
        yield server, port
    finally:
        await service.close()
        await server.stop(grace=1.0)
