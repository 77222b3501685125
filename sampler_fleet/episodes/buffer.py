"""The token buffer of a session: what was given, what was sampled, and by whom.

Owns the samplers' records over the sampled parts, and the seed of each turn. Tokens that were
sampled are never made anew. Must not know how text becomes tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from contracts.routed import RoutedExperts
from contracts.types import Completion, VersionSpan
from sampler_fleet.episodes.base import GeneratedChunk

_SEED_STEP = 0x9E3779B1  # odd: no two turns of an episode share a seed


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a session's turn, 31 bits."""
    return (seed + turn * _SEED_STEP) & 0x7FFFFFFF


class TokenBuffer:
    """The token buffer of an episode with the samplers' records over its sampled parts."""

    def __init__(self, prompt: np.ndarray) -> None:
        self.tokens = np.asarray(prompt, np.int32)
        self._sampled: list[tuple[int, Completion]] = []  # (start, completion)
        self._chunks: list[GeneratedChunk] = []

    def add_given(self, tokens: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, np.int32)])

    def add_sampled(self, chunks: list[GeneratedChunk]) -> Completion:
        completion = Completion.concatenate([chunk.completion for chunk in chunks])
        self._sampled.append((len(self.tokens), completion))
        self._chunks += chunks
        self.add_given(completion.tokens)
        return completion

    def records(self) -> dict[str, Any]:
        """The fields of a Trajectory that tokens and samplers determine."""
        loss_mask = np.zeros(len(self.tokens), bool)
        spans: list[VersionSpan] = []
        for start, completion in self._sampled:
            loss_mask[start : start + len(completion)] = True
            spans += (
                replace(span, start=start + span.start, end=start + span.end)
                for span in completion.spans
            )
        whole = Completion.concatenate([completion for _, completion in self._sampled])
        # a sampler that takes over computes a prefix anew: what was drawn came of the first routing
        routed_experts = RoutedExperts.first_of_each(
            whole.routed_experts, num_tokens=len(self.tokens)
        )
        return {
            "tokens": self.tokens,
            "loss_mask": loss_mask,
            "sampler_logp": whole.sampler_logp,
            "candidates": whole.candidates,
            "spans": tuple(spans),
            "routed_experts": routed_experts,
            "group": self._chunks[0].group if self._chunks else "",
            "sampler_ids": tuple(dict.fromkeys(chunk.sampler_id for chunk in self._chunks)),
        }
