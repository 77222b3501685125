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
            BadInputError, DirtyProcessError: somebody has to mend the group; asked again later,
                and the other groups go on.
        """
        ...

    async def num_held(self, group: str) -> int | None:
        """Samplers of a group that exist and are paid for, also those that load or drain.

        None: the provider doesn't know.

        Raises:
            RetryError, BadInputError, DirtyProcessError: as `scale`.
        """
        ...

    async def close(self) -> None:
        """Drains what lives no longer than this process, and returns when it is gone.

        What is deployed elsewhere stays, for the next autoscaler. Repeatable.
        """
        ...
