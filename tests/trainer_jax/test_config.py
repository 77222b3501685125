import json
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from contracts.errors import BadInputError
from contracts.runfile import write_resolved
from trainer_jax.__main__ import main
from trainer_jax.config import OptimizerSection, TrainSection, load_run, parse_run
from trainer_jax.models.config import ModelConfig
from trainer_jax.plan import check_others
from trainer_jax.run_directory import RECORD, RunDirectory

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
)
RUN_FILE = """
[run]
name = "small"
[model]
checkpoint = "{checkpoint}"
[loss]
arm = "sc+mis+top-p"
[train]
updates = 2
[sampling]
top_p = 0.97
[[fleet.groups]]
name = "a"
weight_format = "nvfp4"
capacity = 3
[[fleet.groups]]
name = "b"
weight_format = "bf16"
[[fleet.groups]]
name = "eval"
purpose = "evaluate"
weight_format = "bf16"
kv_format = "bf16"
"""


@pytest.fixture
def run_file(tmp_path) -> Path:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(MODEL.to_hf()))
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(checkpoint=checkpoint))
    return path


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command line in this process: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["trainer-jax", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run


def test_defaults_and_overrides(run_file):
    config = load_run(run_file, ["train.updates=7", "optimizer.name=sgd", "loss.arm=grpo"])
    assert config.train.updates == 7
    assert config.train.staleness_limit is None
    assert config.optimizer.name == "sgd"
    assert (config.loss.importance, config.loss.center, config.loss.replay) == (
        "none",
        False,
        False,
    )
    assert config.run.path == Path("runs/small")
    assert config.is_local
    assert config.sections["train"]["updates"] == 7
    assert config.sections["fleet"]["groups"][0]["name"] == "a"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.updats=3", "train.updats: expected a known key"),
        ("train.updates=0", "greater than 0"),
        ("trian.updates=3", "trian"),
        ("loss.arm=ppo", "an arm of grpo"),
        ("run.name=a/b", "run.name"),
        ("run.gateway=localhost:1", "both gateway and weights"),
        ("train.candidate_buckets=[8, 4]", "candidate_buckets that grow"),
        ("model.checkpoint=nowhere", "no directory nowhere"),
        ("optimizer.lr=nan", "optimizer.lr"),
        ("optimizer.eps=inf", "optimizer.eps"),
        ("optimizer.clip=nan", "optimizer.clip"),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay"),
        ("optimizer.betas=[0.9, 1.0]", r"optimizer\.betas\.1: .* less than 1"),
        ("mesh.data=0", "mesh.data"),
    ],
)
def test_one_sentence_for_what_is_wrong(run_file, override, words):
    with pytest.raises(BadInputError, match=words) as raised:
        load_run(run_file, [override])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("", "tls_ca, tls_cert and tls_key only with gateway and weights"),
        ("gateway weights tls_cert", "both tls_cert and tls_key, or neither"),
        ("gateway weights tls_key", "both tls_cert and tls_key, or neither"),
    ],
)
def test_tls_that_would_encrypt_nothing(run_file, settings, words):
    overrides = [f"run.{name}=x" for name in ("tls_ca", *settings.split())]
    with pytest.raises(BadInputError, match=words):
        load_run(run_file, overrides)


def test_tls_without_the_ca_that_verifies_a_server(run_file):
    names = ("gateway", "weights", "tls_cert", "tls_key")
    with pytest.raises(BadInputError, match="tls_ca with tls_cert"):
        load_run(run_file, [f"run.{name}=x" for name in names])


def test_a_missing_section_names_the_missing_key():
    with pytest.raises(BadInputError, match=r"run\.name: expected a value"):
        parse_run({})


def test_the_record_of_a_run_is_the_same_run(run_file, tmp_path):
    config = load_run(run_file, ["train.updates=9"])
    record = tmp_path / "record.json"
    write_resolved(record, config.sections)
    again = load_run(record)
    assert again == config
    with pytest.raises(BadInputError, match="a TOML run file"):
        load_run(record, ["train.updates=3"])


