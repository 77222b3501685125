"""Rows of MiMo-V2.6-RL-oss: verl's columns, with the instance as JSON in `extra_info`.

Owns its names of images: a row has an alias, and `image-mapping.jsonl` beside the file of the rows
says what a registry calls it. The set has no reference solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sampler_fleet.episodes.base import Checkout, Judge, Task
from sampler_fleet.episodes.tasks.sources.files import has_rows, is_parquet, read_rows
from sampler_fleet.episodes.tasks.sources.row import Row

FIELDS = ("extra_info.instance_json",)
_ALIAS, _NAME = "dataset_image", "dockerhub_image"


def read_mimo(row: Row, image_names: Callable[[Path], Mapping[str, str]]) -> Task:
    """The code tasks. `image_names` is `read_image_names`, remembered."""
    info = row.below("extra_info", instance="")
    named = info.table("instance_json")
    name = str(named.get("instance_id") or named.get("task_id") or "")
    instance = info.below("instance_json", instance=name)
    task_id = instance.text("instance_id", "") or instance.text("task_id")
    image = instance.text("docker_image")
    return Task(
        task_id=task_id,
        split="",
        template=task_id,
        issue=instance.text("problem_statement", "") or _prompt(row),
        fail_to_pass=(),
        pass_to_pass=(),
        checkout=Checkout(
            image=image_names(row.folder).get(image, image),
            workdir=instance.text("cwd"),
            test_patch=instance.text("test_patch"),
            test_command=instance.text("test_command"),
            judge=Judge.EXIT_STATUS,
        ),
        test_seconds=instance.seconds("verifier_timeout_sec"),
        dataset="MiMo-V2.6-RL-oss",
        language="",
    )


def is_mapping(file: Path) -> bool:
    """Whether a file of rows has names of images, and no tasks."""
    return not is_parquet(file) and {_ALIAS, _NAME} == {*next(read_rows(file))[1]}


def read_image_names(folder: Path) -> dict[str, str]:
    """What registries call the images that rows in `folder` name, from all mappings there."""
    files = (file for file in sorted(folder.iterdir()) if file.is_file())
    mappings = [file for file in files if has_rows(file) and is_mapping(file)]
    rows = (
        Row(fields=fields, where=f"{file}, line {line}", folder=folder)
        for file in mappings
        for line, fields in read_rows(file)
    )
    return {row.text(_ALIAS): row.text(_NAME) for row in rows}


def _prompt(row: Row) -> str:
    messages = row.fields.get("prompt")
    try:
        content = next(m["content"] for m in messages if m["role"] == "user")  # type: ignore[union-attr]
    except (TypeError, KeyError, StopIteration):
        raise row.wrong("prompt", expected="a user's message", found=repr(messages)) from None
    if not isinstance(content, str):
        expected = "a user's message whose content is a text"
        raise row.wrong("prompt", expected=expected, found=repr(content))
    return content
