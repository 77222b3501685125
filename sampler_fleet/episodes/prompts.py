"""The fixed words of an episode: prompts, the observation format, the error text.

Owns every sentence that the policy reads besides the issue itself; the tokenizer gives the fixed
ones few tokens. Must not run commands or know the tokenizer.
"""

from __future__ import annotations

from typing import Any

from sampler_fleet.episodes.base import Task

SUBMIT_COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

SYSTEM_PROMPT = (
    "Fix the issue in this Python repository. "
    f"When it is fixed, run exactly `{SUBMIT_COMMAND}` to submit."
)

NO_OUTPUT = "(no output)"

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in the repository",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


# Why a reply has no command.
NO_CALL = "There was no tool call."
MANY_CALLS = "There was more than one tool call."
OPEN_CALL = "The tool call has no end."
TEXT_AFTER_CALL = "There was text after the tool call."
BAD_JSON = "The tool call was not valid JSON."
BAD_TOOL = "The only tool is bash."
BAD_COMMAND = "The only argument is command, a text."
FORMAT_ERRORS = (
    NO_CALL,
    MANY_CALLS,
    OPEN_CALL,
    TEXT_AFTER_CALL,
    BAD_JSON,
    BAD_TOOL,
    BAD_COMMAND,
)

# Of formats that the demo's tokenizer needs no tokens for.
OPEN_THOUGHT = "The thought has no end."
BAD_XML = "The tool call was not a <function=bash> with a <parameter=command>."
NO_BLOCK = "There was no bash block."
MANY_BLOCKS = "There was more than one bash block."
OPEN_BLOCK = "The bash block has no end."
TEXT_AFTER_BLOCK = "There was text after the bash block."
BAD_BLOCK = "The bash block had no command."

FENCED_HELP = """

Answer with what you think, if anything, and then one command in a block that ends the answer:
```bash
ls
```"""  # follows the system prompt where commands are fenced


def task_prompt(task: Task) -> str:
    """The first user turn."""
    return task.issue


def observation(returncode: int, output: str) -> str:
    """What the policy sees of a command: its output, and the exit status where it is not 0."""
    shown = output.removesuffix("\n") or NO_OUTPUT
    return shown if returncode == 0 else f"{shown}\n(exit status {returncode})"


def tagged_observation(returncode: int, output: str, *, timed_out: bool, timeout_s: float) -> str:
    """The same with everything named, for policies that have seen such agents before."""
    shown = output.removesuffix("\n")
    text = f"<returncode>{returncode}</returncode>\n<output>\n{shown}\n</output>"
    return f"{text}\nThe command was stopped after {timeout_s:g} s." if timed_out else text


def format_error(reason: str) -> str:
    """The user turn that answers a reply without a valid tool call.

    `reason` is one of FORMAT_ERRORS, from `Reply.error`.
    """
    return f"{reason} Call bash once."
