"""Run files: TOML whose sections belong to one component each.

Owns reading, `--set section.key=value` overrides, the list of sections and who validates them, and
the wording of a validation error. Must not know what is inside a section: each component keeps a
frozen pydantic model of its own sections and validates only those.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from contracts.errors import BadInputError

# section -> the package that validates it
SECTIONS = {
    "run": "trainer_jax",
    "model": "trainer_jax",
    "mesh": "trainer_jax",
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
}


class Section(BaseModel):
    """Base of every section model: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SectionT = TypeVar("SectionT", bound=BaseModel)


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """A run file's sections with `section.key=value` overrides applied.

    Values of overrides are TOML values; what does not parse as TOML is taken as a string.

    Raises:
        BadInputError: not TOML, an unknown section, a malformed override.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
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
        where = ".".join([name, *(str(part) for part in first["loc"])])
        if first["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            raise BadInputError(
                f"run file, {where}", expected=f"a known key ({known})", found="an unknown key"
            ) from None
        if first["type"] == "missing":
            raise BadInputError(f"run file, {where}", expected="a value", found="nothing") from None
        raise BadInputError(
            f"run file, {where}", expected=first["msg"], found=repr(first["input"])
        ) from None


def write_resolved(path: Path, sections: dict[str, Any]) -> None:
    """The resolved sections as JSON, the form components of one run hand each other."""
    path.write_text(json.dumps(sections, indent=2, sort_keys=True) + "\n")


def read_resolved(path: str | Path) -> dict[str, dict[str, Any]]:
    """Sections from a TOML run file, or from what `write_resolved` wrote (by suffix .json)."""
    path = Path(path)
    if path.suffix != ".json":
        return read_run_file(path)
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise BadInputError(f"run record {path}", expected="JSON", found=str(error)) from None
