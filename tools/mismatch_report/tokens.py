"""Recorded tokens beside what a checkpoint says of them, one row per sampled token.

Owns the arrays that a mismatch report is made of. The formulas are the trainer's own
(`trainer_jax.loss`, `trainer_jax.loss_metrics`); must not judge what the numbers mean.

A record can be read in several ways: as log-probs at the sampling temperature or at temperature 1
(before it), over the candidate set (after truncation) or over the vocabulary (before it). The
trainer's log-prob of the token drawn is kept under each reading; the right one agrees best.

Shape letters: T sampled tokens, K candidates, R readings, L labels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from contracts.errors import BadInputError
from contracts.types import Trajectory, TrajectoryGroup
from tools.mismatch_report.source import Checkpoint
from trainer_jax import loss_metrics
from trainer_jax.batch import Batch, BatchShape, TokenBucket, pack
from trainer_jax.head import candidate_logits
from trainer_jax.loss import LogBand, Position, SamplerRecord, position_of, token_objective
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import Params
from trainer_jax.records import LOGP_TOLERANCE, MASS_TOLERANCE, RecordRules, check_trajectory

_ROW_TOKENS = 64  # rows are this long, or the next power-of-two multiple
_MIN_CANDIDATES = 64  # as many columns at least, so that few programs are compiled
NO_TAIL = 1e-5  # mass that float32 sums lose


class Reading(NamedTuple):
    """Which distribution log-probs are of."""

    temperature: float
    over_set: bool

    def __str__(self) -> str:
        over = "the candidate set" if self.over_set else "the vocabulary"
        return f"temperature {self.temperature:g} over {over}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the trainer compares, and in which order groups are counted."""

    group_names: tuple[str, ...]
    log_bands_Gx2: np.ndarray
    temperature: float
    replay: bool
    truncates: bool  # whether the samplers were told to truncate
    compute: ComputeConfig

    @property
    def expected(self) -> Reading:
        """What records have to be: of the distribution drawn from."""
        return Reading(self.temperature, self.truncates)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The expected one first."""
        first = self.expected
        every = (Reading(t, over) for t in (self.temperature, 1.0) for over in (True, False))
        return tuple(dict.fromkeys((first, *every)))


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One entry per sampled token, in the order of the trajectories. Log-probs in nats."""

    trajectory: np.ndarray  # int64 [T]
    position: np.ndarray  # int64 [T], in the trajectory's buffer
    group: np.ndarray  # int64 [T], index into `Setup.group_names`
    version: np.ndarray  # int64 [T]
    sampler_logp: np.ndarray  # float32 [T]
    trainer_logp: np.ndarray  # float32 [T]
    stats: np.ndarray  # float32 [T, fields of TokenStats]
    expected_ratio: np.ndarray  # float32 [T], E_q[r] of a right record: p's mass where q has any
    readings: np.ndarray  # float32 [T, R], trainer_logp under each reading
    moments: np.ndarray  # float32 [T, 3], q-weighted over the set: var log q, var log p, covariance
    set_log_ratio: np.ndarray  # float32 [T], the q-weighted mean of log p - log q over the set
    set_mass: np.ndarray  # float64 [T], the record's own
    tail_draw: np.ndarray  # bool [T], drawn from outside the set
    surprise: np.ndarray  # float64 [T], -sampler_logp minus its expectation under the record
    surprise_var: np.ndarray  # float64 [T], the variance of that under the record
    set_logp: np.ndarray  # float64 [T], of the token drawn by its set; NaN outside it

    def __len__(self) -> int:
        return len(self.position)

    @property
    def log_ratio(self) -> np.ndarray:
        """log p - log q, [T]."""
        return self.trainer_logp - self.sampler_logp

    @property
    def contradicts(self) -> np.ndarray:
        """Whether a record has two log-probs for the token drawn, bool [T]."""
        return np.abs(self.set_logp - self.sampler_logp) > LOGP_TOLERANCE

    def stat(self, name: str) -> np.ndarray:
        """A field of `loss_metrics.TokenStats`, [T]."""
        return self.stats[:, loss_metrics.TokenStats._fields.index(name)]

    def where(self, keep_T: np.ndarray) -> Tokens:
        """Some of the tokens."""
        return Tokens(**{field.name: getattr(self, field.name)[keep_T] for field in fields(self)})

    def metrics(self, labels_TxL: np.ndarray) -> dict[str, np.ndarray]:
        """`loss_metrics.finalize` for each label, [L]."""
        num_tokens, num = labels_TxL.shape
        more = [(0, (1 << (size - 1).bit_length()) - size) for size in (num_tokens, num)]
        metrics = _metrics(np.pad(self.stats, [more[0], (0, 0)]), np.pad(labels_TxL, more))
        return {name: np.asarray(x)[:num] for name, x in metrics.items()}


