"""`python -m benchmarks.wire`: candidate records into the trainer's arrays, beside SGLang's JSON.

On one core. The same replies lie there as chunks of 8 tokens (what travels from a sampler), as the
trajectory service keeps and sends them (a `TrajectoryGroup`, prompts included), and as the events
of SGLang's `/generate` stream in its most compact form: incremental, with the fields that are asked
for and no others, one token per event (the server's default), 8, or the whole reply in one. All are
decoded into `Trajectory`s, and from there into the padded arrays of a training step
(`trainer_jax.batch.pack`, which checks every record first and costs all contenders the same).

Peers: `orjson` with the fewest conversions to arrays that the form allows, one per field of a whole
reply; and `orjson` with the reader of our SGLang adapter, which makes a record of each event, as
what streams on must. What they decode is compared before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks import harness
from contracts import codec
from contracts.pb import rollout_pb2
from contracts.types import (
    CandidateSets,
    Completion,
    Ending,
    FinishReason,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from sampler_fleet.engines.sglang_wire import Labels, read_reply
from trainer_jax.batch import pack
from trainer_jax.records import RecordRules

VOCAB = 151_936
MAX_CANDIDATES = 64  # top_k
WIDTHS = (8, MAX_CANDIDATES)
# Set sizes under top-p follow a power law: half of the tokens have one candidate, or one in eight.
EXPONENTS = {"narrow sets": 1.8, "wide sets": 1.3}
PROMPT, REPLY, CHUNK = 512, 256, 8
GROUP_SIZE = 32
VERSION = 7
RUNS = 7


def make_completion(rng: np.random.Generator, num: int, exponent: float) -> Completion:
    """A reply of `num` tokens; sets sum to one and fall in probability, as SGLang sends them."""
    counts = np.minimum(rng.zipf(exponent, num), MAX_CANDIDATES)
    width = int(counts.max())
    is_in_TxK = np.arange(width) < counts[:, None]
    ids_TxK = rng.integers(0, VOCAB // width, (num, width)) * width + np.arange(width)
    falling_TxK = -np.cumsum(rng.exponential(1.0, (num, width)), axis=1)
    logits_TxK = np.where(is_in_TxK, falling_TxK, -np.inf)
    logp_TxK = logits_TxK - np.log(np.exp(logits_TxK).sum(1, keepdims=True))
    cumulative_TxK = np.cumsum(np.exp(logp_TxK), axis=1)
    drawn_T = np.argmax(cumulative_TxK > rng.random((num, 1)) * cumulative_TxK[:, -1:], axis=1)
    at = np.arange(num), drawn_T
    return Completion(
        tokens=ids_TxK[at].astype(np.int32),
        sampler_logp=logp_TxK[at].astype(np.float32),
        candidates=CandidateSets.from_counts(
            counts, ids_TxK[is_in_TxK].astype(np.int32), logp_TxK[is_in_TxK].astype(np.float32)
        ),
        spans=(VersionSpan(version=VERSION, start=0, end=num),),
        finish_reason=FinishReason.LENGTH,
    )


def parts_of(completion: Completion, size: int) -> list[Completion]:
    """A reply of one version as the parts of its stream."""
    num, sets = len(completion), completion.candidates
    parts = []
    for start in range(0, num, size):
        end = min(start + size, num)
        first, last = int(sets.offsets[start]), int(sets.offsets[end])
        parts.append(
            Completion(
                tokens=completion.tokens[start:end],
                sampler_logp=completion.sampler_logp[start:end],
                candidates=CandidateSets.from_counts(
                    sets.counts[start:end], sets.ids[first:last], sets.logp[first:last]
                ),
                spans=(replace(completion.spans[0], start=0, end=end - start),),
                finish_reason=completion.finish_reason if end == num else None,
            )
        )
    return parts


def trajectory_of(prompt: np.ndarray, completion: Completion) -> Trajectory:
    """An episode of one turn."""
    return Trajectory(
        task_id="task",
        session_id="session",
        group="sampler",
        sampler_ids=("sampler-0",),
        tokens=np.concatenate([prompt, completion.tokens]),
        loss_mask=np.arange(len(prompt) + len(completion)) >= len(prompt),
        sampler_logp=completion.sampler_logp,
        candidates=completion.candidates,
        spans=tuple(
            replace(span, start=len(prompt) + span.start, end=len(prompt) + span.end)
            for span in completion.spans
        ),
        reward=1.0,
        ending=Ending.SUBMITTED,
    )


def event_of(part: Completion) -> bytes:
    """A part as SGLang's server sends it."""
    sets = part.candidates
    rows = list(itertools.pairwise(sets.offsets.tolist()))
    ids, logp = sets.ids.tolist(), sets.logp.tolist()
    meta: dict[str, Any] = {
        "id": "0" * 32,
        "finish_reason": None,
        "weight_version": str(VERSION),
        "output_token_logprobs": [
            [logp, token, None]
            for logp, token in zip(part.sampler_logp.tolist(), part.tokens.tolist(), strict=True)
        ],
        "output_token_sampling_mask": [ids[first:last] for first, last in rows],
        "output_token_sampling_logprobs": [logp[first:last] for first, last in rows],
    }
    if part.finish_reason:
        meta["finish_reason"] = {"type": "length", "length": REPLY}
        meta["weight_versions"] = [{"version": str(VERSION), "start": 0, "end": REPLY}]
    return orjson.dumps({"output_ids": part.tokens.tolist(), "meta_info": meta})


