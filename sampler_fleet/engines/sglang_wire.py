"""SGLang's `/generate` in our words: what is asked of it, and what its JSON says.

Owns the fields of requests and replies of SGLang 0.5.23. Pure functions; must not talk to anybody.

With top-p or top-k the record is the support drawn from (`output_token_sampling_mask`) and the
log-probs of the renormalized distribution over it (`output_token_sampling_logprobs`). Without, it
is the top candidates of softmax(logits / temperature): lists in a stream, and base64 of float32 and
int32 where a reply comes in one piece, the only case in which the server offers that.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contracts.errors import BadInputError, DirtyProcessError, RetryError
from contracts.routed import RoutedExperts
from contracts.types import (
    CandidateSets,
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
)
from sampler_fleet.engines.sglang_http import refusal

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What the routed experts of a model's replies are."""

    num_layers: int
    num_per_token: int
    num_experts: int

    @staticmethod
    def of(config: Json) -> Routing:
        """By config.json. BadInputError: no mixture of experts."""
        num_experts = config.get("num_experts") or config.get("num_local_experts")
        if not num_experts:
            raise BadInputError(
                "sampling.return_routed_experts",
                expected="a mixture of experts",
                found=config.get("model_type"),
            )
        return Routing(
            num_layers=config["num_hidden_layers"],
            num_per_token=config["num_experts_per_tok"],
            num_experts=num_experts,
        )

    def read(self, meta: Json, start: int) -> tuple[RoutedExperts, ...]:
        """The last event of a reply has all tokens' from `start` on, without the last one drawn:
        base64 of int32 [tokens, layers, experts of a token]. Tokens that the server has no record
        of are zeros, which no routing is unless there is one expert per token.

        Raises:
            RetryError: other numbers.
        """
        if "routed_experts" not in meta:
            return ()
        ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        shape = self.num_layers, self.num_per_token
        if ids.size % (shape[0] * shape[1]) or np.any((ids < 0) | (ids >= self.num_experts)):
            raise RetryError(
                f"SGLang sends {ids.size} routed experts that are not {shape[0]} x {shape[1]} "
                f"ids below {self.num_experts} for each token"
            )
        ids = ids.reshape(-1, *shape).astype(RoutedExperts.dtype_for(self.num_experts))
        is_known = np.asarray(ids.any(axis=(1, 2)) | (self.num_per_token == 1))
        return tuple(RoutedExperts(start=start, ids=ids).where(is_known))


def routing_fields(start: int) -> Json:
    """What a request adds to ask for the experts of its buffer's tokens from `start` on."""
    return {"return_routed_experts": True, "routed_experts_start_len": start}


def request_body(
    request: GenerateRequest,
    *,
    rid: str,
    cache_key: str,
    seed: int,
    num_new: int,
    num_vocab: int,
    max_support: int,
    stream: bool,
) -> Json:
    """The body of a POST to /generate.

    Args:
        rid: unlike any other, and no prefix of one: the server aborts by prefix.
        cache_key: requests of one key share what the prefix cache holds, and no others do.
        seed: honoured only by a server with `--enable-deterministic-inference`.
        num_new: tokens at most.
        max_support: the server's `--sampling-mask-max-tokens`. Top-p alone is cut there too, and
            the record says so: the server hands out no larger support.

    Raises:
        BadInputError: a top_k beyond `max_support`.
    """
    sampling = request.sampling
    params: Json = {
        "temperature": sampling.temperature,
        "max_new_tokens": num_new,
        "sampling_seed": seed % 2**63,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    else:
        params["ignore_eos"] = True  # nothing but the request says where a reply ends
    body: Json = {
        "rid": rid,
        "input_ids": request.tokens.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "extra_key": cache_key,
        "stream": stream,
    }
    if sampling.truncates:
        params |= {"top_p": sampling.top_p, "top_k": _support(sampling, num_vocab, max_support)}
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    else:
        body["top_logprobs_num"] = min(sampling.num_candidates, num_vocab)
        if not stream:
            body |= {
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": True,
            }
    return body


def _support(sampling: SamplingParams, num_vocab: int, max_support: int) -> int:
    wanted = min(sampling.top_k or max_support, num_vocab)
    if wanted > max_support:
        raise BadInputError(
            "top_k",
            expected=f"at most {max_support}, the server's --sampling-mask-max-tokens",
            found=sampling.top_k,
        )
    return wanted


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Json]:
    """The JSON of each server-sent event up to `[DONE]`, from bytes cut anywhere."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield json.loads(data)


class Labels:
    """Which version made which token of one reply.

    Parts of a stream carry the version at which the server sent them, the last one its account of
    all tokens (`weight_versions`).

    Args:
        lag: tokens by which the server's labels run ahead of the weights: 1 with overlapped
            scheduling, where the step in flight when decoding pauses counts only after the switch
            (`pause_generation` in managers/scheduler.py leaves it in the queue), else 0.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._told: list[VersionSpan] = []
        self.num_tokens = 0
        self.num_corrected = 0  # tokens of earlier parts that the account labels otherwise

    def take(self, meta: Json, num: int) -> tuple[VersionSpan, ...]:
        """Spans of the next `num` tokens, relative to the first of them.

        Raises:
            DirtyProcessError: a label that is no policy version.
        """
        start, self.num_tokens = self.num_tokens, self.num_tokens + num
        if (account := meta.get("weight_versions")) is not None:
            told = [
                VersionSpan(version=_version(one["version"]), start=one["start"], end=one["end"])
                for one in account
                if one["end"] > one["start"]
            ]
            self.num_corrected = start - _num_agreeing(self._told, told)
            self._told = told
        elif num:
            label = _version(meta["weight_version"])
            if self._told and self._told[-1].version == label:
                start_of_label = self._told.pop().start
            else:
                start_of_label = start
            self._told.append(VersionSpan(version=label, start=start_of_label, end=self.num_tokens))
        return tuple(self._spans(start, self.num_tokens))

    def _spans(self, start: int, end: int) -> Iterator[VersionSpan]:
        for index, span in enumerate(self._told):
            first = max(start, span.start + (self._lag if index else 0))
            last = min(end, span.end + self._lag)
            if last > first:
                yield VersionSpan(version=span.version, start=first - start, end=last - start)


