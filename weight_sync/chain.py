"""Which deltas bring a sampler from the version it has to the one it wants.

Owns that decision, from versions and sizes alone: no files, no network.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

Edge = tuple[int, int]  # of a delta: base version, version


def shortest_chain(
    sizes: Mapping[Edge, int], have: int, want: int, *, max_deltas: int
) -> list[Edge] | None:
    """The chain of the fewest bytes among those of at most `max_deltas` deltas; None without any.

    sizes: bytes of each delta there is.
    """
    reached: dict[int, tuple[int, list[Edge]]] = {have: (0, [])}
    found: list[tuple[int, list[Edge]]] = []
    for _ in range(max_deltas):
        longer: dict[int, tuple[int, list[Edge]]] = {}
        for (base, version), size in sizes.items():
            if base in reached and version <= want:
                before, chain = reached[base]
                candidate = before + size, [*chain, (base, version)]
                longer[version] = min(longer.get(version, candidate), candidate)
        if want in longer:
            found.append(longer[want])
        reached = longer
    return min(found)[1] if found else None


def missing_delta(
    sizes: Mapping[Edge, int], held: Collection[int], have: int, want: int, *, max_deltas: int
) -> Edge | None:
    """The delta to make so that there is a chain: from the newest held version within reach.

    held: versions of which all tensors are at hand. None where nothing can be made.
    """
    bases = [
        version
        for version in held
        if version < want
        and (
            version == have
            or shortest_chain(sizes, have, version, max_deltas=max_deltas - 1) is not None
        )
    ]
    return (max(bases), want) if bases and want in held else None
