"""Hugging Face checkpoints: directories with config.json and safetensors, in and out.

Owns the one map between names in files and paths in the parameter tree, used by both directions,
and that a directory appears whole or not at all. Must not compute with the parameters, and must
not know why somebody exports (publishing belongs to weight_sync).

Linear weights are [out, in] in files and [in, out] in the tree. Files hold the experts one by one
("per-expert", as on the hub) or stacked with gate and up concatenated ("fused").
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from contracts.errors import BadInputError
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.qwen3_moe import PARAMETERS, Params, nest, parameter_shapes

Layout = Literal["per-expert", "fused"]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
_DTYPE_NAMES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


@dataclass(frozen=True)
class Rule:
    """Tensors of a file named by `pattern`, one for every {layer} and {expert} in it.

    Each holds the leaves named by `leaves` (concatenated on the output dimension where there are
    several), with the indices of the pattern taken from their leading dimensions.
    """

    pattern: str
    leaves: tuple[str, ...]
    transposed: bool = False


_COMMON = (
    Rule("model.embed_tokens.weight", ("embed",)),
    Rule("model.layers.{layer}.input_layernorm.weight", ("attention_norm",)),
    Rule("model.layers.{layer}.self_attn.q_proj.weight", ("q",), transposed=True),
    Rule("model.layers.{layer}.self_attn.k_proj.weight", ("k",), transposed=True),
    Rule("model.layers.{layer}.self_attn.v_proj.weight", ("v",), transposed=True),
    Rule("model.layers.{layer}.self_attn.o_proj.weight", ("o",), transposed=True),
    Rule("model.layers.{layer}.self_attn.q_norm.weight", ("q_norm",)),
    Rule("model.layers.{layer}.self_attn.k_norm.weight", ("k_norm",)),
    Rule("model.layers.{layer}.post_attention_layernorm.weight", ("ffn_norm",)),
    Rule("model.layers.{layer}.mlp.gate.weight", ("router",), transposed=True),
    Rule("model.norm.weight", ("norm",)),
    Rule("lm_head.weight", ("head",)),
)
_EXPERT = "model.layers.{layer}.mlp.experts"
RULES: dict[Layout, tuple[Rule, ...]] = {
    "per-expert": (
        *_COMMON,
        Rule(f"{_EXPERT}.{{expert}}.gate_proj.weight", ("gate",), transposed=True),
        Rule(f"{_EXPERT}.{{expert}}.up_proj.weight", ("up",), transposed=True),
        Rule(f"{_EXPERT}.{{expert}}.down_proj.weight", ("down",), transposed=True),
    ),
    "fused": (
        *_COMMON,
        Rule(f"{_EXPERT}.gate_up_proj", ("gate", "up"), transposed=True),
        Rule(f"{_EXPERT}.down_proj", ("down",), transposed=True),
    ),
}
_PATH_OF_LEAF = {path[-1]: path for path in PARAMETERS}


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file: `shape` as in the file, and where its parts lie in the tree."""

    name: str
    shape: tuple[int, ...]
    paths: tuple[tuple[str, ...], ...]
    index: tuple[int, ...]
    transposed: bool


def file_tensors(config: ModelConfig, layout: Layout) -> Iterator[FileTensor]:
    """Every tensor that a checkpoint of this config and layout holds, in the order of the rules."""
    shapes = parameter_shapes(config)
    sizes = {"layer": config.num_hidden_layers, "expert": config.num_experts}
    for rule in RULES[layout]:
        paths = tuple(_PATH_OF_LEAF[leaf] for leaf in rule.leaves)
        if any(path not in shapes for path in paths):  # the head of a tied model
            continue
        stacked = [key for key in sizes if f"{{{key}}}" in rule.pattern]
        inner = [shapes[path][len(stacked) :] for path in paths]
        shape = (*inner[0][:-1], sum(part[-1] for part in inner))
        if rule.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        for index in product(*(range(sizes[key]) for key in stacked)):
            name = rule.pattern.format(**dict(zip(stacked, index, strict=True)))
            yield FileTensor(name, shape, paths, index, rule.transposed)


