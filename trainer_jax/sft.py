"""Supervised warm start: next-token training on demonstrations, from scratch or from a checkpoint.

Owns the small sibling of the RL step: packing demonstrations into rows, cross-entropy, the loop.
Must not know where demonstrations come from: it reads token rows and a mask from an .npz file.

Format of the .npz: `tokens` int32 [sum of lengths], `offsets` int64 [episodes + 1], `loss_mask`
bool like `tokens` (True where a policy would have drawn the token).
"""

from __future__ import annotations

import functools
import math
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from contracts.errors import BadInputError
from contracts.runfile import Section
from trainer_jax.hf import check_tokenizer, load_checkpoint, save_checkpoint
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import decays, init_params


class SftConfig(Section):
    """The [sft] section."""

    demonstrations: Path
    tokenizer: Path  # directory whose tokenizer files travel into `out`
    out: Path
    checkpoint: Path | None = None  # start here; else from scratch with `shape`
    shape: dict[str, Any] = Field(default_factory=dict)  # Hugging Face config.json keys
    steps: int = Field(gt=0)
    rows_per_step: int = Field(default=8, gt=0)
    row_tokens: int = Field(default=1024, gt=0)
    lr: float = Field(default=3e-3, gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=100, ge=0)
    weight_decay: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    context_weight: float = Field(default=0.1, ge=0, lt=1)  # of tokens the policy did not draw
    seed: int = 0
    log_every: int = Field(default=50, gt=0)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Packed rows; segment 0 is padding."""

    tokens_BxT: np.ndarray
    positions_BxT: np.ndarray
    segments_BxT: np.ndarray
    weight_BxT: np.ndarray  # of predicting this token from the one before it


def read_demonstrations(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`tokens`, `offsets`, `loss_mask` of the file; BadInputError when it isn't one."""
    wrong = functools.partial(BadInputError, f"demonstrations {path}")
    try:
        with np.load(path) as data:
            found = sorted(data)
            arrays = {name: data[name] for name in found}
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile):
        raise wrong(expected="an .npz file", found="something else") from None
    if missing := {"tokens", "offsets", "loss_mask"} - set(arrays):
        raise wrong(expected=f"the array {min(missing)}", found=found)
    tokens, offsets, mask = (arrays[name] for name in ("tokens", "offsets", "loss_mask"))
    if mask.shape != tokens.shape:
        raise wrong(expected=f"loss_mask like tokens {tokens.shape}", found=mask.shape)
    whole = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(tokens)
    if not whole or (np.diff(offsets) < 1).any():
        raise wrong(
            expected=f"offsets that rise from 0 to {len(tokens)}, one episode at least",
            found=f"{len(offsets)} offsets that don't",
        )
    return tokens, offsets, mask.astype(bool)


def pack_rows(
    demonstrations: tuple[np.ndarray, np.ndarray, np.ndarray],
    order: np.ndarray,
    *,
    row_tokens: int,
    context_weight: float,
) -> Rows:
    """Fills rows of `row_tokens` with whole episodes in the given order (next fit)."""
    tokens, offsets, mask = demonstrations
    lengths = np.diff(offsets)
    if lengths.max() > row_tokens:
        raise BadInputError(
            "row_tokens",
            expected=f"at least the longest episode, {lengths.max()}",
            found=row_tokens,
        )
    row, used, segment = 0, 0, 0
    places = []  # episode -> (row, start, segment)
    for episode in order:
        if used + lengths[episode] > row_tokens:
            row, used, segment = row + 1, 0, 0
        segment += 1
        places.append((row, used, segment))
        used += lengths[episode]
    shape = (row + 1, row_tokens)
    rows = Rows(
        tokens_BxT=np.zeros(shape, np.int32),
        positions_BxT=np.zeros(shape, np.int32),
        segments_BxT=np.zeros(shape, np.int32),
        weight_BxT=np.zeros(shape, np.float32),
    )
    for episode, (row, start, segment) in zip(order, places, strict=True):
        source = slice(offsets[episode], offsets[episode + 1])
        target = slice(start, start + lengths[episode])
        rows.tokens_BxT[row, target] = tokens[source]
        rows.positions_BxT[row, target] = np.arange(int(lengths[episode]))
        rows.segments_BxT[row, target] = segment
        weight = np.where(mask[source], 1.0, context_weight)
        weight[0] = 0  # nothing predicts the first token
        rows.weight_BxT[row, target] = weight
    return rows


