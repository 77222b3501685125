import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from contracts.errors import BadInputError
from trainer_jax.checkpoint import Checkpoints, Position, read_params, read_position

ROOT = Path(__file__).resolve().parents[2]


def state_of(value: float) -> dict:
    return {
        "params": {"w": jnp.full((4, 3), value)},
        "opt_state": (jnp.array(3),),
        "step": jnp.array(1),
    }


def position_of(step: int) -> Position:
    return Position(
        run="r", step=step, version=step + 1, sequence=10 * step, seed=7, elapsed_seconds=1.5
    )


def test_the_newest_complete_checkpoint_comes_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(state_of(float(step)), position_of(step))
    checkpoints.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]

    again = Checkpoints(tmp_path, keep=2)
    state, position = again.restore(state_of(0.0))
    again.close()
    assert position == position_of(3)
    np.testing.assert_array_equal(state["params"]["w"], np.full((4, 3), 3.0))
    assert isinstance(state["opt_state"], tuple)


def test_durable_names_only_what_is_complete(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.durable() is None
    checkpoints.save(state_of(1.0), position_of(1))
    deadline = time.monotonic() + 30
    while checkpoints.durable() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert checkpoints.durable() == position_of(1)
    assert checkpoints.latest_step == 1
    checkpoints.close()


def test_another_model_is_refused_in_one_sentence(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(BadInputError, match="expected a checkpoint"):
        checkpoints.restore(state_of(0.0))
    checkpoints.save(state_of(1.0), position_of(1))
    checkpoints.wait()
    other = state_of(0.0) | {"params": {"w": jnp.zeros((5, 3))}}
    with pytest.raises(BadInputError, match="the model and optimizer of this run"):
        checkpoints.restore(other)
    checkpoints.close()


def test_one_directory_is_read_without_the_run(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(state_of(2.0), position_of(4))
    checkpoints.close()
    directory = tmp_path / "checkpoints" / "4"
    assert read_position(directory) == position_of(4)
    np.testing.assert_array_equal(read_params(directory)["w"], np.full((4, 3), 2.0))
    with pytest.raises(BadInputError, match="checkpoints/<step>"):
        read_position(tmp_path)


def test_any_bit_that_flips_is_seen(tmp_path):
    value = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    state = {"params": {"w": jnp.asarray(value), "b": jnp.ones(3, jnp.bfloat16)}}
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(state, position_of(1))
    checkpoints.save(state, position_of(2))
    checkpoints.wait()
    directory = tmp_path / "checkpoints" / "2"
    data = max((directory / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    for part in (0.3, 0.6, 0.9):
        damaged = bytearray(whole)
        damaged[int(part * len(whole))] ^= 1 << 3
        data.write_bytes(damaged)
        with pytest.raises(BadInputError, match=r"undamaged, found "):
            read_params(directory)
        with pytest.raises(BadInputError, match=r"undamaged \(also there: 1\), found "):
            checkpoints.restore(state)
    data.write_bytes(whole)
    np.testing.assert_array_equal(read_params(directory)["w"], value)
    checkpoints.close()


DAMAGE = {
    "data": lambda d: max((d / "state").rglob("d/*"), key=lambda p: p.stat().st_size),
    "arrays": lambda d: d / "state" / "_METADATA",
    "position": lambda d: d / "position" / "metadata",
    "checksums": lambda d: d / "checksums" / "metadata",
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damage_is_one_sentence(tmp_path, what, how):
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = {"params": {"w": jnp.arange(4096.0)}}
    checkpoints.save(state, position_of(1))
    checkpoints.wait()
    directory = tmp_path / "checkpoints" / "1"
    path = DAMAGE[what](directory)
    if how == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    with pytest.raises(BadInputError, match=r"checkpoint .*: expected"):
        read_params(directory)
    if what != "arrays":  # which a run knows the shapes of
        with pytest.raises(BadInputError, match=r"checkpoint .*: expected"):
            checkpoints.restore(state)
    checkpoints.close()


def test_a_checkpoint_of_an_earlier_version_has_no_checksums(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(state_of(2.0), position_of(1))
    checkpoints.wait()
    directory = tmp_path / "checkpoints" / "1"
    shutil.rmtree(directory / "checksums")
    np.testing.assert_array_equal(read_params(directory)["w"], np.full((4, 3), 2.0))
    assert checkpoints.restore(state_of(0.0))[1] == position_of(1)
    checkpoints.close()


def test_reading_warns_of_nothing(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state_of(1.0), position_of(1))
    checkpoints.close()
    read_params(tmp_path / "checkpoints" / "1")
    # servers of other tests may still be ending
    ours = ("contracts", "sampler_fleet", "weight_sync", "asyncio")
    assert [r.getMessage() for r in caplog.records if not r.name.startswith(ours)] == []


def test_a_kill_between_saves_leaves_the_last_complete_one(tmp_path):
    script = textwrap.dedent("""
        import sys, pathlib
        import jax.numpy as jnp
        from trainer_jax.checkpoint import Checkpoints, Position
        checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), keep=3)
        step = 0
        while True:
            step += 1
            state = {"params": {"w": jnp.full((256, 256), float(step))}}
            checkpoints.save(state, Position(run="r", step=step, version=1, sequence=step, seed=0,
                                             elapsed_seconds=0.0))
            print(step, flush=True)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout
    seen = 0
    for line in process.stdout:
        seen = int(line)
        if seen == 4:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()

    checkpoints = Checkpoints(tmp_path, keep=3)
    state, position = checkpoints.restore({"params": {"w": jnp.zeros((256, 256))}})
    checkpoints.close()
    assert position.step >= seen - 1  # saving waits for the one before
    np.testing.assert_array_equal(state["params"]["w"], np.full((256, 256), float(position.step)))
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if "tmp" in p.name]
