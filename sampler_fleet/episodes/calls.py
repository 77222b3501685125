"""How a reply asks for a command: as a JSON call, as an XML call, or as a fenced block.

Owns reading and writing one request, strictly: whatever a policy writes is a command or a counted
format error, never an exception, and nothing is guessed. Must not know tokens, nor run anything.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from sampler_fleet.episodes.prompts import (
    BAD_BLOCK,
    BAD_COMMAND,
    BAD_JSON,
    BAD_TOOL,
    BAD_XML,
    MANY_BLOCKS,
    MANY_CALLS,
    NO_BLOCK,
    NO_CALL,
    OPEN_BLOCK,
    OPEN_CALL,
    OPEN_THOUGHT,
    TEXT_AFTER_BLOCK,
    TEXT_AFTER_CALL,
)

_FENCE = "```"


class FormatError(StrEnum):
    """Why a reply has no command; the names under which they are counted."""

    NO_CALL = "no_call"
    MANY_CALLS = "many_calls"
    OPEN_CALL = "open_call"
    OPEN_THOUGHT = "open_thought"
    TEXT_AFTER_CALL = "text_after_call"
    BAD_SYNTAX = "bad_syntax"  # of JSON or XML
    BAD_TOOL = "bad_tool"
    BAD_ARGUMENT = "bad_argument"
    CUT_OFF = "cut_off"  # no stop token, whatever the text says


KINDS = {
    NO_CALL: FormatError.NO_CALL,
    NO_BLOCK: FormatError.NO_CALL,
    MANY_CALLS: FormatError.MANY_CALLS,
    MANY_BLOCKS: FormatError.MANY_CALLS,
    OPEN_CALL: FormatError.OPEN_CALL,
    OPEN_BLOCK: FormatError.OPEN_CALL,
    OPEN_THOUGHT: FormatError.OPEN_THOUGHT,
    TEXT_AFTER_CALL: FormatError.TEXT_AFTER_CALL,
    TEXT_AFTER_BLOCK: FormatError.TEXT_AFTER_CALL,
    BAD_JSON: FormatError.BAD_SYNTAX,
    BAD_XML: FormatError.BAD_SYNTAX,
    BAD_TOOL: FormatError.BAD_TOOL,
    BAD_COMMAND: FormatError.BAD_ARGUMENT,
    BAD_BLOCK: FormatError.BAD_ARGUMENT,
}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a reply asks for: a command, or the reason why there is none, as one sentence."""

    command: str | None
    error: str = ""

    @property
    def kind(self) -> FormatError | None:
        """What the error is counted as; None: there is a command."""
        return KINDS[self.error] if self.error else None


class CallSyntax(Protocol):
    """What stands between a call's opening and closing tag."""

    def read(self, body: str) -> Reply: ...

    def escape(self, command: str) -> str:
        """The command as it stands in a call."""
        ...


class JsonCalls:
    """`{"name": "bash", "arguments": {"command": "ls"}}`: Qwen3, and the demo."""

    def read(self, body: str) -> Reply:
        try:
            call = json.loads(body, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError):
            return Reply(command=None, error=BAD_JSON)
        if not isinstance(call, dict) or call.get("name") != "bash":
            return Reply(command=None, error=BAD_TOOL)
        arguments = call.get("arguments")
        command = arguments.get("command") if isinstance(arguments, dict) else None
        if set(call) != {"name", "arguments"} or arguments != {"command": command}:
            return Reply(command=None, error=BAD_COMMAND)
        return _checked(command, BAD_COMMAND)

    def escape(self, command: str) -> str:
        """Tokenizers compose characters, and an accent would change the escape that it follows."""
        text = json.dumps(command, ensure_ascii=False)
        is_kept = unicodedata.is_normalized("NFC", text)
        return (text if is_kept else json.dumps(command))[1:-1]


class XmlCalls:
    """`<function=bash>`, `<parameter=command>`, the text as it is: Qwen3.5 and 3.6, Qwen3-Coder.

    One line break each after the opening and before the closing tag belongs to the frame. Nothing
    is escaped, so a command may spell closing tags: the last ones count. Only text that reads as a
    further parameter or function can't be part of a command.
    """

    _NEXT = re.compile(r"</parameter>\s*(?:<parameter=|</function>\s*<function=)")

    def read(self, body: str) -> Reply:
        function, arguments = _element(body.strip(), "function")
        if function is None:
            return Reply(command=None, error=BAD_XML)
        if function != "bash":
            return Reply(command=None, error=BAD_TOOL)
        if not arguments.strip():
            return Reply(command=None, error=BAD_COMMAND)
        parameter, command = _element(arguments.strip(), "parameter")
        if parameter is None:
            return Reply(command=None, error=BAD_XML)
        if parameter != "command" or self._NEXT.search(arguments):
            return Reply(command=None, error=BAD_COMMAND)
        return _checked(command.removeprefix("\n").removesuffix("\n"), BAD_COMMAND)

    def escape(self, command: str) -> str:
        return command


class FencedCommands:
    """One ```` ```bash ```` block, the last thing of a reply: for policies without tool calls.

    A block is closed by the first line that is its own fence; more backticks than three open one
    that may hold lines of three.
    """

    _OPENING = re.compile(r"^(`{3,})bash[ \t]*\n", re.MULTILINE)

    def read(self, body: str) -> Reply:
        opening = self._OPENING.search(body)
        if not opening:
            return Reply(command=None, error=NO_BLOCK)
        closing = re.compile(rf"^{opening[1]}[ \t]*$", re.MULTILINE).search(body, opening.end())
        if not closing:
            return Reply(command=None, error=OPEN_BLOCK)
        rest = body[closing.end() :]
        if self._OPENING.search(rest):
            return Reply(command=None, error=MANY_BLOCKS)
        if rest.strip():
            return Reply(command=None, error=TEXT_AFTER_BLOCK)
        return _checked(body[opening.end() : closing.start()].removesuffix("\n"), BAD_BLOCK)

    def escape(self, command: str) -> str:
        """The whole block."""
        fence = _FENCE
        while re.search(rf"^{fence}[ \t]*$", command, re.MULTILINE):
            fence += "`"
        return f"{fence}bash\n{command}\n{fence}"


def _element(text: str, tag: str) -> tuple[str | None, str]:
    """The name and the content of `<tag=name>content</tag>`; no name: it is something else."""
    opening, closing = f"<{tag}=", f"</{tag}>"
    name, end, content = text.removeprefix(opening).partition(">")
    if not (text.startswith(opening) and end and content.endswith(closing)) or "\n" in name:
        return None, ""
    return name, content.removesuffix(closing)


def _checked(command: Any, error: str) -> Reply:
    """The command, if it is a text that says something and that the system can be given."""
    if not isinstance(command, str) or not command.strip():
        return Reply(command=None, error=error)
    if "\0" in command or any("\ud800" <= c <= "\udfff" for c in command):
        return Reply(command=None, error=error)
    return Reply(command=command)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
