"""From trajectories to arrays of few fixed shapes.

Owns the packing of trajectories into rows, of rows into micro-batches, and of trained tokens into
buckets by the width of their candidate sets. Must not know the loss. Nothing is cut: a trajectory
longer than a row gets longer rows, a set beyond the widest bucket is an error.

One micro-batch, two rows of 8, trajectories x y z (`!` marks trained tokens):
    tokens     x x x! x! y y! y! y!    z z z! z z! . . .
    positions  0 1 2  3  0 1  2  3     0 1 2  3 4  0 0 0
    segments   1 1 1  1  2 2  2  2     1 1 1  1 1  0 0 0
A trained token at t is predicted by the hidden state at t - 1; its `position` is that index in the
rows of its shard, laid end to end.

Shape letters: B rows, R tokens of a row, S shards (devices along the mesh's data axes; each holds
B / S rows and the trained tokens of those rows), N slots of a bucket in a shard, K candidates,
M trajectories of the micro-batch, L layers, X experts of a token.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from contracts.errors import BadInputError
from contracts.types import Trajectory, TrajectoryGroup
from trainer_jax.records import RecordRules, RoutingRules, check_trajectory, describe

MIN_SLOTS = 32  # per bucket and shard; fewer are not worth a compilation


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenBucket:
    """Trained tokens whose candidate sets fit one width. Free slots have mask False."""

    position_SxN: np.ndarray  # int32
    sampled_SxN: np.ndarray  # int32
    sampler_logp_SxN: np.ndarray  # float32
    candidate_ids_SxNxK: np.ndarray  # int32, -1 is padding
    candidate_sampler_logp_SxNxK: np.ndarray  # float32, -inf at padding
    advantage_SxN: np.ndarray  # float32
    mask_SxN: np.ndarray  # bool
    group_SxN: np.ndarray  # int32, index of the sampler group
    version_SxN: np.ndarray  # int32, of the policy that drew the token
    trajectory_SxN: np.ndarray  # int32, index into `num_trained_M`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch."""

    tokens_BxR: np.ndarray  # int32
    positions_BxR: np.ndarray  # int32, from 0 in each segment
    segments_BxR: np.ndarray  # int32, from 1 in each row; 0 is padding
    num_trained_M: np.ndarray  # float32, trained tokens of each trajectory; 0 in free slots
    origin_M: np.ndarray  # int32, which of all trajectories handed to `pack`; -1 in free slots
    buckets: tuple[TokenBucket, ...]
    # int16, -1 where the sampler's choice is not known; None where none is replayed
    routed_experts_BxRxLxX: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return sum(int(bucket.mask_SxN.sum()) for bucket in self.buckets)

    @property
    def num_sequences(self) -> int:
        """Trajectories with at least one trained token."""
        return int(np.count_nonzero(self.num_trained_M))

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            rows=self.tokens_BxR.shape[0],
            row_tokens=self.tokens_BxR.shape[1],
            slots=tuple(bucket.mask_SxN.shape[1] for bucket in self.buckets),
            num_trajectories=len(self.num_trained_M),
        )


class BatchShape(NamedTuple):
    """All that a compilation depends on."""

    rows: int
    row_tokens: int
    slots: tuple[int, ...]  # per bucket and shard
    num_trajectories: int


class _Item(NamedTuple):
    """A trajectory with what the batch says about it."""

    trajectory: Trajectory
    advantage: float
    group: int
    origin: int


