"""The Qwen3-MoE forward pass in PyTorch, over a ragged batch with a slotted KV cache.

Owns the architecture and which tensors it needs. Must not sample, schedule or read files. Formulas
follow transformers' Qwen3MoeForCausalLM; roundings and reductions are those of `precision.py`.

Shape letters: N tokens of a step, B sequences of a group, T tokens of each of them, H query heads,
K key/value heads, Q queries per key/value head, h head size, D model, E experts, F expert ffn,
L context, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contracts.errors import BadInputError
from sampler_fleet.engines.checkpoint import Checkpoint
from sampler_fleet.engines.precision import KvCache, Linear, Precision

# Up to this many token-expert pairs all experts compute all tokens: fewer, larger operations.
_DENSE_PAIRS = 512


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture. Two checkpoints with equal configs can replace each other."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_token: int
    expert_size: int
    rms_norm_eps: float
    rope_theta: float
    norm_topk_prob: bool
    tie_word_embeddings: bool

    @staticmethod
    def from_hf(data: dict[str, Any]) -> ModelConfig:
        """Reads config.json.

        Raises:
            BadInputError: another architecture, or a variant that this forward does not compute.
        """
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        for key, found, expected in (
            ("model_type", data.get("model_type"), "qwen3_moe"),
            ("hidden_act", data.get("hidden_act", "silu"), "silu"),
            ("attention_bias", data.get("attention_bias", False), False),
            ("use_sliding_window", data.get("use_sliding_window", False), False),
            ("decoder_sparse_step", data.get("decoder_sparse_step", 1), 1),
            ("mlp_only_layers", data.get("mlp_only_layers") or [], []),
            ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ):
            if found != expected:
                raise BadInputError(f"config.json, {key}", expected=expected, found=found)
        try:
            return ModelConfig(
                vocab_size=data["vocab_size"],
                hidden_size=data["hidden_size"],
                num_layers=data["num_hidden_layers"],
                num_heads=data["num_attention_heads"],
                num_kv_heads=data["num_key_value_heads"],
                head_dim=data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"],
                num_experts=data.get("num_local_experts") or data["num_experts"],
                num_experts_per_token=data["num_experts_per_tok"],
                expert_size=data["moe_intermediate_size"],
                rms_norm_eps=data["rms_norm_eps"],
                rope_theta=float(rope.get("rope_theta") or data["rope_theta"]),
                norm_topk_prob=data.get("norm_topk_prob", False),
                tie_word_embeddings=data.get("tie_word_embeddings", False),
            )
        except KeyError as error:
            raise BadInputError("config.json", expected=f"a key {error}", found="none") from None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one sequence; its KV cache already holds positions [0, start)."""

    slot: int
    start: int
    tokens: np.ndarray  # int32 [T]


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Sequences that attend together: all decoding ones, or one that is prefilled."""

    start: int  # first row in the step
    num_sequences: int
    num_tokens: int  # of each sequence
    rows: Tensor  # int64 [2B] rows of the KV cache, keys then values
    length: int  # context, padded to the longest
    bias: Tensor  # float32 [B, 1, 1, T, L]: 0 where a token may look, else -inf


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One forward pass over tokens of several sequences, each with its own context."""

    tokens_N: Tensor
    positions_N: Tensor
    cache_rows_2N: Tensor
    cache_positions_2N: Tensor
    groups: tuple[_Group, ...]
    last_rows: np.ndarray  # int64 [segments]: the row of each segment's last token
    num_slots: int

    @staticmethod
    def of(segments: Sequence[Segment], cache: KvCache) -> StepBatch:
        """Lays the segments out: single tokens first, as one group, then the longer ones."""
        order = sorted(range(len(segments)), key=lambda i: len(segments[i].tokens) > 1)
        ordered = [segments[i] for i in order]
        counts = np.array([len(segment.tokens) for segment in ordered])
        starts = np.array([segment.start for segment in ordered])
        slots = np.array([segment.slot for segment in ordered])
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        rows = np.repeat(slots, counts)
        last_rows = np.empty(len(segments), np.int64)
        last_rows[order] = ends - 1
        num_single = int((counts == 1).sum())
        bounds = [(0, num_single, 1)] if num_single else []
        bounds += [(i, i + 1, int(counts[i])) for i in range(num_single, len(ordered))]
        groups = []
        for first, stop, num_tokens in bounds:
            begin = int(ends[first] - counts[first])
            here = positions[begin : int(ends[stop - 1])].reshape(stop - first, num_tokens)
            length = int(here.max()) + 1
            hidden = np.arange(length) > here[:, None, None, :, None]
            groups.append(
                _Group(
                    start=begin,
                    num_sequences=stop - first,
                    num_tokens=num_tokens,
                    rows=_both(slots[first:stop], cache.num_slots),
                    length=length,
                    bias=torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))),
                )
            )
        return StepBatch(
            tokens_N=torch.from_numpy(np.concatenate([s.tokens for s in ordered]).astype(np.int64)),
            positions_N=torch.from_numpy(positions),
            cache_rows_2N=_both(rows, cache.num_slots),
            cache_positions_2N=torch.from_numpy(np.concatenate([positions, positions])),
            groups=tuple(groups),
            last_rows=last_rows,
            num_slots=cache.num_slots,
        )


