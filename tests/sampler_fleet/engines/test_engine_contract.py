"""What every engine behind the port must do. Runs against each engine in `ENGINES`.

To hold another engine to it, add a function that makes one and says which format it loads; where it
needs a server, import these tests beside a `subject` fixture of its own, as tests/sglang does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import BadInputError, RetryError
from contracts.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    SamplingParams,
    WeightFormat,
    check_completion,
)
from sampler_fleet.engines.base import Engine
from sampler_fleet.engines.embedded import EmbeddedEngine
from tests.sampler_fleet.engines.engine_checkpoints import (
    CONFIG,
    random_tensors,
    write_checkpoint,
)

# Log-probs of one distribution in two batches; see BATCH_TOLERANCE in test_engine_model.py.
TOLERANCE = 0.15
MAX_CONTEXT = 1024
TOP = SamplingParams(top_p=0.95, top_k=12, max_new_tokens=20)
GREEDY = SamplingParams(top_k=1, max_new_tokens=20)
_ids = itertools.count()


def embedded(kv_format: str, activation_format: str, split_k: int) -> Callable[[int], Engine]:
    return lambda max_sessions: EmbeddedEngine(
        kv_format=kv_format,
        activation_format=activation_format,
        split_k=split_k,
        max_sessions=max_sessions,
        max_context_tokens=MAX_CONTEXT,
    )


ENGINES = {
    "embedded-bf16": (embedded("bf16", "none", 1), WeightFormat.BF16),
    "embedded-fp8": (embedded("fp8", "fp8", 2), WeightFormat.FP8_BLOCK),
    "embedded-nvfp4": (embedded("fp8", "none", 4), WeightFormat.NVFP4),
}


@dataclasses.dataclass
class Subject:
    make: Callable[[int], Engine]
    format: WeightFormat
    root: Path
    engine: Engine
    honours_seeds: bool = True

    def publish(self, version: int, **kinds) -> tuple[Path, Manifest]:
        """A checkpoint whose weights follow from its version."""
        directory = self.root / f"v{version}"
        kinds = {"tensors": random_tensors(seed=version)} | kinds
        manifest = write_checkpoint(directory, format=self.format, version=version, **kinds)
        return directory, manifest


@pytest.fixture(params=ENGINES)
async def subject(request, tmp_path):
    make, format = ENGINES[request.param]
    subject = Subject(make=make, format=format, root=tmp_path, engine=make(4))
    yield subject
    await subject.engine.close()


@pytest.fixture
async def engine(subject):
    await subject.engine.load(*subject.publish(1))
    return subject.engine


def request_for(tokens, sampling=TOP, *, session=None, **others) -> GenerateRequest:
    name = f"r{next(_ids)}"
    return GenerateRequest(
        request_id=name,
        session_id=session or f"session of {name}",
        tokens=np.asarray(tokens, np.int32),
        sampling=sampling,
        **others,
    )


async def chunks_of(engine, request) -> list[Completion]:
    return [chunk async for chunk in engine.generate(request)]


async def complete(engine, tokens, sampling=TOP, **others) -> Completion:
    request = request_for(tokens, sampling, **others)
    async with asyncio.timeout(60):
        completion = Completion.concatenate(await chunks_of(engine, request))
    check_completion(completion, sampler_id="test", truncates=sampling.truncates)
    return completion


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG["vocab_size"], length)


def distribution(completion, position=0):
    """The recorded log-probs at a position as a dict."""
    sets = completion.candidates
    here = slice(sets.offsets[position], sets.offsets[position + 1])
    return dict(zip(sets.ids[here].tolist(), sets.logp[here].tolist(), strict=True))


def distance(one: dict, other: dict) -> float:
    """Total variation distance of two recorded distributions."""
    return 0.5 * sum(
        abs(np.exp(one.get(i, -np.inf)) - np.exp(other.get(i, -np.inf))) for i in {*one, *other}
    )


async def test_nothing_is_served_before_the_first_load(subject):
    assert subject.engine.version == 0
    with pytest.raises(RetryError):
        await complete(subject.engine, [1, 2])
    await subject.engine.load(*subject.publish(7))
    assert subject.engine.version == 7
    assert (await complete(subject.engine, [1, 2])).spans[0].version == 7
    with pytest.raises(RetryError):
        await complete(subject.engine, [1, 2], min_version=8)
    await complete(subject.engine, [1, 2], min_version=7)


async def test_a_reply_arrives_in_chunks_and_its_record_is_complete(engine):
    request = request_for(prompt(9), dataclasses.replace(TOP, max_new_tokens=50))
    chunks = await chunks_of(engine, request)
    assert len(chunks) > 2
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == FinishReason.LENGTH
    whole = Completion.concatenate(chunks)
    check_completion(whole, sampler_id="test", truncates=True)
    assert len(whole) == 50
    assert [dataclasses.astuple(span) for span in whole.spans] == [(1, 0, 50)]
    assert whole.tokens.dtype == np.int32
    assert whole.sampler_logp.dtype == whole.candidates.logp.dtype == np.float32


async def test_a_truncated_set_is_a_distribution_with_the_token_drawn(engine):
    whole = await complete(engine, prompt(9), dataclasses.replace(TOP, max_new_tokens=60))
    assert whole.candidates.counts.min() >= 1
    assert 1 < whole.candidates.counts.max() <= TOP.top_k
    for position, (token, logp) in enumerate(zip(whole.tokens, whole.sampler_logp, strict=True)):
        here = distribution(whole, position)
        assert here[int(token)] == logp
        assert abs(np.exp(list(here.values())).sum() - 1) < 1e-5


async def test_top_p_and_top_k_cut_the_distribution_they_are_given(engine):
    """The sets under truncation follow from the full distribution recorded without it."""
    size = CONFIG["vocab_size"]
    for temperature in (1.0, 0.7):
        everything = SamplingParams(
            temperature=temperature, num_candidates=size, max_new_tokens=1, seed=3
        )
        full = distribution(await complete(engine, prompt(9), everything))
        assert len(full) == size
        assert abs(np.exp(list(full.values())).sum() - 1) < 1e-4
        for top_p, top_k in ((0.9, 0), (1.0, 6), (0.8, 5), (0.97, 64), (0.01, 0)):
            cut = dataclasses.replace(everything, top_p=top_p, top_k=top_k)
            found = distribution(await complete(engine, prompt(9), cut))
            expected, before = {}, 0.0
            for rank, (token, logp) in enumerate(sorted(full.items(), key=lambda e: -e[1])):
                if (top_k and rank >= top_k) or before > top_p:
                    break
                expected[token], before = logp, before + np.exp(logp)
            assert set(found) == set(expected)
            total = np.log(sum(np.exp(logp) for logp in expected.values()))
            for token, logp in found.items():
                assert abs(logp - (expected[token] - total)) < 1e-3


async def test_tokens_are_drawn_from_the_recorded_distribution(engine):
    num = 400
    sampling = SamplingParams(top_k=6, max_new_tokens=1)
    replies = await asyncio.gather(
        *(
            complete(engine, prompt(5), dataclasses.replace(sampling, seed=1 + i))
            for i in range(num)
        )
    )
    ids, logp = zip(*distribution(replies[0]).items(), strict=True)
    assert len(ids) == 6
    counts = np.array([sum(reply.tokens[0] == i for reply in replies) for i in ids])
    expected = num * np.exp(logp)
    assert counts.sum() == num
    assert expected.max() < 0.95 * num
    chi_square = ((counts - expected) ** 2 / np.maximum(expected, 1)).sum()
    assert chi_square < 25  # 5 degrees of freedom: 1 in 7,000


async def test_without_truncation_the_top_candidates_are_recorded(engine):
    sampling = SamplingParams(num_candidates=3, temperature=3.0, max_new_tokens=80)
    whole = await complete(engine, prompt(4), sampling)
    assert (whole.candidates.counts == 3).all()
    outside = [token not in distribution(whole, i) for i, token in enumerate(whole.tokens)]
    assert any(outside)
    assert not all(outside)


async def test_a_seed_reproduces_a_reply(subject, engine):
    if not subject.honours_seeds:
        pytest.skip("this engine draws as it likes")
    sampling = dataclasses.replace(TOP, seed=11)
    first = await complete(engine, prompt(6), sampling)
    again = await complete(engine, prompt(6), sampling)
    assert first.tokens.tolist() == again.tokens.tolist()
    assert (first.sampler_logp == again.sampler_logp).all()
    others = [
        await complete(engine, prompt(6), dataclasses.replace(TOP, seed=seed)) for seed in (12, 13)
    ]
    unseeded = [await complete(engine, prompt(6)) for _ in range(2)]
    replies = {tuple(reply.tokens) for reply in (first, *others, *unseeded)}
    assert len(replies) == 5


async def test_a_reply_ends_with_a_stop_token(engine):
    sampling = dataclasses.replace(GREEDY, max_new_tokens=40)
    free = (await complete(engine, prompt(6), sampling)).tokens.tolist()
    stop = free[7]
    stopped = await complete(
        engine, prompt(6), dataclasses.replace(sampling, stop_token_ids=(stop, 10**6))
    )
    assert stopped.finish_reason == FinishReason.STOP
    assert stopped.tokens.tolist() == free[: free.index(stop) + 1]


async def test_a_reply_ends_where_the_context_does(engine):
    long = await complete(
        engine, prompt(MAX_CONTEXT - 5), dataclasses.replace(TOP, max_new_tokens=99)
    )
    assert long.finish_reason == FinishReason.LENGTH
    assert 1 <= len(long) <= 5


@pytest.mark.parametrize(
    "tokens", [[], [1, -1], [1, CONFIG["vocab_size"]], [1] * MAX_CONTEXT], ids=lambda t: str(len(t))
)
async def test_unusable_buffers_are_refused(engine, tokens):
    with pytest.raises(BadInputError):
        await complete(engine, tokens)
    await complete(engine, [1, 2])


async def test_a_next_turn_goes_on_as_if_it_had_been_computed_whole(engine):
    session, buffer = "turns", list(prompt(30))
    one = SamplingParams(num_candidates=CONFIG["vocab_size"], max_new_tokens=1)
    for turn in range(3):
        reply = await complete(engine, buffer, session=session)
        buffer += [*reply.tokens.tolist(), *prompt(7, seed=turn)]
        kept = distribution(await complete(engine, buffer, one, session=session))
        fresh = distribution(await complete(engine, buffer, one))
        assert distance(kept, fresh) < TOLERANCE
    edited = [*buffer[:12], *prompt(9, seed=99)]  # a history that differs in the middle
    kept = distribution(await complete(engine, edited, one, session=session))
    fresh = distribution(await complete(engine, edited, one))
    assert distance(kept, fresh) < TOLERANCE
    stale = distribution(await complete(engine, buffer, one))
    assert distance(kept, stale) > 3 * TOLERANCE


async def test_more_sessions_than_slots_all_get_their_own_reply(subject):
    """Concurrent sessions of different lengths and parameters, evicted and continued."""
    await subject.engine.load(*subject.publish(1))
    small = subject.make(2)
    try:
        await small.load(*subject.publish(1))
        samplings = [TOP, SamplingParams(num_candidates=8, max_new_tokens=5, temperature=0.8)]
        jobs = [
            (prompt(3 + 17 * i, seed=i), dataclasses.replace(samplings[i % 2], seed=1 + i))
            for i in range(7)
        ]
        for _ in range(2):
            crowded = await asyncio.gather(
                *(
                    complete(small, tokens, sampling, session=f"s{i}")
                    for i, (tokens, sampling) in enumerate(jobs)
                )
            )
            for (tokens, sampling), found in zip(jobs, crowded, strict=True):
                alone = await complete(subject.engine, tokens, sampling)
                assert distance(distribution(found), distribution(alone)) < TOLERANCE
    finally:
        await small.close()


async def test_two_requests_of_one_session_run_one_after_the_other(engine):
    replies = await asyncio.gather(
        *(complete(engine, prompt(8, seed=i), session="one") for i in range(3))
    )
    for i, reply in enumerate(replies):
        alone = await complete(engine, prompt(8, seed=i))
        assert distance(distribution(reply), distribution(alone)) < TOLERANCE


async def test_a_request_that_spans_an_update_goes_on(subject, engine):
    sampling = dataclasses.replace(TOP, seed=21, max_new_tokens=900)
    old, new = subject.publish(1), subject.publish(2)
    request, chunks, loading = request_for(prompt(40), sampling), [], None
    async with contextlib.aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if loading is None:
                loading = asyncio.create_task(engine.load(*new))
            if chunk.spans[0].version == 2:
                break
    assert loading is not None
    await loading
    assert engine.version == 2
    whole = Completion.concatenate(chunks)
    check_completion(whole, sampler_id="test", truncates=True)
    assert [span.version for span in whole.spans] == [1, 2]
    switch = whole.spans[0].end

    async def mean_distance(start: int, end: int) -> float:
        """Of some tokens' records to what the weights loaded now make of the buffer."""
        one, distances = dataclasses.replace(TOP, max_new_tokens=1), []
        for position in range(start, end):
            buffer = [*prompt(40), *whole.tokens[:position].tolist()]
            fresh = distribution(await complete(engine, buffer, one))
            distances.append(distance(distribution(whole, position), fresh))
        return float(np.mean(distances))

    # new weights, but on the cache that the old ones made
    assert await mean_distance(switch, len(whole)) > TOLERANCE
    await engine.load(*old)
    assert await mean_distance(switch, len(whole)) > TOLERANCE  # and not the old weights
    assert await mean_distance(0, switch) < TOLERANCE  # which made those before


