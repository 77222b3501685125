"""The comparer's command line against transformers, against an engine, and what it refuses."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from tools import compare_logprobs, make_tiny_checkpoint
from trainer_jax.hf import load_checkpoint

ROWS = [[1, 2, 3, 4, 5], list(range(70, 0, -1)), [9, 9]]
TINY = ("--vocab", 80, "--hidden", 16, "--layers", 1, "--experts", 4, "--head-dim", 8, "--ffn", 8)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a tool; returns its exit status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(tool, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            tool.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def checkpoint(run, tmp_path) -> Path:
    path = tmp_path / "model"
    assert run(make_tiny_checkpoint, path, *TINY)[0] == 0
    return path


@pytest.fixture
def tokens(tmp_path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(ROWS))
    return path


class Engine(HTTPServer):
    """Answers /generate as SGLang does, with the given log-probs of rows."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.logp: dict[tuple[int, ...], np.ndarray] = {}
        self.status = 200
        self.asked: list[dict] = []
        self.body: bytes | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({"path": self.path, **request})
        row = request["input_ids"]
        logp = [None, *self.server.logp.get(tuple(row), np.zeros(len(row) - 1)).tolist()]
        triples = [[x, token, None] for x, token in zip(logp, row, strict=True)]
        answer = {"text": "", "meta_info": {"input_token_logprobs": triples}}
        body = self.server.body or json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def engine():
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_transformers_agrees(run, checkpoint, tokens, tmp_path):
    dump = tmp_path / "out.npz"
    status, shown, error = run(
        compare_logprobs, checkpoint, "--tokens", tokens, "--peer", "transformers",
        "--dump", dump, "--json",
    )  # fmt: skip
    assert status == 0, error
    found = json.loads(shown)
    assert (found["rows"], found["tokens"]) == (3, 4 + 69 + 1)
    assert 0 < found["difference"]["max_abs"] < 1e-5
    assert abs(found["difference"]["kl_k3"]) < 1e-9
    assert len(found["difference"]["worst"]) == 10
    with np.load(dump) as arrays:
        assert sorted(arrays) == ["offsets", "sampler_logp", "tokens", "trainer_logp"]
        np.testing.assert_array_equal(arrays["tokens"], np.concatenate(ROWS))
        starts = arrays["offsets"][:-1]
        for name in ("trainer_logp", "sampler_logp"):
            assert np.flatnonzero(np.isnan(arrays[name])).tolist() == starts.tolist()
        assert np.nanmean(arrays["trainer_logp"]) == pytest.approx(found["trainer"]["mean_logp"])
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tokens.json", "out.npz"}


def test_an_engine_is_asked_as_sglang_and_its_errors_are_found(run, checkpoint, tokens, engine):
    rows = compare_logprobs.read_rows(tokens, 80)
    exact, _ = compare_logprobs.trainer_logp(*load_checkpoint(checkpoint), rows)
    engine.logp = {tuple(row.tolist()): logp.copy() for row, logp in zip(rows, exact, strict=True)}
    arguments = (compare_logprobs, checkpoint, "--tokens", tokens, "--peer", engine.url, "--json")
    same = json.loads(run(*arguments)[1])["difference"]
    assert (same["max_abs"], same["kl_k3"]) == (0, 0)
    assert engine.asked[0] == {
        "path": "/generate",
        "input_ids": ROWS[0],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    engine.logp[tuple(ROWS[1])][30] += 0.5
    found = json.loads(run(*arguments)[1])["difference"]
    assert found["max_abs"] == pytest.approx(0.5, abs=1e-6)
    assert found["kl_k3"] == pytest.approx((np.exp(-0.5) - 1 + 0.5) / 74, rel=1e-5)
    worst = found["worst"][0]
    assert (worst["row"], worst["position"], worst["token"]) == (1, 31, ROWS[1][31])
    status, shown, _ = run(*arguments[:-1])
    assert status == 0
    assert all(word in shown for word in ("max |difference|", "5.000e-01", "mean KL (k3)", "worst"))


def test_without_a_peer_only_the_trainer(run, checkpoint, tokens):
    tokens.write_text(json.dumps({"rows": ROWS}))
    status, shown, _ = run(compare_logprobs, checkpoint, "--tokens", tokens, "--json")
    found = json.loads(shown)
    assert status == 0 and found["peer"] is None and "difference" not in found
    assert found["trainer"]["min_logp"] <= found["trainer"]["mean_logp"] < 0
    assert 0 < found["trainer"]["mean_entropy"] <= np.log(80)


def test_difference_by_hand():
    rows = [np.array([5, 6, 7]), np.array([8, 9])]
    trainer = [np.array([-1.0, -2.0]), np.array([-3.0])]
    sampler = [np.array([-1.0, -2.0 + np.log(2)]), np.array([-3.0 - np.log(4)])]
    found = compare_logprobs.difference(rows, trainer, sampler, num_worst=1)
    assert found.max_abs == pytest.approx(np.log(4))
    assert found.mean_abs == pytest.approx(np.log(8) / 3)
    assert found.kl_k3 == pytest.approx(((0.5 - 1 + np.log(2)) + (4 - 1 - np.log(4))) / 3)
    assert asdict(found.worst[0]) == {
        "row": 1, "position": 1, "token": 9, "trainer_logp": -3.0,
        "sampler_logp": pytest.approx(-3.0 - np.log(4)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[[1, 2], [3, 80]]", "row 1: expected token ids from 0 to 79, found 80"),
        ("[[1, -2]]", "row 0: expected token ids from 0 to 79, found -2"),
        ("[[1, 2], [3]]", "row 1: expected at least 2 tokens, found 1"),
        ("[[1, true]]", "row 0: expected a list of token ids"),
        ("[1, 2]", "row 0: expected a list of token ids"),
        ('{"tokens": []}', "expected a list of token rows"),
        ("[[1, 2", "expected JSON"),
        (None, "No such file"),
    ],
)
def test_refuses_tokens(run, checkpoint, tokens, content, sentence):
    tokens.unlink() if content is None else tokens.write_text(content)
    status, shown, error = run(compare_logprobs, checkpoint, "--tokens", tokens)
    assert (status, shown) == (2, "")
    assert sentence in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--peer", "vllm"), "--peer: expected transformers or http://HOST:PORT, found vllm"),
        (("--peer", "http://127.0.0.1:9"), "http://127.0.0.1:9/generate: the engine does not"),
        *(
            (("--peer", peer), "--peer: expected transformers or http://HOST:PORT, found http")
            for peer in ("http://[bad", "http://", "http://h:99999", "http://a..b", "http://h:x")
        ),
        (("--timeout", "nan"), "--timeout: expected more than 0, found nan"),
        (("--dump", "/nowhere/out.npz"), "--dump: expected a file in a directory"),
    ],
)
def test_refuses_arguments(run, checkpoint, tokens, arguments, sentence):
    status, shown, error = run(compare_logprobs, checkpoint, "--tokens", tokens, *arguments)
    assert (status, shown) == (2, "")
    assert sentence in error and error.count("\n") == 1


