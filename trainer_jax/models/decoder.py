"""The decoder of all families: the forward pass, and an NNX shell for users.

Owns the maths from tokens to the final norm; what a layer is made of follows from the config:
attention or Gated DeltaNet, then experts, a network that sees every token, or both. Must not know
about losses, batches or files; the language-model head is a matrix handed out by `head_weight`,
and `trainer_jax.head` owns its use.

Shape letters: B rows, T tokens of a row, S tokens attended to, D model, H query heads, J key-value
heads, R query heads per key-value head, A head dimension, E experts, X experts per token, F expert
ffn, V vocabulary, L layers, N tokens of all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainer_jax.models import deltanet
from trainer_jax.models.attention import attend, rotary
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.dispatch import Routing, local_experts
from trainer_jax.models.norms import gated_rms_norm, rms_norm
from trainer_jax.models.parameters import STACKS, Params, init_params
from trainer_jax.models.rounding import prepare, prepare_layer

DEFAULT_COMPUTE = ComputeConfig()


class Seams(NamedTuple):
    """Where tokens meet each other, or experts: on a mesh, forms that span its devices."""

    attend: Callable[..., jax.Array]  # of `attention`
    convolution: Callable[..., jax.Array]  # causal_convolution and delta_rule of `deltanet`
    delta_rule: Callable[..., jax.Array]
    experts: Callable[..., jax.Array]  # `dispatch.local_experts`
    whole: Callable[[jax.Array], jax.Array]  # rows [V, D], whole along D before they are looked up
    place: Callable[[jax.Array], jax.Array]  # [B, T, D] where the tokens are
    multiply: Callable[[jax.Array, jax.Array], jax.Array]  # [B, T, D] by [D, F]


def local_seams(config: ModelConfig, compute: ComputeConfig) -> Seams:
    """Of one device."""
    return Seams(
        attend=attend,
        convolution=deltanet.causal_convolution,
        delta_rule=deltanet.delta_rule,
        experts=functools.partial(local_experts, routing=Routing.of(config), impl=compute.ffn),
        whole=lambda rows_VxD: rows_VxD,
        place=lambda x_BxTxD: x_BxTxD,
        multiply=_multiply_rows,
    )


def _multiply_rows(x_BxTxD: jax.Array, matrix_DxF: jax.Array) -> jax.Array:
    """As one matrix of B * T rows: the gradient by the other one, a sum over two dimensions
    otherwise, takes XLA half the time on CPU."""
    B, T, D = x_BxTxD.shape
    return (x_BxTxD.reshape(B * T, D) @ matrix_DxF).reshape(B, T, *matrix_DxF.shape[1:])


class _Row(NamedTuple):
    """What layers know of tokens beside their vectors."""

    seams: Seams
    segments_BxT: jax.Array
    cos_BxTx1xA: jax.Array
    sin_BxTx1xA: jax.Array


def _norm(config: ModelConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    return rms_norm(x, weight, config.rms_norm_eps, around_one=config.norms_around_one)


def _attention(layer: Params, config: ModelConfig, x_BxTxD, row: _Row):
    B, T, _ = x_BxTxD.shape
    J, A, mul = config.num_key_value_heads, config.head_dim, row.seams.multiply
    x_BxTxD = _norm(config, x_BxTxD, layer["attention_norm"])
    q = mul(x_BxTxD, layer["q"]).reshape(B, T, config.num_attention_heads, -1)
    q, gate = q[..., :A], q[..., A:]
    k = mul(x_BxTxD, layer["k"]).reshape(B, T, J, A)
    v = mul(x_BxTxD, layer["v"]).reshape(B, T, J, A)
    if config.norms_queries:
        q, k = _norm(config, q, layer["q_norm"]), _norm(config, k, layer["k_norm"])
    y = row.seams.attend(_rotate(config, q, row), _rotate(config, k, row), v, row.segments_BxT)
    if config.gated_attention:
        y = y * jax.nn.sigmoid(gate)
    return mul(y.reshape(B, T, -1), layer["o"])


def _rotate(config: ModelConfig, x_BxTxHxA: jax.Array, row: _Row) -> jax.Array:
    """Positions into the first `rotary_dim` dimensions; the others pass."""
    if config.rotary_dim == config.head_dim:
        return rotary(x_BxTxHxA, row.cos_BxTx1xA, row.sin_BxTx1xA)
    first, rest = jnp.split(x_BxTxHxA, [config.rotary_dim], axis=-1)
    return jnp.concatenate([rotary(first, row.cos_BxTx1xA, row.sin_BxTx1xA), rest], axis=-1)


def _deltanet(layer: Params, config: ModelConfig, x_BxTxD, row: _Row):
    B, T, _ = x_BxTxD.shape
    mul = row.seams.multiply
    key_width = config.linear_num_key_heads * config.linear_key_head_dim
    x_BxTxD = _norm(config, x_BxTxD, layer["delta_norm"])
    qkv = row.seams.convolution(mul(x_BxTxD, layer["qkv"]), layer["conv"], row.segments_BxT)
    q, k, v = jnp.split(jax.nn.silu(qkv), [key_width, 2 * key_width], axis=-1)
    q, k = (deltanet.normalize(x.reshape(B, T, -1, config.linear_key_head_dim)) for x in (q, k))
    v, z = (
        x.reshape(B, T, -1, config.linear_value_head_dim) for x in (v, mul(x_BxTxD, layer["z"]))
    )
    dt = jax.nn.softplus(
        mul(x_BxTxD, layer["a"]).astype(jnp.float32) + layer["dt_bias"][None, None]
    )
    y = row.seams.delta_rule(
        q * config.linear_key_head_dim**-0.5,
        k,
        v,
        -jnp.exp(layer["a_log"])[None, None] * dt,
        jax.nn.sigmoid(mul(x_BxTxD, layer["b"])),
        row.segments_BxT,
    )
    y = gated_rms_norm(y.astype(x_BxTxD.dtype), z, layer["out_norm"], config.rms_norm_eps)
    return mul(y.reshape(B, T, -1), layer["out"])


def _feed_forward(layer: Params, config: ModelConfig, x_BxTxD, routed_BxTxX, row: _Row):
    x_BxTxD = _norm(config, x_BxTxD, layer["ffn_norm"])
    outputs, mul = [], row.seams.multiply
    if "router" in layer:
        parameters = (layer[leaf] for leaf in ("router", "gate", "up", "down"))
        is_token_BxT = row.segments_BxT > 0
        outputs.append(row.seams.experts(x_BxTxD, is_token_BxT, routed_BxTxX, *parameters))
    if "mlp_gate" in layer:
        hidden_BxTxF = jax.nn.silu(mul(x_BxTxD, layer["mlp_gate"])) * mul(x_BxTxD, layer["mlp_up"])
        y_BxTxD = mul(hidden_BxTxF, layer["mlp_down"])
        if "mlp_router" in layer:
            y_BxTxD = y_BxTxD * jax.nn.sigmoid(mul(x_BxTxD, layer["mlp_router"]))[..., None]
        outputs.append(y_BxTxD)
    return sum(outputs[1:], start=outputs[0])


_ROUTED = "routed_experts"  # of a layer, beside its parameters
_MIXERS = {"layers": _attention, "delta_layers": _deltanet}  # by stack


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segments_BxT: jax.Array,
    routed_experts_BxTxLxX: jax.Array | None = None,
    *,
    compute: ComputeConfig = DEFAULT_COMPUTE,
    seams: Seams | None = None,
) -> jax.Array:
    """Tokens to hidden states after the final norm, [B, T, D] in the compute dtype.

    A token sees itself and earlier tokens of its row with its segment id. Segment 0 is padding;
    what comes out there is finite and means nothing. `positions_BxT` are rotary positions, which
    restart with every segment. The tokens of a segment are contiguous. Routed experts replace the
    routers' own choices where they are not -1 (`experts.route`). `seams` are those of a mesh
    (`on_mesh.seams`), where there is one.
    """
    row = _Row(seams or local_seams(config, compute), segments_BxT, *_rope(config, positions_BxT))

    def block(stack: str, x_BxTxD: jax.Array, layer: Params) -> jax.Array:
        routed_BxTxX = layer.get(_ROUTED)
        layer = prepare_layer({k: leaf for k, leaf in layer.items() if k != _ROUTED}, compute)
        x_BxTxD = x_BxTxD + row.seams.place(_MIXERS[stack](layer, config, x_BxTxD, row))
        return x_BxTxD + row.seams.place(_feed_forward(layer, config, x_BxTxD, routed_BxTxX, row))

    if compute.remat:
        block = jax.checkpoint(block, static_argnums=0)
    if routed_experts_BxTxLxX is not None:
        params = _beside_layers(params, config, routed_experts_BxTxLxX)
    x_BxTxD = row.seams.place(row.seams.whole(prepare(params["embed"], compute))[tokens_BxT])
    x_BxTxD = through_layers(block, [STACKS[kind] for kind in config.kinds], x_BxTxD, params)
    return _norm(config, x_BxTxD, prepare(params["norm"], compute))


def _beside_layers(params: Params, config: ModelConfig, routed_experts_BxTxLxX) -> Params:
    """The parameters with each layer's routed experts among its own, so that they are scanned."""
    routed_LxBxTxX = jnp.moveaxis(routed_experts_BxTxLxX, 2, 0)
    stacks_L = np.array([STACKS[kind] for kind in config.kinds])
    own = {
        stack: params[stack] | {_ROUTED: routed_LxBxTxX[np.flatnonzero(stacks_L == stack)]}
        for stack in dict.fromkeys(stacks_L.tolist())
    }
    return params | own