async def test_refused_weights_leave_the_old_ones(subject, engine):
    sampling = dataclasses.replace(TOP, max_new_tokens=1)
    before = distribution(await complete(engine, prompt(10), sampling))

    tensors = random_tensors(seed=2)
    missing = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    unknown = tensors | {"model.extra.weight": tensors["model.norm.weight"].clone()}
    smaller = CONFIG | {"num_hidden_layers": 1}
    other = {"config": smaller, "tensors": random_tensors(smaller)}
    for kinds in ({"tensors": missing}, {"tensors": unknown}, other):
        with pytest.raises(BadInputError):
            await engine.load(*subject.publish(2, **kinds))

    directory, manifest = subject.publish(2)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[manifest.tensors[3].start] ^= 64
    path.write_bytes(data)
    with pytest.raises(BadInputError, match=manifest.tensors[3].name):
        await engine.load(directory, manifest)

    assert engine.version == 1
    after = distribution(await complete(engine, prompt(10), sampling))
    assert distance(before, after) < TOLERANCE / 10
    await engine.load(*subject.publish(3))
    other = distribution(await complete(engine, prompt(10), sampling))
    assert distance(before, other) > TOLERANCE
    assert engine.version == 3


async def test_equal_weights_have_equal_checksums_and_others_have_others(subject, engine):
    first = engine.weights_checksum
    assert first
    await engine.load(*subject.publish(2))
    second = engine.weights_checksum
    assert second not in ("", first)
    await engine.load(*subject.publish(3, tensors=random_tensors(seed=1)))
    assert engine.weights_checksum == first, "whatever the version is called"


