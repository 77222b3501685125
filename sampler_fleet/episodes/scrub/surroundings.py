"""What surrounds the tree in its container: the network and the environment.

Owns whether anything can be reached and which variables tell. Runs inside containers too: standard
library of Python 3.9.
"""

from __future__ import annotations

import socket

from sampler_fleet.episodes.scrub.findings import Leak
from sampler_fleet.episodes.scrub.policy import PROXIES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from sampler_fleet.episodes.scrub.gold import Scanner

# Public resolvers that also answer on port 443, and names that are served everywhere.
ADDRESSES = (("1.1.1.1", 443), ("8.8.8.8", 443), ("2606:4700:4700::1111", 443))
NAMES = ("github.com", "pypi.org")
_PATIENCE_S = 2.0


def network_leaks(
    addresses: Collection[tuple[str, int]] = ADDRESSES, names: Collection[str] = NAMES
) -> Iterator[Leak]:
    """Each address that accepts a connection and each name that resolves."""
    for address in addresses:
        try:
            socket.create_connection(address, timeout=_PATIENCE_S).close()
        except OSError:
            continue
        yield Leak("network", f"{address[0]}:{address[1]}", "it accepts connections")
    for name in names:
        try:
            socket.getaddrinfo(name, 443)
        except OSError:
            continue
        yield Leak("network", name, "it resolves")


def environment_leaks(
    environment: Mapping[str, str], scanner: Scanner, words: Collection[str]
) -> Iterator[Leak]:
    """Variables that name the instance, hold lines of the gold patch, or lead to a proxy."""
    for name, value in sorted(environment.items()):
        told = [word for word in words if word.lower() in f"{name}={value}".lower()]
        if told:
            yield Leak("environment", name, f"names {told[0]}")
        elif name.lower() in PROXIES:
            yield Leak("environment", name, "leads out")
        elif scanner.lines(value.encode("utf-8", "surrogateescape")):
            yield Leak("environment", name, "holds lines of the gold patch")
