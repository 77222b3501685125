"""The Modal app of a fleet: one server per group with provider "modal", from the run file.

Owns the table of accelerators, the images, and every setting of a deployed group. Must not talk to
Modal: what is defined here is sent by `modal_deploy.py`. Secrets are references by name; images and
the mounted run record hold none.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import modal

from contracts.errors import BadInputError
from sampler_fleet.config import FleetConfig, GroupConfig
from sampler_fleet.providers.modal_container import GRACE_S, REQUIRED_KEYS, SamplerContainer

DISTRIBUTION = "mixed-samplers"
SOURCE = ("contracts", "weight_sync", "sampler_fleet")  # packages that a sampler imports
RECORD = "/root/run.json"
CACHE = "/cache"
PORT = 8000
MAX_GRACE_S = 3600  # Modal's limit of exit_grace_period (modal 1.6.4, _server.py)
MAX_GPUS = 8  # per container; modal.com/docs/guide/gpu


@dataclass(frozen=True, kw_only=True)
class ModalGpu:
    """Modal's name of an accelerator; "" where there is none."""

    name: str
    source: str


_GUIDE = "modal.com/docs/guide/gpu"
# accelerator in lower case, spaces as dashes
GPUS: Mapping[str, ModalGpu] = {
    "cpu": ModalGpu(name="", source="no accelerator"),
    "a100": ModalGpu(name="A100-80GB", source=f"{_GUIDE}; A100 alone may be one of 40 GB"),
    "h100": ModalGpu(
        name="H100!", source=f"{_GUIDE}; without the mark Modal may give an H200 for it"
    ),
    "h200": ModalGpu(name="H200", source=_GUIDE),
    "b200": ModalGpu(name="B200", source=f"{_GUIDE}; B200+ may be a B300"),
    "b300": ModalGpu(name="B300", source="the published run's recipe; not in the guide's list"),
    "rtx-pro-6000": ModalGpu(name="RTX-PRO-6000", source=_GUIDE),
    "l40s": ModalGpu(name="L40S", source=_GUIDE),
}


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """What one group becomes on Modal."""

    group: GroupConfig
    gpu: str | None  # with its number, as Modal writes it
    image: str  # "" for Debian with this Python
    regions: tuple[str, ...]
    cloud: str


def plan_servers(fleet: FleetConfig, *, insecure: bool = False) -> tuple[ServerPlan, ...]:
    """One plan per group with provider "modal", in the file's order.

    Raises:
        BadInputError: what Modal's containers could not reach, trust, or run. `insecure` allows
            tokens and weights to travel without TLS.
    """
    groups = [group for group in fleet.groups if group.provider == "modal"]
    if not groups:
        raise BadInputError(
            "run file, fleet.groups", expected='a group with provider = "modal"', found="none"
        )
    check_public("fleet.modal.gateway", fleet.modal.gateway)
    check_public("fleet.modal.weights", fleet.modal.weights)
    if fleet.modal.tls == "none" and not insecure:
        raise BadInputError(
            "run file, fleet.modal.tls",
            expected='"server" or "mutual", or --insecure',
            found='"none": token and samples would cross the internet in plain text',
        )
    if grace_seconds(fleet) > MAX_GRACE_S:
        raise BadInputError(
            "run file, fleet.drain_seconds",
            expected=f"at most {MAX_GRACE_S - GRACE_S:.0f}, what Modal waits for",
            found=fleet.drain_seconds,
        )
    return tuple(_plan(fleet, group) for group in groups)


def _plan(fleet: FleetConfig, group: GroupConfig) -> ServerPlan:
    where = f"run file, group {group.name}"
    image = group.modal.image or fleet.modal.image
    if group.engine == "sglang" and not (image and group.sglang.python):
        raise BadInputError(
            where,
            expected="modal.image with SGLang, and sglang.python, that image's Python",
            found="neither" if not (image or group.sglang.python) else "only one of them",
        )
    if group.sglang.address:
        raise BadInputError(
            where, expected="a server of each sampler's own", found=group.sglang.address
        )
    return ServerPlan(
        group=group,
        gpu=gpu_of(group),
        image=image,
        regions=group.modal.regions or fleet.modal.regions,
        cloud=group.modal.cloud or fleet.modal.cloud,
    )