async def test_abort_ends_a_stream(engine):
    endless = dataclasses.replace(TOP, max_new_tokens=10**6)
    request, chunks = request_for(prompt(5), endless), []
    async for chunk in engine.generate(request):
        chunks.append(chunk)
        await engine.abort(request.request_id)
    whole = Completion.concatenate(chunks)
    check_completion(whole, sampler_id="test", truncates=True)
    assert whole.finish_reason == FinishReason.ABORT
    assert 1 <= len(whole) < MAX_CONTEXT - 10
    await engine.abort("unknown")
    await complete(engine, [1, 2])


async def test_closing_the_iterator_frees_its_place(engine):
    endless = dataclasses.replace(TOP, max_new_tokens=10**6)
    for _ in range(8):  # twice as many as there are slots
        async with contextlib.aclosing(engine.generate(request_for([1, 2], endless))) as stream:
            await anext(stream)
    await complete(engine, [1, 2])
    assert engine.load_now().num_running == 0


async def test_an_id_that_is_used_again_gets_its_own_reply(engine):
    """A client that lost its stream asks again: nothing of the first reply may reach the second."""
    endless = dataclasses.replace(TOP, max_new_tokens=10**6, seed=1)
    request = request_for(prompt(5), endless)
    async with contextlib.aclosing(engine.generate(request)) as stream:
        await anext(stream)
    again = dataclasses.replace(request, sampling=GREEDY)
    found = Completion.concatenate(await chunks_of(engine, again))
    expected = await complete(engine, prompt(5), GREEDY)
    assert found.tokens.tolist() == expected.tokens.tolist()


