"""Carries out a conversion plan: mapped tensors in, a checkpoint directory out.

Owns the I/O around the encoders. Memory is bounded by the largest tensor (times a small constant,
times the threads), the result appears under its name all at once, and equal input gives equal
bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync import durable
from weight_sync.formats import bf16, fp8, nvfp4
from weight_sync.manifest import checkpoint_files
from weight_sync.plan import Action, ConversionPlan, Kind, Region, plan_conversion
from weight_sync.safetensors_file import INDEX_NAME, Checkpoint, Writer

_NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class StoppedError(RuntimeError):
    """The caller asked the conversion to stop; nothing was left behind."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert; `threads` work on different tensors at once."""

    format: WeightFormat
    recipe: nvfp4.Recipe = nvfp4.Recipe.MODELOPT
    ignore: tuple[str, ...] = ()
    threads: int = 1


def plan_directory(source: Path, options: Options) -> tuple[ConversionPlan, Checkpoint]:
    """Reads config.json and the tensor headers, and plans. Raises BadInputError."""
    checkpoint_files(source)  # is it a checkpoint at all
    path = source / "config.json"
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise BadInputError(f"{path}", expected="JSON", found=str(error)) from None
    if not isinstance(config, dict):
        raise BadInputError(f"{path}", expected="an object", found=type(config).__name__)
    checkpoint = Checkpoint(source)
    plan = plan_conversion(
        config,
        checkpoint.tensors,
        format=options.format,
        recipe=options.recipe,
        ignore=options.ignore,
    )
    return plan, checkpoint


