"""The services of a run on one machine: command lines, ports and the token file.

Owns these, their niceness and their order at the end; `contracts.supervisor` keeps them running.
Must not talk to them, and must not know what a group or a version is beyond its name.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.supervisor import Service

HOST = "127.0.0.1"
# The trainer's updates are what everything waits for; samplers take what is left. At the end the
# gateway goes first: samplers then have nothing to drain.
NICE = {"gateway": 4, "autoscaler": 0, "sampler": 8, "weights": 2}
AUTOSCALER = "autoscaler"


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the services of a run listen, and the file with their bearer token."""

    gateway: str
    weights: str
    token_file: Path | None


def local_addresses(directory: Path) -> Addresses:
    """Two free ports of this machine, and a new token file that only its owner reads."""
    token_file = directory / "token"
    token_file.unlink(missing_ok=True)
    descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.bind((HOST, 0))
        gateway, weights = (f"{HOST}:{sock.getsockname()[1]}" for sock in (first, second))
    return Addresses(gateway=gateway, weights=weights, token_file=token_file)


def weights_service(directory: Path, addresses: Addresses) -> Service:
    """The weight service, its store in the run's directory."""
    return Service(
        name="weights",
        kind="weights",
        command=(
            *_module("weight_sync", "serve", directory, addresses),
            *("--store", str(directory / "weights"), "--listen", addresses.weights),
        ),
    )


def gateway_service(directory: Path, addresses: Addresses, checkpoint: Path) -> Service:
    """The gateway; `checkpoint` holds the tokenizer of its episodes."""
    return Service(
        name="gateway",
        kind="gateway",
        command=(
            *_module("sampler_fleet", "serve", directory, addresses),
            *("--listen", addresses.gateway, "--weights", addresses.weights),
            *("--state-dir", str(directory / "gateway"), "--checkpoint", str(checkpoint)),
        ),
    )


def sampler_services(
    directory: Path, addresses: Addresses, groups: Sequence[dict[str, Any]]
) -> list[Service]:
    """Each group's `samplers` processes (1 unless it says otherwise)."""
    return [
        Service(
            name=name,
            kind="sampler",
            command=(
                *_module("sampler_fleet", "join", directory, addresses),
                *("--gateway", addresses.gateway, "--weights", addresses.weights),
                *("--group", group["name"], "--sampler-id", name),
                *("--state-dir", str(directory / "samplers" / name)),
            ),
        )
        for group in groups
        for name in sampler_names([group])
    ]


def autoscaler_service(directory: Path, addresses: Addresses) -> Service:
    """The autoscaler, which starts and stops the samplers of all groups."""
    return Service(
        name=AUTOSCALER,
        kind="autoscaler",
        command=(
            *_module("sampler_fleet", "autoscale", directory, addresses),
            *("--gateway", addresses.gateway, "--weights", addresses.weights),
            *("--state-dir", str(directory / "samplers")),
        ),
    )


def sampler_names(groups: Sequence[dict[str, Any]]) -> list[str]:
    """Service names (and ids) of the samplers of [[fleet.groups]] tables."""
    return [
        f"{group['name']}-{number}"
        for group in groups
        for number in range(group.get("samplers", 1))
    ]


def _module(package: str, verb: str, directory: Path, addresses: Addresses) -> tuple[str, ...]:
    record, token_file = directory / "config.json", addresses.token_file
    return (
        *(sys.executable, "-m", package, verb, "--config", str(record)),
        *("--token-file", str(token_file)),
    )
