"""Token in, token out: the only place where an episode's text becomes tokens and back.

Owns how turns are rendered and how replies are read. A turn is rendered by the checkpoint's own
chat template and is the suffix of a longer conversation's rendering; sampled tokens are never
rendered, decoded or encoded again. Control tokens come from the template alone: text of a user, a
file or a command that spells one is encoded as ordinary characters. Must not run commands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from contracts.errors import BadInputError
from sampler_fleet.episodes.prompts import (
    BAD_COMMAND,
    BAD_JSON,
    BAD_TOOL,
    BASH_TOOL,
    MANY_CALLS,
    NO_CALL,
    OPEN_CALL,
    TEXT_AFTER_CALL,
)
from sampler_fleet.fingerprint import fingerprint

# Stand for contents while the template runs: private-use characters that no template contains.
_SYSTEM, _USER, _REPLY, _ANSWER = "\ue000", "\ue001", "\ue002", "\ue003"
_PLACES = re.compile(f"([{_SYSTEM}{_USER}{_REPLY}{_ANSWER}])")

# Rendered text as the token ids of its fixed parts and the places for contents between them.
_Frame = list[np.ndarray | str]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a reply asks for: a command, or the reason why there is none, as one sentence."""

    command: str | None
    error: str = ""


class ChatFormat:
    """A checkpoint's tokenizer and chat template, for conversations with one `bash` tool.

    Token ids are int32 arrays. Thread-safe.
    """

    def __init__(self, tokenizer_json: bytes, config: dict[str, Any], template: str) -> None:
        """See `load`.

        Raises:
            BadInputError: the files don't fit the format, or the template rewrites earlier turns.
        """
        self._control, self._plain = _tokenizers(tokenizer_json)
        self.fingerprint = fingerprint(tokenizer_json)
        self._render = _renderer(template, config)
        eos = config.get("eos_token")
        self._stop_text = str(eos.get("content") if isinstance(eos, dict) else eos)
        self._stop = self._token_id(self._stop_text)
        self.stop_token_ids = (self._stop,)
        self._open, self._close = self._token_id("<tool_call>"), self._token_id("</tool_call>")

        system, user = _message("system", _SYSTEM), _message("user", _USER)
        prompt = self._render([system, user])
        self._prompt = self._frame(prompt)
        call = _message("assistant", "", command=_REPLY)
        self._call, self._tool_turn = self._turn(prompt, call, _message("tool", _ANSWER))
        text = _message("assistant", _REPLY)
        self._text, self._user_turn = self._turn(prompt, text, _message("user", _ANSWER))
        probe = "echo 'a' \"b\""
        if self.parse(self.reply(probe)).command != probe:
            raise BadInputError(
                "chat template", expected="calls as JSON in <tool_call>", found="another format"
            )

    @staticmethod
    def load(directory: str | Path) -> ChatFormat:
        """From tokenizer.json, tokenizer_config.json and, if it is there, chat_template.jinja.

        Raises:
            BadInputError: the files don't fit the format, or the template rewrites earlier turns.
            FileNotFoundError: one of the first two is missing.
        """
        directory = Path(directory)
        data = (directory / "tokenizer.json").read_bytes()
        path = directory / "tokenizer_config.json"
        try:
            config = json.loads(path.read_bytes())
        except ValueError as error:  # of JSON or of UTF-8
            raise BadInputError(str(path), expected="JSON", found=str(error)) from None
        if not isinstance(config, dict):
            raise BadInputError(str(path), expected="an object", found=type(config).__name__)
        separate = directory / "chat_template.jinja"
        template = separate.read_text() if separate.exists() else config.get("chat_template")
        if not isinstance(template, str):
            raise BadInputError(str(path), expected="a chat_template", found=template)
        return ChatFormat(data, config, template)

    def start(self, system: str, user: str) -> np.ndarray:
        """The whole prompt: system turn with the tool, user turn, and the reply's opening."""
        return self._encode(self._prompt, {_SYSTEM: system, _USER: user})

    def observe(self, text: str) -> np.ndarray:
        """What follows a reply's stop token: a tool response and the next reply's opening."""
        return self._encode(self._tool_turn, {_ANSWER: text})

    def observe_error(self, text: str) -> np.ndarray:
        """What follows the stop token of a malformed reply: a user turn and an opening."""
        return self._encode(self._user_turn, {_ANSWER: text})

    def reply(self, command: str) -> np.ndarray:
        """The reply that calls bash, stop token included: what a scripted expert says."""
        escaped = json.dumps(command, ensure_ascii=False)[1:-1]
        return self._encode(self._call, {_REPLY: escaped})

    def reply_text(self, text: str) -> np.ndarray:
        """A reply without a tool call, stop token included."""
        return self._encode(self._text, {_REPLY: text})

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return self._control.decode([int(i) for i in ids], skip_special_tokens=False)

    def parse(self, ids: Sequence[int] | np.ndarray) -> Reply:
        """Reads a sampled reply, with or without its stop token.

        Counts control tokens, not text that spells them, so that a command may contain any text.
        """
        tokens = [int(i) for i in ids]
        if tokens and tokens[-1] == self._stop:
            tokens.pop()
        opens = [index for index, token in enumerate(tokens) if token == self._open]
        closes = [index for index, token in enumerate(tokens) if token == self._close]
        if not opens:
            return Reply(command=None, error=NO_CALL)
        if len(opens) > 1:
            return Reply(command=None, error=MANY_CALLS)
        if len(closes) != 1 or closes[0] < opens[0]:
            return Reply(command=None, error=OPEN_CALL)
        if self.decode(tokens[closes[0] + 1 :]).strip():
            return Reply(command=None, error=TEXT_AFTER_CALL)
        return _read_call(self.decode(tokens[opens[0] + 1 : closes[0]]))

    def _token_id(self, token: str) -> int:
        found = self._control.token_to_id(token)
        if found is None:
            raise BadInputError("tokenizer", expected=f"a control token {token}", found="none")
        return found

    def _turn(
        self, prompt: str, reply: dict[str, Any], answer: dict[str, Any]
    ) -> tuple[_Frame, _Frame]:
        """The frames of a reply (with its stop token), and of what follows it.

        Raises:
            BadInputError: the template changes the prompt, or what follows a reply, later on.
        """
        start = [_message("system", _SYSTEM), _message("user", _USER)]
        once = self._render([*start, reply, answer])
        twice = self._render([*start, reply, answer, reply, answer])
        stop = self._stop_text
        body, _, rest = once.removeprefix(prompt).partition(stop)
        turn = f"{body}{stop}{rest}"
        if not once.startswith(prompt) or twice != prompt + turn + turn or _REPLY not in body:
            raise BadInputError(
                "chat template",
                expected="one that only appends, so that sampled tokens stay as they are",
                found="a rendering that changes earlier turns",
            )
        return self._frame(body + stop), self._frame(rest)

    def _frame(self, text: str) -> _Frame:
        return [
            part if _PLACES.fullmatch(part) else _ids(self._control, part)
            for part in _PLACES.split(text)
            if part
        ]

    def _encode(self, frame: _Frame, contents: dict[str, str]) -> np.ndarray:
        parts = [_ids(self._plain, contents[p]) if isinstance(p, str) else p for p in frame]
        return np.concatenate(parts)


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    whole = text.encode(errors="replace").decode()  # a lone surrogate has no bytes
    return np.asarray(tokenizer.encode(whole, add_special_tokens=False).ids, np.int32)