def load_checkpoint(directory: str | Path) -> tuple[ModelConfig, Params]:
    """The config and the parameters (numpy float32) of a Qwen3-MoE checkpoint directory.

    Reads one model.safetensors or shards with an index; either expert layout; BF16, F16, F32.

    Raises:
        BadInputError: no such checkpoint, another architecture, a missing or unexpected tensor, a
            wrong shape or dtype, a tokenizer with more ids than the model has rows.
    """
    directory = Path(directory)
    config = load_config(directory)
    check_tokenizer(directory, config)
    with contextlib.ExitStack() as stack:
        readers = _open_tensors(directory, stack)
        layout: Layout = (
            "fused" if any(name.endswith(".gate_up_proj") for name in readers) else "per-expert"
        )
        expected = {tensor.name: tensor for tensor in file_tensors(config, layout)}
        _check_names(directory, expected, readers, tied=config.tie_word_embeddings)
        flat = {
            path: np.empty(shape, np.float32) for path, shape in parameter_shapes(config).items()
        }
        for tensor in expected.values():
            value = _read(readers[tensor.name], tensor)
            value = value.swapaxes(-1, -2) if tensor.transposed else value
            bounds = np.cumsum([flat[path].shape[-1] for path in tensor.paths])[:-1]
            for path, part in zip(tensor.paths, np.split(value, bounds, axis=-1), strict=True):
                flat[path][tensor.index] = part
        if config.tie_word_embeddings and "lm_head.weight" in readers:
            head = readers["lm_head.weight"].get_tensor("lm_head.weight")
            if not np.array_equal(head.astype(np.float32), flat["embed",]):
                raise BadInputError(
                    f"checkpoint {directory}, lm_head.weight",
                    expected="the embedding, as tie_word_embeddings says",
                    found="other values",
                )
    return config, nest(flat)


