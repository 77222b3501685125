"""The one map between tensors of Hugging Face checkpoints and parameters of the tree.

Owns names, shapes and orientation, for reading, writing, publishing and checking alike; a plain
table and pure functions of names. Must not open files.

Linear weights are [out, in] in files and [in, out] in the tree. What differs between checkpoints
of one model is its `Naming`: the prefix of the text model (a vision-language wrapper has
`model.language_model.`), whether the experts lie one by one ("per-expert", as most on the hub) or
stacked with gate and up concatenated ("fused", as Qwen3.6), and whether a tied head is repeated.
Vision and multi-token prediction are not trained: `is_carried` tells their tensors, which an
export copies from its source as they are, in whatever layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from contracts.errors import BadInputError
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.parameters import STACKS, Path, parameter_shapes
from trainer_jax.tensor_files import Header

Layout = Literal["per-expert", "fused"]
FLOAT_DTYPES = ("BF16", "F32", "F16")  # of a parameter, as safetensors calls them
_PREFIXES = ("model.language_model.", "model.")  # the longer one first
_CARRIED = ("mtp.", "model.visual.")
_HEAD = "lm_head.weight"
_FUSED = ".mlp.experts.gate_up_proj"


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a checkpoint names the parameters of its model."""

    prefix: str = "model."
    layout: Layout = "per-expert"
    repeats_head: bool = False  # an lm_head.weight although it is tied to the embedding


def naming_of(names: Collection[str]) -> Naming:
    """The naming of a checkpoint that holds tensors of these names."""
    text = [name for name in names if not is_carried(name)]
    prefix = next((p for p in _PREFIXES if any(name.startswith(p) for name in text)), "model.")
    fused = any(name.endswith(_FUSED) for name in text)
    layout: Layout = "fused" if fused else "per-expert"
    return Naming(prefix=prefix, layout=layout, repeats_head=_HEAD in names)


def is_carried(name: str) -> bool:
    """Whether a tensor belongs to vision or multi-token prediction."""
    return name.startswith(_CARRIED)


@dataclass(frozen=True)
class Rule:
    """Tensors of a file named by `pattern`, one for every {layer} and {expert} in it.

    Each holds the leaves named by `leaves` (concatenated on the output dimension where there are
    several). In a file two dimensions may be exchanged, and then one of size 1 be added at `unit`.
    """

    pattern: str
    leaves: tuple[str, ...]
    transposed: bool = False
    unit: int | None = None


_LAYER = "{prefix}layers.{layer}."


def _linear(module: str, leaf: str) -> Rule:
    return Rule(f"{_LAYER}{module}.weight", (leaf,), transposed=True)


