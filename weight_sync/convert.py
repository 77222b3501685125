"""Carries out a conversion plan: mapped tensors in, a checkpoint directory out.

Owns the I/O around the encoders. Memory is bounded by the largest tensor (times a small constant,
times the threads), the result appears under its name all at once, and equal input gives equal
bytes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync import coding, durable, journal, layouts
from weight_sync.formats import bf16, finite
from weight_sync.layouts import Layout, Storage
from weight_sync.manifest import checkpoint_files
from weight_sync.plan import (
    Action,
    ConversionPlan,
    Kind,
    Region,
    plan_conversion,
    plan_decoding,
)
from weight_sync.safetensors_file import INDEX_NAME, Checkpoint, TensorSpec, Writer, has_frame

LEGACY_CONFIG_NAME = "hf_quant_config.json"  # ModelOpt's own, where config.json says nothing


class StoppedError(RuntimeError):
    """The caller asked the conversion to stop."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert; `threads` work on different tensors at once.

    recipe: of the encoder; None is the format's default. One of another format is passed over.
    layout: None is the format's default.
    dtype: of the matrices that a quantized source is decoded to, BF16 or F32.
    source_format: what the source must be in; None takes it as it is.
    """

    format: WeightFormat
    recipe: str | None = None
    layout: Layout | None = None
    ignore: tuple[str, ...] = ()
    threads: int = 1
    dtype: str = "BF16"
    source_format: WeightFormat | None = None


def plan_directory(source: Path, options: Options) -> tuple[ConversionPlan, Checkpoint]:
    """Reads config.json and the tensor headers, and plans. Raises BadInputError."""
    config, stored = read_config(source)
    found = stored.format if stored else WeightFormat.BF16
    if options.source_format not in (None, found):
        raise BadInputError(f"{source}", expected=options.source_format, found=found)
    checkpoint = Checkpoint(source)
    if stored is None:
        if options.dtype != "BF16":
            raise BadInputError(
                f"{source}",
                expected=f"a quantized source to decode to {options.dtype}",
                found=found,
            )
        plan = plan_conversion(
            config,
            checkpoint.tensors,
            format=options.format,
            recipe=options.recipe,
            layout=options.layout,
            ignore=options.ignore,
        )
        return plan, checkpoint
    if options.format != WeightFormat.BF16:
        raise BadInputError(
            f"{source}",
            expected=f"no quantization_config to convert to {options.format}; bf16 comes first",
            found=found,
        )
    if options.ignore:
        raise BadInputError(
            f"{source}", expected="a BF16 source for modules to ignore", found=found
        )
    return plan_decoding(config, checkpoint.tensors, stored=stored, dtype=options.dtype), checkpoint


def read_config(source: Path) -> tuple[dict[str, Any], Storage | None]:
    """A checkpoint's config.json, and how its matrices are quantized; None where they are not.

    Raises:
        BadInputError: not a checkpoint, not JSON, or a quantization that is none of ours.
    """
    checkpoint_files(source)  # is it a checkpoint at all
    config = _read_object(source / "config.json")
    given = config.get("quantization_config")
    if given is None:
        config.pop("quantization_config", None)
        if not (source / LEGACY_CONFIG_NAME).is_file():
            return config, None
        given = _read_object(source / LEGACY_CONFIG_NAME).get("quantization")
        given = {"quant_method": "modelopt", **given} if isinstance(given, dict) else given
    if not isinstance(given, dict):
        raise BadInputError(
            f"{source}", expected="a quantization_config that is an object", found=repr(given)
        )
    return config, layouts.detect(given)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise BadInputError(f"{path}", expected="JSON", found=str(error)) from None
    except RecursionError:
        raise BadInputError(f"{path}", expected="JSON", found="some that is too deep") from None
    if not isinstance(content, dict):
        raise BadInputError(f"{path}", expected="an object", found=type(content).__name__)
    return content


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
    _check_space(destination, plan)
    with durable.staging(destination) as staged:
        _write_small_files(source, staged, plan)
        with _writers(staged, plan.outputs) as writers:
            for _, num_bytes in _carry_out(plan.actions, checkpoint, writers, options.threads):
                on_progress(num_bytes)
                if should_stop():
                    raise StoppedError("conversion stopped")
        durable.move_into_place(staged, destination)
    return plan


def convert_resumably(
    source: Path,
    destination: Path,
    options: Options,
    *,
    on_start: Callable[[int], None] = lambda num_bytes: None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    check: Callable[[Path], None] = lambda directory: None,
) -> ConversionPlan:
    """As `convert_directory`, but what a kill interrupts the same call continues.

    `on_start` hears the source bytes that were done before; `check` may look at the result before
    it appears as `destination`, and prevents that when it raises. A journal is kept beside
    `destination` (`weight_sync.journal`); it stays when the disk is full or the process dies, and
    goes when the source is at fault. A run that ended just after the result appeared counts as
    interrupted too: the same call finds all done.

    Raises:
        BadInputError, OSError: as `convert_directory`.
        ConflictError: another process converts to `destination`.
    """
    check_destination(destination, resumes=True)
    plan, checkpoint = plan_directory(source, options)
    fingerprint = _fingerprint(source, options, plan)
    if _is_finished(destination, fingerprint, plan):
        on_start(sum(source_bytes(action, checkpoint) for action in plan.actions))
        check(destination)
        journal.discard(destination)
        return plan
    check_destination(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _check_space(destination, plan, held=journal.held_bytes(destination))

    def is_intact(staged: Path) -> bool:
        return _is_intact(staged, plan)

    with journal.resuming(destination, fingerprint, is_intact) as (staged, log):
        try:
            check_destination(destination)  # again, now that nobody else makes it
            _write_small_files(source, staged, plan)
            done = [action for i, action in enumerate(plan.actions) if i in log.done]
            left = {id(a): i for i, a in enumerate(plan.actions) if i not in log.done}
            on_start(sum(source_bytes(action, checkpoint) for action in done))
            with _writers(staged, plan.outputs, resumes=True) as writers:
                durable.flush(staged)  # the files are there before the journal speaks of them

                def flush() -> None:
                    for writer in writers.values():
                        writer.flush()

                actions = [action for action in plan.actions if id(action) in left]
                for action, num_bytes in _carry_out(actions, checkpoint, writers, options.threads):
                    log.add(left[id(action)], flush)
                    on_progress(num_bytes)
                log.flush(flush)
            check(staged)
            durable.move_into_place(staged, destination)
        except BadInputError:
            journal.discard(destination)
            raise
        journal.discard(destination)
    return plan


def _is_finished(destination: Path, fingerprint: str, plan: ConversionPlan) -> bool:
    """Whether `destination` is what this conversion made, and its journal alone is left over."""
    if not journal.has_moved(destination):
        return False
    done = journal.moved_actions(destination, fingerprint)
    return done == set(range(len(plan.actions))) and _is_intact(destination, plan)


def _is_intact(directory: Path, plan: ConversionPlan) -> bool:
    """Whether the files that a plan's tensors go to are there, as long as they were made."""
    by_file = _by_file(plan.outputs)
    return all(has_frame(directory / name, specs) for name, specs in by_file.items())


