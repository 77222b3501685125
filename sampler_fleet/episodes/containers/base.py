"""The port of a container runtime: Docker or Podman by their command line, or Modal.

Owns what a runtime must do and the errors it has. Must not know tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sampler_fleet.episodes.base import SandboxError
from sampler_fleet.episodes.supervised import Supervised


class NoImageError(SandboxError):
    """There is no such image, here or where it would come from: trying again won't help."""


class Container(Supervised):
    """One container with our supervisor in it, in the image's tree."""

    async def start(self, tree: Mapping[str, bytes]) -> None:
        """Starts it and writes `tree` over the image's. SandboxError: it did not start."""
        raise NotImplementedError

    async def freeze(self) -> str:
        """An image of the disk as it is, for `Runtime.container`; "" where it isn't worth it."""
        return ""

    async def close(self) -> None:
        """Ends it and removes every trace. Safe to call twice."""
        raise NotImplementedError


class Runtime(Protocol):
    """Where containers come from."""

    name: str

    async def sweep(self) -> None:
        """Removes containers that killed processes of this program left behind."""
        ...

    async def fetch(self, image: str) -> None:
        """Makes an image ready to start. NoImageError: there is none."""
        ...

    def container(self, image: str, workdir: str) -> Container:
        """One that is not running yet. `workdir` "": the image's own."""
        ...

    async def close(self) -> None:
        """Ends connections. Repeatable."""
        ...
