"""The real mini-swe-agent against the endpoint, in tool mode and in text mode, unchanged.

The package and what it needs take 750 MB, so it is no dependency of ours: the test runs where
MINI_SWE_AGENT_PYTHON is a Python that has it (`make test-agents`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from sampler_fleet.episodes.chat import ChatFormat, Mode
from tests.sampler_fleet.episodes import qwen
from tests.sampler_fleet.openai.endpoint import AGENT, DEMO, LIMITS, running_endpoint

PYTHON = os.environ.get("MINI_SWE_AGENT_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="no MINI_SWE_AGENT_PYTHON with mini-swe-agent"),
]

COMMANDS = ("cat calc.py", "sed -i 's/-/+/' calc.py && cat calc.py")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"


def chat_of(directory: Path, name: str, mode: Mode) -> ChatFormat:
    files = DEMO if name == "demo" else qwen.write_checkpoint(directory / name, name)
    return ChatFormat.load(files, mode=mode)


def script(chat: ChatFormat, mode: Mode) -> list[np.ndarray]:
    """A reply without a call, which the agent drops, then the commands."""
    first, commands = chat.reply_text("Let me see."), (*COMMANDS, SUBMIT)
    if mode == "tool":
        return [first, *map(chat.reply, commands)]
    blocks = [f"Next:\n\n```mswea_bash_command\n{command}\n```" for command in commands]
    return [first, *map(chat.reply_text, blocks)]


@pytest.mark.parametrize(
    ("name", "mode"), [("demo", "tool"), ("qwen3", "tool"), ("qwen3.6", "tool"), ("demo", "text")]
)
async def test_it_makes_trajectories(tmp_path, name, mode):
    chat = chat_of(tmp_path, name, mode)
    replies = script(chat, mode)
    limits = LIMITS.model_copy(update={"max_context_tokens": 100_000})
    kind = "litellm_textbased" if mode == "text" else "litellm"

    async def attempt(session_id: str) -> float:
        tree = tmp_path / session_id
        tree.mkdir()
        (tree / "calc.py").write_text(WRONG)
        process = await asyncio.create_subprocess_exec(
            PYTHON, Path(__file__).with_name("mini_agent.py"),
            f"{endpoint.url}/v1", AGENT, session_id, kind,
            cwd=tree, stdin=-1, stdout=-1, stderr=-1, env=os.environ | {"HOME": str(tmp_path)},
        )  # fmt: skip
        said, errors = await process.communicate(b"add() subtracts. Fix calc.py.")
        assert said.decode().split()[-1:] == ["Submitted"], (said, errors.decode()[-3000:])
        return float((tree / "calc.py").read_text() == RIGHT)

    async with running_endpoint(
        tmp_path, chat, replies, with_tool=mode == "tool", limits=limits
    ) as endpoint:
        _, sessions = await endpoint.open("calc")
        rewards = await asyncio.gather(*map(attempt, sessions))
        assert rewards == [1.0, 1.0]
        for session_id, reward in zip(sessions, rewards, strict=True):
            assert (await endpoint.finish(session_id, reward)).status == 200
        group = await endpoint.group()
    assert len(group.trajectories) == 2
    for trajectory in group.trajectories:
        sampled = trajectory.tokens[trajectory.loss_mask]
        assert sampled.tolist() == np.concatenate(replies).tolist(), "as they were drawn"
        text = chat.decode(trajectory.tokens)
        assert "a - b" in text and "a + b" in text, "what the commands said is there"
        assert text.count("Let me see.") == 1, "also the reply that the agent dropped"
        assert trajectory.num_turns == 4
        assert trajectory.num_format_errors == (1 if mode == "tool" else 0)
        assert len(trajectory.sampler_logp) == len(sampled) == len(trajectory.version)