def read_reply(reply: Json, *, labels: Labels, truncates: bool) -> Completion:
    """The next event of a stream, or a whole reply.

    Raises:
        BadInputError: the server refuses the request.
        RetryError: it failed.
        DirtyProcessError: weights that are no version of the policy.
    """
    if "error" in reply:
        error = reply["error"] if isinstance(reply["error"], dict) else {"message": reply["error"]}
        raise refusal(int(error.get("code") or 400), str(error.get("message")))
    meta = reply["meta_info"]
    finish = meta["finish_reason"]
    if finish and finish["type"] == "abort" and (finish.get("status_code") or 0) >= 400:
        raise refusal(int(finish["status_code"]), str(finish.get("message")))
    tokens = np.array(reply["output_ids"], np.int32)
    if truncates:
        candidates = _support_sets(meta)
        sampler_logp = _logp_of(tokens, candidates)
    else:
        candidates = _top_sets(meta)
        sampler_logp = _floats([row[0] for row in meta["output_token_logprobs"]])
    return Completion(
        tokens=tokens,
        sampler_logp=sampler_logp,
        candidates=candidates,
        spans=labels.take(meta, len(tokens)),
        finish_reason=FinishReason(finish["type"]) if finish else None,
    )


def _version(label: str) -> int:
    """Raises DirtyProcessError where the weights are not ones that this project loaded."""
    if not (label.isascii() and label.isdecimal() and int(label) >= 1):
        raise DirtyProcessError(
            f"the server serves weights labelled {label!r}, no version of the policy"
        )
    return int(label)


def _num_agreeing(ours: list[VersionSpan], theirs: list[VersionSpan]) -> int:
    """Tokens to which both give one version."""
    return sum(
        max(0, min(one.end, other.end) - max(one.start, other.start))
        for one in ours
        for other in theirs
        if one.version == other.version
    )


def _support_sets(meta: Json) -> CandidateSets:
    masks = meta["output_token_sampling_mask"]
    return CandidateSets.from_counts(
        np.array([len(mask) for mask in masks], np.int64),
        np.array([token for mask in masks for token in mask], np.int32),
        _floats([logp for row in meta["output_token_sampling_logprobs"] for logp in row]),
    )


def _logp_of(tokens: np.ndarray, candidates: CandidateSets) -> np.ndarray:
    """float32 [T]; NaN where the token is not in its set, which no reader accepts."""
    sampler_logp = np.full(len(tokens), np.nan, np.float32)
    owner = np.repeat(np.arange(len(candidates)), candidates.counts)
    known = owner < len(tokens)
    hits = np.flatnonzero(known & (candidates.ids == tokens[np.where(known, owner, 0)]))
    sampler_logp[owner[hits]] = candidates.logp[hits]
    return sampler_logp


def _top_sets(meta: Json) -> CandidateSets:
    if "output_top_logprobs_val_flat_b64" in meta:
        num, width = meta["output_top_logprobs_shape"]
        return CandidateSets.from_counts(
            np.full(num, width, np.int64),
            _binary(meta, "output_top_logprobs_idx_flat_b64", "int32"),
            _binary(meta, "output_top_logprobs_val_flat_b64", "float32"),
        )
    rows = [row or () for row in meta["output_top_logprobs"]]
    return CandidateSets.from_counts(
        np.array([len(row) for row in rows], np.int64),
        np.array([entry[1] for row in rows for entry in row], np.int32),
        _floats([entry[0] for row in rows for entry in row]),
    )


def _binary(meta: Json, name: str, dtype: str) -> np.ndarray:
    if meta[f"{name}_dtype"] != dtype:
        raise RetryError(f"SGLang sends {name} as {meta[f'{name}_dtype']}, not as {dtype}")
    return np.frombuffer(base64.b64decode(meta[name]), np.dtype(dtype).newbyteorder("<"))


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """float32; JSON has no NaN, the server writes null for it."""
    return np.array(values, np.float64).astype(np.float32)