def pack(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    *,
    row_tokens: int,
    rows: int,
    candidate_buckets: Sequence[int],
    rules: RecordRules,
    num_shards: int = 1,
    at_least: Sequence[BatchShape] = (),
) -> list[Batch]:
    """The micro-batches of one update.

    Args:
        advantages: one array [G] per group; trajectories without a reward or without a trained
            token are left out.
        row_tokens: length of a row. A longer trajectory goes to rows of the next power-of-two
            multiple, in micro-batches of as many tokens (but at least one row per shard).
        rows: rows of a micro-batch, a multiple of `num_shards`.
        candidate_buckets: widths that candidate sets are padded to, growing.
        rules: what records must satisfy.
        num_shards: devices along the data axes.
        at_least: shapes used before (`batch.shape`); taking the larger of old and new saves
            compilations, and costs free slots.

    Raises:
        BadInputError: a record or an advantage that cannot be used (named), nothing to train on.
    """
    assert rows % num_shards == 0 and rules.max_candidates <= candidate_buckets[-1]
    kept: dict[int, list[_Item]] = {}
    numbers = itertools.count()
    for group, values in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            origin = next(numbers)
            if trajectory.reward is None or not trajectory.loss_mask.any():
                continue
            check_trajectory(trajectory, rules)
            if not math.isfinite(advantage):
                raise BadInputError(
                    describe(trajectory), expected="a finite advantage", found=advantage
                )
            length = row_tokens
            while length < len(trajectory.tokens):
                length *= 2
            index = rules.group_names.index(trajectory.group)
            item = _Item(trajectory, float(advantage), index, origin)
            kept.setdefault(length, []).append(item)
    if not kept:
        raise BadInputError("batch", expected="a trained token", found="none in its trajectories")
    known = {shape.row_tokens: shape for shape in at_least}
    batches: list[Batch] = []
    for length, items in sorted(kept.items()):
        height = max(num_shards, rows * row_tokens // length // num_shards * num_shards)
        cells = _deal(_fill_rows(items, length), height // num_shards, num_shards)
        widths = tuple(candidate_buckets)
        made = _batches(cells, (height, length), num_shards, widths, known.get(length))
        if rules.routing:
            made = _with_routing(made, cells, num_shards, rules.routing)
        batches += made
    return batches


def _fill_rows(items: list[_Item], length: int) -> list[list[_Item]]:
    """First-fit decreasing."""
    rows: list[list[_Item]] = []
    free: list[int] = []
    for item in sorted(items, key=lambda item: -len(item.trajectory.tokens)):
        size = len(item.trajectory.tokens)
        for i, space in enumerate(free):
            if size <= space:
                rows[i].append(item)
                free[i] -= size
                break
        else:
            rows.append([item])
            free.append(length - size)
    return rows


def _deal(rows: list[list[_Item]], height: int, num_shards: int) -> list[list[list[_Item]]]:
    """Rows to cells (a shard of a micro-batch) of at most `height` rows, in snake order.

    The number of cells is a multiple of `num_shards`; trained tokens are spread evenly, because the
    fullest cell sets the number of slots of all.
    """
    num_cells = -(-len(rows) // height)
    num_cells += -num_cells % num_shards
    cells: list[list[list[_Item]]] = [[] for _ in range(num_cells)]
    trained = [sum(len(item.trajectory.sampler_logp) for item in row) for row in rows]
    for place, i in enumerate(np.argsort(trained, kind="stable")[::-1]):
        lap, turn = divmod(place, num_cells)
        cells[turn if lap % 2 == 0 else num_cells - 1 - turn].append(rows[i])
    return cells


class _Tokens(NamedTuple):
    """The trained tokens of one cell in order, all arrays of one length but the CSR entries."""

    columns: dict[str, np.ndarray]
    counts: np.ndarray
    ids: np.ndarray
    logp: np.ndarray


def _batches(
    cells: list[list[list[_Item]]],
    shape: tuple[int, int],
    num_shards: int,
    widths: tuple[int, ...],
    known: BatchShape | None,
) -> list[Batch]:
    micro = [cells[i : i + num_shards] for i in range(0, len(cells), num_shards)]
    num_trajectories = max(sum(len(row) for cell in cells for row in cell) for cells in micro)
    tokens = []
    for shards in micro:
        first, parts = 0, []
        for cell in shards:
            parts.append(_tokens_of(cell, shape[1], first))
            first += sum(len(row) for row in cell)
        tokens.append(parts)
    slots = np.max(
        [np.bincount(_bucket(part.counts, widths), minlength=len(widths))
         for parts in tokens for part in parts],
        axis=0,
    )  # fmt: skip
    slots = [_power_of_two(int(num), MIN_SLOTS) for num in slots]
    room = _power_of_two(num_trajectories, 1)
    if known:
        slots = [max(pair) for pair in zip(slots, known.slots, strict=True)]
        room = max(room, known.num_trajectories)
    batches = []
    for shards, parts in zip(micro, tokens, strict=True):
        num_trained_M, origin_M = np.zeros(room, np.float32), np.full(room, -1, np.int32)
        items = [item for cell in shards for row in cell for item in row]
        num_trained_M[: len(items)] = [len(item.trajectory.sampler_logp) for item in items]
        origin_M[: len(items)] = [item.origin for item in items]
        buckets = [
            _stack([_fill_bucket(part, i, widths, slots[i]) for part in parts])
            for i in range(len(widths))
        ]
        batches.append(
            Batch(
                **_row_arrays(shards, shape),
                num_trained_M=num_trained_M,
                origin_M=origin_M,
                buckets=tuple(buckets),
            )
        )
    return batches


def _power_of_two(num: int, least: int) -> int:
    return max(least, 1 << max(num - 1, 0).bit_length())


def _row_arrays(shards: list[list[list[_Item]]], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    height, length = shape
    tokens, positions, segments = (np.zeros((height, length), np.int32) for _ in range(3))
    per_shard = height // len(shards)
    for s, cell in enumerate(shards):
        for r, row in enumerate(cell):
            start = 0
            for number, item in enumerate(row, 1):
                at = (s * per_shard + r, slice(start, start + len(item.trajectory.tokens)))
                tokens[at] = item.trajectory.tokens
                positions[at] = np.arange(len(item.trajectory.tokens))
                segments[at] = number
                start = at[1].stop
    return {"tokens_BxR": tokens, "positions_BxR": positions, "segments_BxR": segments}


def _with_routing(
    batches: list[Batch], cells: list[list[list[_Item]]], num_shards: int, routing: RoutingRules
) -> list[Batch]:
    """The batches with the experts that their trajectories' samplers chose."""
    made = []
    for m, batch in enumerate(batches):
        shape = *batch.tokens_BxR.shape, routing.num_layers, routing.num_per_token
        routed_experts = np.full(shape, -1, np.int16)
        per_shard = shape[0] // num_shards
        for s, cell in enumerate(cells[m * num_shards : (m + 1) * num_shards]):
            for r, row in enumerate(cell):
                start = 0
                for item in row:
                    for part in item.trajectory.routed_experts:
                        at = slice(start + part.start, start + part.end)
                        routed_experts[s * per_shard + r, at] = part.ids
                    start += len(item.trajectory.tokens)
        made.append(dataclasses.replace(batch, routed_experts_BxRxLxX=routed_experts))
    return made


def _tokens_of(cell: list[list[_Item]], length: int, first_trajectory: int) -> _Tokens:
    columns: dict[str, list[np.ndarray]] = {}
    counts, ids, logp = [], [], []
    index = first_trajectory
    for r, row in enumerate(cell):
        start = r * length
        for item in row:
            at = np.flatnonzero(item.trajectory.loss_mask)
            for name, value in {
                "position": start + at - 1,
                "sampled": item.trajectory.tokens[at],
                "sampler_logp": item.trajectory.sampler_logp,
                "advantage": np.full(len(at), item.advantage, np.float32),
                "mask": np.ones(len(at), bool),
                "group": np.full(len(at), item.group),
                "version": item.trajectory.version,
                "trajectory": np.full(len(at), index),
            }.items():
                columns.setdefault(name, []).append(value)
            counts.append(item.trajectory.candidates.counts)
            ids.append(item.trajectory.candidates.ids)
            logp.append(item.trajectory.candidates.logp)
            start += len(item.trajectory.tokens)
            index += 1
    empty = [np.zeros(0, np.int64)]
    return _Tokens(
        {name: np.concatenate(parts) for name, parts in columns.items()},
        np.concatenate(counts or empty),
        np.concatenate(ids or empty),
        np.concatenate(logp or empty),
    )


def _bucket(counts: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    return np.searchsorted(widths, counts, side="left")


_COLUMNS = {
    "position": np.int32,
    "sampled": np.int32,
    "sampler_logp": np.float32,
    "advantage": np.float32,
    "mask": bool,
    "group": np.int32,
    "version": np.int32,
    "trajectory": np.int32,
}


def _fill_bucket(
    part: _Tokens, bucket: int, widths: tuple[int, ...], slots: int
) -> dict[str, np.ndarray]:
    """The tokens of one bucket in one shard, padded to `slots`."""
    own = np.flatnonzero(_bucket(part.counts, widths) == bucket)
    arrays = {}
    for name, dtype in _COLUMNS.items():
        array = np.zeros(slots, dtype)
        if len(own):
            array[: len(own)] = part.columns[name][own]
        arrays[f"{name}_SxN"] = array
    ids = np.full((slots, widths[bucket]), -1, np.int32)
    logp = np.full((slots, widths[bucket]), -np.inf, np.float32)
    counts = part.counts[own]
    offsets = np.concatenate([[0], np.cumsum(part.counts)])[own] if len(own) else counts
    row = np.repeat(np.arange(len(own)), counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    entry = np.repeat(offsets, counts) + column
    ids[row, column], logp[row, column] = part.ids[entry], part.logp[entry]
    return arrays | {"candidate_ids_SxNxK": ids, "candidate_sampler_logp_SxNxK": logp}


def _stack(shards: list[dict[str, np.ndarray]]) -> TokenBucket:
    return TokenBucket(**{name: np.stack([s[name] for s in shards]) for name in shards[0]})