def test_refuses_another_architecture_and_no_checkpoint(run, checkpoint, tokens, tmp_path):
    (checkpoint / "config.json").write_text('{"model_type": "gemma3"}')
    for path, sentence in ((checkpoint, "found gemma3"), (tmp_path / "no", "config.json")):
        status, _, error = run(compare_logprobs, path, "--tokens", tokens)
        assert status == 2 and sentence in error


@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    [
        (400, b"too long", "expected status 200, found 400 too long"),
        (200, b"<html>", "expected meta_info.input_token_logprobs"),
        (200, b'{"meta_info": {"input_token_logprobs": [[null, 7, null]]}}', "the 5 tokens sent"),
        (
            200,
            json.dumps(
                {"meta_info": {"input_token_logprobs": [[None, t, None] for t in ROWS[0]]}}
            ).encode(),
            "every token but the first",
        ),
        (
            200,
            json.dumps(
                {"meta_info": {"input_token_logprobs": [[float("nan"), t, None] for t in ROWS[0]]}}
            ).encode(),
            "the peer's log-probs, row 0, position 1",
        ),
    ],
)
def test_refuses_other_answers(run, checkpoint, tokens, engine, status, answer, sentence):
    tokens.write_text(json.dumps(ROWS[:1]))
    engine.status, engine.body = status, answer
    got, _, error = run(compare_logprobs, checkpoint, "--tokens", tokens, "--peer", engine.url)
    assert got == 2 and sentence in error


def test_make_tiny_checkpoint(run, checkpoint, tmp_path):
    again, other, fused = (tmp_path / name for name in ("again", "other", "fused"))
    again.mkdir()  # empty is as good as absent
    assert run(make_tiny_checkpoint, again, *TINY)[0] == 0
    assert run(make_tiny_checkpoint, other, *TINY, "--seed", 1)[0] == 0
    assert run(make_tiny_checkpoint, fused, *TINY, "--layout", "fused", "--tied")[0] == 0
    first, second, third = (
        (p / "model.safetensors").read_bytes() for p in (checkpoint, again, other)
    )
    assert first == second != third
    config, params = load_checkpoint(fused)
    assert (config.num_experts, config.tie_word_embeddings) == (4, True)
    assert "head" not in params


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("model", *TINY), "OUT: expected a new or empty directory"),
        (("new", *TINY, "--experts", 1), "num_experts_per_tok"),
        (("new", *TINY, "--scale", "nan"), "--scale: expected a number from 0 on, found nan"),
        (("new", *TINY, "--scale", "-1"), "--scale: expected a number from 0 on, found -1.0"),
        (("new", *TINY, "--tokenizer", "nowhere"), "--tokenizer: expected a directory with"),
        (("new", *TINY, "--tokenizer", "large"), "ids below the model's vocab_size (80), found 80"),
    ],
)
def test_make_tiny_checkpoint_refuses(run, checkpoint, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 80}}}')
    before = (checkpoint / "model.safetensors").read_bytes()
    status, _, error = run(make_tiny_checkpoint, *arguments)
    assert status == 2 and sentence in error
    assert (checkpoint / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "new").exists()
