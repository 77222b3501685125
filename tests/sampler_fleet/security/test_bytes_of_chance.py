"""Bytes of chance, in every call, while others work."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
import time
from collections import Counter

import grpc
from google.protobuf.message import Message

from contracts import codec
from contracts.pb import (
    fleet_pb2,
    rollout_pb2,
    weights_pb2,
)
from tests.sampler_fleet.fakes import (
    TOKEN,
    Harness,
    collect,
    completion,
    make_request,
    make_trajectory,
)
from tests.sampler_fleet.security.calls import (
    BY_NAME,
    CALLS,
    EXPECTED,
    Code,
    all_services,
    answer,
    bearer,
    raw_channel,
    registration,
)

FUZZ_S = 12.0


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few changed, cut, doubled or added."""
    kept = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randint(0, len(kept))
        match chance.randrange(5):
            case 0 if place < len(kept):
                kept[place] ^= 1 << chance.randrange(8)
            case 1:
                kept[place:place] = chance.randbytes(chance.randint(1, 9))
            case 2:
                del kept[place : place + chance.randint(1, 9)]
            case 3:
                kept += kept[place:]
            case _ if place < len(kept):
                kept[place] = chance.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(kept)


def filled(kind: type[Message]) -> Message:
    """A message with something in each of its plain fields."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, bool | int | float | str | bytes):
            setattr(message, field.name, type(value)(1))
    return message


def samples(gateway: Harness, name: str) -> dict[str, list[Message]]:
    """Messages that are right, by call; those of a stream in the order they go out."""
    request = dataclasses.replace(make_request(f"fuzz-{name}"), ends_session=True)
    register = registration(gateway, name, group="eval", kv_format="bf16")
    beat = fleet_pb2.Heartbeat(version=1, switch=fleet_pb2.Switch(num_bytes=1))
    good = completion([1, 2, 3], version=1, reason=None)
    entry = weights_pb2.FileEntry(name="config.json", num_bytes=2, checksum="0" * 32)
    header = weights_pb2.PublishHeader(version=1, files=[entry])
    sampling = codec.sampling_to_pb(request.sampling)
    report = fleet_pb2.UpdateReport(
        step=1, version=1, groups=[fleet_pb2.GroupUpdate(group="big", kl=0.1)], alarms=["a"]
    )
    return {
        "fleet.v1.Fleet/Join": [
            fleet_pb2.SamplerMessage(register=register),
            fleet_pb2.SamplerMessage(heartbeat=beat),
            # of the request that another sampler is serving
            fleet_pb2.SamplerMessage(
                delta=fleet_pb2.Delta(request_id="s/0~0", chunk=codec.chunk_to_pb(good))
            ),
            fleet_pb2.SamplerMessage(
                failed=fleet_pb2.RequestFailed(request_id="s/0~0", reason="r", bad_request=True)
            ),
            fleet_pb2.SamplerMessage(leaving=fleet_pb2.Leaving(reason="r")),
        ],
        "fleet.v1.Fleet/Status": [fleet_pb2.StatusRequest()],
        "fleet.v1.Fleet/DrainSampler": [fleet_pb2.DrainRequest(sampler_id="nobody-of-that-name")],
        "fleet.v1.Fleet/ReportUpdate": [report],
        "fleet.v1.Fleet/ReportTargets": [
            fleet_pb2.ReportTargetsRequest(
                targets=[fleet_pb2.GroupTarget(group="big", num_target=1, num_held=1)]
            )
        ],
        "rollout.v1.Rollout/Generate": [codec.generate_to_pb(request)],
        "rollout.v1.Rollout/EndSession": [
            BY_NAME["rollout.v1.Rollout/EndSession"].message(session_id="fuzz")
        ],
        "rollout.v1.Rollout/StreamGroups": [rollout_pb2.StreamGroupsRequest(after=1, zstd=True)],
        "rollout.v1.Rollout/AckGroups": [rollout_pb2.AckGroupsRequest(sequence=1, taken=1)],
        "rollout.v1.Rollout/Watch": [rollout_pb2.WatchRequest(every_seconds=0.1)],
        "rollout.v1.Rollout/Evaluate": [
            rollout_pb2.EvaluateRequest(
                split="heldout", num_tasks=1, num_samples=1, sampling=sampling
            )
        ],
        "weights.v1.Weights/Publish": [
            weights_pb2.PublishRequest(header=header),
            weights_pb2.PublishRequest(data=b"{}"),
        ],
        "weights.v1.Weights/Watch": [weights_pb2.WatchRequest(format="bf16")],
        "weights.v1.Weights/Fetch": [
            weights_pb2.FetchRequest(version=1, format="bf16", file="config.json", offset=1)
        ],
        "weights.v1.Weights/Chain": [weights_pb2.ChainRequest(format="bf16", have=1, want=2)],
        "weights.v1.Weights/Status": [weights_pb2.StatusRequest()],
    }


async def test_bytes_of_chance_disturb_nobody(tmp_path, capsys):
    chance = random.Random(20260101)
    codes: Counter[grpc.StatusCode] = Counter()
    async with all_services(tmp_path, grace_seconds=0.1, stall_seconds=60.0) as (
        gateway,
        address,
    ):
        good = await gateway.start_ready_sampler("big-0")
        await gateway.spool.append("a", [make_trajectory("a")])
        paused = asyncio.Event()

        async def wait(request, index):
            if request.session_id == "s" and index == 1:
                await paused.wait()

        good.engine.before_chunk = wait
        longest = asyncio.create_task(collect(gateway.fleet, make_request()))
        await gateway.until(lambda: gateway.fleet.num_tokens["big"] == 4)

        async def attack(number: int) -> None:
            """One call with one of its messages mutated, or with noise alone."""
            call = CALLS[number % len(CALLS)]
            known = samples(gateway, f"fuzz-{number}")
            right = known.get(call.path.removeprefix("/"), [filled(call.message)])
            messages = [message.SerializeToString() for message in right]
            place = chance.randrange(len(messages))
            noise = chance.random() < 0.2
            messages[place] = (
                chance.randbytes(chance.randint(1, 300))
                if noise
                else mutated(messages[place], chance)
            )
            async with raw_channel(address) as channel:
                code, details = await answer(
                    channel, call, messages, metadata=bearer(TOKEN), timeout_s=0.3
                )
            codes[code] += 1
            assert TOKEN not in details

        async def attack_until(deadline: float, start: int) -> None:
            number = start
            while time.monotonic() < deadline:
                await attack(number)
                number += 8

        async def use() -> int:
            """Turns of others, meanwhile: big-0 serves them."""
            turns = 0
            while not paused.is_set():
                request = dataclasses.replace(make_request(f"user-{turns}"), ends_session=True)
                whole, samplers = await asyncio.wait_for(collect(gateway.fleet, request), 10)
                assert samplers == ["big-0"] and whole.tokens.tolist() == EXPECTED
                turns += 1
                await asyncio.sleep(0.05)
            return turns

        deadline = time.monotonic() + FUZZ_S
        users = asyncio.create_task(use())
        await asyncio.gather(*(attack_until(deadline, start) for start in range(8)))
        paused.set()
        whole, samplers = await asyncio.wait_for(longest, 10)
        assert (whole.tokens.tolist(), samplers) == (EXPECTED, ["big-0"])
        turns = await users
        assert gateway.phase("big-0") == "ready"
        assert gateway.spool.last_sequence == 1
        with capsys.disabled():
            said = ", ".join(f"{code.name} {num}" for code, num in codes.most_common())
            sys.stdout.write(f"\nfuzz: {codes.total()} calls, {turns} turns beside them: {said}\n")
        assert codes.total() > 100 and turns > 10
        assert codes.keys() >= {Code.INVALID_ARGUMENT}
