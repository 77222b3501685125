"""What is asked of SGLang and how its replies are read; the replies were recorded from 0.5.23."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from contracts.errors import BadInputError, DirtyProcessError, RetryError
from contracts.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
    check_completion,
)
from sampler_fleet.engines.sglang_wire import (
    Labels,
    Routing,
    events,
    read_reply,
    request_body,
    routing_fields,
)

# top_p 0.9, top_k 5, incremental streaming; only the fields that are read
STREAM = [
    """{"output_ids":[88],"meta_info":{"id":"a1","finish_reason":null,"weight_version":"7",
    "output_token_logprobs":[[-0.3596935570240021,88,null]],
    "output_token_sampling_mask":[[88,82,85,48]],"output_token_sampling_logprobs":
    [[-0.27339571714401245,-2.148395538330078,-2.648395538330078,-2.9608957767486572]]}}""",
    """{"output_ids":[26],"meta_info":{"id":"a1","finish_reason":null,"weight_version":"7",
    "output_token_logprobs":[[-1.7863003015518188,26,null]],
    "output_token_sampling_mask":[[24,26,91,22,27]],"output_token_sampling_logprobs":
    [[-1.1828224658966064,-1.3703224658966064,-1.5890724658966064,-1.9953224658966064,
    -2.3078224658966064]]}}""",
    """{"output_ids":[82],"meta_info":{"id":"a1","finish_reason":{"type":"length","length":3},
    "weight_version":"7","weight_versions":[{"version":"7","start":0,"end":3}],
    "output_token_logprobs":[[-0.411893755197525,82,null]],
    "output_token_sampling_mask":[[82,93,89,48]],"output_token_sampling_logprobs":
    [[-0.3088730573654175,-2.090122938156128,-2.090122938156128,-3.996372938156128]]}}""",
]
# without truncation, three candidates, in one piece
FLAT = """{"output_ids":[26,27,22],"meta_info":{"id":"a3","finish_reason":{"type":"length",
"length":3},"weight_version":"7","weight_versions":[{"version":"7","start":0,"end":3}],
"output_token_logprobs":[[-5.89094352722168,26,null],[-2.0144379138946533,27,null],
[-1.4443566799163818,22,null]],
"output_top_logprobs_val_flat_b64":"wSm4vjgFD8A4BS/AGtm1vxrZvb+N7ADAruCQv67guL9XcArA",
"output_top_logprobs_idx_flat_b64":"WAAAAFIAAABVAAAAUgAAAAkAAABZAAAALAAAABYAAABdAAAA",
"output_top_logprobs_val_flat_b64_dtype":"float32",
"output_top_logprobs_idx_flat_b64_dtype":"int32","output_top_logprobs_shape":[3,3],
"output_top_logprobs_null_prefix":0}}"""
# without truncation, in a stream
LISTS = """{"output_ids":[82],"meta_info":{"id":"a2","finish_reason":null,"weight_version":"7",
"output_token_logprobs":[[-2.2346935272216797,82,null]],"output_top_logprobs":
[[[-0.3596935570240021,88,null],[-2.2346935272216797,82,null],[-2.7346935272216797,85,null]]]}}"""


def read_all(replies, *, truncates=True, lag=0) -> Completion:
    labels = Labels(lag)
    return Completion.concatenate(
        [read_reply(json.loads(reply), labels=labels, truncates=truncates) for reply in replies]
    )


def test_a_stream_with_top_p_becomes_one_record():
    whole = read_all(STREAM)
    check_completion(whole, sampler_id="test", truncates=True)
    assert whole.tokens.tolist() == [88, 26, 82]
    drawn = [-0.27339571714401245, -1.3703224658966064, -0.3088730573654175]
    assert whole.sampler_logp.tolist() == drawn
    assert whole.candidates.counts.tolist() == [4, 5, 4]
    assert whole.candidates.ids[4:9].tolist() == [24, 26, 91, 22, 27]
    totals = np.add.reduceat(np.exp(whole.candidates.logp), whole.candidates.offsets[:-1])
    assert np.abs(totals - 1).max() < 1e-5
    assert whole.spans == (VersionSpan(version=7, start=0, end=3),)
    assert whole.finish_reason == FinishReason.LENGTH


def test_binary_and_listed_candidates_are_read_alike():
    flat, listed = read_all([FLAT], truncates=False), read_all([LISTS], truncates=False)
    check_completion(flat, sampler_id="test", truncates=False)
    assert flat.candidates.ids.tolist() == [88, 82, 85, 82, 9, 89, 44, 22, 93]
    assert flat.candidates.counts.tolist() == [3, 3, 3]
    assert flat.sampler_logp[0] == np.float32(-5.89094352722168)  # drawn from outside
    for completion in (flat, listed):
        assert completion.candidates.ids[:3].tolist() == [88, 82, 85]
        assert (
            completion.candidates.logp[:3].tolist()
            == np.float32([-0.3596935570240021, -2.2346935272216797, -2.7346935272216797]).tolist()
        )
    assert listed.finish_reason is None


def test_what_is_not_a_number_or_not_a_candidate_is_for_no_reader():
    null = json.loads(STREAM[0])
    null["meta_info"]["output_token_sampling_logprobs"][0][0] = None
    other = json.loads(STREAM[0]) | {"output_ids": [3]}
    for reply in (null, other):
        completion = read_reply(reply, labels=Labels(0), truncates=True)
        with pytest.raises(BadInputError, match="finite"):
            check_completion(completion, sampler_id="test", truncates=False)


def test_binary_of_another_width_is_refused():
    reply = json.loads(FLAT)
    reply["meta_info"]["output_top_logprobs_val_flat_b64_dtype"] = "float16"
    with pytest.raises(RetryError, match="float16"):
        read_reply(reply, labels=Labels(0), truncates=False)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ('{"error":{"message":"input_ids cannot be empty.","code":400}}', BadInputError),
        ('{"error":{"message":"out of memory","code":500}}', RetryError),
        (
            """{"output_ids":[],"meta_info":{"finish_reason":{"type":"abort",
            "message":"top_k too large","status_code":400},"weight_version":"7"}}""",
            BadInputError,
        ),
        (
            """{"output_ids":[],"meta_info":{"finish_reason":{"type":"abort",
            "message":"shutting down","status_code":503},"weight_version":"7"}}""",
            RetryError,
        ),
        (STREAM[0].replace('"7"', '"default"'), DirtyProcessError),
        (STREAM[0].replace('"7"', '"0"'), DirtyProcessError),
    ],
)
def test_refusals_say_what_recovers_them(reply, error):
    with pytest.raises(error):
        read_reply(json.loads(reply), labels=Labels(0), truncates=True)


def test_an_abort_keeps_what_was_drawn():
    reply = json.loads(STREAM[2])
    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    completion = read_reply(reply, labels=Labels(0), truncates=True)
    assert completion.finish_reason == FinishReason.ABORT
    assert completion.tokens.tolist() == [82]


def told(labels: Labels, parts: list[tuple[int, dict]]) -> list[int]:
    """The version of each token, from parts of so many tokens each."""
    versions = []
    for num, meta in parts:
        spans = labels.take(meta, num)
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])][
            : len(spans)
        ]
        assert (spans[-1].end if spans else 0) == num
        versions += [span.version for span in spans for _ in range(span.end - span.start)]
    return versions


def account(*spans: tuple[str, int, int]) -> dict:
    keys = ("version", "start", "end")
    return {"weight_versions": [dict(zip(keys, span, strict=True)) for span in spans]}


@pytest.mark.parametrize("lag", [0, 1])
def test_each_token_has_the_version_that_made_it(lag):
    one, two = {"weight_version": "1"}, {"weight_version": "2"}
    labels = Labels(lag)
    parts = [(1, one), (1, one), (1, two), (1, two), (2, account(("1", 0, 2), ("2", 2, 6)))]
    assert told(labels, parts) == [1] * (2 + lag) + [2] * (4 - lag)
    assert labels.num_corrected == 0


def test_the_account_at_the_end_corrects_labels_and_says_so():
    """Parts that the server joined while nobody read carry the label of the last of them."""
    labels = Labels(0)
    parts = [(2, {"weight_version": "1"}), (4, {"weight_version": "2"})]
    assert told(labels, [*parts, (1, account(("1", 0, 5), ("2", 5, 7)))]) == [1, 1, 2, 2, 2, 2, 2]
    assert labels.num_corrected == 3


def test_a_switch_before_the_first_token_leaves_no_span_behind():
    assert told(Labels(1), [(3, account(("1", 0, 0), ("2", 0, 3)))]) == [2, 2, 2]
    assert told(Labels(0), [(0, account(("2", 0, 0)))]) == []


async def test_events_may_be_cut_anywhere():
    data = b"".join(
        b"data: " + json.dumps(json.loads(reply)).encode() + b"\n\n" for reply in STREAM
    )
    data += b"data: [DONE]\n\ndata: never\n\n"
    expected = [json.loads(reply) for reply in STREAM]
    for size in (1, 7, 64, len(data)):

        async def cut(size=size):
            for start in range(0, len(data), size):
                yield data[start : start + size]

        assert [event async for event in events(cut())] == expected


def body(sampling: SamplingParams, *, stream=True, num_vocab=1000, max_support=64) -> dict:
    request = GenerateRequest(
        request_id="r", session_id="s", tokens=np.int32([1, 2, 3]), sampling=sampling
    )
    return request_body(
        request,
        rid="x",
        cache_key="k",
        seed=2**63 + 5,
        num_new=9,
        num_vocab=num_vocab,
        max_support=max_support,
        stream=stream,
    )


def test_the_support_is_asked_for_with_a_top_k_that_the_server_takes():
    nucleus = body(SamplingParams(top_p=0.9, temperature=0.7, stop_token_ids=(5,)))
    assert nucleus["input_ids"] == [1, 2, 3]
    assert nucleus["return_sampling_mask"] is True
    assert nucleus["sampling_logprobs_mode"] == "support"
    assert nucleus["sampling_params"] == {
        "temperature": 0.7,
        "max_new_tokens": 9,
        "sampling_seed": 5,
        "stop_token_ids": [5],
        "top_p": 0.9,
        "top_k": 64,
    }
    assert body(SamplingParams(top_p=0.9), num_vocab=50)["sampling_params"]["top_k"] == 50
    assert body(SamplingParams(top_k=7))["sampling_params"]["top_k"] == 7
    with pytest.raises(BadInputError, match="sampling-mask-max-tokens"):
        body(SamplingParams(top_k=65))


def test_without_truncation_candidates_come_in_binary_where_the_server_can():
    streamed, whole = (
        body(SamplingParams(num_candidates=20), stream=stream) for stream in (True, False)
    )
    for found in (streamed, whole):
        assert found["top_logprobs_num"] == 20
        assert "return_sampling_mask" not in found
        assert found["sampling_params"]["ignore_eos"] is True
    assert "return_flat_raw_output_top_logprobs" not in streamed  # refused in a stream
    assert whole["return_flat_raw_output_top_logprobs"] is True
    assert whole["return_flat_raw_top_logprobs_b64"] is True
    assert body(SamplingParams(), num_vocab=10)["top_logprobs_num"] == 10


ROUTING = Routing(num_layers=2, num_per_token=2, num_experts=300)


def routed_meta(ids: np.ndarray) -> dict[str, str]:
    """As the server has it: base64 of int32, without its shape."""
    return {"routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode()}


def test_routed_experts_are_read_but_for_tokens_without_a_record():
    ids = np.random.default_rng(0).random((6, 2, 300)).argsort(-1)[..., -2:]
    ids[2] = 0
    first, second = ROUTING.read(routed_meta(ids), start=5)
    assert (first.start, first.end, second.start, second.end) == (5, 7, 8, 11)
    np.testing.assert_array_equal(first.ids, ids[:2])
    np.testing.assert_array_equal(second.ids, ids[3:])
    assert first.ids.dtype == np.uint16
    assert ROUTING.read({}, start=5) == () == ROUTING.read(routed_meta(ids[:0]), start=5)
    assert routing_fields(5) == {"return_routed_experts": True, "routed_experts_start_len": 5}


@pytest.mark.parametrize("ids", [np.full((1, 2, 2), 300), np.full((1, 2, 2), -1), np.ones(3)])
def test_other_routing_is_refused(ids):
    with pytest.raises(RetryError, match="not 2 x 2 ids below 300"):
        ROUTING.read(routed_meta(ids), start=0)


def test_a_models_routing_is_read_from_its_config():
    mixtral = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    assert Routing.of(mixtral).num_experts == 8
    with pytest.raises(BadInputError, match="a mixture of experts, found qwen3"):
        Routing.of({"model_type": "qwen3", "num_hidden_layers": 2})