def load_config(directory: str | Path) -> ModelConfig:
    """The config alone. Raises BadInputError as `load_checkpoint` does."""
    path = Path(directory) / "config.json"
    try:
        return ModelConfig.from_hf(json.loads(path.read_bytes().decode()))
    except (FileNotFoundError, NotADirectoryError):
        raise BadInputError(
            f"checkpoint {directory}", expected="a directory with config.json", found="none there"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(str(path), expected="JSON", found=str(error)) from None


def check_tokenizer(directory: str | Path, config: ModelConfig) -> None:
    """Raises BadInputError if a tokenizer.json there has an id that the model has no row for."""
    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        return
    try:
        data = json.loads(path.read_bytes().decode())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(str(path), expected="JSON", found=str(error)) from None
    try:
        vocabulary = data.get("model", {}).get("vocab", {})
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        ids += [token["id"] for token in data.get("added_tokens") or ()]
        largest = 0 + max(ids, default=-1)
    except (AttributeError, KeyError, TypeError) as error:
        raise BadInputError(str(path), expected="a tokenizer", found=repr(error)) from None
    if largest >= config.vocab_size:
        raise BadInputError(
            f"tokenizer {path}",
            expected=f"ids below the model's vocab_size ({config.vocab_size})",
            found=largest,
        )


def _open_tensors(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> open reader of the file that holds it."""
    index, single = directory / _INDEX, directory / "model.safetensors"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = {directory / name for name in weight_map.values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInputError(
                str(index), expected="JSON with a weight_map", found="something else"
            ) from None
    elif single.exists():
        weight_map, files = None, {single}
    else:
        raise BadInputError(
            f"checkpoint {directory}", expected=f"model.safetensors or {_INDEX}", found="neither"
        )
    readers: dict[str, Any] = {}
    for path in sorted(files):
        try:
            reader = stack.enter_context(safetensors.safe_open(path, framework="np"))
        except FileNotFoundError:
            raise BadInputError(
                f"checkpoint {directory}", expected=f"the shard {path.name}", found="no such file"
            ) from None
        except safetensors.SafetensorError as error:
            raise BadInputError(str(path), expected="safetensors", found=str(error)) from None
        readers |= dict.fromkeys(reader.keys(), reader)
    for name in weight_map or ():
        if name not in readers:
            raise BadInputError(
                f"checkpoint {directory}",
                expected=f"{name} in a shard",
                found="it in the index only",
            )
    return readers


def _check_names(directory: Path, expected, found, *, tied: bool) -> None:
    rule = f"checkpoint {directory}, tensors"
    if missing := [name for name in expected if name not in found]:
        raise BadInputError(
            rule, expected=missing[0], found=f"no such tensor ({len(missing)} missing in all)"
        )
    allowed = {"lm_head.weight"} if tied else set()
    if unexpected := [name for name in found if name not in expected and name not in allowed]:
        raise BadInputError(
            rule,
            expected=f"the {len(expected)} tensors of a qwen3_moe",
            found=f"also {unexpected[0]} ({len(unexpected)} unexpected in all)",
        )


def _read(reader: Any, tensor: FileTensor) -> np.ndarray:
    view = reader.get_slice(tensor.name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if shape != tensor.shape:
        raise BadInputError(f"shape of {tensor.name}", expected=tensor.shape, found=shape)
    if dtype not in _DTYPE_NAMES:
        raise BadInputError(
            f"dtype of {tensor.name}", expected=", ".join(_DTYPE_NAMES), found=dtype
        )
    return reader.get_tensor(tensor.name).astype(np.float32)


def save_checkpoint(
    directory: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    layout: Layout = "per-expert",
    dtype: str = "bfloat16",
    copy_from: str | Path | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Writes a checkpoint directory that transformers and SGLang load.

    `params` may be numpy or jax arrays. Files of the tokenizer travel along from `copy_from`. The
    directory is written beside its place, made durable and renamed: it appears whole or not at
    all. One that was there before is replaced.

    Raises:
        BadInputError: an unknown layout or dtype, `copy_from` is no directory.
        OSError: the disk is full or the place not writable; nothing is left behind.
    """
    if layout not in RULES:
        raise BadInputError("checkpoint layout", expected=" or ".join(RULES), found=layout)
    if dtype not in DTYPES:
        raise BadInputError("checkpoint dtype", expected=" or ".join(DTYPES), found=dtype)
    if copy_from is not None and not Path(copy_from).is_dir():
        raise BadInputError("tokenizer to copy", expected="a directory", found=copy_from)

    def write(into: Path) -> None:
        for name in _TOKENIZER_FILES:
            if copy_from is not None and (source := Path(copy_from) / name).exists():
                (into / name).write_bytes(source.read_bytes())
        text = json.dumps(config.to_hf() | {"dtype": dtype}, indent=2, sort_keys=True)
        (into / "config.json").write_text(text + "\n")
        _write_tensors(into, config, params, layout, dtype, max_shard_bytes)

    write_directory(Path(directory), write)


def _write_tensors(
    into: Path, config: ModelConfig, params: Params, layout: Layout, dtype: str, max_bytes: int
) -> None:
    shards: list[list[FileTensor]] = [[]]
    total_bytes = shard_bytes = 0
    for tensor in file_tensors(config, layout):
        num_bytes = int(np.prod(tensor.shape)) * np.dtype(DTYPES[dtype]).itemsize
        if shards[-1] and shard_bytes + num_bytes > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor)
        shard_bytes += num_bytes
        total_bytes += num_bytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        values = {tensor.name: _gather(params, tensor, DTYPES[dtype]) for tensor in shard}
        # not save_file: a full disk must be an OSError
        (into / file).write_bytes(safetensors.numpy.save(values, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(values, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (into / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _gather(params: Params, tensor: FileTensor, dtype: Any) -> np.ndarray:
    """The tensor's values as its file holds them, contiguous."""
    parts = []
    for path in tensor.paths:
        node: Any = params
        for key in path:
            node = node[key]
        parts.append(np.asarray(node[tensor.index]))
    value = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    value = value.swapaxes(-1, -2) if tensor.transposed else value
    assert value.shape == tensor.shape, (tensor.name, value.shape, tensor.shape)
    return np.ascontiguousarray(value.astype(dtype))


def write_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Runs `write` in a new directory beside `target`, makes it durable and moves it there.

    What was at `target` stays there unless all of this succeeds.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    fresh, old = staging / "fresh", staging / "old"
    try:
        fresh.mkdir()
        write(fresh)
        for path in (*fresh.iterdir(), fresh):
            _sync(path)
        try:
            if os.path.lexists(target):
                target.rename(old)
            fresh.rename(target)
        except BaseException:
            if os.path.lexists(old):
                old.rename(target)
            raise
        _sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
