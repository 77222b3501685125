"""The warm start: files it refuses, rows it packs, and that it learns and writes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from contracts.errors import BadInputError
from trainer_jax.hf import load_checkpoint
from trainer_jax.models.config import ModelConfig
from trainer_jax.sft import SftConfig, pack_rows, read_demonstrations, run_sft

SHAPE = ModelConfig(
    vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1,
    moe_intermediate_size=16,
).to_hf()  # fmt: skip


def demonstrations(lengths=(5, 7, 4, 8), drawn=lambda t: t >= 2):
    """Episodes that count upwards from a random token, modulo 20."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 20, len(lengths))
    tokens = np.concatenate(
        [(start + np.arange(n)) % 20 for start, n in zip(starts, lengths, strict=True)]
    )
    mask = np.concatenate([drawn(np.arange(n)) for n in lengths])
    return tokens.astype(np.int32), np.cumsum([0, *lengths], dtype=np.int64), mask


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        tokens, offsets, mask = demonstrations()
        arrays = {"tokens": tokens, "offsets": offsets, "loss_mask": mask} | changes
        path = tmp_path / "demonstrations.npz"
        np.savez(path, **{name: x for name, x in arrays.items() if x is not None})
        return path

    return write


def test_read_gives_back_what_was_written(write):
    for got, want in zip(read_demonstrations(write()), demonstrations(), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"offsets": None}, "expected the array offsets"),
        ({"loss_mask": np.ones(3, bool)}, r"expected loss_mask like tokens \(24,\), found \(3,\)"),
        ({"offsets": np.array([0, 30])}, "rise from 0 to 24"),
        ({"offsets": np.array([0, 9, 9, 24])}, "rise from 0 to 24"),
        ({"offsets": np.array([0])}, "one episode at least"),
    ],
)
def test_read_refuses(write, changes, sentence):
    with pytest.raises(BadInputError, match=sentence):
        read_demonstrations(write(**changes))


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut off"])
def test_read_refuses_other_files(tmp_path, content):
    path = tmp_path / "demonstrations.npz"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"expected an \.npz file"):
        read_demonstrations(path)
    np.save(path.open("wb"), np.arange(3))
    with pytest.raises(BadInputError, match=r"expected an \.npz file"):
        read_demonstrations(path)


def test_pack_keeps_every_episode_whole_and_in_order():
    tokens, offsets, mask = demonstrations()
    order = np.array([2, 0, 3, 1])  # lengths 4, 5, 8, 7 into rows of 10: 4 + 5 | 8 | 7
    rows = pack_rows((tokens, offsets, mask), order, row_tokens=10, context_weight=0.25)
    places = {2: (0, 0, 1), 0: (0, 4, 2), 3: (1, 0, 1), 1: (2, 0, 1)}
    seen = np.zeros(rows.tokens_BxT.shape, bool)
    assert len(seen) == 3
    for episode, (row, start, segment) in places.items():
        source = slice(offsets[episode], offsets[episode + 1])
        length = source.stop - source.start
        at = row, slice(start, start + length)
        np.testing.assert_array_equal(rows.tokens_BxT[at], tokens[source])
        np.testing.assert_array_equal(rows.positions_BxT[at], np.arange(length))
        assert (rows.segments_BxT[at] == segment).all()
        # the first token has nothing before it, the second is context, the rest was drawn
        np.testing.assert_array_equal(rows.weight_BxT[at], [0, 0.25] + [1.0] * (length - 2))
        seen[at] = True
    assert not rows.segments_BxT[~seen].any() and not rows.weight_BxT[~seen].any()


def test_pack_refuses_an_episode_longer_than_a_row():
    with pytest.raises(BadInputError, match=r"at least the longest episode, 8, found 7"):
        pack_rows(demonstrations(), np.arange(4), row_tokens=7, context_weight=0.1)


@pytest.fixture
def config(tmp_path) -> SftConfig:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    tokens, offsets, mask = demonstrations(lengths=(9, 12, 7, 11) * 4)
    path = tmp_path / "counting.npz"
    np.savez(path, tokens=tokens, offsets=offsets, loss_mask=mask)
    return SftConfig(
        demonstrations=path, tokenizer=tokenizer, out=tmp_path / "out", shape=SHAPE,
        steps=80, rows_per_step=2, row_tokens=32, lr=3e-2, warmup_steps=5,
    )  # fmt: skip


def test_it_learns_and_goes_on_from_what_it_wrote(config):
    ignorant = math.log(SHAPE["vocab_size"])  # the loss of a uniform guess
    trained = run_sft(config)
    assert trained["loss"] < 0.3 * ignorant
    assert trained["accuracy"] > 0.9
    model, _ = load_checkpoint(config.out)
    assert model == ModelConfig.from_hf(SHAPE)
    assert (config.out / "tokenizer.json").exists()
    # the metrics of a step are those before its update: here, of the checkpoint as it was written
    more = {"checkpoint": config.out, "out": config.out.with_name("more"), "steps": 1, "shape": {}}
    again = run_sft(config.model_copy(update=more))
    assert again["loss"] < 0.3 * ignorant
    assert again["accuracy"] > 0.9


def test_it_refuses_demonstrations_that_do_not_fit_and_writes_nothing(config):
    small = config.model_copy(update={"shape": SHAPE | {"vocab_size": 10}})
    with pytest.raises(BadInputError, match="below the model's vocabulary of 10, found 19"):
        run_sft(small)
    rare = config.model_copy(update={"rows_per_step": 100})
    with pytest.raises(BadInputError, match="enough for 100 rows"):
        run_sft(rare)
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda c: {"tokenizer": c.tokenizer / "nowhere"},
            "tokenizer: expected a directory",
        ),
        (
            lambda c: {"shape": SHAPE | {"vocab_size": 20}, "tokenizer": c.out.with_name("wide")},
            "20",
        ),
        (lambda c: {"out": c.tokenizer}, "nothing there, or a checkpoint to replace"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_the_start(config, monkeypatch, spoil, sentence):
    wide = config.out.with_name("wide")
    wide.mkdir()
    (wide / "tokenizer.json").write_text('{"model": {"vocab": {"a": 99}}}')
    monkeypatch.setattr("trainer_jax.sft.make_sft_step", None)  # no step is made
    with pytest.raises(BadInputError, match=sentence):
        run_sft(config.model_copy(update=spoil(config)))
    assert (config.tokenizer / "tokenizer.json").exists() and not config.out.exists()


def test_a_loss_that_is_not_finite_writes_nothing(config):
    with pytest.raises(BadInputError, match="leave the loss finite, found nan by step"):
        run_sft(config.model_copy(update={"lr": 1e30, "steps": 20, "log_every": 5}))
    assert not config.out.exists()


def test_ids_below_zero_are_refused(config):
    with np.load(config.demonstrations) as data:
        arrays = dict(data)
    arrays["tokens"][3] = -5
    np.savez(config.demonstrations, **arrays)
    with pytest.raises(BadInputError, match=r"token ids from 0, .*found -5"):
        run_sft(config)
