"""The gateway's status: everything there is to see of the fleet at one moment.

Owns what the Status call, the live page and the metrics show. Reads the gateway's core and changes
nothing of it.
"""

from __future__ import annotations

import dataclasses

from contracts import codec
from contracts.pb import fleet_pb2
from contracts.types import Purpose
from sampler_fleet.alarms import fleet_alarms
from sampler_fleet.fleet import Fleet
from sampler_fleet.heartbeat import heartbeat_to_pb
from sampler_fleet.producer import Producer
from sampler_fleet.registry import Sampler
from sampler_fleet.spool import Spool


def fleet_status(fleet: Fleet, spool: Spool, producer: Producer) -> fleet_pb2.StatusReply:
    """Everything there is to see of the fleet."""
    update, demand = producer.update, producer.demand(fleet.places.num_waiting[Purpose.TRAIN])
    newest = max((s.version for s in fleet.registry), default=0)
    alarms = fleet_alarms(
        fleet.config,
        fleet.registry,
        fleet.targets,
        newest_version=max(newest, update.version if update else 0),
    )
    problems = dict.fromkeys(filter(None, fleet.problems.values()))  # two may refuse one edit
    return fleet_pb2.StatusReply(
        samplers=[_sampler_state(sampler, fleet) for sampler in fleet.registry],
        groups=_group_states(fleet, producer),
        episodes_in_flight=producer.num_in_flight,
        groups_ready=spool.count(),
        counters={**fleet.counters, **producer.counters},
        last_sequence=spool.last_sequence,
        demand=fleet_pb2.Demand(**dataclasses.asdict(demand)),
        update=codec.update_to_pb(update) if update else None,
        alarms=[*(update.alarms if update else ()), *problems, *alarms],
        seconds=fleet.places.seconds,
    )


def _sampler_state(sampler: Sampler, fleet: Fleet) -> fleet_pb2.SamplerState:
    return fleet_pb2.SamplerState(
        register=codec.sampler_to_pb(sampler.info),
        heartbeat=heartbeat_to_pb(sampler.version, sampler.load, sampler.switch),
        state=sampler.phase,
        num_sessions=fleet.router.num_sessions[sampler.sampler_id],
    )


def _group_states(fleet: Fleet, producer: Producer) -> list[fleet_pb2.GroupState]:
    update = producer.update
    updates = {group.group: group for group in codec.update_to_pb(update).groups} if update else {}
    costs = fleet.costs()
    states = []
    for group in fleet.config.groups:
        cost, target = costs[group.name], fleet.targets.get(group.name)
        states.append(
            fleet_pb2.GroupState(
                group=group.name,
                purpose=group.purpose,
                capacity_share=fleet.router.shares[group.purpose][group.name],
                sessions_routed=fleet.router.num_routed[group.name],
                tokens_sampled=fleet.num_tokens[group.name],
                tokens_per_second=sum(
                    s.load.tokens_per_second for s in fleet.registry.ready(group.name)
                ),
                cost=fleet_pb2.Cost(gpu_hours=cost.gpu_hours, dollars=cost.dollars),
                num_target=target.num if target else None,
                num_held=target.num_held if target else None,
                update=updates.get(group.name),
            )
        )
    return states
