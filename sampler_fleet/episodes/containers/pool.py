"""Containers for tasks with a checkout: which runtime, how many at once, ready to work in.

Owns the choice of the runtime, made when a task first needs one, and the life of each container.
Must not know how a runtime starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from sampler_fleet.episodes.base import Checkout, Sandbox, SandboxError, Sandboxes, Task
from sampler_fleet.episodes.containers import cli
from sampler_fleet.episodes.containers.base import Container, Runtime
from sampler_fleet.episodes.containers.checkout import hide, record, set_up
from sampler_fleet.episodes.containers.launch import SandboxConfig
from sampler_fleet.episodes.grid import GridSandboxes

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
FindRuntime = Callable[[SandboxConfig], "Runtime | str"]


def find_runtime(config: SandboxConfig) -> Runtime | str:
    """The configured runtime, or why there is none; "auto" is the first local one that answers."""
    if config.runtime == "modal":
        from sampler_fleet.episodes.containers import modal_sandbox

        return modal_sandbox.find_runtime(config)
    problems = []
    for name in ("docker", "podman") if config.runtime == "auto" else (config.runtime,):
        if not (problem := cli.why_not(name)):
            return cli.CliRuntime(name, config.containers)
        problems.append(problem)
    return "; ".join(problems)


@dataclass(frozen=True, kw_only=True)
class _Frozen:
    """A checkout made ready once: later episodes start from it."""

    image: str
    unset: list[str]


def _digest(checkout: Checkout) -> str:
    return hashlib.sha256(repr(checkout).encode(errors="surrogateescape")).hexdigest()


class ContainerPool:
    """At most `max_concurrent` containers at once; each opened is closed, whatever happens."""

    def __init__(
        self, config: SandboxConfig, max_concurrent: int, *, find: FindRuntime = find_runtime
    ) -> None:
        self.limits = config.containers
        self._find = functools.cache(lambda: find(config))
        self._room = asyncio.Semaphore(max_concurrent)
        self._swept = asyncio.Lock()
        self._is_swept = False
        self._fetching: dict[str, asyncio.Lock] = {}
        self._fetched: set[str] = set()
        self._frozen: dict[str, _Frozen] = {}  # by digest of the checkout
        self._open: set[Container] = set()

    def missing(self) -> str:
        """Why there is no container runtime; "" if there is. Looks for it at the first call."""
        found = self._find()
        return found if isinstance(found, str) else ""

    @contextlib.asynccontextmanager
    async def open(self, checkout: Checkout, *, hidden: bool) -> AsyncIterator[Container]:
        """A container in the tree of a checkout, without what a policy must not see if `hidden`.

        Raises:
            NoImageError: there is no such image.
            SandboxError: no runtime, or no container could be started and set up.
        """
        async with self._room:
            runtime = await self._runtime()
            await self._fetch(runtime, checkout.image)
            container = await self._start(runtime, checkout, hidden)
            try:
                yield container
            finally:
                await self._close(container)

    async def close(self) -> None:
        """Ends all containers that are open still."""
        await asyncio.gather(*(self._close(container) for container in list(self._open)))
        if self._is_swept and not isinstance(runtime := self._find(), str):
            await runtime.close()

    async def _runtime(self) -> Runtime:
        runtime = self._find()
        if isinstance(runtime, str):
            raise SandboxError(f"no container runtime: {runtime}")
        async with self._swept:
            if not self._is_swept:
                await runtime.sweep()
                self._is_swept = True
        return runtime

    async def _fetch(self, runtime: Runtime, image: str) -> None:
        async with self._fetching.setdefault(image, asyncio.Lock()):
            if image not in self._fetched:
                await runtime.fetch(image)
                self._fetched.add(image)

    async def _start(self, runtime: Runtime, checkout: Checkout, hidden: bool) -> Container:
        for attempt in range(1, _ATTEMPTS + 1):
            frozen = self._frozen.get(_digest(checkout)) if hidden else None
            image = frozen.image if frozen else checkout.image
            container = runtime.container(image, checkout.workdir)
            self._open.add(container)
            try:
                await container.start({})
                if frozen:
                    await record(container, frozen.unset)
                else:
                    await self._prepare(container, checkout, hidden)
                return container
            except SandboxError as error:
                await self._close(container)
                self._frozen.pop(_digest(checkout), None)  # they don't live for ever
                if attempt == _ATTEMPTS:
                    raise
                _log.warning("%s, attempt %d: %s", checkout.image, attempt, error)
                await asyncio.sleep(0.5 * attempt)
            except BaseException:
                await self._close(container)
                raise
        raise AssertionError("unreachable")

    async def _prepare(self, container: Container, checkout: Checkout, hidden: bool) -> None:
        await set_up(container, checkout, self.limits)
        if not hidden:
            return
        unset = await hide(container, checkout, self.limits)
        if image := await container.freeze():
            self._frozen[_digest(checkout)] = _Frozen(image=image, unset=unset)
        await record(container, unset)

    async def _close(self, container: Container) -> None:
        self._open.discard(container)
        await asyncio.shield(container.close())


class SandboxesByTask:
    """Where each task's sandbox is: on this machine if it has a tree, else in a container.

    A task on a grid has none.
    """

    def __init__(self, trees: Sandboxes, containers: ContainerPool) -> None:
        self._trees, self._containers = trees, containers

    def no_containers(self) -> str:
        """Why there is no container runtime; "" if there is."""
        return self._containers.missing()

    def of(self, task: Task) -> Sandboxes:
        """Where to open the sandbox of an episode of this task."""
        if task.environment == "grid":
            return GridSandboxes()
        if task.checkout is None:
            return self._trees
        return _OfCheckout(self._containers, task.checkout)


class _OfCheckout(Sandboxes):
    def __init__(self, containers: ContainerPool, checkout: Checkout) -> None:
        self._containers, self._checkout = containers, checkout

    def open(self, tree: Mapping[str, bytes]) -> AbstractAsyncContextManager[Sandbox]:
        assert not tree, "a checkout's tree is in its image"
        return self._containers.open(self._checkout, hidden=True)
