"""The autoscaler's process: everything it is made of, from start to end.

Owns which provider stands behind each name in the run file.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from contracts.credentials import Credentials
from contracts.rpc import aio_channel
from sampler_fleet.autoscaler_loop import AutoscalerLoop
from sampler_fleet.config import FleetConfig
from sampler_fleet.live_settings import LiveSettings
from sampler_fleet.process import run_until_stopped
from sampler_fleet.providers.base import Provider
from sampler_fleet.providers.modal_config import check_has_modal


async def run_autoscaler(
    config: Path,
    *,
    gateway: str,
    state_dir: Path,
    credentials: Credentials,
    join_options: tuple[str, ...],
) -> None:
    """Scales until SIGTERM, then drains what it started. `join_options` are for its samplers.

    Raises:
        BadInputError: a run file or directory of no use; nobody could start a sampler of any
            group.
        AuthError: the gateway refuses the token.
    """
    settings = LiveSettings(config, state_dir / "config.json")
    providers = make_providers(settings.fleet, state_dir, join_options)
    async with aio_channel(gateway, credentials) as channel:
        loop = AutoscalerLoop(settings, providers, channel=channel, gateway=gateway)
        work = asyncio.ensure_future(loop.run())
        await run_until_stopped(work, work.cancel)


def make_providers(
    fleet: FleetConfig, state_dir: Path, join_options: tuple[str, ...]
) -> dict[str, Provider]:
    """Those that the groups name. Local samplers read the settings kept in `state_dir`."""
    providers: dict[str, Provider] = {}
    named = {group.provider for group in fleet.groups}
    if "local" in named:
        from sampler_fleet.providers.local import LocalProvider

        command = (sys.executable, "-m", "sampler_fleet", "join")
        settings = ("--config", str(state_dir / "config.json"))
        providers["local"] = LocalProvider(
            state_dir, join=(*command, *settings, *join_options), drain_s=fleet.drain_seconds
        )
    if "modal" in named:
        check_has_modal()
        from sampler_fleet.providers.modal import ModalApi, ModalProvider

        providers["modal"] = ModalProvider(ModalApi(fleet.modal.app, fleet.modal.environment))
    return providers
