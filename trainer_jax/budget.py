"""What an update costs a device, from shapes alone: memory by purpose, arithmetic per token.

Owns the formulas, and the search for a change that makes a run fit. Must not compile or ask for
devices: `trainer_jax.aot` reads what the compiler makes of the same run.

Parameters, gradients and moments are exact. Activations and temporaries are an estimate of the live
arrays of the two programs; `Setting.scale` corrects these by what a compilation needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from contracts.errors import BadInputError
from trainer_jax.config import RunConfig
from trainer_jax.mesh import BATCH_AXES, parameter_spec
from trainer_jax.models.config import ATTENTION, DELTANET, ModelConfig
from trainer_jax.models.deltanet import CHUNK as DELTA_CHUNK
from trainer_jax.models.deltanet import GROUP as DELTA_GROUP
from trainer_jax.models.parameters import FLOAT32, STACKS, parameter_shapes

ADAM_MOMENTS = 2
MOST_CHANGES = 3  # at once
SHORTEST = 128  # tokens of a row
_NOT_MULTIPLIED = ("conv", "a_log", "dt_bias")  # beside norms
_EXPERTS = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The keys of a run that memory depends on."""

    mesh: dict[str, int]
    micro_rows: int
    row_tokens: int
    optimizer: str
    masters: str
    dtype: str
    remat: bool
    scale: float = 1.0  # of activations and temporaries

    @staticmethod
    def of(config: RunConfig) -> Setting:
        return Setting(
            mesh=config.mesh.model_dump(),
            micro_rows=config.train.micro_rows,
            row_tokens=config.train.row_tokens,
            optimizer=config.optimizer.name,
            masters=config.optimizer.masters,
            dtype=config.model.compute.dtype,
            remat=config.model.compute.remat,
        )

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def num_shards(self) -> int:
        return math.prod(self.mesh[axis] for axis in BATCH_AXES)

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on one device."""
        return self.micro_rows * self.row_tokens // (self.num_shards * self.mesh["context"])


class Memory(NamedTuple):
    """Bytes of one device."""

    parameters: float
    gradients: float
    moments: float
    activations: float  # layers' inputs that are kept, and what a layer's backward pass needs
    temporaries: float  # gathered matrices, gradients before they are added up, an update

    @property
    def transient(self) -> float:
        """What is there while a program runs."""
        return self.activations + self.temporaries

    @property
    def total(self) -> float:
        return sum(self)


def memory(model: ModelConfig, setting: Setting) -> Memory:
    """Raises BadInputError where a mesh axis does not divide a parameter or a row."""
    if setting.row_tokens % setting.mesh["context"]:
        raise BadInputError(
            "mesh axis context",
            expected=f"a divisor of {setting.row_tokens} (train.row_tokens)",
            found=setting.mesh["context"],
        )
    elements = {
        path: _local(path, shape, setting) for path, shape in parameter_shapes(model).items()
    }
    width = _width(setting.masters)
    parameters = sum(num * (4 if path[-1] in FLOAT32 else width) for path, num in elements.items())
    num = sum(elements.values())
    moments = ADAM_MOMENTS if setting.optimizer == "adamw" else 0
    activations, matrices = _forward_backward(model, setting)
    accumulate = activations, parameters + matrices  # the new gradients are as wide as parameters
    apply = 0.0, 4.0 * num
    transient = (setting.scale * size for size in max(accumulate, apply, key=sum))
    return Memory(parameters, 4.0 * num, 4.0 * moments * num, *transient)


def _width(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def _local(path: tuple[str, ...], shape: tuple[int, ...], setting: Setting) -> int:
    """Elements of a parameter on one device."""
    axes = parameter_spec(path)
    parts = [setting.mesh[axis] if axis else 1 for axis in axes]
    for axis, size, part in zip(axes, shape, parts, strict=True):
        if size % part:
            raise BadInputError(
                f"mesh axis {axis} ({'.'.join(path)})", expected=f"a divisor of {size}", found=part
            )
    return math.prod(shape) // math.prod(parts)


def _forward_backward(model: ModelConfig, setting: Setting) -> tuple[float, float]:
    """Bytes of activations, and of matrices as they are used, with their gradients."""
    width, tokens = _width(setting.dtype), setting.tokens
    gathered = replace(setting, mesh={**setting.mesh, "fsdp": 1})
    stacks: dict[str, float] = {}
    head = 0.0
    for path, shape in parameter_shapes(model).items():
        num = _local(path, shape, gathered)
        if path[0] in STACKS.values():
            stacks[path[0]] = stacks.get(path[0], 0.0) + num / shape[0]
        elif path[-1] in ("embed", "head"):
            head += num * (width + 4)  # the gathered matrix and its gradient
    working = {kind: tokens * _layer_bytes(model, setting, kind) for kind in set(model.kinds)}
    weights = max(stacks.values()) * (width + 4)  # a layer's, gathered, and their gradients
    saved = float(model.num_hidden_layers * tokens * model.hidden_size * width)
    if setting.remat:
        return saved + max(working.values()), head + weights
    return saved + sum(working[kind] for kind in model.kinds), head + weights


def _layer_bytes(model: ModelConfig, setting: Setting, kind: str) -> float:
    """Per token of a device, of the arrays of one layer that its backward pass needs."""
    width, D, tensor = _width(setting.dtype), model.hidden_size, setting.mesh["tensor"]
    if kind == ATTENTION:
        queries = model.num_attention_heads * model.head_dim
        keys = model.num_key_value_heads * model.head_dim
        gate = queries if model.gated_attention else 0
        mixer = (2 * (2 * queries + gate) * width + 2 * keys * (width + 4)) / tensor
    else:
        keys = model.linear_num_key_heads * model.linear_key_head_dim
        values = model.linear_num_value_heads * model.linear_value_head_dim
        states = values * model.linear_key_head_dim / (DELTA_CHUNK * DELTA_GROUP)
        mixer = (2 * keys + values) * (2 * width + 8) + values * (2 * width + 8) + 4 * states
    ffn = 3 * model.mlp_size * width / tensor + 2 * D * width
    if model.num_experts:
        # tokens of all devices along `expert` meet here, and there is room for all their choices
        shared = setting.mesh["expert"]
        slots = shared * model.num_experts_per_tok
        ffn += shared * D * (width + 4) + 3 * slots * D * width
    return mixer + ffn


class Flops(NamedTuple):
    """Of the forward pass, per token; a multiplication and an addition are two."""

    projections: float  # matrices that every token meets
    experts: float  # those chosen
    attention: float  # scores and sums, by causal halves of a row that is one segment
    deltanet: float  # the chunked rule
    head: float  # of a trained token

    @property
    def total(self) -> float:
        return sum(self)

    def update(self, *, remat: bool) -> float:
        """Forward and backward, with what rematerialization computes again."""
        layers = self.total - self.head
        return (4 if remat else 3) * layers + 3 * self.head


def flops_per_token(model: ModelConfig, row_tokens: int) -> Flops:
    """By the model's formulas, not by what a compiler counts: it counts a loop's body once."""
    projections = experts = 0.0
    for path, shape in parameter_shapes(model).items():
        if path[0] not in STACKS.values() or path[-1].endswith("norm"):
            continue
        if path[-1] in _EXPERTS:
            chosen = model.num_experts_per_tok / model.num_experts
            experts += 2 * math.prod(shape) * chosen
        elif path[-1] not in _NOT_MULTIPLIED:
            projections += 2 * math.prod(shape)
    width = model.num_attention_heads * model.head_dim
    attention = model.kinds.count(ATTENTION) * 4 * width * (row_tokens + 1) / 2
    C, A, W = DELTA_CHUNK, model.linear_key_head_dim, model.linear_value_head_dim
    J, H = model.linear_num_key_heads, model.linear_num_value_heads
    # scores of keys and of queries; the inverse by halves, its two products; three with the state,
    # one with the values written
    rule = J * 4 * C * A + H * (2 * C * C / 3 + 2 * C * (W + A) + 6 * A * W + 2 * C * W)
    deltanet = model.kinds.count(DELTANET) * rule
    head = 2.0 * model.vocab_size * model.hidden_size
    return Flops(projections, experts, attention, deltanet, head)


class Change(NamedTuple):
    """What to set in the run file, and what it comes to."""

    words: tuple[str, ...]
    memory: Memory


def what_fits(
    model: ModelConfig, setting: Setting, limit: float, *, row_key: str = "train.row_tokens"
) -> Change | None:
    """The fewest changes after which a device needs at most `limit` bytes, the mildest of them.

    `row_key`: the run file's key that the length of a row follows from.
    """
    tried: list[tuple[tuple[str, ...], Setting]] = [((), setting)]
    for _ in range(MOST_CHANGES):
        tried = [
            ((*words, more), changed)
            for words, earlier in tried
            for more, changed in _changes(earlier, row_key)
        ]
        for words, changed in tried:
            try:
                need = memory(model, changed)
            except BadInputError:  # an axis that does not divide
                continue
            if need.total <= limit:
                return Change(words, need)
    return None


def _changes(setting: Setting, row_key: str) -> Iterator[tuple[str, Setting]]:
    """Single changes, from what costs nothing to what changes the run."""
    mesh, shards = setting.mesh, setting.num_shards
    if not setting.remat:
        yield "model.compute.remat = true", replace(setting, remat=True)
    if setting.dtype == "float32":
        yield 'model.compute.dtype = "bfloat16"', replace(setting, dtype="bfloat16")
    if setting.micro_rows > shards:
        yield f"train.micro_rows = {shards}", replace(setting, micro_rows=shards)
    for source in ("data", "expert"):
        if mesh[source] > 1 and mesh[source] % 2 == 0:
            moved = {**mesh, source: mesh[source] // 2, "fsdp": mesh["fsdp"] * 2}
            words = f"mesh.{source} = {moved[source]}, mesh.fsdp = {moved['fsdp']}"
            yield words, replace(setting, mesh=moved)
    if mesh["fsdp"] % 2 == 0:  # the same devices; each has half the tokens of half as many rows
        moved = {**mesh, "fsdp": mesh["fsdp"] // 2, "context": mesh["context"] * 2}
        changed = replace(setting, mesh=moved)
        words = f"mesh.fsdp = {moved['fsdp']}, mesh.context = {moved['context']}"
        rows = max(changed.num_shards, setting.micro_rows // 2)
        yield f"{words}, train.micro_rows = {rows}", replace(changed, micro_rows=rows)
    if setting.masters == "float32":
        yield 'optimizer.masters = "bfloat16"', replace(setting, masters="bfloat16")
    for axis in ("context", "fsdp", "tensor"):
        for factor in (2, 4, 8):
            larger = {**mesh, axis: mesh[axis] * factor}
            changed = replace(setting, mesh=larger)
            rows = max(setting.micro_rows, changed.num_shards)
            words = f"mesh.{axis} = {larger[axis]} ({changed.num_devices} devices)"
            yield words, replace(changed, micro_rows=rows)
    if setting.optimizer == "adamw":
        yield 'optimizer.name = "sgd"', replace(setting, optimizer="sgd")
    for part in (2, 4, 8):
        if (tokens := setting.row_tokens // part) >= SHORTEST:
            yield f"{row_key} = {tokens}", replace(setting, row_tokens=tokens)
