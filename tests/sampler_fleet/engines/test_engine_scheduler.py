"""Slots, prefix reuse, eviction and the picking of a step's tokens, without a model."""

from __future__ import annotations

import numpy as np

from contracts.types import FinishReason, GenerateRequest, SamplingParams
from sampler_fleet.engines.scheduler import Scheduler


def scheduler(num_slots=2, max_context=32, prefill_tokens=8):
    return Scheduler(num_slots=num_slots, max_context=max_context, prefill_tokens=prefill_tokens)


def add(s, session, tokens, request=None, **sampling):
    s.add(
        GenerateRequest(
            request_id=request or session,
            session_id=session,
            tokens=np.asarray(tokens, np.int32),
            sampling=SamplingParams(**sampling),
        ),
        seed=1,
    )


def step(s, token=9):
    """One step in which every sequence that can draws `token`; what was computed, by session."""
    work = s.schedule()
    complete = [work[index][0] for index in s.computed(work)]
    s.finish([q for q in complete if q.append(token, s.max_context) is not None])
    return {q.session.session_id: (g.start, g.tokens.tolist()) for q, g in work}


def run(s, token=9):
    while s.has_work:
        step(s, token)


def test_prefill_is_chunked_while_others_decode():
    s = scheduler()
    add(s, "a", [1, 2], max_new_tokens=9)
    assert step(s) == {"a": (0, [1, 2])}
    add(s, "b", range(11), max_new_tokens=9)
    assert step(s) == {"a": (2, [9]), "b": (0, list(range(8)))}
    assert step(s) == {"a": (3, [9]), "b": (8, [8, 9, 10])}
    assert step(s) == {"a": (4, [9]), "b": (11, [9])}


def test_the_prefill_budget_is_shared_in_order_of_arrival():
    s = scheduler(num_slots=3)
    for session, num in (("a", 5), ("b", 6), ("c", 4)):
        add(s, session, range(num))
    assert step(s) == {"a": (0, [0, 1, 2, 3, 4]), "b": (0, [0, 1, 2])}
    assert step(s) == {"a": (5, [9]), "b": (3, [3, 4, 5]), "c": (0, [0, 1, 2, 3])}


def test_a_next_turn_computes_only_what_is_new():
    s = scheduler(prefill_tokens=100)
    add(s, "a", [1, 2, 3], max_new_tokens=2)
    run(s)  # draws 9, 9; the last of them was never computed
    add(s, "a", [1, 2, 3, 9, 9, 4], max_new_tokens=1)
    assert step(s) == {"a": (4, [9, 4])}
    add(s, "a", [1, 2, 7, 7], max_new_tokens=1)  # another history
    assert step(s) == {"a": (2, [7, 7])}
    add(s, "a", [1, 2, 7, 7], max_new_tokens=1)  # the same: the last token's logits are wanted
    assert step(s) == {"a": (3, [7])}
    add(s, "a", [1], max_new_tokens=1)
    assert step(s) == {"a": (0, [1])}


def test_the_least_recently_used_idle_session_is_evicted():
    s = scheduler(num_slots=2)
    for session in ("a", "b", "a"):
        add(s, session, [1, 2, 3], max_new_tokens=1)
        run(s)
    add(s, "c", [1, 2, 3], max_new_tokens=1)
    run(s)
    add(s, "a", [1, 2, 3], max_new_tokens=1)
    assert step(s) == {"a": (2, [3])}  # kept
    add(s, "b", [1, 2, 3], max_new_tokens=1)
    assert step(s) == {"b": (0, [1, 2, 3])}  # was evicted
    assert s.num_cached == 6


def test_requests_wait_for_a_slot_and_for_their_session():
    s = scheduler(num_slots=2)
    add(s, "a", [1], "a1", max_new_tokens=2)
    add(s, "a", [1], "a2", max_new_tokens=1)
    add(s, "b", [1], "b1", max_new_tokens=1)
    add(s, "c", [1], "c1", max_new_tokens=1)
    assert list(step(s)) == ["a", "b"]
    assert [request.request_id for request, _ in s.waiting] == ["a2", "c1"]
    assert list(step(s)) == ["a", "c"]
    assert list(step(s)) == ["a"]
    assert not s.has_work


def test_an_ended_session_frees_its_slot():
    s = scheduler(num_slots=1)
    add(s, "a", [1, 2], max_new_tokens=2)
    step(s)
    s.end_session("a")  # while it runs
    assert s.num_cached == 2
    step(s)
    assert s.num_cached == 0
    s.end_session("unknown")
    add(s, "b", [1, 2], max_new_tokens=1)
    run(s)
    s.end_session("b")
    assert s.num_cached == 0


def test_replies_end_at_stop_tokens_the_limit_and_the_end_of_the_slot():
    s = scheduler(max_context=6)
    reasons = {}
    add(s, "a", [1], stop_token_ids=(5,), max_new_tokens=9)
    add(s, "b", [1], max_new_tokens=2)
    for token in (9, 5):
        work = s.schedule()
        s.computed(work)
        for sequence, _ in work:
            reasons[sequence.session.session_id] = sequence.append(token, s.max_context)
    assert reasons == {"a": FinishReason.STOP, "b": FinishReason.LENGTH}
    s = scheduler(max_context=6)
    add(s, "a", [1, 2, 3], max_new_tokens=99)
    num_steps = 0
    while s.has_work:
        step(s)
        num_steps += 1
    assert num_steps == 3  # 3 + 3 tokens fill the slot of 6


def test_abort_takes_out_running_and_waiting_requests():
    s = scheduler(num_slots=1)
    add(s, "a", [1, 2, 3], "running")
    add(s, "b", [1], "waiting")
    step(s)
    for name in ("waiting", "running"):
        found = s.abort(name)
        assert found is not None
        assert found[0].request_id == name
    assert s.abort("running") is None
    assert not s.has_work
    add(s, "a", [1, 2, 3, 4], max_new_tokens=1)
    assert step(s) == {"a": (3, [4])}  # the cache was kept
