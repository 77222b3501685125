"""Drift, deterministically: the reward is the same whatever is drawn, so nothing should be learned.

Each step follows the exact expectation of the update, by drawing every token with its probability.
The sampler is the trainer plus a fixed error of its logits, as a quantized copy would be.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer_jax.loss import objective_from_logits

V, STEPS, LR = 12, 40, 0.5
rng = np.random.default_rng(3)
START = jnp.asarray(rng.normal(size=V), jnp.float32)
ERROR = jnp.asarray(rng.normal(size=V), jnp.float32)

GRPO = {"importance": "none", "ratio_low": None, "ratio_high": None}
MIS = {"importance": "masked", "ratio_low": 0.5, "ratio_high": 2.0}
IS = {"importance": "masked", "ratio_low": 1e-30, "ratio_high": 1e30}
TIS = {"importance": "truncated", "ratio_low": None, "ratio_high": 2.0}


@functools.partial(jax.jit, static_argnames=("weight", "center", "replay", "wrong"))
def train(*, weight: tuple, center: bool, replay: bool, advantage: jax.Array, wrong: bool = False):
    """KL(start || end) after `STEPS` steps of the expected update."""
    everything = jnp.tile(jnp.arange(V)[None], (V, 1))

    def step(logits, _):
        q_logp = jax.nn.log_softmax(logits + ERROR)

        def objective(logits):
            return objective_from_logits(
                jnp.tile(logits[None], (V, 1)), jnp.arange(V), everything,
                jnp.tile(q_logp[None], (V, 1)), q_logp, advantage * jnp.exp(q_logp),
                jnp.ones(V, bool), center=center, replay=replay, num_tokens=1, **dict(weight),
            )[0]  # fmt: skip

        gradient = jax.grad(objective)(logits)
        if wrong:  # E_q[A w(a) (e_a - q)], the tempting simplification
            ratio = jnp.exp(jax.nn.log_softmax(logits) - q_logp)
            low, high = dict(weight)["ratio_low"], dict(weight)["ratio_high"]
            weighted = jnp.exp(q_logp) * jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)
            gradient = advantage * (weighted - weighted.sum() * jnp.exp(q_logp))
        return logits + LR * gradient, None

    end, _ = jax.lax.scan(step, START, None, length=STEPS)
    start_logp, end_logp = jax.nn.log_softmax(START), jax.nn.log_softmax(end)
    return (jnp.exp(start_logp) * (start_logp - end_logp)).sum()


def drift(weight: dict, *, advantage: float, **settings) -> float:
    signed = jnp.float32(advantage)
    return float(train(weight=tuple(weight.items()), advantage=signed, **settings))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(
    ("weight", "center"),
    [(IS, False), (GRPO, True), (MIS, True), (TIS, True)],
    ids=["is", "sc", "sc+mis", "sc+tis"],
)
def test_corrected_arms_stay(weight, center, replay, advantage):
    assert drift(weight, center=center, replay=replay, advantage=advantage) < 1e-6


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("weight", [GRPO, MIS, TIS], ids=["grpo", "mis", "tis"])
def test_uncorrected_arms_move(weight, replay, advantage):
    assert drift(weight, center=False, replay=replay, advantage=advantage) > 0.02


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_wrong_centering_moves(advantage):
    moved = drift(MIS, center=True, replay=True, advantage=advantage, wrong=True)
    assert moved > 0.02
