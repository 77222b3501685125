"""The head against dense logits: values, gradients, memory, shards."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from contracts.errors import BadInputError
from trainer_jax.head import Part, candidate_logits, token_sum

T, D, V, K = 13, 8, 50, 5


def data(dtype=np.float32):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(T, D)).astype(dtype)
    head = rng.normal(size=(V, D)).astype(dtype)
    ids = rng.integers(0, V, size=(T, K)).astype(np.int32)
    ids[3] = -1
    ids[5, 2:] = -1
    ids[7] = ids[7, 0]  # one id five times: the scatter adds
    slopes = rng.normal(size=(T, K)).astype(dtype), rng.normal(size=T).astype(dtype)
    return hidden, head, jnp.asarray(ids), slopes


def dense(hidden, head, ids, temperature):
    logits = hidden @ head.T / temperature
    picked = jnp.take_along_axis(logits, jnp.maximum(ids, 0), axis=1)
    p = jax.nn.softmax(logits)
    entropy = -(p * jnp.log(p)).sum(1)
    return jnp.where(ids >= 0, picked, 0.0), jax.nn.logsumexp(logits, axis=1), entropy


@pytest.mark.parametrize("normalizer", [False, True])
@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_dense_logits(normalizer, chunk, dtype):
    with jax.enable_x64(dtype is np.float64):
        hidden, head, ids, (slope, lse_slope) = data(dtype)

        def ours(hidden, head):
            out = candidate_logits(
                hidden, head, ids, normalizer=normalizer, temperature=0.7, chunk_tokens=chunk
            )
            assert out.logits_TxK.dtype == dtype
            assert (out.normalizer_T is None) == (out.entropy_T is None) == (not normalizer)
            value = (out.logits_TxK * slope).sum()
            return (value + (out.normalizer_T * lse_slope).sum() if normalizer else value), out

        def theirs(hidden, head):
            out = dense(hidden, head, ids, 0.7)
            value = (out[0] * slope).sum()
            return (value + (out[1] * lse_slope).sum() if normalizer else value), out

        tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is np.float32 else {"atol": 1e-11}
        (_, got), got_gradient = jax.value_and_grad(ours, (0, 1), has_aux=True)(hidden, head)
        (_, want), want_gradient = jax.value_and_grad(theirs, (0, 1), has_aux=True)(hidden, head)
        compare = list(zip(got_gradient, want_gradient, strict=True))
        compare += [(g, w) for g, w in zip(got, want, strict=True) if g is not None]
        for g, w in compare:
            np.testing.assert_allclose(g, w, **tolerance)


@pytest.mark.parametrize("normalizer", [False, True])
@pytest.mark.parametrize("chunk", [4, None])
def test_a_sum_over_tokens_has_the_gradient_of_its_logits(normalizer, chunk):
    """Two parts of different widths, two shards, chunks that don't divide the tokens."""
    rng = np.random.default_rng(1)
    head = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    shapes = ((T, K), (7, 2))
    hidden = [jnp.asarray(rng.normal(size=(2, T, D)), jnp.float32) for T, _ in shapes]
    ids = [jnp.asarray(rng.integers(-1, V, (2, *shape)), jnp.int32) for shape in shapes]
    slopes = [jnp.asarray(rng.normal(size=(2, T)), jnp.float32) for T, _ in shapes]

    def objective(out, slope_T):
        squares_T = jnp.square(out.logits_TxK).sum(1)
        beyond_T = jnp.square(out.normalizer_T) if normalizer else jnp.zeros_like(squares_T)
        return slope_T * (squares_T + beyond_T), squares_T

    how = {"normalizer": normalizer, "temperature": 0.7, "chunk_tokens": chunk}

    def ours(hidden, head):
        parts = [Part(*part) for part in zip(hidden, ids, slopes, strict=True)]
        total, squares = token_sum(objective, head, parts, **how)
        return 3 * total, squares

    def theirs(hidden, head):
        outs = [candidate_logits(h, head, i, **how) for h, i in zip(hidden, ids, strict=True)]
        values = [jax.vmap(objective)(out, s) for out, s in zip(outs, slopes, strict=True)]
        return 3 * sum(value.sum() for value, _ in values), [squares for _, squares in values]

    assert np.isclose(ours(hidden, head)[0], theirs(hidden, head)[0], rtol=1e-4)
    got = jax.value_and_grad(ours, (0, 1), has_aux=True)(hidden, head)
    want = jax.value_and_grad(theirs, (0, 1), has_aux=True)(hidden, head)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("normalizer", [False, True])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ids": np.full((T, K), V)}, f"ids below {V}, the vocabulary, .* found {V}"),
        ({"ids": np.full((T, K), -7)}, "found -7"),
        ({"ids": np.zeros((5, K), int)}, f"\\[{T}\\], as the hidden states"),
        ({"ids": np.zeros((T, 0), int)}, "at least one candidate"),
        ({"ids": np.zeros((T, K))}, "integers"),
        ({"hidden": np.zeros(D)}, "hidden_TxD: "),
        ({"hidden": np.zeros((T, D), int)}, "floating-point"),
        ({"head": np.zeros((V, D - 1))}, f"\\[V, {D}\\]"),
        ({"head": np.zeros(D)}, "head_weight_VxD: "),
        *[({"temperature": bad}, "temperature: ") for bad in (0.0, -1.0, np.nan, "1", None)],
    ],
)
def test_refusals(normalizer, changes, says):
    hidden, head, ids, _ = data()
    values = {"hidden": hidden, "head": head, "ids": ids, "temperature": 1.0} | changes
    with pytest.raises(BadInputError, match=says):
        candidate_logits(
            values["hidden"], values["head"], values["ids"],
            normalizer=normalizer, temperature=values["temperature"],
        )  # fmt: skip


