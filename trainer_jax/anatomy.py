"""What the episodes of each recorded update were like, in numbers: the anatomy of a collapse.

Owns these numbers. Must not read files, nor need a tokenizer: replies are compared by their token
ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from contracts.types import Trajectory
from trainer_jax.recorded import RecordedUpdate

NGRAM = 8  # tokens; what is said twice at this length is seldom so by chance


def anatomy(updates: Iterable[RecordedUpdate]) -> list[dict[str, Any]]:
    """One row per update, over all its recorded episodes; None where there is nothing to count.

    step, version (of the policy before it); num_episodes, num_replies; reward (mean of those that
    have one); share_without_call: of replies, those without a valid tool call; endings: share of
    each that occurs; share_alike: of episodes with more than one reply, those whose replies are all
    the same; share_repeated: of all runs of `NGRAM` tokens in replies, those that an earlier place
    of the episode's replies has as well; reply_tokens (mean); abs_log_ratio: mean |log p/q| of the
    tokens trained on, in nats; share_masked: of them, those with weight 0.
    """
    return [_row(update) for update in updates]


def replies_of(trajectory: Trajectory) -> list[np.ndarray]:
    """The token ids of each reply, in order."""
    edges = np.diff(np.r_[0, trajectory.loss_mask.astype(np.int8), 0])
    bounds = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    return [trajectory.tokens[start:end] for start, end in bounds]


def _row(update: RecordedUpdate) -> dict[str, Any]:
    members = [(t, trained) for _, t, trained in update.episodes()]
    trajectories = [t for t, _ in members]
    replies = [replies_of(t) for t in trajectories]
    lengths = [len(reply) for own in replies for reply in own]
    alike = [len({reply.tobytes() for reply in own}) == 1 for own in replies if len(own) > 1]
    num_repeated, num_runs = np.sum([_repeats(own) for own in replies], axis=0)
    gaps = [np.abs(tokens.trainer_logp - t.sampler_logp) for t, tokens in members if tokens]
    masked = [tokens.masked for _, tokens in members if tokens]
    endings = Counter(t.ending for t in trajectories)
    return {
        "step": update.step,
        "version": update.version,
        "num_episodes": len(trajectories),
        "num_replies": len(lengths),
        "reward": _mean([t.reward for t in trajectories if t.reward is not None]),
        "share_without_call": _share(
            sum(t.num_format_errors for t in trajectories), sum(t.num_turns for t in trajectories)
        ),
        "endings": {str(name): num / len(trajectories) for name, num in endings.most_common()},
        "share_alike": _mean(alike),
        "share_repeated": _share(num_repeated, num_runs),
        "reply_tokens": _mean(lengths),
        "abs_log_ratio": _mean(np.concatenate(gaps or [[]])),
        "share_masked": _mean(np.concatenate(masked or [[]])),
    }


def _repeats(replies: Sequence[np.ndarray]) -> tuple[int, int]:
    """Runs of NGRAM tokens that stand earlier as well, and all of them; a shorter reply is one."""
    runs = [
        reply[start : start + NGRAM].tobytes()
        for reply in replies
        for start in range(max(len(reply) - NGRAM + 1, 1))
    ]
    return len(runs) - len(set(runs)), len(runs)


def _mean(values: Sequence[Any] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
