"""Checkpoint directories: exact in both layouts, refused with a sentence, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from contracts.errors import BadInputError
from contracts.files import lock
from trainer_jax.hf import load_checkpoint, save_checkpoint
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.parameters import nest, parameter_shapes

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=3, num_experts_per_tok=2,
    moe_intermediate_size=12, eos_token_id=(1, 2), bos_token_id=3,
)  # fmt: skip
TIED = replace(CONFIG, tie_word_embeddings=True)


def random_params(config: ModelConfig = CONFIG, seed: int = 0):
    """Numpy float32, no two values alike."""
    rng = np.random.default_rng(seed)
    shapes = parameter_shapes(config)
    return nest({path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()})


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    files = directory.glob("*.safetensors")
    return {name: x for file in files for name, x in safetensors.numpy.load_file(file).items()}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_equal_trees(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000], ids=["single", "sharded"])
@pytest.mark.parametrize("layout", ["per-expert", "fused"])
def test_round_trip(tmp_path, layout, shard_bytes, config):
    params = random_params(config)
    how = {"layout": layout, "max_shard_bytes": shard_bytes}
    save_checkpoint(tmp_path / "a", config, params, dtype="float32", **how)
    shards = list((tmp_path / "a").glob("*.safetensors"))
    assert (len(shards) > 1) == (tmp_path / "a" / "model.safetensors.index.json").exists()
    assert (len(shards) > 1) == (shard_bytes == 3000)
    got_config, got = load_checkpoint(tmp_path / "a")
    assert got_config == config
    assert_equal_trees(got, params)
    save_checkpoint(tmp_path / "b", got_config, got, dtype="float32", **how)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_second_round_trip_in_a_narrow_type_is_exact(tmp_path, dtype):
    params = random_params()
    save_checkpoint(tmp_path / "a", CONFIG, params, dtype=dtype)
    config, once = load_checkpoint(tmp_path / "a")
    leaves = zip(jax.tree.leaves(once), jax.tree.leaves(params), strict=True)
    largest = max(float(np.abs(x - y).max()) for x, y in leaves)
    assert 0 < largest < 0.02  # rounded to nearest
    save_checkpoint(tmp_path / "b", config, once, dtype=dtype)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_one_layout_becomes_the_other(tmp_path):
    params = random_params()
    save_checkpoint(tmp_path / "a", CONFIG, params, layout="per-expert", dtype="float32")
    save_checkpoint(
        tmp_path / "b", CONFIG, load_checkpoint(tmp_path / "a")[1], layout="fused", dtype="float32"
    )
    assert_equal_trees(load_checkpoint(tmp_path / "b")[1], params)


def test_names_and_orientation_are_the_hubs(tmp_path):
    params = random_params()
    layers = params["layers"]
    save_checkpoint(tmp_path / "a", CONFIG, params, dtype="float32")
    found = tensors_of(tmp_path / "a")
    prefix = "model.layers.1."
    for name, want in {
        "model.embed_tokens.weight": params["embed"],
        "lm_head.weight": params["head"],
        "model.norm.weight": params["norm"],
        prefix + "self_attn.k_proj.weight": layers["k"][1].T,
        prefix + "self_attn.q_norm.weight": layers["q_norm"][1],
        prefix + "mlp.gate.weight": layers["router"][1].T,
        prefix + "mlp.experts.2.gate_proj.weight": layers["gate"][1, 2].T,
        prefix + "mlp.experts.0.down_proj.weight": layers["down"][1, 0].T,
    }.items():
        np.testing.assert_array_equal(found[name], want, err_msg=name)
    save_checkpoint(tmp_path / "b", CONFIG, params, layout="fused", dtype="float32")
    fused = tensors_of(tmp_path / "b")[prefix + "mlp.experts.gate_up_proj"]
    assert fused.shape == (3, 24, 16)
    np.testing.assert_array_equal(fused[2, :12], layers["gate"][1, 2].T)
    np.testing.assert_array_equal(fused[2, 12:], layers["up"][1, 2].T)


def test_tokenizer_files_travel_along(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 39}}}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "preprocessor_config.json").write_text("{}")
    (source / "notes.txt").write_text("stays")
    save_checkpoint(tmp_path / "a", CONFIG, random_params(), copy_from=source)
    assert set(contents(tmp_path / "a")) == {
        "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
        "preprocessor_config.json",
    }  # fmt: skip
    load_checkpoint(tmp_path / "a")


def rewrite(directory: Path, change) -> None:
    """Passes the tensors of model.safetensors through `change`."""
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


def edit_config(directory: Path, **keys) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.0.mlp.experts.2.down_proj.weight"
BROKEN = {
    "architecture": (lambda d: edit_config(d, model_type="gpt2"), "or mixtral, found gpt2"),
    "sliding window": (lambda d: edit_config(d, use_sliding_window=True), "use_sliding_window"),
    "stretched rope": (lambda d: edit_config(d, rope_scaling={"rope_type": "yarn"}), "yarn"),
    "no config": (lambda d: (d / "config.json").unlink(), "a directory with config.json"),
    "bad config": (lambda d: (d / "config.json").write_text("{"), "config.json: expected JSON"),
    "config of bytes": (lambda d: (d / "config.json").write_bytes(b"\xff"), "expected JSON"),
    "config of a list": (lambda d: (d / "config.json").write_text("[]"), "an object, found list"),
    "rope of text": (lambda d: edit_config(d, rope_scaling="yarn"), "an object, found 'yarn'"),
    "size of text": (lambda d: edit_config(d, hidden_size="16"), "hidden_size: expected an int"),
    "half a head": (lambda d: edit_config(d, head_dim=8.5), "head_dim: expected an even"),
    "architecture of a list": (lambda d: edit_config(d, model_type=[]), "model_type: expected"),
    "no rotation": (lambda d: edit_config(d, rope_theta=0), "rope_theta: expected a number > 0"),
    "two rotations": (
        lambda d: edit_config(d, rope_theta=1e4, rope_parameters={"rope_theta": 1e6}),
        "rope_theta: expected 1000000.0, found 10000.0",
    ),
    "stretched beside": (
        lambda d: edit_config(
            d, rope_parameters={"rope_type": "default"}, rope_scaling={"type": "yarn"}
        ),
        "yarn",
    ),
    "rotations by kind": (
        lambda d: edit_config(d, rope_parameters={"full_attention": {"rope_theta": 1e6}}),
        "rope_parameters: expected one for all layers, found full_attention",
    ),
    "tied by a word": (
        lambda d: edit_config(d, tie_word_embeddings="no"), "tie_word_embeddings: expected true"
    ),
    "epsilon of truth": (lambda d: edit_config(d, rms_norm_eps=True), "rms_norm_eps: expected a"),
    "no frequency": (lambda d: edit_config(d, rope_theta="x"), "rope_theta: expected a number"),
    "heads of text": (
        lambda d: edit_config(d, head_dim=None, num_attention_heads="4"), "the keys of qwen3_moe"
    ),
    "tokenizer of bytes": (lambda d: (d / "tokenizer.json").write_bytes(b"\xff"), "expected JSON"),
    "tokenizer of a list": (lambda d: (d / "tokenizer.json").write_text("[]"), "a tokenizer"),
    "tokenizer of text": (
        lambda d: (d / "tokenizer.json").write_text('{"model": {"vocab": {"a": "b"}}}'),
        "a tokenizer",
    ),
    "no tensors": (lambda d: (d / "model.safetensors").unlink(), "found neither"),
    "cut off": (lambda d: (d / "model.safetensors").write_bytes(b"\0" * 9), "safetensors, found"),
    "missing": (lambda d: rewrite(d, lambda t: t.pop(DOWN)), f"expected {DOWN}"),
    "unexpected": (lambda d: rewrite(d, lambda t: t.update(extra=t[NORM])), "found also extra"),
    "shape": (
        lambda d: rewrite(d, lambda t: t.update({NORM: np.zeros(17, np.float32)})),
        f"shape of {NORM}",
    ),
    "transposed": (
        lambda d: rewrite(d, lambda t: t.update({DOWN: np.ascontiguousarray(t[DOWN].T)})),
        f"shape of {DOWN}",
    ),
    "dtype": (
        lambda d: rewrite(d, lambda t: t.update({NORM: t[NORM].astype(np.int32)})),
        f"dtype of {NORM}",
    ),
    "tokenizer": (
        lambda d: (d / "tokenizer.json").write_text('{"model": {"vocab": {"a": 40}}}'),
        "vocab_size",
    ),
    "index": (
        lambda d: (d / "model.safetensors.index.json").write_text("[]"), "a weight_map"
    ),
    "shard": (
        lambda d: (d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'
        ),
        "the shard model-00001-of-00002.safetensors",
    ),
}  # fmt: skip


def test_an_index_is_held_to_what_it_says(tmp_path):
    directory = tmp_path / "model"
    save_checkpoint(directory, CONFIG, random_params(), dtype="float32", max_shard_bytes=3000)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names: dict[str, list[str]] = {}
    for name, shard in index["weight_map"].items():
        names.setdefault(shard, []).append(name)
    shard, other = sorted(names, key=lambda shard: -len(names[shard]))[:2]
    first, *_ = names[shard]
    assert len(names[shard]) > 1
    moved = index["weight_map"] | {first: other}
    unlisted = {name: where for name, where in index["weight_map"].items() if name != first}
    for wrong in (moved, unlisted):
        path.write_text(json.dumps(index | {"weight_map": wrong}))
        with pytest.raises(BadInputError, match=f"{first}, which it says is"):
            load_checkpoint(directory)
    path.write_text(json.dumps(index))
    twice = dict(safetensors.numpy.load_file(directory / other))
    twice[first] = np.full(3, 7, np.float32)
    safetensors.numpy.save_file(twice, directory / other)
    with pytest.raises(BadInputError, match=f"{first}, which it says is in {shard}"):
        load_checkpoint(directory)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_named(tmp_path, case):
    directory = tmp_path / "model"
    save_checkpoint(directory, CONFIG, random_params(), dtype="float32")
    load_checkpoint(directory)
    damage, sentence = BROKEN[case]
    damage(directory)
    with pytest.raises(BadInputError) as refused:
        load_checkpoint(directory)
    assert sentence in str(refused.value)


def test_a_tied_model_may_repeat_its_embedding_but_not_differ(tmp_path):
    directory = tmp_path / "model"
    params = random_params(TIED)
    save_checkpoint(directory, TIED, params, dtype="float32")
    rewrite(directory, lambda t: t.update({"lm_head.weight": params["embed"]}))
    assert_equal_trees(load_checkpoint(directory)[1], params)
    rewrite(directory, lambda t: t.update({"lm_head.weight": params["embed"] + 1}))
    with pytest.raises(BadInputError, match=r"lm_head\.weight"):
        load_checkpoint(directory)


def fill_the_disk(monkeypatch, *, after: int) -> None:
    """There is room for this many files."""
    left = [after]

    def allocate(*_: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)


@pytest.mark.parametrize("existing", [True, False], ids=["replacing", "new"])
def test_a_failed_save_leaves_everything_as_it_was(tmp_path, existing, monkeypatch):
    target = tmp_path / "model"
    if existing:
        save_checkpoint(target, CONFIG, random_params(seed=1))
    before = contents(target) if existing else None
    fill_the_disk(monkeypatch, after=2)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(target, CONFIG, random_params(seed=2), max_shard_bytes=2000)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if existing else [])
    assert (contents(target) if target.exists() else None) == before


@pytest.mark.parametrize("moment", ["writing", "between the renames"])
def test_what_a_killed_save_left_is_cleared_away(tmp_path, moment):
    target, staging = tmp_path / "model", tmp_path / ".model.staging"
    save_checkpoint(target, CONFIG, random_params(seed=1))
    (staging / "fresh").mkdir(parents=True)
    (staging / "fresh" / "model.safetensors").write_bytes(b"half")
    if moment == "between the renames":
        target.rename(staging / "old")
    save_checkpoint(target, CONFIG, random_params(seed=2), dtype="float32")
    assert_equal_trees(load_checkpoint(target)[1], random_params(seed=2))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_one_process_at_a_time_writes_a_directory(tmp_path):
    staging = tmp_path / ".model.staging"
    staging.mkdir()
    with lock(staging / "lock", wait_s=0), pytest.raises(BadInputError, match="another one"):
        save_checkpoint(tmp_path / "model", CONFIG, random_params())


def test_a_save_replaces_the_whole_directory(tmp_path):
    target = tmp_path / "model"
    save_checkpoint(target, CONFIG, random_params(seed=1), max_shard_bytes=3000)
    save_checkpoint(target, CONFIG, random_params(seed=2), dtype="float32")
    assert set(contents(target)) == {"config.json", "model.safetensors"}
    assert_equal_trees(load_checkpoint(target)[1], random_params(seed=2))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [({"layout": "x"}, "layout"), ({"dtype": "int8"}, "dtype"), ({"copy_from": "x"}, "to copy")],
)  # fmt: skip
def test_save_refuses(tmp_path, how, sentence):
    with pytest.raises(BadInputError, match=sentence):
        save_checkpoint(tmp_path / "model", CONFIG, random_params(), **how)
    assert not list(tmp_path.iterdir())
