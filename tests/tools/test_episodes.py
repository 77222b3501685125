"""A run's recorded episodes as data, in numbers, and on the command line."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from contracts.types import Ending
from tests.tools.recorded_run import (
    GROUPS,
    HOSTILE,
    REPLIES,
    make_episode,
    make_run,
    update_of,
)
from tools.episodes import __main__ as command
from tools.episodes.content import MAX_CANDIDATES, content_of, read_facts
from tools.episodes.page import render
from trainer_jax.anatomy import NGRAM, anatomy, replies_of
from trainer_jax.recorded import read_recorded

BF16, FP4, FP8 = GROUPS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("episodes"))


@pytest.fixture
def tool(monkeypatch, capsys):
    def tool(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["episodes", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return tool


def test_every_token_is_there_with_what_is_known_of_it(run):
    content = content_of(read_facts(run), read_recorded(run), max_episodes=100)
    recorded = [
        (update, t, trained) for update in read_recorded(run) for _, t, trained in update.episodes()
    ]
    assert len(content["episodes"]) == content["num_recorded"] == len(recorded) == 7
    for shown, (update, t, trained) in zip(content["episodes"], recorded, strict=True):
        assert (shown["update"], shown["version"]) == (update.step, update.version)
        assert shown["tokens"] == t.tokens.tolist()
        assert shown["sampled"] == np.flatnonzero(t.loss_mask).tolist()
        np.testing.assert_allclose(shown["sampler_logp"], t.sampler_logp, atol=6e-5)
        versions = [v for v, start, end in shown["spans"] for _ in range(start, end)]
        assert versions == t.version.tolist()
        assert shown["sizes"] == t.candidates.counts.tolist()
        at = 0
        for n, num in enumerate(shown["shown"]):
            assert num >= min(t.candidates.counts[n], MAX_CANDIDATES)
            assert t.tokens[t.loss_mask][n] in shown["ids"][at : at + num]
            assert shown["logp"][at : at + num] == sorted(shown["logp"][at : at + num])[::-1]
            at += num
        if trained is None:
            assert shown["trainer_logp"] is None and shown["mean_gap"] is None
            continue
        np.testing.assert_allclose(shown["trainer_logp"], trained.trainer_logp, atol=6e-5)
        assert shown["masked"] == np.flatnonzero(trained.masked).tolist() != []
        gaps = np.abs(trained.trainer_logp - t.sampler_logp)
        assert shown["mean_gap"] == pytest.approx(gaps.mean(), abs=6e-5)
        assert shown["max_gap"] == pytest.approx(gaps.max(), abs=6e-5)
    assert max(max(episode["sizes"]) for episode in content["episodes"]) > MAX_CANDIDATES
    assert content["accelerators"][FP4] == "b300, bf16"


def test_tokens_are_spelled_as_the_runs_tokenizer_does(run):
    content = content_of(read_facts(run), read_recorded(run), max_episodes=100)
    first = content["episodes"][0]
    text = "".join(content["texts"][i] for i in first["tokens"])
    assert text.startswith("<|im_start|>system\n") and "def total(cart):" in text
    assert all(reply in text for reply in REPLIES)
    assert {content["texts"][i] for i in content["controls"]} >= {"<tool_call>", "<|im_end|>"}
    assert HOSTILE in content["texts"].values()


def test_fewer_episodes_are_of_all_updates(run):
    content = content_of(read_facts(run), read_recorded(run), max_episodes=3)
    assert [episode["update"] for episode in content["episodes"]] == [1, 1, 8]
    assert content["num_recorded"] == 7


def test_no_text_ends_the_data(run):
    content = content_of(read_facts(run), read_recorded(run), max_episodes=100)
    html = render(content)
    assert html.count("</script>") == 2 and "<img" not in html and "<b>" not in html
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    found = json.loads(data)
    assert found["texts"] == {str(i): text for i, text in content["texts"].items()}
    assert found["episodes"] == content["episodes"]
    outside = html.replace(data, "").replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in outside and "https:" not in outside and "src=" not in outside
    assert "default-src 'none'" in html


def test_the_anatomy_of_updates(run):
    first, second = anatomy(read_recorded(run))
    assert (first["step"], first["version"], first["num_episodes"]) == (1, 4, 4)
    assert first["reward"] == pytest.approx(2 / 3), "a failure has none"
    assert first["endings"] == {"submitted": 0.75, "failure": 0.25}
    assert (second["num_replies"], second["share_without_call"]) == (7, 3 / 7)
    assert second["share_alike"] == pytest.approx(1 / 3)
    lengths = [
        len(reply)
        for update in read_recorded(run)
        for _, t, _ in update.episodes()
        for reply in replies_of(t)
        if update.step == 8
    ]
    assert second["reply_tokens"] == pytest.approx(np.mean(lengths))
    update = next(read_recorded(run))
    gaps = [np.abs(x.trainer_logp - t.sampler_logp) for _, t, x in update.episodes() if x]
    assert first["abs_log_ratio"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-5)
    masked = np.concatenate([x.masked for _, _, x in update.episodes() if x])
    assert first["share_masked"] == pytest.approx(masked.mean())


def repeated(*replies: str) -> float:
    update = update_of(1, 4, [make_episode("r", BF16, replies=replies)])
    (row,) = anatomy([update])
    return row["share_repeated"]


def test_repeats_are_counted_within_an_episode():
    assert repeated("cat a.py", "ls shop") == 0
    assert repeated("ls", "ls", "ls") == pytest.approx(2 / 3), "shorter than a run: all of it"
    long = "echo " + "a b " * NGRAM
    assert 0.5 < repeated(long) < 1, "one reply that goes round in circles"
    apart = [make_episode(name, BF16, replies=("cat -n shop/cart.py",)) for name in "xy"]
    (row,) = anatomy([update_of(1, 4, apart)])
    assert row["share_repeated"] == 0 and row["share_alike"] is None


def test_replies_are_the_sampled_parts():
    t = make_episode("a", BF16)
    replies = replies_of(t)
    assert len(replies) == 2
    np.testing.assert_array_equal(np.concatenate(replies), t.tokens[t.loss_mask])
    ends_given = replace(
        t, tokens=np.r_[t.tokens, t.tokens[:2]], loss_mask=np.r_[t.loss_mask, False, False]
    )
    assert [len(x) for x in replies_of(ends_given)] == [len(x) for x in replies]


def test_an_update_in_which_all_failed():
    failed = [make_episode("f", BF16, reward=None, ending=Ending.FAILURE)]
    (row,) = anatomy([update_of(2, 5, failed)])
    assert row["reward"] is row["abs_log_ratio"] is row["share_masked"] is None
    assert row["endings"] == {"failure": 1.0}


def test_the_command_writes_a_page(run, tool, tmp_path):
    status, out, _ = tool(run)
    assert status == 0 and out.strip() == str(run / "episodes.html")
    whole = (run / "episodes.html").read_text()
    assert "Episodes of" in whole and '"num_recorded":7' in whole
    status, out, _ = tool(run, "--out", tmp_path / "few.html", "--max-episodes", 1)
    assert status == 0 and len((tmp_path / "few.html").read_text()) < len(whole)


def test_the_command_prints_a_summary(run, tool):
    status, out, _ = tool(run, "--summary")
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert lines[0][:3] == ["update", "episodes", "reward"]
    assert lines[1][:4] == ["1", "4", "0.667", "0.0%"]
    assert lines[2][:5] == ["8", "3", "0.333", "42.9%", "33.3%"]
    assert "format_errors 33%" in out.splitlines()[2]


def test_refusals_are_one_sentence(run, tool, tmp_path):
    for arguments, sentence in (
        ((tmp_path,), "train.record_every above 0"),
        ((tmp_path, "--summary"), "train.record_every above 0"),
        ((run, "--out", tmp_path / "none" / "x.html"), "a file in a directory"),
        ((run, "--out", tmp_path), "a file in a directory"),
    ):
        status, out, err = tool(*arguments)
        assert (status, out) == (2, "") and err.count("\n") == 1 and sentence in err
    assert not (tmp_path / "episodes.html").exists()


def test_another_tokenizer_is_never_taken(tool, tmp_path):
    run = make_run(tmp_path)
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    status, _, err = tool(run)
    assert status == 2 and "tokenizer.json: expected the run's tokenizer" in err
    (run / "config.json").unlink()
    status, _, err = tool(run)
    assert status == 2 and "a run's config.json" in err
