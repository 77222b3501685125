"""The experts' implementations against a loop over tokens, and against each other."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.errors import BadInputError
from trainer_jax.hlo import Module
from trainer_jax.models.experts import BLOCK, grouped_ffn, route, sorted_ffn
from trainer_jax.models.kernels import grouped_dot

D, F = 8, 6
NAMES = ("y", "x", "weights", "gate", "up", "down")


def random_inputs(experts_NxX, num_experts, seed=0):
    """(x, weights, gate, up, down) for a routing."""
    rng = np.random.default_rng(seed)
    N, X = experts_NxX.shape
    shapes = [(N, D), (num_experts, D, F), (num_experts, D, F), (num_experts, F, D)]
    x, *matrices = (rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes)
    return x, rng.uniform(0.1, 1, (N, X)).astype(np.float32), *matrices


def random_routing(N, X, E, seed=0):
    """Different experts for each token, as top-k gives."""
    order_NxE = np.random.default_rng(seed).random((N, E)).argsort(axis=1)
    return order_NxE[:, :X].astype(np.int32)


def run(impl, experts_NxX, x, weights, gate, up, down, direction_NxD):
    """The output, then the gradient of its product with a direction by every input.

    `impl` is one of `grouped_ffn`, or a function like it.
    """
    call = impl if callable(impl) else functools.partial(grouped_ffn, impl=impl)

    def ffn(x, weights, gate, up, down):
        return call(x, weights, experts_NxX, gate, up, down)

    y_NxD, pullback = jax.vjp(ffn, x, weights, gate, up, down)
    return y_NxD, *pullback(direction_NxD)


run_jit = jax.jit(run, static_argnums=0)


def reference(experts_NxX, x, weights, gate, up, down, direction_NxD):
    """As `run`: float64, one token and one expert at a time, the derivative by hand."""
    x, weights, gate, up, down = (a.astype(np.float64) for a in (x, weights, gate, up, down))
    y = np.zeros_like(x)
    d_x, d_weights, d_gate, d_up, d_down = (np.zeros_like(a) for a in (x, weights, gate, up, down))
    for n, dy in enumerate(direction_NxD.astype(np.float64)):
        for k, e in enumerate(experts_NxX[n]):
            if e >= len(gate):
                continue
            a, b, w = x[n] @ gate[e], x[n] @ up[e], weights[n, k]
            sigmoid = 1 / (1 + np.exp(-a))
            hidden = a * sigmoid * b
            y[n] += w * hidden @ down[e]
            d_weights[n, k] = hidden @ down[e] @ dy
            d_hidden = w * down[e] @ dy
            d_a = d_hidden * b * sigmoid * (1 + a * (1 - sigmoid))
            d_b = d_hidden * a * sigmoid
            d_x[n] += gate[e] @ d_a + up[e] @ d_b
            d_gate[e] += np.outer(x[n], d_a)
            d_up[e] += np.outer(x[n], d_b)
            d_down[e] += w * np.outer(hidden, dy)
    return y, d_x, d_weights, d_gate, d_up, d_down


def assert_near(got, want, tolerance):
    """Within a tolerance relative to the largest entry of each array."""
    for name, a, b in zip(NAMES, got, want, strict=True):
        scale = max(float(np.abs(b).max()), 1e-30)
        a, b = (np.asarray(v, np.float64) / scale for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=name)


N, X, E = 3 * BLOCK + 5, 2, 5  # one shape for most: compiled once
ROUTINGS = {
    "random": (random_routing(N, X, E), E),
    "all to one": (np.full((N, X), 3, np.int32), E),
    "ends never chosen": (random_routing(N, X, E - 2) + np.int32(1), E),
    "some somebody else's": (random_routing(N, X, 2 * E), E),
    "all somebody else's": (np.full((N, X), E, np.int32), E),
    "whole blocks": (np.arange(4 * BLOCK, dtype=np.int32).reshape(-1, 1) % 2, 2),
    "one expert": (np.zeros((BLOCK + 1, 1), np.int32), 1),
    "one token": (random_routing(1, 2, 8), 8),
}


def careless_dot(rows_MxI, matrices_ExIxO, sizes_E):
    """A product as kernels may have it: whatever was in memory, beyond the last group."""
    y_MxO = jax.lax.ragged_dot(rows_MxI, matrices_ExIxO, sizes_E)
    inside_M = jnp.arange(len(y_MxO)) < sizes_E.sum()
    return jnp.where(inside_M[:, None], y_MxO, jnp.nan)


def by_tokamax(*arguments):
    """With the one of tokamax's products that CPU has, in the place of its kernels."""
    return sorted_ffn(*arguments, ragged_dot=grouped_dot(("xla",)))


