"""An engine that counts the tokens it draws, for a sampler that is watched.

Owns the count alone; the engine it wraps does all else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from contracts.types import Completion, GenerateRequest, Manifest
from sampler_fleet.engines.base import Engine, EngineLoad


class CountingEngine:
    """Any engine, with `num_tokens` drawn since the start."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_tokens = 0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def weights_checksum(self) -> str:
        return self._engine.weights_checksum

    async def load(self, directory: Path, manifest: Manifest) -> float:
        return await self._engine.load(directory, manifest)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        chunks = self._engine.generate(request)
        try:
            async for chunk in chunks:
                self.num_tokens += len(chunk)
                yield chunk
        finally:
            if close := getattr(chunks, "aclose", None):  # whoever closes this aborts the request
                await close()

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    def end_session(self, session_id: str) -> None:
        self._engine.end_session(session_id)

    def load_now(self) -> EngineLoad:
        return self._engine.load_now()

    async def close(self) -> None:
        await self._engine.close()
