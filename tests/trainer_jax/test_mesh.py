"""Meshes: the model computes the same on them, and bad ones are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from contracts.errors import BadInputError
from trainer_jax.mesh import AXES, batch_sharding, make_mesh, parameter_spec
from trainer_jax.models.parameters import PARAMETERS


def on_eight_devices(module: str, *arguments: str) -> str:
    """What a module prints that runs with eight virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num"), [("sharded_parts.py", 14), ("sharded_context.py", 3)])
def test_on_several_devices(name, num):
    file = str(Path(__file__).with_name(name))
    said = on_eight_devices("pytest", "-p", "no:cacheprovider", file)
    assert said.count(".") >= num, said


@pytest.mark.slow
def test_eight_devices_compute_what_one_does():
    """Log-probs and gradients on two meshes; then a dimension that a mesh does not divide."""
    found = json.loads(on_eight_devices("tests.trainer_jax.sharded_model"))
    assert found["gate_parts"] == [4, 8]  # split over fsdp x tensor, fsdp x expert
    assert found["refusal"] == (
        "mesh axis tensor for parameter embed (60, 16): expected a divisor of 60, found 8"
    )


def test_axes_left_out_have_size_one():
    mesh = make_mesh({})
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp", "expert"))


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"data": 1, "rows": 1}, "expected data, fsdp, expert, tensor, context, found rows"),
        ({"data": 0}, "mesh sizes: expected at least 1"),
        ({"expert": jax.device_count() + 1}, f"at most {jax.device_count()} devices"),
    ],
)
def test_refusals(shape, sentence):
    with pytest.raises(BadInputError) as refused:
        make_mesh(shape)
    assert sentence in str(refused.value)


def test_every_parameter_has_a_place():
    specs = {path[-1]: parameter_spec(path) for path in PARAMETERS}
    assert specs["down"] == PartitionSpec(None, "expert", "tensor", "fsdp")
    assert specs["o"] == PartitionSpec(None, "tensor", "fsdp")
    assert specs["router"] == PartitionSpec(None, "fsdp", None)  # every device routes alike