def convert_directory(
    source: Path,
    destination: Path,
    options: Options,
    *,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ConversionPlan:
    """Converts a checkpoint directory; `on_progress` hears the source bytes of each action done.

    Raises:
        BadInputError: an unusable source (the tensor named), or `destination` exists.
        StoppedError: `should_stop` answered true.
        OSError: the disk is full, or similar. In every case nothing is left behind.
    """
    check_destination(destination)
    plan, checkpoint = plan_directory(source, options)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with durable.staging(destination) as staged:
        _check_space(staged, plan)
        _write_small_files(source, staged, plan)
        _write_tensors(
            plan, checkpoint, staged, options.threads, on_progress=on_progress, stop=should_stop
        )
        durable.move_into_place(staged, destination)
    return plan


def check_destination(destination: Path) -> None:
    """Raises BadInputError unless a new directory can have this name."""
    if os.path.lexists(destination):
        link = destination.is_symlink() and not destination.exists()
        found = f"a link to {os.readlink(destination)}, where nothing is" if link else "it exists"
        raise BadInputError(f"{destination}", expected="a new directory", found=found)
    parent = next(path for path in destination.absolute().parents if os.path.lexists(path))
    if not parent.is_dir():
        found = "a file" if parent.is_file() else "something else"
        raise BadInputError(f"{parent}", expected="a directory", found=found)


def _check_space(directory: Path, plan: ConversionPlan) -> None:
    needed = sum(spec.num_bytes for spec in plan.outputs)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise BadInputError(
            f"disk of {directory.parent}",
            expected=f"{needed / 1e6:.1f} MB free",
            found=f"{free / 1e6:.1f} MB",
        )


def _write_small_files(source: Path, staged: Path, plan: ConversionPlan) -> None:
    """config.json, the index if there are shards, and everything else as it was."""
    for path in checkpoint_files(source):
        if path.suffix != ".safetensors" and path.name not in ("config.json", INDEX_NAME):
            shutil.copyfile(path, staged / path.name)
    (staged / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
    weight_map = {spec.name: spec.file for spec in sorted(plan.outputs, key=lambda s: s.name)}
    if (source / INDEX_NAME).exists() or len(set(weight_map.values())) > 1:
        total = sum(spec.num_bytes for spec in plan.outputs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (staged / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _write_tensors(
    plan: ConversionPlan,
    checkpoint: Checkpoint,
    staged: Path,
    threads: int,
    *,
    on_progress: Callable[[int], None],
    stop: Callable[[], bool],
) -> None:
    by_file: dict[str, list] = {}
    for spec in plan.outputs:
        by_file.setdefault(spec.file, []).append(spec)
    writers: dict[str, Writer] = {}
    try:
        for name, specs in by_file.items():
            writers[name] = Writer(staged / name, specs)

        def run(action: Action) -> int:
            for specs, arrays in zip(action.outputs, encode(action, checkpoint), strict=True):
                for spec, array in zip(specs, arrays, strict=True):
                    writers[spec.file].write(spec.name, array)
            return source_bytes(action, checkpoint)

        for num_bytes in _in_threads(run, plan.actions, threads):
            on_progress(num_bytes)
            if stop():
                raise StoppedError("conversion stopped")
    finally:
        for writer in writers.values():
            writer.close()


def _in_threads(
    run: Callable[[Action], int], actions: Sequence[Action], threads: int
) -> Iterator[int]:
    """Results as they come, at most two actions per thread begun ahead of the consumer."""
    if threads == 1:
        yield from map(run, actions)
        return
    pending = set()
    with ThreadPoolExecutor(threads, thread_name_prefix="convert") as pool:
        try:
            for action in actions:
                pending.add(pool.submit(run, action))
                if len(pending) >= 2 * threads:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in pending)
        finally:
            pool.shutdown(cancel_futures=True)


def source_bytes(action: Action, checkpoint: Checkpoint) -> int:
    return sum(_view(region, checkpoint).nbytes for region in action.sources)


def _view(region: Region, checkpoint: Checkpoint) -> np.ndarray:
    header = checkpoint.tensors[region.tensor]
    data = checkpoint.bytes_of(region.tensor)
    if header.dtype not in _NUMPY:
        return data
    array = data.view(_NUMPY[header.dtype]).reshape(header.shape)
    return array if region.expert is None else array[region.expert, slice(*region.rows)]


def read_bits(region: Region, checkpoint: Checkpoint) -> np.ndarray:
    """A region as BF16 bits (uint16); float32 and float16 are rounded first."""
    array = _view(region, checkpoint)
    return array if array.dtype == np.uint16 else bf16.round_from(array)


def encode(action: Action, checkpoint: Checkpoint) -> list[tuple[np.ndarray, ...]]:
    """The arrays of each source's outputs, in the plan's order. Raises BadInputError."""
    names = [specs[0].name for specs in action.outputs]
    if action.kind == Kind.COPY:
        return [(checkpoint.bytes_of(region.tensor),) for region in action.sources]
    matrices = [read_bits(region, checkpoint) for region in action.sources]
    if action.kind == Kind.ROUND:
        results = [(bits,) for bits in matrices]
    elif action.kind == Kind.FP8_BLOCK:
        results = [
            tuple(fp8.encode(bits, name=name)) for bits, name in zip(matrices, names, strict=True)
        ]
    else:
        results = _encode_nvfp4(matrices, names, nvfp4.Recipe(action.recipe))
    for region in action.sources:
        if region.expert is None:
            checkpoint.release(region.tensor)
    return results


def _encode_nvfp4(
    matrices: Sequence[np.ndarray], names: Sequence[str], recipe: nvfp4.Recipe
) -> list[tuple[np.ndarray, ...]]:
    """All matrices under one global scale. The uncalibrated activation scale is 1, as miles has."""
    shared = max(bf16.amax(bits, name) for bits, name in zip(matrices, names, strict=True))
    results = []
    for bits, name in zip(matrices, names, strict=True):
        tensor = nvfp4.encode(bits, amax=shared, recipe=recipe, name=name)
        scale_2 = np.array(tensor.global_scale, np.float32)
        results.append((tensor.packed, tensor.block_scale, scale_2, np.ones((), np.float32)))
    return results
