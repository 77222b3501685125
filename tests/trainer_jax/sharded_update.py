"""Run as a process with eight virtual devices by test_step: meshes against one device."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

from tests.trainer_jax.random_trajectories import random_groups
from tests.trainer_jax.test_step import assert_same, run
from trainer_jax.loss import LossConfig


def main() -> None:
    assert jax.device_count() == 8
    cases = [
        ({"data": 2, "fsdp": 2, "tensor": 2}, LossConfig()),
        ({"data": 4}, LossConfig()),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, LossConfig(arm="sc+mis")),
    ]
    for shape, loss in cases:
        groups = random_groups(whole=loss.replay)
        want, want_metrics = run(groups, loss, rows=4)
        got, metrics = run(groups, loss, rows=4, shape=shape)
        assert_same(got, want, rtol=1e-3, atol=1e-5)
        for name, value in want_metrics.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    sys.stdout.write(json.dumps({"meshes": len(cases)}))


if __name__ == "__main__":
    main()
