"""A sampler's process: everything it is made of, from start to end.

Owns which engine stands behind the port, and the order in which the parts come and go.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from contracts.credentials import Credentials
from contracts.errors import BadInputError
from contracts.types import Purpose, WeightFormat
from sampler_fleet.config import GroupConfig, read_settings
from sampler_fleet.engines.base import Engine
from sampler_fleet.join import Offer, Patience, SamplerAgent
from sampler_fleet.metrics import SamplerCollector, SamplerReading
from sampler_fleet.process import run_until_stopped
from sampler_fleet.web.server import serving_metrics
from weight_sync.client import WeightClient


async def run_sampler(  # noqa: PLR0913 (a command line)
    config: Path,
    *,
    gateway: str,
    weights: str,
    group_name: str,
    sampler_id: str,
    state_dir: Path,
    price_per_hour: float | None,
    metrics: str,
    credentials: Credentials,
) -> None:
    """Serves until it is told to leave. `metrics` is the HOST:PORT of its metrics, or nothing.

    Raises:
        BadInputError, AuthError: the run file, the gateway or the engine refuses this sampler.
        DirtyProcessError: this process is to be replaced.
    """
    settings = read_settings(config)
    fleet, sampling = settings.fleet, settings.sampling
    group = fleet.group(group_name)
    seed = int.from_bytes(hashlib.sha256(sampler_id.encode()).digest()[:4], "little")
    engine = make_engine(
        group,
        fleet.max_context_tokens,
        seed,
        returns_routed_experts=sampling.return_routed_experts and group.purpose == Purpose.TRAIN,
    )
    client = WeightClient(weights, credentials, group.weight_format, state_dir / "weights")
    agent = SamplerAgent(
        sampler_id=sampler_id,
        group=group,
        engine=engine,
        weights=client,
        gateway=gateway,
        credentials=credentials,
        patience=Patience(drain=fleet.drain_seconds),
        offer=Offer(
            formats=_formats(group),
            price_per_hour=price_per_hour,
            measure_seconds=fleet.measure_seconds,
        ),
    )

    def read() -> SamplerCollector:
        return SamplerCollector(
            SamplerReading(
                sampler_id=sampler_id,
                group=group.name,
                load=engine.load_now(),
                version=engine.version,
                num_tokens=agent.num_tokens,
                switch=agent.switch,
            )
        )

    try:
        # a sampler that only verifies others has no certificate to show
        own = credentials.tls if credentials.tls and credentials.tls.certificate else None
        async with serving_metrics(metrics, read, own):
            await run_until_stopped(agent.run(), lambda: agent.leave("it was told to stop"))
    finally:
        await client.close()
        await engine.close()


def _formats(group: GroupConfig) -> tuple[WeightFormat, ...]:
    """What a group's engine can load on its accelerator."""
    if group.engine == "embedded":
        return tuple(WeightFormat)
    from sampler_fleet.engines.launch import kernels_for

    formats = []
    for format in WeightFormat:
        with contextlib.suppress(BadInputError):
            kernels_for(group.accelerator, format)
            formats.append(format)
    return tuple(formats) or (group.weight_format,)


def make_engine(
    group: GroupConfig, max_context_tokens: int, seed: int, *, returns_routed_experts: bool = False
) -> Engine:
    """The engine of a group's settings, without weights; what it needs is imported here."""
    if group.engine == "sglang":
        from sampler_fleet.engines.launch import LocalServer, kernels_for
        from sampler_fleet.engines.sglang import SglangEngine

        flags = ("--enable-return-routed-experts",) if returns_routed_experts else ()
        server = group.sglang.address or LocalServer(
            kernels=kernels_for(group.accelerator, group.weight_format),
            kv_format=group.kv_format,
            max_sessions=group.max_sessions,
            max_context_tokens=max_context_tokens,
            num_accelerators=group.num_accelerators,
            python=group.sglang.python,
            arguments=(*flags, *group.sglang.arguments),
        )
        return SglangEngine(
            server,
            weight_format=group.weight_format,
            max_context_tokens=max_context_tokens,
            seed=seed,
            returns_routed_experts=returns_routed_experts,
        )
    from sampler_fleet.engines.embedded import EmbeddedEngine

    return EmbeddedEngine(
        kv_format=group.kv_format,
        activation_format=group.activation_format,
        split_k=group.split_k,
        max_sessions=group.max_sessions,
        max_context_tokens=max_context_tokens,
        seed=seed,
    )
