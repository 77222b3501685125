"""What an update costs the devices of a mesh, as tables, and whether it fits.

Owns the wording and the verdict. Must not compute sizes (`trainer_jax.budget`) or compile
(`trainer_jax.aot`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer_jax.aot import Ahead
from trainer_jax.budget import Setting, flops_per_token, memory, what_fits
from trainer_jax.config import RunConfig
from trainer_jax.hf import load_config
from trainer_jax.live import number
from trainer_jax.models.config import ModelConfig

USABLE = 0.92  # of a device's memory; the runtime, its collectives and fragments have the rest
_NOTE = (
    "Parameters, gradients, moments and traffic follow from the shardings. Temporaries as compiled"
    " are those of a CPU program, which holds bfloat16 arrays as float32 and fuses less: an upper"
    " bound for an accelerator. Traffic is what one device receives by ring algorithms; a loop"
    " counts as often as it turns, or once if only the run knows how often."
)


def gigabytes(size_bytes: float) -> str:
    """In units of 10^9 bytes, as accelerators are sold."""
    if 0 < size_bytes < 5e6:
        return f"{number(size_bytes / 1e3, 1)} kB"
    return f"{number(size_bytes / 1e9, 2)} GB"


def print_devices(
    console: Console, config: RunConfig, ahead: Ahead, memory_bytes: float | None
) -> None:
    """The tables, then the verdict for devices of `memory_bytes`, None if nobody said."""
    model, setting = load_config(config.model.checkpoint), Setting.of(config)
    console.print(_memory_table(model, setting, ahead))
    console.print(_flops_table(model, setting))
    console.print(_arrays_table(ahead))
    if any(program.traffic for program in (ahead.accumulate, ahead.apply)):
        console.print(_traffic_table(ahead))
    if ahead.num_replicated:
        console.print(
            f"{ahead.num_replicated} arrays are replicated on the way from one sharding to another:"
            " the partitioner knows no better way"
        )
    console.print(_NOTE)
    console.print(
        f"compiled for {setting.num_devices} virtual devices in {number(ahead.seconds, 2)} s"
        f" and {gigabytes(ahead.compiler_bytes)} of memory"
    )
    for sentence in verdict(config, model, ahead, memory_bytes):
        console.print(sentence, markup=False)


def _memory_table(model: ModelConfig, setting: Setting, ahead: Ahead) -> Table:
    table = Table("one device", "by shapes", "as compiled", title="memory")
    need = memory(model, setting)
    temporaries = max(ahead.accumulate.temporary_bytes, ahead.apply.temporary_bytes)
    for name, estimate, compiled in (
        ("parameters", need.parameters, gigabytes(ahead.parameter_bytes)),
        ("gradients", need.gradients, gigabytes(ahead.gradient_bytes)),
        ("optimizer", need.moments, gigabytes(ahead.moment_bytes)),
        ("activations", need.activations, "below"),
        ("temporaries", need.temporaries, gigabytes(temporaries)),
        ("at most", need.total, gigabytes(ahead.peak_bytes)),
    ):
        table.add_row(name, gigabytes(estimate), compiled)
    return table


def _flops_table(model: ModelConfig, setting: Setting) -> Table:
    flops = flops_per_token(model, setting.row_tokens)
    table = Table("per token", "GFLOP", title="arithmetic, by the model's formulas")
    for name, value in flops._asdict().items():
        table.add_row(name, number(value / 1e9, 3))
    table.add_row("forward, trained token", number(flops.total / 1e9, 3))
    table.add_row("update, trained token", number(flops.update(remat=setting.remat) / 1e9, 3))
    return table


def _arrays_table(ahead: Ahead) -> Table:
    table = Table("size", "shape on one device", "made by", title="largest arrays, as compiled")
    for array in ahead.accumulate.largest:
        shape = f"{array.shape}, bfloat16 on an accelerator" if array.widened else array.shape
        maker = _maker(array.op_name) or ("copied for CPU" if array.widened else "")
        table.add_row(gigabytes(array.size_bytes), shape, maker)
    return table


def _maker(op_name: str) -> str:
    """jit(f)/transpose(jvp())/while/body/closed_call/dot_general: dot_general, backward."""
    if not op_name:
        return ""
    if "rematted_computation" in op_name:
        when = "recomputed"
    else:
        when = "backward" if "transpose(" in op_name else "forward"
    parts = [part for part in op_name.split("/") if "(" not in part]
    return f"{parts[-1] if parts else op_name}, {when}"


def _traffic_table(ahead: Ahead) -> Table:
    table = Table("along", "by", "received", "calls", title="traffic of one device")
    for when, program in (
        ("per micro-batch", ahead.accumulate),
        ("per update", ahead.apply),
    ):
        for traffic in program.traffic:
            table.add_row(
                *(" and ".join(traffic.axes), traffic.kind),
                *(f"{gigabytes(traffic.received_bytes)} {when}", f"{traffic.num_calls:,}"),
            )
    return table


def verdict(
    config: RunConfig, model: ModelConfig, ahead: Ahead, memory_bytes: float | None
) -> list[str]:
    """Sentences: whether the rows of the run file fit, and the longest row that may come."""
    setting = Setting.of(config)
    estimate = memory(model, setting)
    if memory_bytes is None:
        return [f"a device needs {gigabytes(ahead.peak_bytes)}; --memory-gb says whether it fits"]
    limit = USABLE * memory_bytes
    temporaries = max(ahead.accumulate.temporary_bytes, ahead.apply.temporary_bytes)
    setting = replace(setting, scale=max(1.0, temporaries / estimate.transient))
    rows = f"{setting.micro_rows} rows of {setting.row_tokens:,} tokens"
    sentences = [_sentence(rows, ahead.peak_bytes, estimate.total, limit)]
    if ahead.peak_bytes > limit:
        sentences.append(_advice(model, setting, limit))
    longest = _longest(setting, config.sections)
    if longest:
        rows = f"{longest.micro_rows} rows of {longest.row_tokens:,} tokens, the longest allowed,"
        need, least = memory(model, longest), memory(model, replace(longest, scale=1.0))
        sentences.append(_sentence(rows, need.total, least.total, limit))
        if need.total > limit:
            key = "episodes.limits.max_context_tokens"
            sentences.append(_advice(model, longest, limit, row_key=key))
    return sentences


def _sentence(rows: str, need: float, least: float, limit: float) -> str:
    have = f"{gigabytes(limit)} usable"
    if need <= limit:
        return f"fits: {rows} need {gigabytes(need)} of {have}, {gigabytes(limit - need)} to spare"
    if least <= limit:
        return (
            f"fits perhaps: {rows} need {gigabytes(need)} as compiled for CPU,"
            f" {gigabytes(least)} by shapes, of {have}"
        )
    return (
        f"does not fit: {rows} need {gigabytes(least)} by shapes,"
        f" {gigabytes(need)} as compiled for CPU, of {have}"
    )


def _advice(
    model: ModelConfig, setting: Setting, limit: float, *, row_key: str = "train.row_tokens"
) -> str:
    change = what_fits(model, setting, limit, row_key=row_key)
    if change is None:
        return "no change of precision, optimizer, rows or mesh that was tried makes it fit"
    return f"it would with {' and '.join(change.words)}: {gigabytes(change.memory.total)}"


def _longest(setting: Setting, sections: dict[str, Any]) -> Setting | None:
    """The setting of the longest trajectory that episodes allow, if it is longer than a row.

    `trainer_jax.batch.pack` makes such rows: a power-of-two multiple, fewer of them.
    """
    limits = sections.get("episodes", {}).get("limits", {})
    longest = limits.get("max_context_tokens") or 0
    length = setting.row_tokens
    while length < longest:
        length *= 2
    if length == setting.row_tokens:
        return None
    shards = setting.num_shards
    rows = setting.micro_rows * setting.row_tokens // length // shards * shards
    return replace(setting, row_tokens=length, micro_rows=max(shards, rows))
