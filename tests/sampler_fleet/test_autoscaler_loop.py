"""The autoscaler's loop: a gateway behind real gRPC that a test scripts, and a fake provider."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contracts.credentials import Credentials, Token
from contracts.errors import AuthError, BadInputError, DirtyProcessError, RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc
from contracts.rpc import aio_channel, start_server
from sampler_fleet.autoscaler import Demand
from sampler_fleet.autoscaler_loop import AutoscalerLoop, demand_from_pb
from sampler_fleet.live_settings import LiveSettings
from sampler_fleet.providers.base import Provider

TOKEN = "a-token-for-tests-only"


class FakeGateway(fleet_pb2_grpc.FleetServicer):
    """Says what the test put into `status`, keeps what was reported."""

    def __init__(self) -> None:
        self.status = fleet_pb2.StatusReply(seconds=1e9)
        self.reports: list[dict[str, tuple[int, int | None]]] = []
        self.problems: list[list[str]] = []  # of each report: the settings', then by group
        self.num_asked = 0

    def restart(self) -> None:
        """It knows nobody."""
        self.status.Clear()

    def ready(self, *samplers: tuple[str, int]) -> None:
        """Samplers that take turns, as group and number of sessions."""
        del self.status.samplers[:]
        for number, (group, num_sessions) in enumerate(samplers):
            self.status.samplers.add(
                register=fleet_pb2.Register(group=group, sampler_id=str(number)),
                state="ready",
                num_sessions=num_sessions,
            )

    def lose(self) -> None:
        for sampler in self.status.samplers:
            sampler.state = "lost"

    async def Status(self, request, context):
        self.num_asked += 1
        return self.status

    async def ReportTargets(self, request, context):
        self.reports.append(
            {
                t.group: (t.num_target, t.num_held if t.HasField("num_held") else None)
                for t in request.targets
            }
        )
        self.problems.append([request.problem, *(t.problem for t in request.targets)])
        return fleet_pb2.ReportTargetsReply()


class FakeProvider(Provider):
    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.asked: list[tuple[str, int]] = []  # without repetitions
        self.error: Exception | None = None
        self.errors: dict[str, Exception] = {}  # by group
        self.is_closed = False

    async def scale(self, group: str, num: int) -> None:
        if error := self.error or self.errors.get(group):
            raise error
        if self.held.get(group, 0) != num:
            self.asked.append((group, num))
        self.held[group] = num

    async def num_held(self, group: str) -> int | None:
        return None if group == "eval" else self.held.get(group, 0)

    async def close(self) -> None:
        self.is_closed = True


class Setup:
    """A loop over a run file, with a clock that the test sets."""

    def __init__(self, tmp_path: Path) -> None:
        self.run_file = tmp_path / "run.json"
        self.state = tmp_path / "state.json"
        self.gateway = FakeGateway()
        self.provider = FakeProvider()
        self.now = 0.0
        self.sections = {
            "autoscaler": {"every_seconds": 0.01, "cooldown_up_seconds": 0.0},
            "fleet": {
                "groups": [
                    {"name": "a", "weight_format": "bf16", "max_sessions": 10},
                    {"name": "eval", "weight_format": "bf16", "purpose": "evaluate", "samplers": 2},
                ]
            },
        }
        self.bounds(min_samplers=0, max_samplers=5)

    def bounds(self, **bounds: int) -> None:
        self.sections["fleet"]["groups"][0] |= bounds
        self.run_file.write_text(json.dumps(self.sections))

    @contextlib.asynccontextmanager
    async def serving(self, address: str = "localhost:0") -> AsyncIterator[str]:
        server, port = await start_server(
            address,
            TOKEN,
            lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(self.gateway, server),
        )
        try:
            yield f"localhost:{port}"
        finally:
            await server.stop(None)

    @contextlib.asynccontextmanager
    async def loop(self, address: str, token: str = TOKEN) -> AsyncIterator[AutoscalerLoop]:
        async with aio_channel(address, Credentials(token=Token(token))) as channel:
            yield AutoscalerLoop(
                LiveSettings(self.run_file, self.state),
                {"local": self.provider},
                channel=channel,
                gateway=address,
                clock=lambda: self.now,
            )


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


async def test_what_the_gateway_says_becomes_targets_and_what_is_held_a_report(setup):
    setup.gateway.status.demand.num_queued = 31
    async with setup.serving() as address, setup.loop(address) as loop:
        assert await loop.step()
        assert setup.provider.asked == [("a", 4), ("eval", 2)]
        assert setup.gateway.reports == [{"a": (4, 4), "eval": (2, None)}]
        setup.gateway.status.demand.num_queued = 0
        idle = [("a", 0)] * 3
        setup.gateway.ready(("a", 8), *idle, ("eval", 3), ("stranger", 9))
        setup.now = 599.0
        assert await loop.step()
        assert setup.provider.held == {"a": 4, "eval": 2}, "the cooldown is not over"
        setup.now = 601.0
        assert await loop.step()
        assert setup.provider.held["a"] == 1
        setup.gateway.ready(("a", 0))
        setup.now = 1202.0
        assert await loop.step()
        assert setup.gateway.reports[-1] == {"a": (0, 0), "eval": (2, None)}


async def test_while_the_gateway_is_away_the_targets_stay(setup, caplog):
    setup.gateway.status.demand.num_queued = 31
    async with setup.serving() as address, setup.loop(address) as loop:
        assert await loop.step()
    async with setup.loop(address) as away:
        assert not await away.step()
        assert not await away.step()
        assert setup.provider.held == {"a": 4, "eval": 2}
        sentences = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(sentences) == 1 and "the targets stay as they are" in sentences[0]
        setup.gateway.status.demand.num_queued = 45
        async with setup.serving(address):
            async with asyncio.timeout(20):
                while not await away.step():
                    await asyncio.sleep(0.05)
        assert setup.provider.held["a"] == 5


async def test_a_new_autoscaler_goes_on_from_the_last_report(setup):
    setup.gateway.status.groups.add(group="a", num_target=3)
    setup.gateway.status.groups.add(group="eval")
    setup.gateway.status.groups.add(group="gone", num_target=7)
    setup.gateway.status.demand.num_queued = 25
    setup.gateway.ready(("a", 0), ("a", 0), ("a", 0))
    async with setup.serving() as address, setup.loop(address) as loop:
        await loop.step()
        assert setup.provider.held == {"a": 3, "eval": 2}
        setup.gateway.status.groups[0].num_target = 5
        await loop.step()
        assert setup.provider.held["a"] == 3, "it remembers by itself from then on"


async def test_beside_a_new_gateway_a_new_autoscaler_keeps_what_is_there(setup):
    setup.gateway.ready(("a", 0), ("a", 0))
    setup.provider.held = {"a": 4}
    async with setup.serving() as address, setup.loop(address) as loop:
        await loop.step()
        assert setup.provider.held == {"a": 4, "eval": 2}, "the provider holds four"
        setup.gateway.ready(*[("a", 0)] * 4)
        setup.now = 599.0
        await loop.step()
        assert setup.provider.held["a"] == 4
        setup.now = 600.0
        await loop.step()
        assert setup.provider.held["a"] == 0


async def test_a_gateway_that_starts_anew_has_time_to_know_its_samplers_again(setup, caplog):
    gateway = setup.gateway
    gateway.status.demand.num_queued = 31
    async with setup.serving() as address, setup.loop(address) as loop:
        gateway.status.seconds = 50.0
        await loop.step()
        assert setup.provider.held["a"] == 4
        for setup.now in (2000.0, 3000.0):  # three of the four are all that comes: for long now
            gateway.ready(*[("a", 10)] * 3)
            gateway.status.seconds = 50.0 + setup.now
            await loop.step()
        assert "started anew" not in caplog.text
        gateway.restart()
        for setup.now in (3300.0, 4200.0):  # away for long: it is older than at the first answer
            gateway.status.seconds = setup.now - 3100.0
            await loop.step()
            assert setup.provider.held["a"] == 4
        assert caplog.text.count("started anew") == 1
        setup.now, gateway.status.seconds = 4201.0, 1101.0
        await loop.step()
        assert setup.provider.held["a"] == 0, "none came back"


async def test_the_sessions_of_a_lost_sampler_wait_for_another(setup):
    setup.provider.held = {"a": 1}
    setup.gateway.ready(("a", 8))
    async with setup.serving() as address, setup.loop(address) as loop:
        await loop.step()
        setup.gateway.lose()
        for setup.now in (10_000.0, 20_000.0):
            await loop.step()
            assert setup.provider.held["a"] == 1


@pytest.mark.parametrize("kind", [BadInputError, DirtyProcessError])
async def test_a_group_that_is_refused_keeps_no_other_waiting(setup, kind, caplog):
    error = DirtyProcessError("eval-0 died 9 times in a row")
    if kind is BadInputError:
        error = BadInputError("service eval-0", expected="input", found="disk full")
    setup.gateway.status.demand.num_queued = 31
    setup.gateway.ready(("a", 0))
    setup.provider.errors = {"eval": error}
    async with setup.serving() as address, setup.loop(address) as loop:
        await loop.step()
        await loop.step()
        assert setup.provider.held == {"a": 4}
        assert setup.gateway.reports[-1] == {"a": (4, 4), "eval": (2, None)}
        assert setup.gateway.problems == [["", "", str(error)]] * 2
        said = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert said == [f"group eval gets no samplers and is asked for again: {error}"], "once"
        setup.provider.errors = {}
        await loop.step()
        assert setup.provider.held == {"a": 4, "eval": 2}
        assert setup.gateway.problems[-1] == ["", "", ""]


async def test_what_a_provider_refused_is_asked_again(setup):
    setup.gateway.status.demand.num_queued = 31
    setup.provider.error = RetryError("the provider is away")
    async with setup.serving() as address, setup.loop(address) as loop:
        assert await loop.step()
        assert setup.gateway.reports == [{"a": (4, None), "eval": (2, None)}]
        assert setup.gateway.problems == [["", *["the provider is away"] * 2]]
        setup.provider.error = None
        await loop.step()
        assert setup.provider.asked == [("a", 4), ("eval", 2)]


async def test_an_edit_of_bounds_reaches_the_provider_and_a_bad_one_does_not(setup, caplog):
    setup.gateway.status.demand.num_queued = 1000
    async with setup.serving() as address, setup.loop(address) as loop:
        await loop.step()
        assert setup.provider.held["a"] == 5
        setup.bounds(max_samplers=2)
        await loop.step()
        assert setup.provider.held["a"] == 2
        setup.run_file.write_text("{")
        await loop.step()
        assert setup.provider.held["a"] == 2
        (sentence,) = [m for m in caplog.messages if "an edit is left out" in m]
        await loop.step()
        assert [problems[0] for problems in setup.gateway.problems] == ["", "", sentence, sentence]
        setup.bounds(max_samplers=30)
        setup.now = 60.0
        await loop.step()
        assert setup.provider.held["a"] == 30
        assert setup.gateway.problems[-1] == ["", "", ""]


async def test_the_loop_goes_on_until_it_is_cancelled_and_closes_its_providers(setup):
    async with setup.serving() as address, setup.loop(address) as loop:
        work = asyncio.ensure_future(loop.run())
        async with asyncio.timeout(20):
            while setup.gateway.num_asked < 5:
                await asyncio.sleep(0.01)
        assert not setup.provider.is_closed
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert setup.provider.is_closed


async def test_a_fleet_that_had_samplers_goes_on_when_all_groups_are_refused(setup):
    setup.gateway.ready(("a", 0))
    async with setup.serving() as address, setup.loop(address) as loop:
        await loop.step()
        setup.gateway.ready()
        setup.provider.error = BadInputError("service a-0", expected="input", found="disk full")
        assert await loop.step()


async def test_what_no_later_step_would_mend_ends_it(setup):
    async with setup.serving() as address:
        setup.provider.error = BadInputError("service a-0", expected="input", found="none")
        async with setup.loop(address) as loop:
            with pytest.raises(BadInputError, match="service a-0"):
                await loop.run()
        assert setup.provider.is_closed
        async with setup.loop(address, token="another-token-of-a-test") as loop:
            with pytest.raises(AuthError, match="a different token"):
                await loop.run()


def test_what_is_unset_in_a_demand_is_not_known():
    message = fleet_pb2.Demand(num_queued=3, backlog=2.5)
    assert demand_from_pb(message) == Demand(num_queued=3, backlog=2.5)
    message.staleness = 0.0
    message.taken_per_second = 0.5
    known = Demand(num_queued=3, backlog=2.5, staleness=0.0, taken_per_second=0.5)
    assert demand_from_pb(message) == known