def _fingerprint(source: Path, options: Options, plan: ConversionPlan) -> str:
    """Of all that decides the bytes of the result: source files, options, plan, our version.

    Of safetensors files the header is read; for the rest vouch the size, which file it is, and when
    its content and its status changed: the last cannot be set back.
    """
    files = []
    for path in checkpoint_files(source):
        status = path.stat()
        with path.open("rb") as file:
            head = file.read(8)
            if path.suffix == ".safetensors":
                head += file.read(int.from_bytes(head, "little"))
            else:
                head += file.read()
        times = status.st_mtime_ns, status.st_ctime_ns
        identity = status.st_size, status.st_ino, *times
        files.append((path.name, *identity, durable.checksum(head)))
    chosen = {key: value for key, value in asdict(options).items() if key != "threads"}
    content = repr((layouts.software_version(), files, sorted(chosen.items()), plan))
    return durable.checksum(content.encode())


def check_destination(destination: Path, *, resumes: bool = False) -> None:
    """Raises BadInputError unless a new directory can have this name.

    With `resumes` it may be there if `convert_resumably` was ended before it had tidied up.
    """
    if resumes and journal.has_moved(destination):
        return
    if os.path.lexists(destination):
        link = destination.is_symlink() and not destination.exists()
        found = f"a link to {os.readlink(destination)}, where nothing is" if link else "it exists"
        raise BadInputError(f"{destination}", expected="a new directory", found=found)
    parent = next(path for path in destination.absolute().parents if os.path.lexists(path))
    if not parent.is_dir():
        found = "a file" if parent.is_file() else "something else"
        raise BadInputError(f"{parent}", expected="a directory", found=found)


def _check_space(destination: Path, plan: ConversionPlan, *, held: int = 0) -> None:
    """`held` bytes of an earlier attempt are overwritten or removed."""
    needed = sum(spec.num_bytes for spec in plan.outputs) - held
    free = shutil.disk_usage(destination.parent).free
    if needed > free:  # as the disk itself would say it, so that callers wait for room alike
        room = f"{needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{destination.parent} ({room})")


