"""Hugging Face checkpoints: directories with config.json and safetensors, in and out.

Owns the files, and that a directory appears whole or not at all. Names and orientation are those
of `trainer_jax.tensor_map`. Must not compute with the parameters, and must not know why somebody
exports (publishing belongs to weight_sync).

An export follows the checkpoint it came from: its prefix, its way to lay out experts, its dtypes,
the parts of its config.json and the tensors that training does not know (vision, multi-token
prediction).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from contracts.errors import BadInputError
from contracts.files import lock
from trainer_jax.cluster import Cluster
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.parameters import Params, nest, parameter_shapes
from trainer_jax.parts import Part, by_path, own_parts, regions
from trainer_jax.tensor_files import INDEX, TensorFiles
from trainer_jax.tensor_map import (
    EXPERTS,
    Audit,
    FileTensor,
    Header,
    Layout,
    Naming,
    audit,
    file_tensors,
)

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
DTYPE_NAMES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
_WORDS = {name: word for word, name in DTYPE_NAMES.items()}
_WRITERS = 4  # threads; casting and copying give way to one another
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    # what a model that also sees needs beside its tensors, which are carried through
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def load_checkpoint(directory: str | Path) -> tuple[ModelConfig, Params]:
    """The config and the parameters (numpy float32) of a checkpoint directory.

    Reads one model.safetensors or shards with an index; either prefix and expert layout; BF16, F16,
    F32. Vision and multi-token prediction are left where they are.

    Raises:
        BadInputError: no such checkpoint, another architecture, a missing or unexpected tensor, a
            wrong shape or dtype, a tokenizer with more ids than the model has rows.
    """
    directory = Path(directory)
    config = load_config(directory)
    check_tokenizer(directory, config)
    with contextlib.ExitStack() as stack:
        readers = _open_tensors(directory, stack)
        report = audit(config, _headers(readers))
        report.check(f"checkpoint {directory}")
        flat = {
            path: np.empty(shape, np.float32) for path, shape in parameter_shapes(config).items()
        }
        for tensor in report.tensors.values():
            value = readers[tensor.name].get_tensor(tensor.name).astype(np.float32)
            if tensor.name == "lm_head.weight" and config.tie_word_embeddings:
                if not np.array_equal(value, flat["embed",]):
                    raise BadInputError(
                        f"checkpoint {directory}, lm_head.weight",
                        expected="the embedding, as tie_word_embeddings says",
                        found="other values",
                    )
                continue
            for path, part in zip(tensor.paths, tensor.to_tree(value), strict=True):
                flat[path][tensor.index] = part
    return config, nest(flat)


def audit_checkpoint(directory: str | Path) -> Audit:
    """What the tensor map says of a checkpoint directory, from its files' headers alone.

    Raises:
        BadInputError: no such checkpoint, or another architecture.
    """
    directory = Path(directory)
    config = load_config(directory)
    with contextlib.ExitStack() as stack:
        return audit(config, _headers(_open_tensors(directory, stack)))


def _headers(readers: dict[str, Any]) -> dict[str, Header]:
    views = ((name, reader.get_slice(name)) for name, reader in readers.items())
    return {name: Header(tuple(view.get_shape()), view.get_dtype()) for name, view in views}


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
    index, single = directory / INDEX, directory / "model.safetensors"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = {directory / name for name in weight_map.values()}
            shard_of = {name: directory / shard for name, shard in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInputError(
                str(index), expected="JSON with a weight_map", found="something else"
            ) from None
    elif single.exists():
        files, shard_of = {single}, None
    else:
        raise BadInputError(
            f"checkpoint {directory}", expected=f"model.safetensors or {INDEX}", found="neither"
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
        for name in reader.keys():  # noqa: SIM118 (no dictionary)
            if shard_of is not None and shard_of.get(name) != path:
                where = f"in {shard_of[name].name}" if name in shard_of else "nowhere"
                raise BadInputError(
                    str(path),
                    expected=f"only tensors that {INDEX} says are there",
                    found=f"{name}, which it says is {where}",
                )
            readers[name] = reader
    for name in shard_of or ():
        if name not in readers:
            raise BadInputError(
                f"checkpoint {directory}",
                expected=f"{name} in a shard",
                found="it in the index only",
            )
    return readers


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The checkpoint that an export comes from and follows."""

    config: dict[str, Any]  # of config.json
    naming: Naming
    headers: dict[str, Header]
    carried: tuple[str, ...]
    readers: dict[str, Any]

    def dtype(self, name: str, wanted: str | None) -> str:
        """Of a tensor to be written: as wanted, but what the source holds in float32 although its
        matrices are narrower (decays, norms) stays so. By default that of the source.
        """
        usual = self.headers[f"{self.naming.prefix}embed_tokens.weight"]
        own = self.headers.get(name, usual)  # experts may be laid out anew
        if wanted is None or (own.dtype == "F32" != usual.dtype):
            return DTYPE_NAMES[own.dtype]
        return wanted


def _open_source(
    directory: str | Path | None, config: ModelConfig, stack: contextlib.ExitStack
) -> _Source | None:
    """The checkpoint there, if it is one of this very model; else only its tokenizer is wanted."""
    if directory is None or not (path := Path(directory) / "config.json").exists():
        return None
    try:
        if load_config(directory) != config:
            return None
    except BadInputError:
        return None
    if not any((path.parent / name).exists() for name in (INDEX, "model.safetensors")):
        return None
    readers = _open_tensors(path.parent, stack)
    headers = _headers(readers)
    report = audit(config, headers)
    report.check(f"checkpoint {directory}")
    return _Source(
        config=json.loads(path.read_bytes().decode()),
        naming=report.naming,
        headers=headers,
        carried=report.carried,
        readers=readers,
    )


