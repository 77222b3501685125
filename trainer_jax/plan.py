"""What a run would do, before anything is started: every section checked, the plan in numbers.

Owns asking the other components to check their sections (as processes: the trainer imports
neither), and the plan's tables. Must not start, download or write anything that stays.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from contracts.errors import BadInputError, RetryError
from contracts.routed import RoutedExperts
from contracts.rpc import MAX_MESSAGE_BYTES, RemoteInputError
from contracts.runfile import write_resolved
from contracts.supervisor import service_environment
from trainer_jax.budget import Setting, memory
from trainer_jax.config import RunConfig
from trainer_jax.hf import check_tokenizer, load_config
from trainer_jax.mesh import make_mesh
from trainer_jax.models.parameters import count_parameters
from trainer_jax.plan_devices import gigabytes
from trainer_jax.records import RoutingRules
from trainer_jax.summary import is_training, percent

CHECK_S = 180.0
OTHERS = ("weight_sync", "sampler_fleet")
EMBEDDED_MODEL_TYPES = ("qwen3_moe", "mixtral")  # what the fleet's own engine computes


def check_others(
    config: RunConfig, *, trains: bool = True, here: bool = True
) -> dict[str, dict[str, Any]]:
    """All sections, the other components' as they resolve them.

    Without `trains`, as for an evaluation alone, what only training needs is not asked for; without
    `here`, as for a plan, devices are not looked for on this machine.

    Raises:
        RemoteInputError: the owner's sentence about the first thing wrong.
        BadInputError: see `check_agreement`.
    """
    sections = dict(config.sections)
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "config.json"
        write_resolved(record, config.sections)
        for package in OTHERS:
            sections |= ask(package, "check", "--config", str(record))
    check_agreement(config.with_sections(sections), trains=trains, here=here)
    return sections


def check_agreement(config: RunConfig, *, trains: bool = True, here: bool = True) -> None:
    """What no component can check alone, before anything is started.

    Raises:
        BadInputError: a tokenizer larger than the model's vocabulary, a model that the samplers'
            engine does not compute, more held-out tasks or devices than there are, no samplers for
            something to do, a band for an unknown group, samplers that do not record what the loss
            needs.
    """
    model = load_config(config.model.checkpoint)
    check_tokenizer(config.model.checkpoint, model)
    evaluates = not trains or config.evaluation.before or config.evaluation.after
    if config.is_local:  # services at addresses have their own sections
        _check_engines(config.sections, model.model_type)
        _check_fleet(config.sections, trains=trains, evaluates=evaluates)
    if trains:
        groups = config.sections["fleet"]["groups"]
        config.loss.log_bands(tuple(group["name"] for group in groups if is_training(group)))
        num_devices = math.prod(config.mesh.model_dump().values())
        # with several processes not all devices are known yet
        if here and num_devices > 1 and config.cluster.processes == 1:
            make_mesh(config.mesh.model_dump())
        shards = config.mesh.data * config.mesh.fsdp * config.mesh.expert
        if config.train.micro_rows % shards:
            raise BadInputError(
                "run file, train.micro_rows",
                expected=f"a multiple of mesh.data * mesh.fsdp * mesh.expert, {shards}",
                found=config.train.micro_rows,
            )
        if config.train.row_tokens % config.mesh.context:
            raise BadInputError(
                "run file, train.row_tokens",
                expected=f"a multiple of mesh.context, {config.mesh.context}",
                found=config.train.row_tokens,
            )
        _check_record(config.sections)
        if config.replays_routing:
            check_routing(config.sections, RoutingRules.of(model))


def check_routing(sections: dict[str, dict[str, Any]], routing: RoutingRules) -> None:
    """Routed experts are the largest part of a group by far, and a group is one message."""
    limit = MAX_MESSAGE_BYTES // 2
    width = RoutedExperts.bytes_per_token(*routing)
    largest = width * sections["episodes"]["group_size"] * sections["fleet"]["max_context_tokens"]
    if largest > limit:
        raise BadInputError(
            "run file, sampling.return_routed_experts",
            expected=f"episodes.group_size * fleet.max_context_tokens of at most {limit // width}, "
            f"at {width} bytes per token",
            found=largest // width,
        )


def _check_engines(sections: dict[str, dict[str, Any]], model_type: str) -> None:
    """That every sampler can compute the model: the embedded engine knows two families."""
    for group in sections["fleet"]["groups"]:
        if group["engine"] == "embedded" and model_type not in EMBEDDED_MODEL_TYPES:
            raise BadInputError(
                f"run file, group {group['name']}, engine",
                expected=f"sglang for a {model_type} "
                f"(embedded is for {' and '.join(EMBEDDED_MODEL_TYPES)})",
                found=group["engine"],
            )


def _check_fleet(sections: dict[str, dict[str, Any]], *, trains: bool, evaluates: bool) -> None:
    """That nothing waits for samplers or tasks which never come."""
    groups = sections["fleet"]["groups"]
    if elsewhere := [group for group in groups if group["provider"] != "local"]:
        raise BadInputError(
            f"run file, group {elsewhere[0]['name']}, provider",
            expected="local, or run.gateway and run.weights that it can reach",
            found=elsewhere[0]["provider"],
        )
    for purpose, needed, reason in (
        ("train", trains, ""),
        ("evaluate", evaluates, " (or evaluation.before and evaluation.after = false)"),
    ):
        own = [group for group in groups if is_training(group) == (purpose == "train")]
        if needed and not any(_bounds(group, sections)[1] for group in own):
            raise BadInputError(
                "run file, fleet.groups",
                expected=f"a group with purpose {purpose} and samplers{reason}",
                found="groups without samplers" if own else "none",
            )
    asked, there = sections["evaluation"]["num_tasks"], sections["tasks"]["num_heldout"]
    if evaluates and asked > there:
        raise BadInputError(
            "run file, evaluation.num_tasks",
            expected=f"at most tasks.num_heldout, {there}",
            found=asked,
        )


def _bounds(group: dict[str, Any], sections: dict[str, dict[str, Any]]) -> tuple[int, int]:
    """The fewest and the most samplers of a resolved group; only training groups are scaled."""
    num = group["samplers"]
    if "autoscaler" not in sections or not is_training(group):
        return num, num
    low, high = group["min_samplers"], group["max_samplers"]
    return num if low is None else low, num if high is None else high


def _size(group: dict[str, Any], sections: dict[str, dict[str, Any]]) -> str:
    """A resolved group's samplers, and between which numbers they may change."""
    low, high = _bounds(group, sections)
    return str(low) if low == high else f"{group['samplers']} ({low} to {high})"