@jax.jit
def _metrics(stats_TxM: jax.Array, labels_TxL: jax.Array) -> dict[str, jax.Array]:
    stats = loss_metrics.TokenStats(*stats_TxM.T)
    return loss_metrics.finalize(loss_metrics.summarize(stats, labels_TxL))


def whole_sets(trajectories: Sequence[Trajectory]) -> bool:
    """Whether nearly all recorded sets hold all of the sampler's mass, as replay needs them."""
    masses = [_record_columns(t)["set_mass"] for t in trajectories if t.loss_mask.any()]
    mass_T = np.concatenate(masses) if masses else np.zeros(0)
    return bool(len(mass_T)) and bool(np.mean(mass_T > 1 - MASS_TOLERANCE) > 0.99)


@dataclass(frozen=True, kw_only=True)
class Usable:
    """Trajectories with sampled tokens, by what can be done with them."""

    compared: list[Trajectory]
    refused: list[str]  # a sentence for each that the trainer would refuse
    broken: list[Trajectory]  # refused, and too broken to be compared all the same
    unrewarded: list[Trajectory]  # the trainer doesn't see them


def usable(groups: Sequence[TrajectoryGroup], checkpoint: Checkpoint, setup: Setup) -> Usable:
    """Trajectories that can be compared, and the others.

    What breaks only the rules of replay, or contradicts itself, is compared all the same: it may be
    the fault sought.

    Raises:
        BadInputError: tokens that the checkpoint has no row for; nothing to compare.
    """
    found = Usable(compared=[], refused=[], broken=[], unrewarded=[])
    vocab_size = checkpoint.config.vocab_size
    for trajectory in (t for group in groups for t in group.trajectories):
        ids = np.concatenate([trajectory.tokens, trajectory.candidates.ids])
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise BadInputError(
                f"checkpoint {checkpoint.path}, trajectory {trajectory.session_id}",
                expected=f"token ids from 0 to {vocab_size - 1}, its vocabulary",
                found=f"{ids.max() if ids.min() >= 0 else ids.min()} (another model's record?)",
            )
        if not trajectory.loss_mask.any():
            continue
        if trajectory.reward is None:
            found.unrewarded.append(trajectory)
            continue
        sentence = _refusal(trajectory, _rules(setup, vocab_size, trajectory, strict=True))
        if sentence:
            found.refused.append(sentence)
        broken = sentence and _refusal(
            trajectory, _rules(setup, vocab_size, trajectory, strict=False)
        )
        (found.broken if broken else found.compared).append(trajectory)
    if not found.compared:
        raise BadInputError(
            "trajectories",
            expected="one with a reward, sampled tokens and a usable record",
            found=found.refused[0] if found.refused else "none",
        )
    return found


def _refusal(trajectory: Trajectory, rules: RecordRules) -> str:
    try:
        check_trajectory(trajectory, rules)
    except BadInputError as error:
        return str(error)
    return ""


def _rules(setup: Setup, vocab_size: int, trajectory: Trajectory, *, strict: bool) -> RecordRules:
    """The trainer's; unless strict, without those that a wrong distribution breaks."""
    return RecordRules(
        group_names=setup.group_names,
        vocab_size=vocab_size,
        replay=strict and setup.replay,
        max_candidates=_width(trajectory),
        consistent=strict,
    )


