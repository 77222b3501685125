"""A weight service on port 0 and its clients in one process: what tests of both ends begin with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from contracts.types import Manifest, WeightFormat
from weight_sync.client import WeightClient, publish
from weight_sync.config import WeightsConfig
from weight_sync.service import serving
from weight_sync.store import VersionStore

TOKEN = "a token of enough length"
BF16 = WeightFormat.BF16


@contextlib.asynccontextmanager
async def running(
    root: Path, *, address: str = "127.0.0.1:0", **settings: Any
) -> AsyncIterator[tuple[str, VersionStore]]:
    store = VersionStore(root)
    try:
        config = WeightsConfig(**settings)
        async with serving(store, config, address=address, credentials=TOKEN) as (_, port):
            yield f"127.0.0.1:{port}", store
    finally:
        store.close()


async def put(address: str, directory: Path, version: int, **kwargs: Any) -> None:
    await asyncio.to_thread(publish, address, TOKEN, directory, version, **kwargs)


@contextlib.asynccontextmanager
async def receiving(
    address: str, directory: Path, format: WeightFormat = BF16, **kwargs: Any
) -> AsyncIterator[WeightClient]:
    client = WeightClient(address, TOKEN, format, directory, **kwargs)
    try:
        yield client
    finally:
        await client.close()


async def next_manifest(client: WeightClient, after: int = 0) -> Manifest:
    manifests = client.watch(after)
    try:
        return await asyncio.wait_for(anext(manifests), 20)
    finally:
        await manifests.aclose()