def test_examples_are_valid(run_file):
    for name in ("demo.toml", "demo-homogeneous.toml"):
        data = tomllib.loads((ROOT / "examples" / name).read_text())
        data["model"]["checkpoint"] = str(run_file.with_name("model"))  # not made yet
        config = parse_run(data)
        groups = [g for g in config.sections["fleet"]["groups"] if g.get("purpose") != "evaluate"]
        assert [g["capacity"] for g in groups] == [9, 19, 19, 28, 3, 3, 9, 9]
        check_others(config)


def test_others_are_asked_and_their_sentence_is_kept(run_file):
    sections = check_others(load_run(run_file))
    assert sections["fleet"]["groups"][0]["kv_format"] == "fp8"
    assert {"weights", "episodes", "tasks", "sampling", "train"} <= set(sections)
    with pytest.raises(BadInputError, match="top_p"):
        check_others(load_run(run_file, ["sampling.top_p=2.0"]))
    with pytest.raises(BadInputError, match=r"weights\.keep"):
        check_others(load_run(run_file, ["weights.keep=2"]))


def test_samplers_must_record_what_the_loss_needs(run_file):
    with pytest.raises(BadInputError, match="found sampling from the full vocabulary"):
        check_others(load_run(run_file, ["sampling.top_p=1.0"]))
    check_others(load_run(run_file, ["sampling.top_p=1.0", "loss.arm=sc+mis"]))
    with pytest.raises(BadInputError, match=r"sampling\.num_candidates: .* 64, found 100"):
        overrides = ["sampling.top_p=1.0", "loss.arm=sc+mis", "sampling.num_candidates=100"]
        check_others(load_run(run_file, overrides))
    with pytest.raises(BadInputError, match=r"sampling\.top_k: .* 64, found 65"):
        check_others(load_run(run_file, ["sampling.top_k=65"]))


NONE_AT_FIRST = (
    "evaluation.before=false",
    "evaluation.after=false",
    "fleet.groups=["
    '{name = "a", weight_format = "bf16", samplers = 0, min_samplers = 0, max_samplers = 2}]',
)