def _write_small_files(source: Path, staged: Path, plan: ConversionPlan) -> None:
    """config.json, the index if there are shards, and everything else as it was."""
    ours = ("config.json", INDEX_NAME, LEGACY_CONFIG_NAME)
    for path in checkpoint_files(source):
        if path.suffix != ".safetensors" and path.name not in ours:
            shutil.copyfile(path, staged / path.name)
    (staged / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
    weight_map = {spec.name: spec.file for spec in sorted(plan.outputs, key=lambda s: s.name)}
    if (source / INDEX_NAME).exists() or len(set(weight_map.values())) > 1:
        total = sum(spec.num_bytes for spec in plan.outputs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (staged / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


@contextlib.contextmanager
def _writers(
    staged: Path, specs: Sequence[TensorSpec], *, resumes: bool = False
) -> Iterator[dict[str, Writer]]:
    writers: dict[str, Writer] = {}
    try:
        for name, own in _by_file(specs).items():
            writers[name] = Writer(staged / name, own, resumes=resumes)
        yield writers
    finally:
        for writer in writers.values():
            writer.close()


def _by_file(specs: Sequence[TensorSpec]) -> dict[str, list[TensorSpec]]:
    by_file: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        by_file.setdefault(spec.file, []).append(spec)
    return by_file


def _carry_out(
    actions: Sequence[Action], checkpoint: Checkpoint, writers: dict[str, Writer], threads: int
) -> Iterator[tuple[Action, int]]:
    """Each action when its bytes are written, and the source bytes it took."""

    def run(action: Action) -> tuple[Action, int]:
        for specs, arrays in zip(action.outputs, make(action, checkpoint), strict=True):
            for spec, array in zip(specs, arrays, strict=True):
                writers[spec.file].write(spec.name, array)
        release(action, checkpoint)
        return action, source_bytes(action, checkpoint)

    if threads == 1:
        yield from map(run, actions)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="convert") as pool:
        # All are queued, so that threads go on while the consumer waits for the disk; what is
        # queued or done holds no arrays. When the consumer leaves, map cancels what has not begun.
        yield from pool.map(run, actions)


def source_bytes(action: Action, checkpoint: Checkpoint) -> int:
    return sum(_view(region, checkpoint).nbytes for region in action.sources)


def release(action: Action, checkpoint: Checkpoint) -> None:
    """The source's pages of an action may leave this process."""
    for region in action.sources:
        if region.expert is None:
            checkpoint.release(region.tensor)
            continue
        header = checkpoint.tensors[region.tensor]
        E, N, _ = header.shape
        row_bytes = (header.end - header.start) // (E * N)
        first, last = (row_bytes * (region.expert * N + row) for row in region.rows)
        checkpoint.release(region.tensor, first, last)


def _view(region: Region, checkpoint: Checkpoint) -> np.ndarray:
    array = checkpoint.array_of(region.tensor)
    return array if region.expert is None else array[region.expert, slice(*region.rows)]


def read_bits(region: Region, checkpoint: Checkpoint) -> np.ndarray:
    """A region as BF16 bits (uint16); float32 and float16 are rounded first."""
    array = _view(region, checkpoint)
    return array if array.dtype == np.uint16 else bf16.round_from(array)


def _read_values(region: Region, checkpoint: Checkpoint) -> np.ndarray:
    """A region as float32, or as the bits of what has no other numpy type (uint8)."""
    array = _view(region, checkpoint)
    if array.dtype == np.uint16:
        return bf16.widen(array)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _decode(action: Action, checkpoint: Checkpoint) -> np.ndarray:
    """The matrix of a DECODE action, float32 [N, K]."""
    assert action.storage is not None
    arrays = [_read_values(region, checkpoint) for region in action.sources]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return coding.decode(action.storage, arrays)


def make(action: Action, checkpoint: Checkpoint) -> list[tuple[np.ndarray, ...]]:
    """The arrays of each of an action's outputs, in the plan's order.

    Raises:
        BadInputError: NaN or infinity in the source or, of what is rounded, in the result; or what
            `coding.encode` refuses. The tensor is named.
    """
    if action.kind == Kind.DROP:
        return []
    if action.kind == Kind.COPY:
        for region in action.sources:
            header = checkpoint.tensors[region.tensor]
            finite.check(checkpoint.bytes_of(region.tensor), header.dtype, region.tensor)
        return [(checkpoint.bytes_of(region.tensor),) for region in action.sources]
    if action.kind == Kind.ENCODE:
        assert action.storage is not None
        matrices = [read_bits(region, checkpoint) for region in action.sources]
        return coding.encode(action.storage, matrices, [specs[0].name for specs in action.outputs])
    ((spec,),) = action.outputs
    if action.kind == Kind.CAST:
        (region,) = action.sources
        array = (read_bits if spec.dtype == "BF16" else _read_values)(region, checkpoint)
    else:
        array = _decode(action, checkpoint)
        array = bf16.round_from(array) if spec.dtype == "BF16" else array
    finite.check(array, spec.dtype, spec.name)
    return [(array,)]