def _message(role: str, content: str, *, command: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": content}
    if command is not None:
        call = {"name": "bash", "arguments": {"command": command}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


def _tokenizers(tokenizer_json: bytes) -> tuple[Tokenizer, Tokenizer]:
    """One for templates, and one that reads control tokens as the characters they are spelled by.

    The second takes everything that looks like a control token for one, special or not.
    """
    try:
        data = json.loads(tokenizer_json)
        control = Tokenizer.from_str(json.dumps(data))
        for token in data["added_tokens"]:
            token["special"] |= token["content"].startswith("<") and token["content"].endswith(">")
        plain = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # tokenizers raises nothing more precise
        raise BadInputError("tokenizer.json", expected="a tokenizer", found=str(error)) from None
    plain.encode_special_tokens = True
    return control, plain


def _renderer(template: str, config: dict[str, Any]) -> Callable[[list[dict[str, Any]]], str]:
    """Renders messages as transformers does, with the opening of a reply after them."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    names = {k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, str)}
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise BadInputError("chat template", expected="Jinja", found=str(error)) from None

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return compiled.render(
                messages=messages,
                tools=[BASH_TOOL],
                add_generation_prompt=True,
                **names,
            )
        except jinja2.TemplateError as error:
            raise BadInputError(
                "chat template", expected="system, user, assistant, tool turns", found=str(error)
            ) from None

    return render


def _read_call(text: str) -> Reply:
    """The command of `{"name": "bash", "arguments": {"command": ...}}`."""
    try:
        call = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError):
        return Reply(command=None, error=BAD_JSON)
    if not isinstance(call, dict) or call.get("name") != "bash":
        return Reply(command=None, error=BAD_TOOL)
    arguments = call.get("arguments")
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if set(call) != {"name", "arguments"} or arguments != {"command": command}:
        return Reply(command=None, error=BAD_COMMAND)
    if not isinstance(command, str) or not command.strip() or not _is_executable(command):
        return Reply(command=None, error=BAD_COMMAND)
    return Reply(command=command)


def _is_executable(command: str) -> bool:
    """Whether the system can be given it: no NUL, no lone surrogate."""
    return "\0" not in command and not any("\ud800" <= c <= "\udfff" for c in command)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
