"""The forward pass of a mixture of experts in PyTorch, over a ragged batch with a slotted KV cache.

Owns the architectures and which tensors they need. Must not sample, schedule or read files.
Formulas follow transformers' Qwen3MoeForCausalLM and MixtralForCausalLM; products are those of
`precision.py`, and what lies between them is compiled in `kernels.py`.

Shape letters: N tokens of a step, T tokens of a segment, H query heads, K key/value heads, A all
heads, h head size, D model, E experts, R experts of a token, F expert ffn, V vocabulary, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contracts.errors import BadInputError
from contracts.routed import RoutedExperts
from sampler_fleet.engines import kernels
from sampler_fleet.engines.checkpoint import Checkpoint
from sampler_fleet.engines.precision import KvCache, Linear, Precision


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What tells one kind of mixture from another: names, and whether queries are normed."""

    expert_size: str  # key of config.json
    block: str  # of a layer: its router and experts
    gate: str
    up: str
    down: str
    norms_queries: bool


_QWEN3_MOE = _Family(
    expert_size="moe_intermediate_size",
    block="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    norms_queries=True,
)
_MIXTRAL = _Family(
    expert_size="intermediate_size",
    block="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    norms_queries=False,
)
_FAMILIES = {"qwen3_moe": _QWEN3_MOE, "mixtral": _MIXTRAL}  # by config.json's model_type


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture. Two checkpoints with equal configs can replace each other."""

    model_type: str
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
        family = _FAMILIES.get(data.get("model_type", ""))
        if family is None:
            expected, found = " or ".join(_FAMILIES), data.get("model_type")
            raise BadInputError("config.json, model_type", expected=expected, found=found)
        window = data.get("sliding_window") if family is _MIXTRAL else None  # it has no switch
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        for key, found, expected in (
            ("hidden_act", data.get("hidden_act", "silu"), "silu"),
            ("attention_bias", data.get("attention_bias", False), False),
            ("use_sliding_window", data.get("use_sliding_window", False), False),
            ("sliding_window", window, None),
            ("decoder_sparse_step", data.get("decoder_sparse_step", 1), 1),
            ("mlp_only_layers", data.get("mlp_only_layers") or [], []),
            ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ):
            if found != expected:
                raise BadInputError(f"config.json, {key}", expected=expected, found=found)
        try:
            return ModelConfig(
                model_type=data["model_type"],
                vocab_size=data["vocab_size"],
                hidden_size=data["hidden_size"],
                num_layers=data["num_hidden_layers"],
                num_heads=data["num_attention_heads"],
                num_kv_heads=data["num_key_value_heads"],
                head_dim=data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"],
                num_experts=data.get("num_local_experts") or data["num_experts"],
                num_experts_per_token=data["num_experts_per_tok"],
                expert_size=data[family.expert_size],
                rms_norm_eps=data["rms_norm_eps"],
                rope_theta=float(rope.get("rope_theta") or data["rope_theta"]),
                norm_topk_prob=family is _MIXTRAL or data.get("norm_topk_prob", False),
                tie_word_embeddings=data.get("tie_word_embeddings", False),
            )
        except KeyError as error:
            raise BadInputError("config.json", expected=f"a key {error}", found="none") from None

    @property
    def family(self) -> _Family:
        return _FAMILIES[self.model_type]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one sequence; its KV cache already holds positions [0, start)."""

    slot: int
    start: int
    tokens: np.ndarray  # int32 [T]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One forward pass over tokens of several sequences, each with its own context."""

    tokens_N: Tensor
    places_2xN: np.ndarray  # int64, slot and position of each token
    num_single: int  # segments of one token; they come first
    bounds: list[int]  # first row of each longer segment, and the end
    last_rows: np.ndarray  # int64 [segments]: the row of each segment's last token

    @staticmethod
    def of(segments: Sequence[Segment]) -> StepBatch:
        """Lays the segments out: single tokens first, then the longer ones."""
        order = sorted(range(len(segments)), key=lambda i: len(segments[i].tokens) > 1)
        ordered = [segments[i] for i in order]
        counts = np.array([len(segment.tokens) for segment in ordered])
        starts = np.array([segment.start for segment in ordered])
        slots = np.array([segment.slot for segment in ordered])
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        last_rows = np.empty(len(segments), np.int64)
        last_rows[order] = ends - 1
        num_single = int((counts == 1).sum())
        return StepBatch(
            tokens_N=torch.from_numpy(np.concatenate([s.tokens for s in ordered]).astype(np.int64)),
            places_2xN=np.stack([np.repeat(slots, counts), positions]),
            num_single=num_single,
            bounds=[num_single, *ends[num_single:].tolist()],
            last_rows=last_rows,
        )


