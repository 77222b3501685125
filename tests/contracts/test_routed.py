"""Routed experts: parts, wholes, and what no engine computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contracts.errors import BadInputError
from contracts.routed import RoutedExperts
from contracts.types import Completion, FinishReason, VersionSpan, check_completion
from sampler_fleet.episodes.base import GeneratedChunk
from sampler_fleet.episodes.buffer import TokenBuffer
from tests.contracts.test_codec import make_completion


def part(start: int, num: int, label: int = 0) -> RoutedExperts:
    """`label` and 100 are the experts of each token."""
    ids = np.full((num, 1, 2), [label, 100], np.uint8)
    return RoutedExperts(start=start, ids=ids)


def labels(parts: tuple[RoutedExperts, ...]) -> dict[int, int]:
    """By position; none twice."""
    found = [(p.start + n, int(p.ids[n, 0, 0])) for p in parts for n in range(len(p.ids))]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_parts_that_follow_each_other_become_one():
    joined = RoutedExperts.join([part(0, 3), part(3, 2, 1), part(7, 1), part(2, 1)])
    assert [(p.start, p.end) for p in joined] == [(0, 5), (7, 8), (2, 3)]
    assert RoutedExperts.join([]) == ()


def test_the_first_routing_of_a_position_counts():
    parts = [part(0, 4, 1), part(2, 4, 2), part(8, 5, 3), part(0, 9, 4)]
    first = RoutedExperts.first_of_each(parts, num_tokens=10)
    assert labels(first) == dict(enumerate([1] * 4 + [2] * 2 + [4] * 2 + [3] * 2))
    assert [p.start for p in first] == [0] and first[0].end == 10


@pytest.mark.parametrize(
    ("routed", "rule"),
    [
        (part(0, 9), None),
        (part(0, 10), "before the last of 10"),
        (part(-1, 3), "before the last of 10"),
        (part(0, 3, 100), "differ"),
        (replace(part(0, 3), ids=np.zeros((3, 1, 2), np.int32)), "uint8 or uint16"),
        (replace(part(0, 3), ids=np.zeros((0, 1, 2), np.uint8)), "uint8 or uint16"),
        (replace(part(0, 3), ids=np.zeros((3, 2), np.uint8)), "uint8 or uint16"),
    ],
)
def test_a_completion_has_only_what_an_engine_computes(routed, rule):
    completion = replace(make_completion(4), routed_experts=(routed,))
    if rule is None:
        check_completion(completion, sampler_id="a", truncates=True, num_given=6)
        return
    with pytest.raises(BadInputError, match=f"record from sampler a: .*{rule}"):
        check_completion(completion, sampler_id="a", truncates=True, num_given=6)


def completion(num: int, routed: tuple[RoutedExperts, ...], *, ends: bool) -> Completion:
    return replace(
        make_completion(num),
        spans=(VersionSpan(version=1, start=0, end=num),),
        finish_reason=FinishReason.STOP if ends else None,
        routed_experts=routed,
    )


def test_a_prefix_that_another_sampler_computed_anew_keeps_the_routing_it_was_drawn_from():
    buffer = TokenBuffer(np.arange(3, dtype=np.int32))
    buffer.add_sampled(
        [
            GeneratedChunk(
                completion=completion(2, (part(0, 4, 1),), ends=False), group="g", sampler_id="a"
            ),
            # b takes over: it computes the prompt and the two tokens again, and draws two more
            GeneratedChunk(
                completion=completion(2, (part(0, 6, 2),), ends=True), group="g", sampler_id="b"
            ),
        ]
    )
    buffer.add_given([1, 2])
    buffer.add_sampled(
        [
            GeneratedChunk(
                completion=completion(1, (part(6, 3, 3),), ends=True), group="g", sampler_id="b"
            )
        ]
    )
    record = buffer.records()
    assert len(record["tokens"]) == 10
    assert labels(record["routed_experts"]) == dict(enumerate([1, 1, 1, 1, 2, 2, 3, 3, 3])), (
        "the last token drawn was never computed"
    )
