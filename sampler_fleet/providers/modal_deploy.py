"""`deploy modal` and `undeploy modal`: shows what a run file asks of Modal, then sends it.

Owns the table and the two remote actions. Must not decide what a group becomes (`modal_app.py`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import modal
from rich.console import Console
from rich.table import Table

from contracts.runfile import validate_section, write_resolved
from sampler_fleet.config import FleetConfig, Settings, read_settings
from sampler_fleet.cost import check_in_force, price_at
from sampler_fleet.providers.modal import explaining
from sampler_fleet.providers.modal_app import (
    GPUS,
    ServerPlan,
    build_app,
    grace_seconds,
    plan_servers,
)
from sampler_fleet.providers.modal_config import ModalConfig
from sampler_fleet.providers.modal_container import REQUIRED_KEYS


def read_deployment(config: Path, name: str = "") -> Settings:
    """A run file's settings, with another name of the app if one is given."""
    settings = read_settings(config)
    if not name:
        return settings
    fields = settings.fleet.modal.model_dump() | {"app": name}
    section = validate_section(ModalConfig, "fleet.modal", fields)
    return replace(settings, fleet=settings.fleet.model_copy(update={"modal": section}))


def deploy(settings: Settings, console: Console, *, insecure: bool, dry_run: bool) -> None:
    """Prints what would run; unless it is a dry run, deploys it.

    Raises:
        BadInputError: the run file, or Modal, refuses it; no credentials.
        RetryError: Modal is away.
    """
    fleet = settings.fleet
    plans = plan_servers(fleet, insecure=insecure)
    describe(fleet, plans, console, now=time.time())
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "run.json"
        write_resolved(record, settings.to_dict())
        with _explaining(fleet.modal.app):
            app = build_app(fleet, plans, record)
        if dry_run:
            console.print("Dry run: defined and checked here, nothing was sent to Modal.")
            return
        with _explaining(fleet.modal.app), modal.enable_output():
            app.deploy(environment_name=fleet.modal.environment or None)


def undeploy(settings: Settings, console: Console) -> None:
    """Stops the app and all its containers. Raises as `deploy`."""
    section = settings.fleet.modal
    with _explaining(section.app):
        modal.App.lookup(section.app, environment_name=section.environment or None).stop()
    console.print(f"Stopped {section.app}.", highlight=False)


def _explaining(app: str) -> AbstractContextManager[None]:
    needs = "an app, secret and environment of the run file's names (docs/modal.md)"
    return explaining(f"Modal app {app}", needs=needs)


def describe(
    fleet: FleetConfig, plans: Sequence[ServerPlan], console: Console, *, now: float
) -> None:
    """A table of the groups, and what they have in common.

    Raises:
        BadInputError: a group's prices begin in the future; the gateway would refuse them too.
    """
    section = fleet.modal
    table = Table(title=f"Modal app {section.app}")
    for column in ("group", "GPU", "image", "host", "where"):
        table.add_column(column)
    for column in ("samplers", "$/h each", "$/h"):
        table.add_column(column, justify="right")
    total, unpriced = 0.0, []
    for plan in plans:
        group = plan.group
        if prices := fleet.prices_of(group):
            check_in_force(prices, now, table=f"run file, prices of group {group.name}")
        price = price_at(prices, now)
        each = price and price.per_hour * group.num_accelerators
        if each is None:
            unpriced.append(group.name)
        else:
            total += each * group.samplers
        low, high = group.bounds
        table.add_row(
            group.name,
            plan.gpu or "none",
            plan.image or "Debian slim",
            f"{group.modal.cpu:g} cores, {group.modal.memory_gib:g} GiB",
            ", ".join((*plan.regions, plan.cloud)).strip(", ") or "anywhere",
            f"{group.samplers}" if low == high else f"{group.samplers} ({low} to {high})",
            "" if each is None else f"{each:.2f}",
            "" if each is None else f"{each * group.samplers:.2f}",
        )
    console.print(table)
    keys = ", ".join(REQUIRED_KEYS[section.tls])
    lines = {
        "gateway": section.gateway,
        "weights": section.weights,
        "TLS": section.tls,
        "secret": f"{section.secret} ({keys})",
        "volume": f"{section.volume} (compiled kernels)",
        "drain": f"{fleet.drain_seconds:g} s, killed after {grace_seconds(fleet)} s",
        "cost": f"${total:.2f} per hour at the run file's prices, without cores and memory",
    }
    if unpriced:
        lines["no price"] = ", ".join(unpriced)
    known = {gpu.name for gpu in GPUS.values()}
    if unknown := sorted({p.group.modal.gpu for p in plans if p.group.modal.gpu} - known):
        lines["unknown GPU"] = f"{', '.join(unknown)}: not checked here, Modal may refuse it"
    for name, value in lines.items():
        console.print(f"{name:>12}  {value}", highlight=False)