def needs_tokamax():
    pytest.importorskip("tokamax", reason="the extra `accelerator` is not installed")


@pytest.fixture(params=["blocks", "dense", "careless", "tokamax"])
def impl(request):
    if request.param == "careless":
        return functools.partial(sorted_ffn, ragged_dot=careless_dot)
    if request.param == "tokamax":
        needs_tokamax()
        return by_tokamax
    return request.param


@pytest.mark.parametrize("routing", ROUTINGS)
def test_outputs_and_all_gradients_equal_a_loop_over_tokens(routing, impl):
    experts_NxX, num_experts = ROUTINGS[routing]
    inputs = random_inputs(experts_NxX, num_experts)
    direction_NxD = np.random.default_rng(1).normal(size=inputs[0].shape).astype(np.float32)
    want = reference(experts_NxX, *inputs, direction_NxD)
    assert_near(run_jit(impl, experts_NxX, *inputs, direction_NxD), want, 1e-5)


def test_auto_is_the_faster_of_the_two_as_measured():
    def of(N, X, E):
        experts_NxX = np.zeros((N, X), np.int32)
        arguments = (experts_NxX, *random_inputs(experts_NxX, E), np.zeros((N, D), np.float32))
        text = {
            impl: str(jax.make_jaxpr(run, static_argnums=0)(impl, *arguments))
            for impl in ("auto", "blocks", "dense")
        }
        assert text["blocks"] != text["dense"]
        return "blocks" if text["auto"] == text["blocks"] else "dense"

    cases = [(4096, 2, 8), (4096, 2, 4), (128, 2, 8), (32, 2, 8), (4096, 2, 2), (4096, 1, 1)]
    assert [of(*case) for case in cases] == ["blocks"] * 3 + ["dense"] * 3


def test_bfloat16_is_near_float32_and_keeps_dtypes(impl):
    experts_NxX = random_routing(150, 2, 4)
    x, weights, *matrices = random_inputs(experts_NxX, 4)
    direction = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    x, direction, *matrices = (jnp.asarray(a, jnp.bfloat16) for a in (x, direction, *matrices))
    wide = [np.asarray(a, np.float32) for a in (x, *matrices, direction)]
    want = reference(experts_NxX, wide[0], weights, *wide[1:])
    got = run_jit(impl, experts_NxX, x, weights, *matrices, direction)
    assert [a.dtype.name for a in got] == ["bfloat16"] * 2 + ["float32"] + ["bfloat16"] * 3
    assert_near(got, want, 0.03)


def test_nothing_depends_on_the_width_of_default_types(impl):
    experts_NxX = random_routing(N, X, E)
    inputs = (experts_NxX, *random_inputs(experts_NxX, E), np.ones((N, D), np.float32))
    want = run_jit(impl, *inputs)
    with jax.enable_x64(True):
        got = run_jit(impl, *inputs)
    assert all(a.dtype == np.float32 for a in got)
    assert_near(got, want, 1e-6)


def compiled_run(impl, N, X, E):
    experts_NxX = random_routing(N, X, E)
    arguments = (experts_NxX, *random_inputs(experts_NxX, E), np.ones((N, D), np.float32))
    return run_jit.lower(impl, *arguments).compile()


