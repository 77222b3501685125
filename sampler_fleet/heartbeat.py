"""What a sampler's heartbeat carries, in wire format and out of it.

Owns the message both ends and the status share. Must not know who sends one, nor when.
"""

from __future__ import annotations

from contracts import codec
from contracts.pb import fleet_pb2
from contracts.types import Switch
from sampler_fleet.engines.base import EngineLoad


def heartbeat_to_pb(
    version: int, load: EngineLoad, switch: Switch | None = None
) -> fleet_pb2.Heartbeat:
    return fleet_pb2.Heartbeat(
        switch=codec.switch_to_pb(switch) if switch else None,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        version=version,
        tokens_per_second=load.tokens_per_second,
        kv_used_fraction=load.kv_used_fraction,
    )


def load_from_pb(message: fleet_pb2.Heartbeat) -> EngineLoad:
    return EngineLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        tokens_per_second=message.tokens_per_second,
        kv_used_fraction=message.kv_used_fraction,
    )