_COMMON = (
    Rule("{prefix}embed_tokens.weight", ("embed",)),
    Rule(_LAYER + "input_layernorm.weight", ("attention_norm",)),
    _linear("self_attn.q_proj", "q"),
    _linear("self_attn.k_proj", "k"),
    _linear("self_attn.v_proj", "v"),
    _linear("self_attn.o_proj", "o"),
    Rule(_LAYER + "self_attn.q_norm.weight", ("q_norm",)),
    Rule(_LAYER + "self_attn.k_norm.weight", ("k_norm",)),
    Rule(_LAYER + "input_layernorm.weight", ("delta_norm",)),
    _linear("linear_attn.in_proj_qkv", "qkv"),
    _linear("linear_attn.in_proj_z", "z"),
    _linear("linear_attn.in_proj_b", "b"),
    _linear("linear_attn.in_proj_a", "a"),
    Rule(_LAYER + "linear_attn.conv1d.weight", ("conv",), transposed=True, unit=1),
    Rule(_LAYER + "linear_attn.A_log", ("a_log",)),
    Rule(_LAYER + "linear_attn.dt_bias", ("dt_bias",)),
    Rule(_LAYER + "linear_attn.norm.weight", ("out_norm",)),
    _linear("linear_attn.out_proj", "out"),
    Rule(_LAYER + "post_attention_layernorm.weight", ("ffn_norm",)),
    Rule("{prefix}norm.weight", ("norm",)),
    Rule(_HEAD, ("head",)),
)
_ROUTER = _linear("mlp.gate", "router")
EXPERTS: dict[Layout, tuple[Rule, ...]] = {
    "per-expert": (
        _ROUTER,
        _linear("mlp.experts.{expert}.gate_proj", "gate"),
        _linear("mlp.experts.{expert}.up_proj", "up"),
        _linear("mlp.experts.{expert}.down_proj", "down"),
    ),
    "fused": (
        _ROUTER,
        Rule(_LAYER + "mlp.experts.gate_up_proj", ("gate", "up"), transposed=True),
        Rule(_LAYER + "mlp.experts.down_proj", ("down",), transposed=True),
    ),
}
# Mixtral's, one by one; fused, as transformers has them in memory, they have the names above
_MIXTRAL = (
    _linear("block_sparse_moe.gate", "router"),
    _linear("block_sparse_moe.experts.{expert}.w1", "gate"),
    _linear("block_sparse_moe.experts.{expert}.w3", "up"),
    _linear("block_sparse_moe.experts.{expert}.w2", "down"),
)
# the network that sees every token: of a dense model, or beside the experts
_DENSE = tuple(_linear(f"mlp.{name}_proj", f"mlp_{name}") for name in ("gate", "up", "down"))
_SHARED = (
    *(_linear(f"mlp.shared_expert.{name}_proj", f"mlp_{name}") for name in ("gate", "up", "down")),
    Rule(_LAYER + "mlp.shared_expert_gate.weight", ("mlp_router",), unit=0),
)


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file: `shape` as in the file, and where its parts lie in the tree."""

    name: str
    shape: tuple[int, ...]
    paths: tuple[Path, ...]
    index: tuple[int, ...]  # of the leading dimensions of each part
    transposed: bool
    unit: int | None

    def to_tree(self, value: np.ndarray) -> list[np.ndarray]:
        """Its parts of the tree, of equal width."""
        value = value if self.unit is None else value.squeeze(self.unit)
        value = value.swapaxes(-1, -2) if self.transposed else value
        return np.split(value, len(self.paths), axis=-1)


def _rules(config: ModelConfig, layout: Layout) -> tuple[Rule, ...]:
    is_mixtral = config.model_type == "mixtral" and layout == "per-expert"
    experts = _MIXTRAL if is_mixtral else EXPERTS[layout]
    return (*_COMMON, *experts, *(_SHARED if config.num_experts else _DENSE))


def file_tensors(config: ModelConfig, naming: Naming) -> Iterator[FileTensor]:
    """Every tensor that a checkpoint of this config and naming holds, in the order of the rules."""
    shapes = parameter_shapes(config)
    stacks = [STACKS[kind] for kind in config.kinds]
    places = [(stack, stacks[:layer].count(stack)) for layer, stack in enumerate(stacks)]
    for rule in _rules(config, naming.layout):
        experts = range(config.num_experts if "{expert}" in rule.pattern else 1)
        layers = range(len(places) if "{layer}" in rule.pattern else 1)
        for layer, expert in product(layers, experts):
            stack, place = places[layer]
            is_stacked = "{layer}" in rule.pattern
            paths = tuple((stack, leaf) if is_stacked else (leaf,) for leaf in rule.leaves)
            if paths == (("head",),) and config.tie_word_embeddings and naming.repeats_head:
                paths = (("embed",),)
            if any(path not in shapes for path in paths):
                continue  # of another kind of layer, or the head of a tied model
            index = (place, expert)[: is_stacked + ("{expert}" in rule.pattern)]
            name = rule.pattern.format(prefix=naming.prefix, layer=layer, expert=expert)
            inner = [shapes[path][len(index) :] for path in paths]
            shape = [*inner[0][:-1], sum(part[-1] for part in inner)]
            if rule.transposed:
                shape[-2:] = shape[:-3:-1]
            if rule.unit is not None:
                shape.insert(rule.unit, 1)
            yield FileTensor(name, tuple(shape), paths, index, rule.transposed, rule.unit)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A checkpoint's tensors beside those of the map. `check` refuses what does not fit."""

    config: ModelConfig
    naming: Naming
    tensors: dict[str, FileTensor]  # those expected, by name
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[BadInputError, ...]  # tensors of another shape or dtype
    carried: tuple[str, ...]  # of vision and multi-token prediction
    num_parameters: int  # of the text model; a tied head counts once

    def check(self, subject: str) -> None:
        """Raises BadInputError for the first thing wrong."""
        if self.missing:
            found = f"no such tensor ({len(self.missing)} missing in all)"
            raise BadInputError(f"{subject}, tensors", expected=self.missing[0], found=found)
        if self.unexpected:
            raise BadInputError(
                f"{subject}, tensors",
                expected=f"the {len(self.tensors)} tensors of a {self.config.model_type}",
                found=f"also {self.unexpected[0]} ({len(self.unexpected)} unexpected in all)",
            )
        if self.wrong:
            raise self.wrong[0]


def audit(config: ModelConfig, found: Mapping[str, Header]) -> Audit:
    """Compares the headers of a checkpoint with the map."""
    naming = naming_of(found)
    tensors = {tensor.name: tensor for tensor in file_tensors(config, naming)}
    has_more = config.model_type == "qwen3_5_moe"  # the others have nothing to carry
    carried = tuple(name for name in found if has_more and is_carried(name))
    known = {*tensors, *carried}
    wrong = [
        _fault(name, found[name], tensors[name].shape if name in tensors else found[name].shape)
        for name in (*tensors, *carried)
        if name in found
    ]
    repeated = {_HEAD} if config.tie_word_embeddings else set()
    return Audit(
        config=config,
        naming=naming,
        tensors=tensors,
        missing=tuple(name for name in tensors if name not in found),
        unexpected=tuple(name for name in found if name not in known),
        wrong=tuple(fault for fault in wrong if fault),
        carried=carried,
        num_parameters=sum(
            int(np.prod(found[name].shape))
            for name in tensors
            if name in found and name not in repeated
        ),
    )


def _fault(name: str, found: Header, shape: tuple[int, ...]) -> BadInputError | None:
    if found.shape != shape:
        return BadInputError(f"shape of {name}", expected=shape, found=found.shape)
    if found.dtype not in FLOAT_DTYPES:
        expected = ", ".join(FLOAT_DTYPES)
        return BadInputError(f"dtype of {name}", expected=expected, found=found.dtype)
    return None