def _width(trajectory: Trajectory) -> int:
    most = int(trajectory.candidates.counts.max(initial=1))
    return max(_MIN_CANDIDATES, 1 << (most - 1).bit_length())


def compare(trajectories: Sequence[Trajectory], checkpoint: Checkpoint, setup: Setup) -> Tokens:
    """All sampled tokens of trajectories that `usable` let through."""
    params = jax.tree.map(jnp.asarray, checkpoint.params)
    shapes: dict[tuple[int, int], BatchShape] = {}
    parts: list[dict[str, np.ndarray]] = []
    for number, trajectory in enumerate(trajectories):
        width = _width(trajectory)
        (batch,) = pack(
            [TrajectoryGroup(sequence=1, task_id=trajectory.task_id, trajectories=(trajectory,))],
            [np.zeros(1, np.float32)],
            row_tokens=_ROW_TOKENS,
            rows=1,
            candidate_buckets=(width,),
            rules=_rules(setup, checkpoint.config.vocab_size, trajectory, strict=False),
            at_least=[shape for (_, other), shape in shapes.items() if other == width],
        )
        shapes[batch.shape.row_tokens, width] = batch.shape
        columns = _trainer_columns(params, batch, checkpoint.config, setup)
        at_T = np.flatnonzero(trajectory.loss_mask)
        parts.append(
            columns
            | _record_columns(trajectory)
            | {
                "trajectory": np.full(len(at_T), number),
                "position": at_T,
                "group": np.full(len(at_T), setup.group_names.index(trajectory.group)),
                "version": trajectory.version,
                "sampler_logp": trajectory.sampler_logp,
            }
        )
    tokens = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Tokens(**tokens)


