"""Trajectories with random tokens and consistent records, for tests of packing and training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from contracts.routed import RoutedExperts
from contracts.types import CandidateSets, Ending, Trajectory, TrajectoryGroup, VersionSpan


def random_trajectory(
    rng: np.random.Generator,
    *,
    name: str,
    length: int,
    reward: float | None,
    group: str = "bf16",
    vocab: int = 64,
    widths: tuple[int, ...] = (1, 3, 12),
    whole: bool = True,
) -> Trajectory:
    """A prompt of 3, then replies and observations in turn; candidate sets of the given widths.

    `whole`: the sets are the sampler's whole support; otherwise they hold part of the mass, and the
    token drawn may lie outside.
    """
    tokens = rng.integers(0, vocab, length).astype(np.int32)
    mask = (np.arange(length) >= 3) & (np.arange(length) // 4 % 3 != 2)
    counts, ids, logp, own = [], [], [], []
    for token in tokens[mask]:
        count = int(rng.choice(widths))
        others = rng.permutation(np.setdiff1d(np.arange(vocab), [token]))
        outside = not whole and rng.random() < 0.3
        support = others[:count] if outside else rng.permutation([token, *others[: count - 1]])
        mass = 1.0 if whole else 0.8
        q = rng.dirichlet(np.full(count, 2.0)) * mass
        counts.append(count)
        ids.append(support)
        logp.append(np.log(q))
        own.append(np.log(0.03) if outside else np.log(q[support == token][0]))
    switch = 3 + (length - 3) // 2
    sampled = np.flatnonzero(mask)
    spans = []
    for start, end in zip(*_runs(sampled), strict=True):
        middle = min(max(switch, start), end)
        spans += [(1, start, middle), (3, middle, end)]
    return Trajectory(
        task_id=f"task-{name[0]}",
        session_id=name,
        group=group,
        sampler_ids=(f"{group}-0",),
        tokens=tokens,
        loss_mask=mask,
        sampler_logp=np.array(own, np.float32),
        candidates=CandidateSets.from_counts(
            np.array(counts, np.int64),
            np.concatenate(ids or [np.zeros(0)]).astype(np.int32),
            np.concatenate(logp or [np.zeros(0)]).astype(np.float32),
        ),
        spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans if e > s),
        reward=reward,
        ending=Ending.FAILURE if reward is None else Ending.SUBMITTED,
    )


def _runs(sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of runs of consecutive positions."""
    breaks = np.flatnonzero(np.diff(sampled) != 1)
    return sampled[np.r_[0, breaks + 1]], sampled[np.r_[breaks, len(sampled) - 1]] + 1


def random_groups(seed: int = 0, **settings) -> list[TrajectoryGroup]:
    """Two prompts, four trajectories each, of two sampler groups; the last one is a failure."""
    rng = np.random.default_rng(seed)
    groups = []
    for g, lengths in enumerate([(20, 9, 14, 30), (11, 25, 8, 16)]):
        rewards = [1.0, 0.0, 0.0, 1.0] if g == 0 else [0.0, 1.0, 0.0, None]
        members = tuple(
            random_trajectory(
                rng,
                name=f"{'xy'[g]}{i}",
                length=length,
                reward=rewards[i],
                group="fp8" if i % 2 else "bf16",
                **settings,
            )
            for i, length in enumerate(lengths)
        )
        groups.append(TrajectoryGroup(sequence=g + 1, task_id=f"task-{g}", trajectories=members))
    return groups


def with_routing(
    groups: list[TrajectoryGroup],
    *,
    num_layers: int,
    num_per_token: int,
    num_experts: int,
    seed: int = 0,
) -> list[TrajectoryGroup]:
    """The same with random experts for all tokens but the sixth and the last."""
    rng = np.random.default_rng(seed)

    def routed(start: int, end: int) -> RoutedExperts:
        order = rng.random((end - start, num_layers, num_experts)).argsort(-1)
        return RoutedExperts(start=start, ids=order[..., :num_per_token].astype(np.uint8))

    def routing(trajectory: Trajectory) -> tuple[RoutedExperts, ...]:
        return routed(0, 5), routed(6, len(trajectory.tokens) - 1)

    return [
        replace(
            group,
            trajectories=tuple(replace(t, routed_experts=routing(t)) for t in group.trajectories),
        )
        for group in groups
    ]
