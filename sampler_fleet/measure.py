"""What a sampler can draw: tokens per second with all its places taken, measured before it joins.

Owns the load it puts on the engine. Knows the engine port only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np

from contracts.errors import BadInputError, RetryError
from contracts.types import GenerateRequest, SamplingParams
from sampler_fleet.engines.base import Engine

PROMPT_TOKENS = 16
MAX_NEW_TOKENS = 1 << 20  # more than fits: time ends it
WARM_UP_S = 60.0  # for every session to get its first tokens; kernels may be compiled meanwhile


async def measure(engine: Engine, *, num_sessions: int, seconds: float) -> float:
    """Tokens per second of `num_sessions` at once, from the moment each has its first token.

    0.0 where the engine refuses or gives nothing in time: a sampler that can't say joins too.
    """
    num_tokens = np.zeros(num_sessions, np.int64)
    started = asyncio.Event()

    async def draw(index: int) -> None:
        name = f"measure.{index}"
        # tokens of its own: no session finds its prompt in another's cache
        prompt = (np.arange(PROMPT_TOKENS, dtype=np.int32) + index) % PROMPT_TOKENS
        request = GenerateRequest(
            request_id=name,
            session_id=name,
            tokens=prompt,
            sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS, num_candidates=1),
        )
        try:
            async with contextlib.aclosing(engine.generate(request)) as chunks:  # pyright: ignore
                async for chunk in chunks:
                    num_tokens[index] += len(chunk)
                    if num_tokens.all():
                        started.set()
        finally:
            engine.end_session(name)

    drawing = [asyncio.create_task(draw(index)) for index in range(num_sessions)]
    try:
        await asyncio.wait(
            {everybody := asyncio.ensure_future(started.wait()), *drawing},
            timeout=WARM_UP_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        everybody.cancel()
        if not started.is_set():
            return 0.0
        first, start = int(num_tokens.sum()), time.monotonic()
        await asyncio.sleep(seconds)
        return (int(num_tokens.sum()) - first) / (time.monotonic() - start)
    finally:
        for task in drawing:
            task.cancel()
        for error in await asyncio.gather(*drawing, return_exceptions=True):
            if error and not isinstance(error, asyncio.CancelledError | BadInputError | RetryError):
                raise error