def test_a_run_may_begin_without_samplers_if_they_are_scaled(run_file):
    check_others(load_run(run_file, [*NONE_AT_FIRST, "autoscaler.every_seconds=1.0"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss.bands={tpu = {ratio_low = 0.5, ratio_high = 2.0}}"], r"loss\.bands: .*tpu"),
        (["mesh.data=64"], "devices, as many as there are, found 64"),
        (["evaluation.num_tasks=65"], r"num_tasks: expected at most tasks\.num_heldout, 64"),
        (['fleet.groups=[{name = "a", weight_format = "bf16"}]'], "purpose evaluate .*found none"),
        (
            [
                "evaluation.before=false",
                "evaluation.after=false",
                'fleet.groups=[{name = "a", weight_format = "bf16", samplers = 0}]',
            ],
            "purpose train .*found groups without samplers",
        ),
        ([*NONE_AT_FIRST], "purpose train .*found groups without samplers"),
        (
            [
                *("train.micro_rows=3", "mesh.fsdp=2"),
                *("cluster.processes=2", "cluster.coordinator='a:1'"),
            ],
            r"train\.micro_rows: expected a multiple of mesh\.data \* .*, 2, found 3",
        ),
        (["cluster.processes=2"], "cluster: .*coordinator"),
        (
            [
                *("train.row_tokens=100", "mesh.context=3"),
                *("cluster.processes=3", "cluster.coordinator='a:1'"),
            ],
            r"train\.row_tokens: expected a multiple of mesh\.context, 3, found 100",
        ),
        (
            ['fleet.groups=[{name = "a", weight_format = "bf16", provider = "modal"}]'],
            r"group a, provider: expected local, or run\.gateway .*found modal",
        ),
    ],
)
def test_what_a_run_would_refuse_late_is_refused_before(run_file, overrides, words):
    with pytest.raises(BadInputError, match=words):
        check_others(load_run(run_file, overrides))


def test_an_evaluation_alone_needs_nothing_of_training(run_file):
    overrides = ["mesh.data=64", "loss.bands={tpu = {ratio_low = 0.5, ratio_high = 2.0}}"]
    check_others(load_run(run_file, overrides), trains=False)


def test_a_tokenizer_beyond_the_vocabulary_is_refused(run_file):
    words = {"model": {"vocab": {"a": 0, "b": MODEL.vocab_size}}}
    (run_file.with_name("model") / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(BadInputError, match=r"below the model's vocab_size \(64\), found 64"):
        check_others(load_run(run_file))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_leaves_norms_alone(name):
    params = {"norm": jnp.full(3, 0.5), "layers": {"q": jnp.ones((1, 2, 3))}}
    rule = OptimizerSection(name=name, lr=1.0, weight_decay=0.1).build()
    updates: Any = rule.update(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)[0]
    np.testing.assert_array_equal(updates["norm"], 0)
    np.testing.assert_allclose(updates["layers"]["q"], -0.1)


def test_a_model_that_embedded_samplers_do_not_compute_is_refused(run_file):
    path = run_file.with_name("model") / "config.json"
    dense = {"model_type": "qwen3", "intermediate_size": 32}
    path.write_text(json.dumps(json.loads(path.read_text()) | dense))
    with pytest.raises(BadInputError, match=r"engine: expected sglang for a qwen3 .*found emb"):
        check_others(load_run(run_file))


def test_dry_run_shows_the_plan_and_leaves_nothing(run_file, tmp_path, command):
    status, out, error = command("train", run_file, "--dry-run", "--set", "train.updates=5")
    assert status == 0, error
    assert "75.0 %" in out and "25.0 %" in out
    assert "5 of 8 prompts x 8 = 320 trajectories" in out
    assert '"updates": 5' in out
    assert not (tmp_path / "runs").exists()


def test_bad_input_is_status_2_and_one_line(run_file, tmp_path, command):
    for arguments in (
        ("train", tmp_path / "absent.toml"),
        ("train", run_file, "--set", "fleets.group=1"),
        ("train", run_file, "--resume", "--fresh"),
        ("report", tmp_path),
        ("export", tmp_path, tmp_path / "out"),
        ("evaluate", run_file, "--checkpoint", tmp_path / "model", "--out", "absent/e.json"),
    ):
        status, _, error = command(*arguments)
        assert status == 2, (arguments, error)
        assert error.startswith("error: ") and error.count("\n") == 1, error
    assert not (tmp_path / "runs").exists()


def test_an_unknown_log_level_is_bad_input(run_file, command, monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "foo")
    status, _, error = command("plan", run_file)
    assert status == 2 and error.endswith("expected DEBUG, INFO, WARNING or ERROR, found FOO\n")


def test_nothing_is_started_for_a_run_that_is_not_there(run_file, tmp_path, command):
    status, _, error = command("train", run_file, "--resume")
    assert status == 2 and "expected a run in runs/small" in error
    assert not (tmp_path / "runs").exists()


SECTIONS = {
    "run": {"name": "r"},
    "model": {"checkpoint": "m"},
    "optimizer": {"name": "adamw", "lr": 1.0},
    "loss": {"arm": "grpo"},
    "fleet": {"groups": [{"name": "a", "capacity": 1}]},
}


def test_a_used_directory_is_refused_moved_aside_or_resumed(tmp_path):
    path = tmp_path / "runs" / "r"
    sections = SECTIONS
    first = RunDirectory(path, "new", sections)
    (path / "checkpoints" / "0").mkdir(parents=True)
    with pytest.raises(BadInputError, match="no earlier run"):
        RunDirectory(path, "new", sections)
    first.close()
    RunDirectory(path, "resume", sections).close()
    other = sections | {"optimizer": {"name": "sgd"}}
    with pytest.raises(BadInputError, match="expected adamw as recorded, found sgd"):
        RunDirectory(path, "resume", other)
    (path / "mark").touch()
    RunDirectory(path, "fresh", sections).close()
    assert not (path / "mark").exists()
    assert (path.with_name("r.1") / "mark").exists()
    assert (path.with_name("r.1") / RECORD).exists()


def test_a_resume_says_what_is_different_and_is_the_same_experiment(tmp_path):
    RunDirectory(tmp_path, "new", SECTIONS).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    changed = SECTIONS | {
        "optimizer": {"name": "adamw", "lr": 0.5},
        "fleet": {"groups": [{"name": "a", "capacity": 3}]},
    }
    opened = RunDirectory(tmp_path, "resume", changed)
    opened.close()
    assert opened.changes == ["fleet.groups.0.capacity = 3 (was 1)", "optimizer.lr = 0.5 (was 1.0)"]
    again = RunDirectory(tmp_path, "resume", changed)
    again.close()
    assert again.changes == []
    for other in (
        {"loss": {"arm": "sc+mis"}},
        {"sampling": {"top_p": 0.9}},
        {"tasks": {"seed": 1}},
        {"run": {"name": "r", "seed": 1}},
        {"episodes": {"group_size": 4}},
    ):
        with pytest.raises(BadInputError, match=rf"--resume, {next(iter(other))}\.\w+: .* found"):
            RunDirectory(tmp_path, "resume", changed | other)


def test_a_failed_start_is_no_run(tmp_path):
    RunDirectory(tmp_path, "new", SECTIONS).close()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "gateway").mkdir()
    RunDirectory(tmp_path, "new", SECTIONS | {"loss": {"arm": "sc+mis"}}).close()
    assert "sc+mis" in (tmp_path / RECORD).read_text()
    assert not (tmp_path / "gateway").exists(), "episodes of the settings before"
    (tmp_path / "evaluation-before.json").touch()
    with pytest.raises(BadInputError, match="no earlier run"):
        RunDirectory(tmp_path, "new", SECTIONS)


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / RECORD).write_text("a model's")
    with pytest.raises(BadInputError, match="no earlier run"):
        RunDirectory(tmp_path, "new", SECTIONS)
    assert (tmp_path / RECORD).read_text() == "a model's"


