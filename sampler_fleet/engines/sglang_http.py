"""HTTP to an SGLang server: control calls that return JSON, and one POST that streams.

Owns the connections, their timeouts and what a status means. Knows no endpoint's fields.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from contracts.errors import BadInputError, RetryError

CONTROL_S = 30.0


class SglangHttp:
    """A client of one server; made inside the event loop that uses it."""

    def __init__(self, address: str) -> None:
        self._session = aiohttp.ClientSession(
            address,
            # a reply may take hours, and nothing comes while decoding is paused
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONTROL_S),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None, CONTROL_S)

    async def post(
        self, path: str, body: dict[str, Any], *, timeout_s: float = CONTROL_S
    ) -> dict[str, Any]:
        """The reply's JSON object, {} where it is none. RetryError for anything but success."""
        return await self._call("POST", path, body, timeout_s)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        try:
            async with self._session.request(
                method, path, json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RetryError(f"SGLang {path}: {error!r}") from error
        if response.status != 200:
            raise RetryError(f"SGLang {path} answered {response.status}: {_message(text)}")
        try:
            reply = json.loads(text)
        except ValueError:  # some confirm in words
            return {}
        return reply if isinstance(reply, dict) else {}

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A POST whose body the caller reads.

        Raises:
            BadInputError, RetryError: the server refuses, see `refusal`; the connection broke.
        """
        try:
            async with self._session.post(path, json=body) as response:
                if response.status != 200:
                    raise refusal(response.status, _message(await response.text()))
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RetryError(f"SGLang {path}: {error!r}") from error

    async def close(self) -> None:
        """Breaks what is open."""
        await self._session.close()


def refusal(status: int, message: str) -> BadInputError | RetryError:
    """What a status of the server means for the caller."""
    if status == 400:
        return BadInputError("request to SGLang", expected="one it accepts", found=message)
    return RetryError(f"SGLang answered {status}: {message}")


def _message(text: str) -> str:
    """The part of an error's body that people read."""
    try:
        found = json.loads(text)
    except ValueError:
        return text[:300]
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail") or str(found)
    return str(found)[:300]
