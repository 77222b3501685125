"""A real gateway on port 0 and samplers that dial out to it: turns, losses, refusals, drains."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from contracts import codec, rpc
from contracts.errors import AuthError, BadInputError, DirtyProcessError, RetryError
from contracts.pb import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from contracts.types import CandidateSets, Completion, FinishReason, Purpose
from tests.sampler_fleet.fakes import (
    VOCAB,
    FakeEngine,
    collect,
    make_request,
    make_trajectory,
    running_gateway,
    token_at,
)


def expected_tokens(num: int = 12, start: int = 3) -> list[int]:
    return [token_at(position) for position in range(start, start + num)]


async def test_a_turn_streams_in_chunks_from_one_sampler(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        chunks = [chunk async for chunk in gateway.fleet.generate(make_request())]
        assert [len(c.completion) for c in chunks] == [4, 4, 4]
        assert {(c.group, c.sampler_id) for c in chunks} == {("big", "big-0")}
        whole, _ = await collect(gateway.fleet, make_request("t"))
        assert whole.tokens.tolist() == expected_tokens()
        assert whole.finish_reason == FinishReason.LENGTH
        assert member.engine.aborted == []
        await gateway.fleet.end_session("s")
        await gateway.until(lambda: member.engine.ended == ["s"])


async def test_a_sampler_lost_in_mid_turn_is_continued_with_the_tokens_kept(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        first = await gateway.start_ready_sampler("big-0", version=1)
        reached = asyncio.Event()

        async def hang(request, index):
            if index == 2:
                reached.set()
                await asyncio.Event().wait()

        first.engine.before_chunk = hang
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await reached.wait()
        second = await gateway.start_ready_sampler("big-1", version=2)
        await gateway.start_ready_sampler("small-0", "small", version=2)
        await first.kill()
        whole, samplers = await asyncio.wait_for(turn, 10)
        assert whole.tokens.tolist() == expected_tokens()
        assert samplers == ["big-0", "big-1"], "another of its group, not of another group"
        assert [(s.version, s.start, s.end) for s in whole.spans] == [(1, 0, 8), (2, 8, 12)]
        (continued,) = second.engine.requests
        assert continued.tokens.tolist() == [1, 2, 3, *expected_tokens(8)]
        assert continued.sampling.max_new_tokens == 4
        assert continued.sampling.seed != first.engine.requests[0].sampling.seed
        assert gateway.fleet.counters["failovers"] == 1
        assert gateway.fleet.counters["records_refused"] == 0


async def test_a_turn_whose_last_chunk_was_lost_is_not_sampled_on(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")

        def unfinished(chunk):
            return dataclasses.replace(chunk, finish_reason=None)

        member.engine.distort = unfinished
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: gateway.fleet.num_tokens["big"] == 12)
        await member.kill()
        whole, _ = await asyncio.wait_for(turn, 10)
        assert whole.finish_reason == FinishReason.LENGTH
        assert whole.tokens.tolist() == expected_tokens()


def with_nan(chunk):
    logp = chunk.sampler_logp.copy()
    logp[1] = np.nan
    return dataclasses.replace(chunk, sampler_logp=logp)


def without_drawn_token(chunk):
    ids = np.where(np.arange(len(chunk.candidates.ids)) == 0, 0, chunk.candidates.ids)
    candidates = CandidateSets(
        offsets=chunk.candidates.offsets, ids=ids, logp=chunk.candidates.logp
    )
    return dataclasses.replace(chunk, candidates=candidates)


def outside_vocabulary(chunk):
    return dataclasses.replace(
        chunk,
        tokens=chunk.tokens + VOCAB,
        candidates=dataclasses.replace(chunk.candidates, ids=chunk.candidates.ids + VOCAB),
    )


def with_a_gap(chunk):
    return dataclasses.replace(chunk, spans=(dataclasses.replace(chunk.spans[0], start=1),))


def too_long(chunk):
    return Completion.concatenate([chunk] * 4)


@pytest.mark.parametrize(
    "distort", [with_nan, without_drawn_token, outside_vocabulary, with_a_gap, too_long]
)
async def test_an_unusable_record_expels_its_sampler_and_is_made_elsewhere(
    tmp_path, caplog, distort
):
    async with running_gateway(tmp_path) as gateway:
        sick = await gateway.start_ready_sampler("big-0")
        sick.engine.distort = distort
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: sick.task.done())
        with pytest.raises(DirtyProcessError, match="sampler big-0"):
            await sick.task
        assert gateway.phase("big-0") == "lost"
        await gateway.start_ready_sampler("big-1")
        whole, samplers = await asyncio.wait_for(turn, 10)
        assert samplers == ["big-1"]
        assert whole.tokens.tolist() == expected_tokens()
        assert gateway.fleet.counters["records_refused"] == 1
        assert any("sampler big-0 expelled" in record.message for record in caplog.records)


async def test_a_silent_sampler_is_replaced(tmp_path):
    async with running_gateway(tmp_path, stall_seconds=0.2) as gateway:
        member = await gateway.start_ready_sampler("big-0")

        async def hang(request, index):
            await asyncio.Event().wait()

        member.engine.before_chunk = hang
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: gateway.phase("big-0") == "lost")
        await gateway.start_ready_sampler("big-1")
        whole, _ = await asyncio.wait_for(turn, 10)
        assert whole.tokens.tolist() == expected_tokens()
        assert gateway.fleet.counters["samplers_stalled"] == 1


async def test_closing_a_turn_aborts_it(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")

        async def hang(request, index):
            if index:
                await asyncio.Event().wait()

        member.engine.before_chunk = hang
        chunks = gateway.fleet.generate(make_request())
        assert len((await anext(chunks)).completion) == 4
        await chunks.aclose()
        await gateway.until(lambda: member.engine.aborted == ["s/0~0"])


async def test_a_draining_sampler_finishes_and_leaves(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        first = await gateway.start_ready_sampler("big-0")
        resume = asyncio.Event()

        async def wait(request, index):
            if index == 1:
                await resume.wait()

        first.engine.before_chunk = wait
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: first.engine.requests)
        second = await gateway.start_ready_sampler("big-1")
        async with gateway.channel() as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            await stub.DrainSampler(fleet_pb2.DrainRequest(sampler_id="big-0"))
            assert gateway.phase("big-0") == "draining"
            await collect(gateway.fleet, make_request("t"))
            assert len(second.engine.requests) == 1, "new turns go elsewhere"
            resume.set()
            whole, samplers = await asyncio.wait_for(turn, 10)
            assert samplers == ["big-0"] and len(whole) == 12
            await asyncio.wait_for(first.task, 10)  # returns: a clean exit
            await gateway.until(lambda: gateway.phase("big-0") == "lost")
            with pytest.raises(BadInputError, match="live sampler"), rpc.calling("gateway"):
                await stub.DrainSampler(fleet_pb2.DrainRequest(sampler_id="big-0"))
        assert gateway.fleet.counters["failovers"] == 0


async def test_a_version_is_waited_for(tmp_path):
    async with running_gateway(tmp_path, grace_seconds=5.0) as gateway:
        member = await gateway.start_ready_sampler("eval-0", "eval", version=3)
        request = make_request(min_version=4, purpose=Purpose.EVALUATE)
        turn = asyncio.create_task(collect(gateway.fleet, request))
        await asyncio.sleep(0.1)
        assert member.engine.requests == []
        member.weights.publish(4)
        whole, _ = await asyncio.wait_for(turn, 10)
        assert [span.version for span in whole.spans] == [4]


async def test_a_group_that_stays_away_fails_its_sessions(tmp_path):
    async with running_gateway(tmp_path, grace_seconds=0.1) as gateway:
        member = await gateway.start_ready_sampler("small-0", "small")
        await gateway.start_ready_sampler("big-0", "big")
        for name in ("a", "b", "c", "d"):
            await collect(gateway.fleet, make_request(name))
        (small,) = [n for n in "abcd" if gateway.fleet.router.place(n).group == "small"]
        await member.kill()
        with pytest.raises(RetryError, match="no sampler of group small is ready"):
            await collect(gateway.fleet, make_request(small))


async def test_a_poisonous_request_does_not_go_through_the_whole_fleet(tmp_path):
    async with running_gateway(tmp_path, max_failovers=1) as gateway:
        members = [await gateway.start_ready_sampler(f"big-{i}") for i in range(3)]
        for member in members:
            member.engine.distort = with_nan
        with pytest.raises(RetryError, match="2 samplers could not finish"):
            await collect(gateway.fleet, make_request())
        assert sum(gateway.phase(f"big-{i}") == "ready" for i in range(3)) == 1


async def test_a_request_that_is_wrong_itself_is_refused_at_once(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        with pytest.raises(BadInputError, match=f"tokens from 0 to {VOCAB - 1}"):
            await collect(gateway.fleet, make_request(prompt=(1, VOCAB)))

        async def refuse(request, index):
            raise BadInputError("tokens", expected="at most 2", found=3)

        member.engine.before_chunk = refuse
        with pytest.raises(BadInputError, match="at most 2"):
            await collect(gateway.fleet, make_request())
        assert gateway.fleet.counters["failovers"] == 0


async def test_a_gateway_started_anew_is_rejoined_under_the_same_id(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        members = [await gateway.start_ready_sampler(f"big-{i}") for i in range(2)]

        async def hang(request, index):
            await asyncio.Event().wait()

        for member in members:
            member.engine.before_chunk = hang
        turn = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: any(m.engine.requests for m in members))
        await gateway.stop_gateway()
        await gateway.until(lambda: any(m.engine.aborted for m in members))
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        assert any("s" in member.engine.ended for member in members), "its cache may go"
        for member in members:
            member.engine.before_chunk = None
        await gateway.start_gateway()
        await gateway.until(lambda: all(gateway.phase(f"big-{i}") == "ready" for i in range(2)))
        whole, _ = await collect(gateway.fleet, make_request())
        assert whole.tokens.tolist() == expected_tokens()


async def test_a_sampler_without_heartbeats_loses_its_lease_and_its_stream(tmp_path):
    async with running_gateway(tmp_path, lease_seconds=0.3) as gateway, gateway.channel() as c:
        await gateway.start_ready_sampler("big-0")
        info = dataclasses.replace(gateway.fleet.registry.get("big-0").info, sampler_id="mute")
        call = fleet_pb2_grpc.FleetStub(c).Join()
        await call.write(fleet_pb2.SamplerMessage(register=codec.sampler_to_pb(info)))
        await gateway.until(lambda: gateway.phase("mute") == "ready")
        with pytest.raises(RetryError, match="lease expired; register again"), rpc.calling("it"):
            async for _ in call:
                pass
        assert (gateway.phase("mute"), gateway.phase("big-0")) == ("lost", "ready")
        assert gateway.fleet.counters["leases_expired"] == 1


async def test_the_wire_serves_what_the_port_does(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        await gateway.start_ready_sampler("big-0")
        stub = rollout_pb2_grpc.RolloutStub(channel)
        call = stub.Generate(codec.generate_to_pb(make_request()))
        chunks = [codec.chunk_from_pb(message) async for message in call]
        assert [t for c in chunks for t in c.tokens.tolist()] == expected_tokens()
        reply = await fleet_pb2_grpc.FleetStub(channel).Status(fleet_pb2.StatusRequest())
        (sampler,) = reply.samplers
        assert (sampler.state, sampler.num_sessions, sampler.heartbeat.version) == ("ready", 1, 1)
        groups = {g.group: g for g in reply.groups}
        assert {name: g.capacity_share for name, g in groups.items()} == {
            "big": 0.75,
            "small": 0.25,
            "eval": 1.0,
        }
        assert (groups["big"].sessions_routed, groups["big"].tokens_sampled) == (1, 12)
        assert reply.counters["turns_completed"] == 1


async def test_groups_stream_until_acknowledged(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        for name in "abc":
            await gateway.spool.append(name, [make_trajectory(name)])
        stub = rollout_pb2_grpc.RolloutStub(channel)
        assert gateway.producer.backlog == 3
        call = stub.StreamGroups(rollout_pb2.StreamGroupsRequest(after=1))
        groups = [codec.group_from_pb(await call.read()) for _ in range(2)]
        assert [(g.sequence, g.task_id) for g in groups] == [(2, "b"), (3, "c")]
        await gateway.until(lambda: gateway.producer.backlog == 0)
        await stub.AckGroups(rollout_pb2.AckGroupsRequest(sequence=2, taken=2))
        assert gateway.spool.count() == 1
        await gateway.spool.append("d", [make_trajectory("d")])
        assert codec.group_from_pb(await call.read()).sequence == 4
        assert gateway.producer.backlog == 1, "sent, but the trainer reports what it takes"
        await stub.AckGroups(rollout_pb2.AckGroupsRequest(sequence=2, taken=4))
        assert gateway.producer.backlog == 0
        strange = rollout_pb2.AckGroupsRequest(sequence=2, freshness=rollout_pb2.Freshness())
        refused = pytest.raises(
            BadInputError, match="groups_per_update: expected at least 1, found 0"
        )
        with refused, rpc.calling("gateway"):
            await stub.AckGroups(strange)
        call.cancel()


async def test_groups_come_packed_where_the_network_is_slow(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        await gateway.spool.append("a", [make_trajectory(str(index)) for index in range(8)])
        stub = rollout_pb2_grpc.RolloutStub(channel)
        plain, packed = [
            await stub.StreamGroups(rollout_pb2.StreamGroupsRequest(zstd=zstd)).read()
            for zstd in (False, True)
        ]
        assert packed.zstd and not packed.trajectories
        assert packed.ByteSize() < plain.ByteSize()
        assert codec.group_to_pb(codec.group_from_pb(packed)) == plain


async def test_a_wrong_token_and_a_wrong_model_are_refused_in_words(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        with pytest.raises(AuthError, match=r"bearer token.*found a different token"):
            await gateway.start_ready_sampler("big-0", token="not-the-right-token")
        with pytest.raises(AuthError, match="found no token"):
            await gateway.start_ready_sampler("big-1", token="")
        with pytest.raises(BadInputError, match="model fingerprint: expected"):
            await gateway.start_ready_sampler("big-2", hidden_size=16)
        assert list(gateway.fleet.registry) == []


async def test_a_malformed_message_expels_its_sampler_only(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        await gateway.start_ready_sampler("big-0")
        info = dataclasses.replace(
            gateway.fleet.registry.get("big-0").info, sampler_id="big-1", version=1
        )
        stub = fleet_pb2_grpc.FleetStub(channel)
        for second in (
            fleet_pb2.SamplerMessage(
                delta=fleet_pb2.Delta(
                    request_id="x", chunk=rollout_pb2.CompletionChunk(tokens=b"odd")
                )
            ),
            fleet_pb2.SamplerMessage(),
        ):
            call = stub.Join()
            await call.write(fleet_pb2.SamplerMessage(register=codec.sampler_to_pb(info)))
            assert (await call.read()).WhichOneof("kind") == "welcome"
            await call.write(second)
            with pytest.raises(DirtyProcessError), rpc.calling("gateway"):
                async for _ in call:
                    pass
            assert gateway.phase("big-1") == "lost"
        call = stub.Join()
        await call.write(fleet_pb2.SamplerMessage(heartbeat=fleet_pb2.Heartbeat()))
        with pytest.raises(BadInputError, match="expected register"), rpc.calling("gateway"):
            async for _ in call:
                pass
        assert gateway.phase("big-0") == "ready"
        assert len((await collect(gateway.fleet, make_request()))[0]) == 12


async def test_sessions_wait_until_the_fleet_has_assembled(tmp_path):
    async with running_gateway(tmp_path, assemble_seconds=30.0) as gateway:

        async def place() -> None:
            async with gateway.fleet.session("s", purpose=Purpose.TRAIN):
                pass

        waiting = asyncio.create_task(place())
        await gateway.start_ready_sampler("big-0")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert gateway.fleet.places.num_waiting[Purpose.TRAIN] == 1
        await gateway.start_ready_sampler("small-0", "small")
        await asyncio.wait_for(waiting, 5)
        assert gateway.fleet.places.num_waiting[Purpose.TRAIN] == 0


async def test_an_engine_may_finish_at_once(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        await gateway.start_ready_sampler("big-0", engine=FakeEngine(chunk_tokens=64))
        chunks = [c async for c in gateway.fleet.generate(make_request(num_tokens=1))]
        assert [c.completion.tokens.tolist() for c in chunks] == [expected_tokens(1)]


async def test_two_that_agree_convict_a_third_of_wrong_weights(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        wrong = FakeEngine()
        wrong.checksum = "wrong"
        for name in ("big-0", "big-1"):
            await gateway.start_ready_sampler(name)
        await gateway.start_ready_sampler("small-0", "small", engine=FakeEngine())
        gateway.members["small-0"].engine.checksum = "its own kernels' layout"
        third = gateway.start_sampler("big-2", engine=wrong)
        with pytest.raises(DirtyProcessError, match="checksum wrong, in 2 others right"):
            await asyncio.wait_for(third.task, 10)
        assert gateway.phase("big-2") == "lost"
        assert gateway.fleet.counters["weights_refused"] == 1
        assert {gateway.phase(n) for n in ("big-0", "big-1", "small-0")} == {"ready"}


async def test_of_two_that_differ_nobody_is_expelled_but_somebody_is_told(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        wrong = FakeEngine()
        wrong.checksum = "wrong"
        await gateway.start_ready_sampler("big-0")
        await gateway.start_ready_sampler("big-1", engine=wrong)
        stub = fleet_pb2_grpc.FleetStub(channel)
        sentence = "group big: big-0 and big-1 hold other weights under version 1"
        async with asyncio.timeout(10):
            while sentence not in (await stub.Status(fleet_pb2.StatusRequest())).alarms:
                await asyncio.sleep(0.01)
        assert gateway.phase("big-0") == gateway.phase("big-1") == "ready"


async def test_a_wrong_sampler_is_found_out_also_when_it_switched_first(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        wrong = FakeEngine()
        wrong.checksum = "wrong"
        first = gateway.start_sampler("big-0", engine=wrong)
        await gateway.until(lambda: gateway.phase("big-0") == "ready")
        for name in ("big-1", "big-2"):
            await gateway.start_ready_sampler(name)
        with pytest.raises(DirtyProcessError, match="checksum wrong, in 2 others right"):
            await asyncio.wait_for(first.task, 10)


@pytest.mark.parametrize(
    "error", [RetryError("out of memory"), BadInputError("x", expected="y", found="z")]
)
async def test_a_sampler_that_fails_everything_loses_no_session_and_goes(tmp_path, error):
    async with running_gateway(tmp_path, max_failovers=2) as gateway:
        sick = gateway.start_sampler("big-0")
        await gateway.until(lambda: gateway.phase("big-0") == "ready")
        await gateway.start_ready_sampler("big-1")

        async def fail(request, index):
            raise error

        sick.engine.before_chunk = fail
        wholes = []
        for index in range(12):
            try:
                wholes.append((await collect(gateway.fleet, make_request(f"s{index}")))[0])
            except BadInputError:  # a sampler that blames the request is believed, for a while
                assert isinstance(error, BadInputError)
            await gateway.fleet.end_session(f"s{index}")
        assert len(wholes) == 12 if isinstance(error, RetryError) else len(wholes) >= 4
        with pytest.raises(DirtyProcessError, match="8 requests in a row failed"):
            await asyncio.wait_for(sick.task, 10)
        assert gateway.fleet.counters["samplers_failing"] == 1
        assert gateway.phase("big-1") == "ready"


async def test_the_only_sampler_is_tried_again_after_a_pause(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        member = await gateway.start_ready_sampler("big-0")
        num = 0

        async def fail_twice(request, index):
            nonlocal num
            num += 1
            if num <= 2:
                raise RetryError("busy")

        member.engine.before_chunk = fail_twice
        whole, samplers = await collect(gateway.fleet, make_request())
        assert (len(whole), samplers) == (12, ["big-0"])
        assert gateway.fleet.counters["failovers"] == 2


async def test_a_request_that_no_sampler_can_serve_blames_none(tmp_path):
    async with running_gateway(tmp_path, max_context_tokens=16) as gateway:
        await gateway.start_ready_sampler("big-0")
        with pytest.raises(BadInputError, match="expected at most 15 tokens, found 16"):
            await collect(gateway.fleet, make_request(prompt=(1,) * 16))
        with pytest.raises(BadInputError, match="purpose evaluate"):
            groups = [{"name": "big", "weight_format": "bf16"}]
            async with running_gateway(tmp_path / "other", groups=groups) as other:
                await collect(other.fleet, make_request(purpose=Purpose.EVALUATE))


async def test_nobody_else_touches_an_episode_of_the_gateway(tmp_path):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        await gateway.start_ready_sampler("big-0")
        stub = rollout_pb2_grpc.RolloutStub(channel)
        async with gateway.fleet.session("train.0.0.0", purpose=Purpose.TRAIN):
            for call in (
                stub.EndSession(rollout_pb2.EndSessionRequest(session_id="train.0.0.0")),
                stub.Generate(codec.generate_to_pb(make_request("train.0.0.0"))).read(),
            ):
                refused = pytest.raises(BadInputError, match="an episode of the gateway")
                with refused, rpc.calling("gateway"):
                    await call
            assert gateway.fleet.router.place("train.0.0.0")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 0}, "version: expected 1 or newer, found 0"),
        ({"version": 2**40}, "expected a version up to 1001, the fleet being at 1"),
        ({"tokens_per_second": float("nan")}, "tokens_per_second"),
        ({"kv_used_fraction": float("inf")}, "kv_used_fraction"),
        ({"num_running": -1}, "running"),
    ],
)
async def test_numbers_that_cannot_be_expel_their_sampler(tmp_path, changes, sentence):
    async with running_gateway(tmp_path) as gateway, gateway.channel() as channel:
        await gateway.start_ready_sampler("big-0")
        info = dataclasses.replace(gateway.fleet.registry.get("big-0").info, sampler_id="big-1")
        call = fleet_pb2_grpc.FleetStub(channel).Join()
        await call.write(fleet_pb2.SamplerMessage(register=codec.sampler_to_pb(info)))
        assert (await call.read()).WhichOneof("kind") == "welcome"
        beat = fleet_pb2.Heartbeat(**({"version": 1} | changes))
        await call.write(fleet_pb2.SamplerMessage(heartbeat=beat))
        with pytest.raises(DirtyProcessError, match=sentence), rpc.calling("gateway"):
            async for _ in call:
                pass
        assert gateway.phase("big-0") == "ready"
        shares = gateway.fleet.router.shares[Purpose.TRAIN]
        assert shares == {"big": 0.75, "small": 0.25}
