"""The engine port: what the sampler agent needs of an inference engine.

Owns the interface and what every engine refuses; must not import an engine. The implementations
are `embedded.py` (PyTorch) and `sglang.py` (a server); only entry points name them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from contracts.errors import BadInputError, RetryError
from contracts.types import Completion, GenerateRequest, Manifest


def check_request(
    request: GenerateRequest,
    *,
    version: int,
    running: Container[str],
    max_context: int,
    vocab_size: int,
) -> None:
    """Refuses what an engine of this `version` (0: none loaded), with these requests, cannot serve.

    Raises:
        RetryError: no version yet, or too old a one.
        BadInputError: an id in use, a buffer that leaves no room for a token, unknown token ids.
    """
    if not version:
        raise RetryError("no weights have been loaded yet")
    if version < request.min_version:
        raise RetryError(f"version {request.min_version} is wanted, {version} is loaded")
    if request.request_id in running:
        raise BadInputError("request_id", expected="an unused one", found=request.request_id)
    rule, num = f"tokens of request {request.request_id}", len(request.tokens)
    longest = max_context - 1
    if not 1 <= num <= longest:
        raise BadInputError(rule, expected=f"1 to {longest} tokens", found=num)
    least, most = int(request.tokens.min()), int(request.tokens.max())
    if least < 0 or most >= vocab_size:
        raise BadInputError(
            rule,
            expected=f"ids from 0 to {vocab_size - 1}",
            found=least if least < 0 else most,
        )


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What runs now; fractions in [0, 1], rates averaged over the last seconds."""

    num_running: int
    num_waiting: int
    tokens_per_second: float
    kv_used_fraction: float


class Engine(Protocol):
    """One model in one precision. All methods are called from one asyncio loop."""

    @property
    def version(self) -> int:
        """The policy version that the next decode step will use; 0 before the first load."""
        ...

    @property
    def weights_checksum(self) -> str:
        """Of the tensors of the last load that succeeded, as the engine holds them: engines alike
        in accelerator, precision and kernels agree. "" before the first."""
        ...

    async def load(self, directory: Path, manifest: Manifest) -> float:
        """Switches to a complete checkpoint directory in its format, also while requests run.

        Returns the seconds for which nothing was decoded.

        Requests that span the switch go on with the KV cache they have; their spans say which
        version made which token. After the switch every tensor's checksum is compared with the
        manifest's.

        Raises:
            BadInputError: another architecture, missing or unknown tensors; the old weights stay.
            DirtyProcessError: the engine no longer knows what it serves; it must be replaced.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """Streams the completion in chunks, the last of which has a finish_reason.

        The KV cache of `request.session_id` is reused for the longest common prefix. Closing the
        iterator aborts the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream closes with finish_reason `abort`. Unknown ids are ignored."""
        ...

    def end_session(self, session_id: str) -> None:
        """The session's KV cache may go."""
        ...

    def load_now(self) -> EngineLoad: ...

    async def close(self) -> None: ...
