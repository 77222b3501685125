"""Demonstrations: what the script shows is what bash would print, in the format of episodes."""

from __future__ import annotations

import itertools
import subprocess
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from contracts.errors import BadInputError
from contracts.runfile import validate_section
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.prompts import SUBMIT_COMMAND, SYSTEM_PROMPT, observation
from sampler_fleet.episodes.tasks.demonstrations import (
    build_demonstrations,
    encode_episode,
    write_demonstrations,
)
from sampler_fleet.episodes.tasks.edit import Edit
from sampler_fleet.episodes.tasks.generate import generate_problems
from sampler_fleet.episodes.tasks.script import CONTEXT_LINES, ScriptConfig, play
from sampler_fleet.episodes.tasks.shell import run_command

FLAWLESS = ScriptConfig(wrong_edit=0, look_around=0, malformed=0, early_submit=0)
CHAOTIC = ScriptConfig(wrong_edit=0.8, look_around=0.8, malformed=0.3, early_submit=0.2)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_files) -> Path:
    return tokenizer_files


def problems(num: int, seed: int = 0):
    return itertools.islice(generate_problems("train", seed), num)


class TestShell:
    def test_as_real_bash(self, tmp_path):
        """Every command of chaotic episodes prints and changes what it does in a real shell."""
        rng = Random(0)
        commands = Counter()
        for number, problem in enumerate(problems(25)):
            root = tmp_path / str(number)
            tree = dict(problem.task.tree)
            for path, content in tree.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(content)
            package, path = problem.path.split("/")[0], problem.path
            script = [turn.command for turn in play(problem, CHAOTIC, rng)]
            script += ["ls", f"ls {package}", "cat README.md", f"cat -n {path}"]
            script += [f"grep -n -A1 'def {name}' {path}" for name in ("a", "get", "is")]
            script += [f"cat -n {package}/__init__.py"]
            script += [Edit(path=path, line=99, old="a", new="b").command]
            for command in script:
                done = subprocess.run(
                    ["bash", "-c", command],
                    cwd=root,
                    env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
                    capture_output=True,
                    text=True,
                )
                assert run_command(command, tree) == (done.returncode, done.stdout + done.stderr)
                commands[command.split()[0]] += 1
            assert tree == {path: (root / path).read_text() for path in tree}
        assert set(commands) == {"cat", "sed", "ls", "grep", "echo"}

    def test_unknown_commands_are_refused(self):
        with pytest.raises(ValueError, match="rm"):
            run_command("rm -r shop", {})


class TestScript:
    def test_flawless_expert_repairs(self):
        for problem in problems(100):
            read, edit, submit = play(problem, FLAWLESS, Random(1))
            name = problem.function
            assert read.command == f"grep -n -A{CONTEXT_LINES} 'def {name}' {problem.path}"
            assert edit.command == problem.repair.command
            assert (submit.command, submit.answer) == (SUBMIT_COMMAND, None)
            assert edit.answer == observation(0, "")

    def test_errs_as_often_as_told(self):
        config = ScriptConfig(wrong_edit=0.4, look_around=0.1, malformed=0.05, early_submit=0.05)
        rng, num = Random(0), 2000
        repaired = looked = malformed = early = 0
        for problem in problems(num):
            commands = [turn.command for turn in play(problem, config, rng)]
            turns = play(problem, config, rng)
            repaired += problem.repair.command in commands
            looked += not commands[0].startswith("grep -n")
            malformed += any(not turn.is_call for turn in turns)
            early += not any(command.startswith("sed") for command in commands)
        assert repaired / num == pytest.approx(0.95 * 0.6, abs=0.04)
        assert looked / num == pytest.approx(0.1, abs=0.025)
        assert malformed / num == pytest.approx(1 - 0.95**2, abs=0.025)
        assert early / num == pytest.approx(0.05, abs=0.02)

    def test_wrong_edits_are_wrong_and_varied(self):
        config = ScriptConfig(wrong_edit=1, look_around=0, malformed=0, early_submit=0)
        rng = Random(0)
        kinds = Counter()
        for problem in problems(500):
            _, edit, _ = play(problem, config, rng)
            tree = dict(problem.task.tree)
            run_command(edit.command, tree)
            assert tree[problem.path] != problem.task.fix[problem.path]
            if edit.command in {miss.command for miss in problem.near_misses}:
                kinds["near"] += 1
            elif edit.command in {miss.command for miss in problem.far_misses}:
                kinds["far"] += 1
            else:
                kinds["line"] += 1
        assert kinds["near"] > kinds["far"] > 50
        assert kinds["line"] > 50

    def test_config_is_checked(self):
        with pytest.raises(BadInputError, match="a known key"):
            validate_section(ScriptConfig, "script", {"wrong_edits": 0.1})
        with pytest.raises(BadInputError, match="wrong_edit"):
            validate_section(ScriptConfig, "script", {"wrong_edit": 1.5})


class TestArrays:
    def test_mask_covers_exactly_the_replies(self, tokenizer):
        chat = ChatFormat.load(tokenizer)
        for problem in problems(50, seed=4):
            turns = play(problem, CHAOTIC, Random(2))
            tokens, mask = encode_episode(chat, SYSTEM_PROMPT, problem.task, turns)
            edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
            replies = [tokens[start:end] for start, end in edges.reshape(-1, 2)]
            assert len(replies) == len(turns)
            for reply, turn in zip(replies, turns, strict=True):
                assert reply[-1] in chat.stop_token_ids
                assert chat.parse(reply).command == (turn.command if turn.is_call else None)
            assert tokens[: edges[0]].tolist() == (
                chat.start(SYSTEM_PROMPT, problem.task.issue).tolist()
            )

    def test_short_deterministic_training_only(self, tokenizer, tmp_path):
        arrays = build_demonstrations(tokenizer, 300, 5)
        tokens, offsets, mask = arrays["tokens"], arrays["offsets"], arrays["loss_mask"]
        assert (tokens.dtype, offsets.dtype, mask.dtype) == (np.int32, np.int64, bool)
        assert len(offsets) == 301
        assert offsets[-1] == len(tokens) == len(mask)
        lengths = np.diff(offsets)
        assert lengths.max() <= 320
        assert lengths.mean() < 200
        assert np.add.reduceat(mask, offsets[:-1], dtype=int).max() <= 80

        write_demonstrations(tmp_path / "d.npz", tokenizer, 300, 5)
        with np.load(tmp_path / "d.npz") as saved:
            for name, array in arrays.items():
                assert np.array_equal(saved[name], array)
        assert [path.name for path in tmp_path.iterdir()] == ["d.npz"]
        assert not np.array_equal(build_demonstrations(tokenizer, 300, 6)["tokens"], tokens)

    def test_bad_requests(self, tokenizer, tmp_path):
        with pytest.raises(BadInputError, match="at least 1"):
            build_demonstrations(tokenizer, 0, 0)
        with pytest.raises(FileNotFoundError):
            write_demonstrations(tmp_path / "d.npz", tmp_path, 1, 0)
        assert not list(tmp_path.iterdir())