def save_checkpoint(
    directory: str | Path,
    config: ModelConfig,
    params: Params | list[Part],
    *,
    layout: Layout | None = None,
    dtype: str | None = "bfloat16",
    copy_from: str | Path | None = None,
    max_shard_bytes: int = 4 << 30,
    cluster: Cluster | None = None,
) -> None:
    """Writes a checkpoint directory that transformers and SGLang load.

    `params` may be numpy or jax arrays, or this process's parts of them, which are released. Arrays
    on several devices are written part by part, never gathered; in a cluster every process calls
    this and writes what it holds. `copy_from` is a directory whose tokenizer files travel
    along. If it also holds a checkpoint of this config, the export follows it: prefix and
    config.json are its, as are layout and dtypes where None is given; vision and multi-token
    prediction are copied as they are. The directory is written beside its place, made durable and
    renamed: it appears whole or not at all. One that was there before is replaced.

    Args:
        layout: of the experts; None is the source's, or "per-expert".
        dtype: of the matrices; None is each tensor's in the source, or "bfloat16".

    Raises:
        BadInputError: an unknown layout or dtype, `copy_from` is no directory, or a broken one.
        OSError: the disk is full or the place not writable; nothing is left behind.
    """
    if layout not in (*EXPERTS, None):
        raise BadInputError("checkpoint layout", expected=" or ".join(EXPERTS), found=layout)
    if dtype not in (*DTYPES, None):
        raise BadInputError("checkpoint dtype", expected=" or ".join(DTYPES), found=dtype)
    if copy_from is not None and not Path(copy_from).is_dir():
        raise BadInputError("tokenizer to copy", expected="a directory", found=copy_from)

    parts = params if isinstance(params, list) else own_parts(params)
    with contextlib.ExitStack() as stack:
        source = _open_source(copy_from, config, stack)
        tensors = list(file_tensors(config, _naming(source, layout)))
        headers = {tensor.name: _header(tensor, source, dtype) for tensor in tensors}
        carried = {name: source.headers[name] for name in source.carried} if source else {}
        files = TensorFiles(headers | carried, max_shard_bytes)

        def lay_out(into: Path) -> None:
            for name in _TOKENIZER_FILES:
                if copy_from is not None and (file := Path(copy_from) / name).exists():
                    (into / name).write_bytes(file.read_bytes())
            text = json.dumps(_config_json(config, source, dtype), indent=2, sort_keys=True)
            (into / "config.json").write_text(text + "\n")
            files.create(into)
            with files.filling(into) as views:
                for name in carried:
                    assert source
                    views[name][...] = source.readers[name].get_tensor(name)

        def fill(into: Path) -> None:
            places = by_path(tensors)
            with files.filling(into) as views, ThreadPoolExecutor(_WRITERS) as pool:
                for _ in pool.map(lambda part: _write(part, places[part.path], views), parts):
                    pass

        write_directory(Path(directory), lay_out, fill, cluster=cluster or Cluster.alone())


def _write(
    part: Part, places: Sequence[tuple[FileTensor, int]], views: Mapping[str, np.ndarray]
) -> None:
    for tensor, index, values in regions(part, places):
        views[tensor.name][index] = values
    part.release()


def _naming(source: _Source | None, layout: Layout | None) -> Naming:
    naming = source.naming if source else Naming()
    return replace(naming, layout=layout or naming.layout)


def _header(tensor: FileTensor, source: _Source | None, dtype: str | None) -> Header:
    name = source.dtype(tensor.name, dtype) if source else dtype or "bfloat16"
    return Header(tensor.shape, _WORDS[name])


def _config_json(config: ModelConfig, source: _Source | None, dtype: str | None) -> dict[str, Any]:
    if source is None:
        return config.to_hf() | {"dtype": dtype or "bfloat16"}
    return source.config if dtype is None else _with_dtype(source.config, dtype)


def _with_dtype(data: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config, and those of its parts that name one, with another dtype."""
    parts = {
        key: _with_dtype(value, dtype)
        for key, value in data.items()
        if key.endswith("_config")
        and isinstance(value, dict)
        and ("dtype" in value or "torch_dtype" in value)
    }
    return data | parts | {"torch_dtype" if "torch_dtype" in data else "dtype": dtype}


def write_directory(
    target: Path,
    lay_out: Callable[[Path], None],
    fill: Callable[[Path], None],
    *,
    cluster: Cluster,
) -> None:
    """Makes a directory beside `target`, durable, and moves it there.

    The leader of a cluster runs `lay_out` in it, then all processes run `fill`. What was at
    `target` stays there unless all of this succeeds; what a killed attempt left is cleared away.

    Raises:
        BadInputError: another process is writing it.
    """
    staging = target.parent / f".{target.name}.staging"
    fresh, old = staging / "fresh", staging / "old"
    laid_out, filled = f"{target} laid out", f"{target} filled"
    if not cluster.is_leader:
        cluster.barrier(laid_out)
        fill(fresh)
        cluster.barrier(filled)
        return
    staging.mkdir(parents=True, exist_ok=True)
    with _only_writer(staging, target):
        try:
            if os.path.lexists(old) and not os.path.lexists(target):
                old.rename(target)  # it was killed between the two renames below
            for left in (old, fresh):
                shutil.rmtree(left, ignore_errors=True)
            fresh.mkdir()
            lay_out(fresh)
            cluster.barrier(laid_out)
            fill(fresh)
            cluster.barrier(filled)
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


@contextlib.contextmanager
def _only_writer(staging: Path, target: Path) -> Iterator[None]:
    try:
        held = lock(staging / "lock", wait_s=0)
    except BlockingIOError:
        raise BadInputError(
            str(target), expected="one process at a time that writes it", found="another one"
        ) from None
    with held:
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