async def test_load_is_reported_and_an_ended_session_leaves_the_cache(engine):
    idle = engine.load_now()
    assert (idle.num_running, idle.num_waiting, idle.kv_used_fraction) == (0, 0, 0)
    endless = dataclasses.replace(TOP, max_new_tokens=10**6)
    request = request_for(prompt(50), endless, session="s")
    async with contextlib.aclosing(engine.generate(request)) as stream:
        await anext(stream)
        busy = engine.load_now()
    assert busy.num_running == 1
    assert busy.tokens_per_second > 0
    assert 0 < busy.kv_used_fraction <= 1
    await complete(engine, [1, 2], session="t")
    assert engine.load_now().kv_used_fraction > 0
    for session in ("s", "t", "unknown"):
        engine.end_session(session)
    async with asyncio.timeout(10):
        while engine.load_now().kv_used_fraction > 0:
            await asyncio.sleep(0.01)


async def test_close_ends_what_runs(subject):
    engine = subject.make(1)
    await engine.load(*subject.publish(1))
    endless = dataclasses.replace(TOP, max_new_tokens=10**6)
    streams = [
        asyncio.create_task(chunks_of(engine, request_for([1, i], endless))) for i in range(3)
    ]
    await asyncio.sleep(0.1)
    await engine.close()
    async with asyncio.timeout(10):
        for chunks in await asyncio.gather(*streams):
            assert chunks[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    with pytest.raises(RetryError):
        await complete(engine, [1, 2])