def _record_columns(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """What a record says about itself, with the mass outside the set as one more candidate."""
    sets = trajectory.candidates
    num = len(sets)
    owner = np.repeat(np.arange(num), sets.counts)
    logp = sets.logp.astype(np.float64)
    q = np.exp(logp)
    mass_T = np.bincount(owner, q, minlength=num)
    tail_T = np.where(1 - mass_T > NO_TAIL, 1 - mass_T, 0.0)
    log_tail_T = np.log(np.where(tail_T > 0, tail_T, 1.0))
    entropy_T = -np.bincount(owner, q * logp, minlength=num) - tail_T * log_tail_T
    square_T = np.bincount(owner, q * logp**2, minlength=num) + tail_T * log_tail_T**2

    tokens = trajectory.tokens[trajectory.loss_mask]
    hit = sets.ids == tokens[owner]
    own_T = np.full(num, np.nan)
    own_T[owner[hit]] = logp[hit]
    outside_T = np.isnan(own_T)
    sampler_logp_T = trajectory.sampler_logp.astype(np.float64)
    logp_T = np.where(outside_T & (tail_T > 0), log_tail_T, sampler_logp_T)
    return {
        "set_mass": mass_T,
        "tail_draw": outside_T,
        "surprise": -logp_T - entropy_T,
        "surprise_var": np.maximum(square_T - entropy_T**2, 0.0),
        "set_logp": own_T,
    }


def _trainer_columns(
    params: Params, batch: Batch, config: ModelConfig, setup: Setup
) -> dict[str, np.ndarray]:
    """The columns that need the model, in the order of the buffer."""
    (bucket,) = batch.buckets
    hidden_NxD, head_VxD = _hidden(params, batch, config=config, compute=setup.compute)
    scored = _score(
        hidden_NxD,
        head_VxD,
        bucket,
        jnp.asarray(setup.log_bands_Gx2[bucket.group_SxN[0, 0]]),
        readings=setup.readings,
        replay=setup.replay,
    )
    mask_N = bucket.mask_SxN[0]
    return {name: values[mask_N] for name, values in jax.device_get(scored).items()}


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def _hidden(params: Params, batch: Batch, *, config: ModelConfig, compute: ComputeConfig):
    """Hidden states of the row, [N, D], and the head, [V, D]."""
    tokens: Any = (batch.tokens_BxR, batch.positions_BxR, batch.segments_BxR)
    hidden_BxRxD = hidden_states(params, config, *tokens, compute=compute)
    return hidden_BxRxD.reshape(-1, hidden_BxRxD.shape[-1]), head_weight(params, compute=compute)


@functools.partial(jax.jit, static_argnames=("readings", "replay"))
def _score(
    hidden_NxD: jax.Array,
    head_VxD: jax.Array,
    bucket: TokenBucket,
    log_band_2: jax.Array,
    *,
    readings: tuple[Reading, ...],
    replay: bool,
) -> dict[str, jax.Array]:
    own: Any = jax.tree.map(lambda x: jnp.asarray(x)[0], bucket)  # one shard
    mask_T, ids_TxK = own.mask_SxN, own.candidate_ids_SxNxK
    record = SamplerRecord(
        candidate_ids_TxK=ids_TxK,
        candidate_sampler_logp_TxK=own.candidate_sampler_logp_SxNxK,
        sampler_logp_T=own.sampler_logp_SxN,
        advantage_T=jnp.zeros_like(own.advantage_SxN),
        mask_T=mask_T,
    )
    drawn_Tx1 = jnp.where(mask_T, own.sampled_SxN, -1)[:, None]
    asked_TxK = jnp.concatenate([ids_TxK, drawn_Tx1], axis=1)
    heads = {
        temperature: candidate_logits(
            hidden_NxD[own.position_SxN], head_VxD, asked_TxK,
            normalizer=True, temperature=temperature,
        )
        for temperature in dict.fromkeys(reading.temperature for reading in readings)
    }  # fmt: skip

    def arguments(temperature: float, over_set: bool):
        out = heads[temperature]
        normalizer_T = None if over_set else out.normalizer_T
        return out.logits_TxK[:, :-1], out.logits_TxK[:, -1], normalizer_T, record

    temperature = readings[0].temperature
    at = position_of(*arguments(temperature, replay))
    _, stats = token_objective(
        *arguments(temperature, replay),
        importance="masked",
        band=LogBand(*jnp.broadcast_to(log_band_2[:, None], (2, len(mask_T)))),
        center=False,
    )
    entropy_T = heads[temperature].entropy_T
    if not replay and entropy_T is not None:
        stats = loss_metrics.with_entropy(stats, entropy_T)
    # a truncating sampler draws from its set alone; p has mass outside unless it is replayed
    one_T = jnp.ones_like(at.p_tail_T)
    expected_T = 1 - at.p_tail_T if readings[0].over_set else one_T
    return {
        "trainer_logp": at.trainer_logp_T,
        "stats": jnp.stack(list(stats), axis=1),
        "expected_ratio": expected_T,
        "readings": jnp.stack(
            [position_of(*arguments(*reading)).trainer_logp_T for reading in readings], axis=1
        ),
        **_moments(at, record),
    }


def _moments(at: Position, record: SamplerRecord) -> dict[str, jax.Array]:
    """`moments` and `set_log_ratio` of `Tokens`."""
    weight_TxK = at.q_TxK / jnp.maximum(at.q_TxK.sum(1), 1e-30)[:, None]

    def split(x_TxK: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_TxK = jnp.where(at.valid_TxK, x_TxK, 0.0)
        mean_T = (weight_TxK * x_TxK).sum(1)
        return mean_T, x_TxK - mean_T[:, None]

    q_T, q_TxK = split(record.candidate_sampler_logp_TxK)
    p_T, p_TxK = split(at.trainer_logp_TxK)
    products = (q_TxK * q_TxK, p_TxK * p_TxK, q_TxK * p_TxK)
    moments = jnp.stack([(weight_TxK * product).sum(1) for product in products], axis=1)
    return {"moments": moments, "set_log_ratio": p_T - q_T}