class Contender:
    """One form of the same replies, and how it is decoded."""

    def __init__(self, num_bytes: int, decode: Callable[[], Sequence[Trajectory]]) -> None:
        self.num_bytes = num_bytes
        self.decode = decode


def from_group(data: bytes) -> Sequence[Trajectory]:
    return codec.group_from_pb(rollout_pb2.TrajectoryGroup.FromString(data)).trajectories


def from_replies(
    read: Callable[[list[bytes]], Completion], replies: list[list[bytes]], prompt: np.ndarray
) -> Sequence[Trajectory]:
    return [trajectory_of(prompt, read(parts)) for parts in replies]


def read_chunks(parts: list[bytes]) -> Completion:
    return Completion.concatenate(
        [codec.chunk_from_pb(rollout_pb2.CompletionChunk.FromString(part)) for part in parts]
    )


def read_events(parts: list[bytes]) -> Completion:
    """As the adapter does."""
    labels = Labels(0)
    return Completion.concatenate(
        [read_reply(orjson.loads(part), labels=labels, truncates=True) for part in parts]
    )


def read_events_at_once(parts: list[bytes]) -> Completion:
    """The fewest steps in Python: all lists of a reply become arrays together."""
    replies = [orjson.loads(part) for part in parts]
    metas = [reply["meta_info"] for reply in replies]

    def joined(name: str) -> list[Any]:
        return list(itertools.chain.from_iterable(meta[name] for meta in metas))

    flat = itertools.chain.from_iterable
    masks = joined("output_token_sampling_mask")
    tokens = np.array(list(flat(reply["output_ids"] for reply in replies)), np.int32)
    ids = np.array(list(flat(masks)), np.int32)
    logp = np.array(list(flat(joined("output_token_sampling_logprobs"))), np.float32)
    counts = np.array(list(map(len, masks)))
    spans = tuple(
        VersionSpan(version=int(span["version"]), start=span["start"], end=span["end"])
        for span in metas[-1]["weight_versions"]
    )
    return Completion(
        tokens=tokens,
        sampler_logp=logp[ids == np.repeat(tokens, counts)],
        candidates=CandidateSets.from_counts(counts, ids, logp),
        spans=spans,
        finish_reason=FinishReason(metas[-1]["finish_reason"]["type"]),
    )