def _both(slots: np.ndarray, num_slots: int) -> Tensor:
    """Cache rows of the keys, then of the values."""
    return torch.from_numpy(np.concatenate([slots, slots + num_slots]))


@dataclass(frozen=True, kw_only=True)
class _Layer:
    input_norm_D: Tensor
    qkv: Linear
    qk_norm_Ahxh: Tensor  # q_norm for every query head, k_norm for every key head
    output: Linear
    mlp_norm_D: Tensor
    router: Linear
    gate_up: Linear  # outputs: for each expert, gate then up
    down: Linear  # stacked over experts


class Qwen3Moe:
    """The weights of one version, ready to compute."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision) -> None:
        """Takes every tensor of the checkpoint.

        Raises:
            BadInputError: another architecture; a missing, unknown or misshapen tensor.
        """
        self.config = config = ModelConfig.from_hf(checkpoint.config)
        self.precision = precision
        self.version = checkpoint.manifest.version
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embed_VxD = checkpoint.plain("model.embed_tokens.weight", *vocabulary)
        self._layers = [self._read_layer(checkpoint, i) for i in range(config.num_layers)]
        self._norm_D = checkpoint.plain("model.norm.weight", config.hidden_size)
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._head = Linear.of([checkpoint.weight(head, *vocabulary)], precision)
        if config.tie_word_embeddings and "lm_head.weight" in checkpoint:
            checkpoint.plain("lm_head.weight", *vocabulary)  # some writers store the tie twice
        checkpoint.finish()
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._inverse_frequency = config.rope_theta**-half

    def _read_layer(self, checkpoint: Checkpoint, index: int) -> _Layer:
        c, name = self.config, f"model.layers.{index}"
        sizes = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        linear = lambda *weights: Linear.of(weights, self.precision)  # noqa: E731
        norms = [
            checkpoint.plain(f"{name}.self_attn.{part}_norm.weight", c.head_dim).expand(heads, -1)
            for part, heads in (("q", c.num_heads), ("k", c.num_kv_heads))
        ]
        gate_up, down = [], []
        for e in range(c.num_experts):
            expert = f"{name}.mlp.experts.{e}"
            gate_up += [
                checkpoint.weight(f"{expert}.{part}_proj", c.expert_size, c.hidden_size)
                for part in ("gate", "up")
            ]
            weight = checkpoint.weight(f"{expert}.down_proj", c.hidden_size, c.expert_size)
            down.append(linear(weight))
        return _Layer(
            input_norm_D=checkpoint.plain(f"{name}.input_layernorm.weight", c.hidden_size),
            qkv=linear(
                *(
                    checkpoint.weight(
                        f"{name}.self_attn.{part}_proj", heads * c.head_dim, c.hidden_size
                    )
                    for part, heads in sizes.items()
                )
            ),
            qk_norm_Ahxh=torch.cat(norms),
            output=linear(
                checkpoint.weight(
                    f"{name}.self_attn.o_proj", c.hidden_size, c.num_heads * c.head_dim
                )
            ),
            mlp_norm_D=checkpoint.plain(f"{name}.post_attention_layernorm.weight", c.hidden_size),
            router=linear(checkpoint.weight(f"{name}.mlp.gate", c.num_experts, c.hidden_size)),
            gate_up=linear(*gate_up),
            down=Linear.stack(down),
        )

    def new_cache(self, *, num_slots: int, max_context: int) -> KvCache:
        return KvCache(
            num_layers=self.config.num_layers,
            num_slots=num_slots,
            num_kv_heads=self.config.num_kv_heads,
            max_context=max_context,
            head_dim=self.config.head_dim,
            precision=self.precision,
        )

    def hidden_states(self, batch: StepBatch, cache: KvCache) -> Tensor:
        """float32 [N, D] after the final norm. The KV cache of the batch's tokens is written."""
        round = self.precision.round
        angles = batch.positions_N.unsqueeze(-1) * self._inverse_frequency
        cos, sin = angles.cos(), angles.sin()
        # x rotated = x * cos + (x with its halves swapped) * (-sin, sin)
        cos_Nx1xh = torch.cat([cos, cos], dim=-1).unsqueeze(1)
        sin_Nx1xh = torch.cat([-sin, sin], dim=-1).unsqueeze(1)
        x = self._embed_VxD.index_select(0, batch.tokens_N)
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(x, layer.input_norm_D)
            qkv = round(layer.qkv(normed)).unflatten(-1, (-1, self.config.head_dim))
            attended = self._attention(index, layer, qkv, (cos_Nx1xh, sin_Nx1xh), batch, cache)
            x = round(x + round(layer.output(attended)))
            x = round(x + self._experts(layer, self._rms_norm(x, layer.mlp_norm_D)))
        return self._rms_norm(x, self._norm_D)

    def logits(self, hidden_NxD: Tensor) -> Tensor:
        """float32 [N, V], rounded to bfloat16 as engines return them."""
        return self.precision.round(self._head(hidden_NxD))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self.config.rms_norm_eps))
        return self.precision.round(x * scale * weight)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        qkv_NxAxh: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: StepBatch,
        cache: KvCache,
    ) -> Tensor:
        c, round = self.config, self.precision.round
        cos, sin = rotation
        qk = self._rms_norm(qkv_NxAxh[:, : -c.num_kv_heads], layer.qk_norm_Ahxh)
        qk = round(qk * cos + qk.roll(c.head_dim // 2, -1) * sin)
        q, k, v = qk[:, : c.num_heads], qk[:, c.num_heads :], qkv_NxAxh[:, -c.num_kv_heads :]
        cache.write(index, batch.cache_rows_2N, batch.cache_positions_2N, torch.cat([k, v]))
        q = q * (cache.read_scale / math.sqrt(c.head_dim))
        outputs = [self._attend(q, index, group, cache) for group in batch.groups]
        return round(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _attend(self, q_NxHxh: Tensor, index: int, group: _Group, cache: KvCache) -> Tensor:
        """float32 [B * T, H * h] for one group."""
        c, num, tokens = self.config, group.num_sequences, group.num_tokens
        per_kv_head = c.num_heads // c.num_kv_heads
        q = q_NxHxh[group.start : group.start + num * tokens]
        q = q.view(num, tokens, c.num_kv_heads, per_kv_head, c.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(num, c.num_kv_heads, per_kv_head * tokens, c.head_dim)
        kv = cache.read(index, group.rows, group.length)
        k, v = kv[:num], kv[num:]
        scores = (q @ k.transpose(2, 3)).unflatten(2, (per_kv_head, tokens)) + group.bias
        weights = self.precision.round(scores.softmax(-1)).flatten(2, 3)
        out = (weights @ v).unflatten(2, (per_kv_head, tokens)).permute(0, 3, 1, 2, 4)
        return out.reshape(num * tokens, -1) * cache.read_scale

    def _experts(self, layer: _Layer, x_NxD: Tensor) -> Tensor:
        """Router, top-k experts, weighted sum; float32 [N, D] rounded."""
        c, round = self.config, self.precision.round
        probs = round(layer.router(x_NxD)).softmax(-1)
        gates_NxR, chosen_NxR = probs.topk(c.num_experts_per_token, sorted=False)
        if c.norm_topk_prob:
            gates_NxR = gates_NxR / gates_NxR.sum(-1, keepdim=True)
        if len(x_NxD) * c.num_experts <= _DENSE_PAIRS:
            gates_NxE = torch.zeros_like(probs).scatter_(1, chosen_NxR, gates_NxR)
            hidden = round(layer.gate_up(x_NxD)).unflatten(-1, (c.num_experts, 2, c.expert_size))
            hidden_ExNxF = self._swiglu(hidden[:, :, 0], hidden[:, :, 1]).transpose(0, 1)
            out_ExNxD = layer.down(hidden_ExNxF) * gates_NxE.T.unsqueeze(-1)
            return round(round(out_ExNxD).sum(0))
        out = torch.zeros_like(x_NxD)
        for expert in range(c.num_experts):
            rows, ranks = torch.where(chosen_NxR == expert)
            if not len(rows):
                continue
            gate_up = layer.gate_up.outputs(
                2 * expert * c.expert_size, 2 * (expert + 1) * c.expert_size
            )
            hidden = round(gate_up(x_NxD[rows]))
            hidden = self._swiglu(hidden[:, : c.expert_size], hidden[:, c.expert_size :])
            y = layer.down.item(expert)(hidden) * gates_NxR[rows, ranks].unsqueeze(-1)
            out.index_add_(0, rows, round(y))
        return round(out)

    def _swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.precision.round(torch.nn.functional.silu(gate) * up)