def through_layers(
    block: Callable[[str, Any, Params], Any], stacks_L: list[str], x: Any, params: Params
) -> Any:
    """`x = block(stack, x, layer)` for every layer; compiled once per run of like layers in the
    shortest part that the pattern of layers repeats.
    """
    L = len(stacks_L)
    period = next(p for p in range(1, L + 1) if stacks_L[p:] == stacks_L[:-p])
    num_repeats = L // period
    unit, rest = stacks_L[:period], stacks_L[num_repeats * period :]
    repeated, remaining = {}, {}
    for stack in dict.fromkeys(unit):
        num = num_repeats * unit.count(stack)
        cut = functools.partial(_repeats, num=num, num_repeats=num_repeats)
        repeated[stack] = jax.tree.map(cut, params[stack])
        remaining[stack] = jax.tree.map(lambda leaf, num=num: leaf[num:], params[stack])

    def one_repeat(x: Any, layers: Params) -> tuple[Any, None]:
        return _through_runs(block, unit, x, layers), None

    x, _ = jax.lax.scan(one_repeat, x, repeated)
    return _through_runs(block, rest, x, remaining)


def _repeats(leaf: jax.Array, *, num: int, num_repeats: int) -> jax.Array:
    return leaf[:num].reshape(num_repeats, num // num_repeats, *leaf.shape[1:])


def _through_runs(block: Callable, stacks: list[str], x: Any, layers: Params) -> Any:
    """A scan for every run of layers of one stack."""
    used = dict.fromkeys(layers, 0)
    for stack, run in groupby(stacks):
        start, num = used[stack], len(list(run))
        part = jax.tree.map(lambda leaf, s=start, n=num: leaf[s : s + n], layers[stack])
        if num == 1:
            x = block(stack, x, jax.tree.map(lambda leaf: leaf[0], part))
        else:
            x, _ = jax.lax.scan(lambda x, layer, s=stack: (block(s, x, layer), None), x, part)
        used[stack] += num
    return x


def _rope(config: ModelConfig, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, [B, T, 1, A/2] float32, A the rotated dimensions."""
    exponent = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    angles = positions_BxT[:, :, None, None].astype(jnp.float32) / jnp.power(
        jnp.float32(config.rope_theta), exponent
    ).reshape(1, 1, 1, -1)
    return jnp.cos(angles), jnp.sin(angles)


def head_weight(params: Params, *, compute: ComputeConfig = DEFAULT_COMPUTE) -> jax.Array:
    """The language-model head [V, D] in the compute dtype: `embed` when they are tied."""
    return prepare(params["head"] if "head" in params else params["embed"], compute)


class Decoder(nnx.Module):
    """The same model as an NNX module, for notebooks; training uses the pure functions above."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.params = nnx.data(jax.tree.map(nnx.Param, init_params(config, rngs.params())))

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits [B, T, V] of whole rows."""
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))["params"]
        B, T = tokens_BxT.shape
        positions_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
        segments_BxT = jnp.ones((B, T), jnp.int32)
        hidden = hidden_states(params, self.config, tokens_BxT, positions_BxT, segments_BxT)
        return jnp.einsum("btd,vd->btv", hidden, head_weight(params))
