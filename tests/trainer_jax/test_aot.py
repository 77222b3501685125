"""Planning ahead: what is compiled for devices that are not here, and the verdict on it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.rpc import RemoteInputError
from tests.trainer_jax.test_budget import MODELS
from trainer_jax.aot import Ahead, Program, compile_ahead
from trainer_jax.budget import Setting, memory
from trainer_jax.config import RunConfig, load_run, parse_run
from trainer_jax.hf import load_config
from trainer_jax.models.parameters import count_parameters
from trainer_jax.plan import check_others
from trainer_jax.plan_devices import USABLE, verdict

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "models").glob("*/config.json"))
RUN_FILE = """
[run]
name = "small"
[model]
checkpoint = "{checkpoint}"
compute = {{ dtype = "bfloat16", remat = true }}
[mesh]
data = 2
fsdp = 2
expert = 2
[train]
updates = 2
row_tokens = 256
micro_rows = 8
[evaluation]
before = false
after = false
[sampling]
top_p = 0.97
[[fleet.groups]]
name = "a"
engine = "sglang"
weight_format = "nvfp4"
"""


def program(temporary_bytes: int) -> Program:
    return Program(
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=0,
        temporary_bytes=temporary_bytes,
        largest=(),
        traffic=(),
    )


@pytest.fixture
def config(tmp_path) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3_moe"].to_hf()))
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(checkpoint=tmp_path))
    return load_run(path)


@pytest.mark.slow
def test_planned_sizes_are_allocated_ones_and_known_traffic_is_found():
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer_jax.sharded_plan"],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [  # what a device has is 128 bytes
        [["data"], "all-gather", 128, 1],
        [["data"], "collective-permute", 128, 1],
        [["data", "fsdp"], "reduce-scatter", 7 * 32, 1],
        [["fsdp"], "all-reduce", 3 * 2 * 128 * 3 / 4, 3],
        [["fsdp"], "all-to-all", 128 * 3 / 4, 1],
    ]


@pytest.mark.slow
def test_an_update_is_compiled_for_devices_that_are_not_here(config):
    ahead = compile_ahead(config)
    need = memory(MODELS["qwen3_moe"], Setting.of(config))
    assert (ahead.parameter_bytes, ahead.gradient_bytes) == (need.parameters, need.gradients)
    assert 0 <= ahead.moment_bytes - need.moments < 64  # counters
    # donated: what comes in goes out in the same memory
    state = ahead.parameter_bytes + ahead.moment_bytes
    assert ahead.apply.alias_bytes == pytest.approx(state, rel=0.01)
    assert ahead.accumulate.alias_bytes >= ahead.gradient_bytes
    assert ahead.peak_bytes > state + ahead.gradient_bytes
    # gathered over both, added up over all: nothing is sent where nothing is split
    along = {axis for traffic in ahead.accumulate.traffic for axis in traffic.axes}
    assert along == {"data", "fsdp", "expert"}


@pytest.mark.slow
def test_what_only_accelerators_have_is_planned_by_what_comes_nearest(config):
    sections = dict(config.sections)
    compute = {"dtype": "bfloat16", "remat": True}
    sections["model"] |= {"compute": {**compute, "ffn": "tokamax", "dispatch": "ragged"}}
    theirs = compile_ahead(parse_run(sections))
    sections["model"] |= {"compute": {**compute, "dispatch": "all-to-all"}}
    assert theirs.accumulate == compile_ahead(parse_run(sections)).accumulate


def test_a_mesh_that_does_not_fit_the_model_is_refused_in_a_sentence(config):
    mesh = config.mesh.model_copy(update={"expert": 8})
    sections = {**config.sections, "mesh": mesh.model_dump()}
    with pytest.raises(RemoteInputError, match=r"^mesh axis expert .*expected a divisor of 4"):
        compile_ahead(config.with_sections(sections))


def test_the_verdict_follows_the_memory_of_a_device(config):
    model, setting = MODELS["qwen3_moe"], Setting.of(config)
    need = memory(model, setting)
    compiled = program(int(2 * need.transient))  # twice what shapes say
    ahead = Ahead(
        parameter_bytes=int(need.parameters),
        gradient_bytes=int(need.gradients),
        moment_bytes=int(need.moments),
        accumulate=replace(compiled, argument_bytes=int(need.parameters + need.gradients)),
        apply=program(0),
        num_replicated=0,
        seconds=1.0,
        compiler_bytes=1,
    )

    def said(limit: float, sections=config.sections) -> list[str]:
        return verdict(config.with_sections(sections), model, ahead, limit / USABLE)

    (fits,) = said(1.01 * ahead.peak_bytes)
    assert fits.startswith("fits: 8 rows of 256 tokens")
    perhaps, advice = said((need.total + ahead.peak_bytes) / 2)
    assert perhaps.startswith("fits perhaps: ") and advice.startswith("it would with ")
    no, advice = said(0.9 * need.total)
    assert no.startswith("does not fit: ") and advice.startswith("it would with ")
    *_, advice = said(1.0)
    assert advice.startswith("no change ")
    (unasked,) = verdict(config, model, ahead, None)
    assert "--memory-gb" in unasked
    # four times a row: fewer rows of more tokens, but one for every device
    limits = {"episodes": {"limits": {"max_context_tokens": 1000}}}
    *_, longest, advice = said(1.01 * ahead.peak_bytes, {**config.sections, **limits})
    assert "8 rows of 1,024 tokens, the longest allowed" in longest
    assert "does not fit" in longest or "perhaps" in longest
    assert advice.startswith("it would with ")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_examples_models_are_the_published_ones(path):
    published = {  # parameters of the text model
        "qwen3.6-35b-a3b": 34_660_610_688,
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-4b": 4_022_468_096,
    }
    assert count_parameters(load_config(path.parent)) == published[path.parent.name]


@pytest.mark.slow
def test_the_command_needs_no_weights_and_says_what_fits(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3"].to_hf()))
    command = [sys.executable, "-m", "trainer_jax", "plan", str(tmp_path / "run.toml")]
    changes = ["--set", "mesh.data=1", "--set", "mesh.expert=1", "--memory-gb", "1"]
    done = subprocess.run(
        [*command, *changes],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for words in ("2 device(s)", "as compiled", "per token", "largest arrays", "along", "\nfits: "):
        assert words in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "memory_gb"), [("qwen3.6-35b-a3b", 180), ("qwen3-30b-a3b", 180), ("qwen3-4b", 141)]
)
def test_the_examples_fit_their_machines_and_are_planned_in_two_gigabytes(
    name, memory_gb, monkeypatch
):
    monkeypatch.chdir(ROOT)
    config = load_run(f"examples/{name}.toml")
    config = config.with_sections(check_others(config, here=False))
    ahead = compile_ahead(config)
    assert ahead.compiler_bytes < 2e9
    model = load_config(config.model.checkpoint)
    assert verdict(config, model, ahead, memory_gb * 1e9)[0].startswith("fits: ")
