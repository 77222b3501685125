"""A sampled reply as a message, while it is sampled.

Owns which of a reply's tokens are thought, content and call. The parts are told apart by control
tokens, as `ChatFormat.parse` does it, which alone decides whether there is a call. Must not change
a token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from sampler_fleet.episodes.chat import ChatFormat

_CUT = "\ufffd"  # what the bytes of half a character are shown as
_CHARACTER_BYTES = 4  # at most, and so its tokens
_OPENING_TOKENS = 8  # at most, of a template's <think> and what stands around it

Field = Literal["reasoning_content", "content"]


class Delta(NamedTuple):
    """More text of a reply."""

    field: Field
    text: str


class ReplyReader:
    """Takes the tokens of one reply in order and gives its text as far as it is decided."""

    def __init__(self, chat: ChatFormat, prompt: np.ndarray, *, with_tool: bool) -> None:
        """`prompt` is the buffer that the reply continues."""
        self._chat = chat
        self._with_tool = with_tool
        opening = chat.decode(prompt[-_OPENING_TOKENS:]).rstrip()
        self._field: Field = "reasoning_content" if opening.endswith("<think>") else "content"
        self._held: list[int] = []  # tokens not told yet
        self._in_call = False
        self._texts: dict[int, str] = {}  # of tokens by themselves
        self.text: dict[Field, str] = {"reasoning_content": "", "content": ""}

    def feed(self, tokens: np.ndarray) -> list[Delta]:
        """What is decided with these tokens."""
        deltas: list[Delta] = []
        for token in map(int, tokens):
            if token in self._chat.stop_token_ids:  # the last
                continue
            tag = "" if self._in_call else self._text(token)
            if tag == "<think>" and not any(self.text.values()) and not self._held:
                self._field = "reasoning_content"
            elif tag == "</think>" and self._field == "reasoning_content":
                deltas += self._tell(whole=True)
                self._field = "content"
            elif tag == "<tool_call>" and self._with_tool and self._field == "content":
                deltas += self._tell(whole=True)
                self._in_call = True
                self._held.append(token)
            else:
                self._held.append(token)
        return deltas if self._in_call else deltas + self._tell(whole=False)

    def finish(self, *, has_call: bool) -> list[Delta]:
        """The rest; what looked like a call is text if there is none."""
        if has_call:
            self._held.clear()
        return self._tell(whole=True)

    def _tell(self, *, whole: bool) -> list[Delta]:
        """What is held, unless it may be the first bytes of a character of which more come."""
        for num_kept in range(_CHARACTER_BYTES):
            told = len(self._held) - num_kept
            text = self._chat.decode(self._held[:told]) if told > 0 else ""
            if whole or not text.endswith(_CUT):
                break
        else:  # bytes that are no character
            told, text = len(self._held), self._chat.decode(self._held)
        del self._held[: max(told, 0)]
        if not text:
            return []
        self.text[self._field] += text
        return [Delta(self._field, text)]

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._chat.decode([token])
        return self._texts[token]
