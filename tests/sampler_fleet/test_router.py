"""Properties of the routing decision: exact shares, stickiness, failover."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.types import KvFormat, Purpose, SamplerInfo, WeightFormat
from sampler_fleet.config import GroupConfig
from sampler_fleet.registry import Registry
from sampler_fleet.router import Route, Router, Wait, pick_group

PUBLISHED = {"b300": 28, "b200": 19, "h200-fp8": 19, "h100-fp8": 9, "h100": 9, "h200": 9, "a100": 3}
capacities = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


def make_fleet(groups: dict[str, float], samplers: int = 2, max_sessions: int = 10_000):
    """A registry in which every group has `samplers` ready ones, and a router over it."""
    registry = Registry(
        [GroupConfig(name=n, weight_format="bf16", capacity=c) for n, c in groups.items()],
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        lease_seconds=10.0,
    )
    for group in groups:
        for index in range(samplers):
            join(registry, f"{group}-{index}", group, max_sessions=max_sessions)
    total = sum(groups.values())
    return registry, Router({Purpose.TRAIN: {n: c / total for n, c in groups.items()}})


def join(registry: Registry, sampler_id: str, group: str, *, version=1, max_sessions=10_000):
    info = SamplerInfo(
        sampler_id=sampler_id,
        group=group,
        accelerator="cpu",
        weight_format=WeightFormat.BF16,
        kv_format=KvFormat.FP8,
        max_sessions=max_sessions,
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        version=version,
    )
    registry.register(info, now=0.0)


def route(router: Router, registry: Registry, session_id: str, min_version: int = 0):
    return router.route(
        session_id, registry, purpose=Purpose.TRAIN, min_version=min_version, now=0.0
    )


@given(capacities=capacities, num=st.integers(1, 300))
@settings(max_examples=150)
def test_at_any_moment_a_group_is_within_one_session_of_its_share(capacities, num):
    shares = {str(i): c / math.fsum(capacities) for i, c in enumerate(capacities)}
    credit, got = {}, dict.fromkeys(shares, 0)
    for n in range(1, num + 1):
        chosen, credit = pick_group(credit, shares, shares)
        got[chosen] += 1
        assert max(abs(got[group] - n * share) for group, share in shares.items()) < 1


@given(
    capacities=st.lists(st.floats(0.1, 50), min_size=2, max_size=8),
    outages=st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=60),
)
@settings(max_examples=100)
def test_outages_do_not_unsettle_the_shares_for_ever(capacities, outages):
    shares = {str(i): c / math.fsum(capacities) for i, c in enumerate(capacities)}
    credit: dict[str, float] = {}
    for gone in outages:
        available = [g for g in shares if int(g) not in gone] or list(shares)
        chosen, credit = pick_group(credit, shares, available)
        assert chosen in available
        assert math.isclose(math.fsum(credit.values()), 0, abs_tol=1e-9)
        assert all(credit.get(g, 0) == 0 for g in shares if g not in available), "nobody is owed"
    got, num = dict.fromkeys(shares, 0), 2000
    for _ in range(num):
        chosen, credit = pick_group(credit, shares, shares)
        got[chosen] += 1
    assert max(abs(got[g] - num * share) for g, share in shares.items()) < 4


def test_the_published_fleet_gets_its_shares():
    registry, router = make_fleet(PUBLISHED)
    for index in range(960):
        route(router, registry, str(index))
    assert router.num_routed == {group: 10 * capacity for group, capacity in PUBLISHED.items()}


@given(
    capacities=st.lists(st.floats(0.5, 30), min_size=2, max_size=6),
    steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60),
)
@settings(max_examples=80)
def test_a_session_stays_while_its_sampler_lives_and_in_its_group_for_ever(capacities, steps):
    groups = {f"g{i}": c for i, c in enumerate(capacities)}
    registry, router = make_fleet(groups, samplers=2)
    places: dict[str, Route] = {}
    for number, (which, kill) in enumerate(steps):
        victim = f"g{which % len(groups)}-{number % 2}"
        if kill:
            registry.lose(victim, "killed")
        for session_id in [*places, str(number)]:
            before = places.get(session_id)
            now = route(router, registry, session_id)
            if before is None:
                if isinstance(now, Route):
                    places[session_id] = now
                continue
            alive = {s.sampler_id for s in registry.ready(before.group)}
            if before.sampler_id in alive:
                assert now == before
            elif alive:
                assert isinstance(now, Route) and now.group == before.group
                assert now.sampler_id in alive
                places[session_id] = now
            else:
                assert isinstance(now, Wait)
    held = sum(1 for name in places if router.place(name))
    assert sum(router.num_sessions.values()) == held == len(places)


@given(capacities=capacities, gone=st.integers(0, 8), num=st.integers(1, 100))
@settings(max_examples=60)
def test_the_share_of_a_group_without_samplers_goes_to_the_others(capacities, gone, num):
    groups = {f"g{i}": c for i, c in enumerate(capacities)}
    registry, router = make_fleet(groups, samplers=1)
    for index in range(num):
        route(router, registry, f"before-{index}")
    lost = f"g{gone % len(groups)}"
    registry.lose(f"{lost}-0", "killed")
    had = router.num_routed[lost]
    places = [route(router, registry, f"during-{index}") for index in range(num)]
    if len(groups) == 1:
        assert all(isinstance(place, Wait) for place in places)
        return
    assert router.num_routed[lost] == had
    assert router.num_routed.total() == 2 * num
    join(registry, f"{lost}-0", lost)
    share = groups[lost] / sum(groups.values())
    for index in range(num):
        route(router, registry, f"after-{index}")
    assert router.num_routed[lost] - had < share * num + 2, "no flood for what it missed"


def test_sessions_go_to_the_least_loaded_sampler_by_its_size():
    registry, router = make_fleet({"g": 1}, samplers=0)
    join(registry, "large", "g", max_sessions=30)
    join(registry, "little", "g", max_sessions=10)
    for index in range(20):
        route(router, registry, str(index))
    assert router.num_sessions == {"large": 15, "little": 5}
    router.end("0")
    router.end("0")  # twice is once
    assert router.num_sessions.total() == 19


def test_a_full_group_gets_no_new_session_while_another_has_room():
    registry, router = make_fleet({"fast": 9, "slow": 1}, samplers=1, max_sessions=5)
    for index in range(10):
        route(router, registry, str(index))
    assert router.num_routed == {"fast": 5, "slow": 5}
    assert route(router, registry, "one more") == Wait(reason="every place is taken", is_full=True)
    router.end("3")
    assert isinstance(route(router, registry, "one more"), Route)


def test_a_sampler_older_than_asked_is_not_used_until_it_caught_up():
    registry, router = make_fleet({"g": 1}, samplers=0)
    join(registry, "old", "g", version=1)
    assert isinstance(route(router, registry, "s", min_version=2), Wait)
    join(registry, "new", "g", version=2)
    assert route(router, registry, "s", min_version=2) == Route(group="g", sampler_id="new")
    load = registry.get("old").load
    registry.heartbeat("old", version=2, load=load, now=1.0)
    assert route(router, registry, "t", min_version=2) == Route(group="g", sampler_id="old")


def test_a_session_of_a_group_that_still_loads_its_version_waits_for_it():
    registry, router = make_fleet({"fast": 1, "slow": 1}, samplers=0)
    join(registry, "f", "fast", version=2)
    join(registry, "s", "slow", version=1)

    def place(name: str, *, waits_for_share: bool = True):
        return router.route(
            name,
            registry,
            purpose=Purpose.TRAIN,
            min_version=2,
            now=0.0,
            waits_for_share=waits_for_share,
        )

    assert place("a") == Route(group="fast", sampler_id="f")
    assert place("b") == Wait(reason="group slow has not loaded the version that is wanted")
    assert place("b", waits_for_share=False) == Route(group="fast", sampler_id="f")
    registry.heartbeat("s", version=2, load=registry.get("s").load, now=1.0)
    assert {place(name).group for name in "cd"} == {"slow", "fast"}, "no debt of what it missed"
    registry.lose("s", "gone")
    assert {place(name).group for name in "ef"} == {"fast"}, "nobody is left to wait for"


def test_purposes_are_kept_apart():
    registry, router = make_fleet({"g": 1})
    place = router.route("s", registry, purpose=Purpose.EVALUATE, min_version=0, now=0.0)
    assert isinstance(place, Wait) and "evaluate" in place.reason


def test_idle_sessions_are_found():
    registry, router = make_fleet({"g": 1})
    for name, now in (("early", 1.0), ("late", 5.0)):
        router.route(name, registry, purpose=Purpose.TRAIN, min_version=0, now=now)
    assert list(router.idle(before=3.0)) == ["early"]
