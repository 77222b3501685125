"""A checkpoint's chat template: what it writes around contents, and whether it only appends.

Owns rendering, as text. Conversations of stand-ins show what a template adds between a reply's
stop token and the next reply: that difference is appended to the buffer, and no reply is ever
rendered again. A template that rewrites earlier turns is refused, but for one kind: that it hides
earlier thoughts is only noted, since the sampled ones stay in the buffer. Must not know tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.errors import BadInputError
from sampler_fleet.episodes.prompts import BASH_TOOL

# Stand for contents: private-use characters that no template contains.
SYSTEM, USER, REPLY, ANSWER = "\ue000", "\ue001", "\ue002", "\ue003"
_THOUGHT = "\ue004"

_THOUGHTS = re.compile(r"<think>\n[^<]*\n</think>\n\n")

Message = dict[str, Any]


class Template:
    """The Jinja text of a checkpoint, for conversations with one tool, or with none."""

    def __init__(
        self, text: str, config: dict[str, Any], *, stop: str, with_tool: bool, thinking: bool
    ) -> None:
        """`stop` ends a reply. `config` holds the named control tokens.

        Raises:
            BadInputError: it is no template, or one that rewrites earlier turns.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        try:
            self._compiled = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise BadInputError("chat template", expected="Jinja", found=str(error)) from None
        self._variables = {
            **{k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, str)},
            "tools": [BASH_TOOL] if with_tool else None,
            "enable_thinking": thinking,
            "preserve_thinking": True,
        }
        self._stop = stop
        self._start = [message("system", SYSTEM), message("user", USER)]
        self.prompt = self.render(self._start)
        self._head = self.render(self._start, opens=False)
        if not self.prompt.startswith(self._head):
            raise _rewrites("an opening that changes the prompt")
        self.opening = self.prompt.removeprefix(self._head)
        self._trimmed = {
            role
            for role in (("system", "user", "tool") if with_tool else ("system", "user"))
            if self._trims(role)
        }
        self.hides_thoughts = self._check(with_tool)

    def render(self, messages: Sequence[Message], *, opens: bool = True) -> str:
        """The conversation as transformers renders it; `opens` a reply at its end.

        Raises:
            BadInputError: the template refuses it.
        """
        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=opens, **self._variables
            )
        except jinja2.TemplateError as error:
            raise BadInputError(
                "chat template", expected="system, user, assistant, tool turns", found=str(error)
            ) from None

    def fit(self, role: str, content: str) -> str:
        """The content as the template takes it: some strip white space around it."""
        return content.strip() if role in self._trimmed else content

    def reply(self, reply: Message) -> str:
        """What follows the opening, stop token included, where a reply holds REPLY.

        Where replies open with a thought it is an empty one.
        """
        empty = self._turn({**reply, "reasoning_content": _THOUGHT}).replace(_THOUGHT, "")
        for turn in (self._turn(reply), empty):
            if turn.startswith(self.opening):
                before, _, after = turn.removeprefix(self.opening).partition(REPLY)
                return f"{before}{REPLY}{after.partition(self._stop)[0]}{self._stop}"
        raise _rewrites("replies that don't begin as they are opened")

    def _turn(self, reply: Message) -> str:
        text = self.render([*self._start, reply], opens=False)
        if not text.startswith(self._head):
            raise _rewrites("a rendering that changes earlier turns")
        return text.removeprefix(self._head)

    def suffix(self, reply: Message, answer: Message) -> str:
        """What the template adds between the stop token of a reply and the next reply.

        `reply` holds REPLY; `answer` may be any real turn.
        """
        text = self.render([*self._start, reply, answer])
        if not text.startswith(self._head):
            raise _rewrites("a rendering that changes earlier turns")
        _, shown, rest = text.removeprefix(self._head).partition(REPLY)
        _, stopped, suffix = rest.partition(self._stop)
        if not (shown and stopped):
            raise _rewrites("a rendering that loses a reply")
        return suffix

    def _trims(self, role: str) -> bool:
        """Whether white space around a content of this role is lost."""
        padded = f" \n{ANSWER}\n "
        if role == "tool":
            return padded not in self.suffix(called(REPLY), message(role, padded))
        turns = [message(m["role"], padded) if m["role"] == role else m for m in self._start]
        return padded not in self.render(turns)

    def _check(self, with_tool: bool) -> bool:
        """Whether it hides earlier thoughts; raises if it rewrites anything else.

        Two exchanges of every kind, after each other. An answer must be rendered alike wherever it
        stands, whatever came before.
        """
        text = message("assistant", REPLY)
        exchanges = [(text, message("user", ANSWER))]
        if with_tool:
            call = called(REPLY)
            exchanges += [(call, message("tool", ANSWER)), (call, message("user", ANSWER))]
        exchanges += [({**r, "reasoning_content": _THOUGHT}, answer) for r, answer in exchanges]
        suffixes = {answer["role"]: self.suffix(reply, answer) for reply, answer in exchanges}
        hides = False
        for first, second in itertools.product(exchanges, repeat=2):
            hides |= self._rewrites_thoughts([*first, *second])
            last = self.render([*self._start, *first, *second]).rpartition(REPLY)[2]
            last = last.partition(self._stop)[2]
            for (_, answer), suffix in ((first, self.suffix(*first)), (second, last)):
                if suffix != suffixes[answer["role"]]:
                    raise _rewrites("answers that depend on what came before")
        return hides

    def _rewrites_thoughts(self, turns: Sequence[Message]) -> bool:
        """Whether a later turn changes the thoughts before it; raises if it changes more."""
        texts = [
            self.render([*self._start, *turns[:num]], opens=False) for num in range(len(turns) + 1)
        ]
        pairs = [*itertools.pairwise(texts)]
        bare = [(_THOUGHTS.sub("", before), _THOUGHTS.sub("", after)) for before, after in pairs]
        if not all(after.startswith(before) for before, after in bare):
            raise _rewrites("a rendering that changes earlier turns")
        return not all(after.startswith(before) for before, after in pairs)


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def called(command: str) -> Message:
    """A reply that calls bash."""
    call = {"name": "bash", "arguments": {"command": command}}
    return message("assistant", "") | {"tool_calls": [{"type": "function", "function": call}]}


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _rewrites(found: str) -> BadInputError:
    return BadInputError(
        "chat template",
        expected="one that only appends, so that sampled tokens stay as they are",
        found=found,
    )
