"""The provider port for groups that run on Modal: resizes and counts a deployed group's containers.

Owns the remote calls after a deployment and what Modal's exceptions mean here. Must not define what
is deployed (`modal_app.py`), and starts nothing that wasn't.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import modal

from contracts.errors import BadInputError, RetryError
from sampler_fleet.providers.base import Provider

CALL_S = 20.0  # Modal's client tries for about a minute, which would hold up the other groups

# What trying again may cure; ConflictError is a kind of InvalidError and goes first.
_LATER = (
    modal.exception.ServiceError,
    modal.exception.InternalError,
    modal.exception.ConflictError,
    modal.exception.ResourceExhaustedError,
    modal.exception.TimeoutError,
    modal.exception.ConnectionError,
    ConnectionError,
    socket.gaierror,
    TimeoutError,
)


@contextlib.contextmanager
def explaining(subject: str, *, needs: str) -> Iterator[None]:
    """Modal's exceptions as ours, with its own words; `needs` says what must exist there.

    Raises:
        RetryError: Modal is away, busy, or limits the rate.
        BadInputError: no credentials, an unknown name, a setting that Modal refuses.
    """
    try:
        yield
    except modal.exception.AuthError as error:
        raise BadInputError(
            "Modal credentials",
            expected="a token from `modal token new`, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET",
            found=_words(error),
        ) from None
    except modal.exception.NotFoundError as error:
        raise BadInputError(subject, expected=needs, found=_words(error)) from None
    except _LATER as error:
        raise RetryError(f"{subject}: Modal is away or busy: {_words(error)}") from None
    except modal.Error as error:
        raise BadInputError(subject, expected="what Modal accepts", found=_words(error)) from None


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


class Api(Protocol):
    """What the provider asks of Modal: `ModalApi`, or a fake."""

    async def resize(self, server: str, *, least: int, most: int) -> None: ...

    async def num_containers(self, server: str) -> int: ...

    async def close(self) -> None: ...


class ModalApi(Api):
    """The calls that this project makes to a deployed app, and nothing else of Modal."""

    def __init__(self, app: str, environment: str = "") -> None:
        self._app = app
        self._environment = environment or None
        self._client: modal.Client | None = None

    async def resize(self, server: str, *, least: int, most: int) -> None:
        """Sets the bounds between which Modal keeps a server's containers; `most` is at least 1."""
        found = modal.Server.from_name(
            self._app, server, environment_name=self._environment, client=await self._connected()
        )
        await found.autoscaler.update.aio(min_containers=least, max_containers=most)

    async def num_containers(self, server: str) -> int:
        """Containers that Modal counts as a server's now, also those that start or stop."""
        found = modal.Function.from_name(
            self._app, server, environment_name=self._environment, client=await self._connected()
        )
        return (await found.get_current_stats.aio()).num_total_runners

    async def close(self) -> None:
        """Ends the connection. Repeatable."""
        if self._client is not None:
            await self._client.close.aio()
            self._client = None

    async def _connected(self) -> modal.Client:
        if self._client is None:
            self._client = await modal.Client.from_env.aio()
        return self._client


class ModalProvider(Provider):
    """Groups of one deployed app."""

    def __init__(self, api: Api, *, call_s: float = CALL_S) -> None:
        self._api = api
        self._call_s = call_s

    async def scale(self, group: str, num: int) -> None:
        """Asks Modal for exactly `num` containers.

        The container that goes gets SIGTERM and drains within its grace period. A new deployment
        puts a group back to the run file's number.

        Raises:
            RetryError, BadInputError: as `explaining`.
        """
        # A limit of 0 would be none at all. With no request to serve, none of 1 start.
        async with self._limited(group):
            await self._api.resize(group, least=num, most=max(num, 1))

    async def num_held(self, group: str) -> int | None:
        """Containers now, also those that load or drain. Raises as `scale`."""
        async with self._limited(group):
            return await self._api.num_containers(group)

    async def close(self) -> None:
        """Ends the connection. A deployment outlives whoever resizes it; `undeploy` ends it."""
        await self._api.close()

    @contextlib.asynccontextmanager
    async def _limited(self, group: str) -> AsyncIterator[None]:
        needs = "a deployed group (python -m sampler_fleet deploy modal)"
        with explaining(f"Modal, group {group}", needs=needs):
            async with asyncio.timeout(self._call_s):
                yield
