"""Which experts tokens went to: one of the values that travel, apart from `types` for its length.

Owns its shape, how parts become a whole, and what no engine computes. Must not do I/O, and needs
only the standard library and numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from contracts.errors import BadInputError


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """The experts that consecutive tokens of a buffer went to, in every layer that has experts.

    A token is routed when it is computed, which for the last one drawn is in the next turn.
    """

    start: int  # the first token's position in the buffer
    ids: np.ndarray  # [tokens, layers, experts of a token], uint8 or uint16; in no order

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def where(self, mask: np.ndarray) -> list[RoutedExperts]:
        """The parts where `mask` [tokens] is True."""
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        return [
            RoutedExperts(start=self.start + first, ids=self.ids[first:last])
            for first, last in edges.tolist()
        ]

    @staticmethod
    def dtype_for(num_experts: int) -> type[np.uint8] | type[np.uint16]:
        """Of the ids of so many experts."""
        return np.uint8 if num_experts <= 256 else np.uint16

    @staticmethod
    def bytes_per_token(num_layers: int, num_per_token: int, num_experts: int) -> int:
        """On the wire."""
        return num_layers * num_per_token * np.dtype(RoutedExperts.dtype_for(num_experts)).itemsize

    @staticmethod
    def join(parts: Iterable[RoutedExperts]) -> tuple[RoutedExperts, ...]:
        """The same in fewer parts: those that follow each other become one."""
        joined: list[list[RoutedExperts]] = []
        for part in parts:
            last = joined[-1][-1] if joined else None
            follows = last and last.end == part.start and last.ids.shape[1:] == part.ids.shape[1:]
            joined[-1].append(part) if follows else joined.append([part])
        return tuple(
            RoutedExperts(start=run[0].start, ids=np.concatenate([part.ids for part in run]))
            for run in joined
        )

    @staticmethod
    def first_of_each(
        parts: Iterable[RoutedExperts], *, num_tokens: int
    ) -> tuple[RoutedExperts, ...]:
        """Every position below `num_tokens` once, from the first part that has it; in order."""
        is_known = np.zeros(num_tokens, bool)
        taken: list[RoutedExperts] = []
        for part in parts:
            taken += part.where(~is_known[part.start : part.end])
            is_known[part.start : part.end] = True
        return RoutedExperts.join(sorted(taken, key=lambda part: part.start))


def check_routed(routed: RoutedExperts, rule: str, num_tokens: int | None) -> None:
    """Refuses what no engine computes. `num_tokens`: of the buffer so far, the last of which is not
    computed yet; None: not known.

    Raises:
        BadInputError: another kind of array, tokens that are not there, an expert twice.
    """
    ids = routed.ids
    if ids.ndim != 3 or not ids.size or ids.dtype not in (np.uint8, np.uint16):
        raise BadInputError(
            rule,
            expected="routed experts [tokens, layers, experts of a token] as uint8 or uint16",
            found=f"{list(ids.shape)} as {ids.dtype}",
        )
    if routed.start < 0 or (num_tokens is not None and routed.end >= num_tokens):
        raise BadInputError(
            rule,
            expected="routed experts of tokens before the last"
            + ("" if num_tokens is None else f" of {num_tokens}"),
            found=f"of {routed.start} to {routed.end}",
        )
    ordered = np.sort(ids, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise BadInputError(
            rule, expected="routed experts of a token that differ", found="one of them twice"
        )