def batches(
    demonstrations: tuple[np.ndarray, np.ndarray, np.ndarray], config: SftConfig
) -> Iterator[tuple[np.ndarray, ...]]:
    """Endless batches of `rows_per_step` rows, reshuffled each epoch."""
    rng = np.random.default_rng(config.seed)
    num_episodes = len(demonstrations[1]) - 1
    while True:
        rows = pack_rows(
            demonstrations,
            rng.permutation(num_episodes),
            row_tokens=config.row_tokens,
            context_weight=config.context_weight,
        )
        count = len(rows.tokens_BxT) // config.rows_per_step
        if not count:
            raise BadInputError(
                "demonstrations",
                expected=f"enough for {config.rows_per_step} rows of {config.row_tokens} tokens",
                found=f"{len(rows.tokens_BxT)} rows",
            )
        for i in range(count):
            part = slice(i * config.rows_per_step, (i + 1) * config.rows_per_step)
            yield (
                rows.tokens_BxT[part],
                rows.positions_BxT[part],
                rows.segments_BxT[part],
                rows.weight_BxT[part],
            )


def make_sft_step(model: ModelConfig, optimizer: optax.GradientTransformation, compute):
    """The jitted step (params, opt_state, batch) -> (params, opt_state, metrics)."""

    def loss_of(params, tokens_BxT, positions_BxT, segments_BxT, weight_BxT):
        hidden_BxTxD = hidden_states(
            params, model, tokens_BxT, positions_BxT, segments_BxT, compute=compute
        )
        logits = jnp.einsum("btd,vd->btv", hidden_BxTxD[:, :-1], head_weight(params))
        logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        target_BxT = tokens_BxT[:, 1:]
        target_logp = jnp.take_along_axis(logp, target_BxT[..., None], axis=-1)[..., 0]
        weight = weight_BxT[:, 1:]
        drawn = jnp.where(weight == 1.0, 1.0, 0.0)
        metrics = {
            "loss": -(target_logp * drawn).sum() / jnp.maximum(drawn.sum(), 1.0),
            "accuracy": jnp.where(logp.argmax(-1) == target_BxT, drawn, 0.0).sum()
            / jnp.maximum(drawn.sum(), 1.0),
        }
        return -(target_logp * weight).sum() / jnp.maximum(weight.sum(), 1.0), metrics

    def step(params, opt_state, batch):
        (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(params, *batch)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    return jax.jit(step, donate_argnums=(0, 1))


def _check_out(out: Path) -> None:
    """Only a checkpoint is replaced."""
    if out.exists() and not (out / "config.json").is_file() and not _is_empty(out):
        raise BadInputError(
            "[sft] out", expected="nothing there, or a checkpoint to replace", found=str(out)
        )


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def run_sft(config: SftConfig) -> dict[str, float]:
    """Trains and writes a Hugging Face directory to `config.out`; returns the last metrics.

    Raises:
        BadInputError: a checkpoint, demonstrations, a tokenizer or a place to write that don't fit,
            before the first step; a loss that is not finite, after which nothing is written.
    """
    if config.checkpoint:
        model, params = load_checkpoint(config.checkpoint)
    else:
        model = ModelConfig.from_hf(config.shape)
        params = init_params(model, jax.random.key(config.seed))
    demonstrations = read_demonstrations(config.demonstrations)
    for found in (demonstrations[0].min(), demonstrations[0].max()):
        if not 0 <= found < model.vocab_size:
            raise BadInputError(
                f"demonstrations {config.demonstrations}",
                expected=f"token ids from 0, below the model's vocabulary of {model.vocab_size}",
                found=int(found),
            )
    if not config.tokenizer.is_dir():
        raise BadInputError(
            "[sft] tokenizer", expected="a directory", found=f"none at {config.tokenizer}"
        )
    check_tokenizer(config.tokenizer, model)
    _check_out(config.out)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.lr, min(config.warmup_steps, config.steps // 2), config.steps, config.lr * 0.03
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay, mask=decays),
    )
    step = make_sft_step(model, optimizer, ComputeConfig())
    opt_state = jax.jit(optimizer.init)(params)
    data = batches(demonstrations, config)
    metrics: dict[str, float] = {}
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("warm start", total=config.steps)
        for number in range(1, config.steps + 1):
            params, opt_state, out = step(params, opt_state, next(data))
            progress.advance(bar)
            if number % config.log_every == 0 or number == config.steps:
                metrics = {name: float(value) for name, value in out.items()}
                if not math.isfinite(metrics["loss"]):
                    raise BadInputError(
                        "[sft] lr",
                        expected="steps that leave the loss finite",
                        found=f"{metrics['loss']} by step {number}",
                    )
                num_tokens = number * config.rows_per_step * config.row_tokens
                rate = num_tokens / (time.monotonic() - start)
                line = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
                progress.console.print(f"step {number}: {line}, {rate:,.0f} tokens/s")
    save_checkpoint(config.out, model, params, copy_from=config.tokenizer)
    return metrics