def einsum_ffn(x_NxD, weights_NxX, experts_NxX, gate, up, down):
    is_of_NxXxE = jax.nn.one_hot(experts_NxX, len(gate), dtype=x_NxD.dtype)
    hidden_NxExF = jax.nn.silu(jnp.einsum("nd,edf->nef", x_NxD, gate))
    hidden_NxExF = hidden_NxExF * jnp.einsum("nd,edf->nef", x_NxD, up)
    return jnp.einsum("nx,nxe,nef,efd->nd", weights_NxX, is_of_NxXxE, hidden_NxExF, down)


@pytest.mark.parametrize(
    ("impl", "is_dense"),
    [
        ("auto", False),
        ("blocks", False),
        ("dense", True),
        (einsum_ffn, True),
        (functools.partial(sorted_ffn, ragged_dot=jax.lax.ragged_dot), True),  # XLA:CPU's
    ],
)
def test_the_default_holds_no_array_of_tokens_by_experts(impl, is_dense):
    N, X, E = 1024, 2, 32
    (largest,) = Module(compiled_run(impl, N, X, E).as_text()).largest(1)
    assert (largest.size_bytes >= 4 * N * E * min(D, F)) == is_dense, largest


def test_without_the_package_or_an_accelerator_the_kernels_are_refused():
    assert jax.default_backend() == "cpu"
    with pytest.raises(BadInputError) as refused:
        compiled_run("tokamax", 8, 2, 4)
    assert 'model.compute.ffn = "tokamax": expected ' in str(refused.value)
    installed = importlib.util.find_spec("tokamax")
    assert ("Not supported on cpu" if installed else "the extra `accelerator`") in str(
        refused.value
    )


@pytest.mark.filterwarnings("ignore:jax.experimental.pallas.dot was moved:DeprecationWarning")
def test_the_kernels_lower_for_a_gpu_that_is_not_here():
    needs_tokamax()
    import tokamax

    experts_NxX = random_routing(N, X, E)
    arguments = (experts_NxX, *random_inputs(experts_NxX, E), np.ones((N, D), np.float32))
    with tokamax.config.cross_compile(True):
        traced = run_jit.trace("tokamax", *arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # gate, up and down, each with its product and two gradients
    assert sum("custom_call" in line and "triton" in line for line in text.splitlines()) == 9


def test_under_scan_and_remat_as_without():
    experts_NxX = random_routing(100, 2, 4)
    x, weights, *matrices = random_inputs(experts_NxX, 4)
    experts_NxX, weights = jnp.asarray(experts_NxX), jnp.asarray(weights)
    layers = [np.stack([m, 0.5 * m]) for m in matrices]

    def layer(x, matrices):
        return x + grouped_ffn(x, weights, experts_NxX, *matrices, impl="blocks"), None

    def scanned(x, layers):
        return jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, layers)[0]).sum()

    def unrolled(x, layers):
        for i in range(2):
            x, _ = layer(x, [m[i] for m in layers])
        return jnp.sin(x).sum()

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, layers) for f in (scanned, unrolled))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.parametrize("normalize", [True, False])
def test_route_is_the_top_of_a_softmax_over_all_experts(normalize):
    rng = np.random.default_rng(0)
    x, router = (rng.normal(size=shape).astype(np.float32) for shape in ((20, D), (D, 7)))
    weights_NxX, experts_NxX = route(jnp.asarray(x), jnp.asarray(router), 3, normalize=normalize)
    p_NxE = np.exp(x @ router)
    p_NxE /= p_NxE.sum(axis=1, keepdims=True)
    order_NxX = np.argsort(-p_NxE, axis=1)[:, :3]
    want = np.take_along_axis(p_NxE, order_NxX, axis=1)
    if normalize:
        want /= want.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(experts_NxX, order_NxX)
    np.testing.assert_allclose(weights_NxX, want, rtol=1e-5)
    assert (weights_NxX.dtype, experts_NxX.dtype) == (jnp.float32, jnp.int32)


def test_experts_split_over_devices_compute_what_one_does():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer_jax.sharded_experts"],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "19 runs"
