"""Rows cut into stretches on four devices: the same values and gradients as on one.

Run as a process with eight virtual devices by test_mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from trainer_jax.models import attention, context, deltanet

NUM = 4
MESH = jax.make_mesh((NUM,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:NUM])
ROWS = PartitionSpec(None, "context")
B, H, J, A, W = 2, 4, 2, 8, 6


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


def segments(T: int) -> jax.Array:
    """Some shorter than a convolution reaches, one over several stretches, padding at the end."""
    first = np.repeat([1, 2, 3, 4, 0], [T // 3, 2, 1, T - T // 3 - 7, 4])
    return jnp.asarray(np.stack([first, np.repeat([1, 2], [1, T - 1])]).astype(np.int32))


def assert_the_same(local, spread, arguments, specs) -> None:
    """Of all arguments but the last, the segments."""

    def with_gradients(function):
        def total(*arguments):
            out = function(*arguments)
            return jnp.sin(out).sum(), out

        numbers = tuple(range(len(arguments) - 1))
        return jax.jit(jax.value_and_grad(total, argnums=numbers, has_aux=True))(*arguments)

    on_mesh = jax.shard_map(spread, mesh=MESH, in_specs=specs, out_specs=ROWS, check_vma=False)
    want, got = with_gradients(local), with_gradients(on_mesh)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = 1e-5 * max(1.0, float(jnp.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def test_attention():
    for T in (NUM * 2 * attention.CHUNK, NUM * 144, NUM * 12):
        arguments = random(B, T, H, A), random(B, T, J, A), random(B, T, J, A), segments(T)
        assert_the_same(attention.attend, context.attend, arguments, (ROWS,) * 4)


def test_convolution():
    arguments = random(B, NUM * 5, 6), random(4, 6), segments(NUM * 5)
    specs = ROWS, PartitionSpec(), ROWS
    assert_the_same(deltanet.causal_convolution, context.convolution, arguments, specs)


def test_delta_rule():
    for T in (NUM * 5 * deltanet.CHUNK, NUM * 20):  # what fills the last group passes the state on
        q, k = (deltanet.normalize(random(B, T, J, A) + shift) for shift in (0.0, 1.0))
        g, beta = -0.3 * jnp.abs(random(B, T, H)), jax.nn.sigmoid(random(B, T, H))
        arguments = q, k, random(B, T, H, W), g, beta, segments(T)
        assert_the_same(deltanet.delta_rule, context.delta_rule, arguments, (ROWS,) * 6)