@dataclass(frozen=True, kw_only=True)
class _Layer:
    input_norm_D: np.ndarray
    qkv: Linear
    qk_norm_Axh: np.ndarray  # q_norm for every query head, k_norm for every key head; or none
    output: Linear
    mlp_norm_D: np.ndarray
    router: Linear
    gate_up: Linear  # stacked over experts; outputs: gate then up
    down: Linear  # stacked over experts


class MixtureModel:
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
        self._norm_D = checkpoint.plain("model.norm.weight", config.hidden_size).numpy()
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
            if c.family.norms_queries
        ]
        block = f"{name}.{c.family.block}"
        gate_up, down = [], []
        for e in range(c.num_experts):
            gate, up = (
                checkpoint.weight(f"{block}.experts.{e}.{part}", c.expert_size, c.hidden_size)
                for part in (c.family.gate, c.family.up)
            )
            gate_up.append(linear(gate, up))
            module = f"{block}.experts.{e}.{c.family.down}"
            down.append(linear(checkpoint.weight(module, c.hidden_size, c.expert_size)))
        return _Layer(
            input_norm_D=checkpoint.plain(f"{name}.input_layernorm.weight", c.hidden_size).numpy(),
            qkv=linear(
                *(
                    checkpoint.weight(
                        f"{name}.self_attn.{part}_proj", heads * c.head_dim, c.hidden_size
                    )
                    for part, heads in sizes.items()
                )
            ),
            qk_norm_Axh=torch.cat(norms or [torch.empty(0, c.head_dim)]).numpy(),
            output=linear(
                checkpoint.weight(
                    f"{name}.self_attn.o_proj", c.hidden_size, c.num_heads * c.head_dim
                )
            ),
            mlp_norm_D=checkpoint.plain(
                f"{name}.post_attention_layernorm.weight", c.hidden_size
            ).numpy(),
            router=linear(checkpoint.weight(f"{block}.gate", c.num_experts, c.hidden_size)),
            gate_up=Linear.stack(gate_up),
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

    def new_routing(self, num_tokens: int) -> np.ndarray:
        """Room for `hidden_states` to say where tokens went, [N, L, R]."""
        c = self.config
        shape = num_tokens, c.num_layers, c.num_experts_per_token
        return np.empty(shape, RoutedExperts.dtype_for(c.num_experts))

    def hidden_states(
        self, batch: StepBatch, cache: KvCache, routed_NxLxR: np.ndarray | None = None
    ) -> Tensor:
        """float32 [N, D] after the final norm. The KV cache of the batch's tokens is written, and
        the ids of their experts where there is room for them.
        """
        positions_N = torch.from_numpy(batch.places_2xN[1])
        angles = positions_N.unsqueeze(-1) * self._inverse_frequency
        rotation_2xNxh = torch.stack([angles.cos(), angles.sin()]).numpy()
        x = self._embed_VxD.index_select(0, batch.tokens_N)
        added = torch.zeros_like(x)
        for index, layer in enumerate(self._layers):
            normed = self._add_norm(x, added, layer.input_norm_D)
            added = layer.output(
                self._attention(index, layer, layer.qkv(normed), rotation_2xNxh, batch, cache)
            )
            normed = self._add_norm(x, added, layer.mlp_norm_D)
            routed_NxR = None if routed_NxLxR is None else routed_NxLxR[:, index]
            added = self._experts(layer, normed, routed_NxR)
        return self._add_norm(x, added, self._norm_D)

    def logits(self, hidden_NxD: Tensor) -> Tensor:
        """float32 [N, V], rounded to bfloat16 as engines return them."""
        return self._head(hidden_NxD)

    def _add_norm(self, x: Tensor, added: Tensor, weight_D: np.ndarray) -> Tensor:
        """x += added; the norm of that."""
        normed = torch.empty_like(x)
        eps, exact = np.float32(self.config.rms_norm_eps), self.precision.exact
        kernels.add_norm(x.numpy(), added.numpy(), weight_D, eps, exact, normed.numpy())
        return normed

    def _attention(
        self,
        index: int,
        layer: _Layer,
        qkv: Tensor,
        rotation_2xNxh: np.ndarray,
        batch: StepBatch,
        cache: KvCache,
    ) -> Tensor:
        """float32 [N, A * h] to float32 [N, H * h]."""
        c, exact, stored = self.config, self.precision.exact, cache.layers[index]
        num = qkv.shape[0]
        q_NxHxh = torch.empty(num, c.num_heads, c.head_dim)
        kernels.rotate_and_store(
            qkv.view(num, -1, c.head_dim).numpy(),
            layer.qk_norm_Axh,
            rotation_2xNxh,
            np.float32(c.rms_norm_eps),
            exact,
            batch.places_2xN,
            cache.stored_as,
            stored,
            q_NxHxh.numpy(),
        )
        out_NxHxh, single = torch.empty_like(q_NxHxh), batch.num_single
        if single:
            kernels.attend(
                q_NxHxh[:single].numpy(),
                stored,
                batch.places_2xN,
                cache.num_bytes,
                exact,
                out_NxHxh[:single].numpy(),
            )
        for first, stop in itertools.pairwise(batch.bounds):
            slot, start = batch.places_2xN[:, first].tolist()
            out_NxHxh[first:stop] = self._attend(q_NxHxh[first:stop], index, slot, start, cache)
        return out_NxHxh.flatten(1)

    def _attend(self, q_TxHxh: Tensor, index: int, slot: int, start: int, cache: KvCache) -> Tensor:
        """Consecutive tokens of one sequence over the cache of their slot; [T, H, h], rounded."""
        c, num, exact = self.config, len(q_TxHxh), self.precision.exact
        q = q_TxHxh.transpose(0, 1).reshape(c.num_kv_heads, -1, c.head_dim)
        keys, values = cache.read(index, slot, start + num)
        scores = torch.bmm(q, keys.transpose(1, 2))
        kernels.causal_softmax(scores.view(-1, num, start + num).numpy(), start, exact)
        out = torch.bmm(scores, values).view(-1, num, c.head_dim).transpose(0, 1)
        return out if exact else out.bfloat16()

    def _experts(self, layer: _Layer, x_NxD: Tensor, routed_NxR: np.ndarray | None) -> Tensor:
        """Router, top-k experts (written to `routed_NxR`), weighted sum; float32 [N, D]."""
        c, exact = self.config, self.precision.exact
        gates_NxR = np.empty((x_NxD.shape[0], c.num_experts_per_token), np.float32)
        places_NxR = np.empty(gates_NxR.shape, np.int64)
        rows, bounds = np.empty(gates_NxR.size, np.int64), np.empty(c.num_experts + 1, np.int64)
        logits_NxE = layer.router(x_NxD).numpy()
        kernels.route(logits_NxE, c.norm_topk_prob, gates_NxR, places_NxR, rows, bounds)
        if routed_NxR is not None:
            routed_NxR[:] = np.searchsorted(bounds, places_NxR, side="right") - 1
        gate_up = layer.gate_up(x_NxD, rows=rows, bounds=bounds)
        hidden_MxF = torch.empty(gate_up.shape[0], c.expert_size)
        kernels.swiglu(gate_up.numpy(), exact, hidden_MxF.numpy())
        y_MxD = layer.down(hidden_MxF, bounds=bounds).numpy()
        out_NxD = torch.empty_like(x_NxD)
        kernels.combine(y_MxD, gates_NxR, places_NxR, exact, out_NxD.numpy())
        return out_NxD