def contenders_of(completions: list[Completion], prompt: np.ndarray) -> dict[str, Contender]:
    """Ours first; names say form and reader."""
    trajectories = tuple(trajectory_of(prompt, completion) for completion in completions)
    group = codec.group_to_pb(
        TrajectoryGroup(sequence=1, task_id="task", trajectories=trajectories)
    )
    forms = {
        "group": group.SerializeToString(),
        "group, zstd": codec.compressed(group).SerializeToString(),
    }
    contenders = {
        name: Contender(len(data), partial(from_group, data)) for name, data in forms.items()
    }

    def add(name: str, replies: list[list[bytes]], read: Callable[[list[bytes]], Completion]):
        contenders[name] = Contender(
            sum(len(part) for reply in replies for part in reply),
            partial(from_replies, read, replies, prompt),
        )

    chunks = [
        [codec.chunk_to_pb(part).SerializeToString() for part in parts_of(completion, CHUNK)]
        for completion in completions
    ]
    add(f"chunks of {CHUNK}", chunks, read_chunks)
    for size in (1, CHUNK, REPLY):
        events = [
            [event_of(part) for part in parts_of(completion, size)] for completion in completions
        ]
        add(f"orjson, {size} per event", events, read_events_at_once)
        add(f"orjson and adapter, {size} per event", events, read_events)
    return contenders


def check_equal(contenders: dict[str, Contender]) -> None:
    """All decode the same."""
    ours, *others = (contender.decode() for contender in contenders.values())
    for other in others:
        for a, b in zip(ours, other, strict=True):
            assert a.spans == b.spans
            for left, right in (
                (a.tokens, b.tokens),
                (a.loss_mask, b.loss_mask),
                (a.sampler_logp, b.sampler_logp),
                (a.candidates.offsets, b.candidates.offsets),
                (a.candidates.ids, b.candidates.ids),
                (a.candidates.logp, b.candidates.logp),
            ):
                np.testing.assert_array_equal(left, right)


def to_arrays(decode: Callable[[], Sequence[Trajectory]]) -> None:
    """On to what a training step takes."""
    trajectories = tuple(decode())
    pack(
        [TrajectoryGroup(sequence=1, task_id="task", trajectories=trajectories)],
        [np.ones(len(trajectories))],
        row_tokens=PROMPT + REPLY,
        rows=8,
        candidate_buckets=WIDTHS,
        rules=RecordRules(
            group_names=("sampler",), vocab_size=VOCAB, replay=True, max_candidates=MAX_CANDIDATES
        ),
    )


def measure(exponent: float, group_size: int, runs: int) -> dict[str, Any]:
    """A row per contender. Ratios are of tokens/s and bytes, ours to the contender's."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, PROMPT).astype(np.int32)
    completions = [make_completion(rng, REPLY, exponent) for _ in range(group_size)]
    contenders = contenders_of(completions, prompt)
    check_equal(contenders)
    num = group_size * REPLY
    decoding = harness.take_turns({n: c.decode for n, c in contenders.items()}, runs)
    packing = harness.take_turns(
        {n: partial(to_arrays, c.decode) for n, c in contenders.items()}, runs
    )
    record_bytes = contenders[f"chunks of {CHUNK}"].num_bytes
    rows: dict[str, Any] = {}
    for name, contender in contenders.items():
        rows[name] = {
            "bytes_per_token": round(contender.num_bytes / num, 1),
            "decoded_tokens_per_s": round(num / decoding[name].median_s),
            "packed_tokens_per_s": round(num / packing[name].median_s),
        }
        if name.startswith("orjson"):
            rows[name] |= {
                "chunk_bytes_to_its": round(record_bytes / contender.num_bytes, 3),
                "group_decodes_times": round(
                    decoding[name].median_s / decoding["group"].median_s, 1
                ),
                "group_packed_times": round(packing[name].median_s / packing["group"].median_s, 1),
            }
    counts = np.concatenate([completion.candidates.counts for completion in completions])
    return {
        "candidates_per_token": round(float(counts.mean()), 2),
        "share_with_one": round(float((counts == 1).mean()), 2),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="shows that it works, not how fast")
    arguments = parser.parse_args()
    group_size, runs = (4, 2) if arguments.quick else (GROUP_SIZE, RUNS)
    results = {name: measure(e, group_size, runs) for name, e in EXPONENTS.items()}
    description = harness.machine(("numpy", "orjson", "protobuf", "zstandard"))
    harness.report("wire", results, description, arguments.out)


if __name__ == "__main__":
    main()
