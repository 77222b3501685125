"""Scripted episodes as token rows, for the supervised warm start.

Owns the file that crosses to the trainer: `tokens` (int32 [N], all episodes after each other),
`offsets` (int64 [num+1]; episode i is offsets[i]:offsets[i+1]) and `loss_mask` (bool [N], True on
what a policy would have sampled: the replies with their stop tokens). Made with the same
`ChatFormat` as real episodes. Only training tasks are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Environment, Task
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.grid import GRID_PROMPT, SIZE, WalkerConfig, grid_tasks, walk
from sampler_fleet.episodes.prompts import SYSTEM_PROMPT, task_prompt
from sampler_fleet.episodes.tasks.generate import generate_problems
from sampler_fleet.episodes.tasks.script import ScriptConfig, Turn, play


def write_demonstrations(
    path: str | Path,
    tokenizer_dir: str | Path,
    num: int,
    seed: int,
    *,
    environment: Environment = "code",
) -> None:
    """Writes `build_demonstrations` as an .npz file, atomically."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    arrays = build_demonstrations(tokenizer_dir, num, seed, environment=environment)
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def build_demonstrations(
    tokenizer_dir: str | Path, num: int, seed: int, *, environment: Environment = "code"
) -> dict[str, Any]:
    """`num` episodes, one problem each; see the module for the arrays.

    Raises:
        BadInputError: fewer than one episode, or no usable tokenizer.
    """
    if num < 1:
        raise BadInputError("number of demonstrations", expected="at least 1", found=num)
    chat = ChatFormat.load(tokenizer_dir)
    episodes = _walks(seed) if environment == "grid" else _repairs(seed)
    rows, masks = zip(*(encode_episode(chat, *e) for e in islice(episodes, num)), strict=True)
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return {
        "tokens": np.concatenate(rows),
        "offsets": offsets,
        "loss_mask": np.concatenate(masks),
    }


def _repairs(seed: int) -> Iterator[tuple[str, Task, list[Turn]]]:
    rng, config = Random(f"script/{seed}"), ScriptConfig()
    for problem in generate_problems("train", seed):
        yield SYSTEM_PROMPT, problem.task, play(problem, config, rng)


def _walks(seed: int) -> Iterator[tuple[str, Task, list[Turn]]]:
    rng, config = Random(f"walk/{seed}"), WalkerConfig()
    for task in cycle(grid_tasks("train", SIZE**2, seed)):
        yield GRID_PROMPT, task, walk(task, config, rng)


def encode_episode(
    chat: ChatFormat, system: str, task: Task, turns: list[Turn]
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32 [N], and the loss mask, bool [N], of one episode."""
    parts = list(_parts(chat, system, task, turns))
    tokens = np.concatenate([ids for ids, _ in parts])
    mask = np.concatenate([np.full(len(ids), sampled) for ids, sampled in parts])
    return tokens, mask


def _parts(
    chat: ChatFormat, system: str, task: Task, turns: list[Turn]
) -> Iterator[tuple[np.ndarray, bool]]:
    """Token ids of each part, and whether a policy would have sampled them."""
    yield chat.start(system, task_prompt(task)), False
    for turn in turns:
        if turn.note:
            yield chat.reply_text(turn.note)[:-1], True  # its end is the call's
        if turn.is_call:
            yield chat.reply(turn.command), True
        else:
            yield chat.reply_text(turn.command), True
        if turn.answer is not None:
            observe = chat.observe if turn.is_call else chat.observe_error
            yield observe(turn.answer), False
