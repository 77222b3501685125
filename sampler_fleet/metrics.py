"""What Prometheus scrapes: the gateway's status, and one sampler's reading, as metric families.

Owns the metrics' names, units and labels (docs/observability.md lists them). Must not serve them,
nor keep anything between two scrapes.

A value that nobody knows yet has no sample. What a sampler says of itself is named
`mixed_samplers_engine_*`, so that summing over targets counts nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from contracts.pb import fleet_pb2
from contracts.types import Switch
from sampler_fleet.engines.base import EngineLoad
from sampler_fleet.registry import SamplerPhase

PREFIX = "mixed_samplers_"
HOUR_S = 3600.0

Samples = Iterable[tuple[tuple[str, ...], float | None]]  # label values, value


def expose(collector: Collector, accept: str = "") -> tuple[bytes, str]:
    """One scrape in the format that the `accept` header asks for, and its content type."""
    registry = CollectorRegistry()
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class FleetCollector(Collector):
    """One status of the gateway."""

    def __init__(self, reply: fleet_pb2.StatusReply) -> None:
        self._reply = reply

    def collect(self) -> Iterator[Metric]:
        yield from _gateway(self._reply)
        yield from _groups(self._reply)
        yield from _samplers(self._reply)
        if self._reply.HasField("update"):
            yield from _update(self._reply.update)


@dataclass(frozen=True, kw_only=True)
class SamplerReading:
    """One sampler at one moment."""

    sampler_id: str
    group: str
    load: EngineLoad
    version: int  # 0: none loaded yet
    num_tokens: int  # drawn since it started
    switch: Switch | None  # to `version`


class SamplerCollector(Collector):
    """One reading of one sampler."""

    def __init__(self, reading: SamplerReading) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        reading, load, switch = self._reading, self._reading.load, self._reading.switch
        labels = (reading.group, reading.sampler_id)
        for name, text, value in (
            ("requests_running", "Requests that are decoded now.", load.num_running),
            ("requests_waiting", "Requests that wait for a place.", load.num_waiting),
            (
                "tokens_per_second",
                "Tokens drawn per second, over the last seconds.",
                load.tokens_per_second,
            ),
            ("kv_used_ratio", "Share of its KV cache in use.", load.kv_used_fraction),
            ("version", "Policy version that the next token is drawn from.", reading.version),
            (
                "switch_bytes",
                "Bytes fetched for the last switch of version.",
                switch.num_bytes if switch else None,
            ),
        ):
            yield _gauge(f"engine_{name}", text, ("group", "sampler"), [(labels, value)])
        yield _counter(
            "engine_tokens_drawn",
            "Tokens drawn since it started.",
            ("group", "sampler"),
            [(labels, reading.num_tokens)],
        )
        phases = _phases(switch) if switch else {}
        yield _gauge(
            "engine_switch_seconds",
            "Seconds of the last switch of version, by phase; decoding stands still in `pause` "
            "alone, which lies within `load`.",
            ("group", "sampler", "phase"),
            [((*labels, phase), seconds) for phase, seconds in phases.items()],
        )


def _phases(switch: Switch) -> dict[str, float]:
    return {
        "fetch": switch.fetch_s,
        "apply": switch.apply_s,
        "verify": switch.verify_s,
        "load": switch.load_s,
        "pause": switch.pause_s,
    }


def newest_version(reply: fleet_pb2.StatusReply) -> int:
    """The newest policy version that the trainer or a sampler knows; 0 before the first."""
    served = (s.heartbeat.version for s in reply.samplers if s.state != SamplerPhase.LOST)
    return max(reply.update.version, *served, 0)


def _gateway(reply: fleet_pb2.StatusReply) -> Iterator[Metric]:
    demand = reply.demand
    for name, text, value in (
        ("gateway_uptime_seconds", "Since this gateway started.", reply.seconds),
        ("newest_version", "Newest policy version.", newest_version(reply)),
        ("alarms", "Alarms that are raised now.", len(reply.alarms)),
        ("episodes_in_flight", "Episodes that run now.", reply.episodes_in_flight),
        (
            "groups_waiting",
            "Trajectory groups completed and not yet acknowledged by the trainer.",
            reply.groups_ready,
        ),
        ("last_sequence", "Number of the newest trajectory group.", reply.last_sequence),
        ("sessions_queued", "Sessions that wait for a place.", demand.num_queued),
        ("backlog_trajectories", "Completed and not yet trained on.", demand.backlog),
        (
            "trajectories_taken_per_second",
            "As many a trainer that never waits would take.",
            _known(demand, "taken_per_second"),
        ),
        (
            "session_duration_seconds",
            "Mean of the sessions that ended lately.",
            _known(demand, "session_seconds"),
        ),
    ):
        yield _gauge(name, text, (), [((), value)])
    yield _counter(
        "events",
        "What happened since this gateway started, by kind.",
        ("event",),
        [((name,), count) for name, count in sorted(reply.counters.items())],
    )


def _groups(reply: fleet_pb2.StatusReply) -> Iterator[Metric]:
    groups = reply.groups
    sessions: Counter[str] = Counter()
    for sampler in reply.samplers:
        sessions[sampler.register.group] += sampler.num_sessions
    for name, text, values in (
        ("samplers_target", "As the autoscaler wants.", [_known(g, "num_target") for g in groups]),
        ("samplers_held", "As the provider has.", [_known(g, "num_held") for g in groups]),
        (
            "share_due_ratio",
            "Exact share of its purpose's sessions.",
            [g.capacity_share for g in groups],
        ),
        ("sessions", "Sessions that are open now.", [sessions[g.group] for g in groups]),
        ("tokens_per_second", "Tokens drawn per second.", [g.tokens_per_second for g in groups]),
        (
            "kl_nats",
            "Sampler against trainer per token, mean of the last update.",
            [_known(g.update, "kl") for g in groups],
        ),
        (
            "out_of_band_ratio",
            "Share of the last update's tokens with a probability ratio outside the band.",
            [_known(g.update, "share_out_of_band") for g in groups],
        ),
    ):
        yield _gauge(name, text, _GROUP, zip(map(_group_labels, groups), values, strict=True))
    for name, text, values in (
        ("sessions_routed", "Sessions it ever got.", [g.sessions_routed for g in groups]),
        ("tokens_sampled", "Tokens it ever drew.", [g.tokens_sampled for g in groups]),
        (
            "gpu_seconds",
            "Accelerator seconds held.",
            [g.cost.gpu_hours * HOUR_S if g.HasField("cost") else None for g in groups],
        ),
        (
            "cost_dollars",
            "What they cost, in US dollars.",
            [_known(g.cost, "dollars") for g in groups],
        ),
    ):
        yield _counter(name, text, _GROUP, zip(map(_group_labels, groups), values, strict=True))


_GROUP = ("group", "purpose")


def _group_labels(group: fleet_pb2.GroupState) -> tuple[str, ...]:
    return (group.group, group.purpose)


def _samplers(reply: fleet_pb2.StatusReply) -> Iterator[Metric]:
    states = Counter((s.register.group, s.state) for s in reply.samplers)
    yield _gauge(
        "samplers",
        "Samplers by state.",
        ("group", "state"),
        [
            ((g.group, phase), states[g.group, phase])
            for g in reply.groups
            for phase in SamplerPhase
        ],
    )
    newest = newest_version(reply)
    present = [s for s in reply.samplers if s.state != SamplerPhase.LOST]
    labels = [(s.register.group, s.register.sampler_id) for s in present]
    beats = [s.heartbeat for s in present]
    for name, text, values in (
        ("version", "Policy version it serves.", [b.version for b in beats]),
        (
            "version_lag",
            "Versions it is behind the newest.",
            [newest - b.version for b in beats],
        ),
        ("sessions", "Sessions that it holds.", [s.num_sessions for s in present]),
        ("sessions_limit", "Requests it serves well.", [s.register.max_sessions for s in present]),
        ("requests_running", "Requests it decodes.", [b.num_running for b in beats]),
        ("requests_waiting", "Requests that wait there.", [b.num_waiting for b in beats]),
        ("tokens_per_second", "Tokens drawn per second.", [b.tokens_per_second for b in beats]),
        ("kv_used_ratio", "Share of its KV cache in use.", [b.kv_used_fraction for b in beats]),
    ):
        values = zip(labels, values, strict=True)
        yield _gauge(f"sampler_{name}", text, ("group", "sampler"), values)


def _update(update: fleet_pb2.UpdateReport) -> Iterator[Metric]:
    for name, text, value in (
        ("step", "Number of the last update.", update.step),
        ("version", "Policy version that it made.", update.version),
        ("interval_seconds", "From the update before it to the last.", update.seconds),
        ("compute_seconds", "Of these, spent computing.", update.update_seconds),
        ("staleness_versions", "Mean over its tokens.", _known(update, "staleness")),
        ("kl_nats", "Sampler against trainer per token.", _known(update, "kl")),
        (
            "out_of_band_ratio",
            "Share of its tokens with a probability ratio outside the band.",
            _known(update, "share_out_of_band"),
        ),
        ("reward", "Mean of its trajectories.", _known(update, "reward")),
    ):
        yield _gauge(f"update_{name}", text, (), [((), value)])


def _known(message: object, field: str) -> float | None:
    """An optional field; None where nobody set it."""
    return getattr(message, field) if message.HasField(field) else None  # pyright: ignore


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=labels), samples)


def _counter(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """The library ends the name in `_total`."""
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family