def test_two_processes_do_not_share_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer_jax.run_directory.LOCK_WAIT_S", 0.1)
    first = RunDirectory(tmp_path / "r", "new", SECTIONS)
    for mode in ("new", "resume", "fresh"):
        with pytest.raises(BadInputError, match="still at work"):
            RunDirectory(tmp_path / "r", mode, SECTIONS)
    first.close()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_clip_warm_up_and_descend(name):
    optimizer = OptimizerSection(name=name, lr=0.1, clip=1.0, warmup=1).build()
    params = {"w": jnp.array([1.0, -1.0])}
    state = optimizer.init(params)
    sizes = []
    for _ in range(3):
        updates, state = optimizer.update({"w": jnp.array([100.0, -100.0])}, state, params)
        sizes.append(float(jnp.abs(updates["w"]).max()))
        params = optax.apply_updates(params, updates)
    assert sizes[0] < sizes[1]
    np.testing.assert_allclose(sizes[1], sizes[2], rtol=1e-3)
    assert sizes[2] <= 0.1 + 1e-6
    assert float(params["w"][0]) < 1.0


def test_learning_rates_fall_where_they_should():
    common = {"lr": 0.1, "warmup": 1, "decay": 4, "final_lr": 0.02}
    for name, middle in (("linear", 0.06), ("cosine", 0.06)):
        rate = OptimizerSection(schedule=name, **common).learning_rate()
        found = [float(rate(step)) for step in (0, 1, 3, 5, 50)]
        np.testing.assert_allclose(found, [0.05, 0.1, middle, 0.02, 0.02], rtol=1e-6)
    with pytest.raises(ValueError, match="decay in updates"):
        OptimizerSection(schedule="cosine")
    with pytest.raises(ValueError, match="final_lr"):
        OptimizerSection(schedule="linear", decay=5, lr=0.1, final_lr=0.2)


def test_a_section_cannot_change():
    section = TrainSection(updates=1)
    with pytest.raises(ValueError, match="frozen"):
        section.updates = 2  # pyright: ignore[reportAttributeAccessIssue]
