"""Attention in chunks against the same formula with every score written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer_jax.models.attention import attend, rotary


def plain(q_BxTxHxA, k_BxTxJxA, v_BxTxJxA, segments_BxT):
    B, T, H, A = q_BxTxHxA.shape
    J = k_BxTxJxA.shape[2]
    q = q_BxTxHxA.reshape(B, T, J, H // J, A)
    scores = jnp.einsum("btjra,bsja->bjrts", q, k_BxTxJxA) * A**-0.5
    causal_TxT = np.tri(T, dtype=bool)
    allowed = (segments_BxT[:, :, None] == segments_BxT[:, None, :]) & causal_TxT[None]
    p = jax.nn.softmax(jnp.where(allowed[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bjrts,bsja->btjra", p, v_BxTxJxA).reshape(B, T, H, A)


def random_qkv(B, T, H, J, A=8, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(B, T, heads, A)).astype(np.float32) for heads in (H, J, J)]


def segments_of(*rows):
    """Lengths of the segments of each row; a negative length is padding."""
    lines = []
    for lengths in rows:
        ids = [0 if n < 0 else i + 1 for i, n in enumerate(lengths)]
        lines.append(np.repeat(ids, np.abs(lengths)))
    return np.stack(lines).astype(np.int32)


def chunked(q, k, v, segments):
    return attend(q, k, v, segments, chunk=16)


def with_gradients(f, q, k, v, segments, weight):
    out, pullback = jax.vjp(lambda q, k, v: f(q, k, v, segments), q, k, v)
    return out, *pullback(weight)


with_gradients_jit = jax.jit(with_gradients, static_argnums=0)

# lengths of segments in rows; heads and key-value heads. One shape for most: compiled once
CASES = {
    "one segment": ([[53], [53]], 4, 2),
    "packed": ([[20, 3, 30], [1, 50, 2]], 4, 2),
    "edges on chunks": ([[16, 16, 21], [32, 16, 5]], 4, 2),
    "padding": ([[10, 20, -23], [-53]], 4, 2),
    "padding between": ([[10, -30, 13], [-17, 36]], 4, 2),
    "shorter than a chunk, one key head": ([[7]], 3, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_the_plain_form(case):
    rows, H, J = CASES[case]
    segments = segments_of(*rows)
    q, k, v = random_qkv(*segments.shape, H, J)
    real = segments > 0
    # nothing is asked of padding beyond being finite, so nothing flows back from it
    weight = np.random.default_rng(1).normal(size=q.shape) * real[..., None, None]
    weight = weight.astype(np.float32)
    got = with_gradients_jit(chunked, q, k, v, segments, weight)
    want = with_gradients_jit(plain, q, k, v, segments, weight)
    for name, a, b in zip(("out", "q", "k", "v"), got, want, strict=True):
        assert np.isfinite(a).all(), name
        np.testing.assert_allclose(a[real], b[real], rtol=0, atol=1e-5, err_msg=name)
        if name != "out":  # the gradient of padding is exactly nothing
            assert not np.asarray(a)[~real].any(), name


def test_padding_stays_finite_for_any_gradient():
    segments = segments_of([5, -48], [-53])
    q, k, v = (100 * x for x in random_qkv(*segments.shape, 4, 2))
    for x in with_gradients_jit(chunked, q, k, v, segments, np.ones_like(q)):
        assert np.isfinite(x).all()


def test_a_running_softmax_survives_large_scores():
    """Peaks that rise along the row: what was summed before fades instead of overflowing."""
    segments = segments_of([64])
    q, k, v = random_qkv(1, 64, 2, 1)
    q, k = np.abs(q) * 10, np.abs(k) * np.linspace(1, 40, 64, dtype=np.float32)[:, None, None]
    got, want = (jax.jit(f)(q, k, v, segments) for f in (chunked, plain))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_no_array_of_all_scores_exists_forward_or_backward():
    B, T, H, J, A = 1, 2048, 2, 1, 8
    shapes = [jax.ShapeDtypeStruct((B, T, heads, A), jnp.float32) for heads in (H, J, J, H)]
    segments = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def peak_bytes(f):
        q, k, v, weight = shapes
        memory = with_gradients_jit.lower(f, q, k, v, segments, weight).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert peak_bytes(plain) > 4 * T * T
    assert peak_bytes(attend) < T * T


def test_bfloat16_is_near_float32():
    segments = segments_of([20, 30, -3], [53])
    qkv = [jnp.asarray(x, jnp.bfloat16) for x in random_qkv(2, 53, 4, 2)]
    weight = jnp.asarray((segments > 0)[..., None, None] * np.ones((2, 53, 4, 8)), jnp.bfloat16)
    got = with_gradients_jit(chunked, *qkv, segments, weight)
    wide = [x.astype(jnp.float32) for x in (*qkv, weight)]
    want = with_gradients_jit(plain, *wide[:3], segments, wide[3])
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        a, b = (np.asarray(x, np.float32)[segments > 0] for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=0.03 * np.abs(b).max())


def test_nothing_depends_on_the_width_of_default_types():
    segments = segments_of([20, 33], [53])
    q, k, v = random_qkv(2, 53, 4, 2)
    want = with_gradients_jit(chunked, q, k, v, segments, q)
    with jax.enable_x64(True):
        got = with_gradients_jit(chunked, q, k, v, segments, q)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_rotary_makes_scores_depend_on_distance_alone():
    A = 8
    q, k = (np.tile(x[:, :1], (1, 30, 1, 1)) for x in random_qkv(1, 1, 1, 1, A)[:2])
    angles = np.arange(30)[None, :, None, None] * 10.0 ** -np.arange(A // 2)
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    scores_TxT = np.einsum("bthi,bshi->ts", rotary(q, cos, sin), rotary(k, cos, sin))
    for distance in (0, 1, 7):
        diagonal = np.diagonal(scores_TxT, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=0, atol=1e-5)
    assert np.ptp(scores_TxT) > 0.1
