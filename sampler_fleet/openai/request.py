"""What a client asks for: bodies of chat completions, checked.

Owns which fields are taken, ignored and refused. Tokens are drawn as the run says and no other way,
since their recorded probabilities are what the loss corrects with: fields that ask for another
temperature are ignored and named in the answer, fields that would change what a reply is are
refused. Must not know sessions or tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contracts.types import Ending
from sampler_fleet.openai.refusal import Refusal

MODEL = "policy"  # whatever its version

# Refused unless they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "stop": (None, [], ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
}
_RUNS_OWN = ("temperature", "top_p", "top_k", "seed")  # ignored, and the answer says so
_UNUSED = ("parallel_tool_calls", "store", "service_tier", "prompt_cache_key", "safety_identifier")


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


_S = TypeVar("_S", bound=_Shape)


class _Function(_Shape):
    name: str
    arguments: str


class _Call(_Shape):
    id: str
    function: _Function


class _Part(_Shape):
    type: Literal["text"]
    text: str


class _Message(_Shape):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    def plain(self) -> Message:
        content = self.content or ""
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=content if isinstance(content, str) else "".join(p.text for p in content),
            calls=tuple(
                Call(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls or ()
            ),
            call_id=self.tool_call_id or "",
        )


class _StreamOptions(_Shape):
    include_usage: bool = False


class _Body(_Shape):
    model: str
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


class Outcome(_Shape):
    """How a session ended, as whoever judged it says. No reward: the infrastructure lost it."""

    model_config = ConfigDict(extra="forbid")

    reward: float | None = Field(allow_inf_nan=False)
    ending: Literal["submitted", "format_errors", "turn_limit", "length", "timeout"] | None = None
    group: str | None = None

    @property
    def judged(self) -> tuple[float | None, Ending]:
        """Reward and ending, by which outcomes are compared; without a reward no ending counts."""
        named = None if self.reward is None else self.ending
        return self.reward, Ending(named or Ending.SUBMITTED)


class GroupBody(_Shape):
    """The body that opens a group."""

    model_config = ConfigDict(extra="forbid")

    task_id: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message as far as it is compared: the rest of what clients send is theirs."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""  # that a tool's message answers


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A chat completion as it is served. `session_id` is the one in the body, if any."""

    messages: tuple[Message, ...]
    has_tools: bool
    max_tokens: int | None
    stream: bool
    include_usage: bool
    session_id: str
    ignored: tuple[str, ...]


def read_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises Refusal."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", "The body has to be a JSON object.")
    return body


def validated(shape: type[_S], body: dict[str, Any]) -> _S:
    """The body as that shape. Raises Refusal naming the first field at fault."""
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"]))
        raise Refusal(400, "invalid_value", f"{param}: {first['msg']}.", param=param) from None


def read_ask(data: bytes) -> Ask:
    """The body of a chat completion.

    Raises:
        Refusal: not JSON, a field of the wrong shape, one that is unknown or can't be granted,
            another model, tools that the policy doesn't have.
    """
    body = read_object(data)
    for name, neutral in _NEUTRAL.items():
        if (value := body.pop(name, None)) not in neutral:
            sentence = f"{name} can't be changed: tokens are drawn as the run says."
            raise Refusal(400, "unsupported_value", f"{sentence} Found {value!r}.", param=name)
    ignored = tuple(name for name in _RUNS_OWN if body.pop(name, None) is not None)
    for name in _UNUSED:
        body.pop(name, None)
    if unknown := sorted(set(body) - set(_Body.model_fields)):
        raise Refusal(400, "unknown_parameter", f"Unknown field {unknown[0]!r}.", param=unknown[0])
    asked = validated(_Body, body)
    if asked.model != MODEL:
        sentence = f"There is no model {asked.model!r}; the one here is {MODEL!r}."
        raise Refusal(404, "model_not_found", sentence, param="model")
    _check_tools(asked.tools or [])
    limits = [most for most in (asked.max_tokens, asked.max_completion_tokens) if most is not None]
    return Ask(
        messages=tuple(message.plain() for message in asked.messages),
        has_tools=bool(asked.tools),
        max_tokens=min(limits, default=None),
        stream=bool(asked.stream),
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        session_id=(asked.metadata or {}).get("session_id") or asked.user or "",
        ignored=ignored,
    )


def _check_tools(tools: list[dict[str, Any]]) -> None:
    """Only the tool that the policy is always shown: bash, with a command."""
    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, dict) else {}
        parameters = function.get("parameters")
        known = parameters.get("properties") if isinstance(parameters, dict) else None
        if len(tools) > 1 or function.get("name") != "bash" or not _is_command(known):
            sentence = "The policy has one tool, bash, whose only parameter is the text command."
            raise Refusal(400, "unsupported_tools", sentence, param="tools")


def _is_command(properties: Any) -> bool:
    if not isinstance(properties, dict) or set(properties) != {"command"}:
        return False
    command = properties["command"]
    return isinstance(command, dict) and command.get("type") == "string"