def gpu_of(group: GroupConfig) -> str | None:
    """A group's accelerators as Modal names them, like "H100!:2"; None without any.

    Raises:
        BadInputError: no name is known, it holds a number, or more than one container can have.
    """
    name = group.modal.gpu
    if ":" in name:
        raise BadInputError(
            f"run file, group {group.name}",
            expected="modal.gpu without a number: num_accelerators is it",
            found=name,
        )
    if not name:
        found = GPUS.get(group.accelerator.lower().replace(" ", "-"))
        if found is None:
            raise BadInputError(
                f"run file, group {group.name}",
                expected=f"modal.gpu, or an accelerator of {', '.join(GPUS)}",
                found=group.accelerator,
            )
        name = found.name
    if group.num_accelerators > MAX_GPUS:
        raise BadInputError(
            f"run file, group {group.name}",
            expected=f"num_accelerators of at most {MAX_GPUS} in one Modal container",
            found=group.num_accelerators,
        )
    number = f":{group.num_accelerators}" if group.num_accelerators > 1 else ""
    return f"{name}{number}" if name else None


def check_public(key: str, address: str) -> None:
    """BadInputError unless HOST:PORT may be reached over the internet. Looks nothing up."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        public = ipaddress.ip_address(host).is_global
    except ValueError:
        public = "." in host and not host.endswith((".local", ".internal", ".lan", ".localhost"))
    if not (public and port.isdigit() and 0 < int(port) < 65536):
        raise BadInputError(
            f"run file, {key}",
            expected="a public HOST:PORT: Modal's containers dial it over the internet",
            found=address or "nothing",
        )


def grace_seconds(fleet: FleetConfig) -> int:
    """How long Modal waits between telling a container to go and killing it."""
    return math.ceil(fleet.drain_seconds + GRACE_S)


def requirements() -> list[str]:
    """What a sampler imports, pinned to the versions of this environment.

    Raises:
        BadInputError: this environment lacks one of them, or the project is not installed.
    """
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
        return [
            _pin(requirement)
            for requirement, _, condition in (line.partition(";") for line in declared)
            if not condition or '"sampler"' in condition
        ]
    except importlib.metadata.PackageNotFoundError as error:
        raise BadInputError(
            "this Python environment",
            expected="the project installed with its sampler extra, to pin its packages",
            found=f"no {error.name}",
        ) from None


def _pin(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert name, "a requirement starts with a name"
    # "+cpu" names a build that only its own index has
    return f"{name[0]}=={importlib.metadata.version(name[0]).partition('+')[0]}"


def make_image(base_tag: str, record: Path) -> modal.Image:
    """A base, the sampler's packages, this project's source, the run record.

    On a base from a registry the sampler has a Python of its own beside SGLang's, which pins other
    versions of the same packages.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if base_tag:
        base = modal.Image.from_registry(base_tag, add_python=python).entrypoint([])
    else:
        base = modal.Image.debian_slim(python_version=python)
    return (
        base.pip_install(*requirements())
        .add_local_python_source(*SOURCE, ignore=_is_not_source)
        .add_local_file(record, RECORD)
    )


def _is_not_source(path: Path) -> bool:
    return path.suffix not in {".py", ".json", ".jinja", ".html", ".css", ".js", ".toml"}


def container_environment(group: str) -> dict[str, str | None]:
    """What `SamplerContainer` reads, besides the secrets and the id that Modal gives it."""
    return {
        "SAMPLER_GROUP": group,
        "SAMPLER_RECORD": RECORD,
        "SAMPLER_CACHE": CACHE,
        "SAMPLER_PORT": str(PORT),
    }


def build_app(fleet: FleetConfig, plans: Sequence[ServerPlan], record: Path) -> modal.App:
    """The app with a server per plan, named like its group.

    `record` is the resolved run record, read when the app is deployed.

    Modal scales a server by its requests. These get none, so `min_containers` is what runs: N of
    it means N. A container beyond them counts as idle, and is told to go `scaledown_seconds` after
    a resize; its drain comes then, and has the grace period for itself.
    """
    app = modal.App(fleet.modal.app, include_source=False)
    secret = modal.Secret.from_name(
        fleet.modal.secret, required_keys=list(REQUIRED_KEYS[fleet.modal.tls])
    )
    volume = modal.Volume.from_name(fleet.modal.volume, create_if_missing=True)
    images = {tag: make_image(tag, record) for tag in {plan.image for plan in plans}}
    for plan in plans:
        group = plan.group
        app.server(
            name=group.name,
            image=images[plan.image],
            env=container_environment(group.name),
            secrets=[secret],
            gpu=plan.gpu,
            volumes={CACHE: volume},
            cpu=group.modal.cpu,
            memory=math.ceil(group.modal.memory_gib * 1024),
            min_containers=group.samplers,
            max_containers=max(group.samplers, 1),  # 0 is no limit
            scaledown_window=fleet.modal.scaledown_seconds,
            startup_timeout=fleet.modal.startup_seconds,
            port=PORT,
            exit_grace_period=grace_seconds(fleet),
            compute_region=list(plan.regions) or None,
            cloud=plan.cloud or None,
            include_source=False,
        )(SamplerContainer)
    return app
