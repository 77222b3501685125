"""Run as a process with eight virtual devices by test_step: meshes against one device."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import optax

from tests.trainer_jax.random_trajectories import random_groups, with_routing
from tests.trainer_jax.test_step import CONFIG, NAMES, PARAMS, assert_same, batches_of, run
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import make_mesh
from trainer_jax.models.config import ComputeConfig
from trainer_jax.recorded import by_trajectory
from trainer_jax.records import RoutingRules
from trainer_jax.step import make_update


def assert_same_tokens(shape: dict[str, int]) -> None:
    """What is recorded of a sharded update, gathered, is what one device records."""
    groups, loss, recorded = random_groups(), LossConfig(), []
    for axes in ({}, shape):
        update = make_update(
            CONFIG, loss, optax.sgd(1.0), make_mesh(axes), group_names=NAMES, keep_tokens=True
        )
        batches = batches_of(groups, loss, rows=4, row_tokens=16, num_shards=update.num_shards)
        _, pending = update(update.init(PARAMS), batches, version=4, record=True)
        recorded.append(by_trajectory(batches, pending.token_values()))
    want, got = recorded
    assert len(want) == 7 and want.keys() == got.keys()
    for number, tokens in want.items():
        np.testing.assert_allclose(got[number].trainer_logp, tokens.trainer_logp, atol=1e-4)
        np.testing.assert_array_equal(got[number].masked, tokens.masked)


def assert_same_replay(shape: dict[str, int], compute: ComputeConfig) -> None:
    """With experts that no router chose; without them the update is another one."""
    loss, routing = LossConfig(), RoutingRules.of(CONFIG)
    plain = random_groups(whole=loss.replay)
    groups = with_routing(plain, **routing._asdict())
    want, _ = run(groups, loss, rows=8, routing=routing)
    got, _ = run(groups, loss, rows=8, routing=routing, shape=shape, compute=compute)
    assert_same(got, want, rtol=1e-3, atol=1e-5)
    other, _ = run(plain, loss, rows=8)
    pairs = zip(jax.tree.leaves(other), jax.tree.leaves(want), strict=True)
    assert max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs) > 1e-3


def main() -> None:
    assert jax.device_count() == 8
    plain, all_to_all = ComputeConfig(), ComputeConfig(dispatch="all-to-all")
    cases = [
        ({"data": 2, "fsdp": 2, "tensor": 2}, LossConfig(), plain),
        ({"data": 4}, LossConfig(), plain),
        ({"fsdp": 8}, LossConfig(), plain),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, LossConfig(arm="sc+mis"), plain),
        ({"data": 2, "expert": 4}, LossConfig(), all_to_all),
        ({"context": 4, "tensor": 2}, LossConfig(), plain),
        ({"fsdp": 2, "expert": 2, "context": 2}, LossConfig(), plain),
    ]
    for shape, loss, compute in cases:
        groups = random_groups(whole=loss.replay)
        want, want_metrics = run(groups, loss, rows=8)
        got, metrics = run(groups, loss, rows=8, shape=shape, compute=compute)
        assert_same(got, want, rtol=1e-3, atol=1e-5)
        for name, value in want_metrics.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert_same_tokens({"data": 2, "fsdp": 2, "tensor": 2})
    assert_same_replay({"fsdp": 2, "expert": 2, "context": 2}, plain)
    assert_same_replay({"data": 2, "expert": 4}, all_to_all)
    sys.stdout.write(json.dumps({"meshes": len(cases)}))


if __name__ == "__main__":
    main()
