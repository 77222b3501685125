"""Run as a process with eight virtual devices by test_step: meshes against one device."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

from tests.trainer_jax.random_trajectories import random_groups
from tests.trainer_jax.test_step import assert_same, run
from trainer_jax.loss import LossConfig
from trainer_jax.models.config import ComputeConfig


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
    sys.stdout.write(json.dumps({"meshes": len(cases)}))


if __name__ == "__main__":
    main()