def _check_record(sections: dict[str, dict[str, Any]]) -> None:
    """That the samplers record what the loss needs."""
    sampling, widest = sections["sampling"], sections["train"]["candidate_buckets"][-1]
    truncates = sampling["top_p"] < 1 or sampling["top_k"] > 0
    if sections["loss"]["replay"] and not truncates:
        raise BadInputError(
            f"run file, loss.arm = {sections['loss']['arm']!r}",
            expected="sampling.top_p < 1 or sampling.top_k > 0, whose sets are replayed",
            found="sampling from the full vocabulary",
        )
    key = "top_k" if truncates else "num_candidates"
    if sampling[key] > widest:
        raise BadInputError(
            f"run file, sampling.{key}",
            expected=f"at most the widest of train.candidate_buckets, {widest}",
            found=sampling[key],
        )


def ask(*arguments: str, timeout_s: float = CHECK_S) -> Any:
    """The JSON that a command of another component (`python -m ARGUMENTS`) prints.

    Raises:
        RemoteInputError: the sentence that it refuses with.
        RetryError: it does not answer.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=service_environment(),
        )
    except subprocess.TimeoutExpired:
        raise RetryError(
            f"python -m {' '.join(arguments[:2])} did not answer within {timeout_s:.0f} s"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"{' '.join(arguments[:2])} says nothing"]
        raise RemoteInputError(said[-1].removeprefix("error: "))
    return json.loads(done.stdout)


def print_plan(console: Console, config: RunConfig) -> None:
    """The resolved configuration as JSON, then the plan."""
    sections = config.sections
    console.print_json(json.dumps(sections))
    train, model = config.train, load_config(config.model.checkpoint)
    num_parameters = count_parameters(model)
    group_size = sections.get("episodes", {}).get("group_size", 8)

    fleet = Table("group", "accelerator", "weights", "KV", "purpose", "samplers", "share")
    groups = sections["fleet"]["groups"]
    for group in groups:
        alike = [g for g in groups if is_training(g) == is_training(group)]
        capacities = [g.get("capacity", 1.0) for g in alike]
        share = None  # measured in mid-run
        if "measured" not in capacities:
            share = group.get("capacity", 1.0) / sum(capacities)
        fleet.add_row(
            *(group["name"], group.get("accelerator", ""), group["weight_format"]),
            *(group.get("kv_format", "fp8"), "train" if is_training(group) else "evaluate"),
            *(_size(group, sections), percent(share, 1)),
        )
    console.print(fleet)

    setting = Setting.of(config)
    facts = {
        "run directory": str(config.run.path),
        "services": "local processes" if config.is_local else config.run.gateway,
        "model": f"{num_parameters:,} parameters from {config.model.checkpoint}",
        "mesh": f"{setting.num_devices} device(s)",
        "objective": config.loss.arm,
        "updates": f"{train.updates} of {train.prompts_per_update} prompts x {group_size}"
        f" = {train.updates * train.prompts_per_update * group_size:,} trajectories",
        "staleness limit": "none" if train.staleness_limit is None else str(train.staleness_limit),
        "checkpoints": f"every {train.checkpoint_every} updates, {train.keep_checkpoints} kept",
        "memory": f"about {gigabytes(memory(model, setting).total)} per device, by shapes alone",
        "evaluation": f"{config.evaluation.num_tasks or 'all'} held-out tasks"
        f" x {config.evaluation.num_samples}",
    }
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
