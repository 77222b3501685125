"""Chunked Gated DeltaNet against the recurrence it stands for, token by token in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer_jax.models import deltanet

J, H, A, W = 2, 4, 8, 6  # key heads, value heads, their dimensions
ROWS = {  # lengths of the segments of each row; the last one of a row may be padding
    "one segment": ([150],),
    "one chunk": ([64],),
    "shorter than a chunk": ([3, 1, 2],),
    "boundaries inside chunks": ([40, 1, 2, 60, 47], [150]),
    "boundaries at chunks": ([64, 64, 22], [1, 63, 1, 63, 22]),
    "many groups": ([700, 3, 397],),
}
RUN = jax.jit(deltanet.delta_rule, static_argnames="chunk")


def random_arguments(lengths: tuple[list[int], ...], *, decay: float = 0.5) -> list[np.ndarray]:
    """q, k, v, g, beta in float64, and segments.

    The strongest decays of the heads are from none to `decay`; most are weak.
    """
    rng = np.random.default_rng(sum(map(len, lengths)))
    B, T = len(lengths), sum(lengths[0])
    q, k = rng.normal(size=(2, B, T, J, A))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(B, T, H, W))
    g = -(rng.uniform(0, 1, (B, T, H)) ** 4) * np.linspace(0, decay, H)
    segments = np.stack([np.repeat(np.arange(len(row)) + 1, row) for row in lengths])
    return [q, k, v, g, rng.uniform(size=(B, T, H)), segments.astype(np.int32)]


def recurrence(q_BxTxJxA, k_BxTxJxA, v_BxTxHxW, g_BxTxH, beta_BxTxH, segments_BxT) -> np.ndarray:
    """The rule as it is written in the module's docstring."""
    q, k = (np.repeat(x, H // J, axis=2) for x in (q_BxTxJxA, k_BxTxJxA))
    B, T = segments_BxT.shape
    o_BxTxHxW = np.zeros(v_BxTxHxW.shape)
    for b in range(B):
        for t in range(T):
            if t == 0 or segments_BxT[b, t] != segments_BxT[b, t - 1]:
                S_HxAxW = np.zeros((H, A, W))
            S_HxAxW = S_HxAxW * np.exp(g_BxTxH[b, t])[:, None, None]
            known_HxW = np.einsum("haw,ha->hw", S_HxAxW, k[b, t])
            change_HxW = beta_BxTxH[b, t][:, None] * (v_BxTxHxW[b, t] - known_HxW)
            S_HxAxW = S_HxAxW + np.einsum("ha,hw->haw", k[b, t], change_HxW)
            o_BxTxHxW[b, t] = np.einsum("haw,ha->hw", S_HxAxW, q[b, t])
    return o_BxTxHxW


def in_float32(arguments: list[np.ndarray]) -> list[jax.Array]:
    return [jnp.asarray(x, jnp.float32) for x in arguments[:-1]] + [jnp.asarray(arguments[-1])]


@pytest.mark.parametrize("chunk", [deltanet.CPU_CHUNK, deltanet.CHUNK])
@pytest.mark.parametrize("case", ROWS)
def test_chunks_equal_the_recurrence(case, chunk):
    arguments = random_arguments(ROWS[case])
    got = RUN(*in_float32(arguments), chunk=chunk)
    np.testing.assert_allclose(got, recurrence(*arguments), atol=3e-6)


@pytest.mark.parametrize("chunk", [deltanet.CPU_CHUNK, deltanet.CHUNK])
def test_strong_decays_among_weak_ones_are_as_exact(chunk):
    """Sums of logs of decays over a chunk reach -1000; small differences of them matter."""
    arguments = random_arguments(ROWS["boundaries inside chunks"], decay=80.0)
    got = RUN(*in_float32(arguments), chunk=chunk)
    np.testing.assert_allclose(got, recurrence(*arguments), atol=3e-6)


@pytest.mark.parametrize("chunk", [deltanet.CPU_CHUNK, deltanet.CHUNK])
def test_equal_keys_lose_nothing(chunk):
    """The inverse is then of ones below the diagonal, whose powers are beyond float32."""
    arguments = random_arguments(ROWS["one segment"], decay=0.0)
    arguments[1] = np.broadcast_to(arguments[1][:, :1], arguments[1].shape)
    arguments[4] = np.ones_like(arguments[4])
    got = RUN(*in_float32(arguments), chunk=chunk)
    np.testing.assert_allclose(got, recurrence(*arguments), atol=3e-6)


@pytest.mark.parametrize(
    ("decay", "chunk"),
    [(0.5, deltanet.CPU_CHUNK), (80.0, deltanet.CPU_CHUNK), (80.0, deltanet.CHUNK)],
)
def test_gradients_are_those_of_the_recurrence(decay, chunk):
    """By central differences of the float64 recurrence, in one random direction per argument."""
    arguments = random_arguments(([40, 2, 35],), decay=decay)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=arguments[2].shape)

    def objective(*arguments):
        return (deltanet.delta_rule(*arguments, chunk=chunk) * weight.astype(np.float32)).sum()

    grads = jax.jit(jax.grad(objective, argnums=range(5)))(*in_float32(arguments))
    for number, grad in enumerate(grads):
        for head in range(arguments[number].shape[2]):
            direction = np.zeros(arguments[number].shape)
            direction[:, :, head] = rng.normal(size=direction[:, :, head].shape)
            moved = []
            for step in (1e-5, -1e-5):
                there = list(arguments)
                there[number] = there[number] + step * direction
                moved.append((recurrence(*there) * weight).sum())
            want = (moved[0] - moved[1]) / 2e-5
            got = (np.asarray(grad, np.float64) * direction).sum()
            scale = np.sqrt((np.square(np.asarray(grad, np.float64)) * (direction != 0)).sum())
            assert abs(got - want) < 3e-6 * scale, (number, head, got, want)


def test_the_convolution_stays_in_its_segment():
    rng = np.random.default_rng(0)
    lengths, channels = [5, 1, 2, 3, 4], 3
    segments_BxT = np.repeat(np.arange(len(lengths)) + 1, lengths)[None].astype(np.int32)
    x_BxTxI = rng.normal(size=(1, sum(lengths), channels)).astype(np.float32)
    taps_KxI = rng.normal(size=(4, channels)).astype(np.float32)
    run = functools.partial(deltanet.causal_convolution, jnp.asarray(x_BxTxI))
    got = run(jnp.asarray(taps_KxI), jnp.asarray(segments_BxT))[0]
    want = []
    for start, num in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        padded = np.concatenate([np.zeros((3, channels)), x_BxTxI[0, start : start + num]])
        want += [(padded[t : t + 4] * taps_KxI).sum(axis=0) for t in range(num)]
    np.testing.assert_allclose(got, np.array(want), atol=1e-6)