def test_values_are_not_looked_at_under_tracing():
    """Ids beyond the vocabulary are refused where they are known, and cost nothing elsewhere."""
    hidden, head, ids, _ = data()
    run = jax.jit(lambda ids: candidate_logits(hidden, head, ids, normalizer=True).normalizer_T)
    np.testing.assert_array_equal(run(ids + V), run(ids))
    with pytest.raises(BadInputError, match="hidden states"):
        run(ids[:2])


def test_bfloat16_hidden_states_accumulate_in_float32():
    hidden, head, ids, _ = data()
    half = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    exact = dense(*(x.astype(jnp.float32) for x in half), ids, 1.0)
    for normalizer in (False, True):
        out = candidate_logits(*half, ids, normalizer=normalizer)
        assert out.logits_TxK.dtype == jnp.float32
        np.testing.assert_allclose(out.logits_TxK, exact[0], rtol=1e-5, atol=1e-5)
        gradient = jax.grad(
            lambda *args, n=normalizer: candidate_logits(*args, ids, normalizer=n).logits_TxK.sum(),
            (0, 1),
        )(*half)
        assert [g.dtype for g in gradient] == [jnp.bfloat16] * 2


def largest_array(function, *args) -> int:
    """Elements of the largest intermediate, inputs aside, with nested jaxprs looked into."""
    largest = 0

    def visit(jaxpr):
        nonlocal largest
        for eqn in jaxpr.eqns:
            for out in eqn.outvars:
                largest = max(largest, getattr(out.aval, "size", 0))
            for inner in jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return largest


@pytest.mark.parametrize("normalizer", [False, True])
def test_no_array_of_tokens_by_vocabulary(normalizer):
    """Neither forward nor backward; with the normalizer the largest is a chunk's, or the head's."""
    tokens, vocabulary, chunk = 4096, 5000, 64
    hidden = jnp.ones((tokens, D))
    head = jnp.ones((vocabulary, D))
    ids = jnp.zeros((tokens, K), jnp.int32)

    def total(hidden, head):
        out = candidate_logits(hidden, head, ids, normalizer=normalizer, chunk_tokens=chunk)
        return out.logits_TxK.sum() + (out.normalizer_T.sum() if normalizer else 0.0)

    largest = largest_array(jax.grad(total, (0, 1)), hidden, head)
    allowed = max(chunk * vocabulary if normalizer else chunk * K * D, head.size, hidden.size)
    assert largest <= allowed < tokens * vocabulary


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from trainer_jax.head import candidate_logits
assert jax.device_count() == 8
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
S, T, D, V, K = 2, 24, 8, 64, 5
rng = np.random.default_rng(0)
hidden = rng.normal(size=(S, T, D)).astype(np.float32)
head = rng.normal(size=(V, D)).astype(np.float32)
ids = rng.integers(-1, V, size=(S, T, K)).astype(np.int32)
slope = rng.normal(size=(S, T, K)).astype(np.float32)

for normalizer in (False, True):
    def total(hidden, head, ids, slope):
        out = candidate_logits(hidden, head, ids, normalizer=normalizer, chunk_tokens=5)
        value = (out.logits_TxK * slope).sum()
        return value + (out.normalizer_T.sum() if normalizer else 0.0)

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    step = jax.jit(jax.value_and_grad(total, (0, 1)))
    want = step(hidden, head, ids, slope)
    got = step(put(hidden, "data"), put(head, "tensor"), put(ids, "data"), put(slope, "data"))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-4)
print("equal")
"""


def test_sharded_equals_unsharded():
    """Head over the vocabulary, tokens over data, on eight virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]
