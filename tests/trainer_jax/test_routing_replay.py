"""Routing replay: the sampler's experts in place of the router's own choice, and what it is for."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from contracts.errors import BadInputError
from contracts.routed import RoutedExperts
from contracts.types import (
    Ending,
    GenerateRequest,
    KvFormat,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    WeightFormat,
)
from sampler_fleet.engines.embedded import EmbeddedEngine
from sampler_fleet.episodes.base import GeneratedChunk
from sampler_fleet.episodes.buffer import TokenBuffer
from tests.sampler_fleet.engines.engine_checkpoints import (
    CONFIG,
    MIXTRAL,
    random_tensors,
    write_checkpoint,
)
from tests.trainer_jax import test_step
from tests.trainer_jax.random_trajectories import random_groups, with_routing
from tests.trainer_jax.test_model_parity import BASE, DENSE, HYBRID, PLAIN, random_params
from tests.trainer_jax.test_model_parity import MIXTRAL as ONE_EXPERT
from trainer_jax.batch import pack
from trainer_jax.hf import load_checkpoint
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import make_mesh
from trainer_jax.models.config import ATTENTION, ComputeConfig, ModelConfig
from trainer_jax.models.decoder import hidden_states, local_seams
from trainer_jax.models.experts import route
from trainer_jax.plan import check_routing
from trainer_jax.records import RecordRules, RoutingRules, check_trajectory
from trainer_jax.step import make_update

TWO_EXPERTS = replace(ONE_EXPERT, num_experts_per_tok=2)
FAMILIES = {
    "qwen3_moe": BASE,
    "qwen3_moe, not normalized": replace(BASE, norm_topk_prob=False),
    "qwen3_5_moe": HYBRID,
    "mixtral": TWO_EXPERTS,
}


def rows_of(config: ModelConfig, seed: int, *shape: int):
    """Tokens, positions and segments of whole rows."""
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, shape, np.int32)
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    return tokens, positions, np.ones(shape, np.int32)


def random_routing(config: ModelConfig, seed: int, *shape: int) -> np.ndarray:
    """Different experts for every token and layer, int16 [*shape, L, X]."""
    order = np.random.default_rng(seed).random(
        (*shape, config.num_hidden_layers, config.num_experts)
    )
    return order.argsort(-1)[..., : config.num_experts_per_tok].astype(np.int16)


def own_routing(params, config: ModelConfig, rows) -> np.ndarray:
    """What the routers choose by themselves, int16 [B, T, L, X]."""
    seams, chosen = local_seams(config, PLAIN), []

    def experts(x, is_token, routed, router, *matrices):
        chosen.append(route(x, router, config.num_experts_per_tok, normalize=True)[1])
        return seams.experts(x, is_token, routed, router, *matrices)

    with jax.disable_jit():
        hidden_states(params, config, *rows, seams=seams._replace(experts=experts))
    return np.stack(chosen, axis=2).astype(np.int16)


@functools.partial(jax.jit, static_argnames="config")
def loss_and_grads(params, config, rows, routing=None):
    def loss(params):
        hidden = hidden_states(params, config, *rows, routing)
        return jnp.square(hidden).mean(axis=-1).sum() + hidden[..., 0].sum()

    return jax.value_and_grad(loss)(params)


def same_bits(got, want) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_the_routers_own_at_the_experts_given(normalize):
    rng = np.random.default_rng(0)
    x, router = rng.normal(size=(40, 16)), rng.normal(size=(16, 8))
    given = rng.random((40, 8)).argsort(-1)[:, :3].astype(np.int16)
    given[::4] = -1
    weights, experts = map(
        np.asarray,
        route(jnp.float32(x), jnp.float32(router), 3, normalize=normalize, routed_experts=given),
    )
    logits = x @ router
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for n in range(40):
        want = np.sort(given[n] if given[n, 0] >= 0 else np.argsort(-probs[n])[:3])
        order = np.argsort(experts[n])
        assert (experts[n][order] == want).all()
        total = probs[n, want].sum() if normalize else 1.0
        np.testing.assert_allclose(weights[n][order], probs[n, want] / total, rtol=1e-4)


def test_experts_next_to_impossible_leave_weights_finite():
    x, router = jnp.full((1, 1), 300.0), jnp.array([[1.0, 0.0, -0.5]])
    given = jnp.array([[1, 2]], jnp.int16)
    routed = functools.partial(route, x, normalize=True, routed_experts=given)
    weights, experts = routed(router, 2)
    gradient = jax.grad(lambda router: routed(router, 2)[0].sum())(router)
    assert set(experts[0].tolist()) == {1, 2}
    assert np.isfinite(weights).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_is_the_sum_over_the_experts_given(family):
    """Value and gradients, against all experts computed and the others left out."""
    config = replace(FAMILIES[family], num_hidden_layers=1, layer_types=())
    if config.model_type == "qwen3_5_moe":
        config = replace(config, layer_types=(ATTENTION,))
    params = random_params(config, 3)
    params["layers"]["o"] = jnp.zeros_like(params["layers"]["o"])  # the experts alone
    rows, routing = rows_of(config, 1, 2, 9), random_routing(config, 1, 2, 9)
    routing[:, ::3] = -1

    def norm(x, weight):
        scale = 1 + weight if config.norms_around_one else weight
        return x * scale / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)

    def oracle(params):
        (layer,) = [{k: v[0] for k, v in params["layers"].items()}]
        x = params["embed"][rows[0]]
        h = norm(x, layer["ffn_norm"][None, None])
        probs = jax.nn.softmax(h @ layer["router"], axis=-1)
        own = jnp.argsort(-probs, axis=-1)[..., : config.num_experts_per_tok]
        given = routing[:, :, 0].astype(np.int32)
        chosen = jnp.where(given < 0, own, given)
        keeps = (chosen[..., None] == np.arange(config.num_experts)[None, None, None]).any(-2)
        weights = jnp.where(keeps, probs, 0.0)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdims=True)
        each = jax.nn.silu(jnp.einsum("btd,edf->btef", h, layer["gate"]))
        each = each * jnp.einsum("btd,edf->btef", h, layer["up"])
        y = jnp.einsum("btef,efd,bte->btd", each, layer["down"], weights)
        if "mlp_gate" in layer:
            shared = jax.nn.silu(h @ layer["mlp_gate"]) * (h @ layer["mlp_up"])
            gate = jax.nn.sigmoid(h @ layer["mlp_router"])[..., None]
            y = y + (shared @ layer["mlp_down"]) * gate
        out = norm(x + y, params["norm"][None, None])
        return jnp.square(out).mean(axis=-1).sum() + out[..., 0].sum()

    value, grads = loss_and_grads(params, config, rows, routing)
    want, want_grads = jax.jit(jax.value_and_grad(oracle))(params)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert np.abs(np.asarray(grads["layers"]["router"])).max() > 1e-3
    for tree in (grads, want_grads):
        del tree["layers"]["o"]  # the oracle has no attention for it to weigh
    test_step.assert_same(grads, want_grads, rtol=1e-3, atol=1e-5)
    other, _ = loss_and_grads(params, config, rows)
    assert abs(float(other) - float(value)) > 1e-3, "the routers would choose otherwise"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_routers_own_choice_given_back_changes_no_bit(family):
    config = FAMILIES[family]
    params, rows = random_params(config, 5), rows_of(config, 5, 2, 24)
    want = loss_and_grads(params, config, rows)
    own = own_routing(params, config, rows)
    assert same_bits(loss_and_grads(params, config, rows, np.full_like(own, -1)), want)
    assert same_bits(loss_and_grads(params, config, rows, own), want)
    assert same_bits(loss_and_grads(params, config, rows, own[..., ::-1].copy()), want)
    own[1, 7, 1] = (own[1, 7, 1] + 1) % config.num_experts
    assert not same_bits(loss_and_grads(params, config, rows, own), want)


# --- records and batches ------------------------------------------------------------------------

ROUTING = RoutingRules.of(test_step.CONFIG)
RULES = RecordRules(
    group_names=test_step.NAMES, vocab_size=64, replay=True, max_candidates=16, routing=ROUTING
)


def packed(groups, rules=RULES, **settings):
    advantages = [np.array([0.5, -0.5, 1.0, 0.0])] * 2
    return pack(groups, advantages, candidate_buckets=(4, 16), rules=rules, **settings)


@pytest.mark.parametrize(("rows", "num_shards", "row_tokens"), [(2, 1, 64), (4, 2, 16)])
def test_every_token_is_packed_beside_its_experts(rows, num_shards, row_tokens):
    groups = with_routing(random_groups(), num_layers=1, num_per_token=2, num_experts=4)
    batches = packed(groups, rows=rows, num_shards=num_shards, row_tokens=row_tokens)
    found = {}
    for batch in batches:
        routed = batch.routed_experts_BxRxLxX
        assert routed is not None and routed.shape == (*batch.tokens_BxR.shape, 1, 2)
        assert (routed[batch.segments_BxR == 0] == -1).all()
        for b, segments in enumerate(batch.segments_BxR):
            for segment in range(1, segments.max() + 1):
                at = segments == segment
                found[tuple(batch.tokens_BxR[b, at])] = routed[b, at]
    trajectories = [t for g in groups for t in g.trajectories if t.reward is not None]
    assert len(found) == len(trajectories) == 7
    for t in trajectories:
        want = np.full((len(t.tokens), 1, 2), -1)
        for part in t.routed_experts:
            want[part.start : part.end] = part.ids
        assert (want[-1] == -1).all() and (want[5] == -1).all() and (want[6] >= 0).all()
        np.testing.assert_array_equal(found[tuple(t.tokens)], want)


def test_without_replay_a_batch_has_no_routing():
    groups = with_routing(random_groups(), num_layers=1, num_per_token=2, num_experts=4)
    (plain, *_) = packed(groups, replace(RULES, routing=None), rows=2, row_tokens=64)
    assert plain.routed_experts_BxRxLxX is None
    with_none = jax.tree.structure(plain)
    assert with_none == jax.tree.structure(packed(random_groups(), replace(RULES, routing=None),
                                                  rows=2, row_tokens=64)[0])  # fmt: skip


def routed(start: int, *shape: int) -> RoutedExperts:
    num, layers, per_token = shape
    ids = np.tile(np.arange(per_token, dtype=np.uint8), (num, layers, 1))
    return RoutedExperts(start=start, ids=ids)


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        ((), "expected routed experts"),
        ((routed(0, 3, 2, 2),), "1 layers, 2 of 4 each"),
        ((routed(0, 3, 1, 3),), "1 layers, 2 of 4 each"),
        ((RoutedExperts(start=0, ids=np.full((2, 1, 2), [1, 4], np.uint8)),), "up to 4"),
        ((RoutedExperts(start=0, ids=np.full((2, 1, 2), 1, np.uint8)),), "differ"),
        ((RoutedExperts(start=0, ids=np.full((2, 1, 2), [0, 1], np.int32)),), "uint8 or uint16"),
        ((routed(0, 4, 1, 2), routed(3, 2, 1, 2)), "from 4"),
        ((routed(10, 40, 1, 2),), "from 0 to 19"),
        ((routed(10, 10, 1, 2),), "from 0 to 19"),
        ((routed(-1, 4, 1, 2),), "before the last"),
    ],
)
def test_routing_that_no_model_of_ours_has_is_refused_with_its_sampler(parts, rule):
    trajectory = random_groups()[0].trajectories[0]
    check_trajectory(replace(trajectory, routed_experts=(routed(0, 19, 1, 2),)), RULES)
    with pytest.raises(BadInputError, match=rule) as refused:
        check_trajectory(replace(trajectory, routed_experts=parts), RULES)
    assert trajectory.sampler_ids[0] in str(refused.value)


def test_a_dense_model_routes_nothing():
    with pytest.raises(BadInputError) as refused:
        RoutingRules.of(DENSE)
    assert str(refused.value) == (
        "run file, sampling.return_routed_experts: expected a mixture of experts, whose routing is "
        "replayed, found a qwen3"
    )


def test_groups_beyond_a_message_are_refused():
    qwen35 = RoutingRules(num_layers=40, num_per_token=8, num_experts=256)
    sections = {"episodes": {"group_size": 8}, "fleet": {"max_context_tokens": 13_107}}
    check_routing(sections, qwen35)
    with pytest.raises(BadInputError) as refused:
        check_routing(sections, qwen35._replace(num_experts=512))
    assert str(refused.value) == (
        "run file, sampling.return_routed_experts: expected episodes.group_size * "
        "fleet.max_context_tokens of at most 52428, at 640 bytes per token, found 104856"
    )


# --- against a sampler in another precision -----------------------------------------------------

SPARSE = CONFIG | {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 3}
SAMPLING = SamplingParams(
    temperature=1.0, top_p=0.97, top_k=12, max_new_tokens=24, return_routed_experts=True
)


async def episodes(engine, config, num: int = 8) -> list[Trajectory]:
    """Of two turns each."""

    async def play(i: int) -> Trajectory:
        rng = np.random.default_rng(i)
        buffer = TokenBuffer(rng.integers(0, config["vocab_size"], 12).astype(np.int32))
        for turn in range(2):
            request = GenerateRequest(
                request_id=f"{i}/{turn}", session_id=str(i), tokens=buffer.tokens, sampling=SAMPLING
            )
            buffer.add_sampled(
                [
                    GeneratedChunk(completion=chunk, group="bf16", sampler_id="a")
                    async for chunk in engine.generate(request)
                ]
            )
            if turn == 0:
                buffer.add_given(rng.integers(0, config["vocab_size"], 7))
        return Trajectory(
            task_id="t",
            session_id=str(i),
            **buffer.records(),
            reward=float(i % 2),
            ending=Ending.SUBMITTED,
        )

    return await asyncio.gather(*map(play, range(num)))


async def sampled(directory, config, tensors, *, format: WeightFormat, exact: bool = False):
    engine = EmbeddedEngine(
        kv_format=KvFormat.BF16 if exact else KvFormat.FP8,
        activation_format="none",
        split_k=1,
        max_sessions=8,
        max_context_tokens=128,
        exact=exact,
    )
    manifest = write_checkpoint(directory, config=config, tensors=tensors, format=format)
    await engine.load(directory, manifest)
    trajectories = await episodes(engine, config)
    await engine.close()
    return trajectories


def kl_of(trajectories, model, params, *, replays: bool) -> float:
    """Mean KL(sampler || trainer) of the sampled tokens, as an update reports it."""
    update = make_update(
        model, LossConfig(), optax.sgd(1.0), make_mesh({}), group_names=("bf16",),
        compute=ComputeConfig(round_weights=True),
    )  # fmt: skip
    rules = RecordRules(
        group_names=("bf16",), vocab_size=model.vocab_size, replay=True, max_candidates=16,
        routing=RoutingRules.of(model) if replays else None,
    )  # fmt: skip
    group = TrajectoryGroup(sequence=1, task_id="t", trajectories=tuple(trajectories))
    batches = pack(
        [group], [np.ones(len(trajectories))], row_tokens=128, rows=4, candidate_buckets=(16,),
        rules=rules,
    )  # fmt: skip
    _, pending = update(update.init(params), batches, version=1)
    return pending.read()["kl"]


def routing_of(trajectory: Trajectory) -> np.ndarray:
    """Of every token but the last, sorted."""
    (part,) = trajectory.routed_experts
    assert (part.start, part.end) == (0, len(trajectory.tokens) - 1)
    return np.sort(part.ids.astype(np.int16), axis=-1)


def trainers_routing(trajectory: Trajectory, model, params) -> np.ndarray:
    tokens = trajectory.tokens[None, :-1]
    rows = tokens, np.arange(tokens.shape[1], dtype=np.int32)[None], np.ones_like(tokens)
    return np.sort(own_routing(params, model, rows)[0], axis=-1)


@pytest.mark.parametrize("config", [SPARSE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
async def test_with_equal_weights_the_sampler_routes_as_the_trainer_would(tmp_path, config):
    tensors = random_tensors(config)
    trajectories = await sampled(tmp_path, config, tensors, format=WeightFormat.BF16, exact=True)
    model, params = load_checkpoint(tmp_path)
    for trajectory in trajectories:
        want = trainers_routing(trajectory, model, params)
        np.testing.assert_array_equal(routing_of(trajectory), want)


async def test_replay_lowers_what_another_precision_routes_otherwise(tmp_path):
    """NVFP4 experts and an FP8 KV cache against BF16 weights: the difference that is left is the
    experts' own."""
    tensors = random_tensors(SPARSE)
    write_checkpoint(tmp_path / "bf16", config=SPARSE, tensors=tensors)
    model, params = load_checkpoint(tmp_path / "bf16")
    trajectories = await sampled(tmp_path / "nvfp4", SPARSE, tensors, format=WeightFormat.NVFP4)
    differs = [
        (routing_of(t) != trainers_routing(t, model, params)).any(-1) for t in trajectories[:2]
    ]
    assert 0.02 < np.concatenate(differs).mean() < 0.5, "of tokens' layers"
    without, replayed = (
        kl_of(trajectories, model, params, replays=replays) for replays in (False, True)
    )
    assert replayed < 0.8 * without
