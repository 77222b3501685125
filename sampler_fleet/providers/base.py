"""The provider port: whoever starts and stops a group's samplers.

Owns the interface only; must not import a provider. Adapters are named in entry points.
"""

from __future__ import annotations

from typing import Protocol


class Provider(Protocol):
    async def scale(self, group: str, num: int) -> None:
        """Asks for `num` samplers of a group and returns without waiting until they serve.

        A sampler that goes is drained first. Asking again for the same number changes nothing.

        Raises:
            RetryError: the provider is away or refuses for now; asked again later.
        """
        ...
