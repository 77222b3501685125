"""The mismatch report on really sampled trajectories: sound ones, and ones with a planted fault."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.types import SamplingParams, Trajectory
from sampler_fleet.spool import Spool
from tests.tools.mismatch_fixtures import (
    NUM_ROWS,
    NUM_SAMPLED,
    Raw,
    earlier_params,
    groups_of,
    make_params,
    make_run,
    next_logits,
    rounded,
    runner,
    sample,
    save_model,
)
from tools.mismatch_report.causes import Cause
from tools.mismatch_report.source import read_source, write_groups
from trainer_jax.loss import objective_from_logits

COLD = SamplingParams(temperature=0.7, top_p=0.97, top_k=64)
PARAMS, OTHER = make_params(0), make_params(9)


def drawn(parts: list[Raw]) -> list[Trajectory]:
    return [part.trajectory for part in parts]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy") / "model", PARAMS)


@pytest.fixture(scope="module")
def healthy() -> list[list[Trajectory]]:
    """A BF16 group, and an NVFP4-like one of two samplers."""
    bf16, nvfp4 = rounded(PARAMS, "bf16"), rounded(PARAMS, "nvfp4")
    return [
        drawn(sample(bf16, group="bf16", sampler="bf16-0", seed=1)),
        drawn(sample(nvfp4, group="nvfp4", sampler="nvfp4-0", seed=2)),
        drawn(sample(nvfp4, group="nvfp4", sampler="nvfp4-1", seed=3)),
    ]


@pytest.fixture(scope="module")
def cold() -> list[Raw]:
    return sample(rounded(PARAMS, "bf16"), COLD, seed=4)


run = pytest.fixture(runner)
run_directory = pytest.fixture(make_run)


@pytest.fixture
def report(run, checkpoint, tmp_path):
    """The JSON report on lists of trajectories, one per prompt."""

    def report(parts: list[list[Trajectory]], *arguments: object, model: Path = checkpoint) -> dict:
        path = tmp_path / "groups.pb"
        write_groups(path, groups_of(*parts))
        status, shown, error = run(path, "--checkpoint", model, "--json", *arguments)
        assert status == 0, error
        return json.loads(shown)

    return report


def causes(report: dict) -> list[tuple[str, str]]:
    return [(finding["subject"], finding["cause"]) for finding in report["findings"]]


def test_sound_records_have_no_cause(report, healthy, run, checkpoint, tmp_path):
    found = report(healthy)
    assert causes(found) == []
    assert (found["replay"], found["truncates"], found["num_trajectories"]) == (
        True,
        True,
        3 * NUM_ROWS,
    )
    groups = found["groups"]
    assert 0 < groups["bf16"]["kl"] < groups["nvfp4"]["kl"] < 1
    assert (
        groups["bf16"]["num_tokens"]
        == sum(groups["bf16"]["ratio_histogram"])
        == NUM_ROWS * NUM_SAMPLED
    )
    assert groups["bf16"]["abs_dlogp"] < groups["nvfp4"]["abs_dlogp"]
    for name, row in groups.items():
        own = [x for x in found["extremes"] if x["group"] == name]
        ratios = [abs(np.log(x["ratio"])) for x in own]
        assert len(ratios) == 5 and ratios == sorted(ratios, reverse=True)
        assert ratios[0] == pytest.approx(row["abs_dlogp_max"], rel=1e-4)
    assert (found["judged_tokens"], found["left_out"]) == (3 * NUM_ROWS * NUM_SAMPLED, [])
    assert found["verdict"].startswith("No fault found: ")

    page = tmp_path / "page.html"
    status, shown, _ = run(
        tmp_path / "groups.pb", "--checkpoint", checkpoint, "--html", page, "--top", 1
    )
    assert status == 0
    assert "No fault found" in shown and "No fault found" in page.read_text()


@pytest.mark.parametrize("replay", [True, False])
def test_numbers_are_those_of_the_loss(report, healthy, replay):
    trajectory = healthy[1][0]
    found = report([[trajectory]], "--replay" if replay else "--no-replay")["overall"]
    sets, at = trajectory.candidates, np.flatnonzero(trajectory.loss_mask)
    rows = np.zeros((NUM_ROWS, -(-len(trajectory.tokens) // 32) * 32), np.int32)
    rows[0, : len(trajectory.tokens)] = trajectory.tokens
    params = jax.tree.map(jnp.asarray, rounded(PARAMS, "bf16"))  # as the checkpoint has them
    logits = jnp.stack([next_logits(params, jnp.asarray(rows), jnp.int32(t))[0] for t in at])
    ids = np.full((len(at), sets.counts.max()), -1, np.int32)
    logp = np.full(ids.shape, -np.inf, np.float32)
    for t, (start, end) in enumerate(zip(sets.offsets, sets.offsets[1:], strict=False)):
        ids[t, : end - start], logp[t, : end - start] = sets.ids[start:end], sets.logp[start:end]
    settings = {"importance": "masked", "ratio_low": 0.2, "ratio_high": 5.0, "center": False}
    dense = jax.jit(partial(objective_from_logits, **settings, replay=replay, num_tokens=len(at)))
    advantage, mask = np.zeros(len(at), np.float32), np.ones(len(at), bool)
    drawn_ids = trajectory.tokens[at]
    _, metrics = dense(logits, drawn_ids, ids, logp, trajectory.sampler_logp, advantage, mask)
    for name in ("kl", "k3", "ratio_mean", "abs_dlogp", "share_out_of_band", "entropy"):
        assert found[name] == pytest.approx(float(metrics[name]), rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("temperature", "over_set", "cause"),
    [
        (1.0, True, Cause.BEFORE_TEMPERATURE),
        (0.7, False, Cause.BEFORE_TRUNCATION),
        (1.0, False, Cause.BEFORE_BOTH),
        (0.7, True, None),
    ],
)
def test_records_of_another_distribution(report, cold, temperature, over_set, cause):
    planted = [raw.with_record(temperature=temperature, over_set=over_set) for raw in cold]
    found = report([planted], "--temperature", 0.7, "--replay")
    assert causes(found) == ([("group a", cause)] if cause else [])
    if cause:
        evidence = found["findings"][0]["evidence"]
        _, _, numbers = evidence.partition("mean |dlogp| is ")
        assert f"at temperature {temperature:g} over" in numbers
        expected, best = float(numbers.split()[0]), float(numbers.split(", ")[1].split()[0])
        assert best < expected
    if not over_set:
        assert found["refused"]["number"] == len(planted), "the trainer refuses them too"


def test_evidence_is_what_speaks_against_the_record(report, cold):
    """Before temperature and compared without one, the mean ratio is that of a right record."""
    found = report([[raw.with_record(temperature=1.0, over_set=True) for raw in cold]])
    assert causes(found) == [("group a", Cause.OTHER_DISTRIBUTION)]
    assert found["findings"][0]["evidence"].startswith("the tokens drawn are")
    assert "E[r] is" not in found["findings"][0]["evidence"]


def test_records_over_the_vocabulary(report):
    whole = SamplingParams(temperature=0.7, num_candidates=16)
    raw = sample(rounded(PARAMS, "bf16"), whole, seed=7)
    for temperature, expected in ((0.7, []), (1.0, [("group a", Cause.BEFORE_TEMPERATURE)])):
        planted = [one.with_record(temperature=temperature, over_set=False) for one in raw]
        found = report([planted], "--temperature", 0.7)
        assert (found["replay"], found["truncates"]) == (False, False)
        assert causes(found) == expected
        assert (found["overall"]["ratio_mean"] > 1.1) is bool(expected)


def test_only_the_drawn_log_probs_are_before_temperature_and_truncation(report, cold):
    planted = []
    for raw in cold:
        logp = raw.with_record(temperature=1.0, over_set=False).sampler_logp
        planted.append(replace(raw.trajectory, sampler_logp=logp))
    found = report([planted], "--temperature", 0.7)
    assert causes(found) == [("group a", Cause.BEFORE_BOTH)]
    assert "is not the set's own log-prob" in found["findings"][0]["evidence"]


def test_a_record_that_nothing_explains(report, healthy):
    rng = np.random.default_rng(0)
    planted = [
        replace(
            t,
            sampler_logp=np.minimum(t.sampler_logp + rng.normal(-1, 0.5, NUM_SAMPLED), 0).astype(
                "f4"
            ),
        )
        for t in healthy[0]
    ]
    assert causes(report([planted, *healthy[1:]])) == [("group bf16", Cause.OTHER_DISTRIBUTION)]


def test_another_temperature_than_the_runs(report, cold):
    found = report([drawn(cold)], "--temperature", 1.0)
    assert causes(found) == [("group a", Cause.OTHER_TEMPERATURE)]
    at = found["findings"][0]["evidence"].split("drawn at about ")[1].split(",")[0]
    assert float(at) == pytest.approx(0.7, abs=0.03)


def test_a_sampler_on_unrelated_weights(report, healthy):
    lost = drawn(sample(rounded(OTHER, "nvfp4"), group="nvfp4", sampler="nvfp4-2", seed=5))
    found = report([*healthy, lost])
    assert causes(found) == [("sampler nvfp4-2 of group nvfp4", Cause.OTHER_WEIGHTS)]
    found = report([healthy[0], [replace(t, group="own") for t in lost]])
    assert causes(found) == [("group own", Cause.OTHER_WEIGHTS)]


@pytest.mark.parametrize("served_by", ["several", "nobody", "many"])
def test_trajectories_without_a_sampler_of_their_own_are_judged(report, healthy, served_by):
    lost = drawn(sample(rounded(OTHER, "bf16"), group="late", sampler="late-0", seed=5))
    names = {
        "several": lambda i: ("late-0", "late-1"),
        "nobody": lambda i: (),
        "many": lambda i: (f"late-{i // 4}",),  # 160 tokens each
    }[served_by]
    lost = [replace(t, sampler_ids=names(i)) for i, t in enumerate(lost)]
    found = report([*healthy, lost])
    assert causes(found) == [("group late", Cause.OTHER_WEIGHTS)]
    assert (found["left_out"], found["verdict"]) == ([], "")
    said = [note for note in found["notes"] if note.startswith("judged as one in group late: 24 ")]
    assert len(said) == 1 and ("late-0, late-1" in said[0]) is (served_by != "nobody")
    own = [replace(t, group="late") for part in healthy for t in part]
    found = report([[replace(t, group="bf16") for t in lost], own])
    assert causes(found) == [("group bf16", Cause.OTHER_WEIGHTS)]
    found = report([[*lost, *own]])
    assert causes(found) == [("the rest of group late", Cause.OTHER_WEIGHTS)]


def test_another_checkpoint_than_all_samplers(report, healthy, checkpoint, tmp_path):
    other = save_model(tmp_path / "other", OTHER)
    found = report(healthy, "--other", checkpoint, model=other)
    assert causes(found) == [("every sampler", Cause.OTHER_CHECKPOINT)]
    assert f"under {checkpoint} its KL falls to 0." in found["findings"][0]["evidence"]


def test_a_run_with_a_group_that_missed_an_update(run, run_directory, healthy, tmp_path):
    late = sample(rounded(earlier_params(), "bf16"), group="late", sampler="late-0", seed=6)
    spool = Spool(run_directory / "gateway" / "groups.sqlite")
    try:
        for part in (healthy[0], drawn(late)):
            asyncio.run(spool.append(part[0].task_id, part))
        status, shown, error = run(run_directory, "--json", "--save", tmp_path / "kept.pb")
    finally:
        spool.close()
    assert status == 0, error
    found = json.loads(shown)
    assert found["checkpoint"].endswith("checkpoints/2") and found["checkpoint_version"] == 3
    assert found["bands"] == {"bf16": [0.2, 5.0], "late": [0.5, 2.0]}
    assert causes(found) == [("group late", Cause.OTHER_WEIGHTS)]
    evidence = found["findings"][0]["evidence"]
    assert "of 1 other sampler of its precision" in evidence
    assert f"under {tmp_path / 'start'} its KL falls to 0.0" in evidence
    assert "on average 2.0 versions apart" in found["notes"][0]
    kept = read_source(tmp_path / "kept.pb").groups
    assert [group.sequence for group in kept] == [1, 2]
    np.testing.assert_array_equal(kept[1].trajectories[3].tokens, late[3].trajectory.tokens)


@pytest.mark.parametrize("shuffled", [True, False])
def test_another_tokenizer(report, healthy, checkpoint, shuffled):
    """Its pieces have other ids, or it has fewer tokens than the prompts use."""
    path = checkpoint / "tokenizer.json"
    original = path.read_text()
    tokenizer = json.loads(original)
    vocabulary = tokenizer["model"]["vocab"]
    control = {token["content"] for token in tokenizer["added_tokens"]}
    words = [word for word in vocabulary if word not in control]
    if shuffled:
        ids = np.random.default_rng(0).permutation([vocabulary[word] for word in words]).tolist()
        vocabulary.update(zip(words, ids, strict=True))
    else:
        used = {int(t) for part in healthy for x in part for t in x.tokens[~x.loss_mask]} - set(
            range(20)
        )
        lost = next(w for w in reversed(words) if vocabulary[w] in used and len(w) > 3)
        del vocabulary[lost]
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [m for m in merges if lost not in (*m, "".join(m))]
    path.write_text(json.dumps(tokenizer))
    try:
        found = report(healthy)
    finally:
        path.write_text(original)
    assert causes(found) == [("prompts", Cause.TOKENIZER)]
    assert ("ids without a token: 1" in found["findings"][0]["evidence"]) is not shuffled


def test_another_chat_template(report, healthy, checkpoint):
    path = checkpoint / "tokenizer_config.json"
    original = path.read_text()
    config = json.loads(original)
    config["chat_template"] = config["chat_template"].replace("assistant\\n", "model\\n")
    assert config["chat_template"] != json.loads(original)["chat_template"]
    path.write_text(json.dumps(config))
    try:
        found = report(healthy)
    finally:
        path.write_text(original)
    assert causes(found) == [("prompts", Cause.TEMPLATE)]
    assert "0.0% of the replies are opened" in found["findings"][0]["evidence"]


def test_groups_are_saved_whole_or_not_at_all(healthy, tmp_path):
    path = tmp_path / "groups.pb"
    write_groups(path, groups_of(healthy[0]))
    before = path.read_bytes()

    def until_full():
        yield from groups_of(*healthy)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_groups(path, until_full())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["groups.pb"]


def test_the_verdict_says_what_was_not_judged(report, healthy, run, checkpoint, tmp_path):
    found = report([healthy[0][:4]])
    assert (causes(found), found["judged_tokens"]) == ([], 0)
    assert found["verdict"] == (
        "Nothing was judged. Tokens left out: 160 of group bf16 (fewer than 200)."
    )
    few = [replace(t, group="few") for t in healthy[1][:2]]
    bad = [
        replace(t, group="bad", sampler_logp=np.full_like(t.sampler_logp, np.nan))
        for t in healthy[1][2:5]
    ]
    lost = [replace(t, reward=None) for t in healthy[0][:1]]
    found = report([healthy[0], few, bad, lost])
    left_out = (
        "80 of group few (fewer than 200), 120 of group bad (records that the trainer refuses), "
        "40 of group bf16 (no reward)."
    )
    assert found["verdict"] == f"No fault found in 960 of 1,200 tokens. Not judged: {left_out}"
    assert [part["num_tokens"] for part in found["left_out"]] == [80, 120, 40]
    page = tmp_path / "page.html"
    _, shown, _ = run(tmp_path / "groups.pb", "--checkpoint", checkpoint, "--html", page)
    for text in (shown, page.read_text()):
        assert "No fault found in 960 of 1,200 tokens" in text
        assert "No fault found:" not in text
    other = drawn(sample(rounded(OTHER, "bf16"), group="bf16", sampler="bf16-0", seed=5))
    found = report([other, few, bad, lost])
    assert found["findings"]
    assert found["verdict"] == f"Judged 960 of 1,200 tokens. Left out: {left_out}"


def test_a_tokenizer_config_that_is_no_object(report, healthy, checkpoint):
    path = checkpoint / "tokenizer_config.json"
    original = path.read_text()
    path.write_text("[]")
    try:
        found = report(healthy[:1])
    finally:
        path.write_text(original)
    said = f"chat template not checked: {path}: expected an object, found list"
    assert said in found["notes"]
