"""Token in, token out: the only place where an episode's text becomes tokens and back.

Owns how turns are rendered and how replies are read. A turn is rendered by the checkpoint's own
chat template and is the suffix of a longer conversation's rendering; sampled tokens are never
rendered, decoded or encoded again. Control tokens come from the template alone: text of a user, a
file or a command that spells one is encoded as ordinary characters. Every turn is decoded again and
held against what the template renders. Must not run commands.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from contracts.errors import BadInputError
from sampler_fleet.episodes.calls import CallSyntax, FencedCommands, JsonCalls, Reply, XmlCalls
from sampler_fleet.episodes.prompts import (
    FENCED_HELP,
    MANY_CALLS,
    NO_CALL,
    OPEN_CALL,
    OPEN_THOUGHT,
    TEXT_AFTER_CALL,
)
from sampler_fleet.episodes.template import (
    ANSWER,
    REPLY,
    SYSTEM,
    USER,
    Template,
    called,
    message,
)
from sampler_fleet.fingerprint import fingerprint

_log = logging.getLogger(__name__)

_PLACES = f"[{SYSTEM}{USER}{REPLY}{ANSWER}]"
_SHOWN = 40  # characters of a difference
_REMEMBERED = 256  # prompts and answers, of each kind

FormatName = Literal["auto", "demo", "qwen3", "qwen3.5"]
Mode = Literal["tool", "text"]

# Rendered text: token ids of what is fixed, and text and places for contents between them.
_Frame = list[np.ndarray | str]


@dataclass(frozen=True, kw_only=True)
class _Style:
    """How a family of checkpoints writes.

    `in_one_piece` says that text between two control tokens is encoded as a whole, as transformers
    does, and not apart from what it is inserted into. `thinks` says that a reply begins after the
    first </think>.
    """

    calls: CallSyntax
    written: str
    in_one_piece: bool = True
    thinks: bool = True


_STYLES: dict[FormatName, _Style] = {
    "demo": _Style(calls=JsonCalls(), written="JSON", in_one_piece=False, thinks=False),
    "qwen3": _Style(calls=JsonCalls(), written="JSON"),
    "qwen3.5": _Style(calls=XmlCalls(), written="XML"),
}


def _recognize(template: str) -> FormatName:
    if "<function=" in template:
        return "qwen3.5"
    return "qwen3" if "</think>" in template else "demo"


class ChatFormat:
    """A checkpoint's tokenizer and chat template, for conversations with one `bash` tool.

    Token ids are int32 arrays. Thread-safe.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        config: dict[str, Any],
        template: str,
        *,
        name: FormatName = "auto",
        mode: Mode = "tool",
        thinking: bool = True,
    ) -> None:
        """See `load`."""
        self.name: FormatName = _recognize(template) if name == "auto" else name
        self._style, self._is_text = _STYLES[self.name], mode == "text"
        self._control, self._plain = _tokenizers(tokenizer_json)
        self.fingerprint = fingerprint(tokenizer_json)
        self._calls = FencedCommands() if self._is_text else self._style.calls
        self.instructions = FENCED_HELP if self._is_text else ""  # belong after a system prompt
        eos = config.get("eos_token")
        stop = str(eos.get("content") if isinstance(eos, dict) else eos)
        self._stop = self._token_id(stop)
        self.stop_token_ids = (self._stop,)
        if not self._is_text:
            self._open, self._close = self._token_id("<tool_call>"), self._token_id("</tool_call>")
        self._think, self._thought = (
            self._control.token_to_id(tag) if self._style.thinks else None
            for tag in ("<think>", "</think>")
        )
        self._template = Template(
            template, config, stop=stop, with_tool=not self._is_text, thinking=thinking
        )
        self._opens_thought = self._think is not None and re.search(
            r"<think>\s*$", self._template.opening
        )
        self._make_frames()
        # the samples of a prompt begin alike, and what small worlds answer comes again and again
        self._start = functools.lru_cache(_REMEMBERED)(self._start)
        self._answer = functools.lru_cache(_REMEMBERED)(self._answer)
        if self._template.hides_thoughts:
            _log.info(
                "the chat template hides earlier thoughts; what was sampled stays in the buffer"
            )

    def _make_frames(self) -> None:
        """What surrounds contents.

        Raises:
            BadInputError: calls can't be written and read.
        """
        template, text = self._template, message("assistant", REPLY)
        self._call_reply = text if self._is_text else called(REPLY)
        self._answer_role = "user" if self._is_text else "tool"
        self._control_tokens = _either(
            token.content for token in self._control.get_added_tokens_decoder().values()
        )
        self._prompt = self._frame(template.prompt)
        self._call = self._frame(template.reply(self._call_reply))
        self._text = self._frame(template.reply(text))
        self._answers = {
            role: self._frame(template.suffix(self._call_reply, message(role, ANSWER)))
            for role in ("user", self._answer_role)
        }
        probe = "echo 'a' \"b\""
        if self.parse(self.reply(probe)).command != probe:
            raise BadInputError(
                "chat template",
                expected=f"calls as {self._style.written} in <tool_call>",
                found="another format",
            )

    @staticmethod
    def load(
        directory: str | Path,
        *,
        name: FormatName = "auto",
        mode: Mode = "tool",
        thinking: bool = True,
    ) -> ChatFormat:
        """From tokenizer.json, tokenizer_config.json and, if it is there, chat_template.jinja.

        `name` is the format; auto: as the template shows. In text mode the policy writes commands
        in fenced blocks and no tool is offered. `thinking` opens replies as the template does for
        policies that think.

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
        return ChatFormat(data, config, template, name=name, mode=mode, thinking=thinking)

    def start(self, system: str, user: str) -> np.ndarray:
        """The whole prompt: system turn with the tool, user turn, and the reply's opening.

        Raises:
            BadInputError: it is not what the template renders.
        """
        return self._start(system, user)

    def _start(self, system: str, user: str) -> np.ndarray:
        system, user = _whole(system), _whole(user)
        fit = self._template.fit
        ids = self._encode(self._prompt, {SYSTEM: fit("system", system), USER: fit("user", user)})
        rendered = self._template.render([message("system", system), message("user", user)])
        return self._verified("the prompt", ids, rendered)

    def observe(self, text: str) -> np.ndarray:
        """What follows the stop token of a reply with a command: what came of it, and an opening.

        Raises:
            BadInputError: it is not what the template renders.
        """
        return self._answer(self._answer_role, text)

    def observe_error(self, text: str) -> np.ndarray:
        """What follows the stop token of a malformed reply: a user turn and an opening.

        Raises:
            BadInputError: it is not what the template renders.
        """
        return self._answer("user", text)

    def reply(self, command: str) -> np.ndarray:
        """The reply that calls bash, stop token included: what a scripted expert says."""
        return self._encode(self._call, {REPLY: self._calls.escape(_whole(command))})

    def reply_text(self, text: str) -> np.ndarray:
        """A reply without a tool call, stop token included."""
        return self._encode(self._text, {REPLY: _whole(text)})

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return self._control.decode([int(i) for i in ids], skip_special_tokens=False)

    def parse(self, ids: Sequence[int] | np.ndarray) -> Reply:
        """Reads a sampled reply, with or without its stop token. Never raises.

        Counts control tokens, not text that spells them, so that a command may contain any text.
        """
        tokens = [int(i) for i in ids]
        if tokens and tokens[-1] == self._stop:
            tokens.pop()
        if self._thought is not None and self._thought in tokens:
            tokens = tokens[tokens.index(self._thought) + 1 :]
        elif self._opens_thought or self._think in tokens:
            return Reply(command=None, error=OPEN_THOUGHT)
        if self._is_text:
            return self._calls.read(self.decode(tokens))
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
        return self._calls.read(self.decode(tokens[opens[0] + 1 : closes[0]]))

    def _token_id(self, token: str) -> int:
        found = self._control.token_to_id(token)
        if found is None:
            raise BadInputError("tokenizer", expected=f"a control token {token}", found="none")
        return found

    def _answer(self, role: str, text: str) -> np.ndarray:
        text = _whole(text)
        ids = self._encode(self._answers[role], {ANSWER: self._template.fit(role, text)})
        rendered = self._template.suffix(self._call_reply, message(role, text))
        return self._verified(f"a {role} turn", ids, rendered)

    def _verified(self, turn: str, ids: np.ndarray, rendered: str) -> np.ndarray:
        """The ids, which nobody may change, if they say what the template renders."""
        buffer, rendered = self._normal(self.decode(ids)), self._normal(rendered)
        if buffer != rendered:
            pairs = enumerate(zip(buffer, rendered, strict=False))
            shorter = min(len(buffer), len(rendered))
            at = next((index for index, (a, b) in pairs if a != b), shorter)
            raise BadInputError(
                f"chat template, {turn} from its character {at}",
                expected=f"what it renders, {rendered[at : at + _SHOWN]!r}",
                found=f"{buffer[at : at + _SHOWN]!r} in the token buffer",
            )
        ids.setflags(write=False)
        return ids

    def _normal(self, text: str) -> str:
        """The text as the tokenizer sees it."""
        normalizer = self._control.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def _frame(self, text: str) -> _Frame:
        if not self._style.in_one_piece:
            parts = re.split(f"({_PLACES})", text)
            return [p if re.fullmatch(_PLACES, p) else _ids(self._control, p) for p in parts if p]
        parts = re.split(f"({self._control_tokens})", text)
        return [
            _ids(self._control, part) if index % 2 else part  # control tokens at odd places
            for index, part in enumerate(parts)
            if part
        ]

    def _encode(self, frame: _Frame, contents: dict[str, str]) -> np.ndarray:
        """Frame and contents together; only the frame has control tokens."""
        return np.concatenate(
            [
                _ids(self._plain, re.sub(_PLACES, lambda place: contents[place[0]], part))
                if isinstance(part, str)
                else part
                for part in frame
            ]
        )


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def _whole(text: str) -> str:
    """A lone surrogate has no bytes: it becomes a question mark."""
    return text.encode(errors="replace").decode()


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


def _either(texts: Iterable[str]) -> str:
    """A pattern of any of them, the longest that fits."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
