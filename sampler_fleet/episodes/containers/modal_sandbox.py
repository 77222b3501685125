"""Containers on Modal: one Sandbox each, without a network, from an image of a registry.

Owns the remote calls and what Modal's exceptions mean here. The supervisor is a process that is
started inside and spoken to over its stdin and stdout. A checkout that is ready once is kept as an
image, from which later episodes start. Must not know tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

import modal

from contracts.errors import BadInputError, RetryError
from sampler_fleet.episodes.base import SandboxError
from sampler_fleet.episodes.containers.base import Container, NoImageError, Runtime
from sampler_fleet.episodes.containers.launch import (
    ARGUMENTS,
    ENVIRONMENT,
    SHELL,
    ContainerLimits,
    SandboxConfig,
)
from sampler_fleet.episodes.containers.owner import LABEL, is_orphan, owner
from sampler_fleet.episodes.supervised import encode_path
from sampler_fleet.providers.modal import explaining

_FROZEN = "id:"  # before the id of an image of Modal's own, which no registry's name starts with
_TAG = LABEL.replace(".", "-")
_PART = 1 << 20  # bytes to write at once; Modal's buffer takes 2 MiB
_CLOSE_S = 20.0
_FREEZE_S = 120.0
_DAY_S = 86_400


class Process(Protocol):
    """A supervisor that runs in a sandbox: bytes in, bytes out."""

    async def write(self, data: bytes) -> None: ...

    def output(self) -> AsyncIterator[bytes]: ...

    async def errors(self) -> str: ...

    async def freeze(self) -> str: ...

    async def terminate(self) -> None: ...


class Api(Protocol):
    """What this file asks of Modal: `ModalApi`, or a fake."""

    async def start(self, image: str, workdir: str) -> Process: ...

    async def owners(self) -> dict[str, str]:
        """Who started each sandbox of the app that runs, by its id."""
        ...

    async def terminate(self, sandbox_id: str) -> None: ...


class ModalApi(Api):
    """The calls to Modal, and nothing else of it."""

    def __init__(self, config: SandboxConfig) -> None:
        self._limits, self._settings = config.containers, config.modal
        self._app: modal.App | None = None

    async def start(self, image: str, workdir: str) -> ModalProcess:
        limits = self._limits
        memory, cpus = limits.memory_bytes >> 20, limits.num_cpus
        if image.startswith(_FROZEN):
            disk = modal.Image.from_id(image.removeprefix(_FROZEN))
        else:
            disk = modal.Image.from_registry(image).entrypoint([])
        sandbox = await modal.Sandbox.create.aio(
            *("sleep", str(limits.life_seconds)),
            app=await self._connected(),
            image=disk,
            env=dict(ENVIRONMENT),
            tags={_TAG: owner(os.getpid())},
            timeout=limits.life_seconds,
            workdir=workdir or None,
            cpu=(cpus, cpus),
            memory=(memory, memory),
            block_network=True,
        )
        try:
            process = await sandbox.exec.aio(
                *(SHELL, *ARGUMENTS), text=False, workdir=workdir or None
            )
        except BaseException:
            await sandbox.terminate.aio()
            raise
        return ModalProcess(sandbox, process)

    async def owners(self) -> dict[str, str]:
        app = await self._connected()
        return {
            sandbox.object_id: (await sandbox.get_tags.aio()).get(_TAG, "")
            async for sandbox in modal.Sandbox.list.aio(app_id=app.app_id)
        }

    async def terminate(self, sandbox_id: str) -> None:
        sandbox = await modal.Sandbox.from_id.aio(sandbox_id)
        await sandbox.terminate.aio()

    async def _connected(self) -> modal.App:
        if self._app is None:
            self._app = await modal.App.lookup.aio(
                self._settings.app,
                environment_name=self._settings.environment or None,
                create_if_missing=True,
            )
        return self._app


class ModalProcess(Process):
    """A process in a Sandbox, and that Sandbox."""

    def __init__(self, sandbox: modal.Sandbox, process: Any) -> None:
        self._sandbox, self._process = sandbox, process

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), _PART):
            self._process.stdin.write(data[start : start + _PART])
            await self._process.stdin.drain.aio()

    async def output(self) -> AsyncIterator[bytes]:
        async for part in self._process.stdout:
            yield part

    async def errors(self) -> str:
        return (await self._process.stderr.read.aio()).decode("utf-8", "replace")

    async def freeze(self) -> str:
        image = await self._sandbox.snapshot_filesystem.aio(timeout=int(_FREEZE_S), ttl=_DAY_S)
        return f"{_FROZEN}{image.object_id}"

    async def terminate(self) -> None:
        await self._sandbox.terminate.aio()


class ModalRuntime(Runtime):
    """Sandboxes of one Modal app."""

    name = "modal"

    def __init__(self, api: Api, limits: ContainerLimits) -> None:
        self._api, self._limits = api, limits

    def container(self, image: str, workdir: str) -> ModalContainer:
        return ModalContainer(self._api, image, workdir, self._limits)

    async def fetch(self, image: str) -> None:
        """Modal fetches it when the first sandbox starts."""

    async def sweep(self) -> None:
        with _failing("sandboxes of the app"):
            for sandbox_id, who in (await self._api.owners()).items():
                if is_orphan(who):
                    await self._api.terminate(sandbox_id)

    async def close(self) -> None:
        """Sandboxes are closed one by one."""


class ModalContainer(Container):
    """One Sandbox."""

    def __init__(self, api: Api, image: str, workdir: str, limits: ContainerLimits) -> None:
        super().__init__(max_tree_bytes=max(limits.patch_bytes, limits.output_bytes))
        self._api, self._image, self._workdir, self._limits = api, image, workdir, limits
        self._process: Process | None = None
        self._errors = ""

    async def start(self, tree: Mapping[str, bytes]) -> None:
        seconds = self._limits.start_seconds + self._limits.pull_seconds
        with _failing(f"image {self._image}"):
            async with asyncio.timeout(seconds):
                self._process = await self._api.start(self._image, self._workdir)
        self._reader = self._writer = _Streams(self._process)
        files = {encode_path(path): data for path, data in tree.items()}
        try:
            await self.ask(self._limits.told(), files, timeout_s=self._limits.start_seconds)
        except SandboxError:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_S):
                    self._errors = await self._process.errors()
            raise SandboxError(f"the supervisor did not start: {self._errors[-500:]}") from None

    async def freeze(self) -> str:
        assert self._process is not None
        with _failing("snapshot"):
            async with asyncio.timeout(_FREEZE_S):
                return await self._process.freeze()

    async def close(self) -> None:
        process, self._process, self._writer = self._process, None, None
        self._broken = self._broken or "it is closed"
        if process is not None:
            with _failing("end of a sandbox"):
                async with asyncio.timeout(_CLOSE_S):
                    await process.terminate()

    def _complaint(self) -> str:
        return ""


class _Streams:
    """A process's streams as asyncio's are used."""

    def __init__(self, process: Process) -> None:
        self._process, self._parts = process, process.output()
        self._read, self._unsent = bytearray(), b""

    async def readexactly(self, n: int) -> bytes:
        while len(self._read) < n:
            try:
                self._read += await anext(self._parts)
            except StopAsyncIteration:
                raise EOFError("the supervisor ended") from None
            except modal.Error as error:
                raise EOFError(str(error)) from error
        data = bytes(self._read[:n])
        del self._read[:n]
        return data

    def write(self, data: bytes) -> None:
        self._unsent += data

    async def drain(self) -> None:
        data, self._unsent = self._unsent, b""
        try:
            await self._process.write(data)
        except modal.Error as error:
            raise EOFError(str(error)) from error

    def close(self) -> None:
        """The sandbox ends, and all in it."""

    async def wait_closed(self) -> None:
        """Nothing to wait for."""


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Modal's exceptions as a sandbox's. NoImageError: the image can't be had."""
    try:
        with explaining(f"Modal, {what}", needs="an image or app that Modal can find"):
            try:
                yield
            except (modal.exception.ImageBuildError, modal.exception.NotFoundError) as error:
                words = " ".join(str(error).split())[-300:]
                raise NoImageError(f"Modal, {what}: {words}") from error
    except (BadInputError, RetryError) as error:
        raise SandboxError(str(error)) from error


def find_runtime(config: SandboxConfig) -> ModalRuntime | str:
    """Containers on Modal, or why there are none: no token."""
    from modal.config import config as settings

    if not (settings.get("token_id") and settings.get("token_secret")):
        return "modal: no token (`modal token new`, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET)"
    return ModalRuntime(ModalApi(config), config.containers)
