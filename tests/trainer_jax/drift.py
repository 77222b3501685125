"""Training where nothing is to be learned: the reward is the same whatever is drawn.

Each step follows the exact expectation of the update, by drawing every token with its probability.
The sampler is the trainer plus a fixed error of its logits, as a quantized copy would be. Owns the
dynamics and the arms; `test_drift.py` holds them to what they must do, `benchmarks/drift.py` draws
them.

Shape letter: V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from trainer_jax.loss import objective_from_logits
from trainer_jax.loss_config import Center

V, STEPS, LR = 12, 40, 0.5
_rng = np.random.default_rng(3)
START = jnp.asarray(_rng.normal(size=V), jnp.float32)
ERROR = jnp.asarray(_rng.normal(size=V), jnp.float32)

GRPO = {"importance": "none", "ratio_low": None, "ratio_high": None}
MIS = {"importance": "masked", "ratio_low": 0.5, "ratio_high": 2.0}
IS = {"importance": "masked", "ratio_low": 1e-30, "ratio_high": 1e30}
TIS = {"importance": "truncated", "ratio_low": None, "ratio_high": 2.0}


@functools.partial(jax.jit, static_argnames=("weight", "center", "replay"))
def _train(*, weight: tuple, center: Center, replay: bool, advantage: jax.Array):
    everything = jnp.tile(jnp.arange(V)[None], (V, 1))
    start_logp = jax.nn.log_softmax(START)

    def step(logits, _):
        q_logp = jax.nn.log_softmax(logits + ERROR)

        def objective(logits):
            return objective_from_logits(
                jnp.tile(logits[None], (V, 1)), jnp.arange(V), everything,
                jnp.tile(q_logp[None], (V, 1)), q_logp, advantage * jnp.exp(q_logp),
                jnp.ones(V, bool), center=center, replay=replay, num_tokens=1, **dict(weight),
            )[0]  # fmt: skip

        logits += LR * jax.grad(objective)(logits)
        moved = start_logp - jax.nn.log_softmax(logits)
        return logits, (jnp.exp(start_logp) * moved).sum()

    return jax.lax.scan(step, START, None, length=STEPS)[1]


def drift(weight: dict, *, center: Center, replay: bool, advantage: float) -> np.ndarray:
    """KL(start || now) in nats after each step of the expected update, [STEPS]."""
    signed = jnp.float32(advantage)
    return np.asarray(
        _train(weight=tuple(weight.items()), center=center, replay=replay, advantage=signed)
    )
