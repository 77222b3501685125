"""The router's rankings against the rule they speed up: every sampler looked at for every turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.types import KvFormat, Purpose, SamplerInfo, WeightFormat
from sampler_fleet.config import GroupConfig
from sampler_fleet.registry import IDLE, Registry, Sampler, SamplerPhase
from sampler_fleet.router import Route, Router, Wait, pick_group

SHARES = {"a": 0.6, "b": 0.4, "none": 0.0}
KV_LIMIT = 0.9
SAMPLERS = [f"{group}-{i}" for group in SHARES for i in range(3)]
SESSIONS = [f"s{i}" for i in range(12)]


class Straightforward:
    """Who serves a turn, decided from everything there is."""

    def __init__(self) -> None:
        self.places: dict[str, Route] = {}
        self.credit: dict[str, float] = {}

    def route(self, session_id: str, registry: Registry, min_version: int) -> Route | Wait:
        held = self.places.get(session_id)
        able = [s for s in registry if s.phase == SamplerPhase.READY and s.version >= min_version]
        if held:
            able = [s for s in able if s.info.group == held.group]
            if any(s.sampler_id == held.sampler_id for s in able):
                return held
            if not able:
                return Wait(reason=f"no sampler of group {held.group} is ready")
            return self._place(session_id, min(able, key=self._load))
        if not able:
            return Wait(reason=f"none of the groups {', '.join(SHARES)} has a ready sampler")
        roomy = [s for s in able if SHARES[s.info.group] and self._has_room(s)]
        if not roomy:
            return Wait(reason="every place is taken", is_full=True)
        available = {s.info.group for s in roomy}
        group, self.credit = pick_group(self.credit, SHARES, available)
        return self._place(
            session_id, min((s for s in roomy if s.info.group == group), key=self._load)
        )

    def end(self, session_id: str) -> Route | None:
        return self.places.pop(session_id, None)

    def _place(self, session_id: str, sampler: Sampler) -> Route:
        route = Route(group=sampler.info.group, sampler_id=sampler.sampler_id)
        self.places[session_id] = route
        return route

    def _num_sessions(self, sampler: Sampler) -> int:
        return Counter(r.sampler_id for r in self.places.values())[sampler.sampler_id]

    def _load(self, sampler: Sampler) -> tuple[float, int, str]:
        taken = self._num_sessions(sampler) / sampler.info.max_sessions
        return taken, sampler.load.num_running, sampler.sampler_id

    def _has_room(self, sampler: Sampler) -> bool:
        num = self._num_sessions(sampler)
        return num == 0 or (
            num < sampler.info.max_sessions and sampler.load.kv_used_fraction < KV_LIMIT
        )


@dataclass(frozen=True)
class Turn:
    session_id: str
    min_version: int


@dataclass(frozen=True)
class End:
    session_id: str


@dataclass(frozen=True)
class Join:
    sampler_id: str
    max_sessions: int
    version: int


@dataclass(frozen=True)
class Beat:
    sampler_id: str
    num_running: int
    kv_used_fraction: float
    version: int


@dataclass(frozen=True)
class Gone:
    sampler_id: str
    drains: bool


versions = st.integers(1, 3)
samplers = st.sampled_from(SAMPLERS)
sessions = st.sampled_from(SESSIONS)
turns = st.builds(Turn, sessions, st.integers(0, 3))
events = st.one_of(  # sessions come and go more often than samplers change
    *[turns] * 6,
    *[st.builds(End, sessions)] * 4,
    st.builds(Join, samplers, st.integers(1, 4), versions),
    st.builds(Beat, samplers, st.integers(0, 2), st.sampled_from([0.0, 0.5, 0.95]), versions),
    st.builds(Gone, samplers, st.booleans()),
)


def apply(event: Join | Beat | Gone, registry: Registry) -> None:
    known = registry.get(event.sampler_id)
    is_live = known is not None and known.phase != SamplerPhase.LOST
    match event:
        case Join() if not is_live:
            group = event.sampler_id.partition("-")[0]
            registry.register(
                SamplerInfo(
                    sampler_id=event.sampler_id, group=group, accelerator="cpu",
                    weight_format=WeightFormat.BF16, kv_format=KvFormat.FP8,
                    max_sessions=event.max_sessions, model_fingerprint="m",
                    tokenizer_fingerprint="t", version=event.version,
                ),
                now=0.0,
            )  # fmt: skip
        case Beat() if is_live:
            load = replace(
                IDLE, num_running=event.num_running, kv_used_fraction=event.kv_used_fraction
            )
            version = max(event.version, known.version)  # one that goes back is refused
            registry.heartbeat(event.sampler_id, version=version, load=load, now=0.0)
        case Gone(drains=True) if is_live:
            registry.drain(event.sampler_id, "told to")
        case Gone(drains=False) if is_live:
            registry.lose(event.sampler_id, "killed")


@given(st.lists(events, min_size=50, max_size=150))
@settings(max_examples=150)
def test_whatever_happens_the_router_decides_as_the_rule_does(happening):
    registry = Registry(
        [GroupConfig(name=name, weight_format=WeightFormat.BF16) for name in SHARES],
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        lease_seconds=10.0,
    )
    router, rule = Router({Purpose.TRAIN: SHARES}, kv_limit=KV_LIMIT), Straightforward()
    for sampler_id in SAMPLERS[::2]:
        apply(Join(sampler_id, 2, 2), registry)
    for event in happening:
        match event:
            case Turn():
                decision = router.route(
                    event.session_id,
                    registry,
                    purpose=Purpose.TRAIN,
                    min_version=event.min_version,
                    now=0.0,
                )
                assert decision == rule.route(event.session_id, registry, event.min_version)
            case End():
                assert router.end(event.session_id) == rule.end(event.session_id)
            case _:
                apply(event, registry)
        assert router.num_sessions == Counter(r.sampler_id for r in rule.places.values())
