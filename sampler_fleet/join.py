"""The sampler's side: keeps an engine at the newest version and serves the gateway it dials out to.

Owns the stream to the gateway (register, heartbeat, deltas, leaving), reconnection, the order of
weight updates, and the drain. Must not know which engine it drives, nor route or check anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from contracts import codec, rpc
from contracts.credentials import Credentials
from contracts.errors import AuthError, BadInputError, DirtyProcessError, RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc
from contracts.types import (
    Fetched,
    GenerateRequest,
    Manifest,
    SamplerInfo,
    Switch,
    WeightFormat,
)
from sampler_fleet.config import GroupConfig
from sampler_fleet.engines.base import Engine
from sampler_fleet.fingerprint import identify_checkpoint
from sampler_fleet.heartbeat import heartbeat_to_pb
from sampler_fleet.measure import measure

log = logging.getLogger(__name__)

MAX_DELTAS = 64  # chunks in one message

_T = TypeVar("_T")


class Weights(Protocol):
    """Where versions come from: `weight_sync.client.WeightClient`, or a fake."""

    def watch(self, after: int) -> AsyncIterator[Manifest]:
        """Manifests of newer and newer versions.

        Raises:
            RetryError: the service is away.
            BadInputError: the newest version does not exist in this format.
        """
        ...

    async def fetch(self, manifest: Manifest) -> Fetched:
        """A complete, verified directory of that version."""
        ...


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the sampler waits: seconds."""

    backoff: float = 0.2  # first pause before trying again; doubles
    max_backoff: float = 5.0
    drain: float = 30.0  # for what runs, before leaving
    close: float = 5.0  # for the gateway to see the end of the stream

    def before(self, attempt: int) -> float:
        """The pause before attempt 1, 2, ...; jitter keeps a fleet from returning at once."""
        return min(self.backoff * 2 ** (attempt - 1), self.max_backoff) * random.uniform(0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a sampler says of itself beyond its group's settings, when it joins."""

    formats: tuple[WeightFormat, ...] = ()  # that its engine could load
    price_per_hour: float | None = None  # US dollars for all its accelerators
    measure_seconds: float = 0.0  # of decoding tell what it can draw; 0: it doesn't say


class SamplerAgent:
    """One sampler of one group."""

    def __init__(
        self,
        *,
        sampler_id: str,
        group: GroupConfig,
        engine: Engine,
        weights: Weights,
        gateway: str,
        credentials: Credentials | str = "",
        patience: Patience | None = None,
        offer: Offer | None = None,
    ) -> None:
        self._offer = offer or Offer()
        self._tokens_per_second = 0.0
        self._sampler_id = sampler_id
        self._group = group
        self.engine = engine
        self._weights = weights
        self.gateway = gateway
        self.credentials = Credentials.of(credentials)
        self.patience = patience or Patience()
        self._info: SamplerInfo | None = None  # known once weights were loaded
        self.switch: Switch | None = None  # to the version that the engine has
        self.leaving = ""  # why
        self.num_tokens = 0  # drawn and sent since the start
        self._wake = asyncio.Event()  # a version was loaded, or it is time to leave
        self._newest: Manifest | None = None
        self._announced = asyncio.Event()

    def leave(self, reason: str) -> None:
        """Finishes what runs, accepts nothing new, then `run` returns."""
        self.leaving = self.leaving or reason
        self._notify()

    async def run(self) -> None:
        """Serves until `leave`.

        Raises:
            BadInputError, AuthError: the gateway or the engine refuses this sampler.
            DirtyProcessError: this process is to be replaced.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._watch_weights()),
                    tasks.create_task(self._apply_weights()),
                ]
                while self._info is None and not self.leaving:
                    await self.changed()
                await self._stay_connected()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def changed(self, timeout_s: float | None = None) -> None:
        """Returns after a version was loaded, when it is time to leave, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    def _notify(self) -> None:
        self._wake.set()
        self._wake = asyncio.Event()

    # Weights.

    async def _watch_weights(self) -> None:
        """Remembers the newest announced version; the applier skips those in between."""
        attempt = 0
        while True:
            after = self._newest.version if self._newest else 0
            try:
                async with _closing(self._weights.watch(after)) as manifests:
                    async for manifest in manifests:
                        attempt = 0
                        if self._newest is None or manifest.version > self._newest.version:
                            self._newest = manifest
                            self._announced.set()
            except RetryError as error:
                log.warning("weights: %s", error)
            except BadInputError as error:
                if self._info is None:
                    raise
                log.error("a version stays unused: %s", error)
            attempt += 1
            await asyncio.sleep(self.patience.before(attempt))

    async def _apply_weights(self) -> None:
        """Loads the newest version again and again, also while requests run.

        A later version that can't be loaded is skipped: the engine goes on under its old label.
        """
        attempt = 0
        while True:
            await self._announced.wait()
            self._announced.clear()
            manifest = self._newest
            assert manifest is not None, "set before it is announced"
            try:
                fetched = await self._weights.fetch(manifest)
                start = time.monotonic()
                pause_s = await self.engine.load(fetched.directory, manifest)
            except RetryError as error:
                log.warning("version %d: %s", manifest.version, error)
                attempt += 1
                await asyncio.sleep(self.patience.before(attempt))
                self._announced.set()
                continue
            except BadInputError as error:
                if self._info is None:
                    raise
                log.error("version %d stays unused: %s", manifest.version, error)
                continue
            attempt = 0
            self.switch = Switch(
                version=manifest.version,
                weights_checksum=self.engine.weights_checksum,
                base_version=fetched.base_version,
                num_bytes=fetched.num_bytes,
                fetch_s=fetched.fetch_s,
                apply_s=fetched.apply_s,
                verify_s=fetched.verify_s,
                load_s=time.monotonic() - start,
                pause_s=pause_s,
            )
            if self._info is None and self._offer.measure_seconds:
                self._tokens_per_second = await measure(
                    self.engine,
                    num_sessions=self._group.max_sessions,
                    seconds=self._offer.measure_seconds,
                )
            await self._describe(fetched.directory)
            log.info("version %d loaded", manifest.version)
            self._notify()

    async def _describe(self, directory: Path) -> None:
        # a real tokenizer is tens of megabytes: not on the loop that streams tokens
        identity = await asyncio.to_thread(identify_checkpoint, directory)
        self._info = SamplerInfo(
            sampler_id=self._sampler_id,
            group=self._group.name,
            accelerator=self._group.accelerator,
            weight_format=self._group.weight_format,
            kv_format=self._group.kv_format,
            max_sessions=self._group.max_sessions,
            model_fingerprint=identity.model_fingerprint,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            version=self.engine.version,
            formats=self._offer.formats,
            tokens_per_second=self._tokens_per_second,
            price_per_hour=self._offer.price_per_hour,
        )

    # The gateway.

    async def _stay_connected(self) -> None:
        """One connection after the other, until it is time to leave."""
        attempt = 0
        while not self.leaving:
            assert self._info is not None, "run() waits for the first version"
            info = replace(self._info, version=self.engine.version)
            connection = _Connection(self, info)
            try:
                await connection.run()
                error: Exception = RetryError("the gateway closed the stream")
            except RetryError as failure:
                error = failure
            except grpc.RpcError as failure:
                error = rpc.error_of(failure)
                if isinstance(error, BadInputError | AuthError | DirtyProcessError):
                    raise error from None
            if self.leaving:
                return
            attempt = 1 if connection.welcomed else attempt + 1
            log.warning("gateway %s: %s; trying again", self.gateway, error)
            await self.changed(self.patience.before(attempt))


class _Connection:
    """One stream to the gateway and the requests that came over it."""

    def __init__(self, agent: SamplerAgent, info: SamplerInfo) -> None:
        self._agent = agent
        self._engine = agent.engine
        self._info = info
        self._outgoing: asyncio.Queue[fleet_pb2.SamplerMessage | None] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._held: fleet_pb2.SamplerMessage | None = None  # off the queue, not written yet
        self._sessions: set[str] = set()
        self._draining = False
        self.welcomed = False

    async def run(self) -> None:
        """Until the stream ends or the drain is done. All requests end with it.

        Raises grpc.RpcError as the stream does, and what the engine raised.
        """
        self._send(register=codec.sampler_to_pb(self._info))
        gateway, credentials = self._agent.gateway, self._agent.credentials
        async with rpc.aio_channel(gateway, credentials, add_token=False) as channel:
            metadata = rpc.token_metadata(credentials)
            call = fleet_pb2_grpc.FleetStub(channel).Join(metadata=metadata)
            try:
                async with asyncio.TaskGroup() as tasks:
                    background = [tasks.create_task(self._write(call))]
                    async for message in call:
                        if message is None:  # what grpc.aio makes of bytes that do not parse
                            raise RetryError("the gateway sent a message that does not parse")
                        if message.WhichOneof("kind") == "welcome":
                            self.welcomed = True
                            interval = message.welcome.heartbeat_seconds
                            background += [
                                tasks.create_task(self._heartbeat(interval)),
                                tasks.create_task(self._drain_when_leaving()),
                            ]
                            log.info("joined %s as %s", self._agent.gateway, self._info.group)
                        else:
                            await self._take(message, tasks)
                    for task in (*background, *self._running.values()):
                        task.cancel()
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            finally:
                call.cancel()
                for session_id in self._sessions:
                    self._engine.end_session(session_id)

    def _send(self, **kind) -> None:
        self._outgoing.put_nowait(fleet_pb2.SamplerMessage(**kind))

    async def _write(self, call: Any) -> None:
        """Writes what is to go out, then closes this side. A broken stream is the reader's news."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while (message := await self._next_message()) is not None:
                await call.write(message)
            await call.done_writing()

    async def _next_message(self) -> fleet_pb2.SamplerMessage | None:
        """The next to go out, chunks that wait beside each other in one; None at the end."""
        message = self._held or await self._outgoing.get()
        self._held = None
        if message is None or not message.HasField("delta"):
            return message
        deltas = [message.delta]
        while len(deltas) < MAX_DELTAS and not self._outgoing.empty():
            following = self._outgoing.get_nowait()
            if following is None or not following.HasField("delta"):
                self._held = following
                if following is None:
                    self._outgoing.put_nowait(None)  # the end, once more
                break
            deltas.append(following.delta)
        if len(deltas) == 1:
            return message
        return fleet_pb2.SamplerMessage(deltas=fleet_pb2.Deltas(deltas=deltas))

    async def _take(self, message: fleet_pb2.GatewayMessage, tasks: asyncio.TaskGroup) -> None:
        match message.WhichOneof("kind"):
            case "generate":
                request = codec.generate_from_pb(message.generate)
                self._sessions.add(request.session_id)
                task = tasks.create_task(self._serve(request))
                self._running[request.request_id] = task
                task.add_done_callback(lambda _: self._running.pop(request.request_id, None))
            case "abort":
                if task := self._running.get(message.abort.request_id):
                    task.cancel()
            case "end_session":
                self._end_session(message.end_session.session_id)
            case "drain":
                self._agent.leave(message.drain.reason)
            case "expel":
                raise DirtyProcessError(message.expel.reason)
            case other:
                log.warning("message of kind %s ignored", other)

    async def _serve(self, request: GenerateRequest) -> None:
        """Runs one request and sends its chunks; its failures are the gateway's to handle."""
        if self._draining:
            self._fail(request, "it is leaving")
            return
        try:
            async with _closing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    self._agent.num_tokens += len(chunk)
                    self._send(
                        delta=fleet_pb2.Delta(
                            request_id=request.request_id, chunk=codec.chunk_to_pb(chunk)
                        )
                    )
        except BadInputError as error:
            self._fail(request, str(error), bad_request=True)
        except RetryError as error:
            self._fail(request, str(error))
        else:
            if request.ends_session:
                self._end_session(request.session_id)

    def _end_session(self, session_id: str) -> None:
        self._sessions.discard(session_id)
        self._engine.end_session(session_id)

    def _fail(self, request: GenerateRequest, reason: str, *, bad_request: bool = False) -> None:
        self._send(
            failed=fleet_pb2.RequestFailed(
                request_id=request.request_id, reason=reason, bad_request=bad_request
            )
        )

    async def _heartbeat(self, interval: float) -> None:
        """Every `interval` seconds, and at once when a version was loaded."""
        while True:
            load, switch = self._engine.load_now(), self._agent.switch
            self._send(heartbeat=heartbeat_to_pb(self._engine.version, load, switch))
            await self._agent.changed(interval)

    async def _drain_when_leaving(self) -> None:
        """Says so, finishes what runs as far as patience goes, then closes this side."""
        while not self._agent.leaving:
            await self._agent.changed()
        self._draining = True
        self._send(leaving=fleet_pb2.Leaving(reason=self._agent.leaving))
        if self._running:
            log.info("leaving (%s): %d requests run", self._agent.leaving, len(self._running))
            await asyncio.wait(self._running.values(), timeout=self._agent.patience.drain)
        self._outgoing.put_nowait(None)
        await asyncio.sleep(self._agent.patience.close)
        raise RetryError("the gateway did not close the stream")


@contextlib.asynccontextmanager
async def _closing(iterator: AsyncIterator[_T]) -> AsyncIterator[AsyncIterator[_T]]:
    """`contextlib.aclosing` for what the ports call an iterator: closing it ends the work."""
    try:
        yield iterator
    finally:
        if close := getattr(iterator, "aclose", None):
            await close()
