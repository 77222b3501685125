"""Run files: TOML whose sections belong to one component each.

Owns reading, `--set section.key=value` overrides, the list of sections and who validates them, and
the wording of a validation error. Must not know what is inside a section: each component keeps a
frozen pydantic model of its own sections and validates only those.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from datetime import date, time
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from contracts.errors import BadInputError
from contracts.files import replacing

_PREAMBLE = r"^(?:Value error, |Input is not |\w+ should (?:be|have|match) )"  # pydantic's
_LONGEST = 100  # characters of a value in a sentence

# section -> the package that validates it
SECTIONS = {
    "run": "trainer_jax",
    "model": "trainer_jax",
    "mesh": "trainer_jax",
    "cluster": "trainer_jax",
    "optimizer": "trainer_jax",
    "loss": "trainer_jax",
    "train": "trainer_jax",
    "sft": "trainer_jax",
    "evaluation": "trainer_jax",
    "weights": "weight_sync",
    "fleet": "sampler_fleet",
    "sampling": "sampler_fleet",
    "episodes": "sampler_fleet",
    "tasks": "sampler_fleet",
    "autoscaler": "sampler_fleet",
}


class Section(BaseModel):
    """Base of every section model: frozen, unknown keys refused, numbers only from numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_of_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take true for 1 and "3" for 3."""
        kinds = _leaves(cls.model_fields[info.field_name or ""].annotation)
        items = value if isinstance(value, list | tuple) else (value,)
        if kinds <= {int, float} and any(isinstance(item, bool | str) for item in items):
            raise ValueError("a number" if float in kinds else "an integer")
        return value


def _leaves(annotation: Any) -> set[Any]:
    """The types an annotation is made of, without None: {int} of `tuple[int, ...] | None`."""
    if not (parts := get_args(annotation)):
        return {annotation} - {NoneType, ...}
    return {leaf for part in parts for leaf in _leaves(part)}


SectionT = TypeVar("SectionT", bound=BaseModel)


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """A run file's sections with `section.key=value` overrides applied.

    Values of overrides are TOML values; what does not parse as TOML is taken as a string.

    Raises:
        BadInputError: not UTF-8 text in TOML, an unknown section, a malformed override.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(f"run file {path}", expected="valid TOML", found=str(error)) from None
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or len(parts) < 2:
            raise BadInputError("--set", expected="section.key=value", found=override)
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        table: Any = data
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise BadInputError("--set", expected=f"{part} to be a table", found=override)
        table[parts[-1]] = value
    for name, section in data.items():
        if name not in SECTIONS:
            raise BadInputError(
                f"run file {path}, section [{name}]",
                expected=f"one of {', '.join(SECTIONS)}",
                found=name,
            )
        if not isinstance(section, dict):
            raise BadInputError(
                f"run file {path}", expected=f"a table [{name}]", found=f"{name} = {section!r}"
            )
    return data


def validate_section(model: type[SectionT], name: str, data: dict[str, Any]) -> SectionT:
    """The section as its owner's model; one sentence for the first thing wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, BadInputError):
            raise cause from None
        where = ".".join([name, *(str(part) for part in first["loc"])])
        if first["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            raise BadInputError(
                f"run file, {where}", expected=f"a known key ({known})", found="an unknown key"
            ) from None
        if first["type"] == "missing":
            raise BadInputError(f"run file, {where}", expected="a value", found="nothing") from None
        expected, found = _expected_and_found(first)
        raise BadInputError(f"run file, {where}", expected=expected, found=found) from None


def _expected_and_found(error: ErrorDetails) -> tuple[str, str]:
    """Pydantic's message as our sentence. Of a table, only the keys the message mentions."""
    rule = re.sub(_PREAMBLE, "", error["msg"]).removesuffix(" for <class 'pathlib.Path'>")
    value = error["input"]
    if error["type"] != "value_error" or not isinstance(value, dict):
        text = repr(value)
        return rule, text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    expected, comma, found = rule.rpartition(", not ")
    if comma:
        return expected, found
    named = [key for key in value if re.search(rf"\b{re.escape(str(key))}\b", rule)]
    return rule, ", ".join(f"{key} = {value[key]!r}" for key in named) or "something else"


def write_resolved(path: Path, sections: dict[str, Any]) -> None:
    """The resolved sections as JSON, the form components of one run hand each other.

    Replaces the file whole: who reads it meanwhile finds the old record or the new one. TOML's own
    dates and times become text.
    """
    with replacing(path) as aside:
        aside.write_text(json.dumps(sections, indent=2, sort_keys=True, default=_text) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} in a run file")


def read_resolved(path: str | Path) -> dict[str, dict[str, Any]]:
    """Sections from a TOML run file, or from what `write_resolved` wrote (by suffix .json).

    Raises:
        BadInputError: not such a file.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    if path.suffix != ".json":
        return read_run_file(path)
    try:
        data = json.loads(path.read_bytes().decode())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(f"run record {path}", expected="JSON", found=str(error)) from None
    if not isinstance(data, dict) or not all(isinstance(part, dict) for part in data.values()):
        raise BadInputError(
            f"run record {path}", expected="a run's record, a table of tables", found="other JSON"
        )
    return data
