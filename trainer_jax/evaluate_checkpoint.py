"""Evaluation of a policy by itself: `python -m trainer_jax evaluate`.

Owns what an evaluation is begun or gone on with, its directory, the services it needs and their
end. The estimate belongs to `trainer_jax.evaluate`, the record to `trainer_jax.evaluate_records`.

    settings.json, config.json, episodes.jsonl   see `contracts.evaluations`
    ids.jsonl                                    the tasks, as a subset file
    evaluation.json, report.md                   once all is played
    services/                                    of the services, while they run
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from contracts.errors import BadInputError
from contracts.evaluations import CONFIG, lock_evaluation
from contracts.files import replacing
from contracts.runfile import write_resolved
from trainer_jax.config import RunConfig, parse_run
from trainer_jax.evaluate import evaluate_missing, polling, sampling_of, summarize
from trainer_jax.evaluate_records import EvaluationRecords, Settings, check_settings
from trainer_jax.evaluate_report import Result, print_result, write_result
from trainer_jax.evaluate_source import (
    Policy,
    Request,
    find_policy,
    find_tasks,
    read_sections,
    tasks_section,
)
from trainer_jax.models.config import ModelConfig
from trainer_jax.plan import check_others
from trainer_jax.publish import Publisher
from trainer_jax.rollouts import RolloutClient
from trainer_jax.run_directory import RECORD, RunDirectory
from trainer_jax.services import Services
from trainer_jax.summary import is_training

IDS = "ids.jsonl"
SERVICES = "services"
# What of [episodes] decides how an episode goes, and of a group how precise its samplers are.
_EPISODES = ("agent", "limits", "grading", "sandbox")
_ELSEWHERE = ("runtime", "modal")  # of the sandbox: where it is, not what it allows
_Poll = Callable[[], None]
_PRECISION = ("engine", "weight_format", "kv_format", "activation_format")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """An evaluation that nothing speaks against so far."""

    out: Path
    config: RunConfig
    policy: Policy
    settings: Settings  # without the weights' checksum
    evaluators: list[dict[str, Any]]


class _Loaded(NamedTuple):
    model: ModelConfig
    params: Any


def evaluate_run(request: Request, console: Console, *, poll: _Poll) -> Result:
    """Plays what is missing of the evaluation and reports it. `poll` is called meanwhile; what it
    raises ends the evaluation, and what ended before is recorded.

    Services that it starts live in its directory. With addresses given, the policy is published
    there under the next version.

    Raises:
        BadInputError: no such run, policy or tasks, no evaluation group, other settings than the
            evaluation was begun with.
        RetryError: no episode has a score.
    """
    plan = _plan(request)
    policy = _Loaded(*plan.policy.load())
    same = {"weights": plan.policy.checksum(*policy), **plan.settings.same}
    settings = Settings(**{**vars(plan.settings), "same": same})
    check_settings(plan.out, settings)
    plan.out.mkdir(parents=True, exist_ok=True)
    with lock_evaluation(plan.out):
        records = EvaluationRecords(plan.out, settings)
        try:
            with replacing(plan.out / IDS) as aside:
                aside.write_text("".join(f"{json.dumps(name)}\n" for name in settings.digests))
            write_resolved(plan.out / CONFIG, plan.config.sections)
            console.print(
                f"{records.num_scored} of {records.num_wanted} episodes are in {plan.out}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            if records.missing():
                _play(plan, policy, records, console, poll)
            result = Result(
                evaluation=summarize(
                    records.by_task(),
                    version=max((e.version for e in records.episodes), default=0),
                    num_samples=settings.samples,
                    num_failures=records.num_lost,
                    seconds=sum(episode.seconds for episode in records.episodes),
                ),
                settings=settings,
                episodes=records.episodes,
            )
        finally:
            records.close()
        write_result(plan.out, result)
    print_result(console, plan.out, result)
    return result


def directory_of(request: Request) -> Path:
    """Where the evaluation is kept if nobody says it: with the run, by policy and tasks.

    Raises:
        BadInputError: no such run or policy, or an `out` that can't be one.
    """
    if request.out:
        if request.out.is_file() or not request.out.absolute().parent.is_dir():
            raise BadInputError(
                "--out", expected="a directory, or a new one in one that exists", found=request.out
            )
        return request.out
    place = request.run
    if not place.is_dir():
        place = parse_run(read_sections(request)).run.path
    tasks = [request.tasks.resolve().stem] if request.tasks else ["heldout"]
    if request.ids:
        tasks.append(request.ids.stem)
    return place / "evaluations" / "-".join([find_policy(request).name, *tasks])


def _plan(request: Request) -> _Plan:
    out, policy = directory_of(request), find_policy(request)
    sections = read_sections(request)
    model_section = {**sections.get("model", {}), "checkpoint": str(policy.base)}
    sections = parse_run({**sections, "model": model_section}).sections
    digests = find_tasks(request, sections, sections["evaluation"]["num_tasks"])
    if request.tasks:
        sections["tasks"] = tasks_section(sections.get("tasks", {}), request.tasks, out / IDS)
        sections["evaluation"] = {**sections["evaluation"], "num_tasks": 0}
    config = parse_run(sections)
    if request.tasks and not config.is_local:
        raise BadInputError(
            "--tasks", expected="a run without addresses: a gateway there has its own tasks",
            found=config.run.gateway,
        )  # fmt: skip
    config = config.with_sections(check_others(config, trains=False))
    evaluators = [g for g in config.sections["fleet"]["groups"] if not is_training(g)]
    if not evaluators:
        raise BadInputError("run file, fleet.groups", expected="an evaluation group", found="none")
    return _Plan(
        out=out,
        config=config,
        policy=policy,
        settings=Settings(
            checkpoint=str(policy.place),
            source=str(request.tasks or config.sections["tasks"].get("source", "")),
            ids=str(request.ids or ""),
            digests=digests,
            samples=config.evaluation.num_samples,
            same=_same(config, evaluators),
        ),
        evaluators=evaluators,
    )


def _same(config: RunConfig, evaluators: list[dict[str, Any]]) -> dict[str, Any]:
    """What may not change while an evaluation goes on, but weights and tasks."""
    sampling = sampling_of(config.evaluation, config.evaluation.seed)
    episodes = {name: dict(config.sections["episodes"][name]) for name in _EPISODES}
    for name in _ELSEWHERE:
        episodes["sandbox"].pop(name, None)
    precisions = [[group[key] for key in _PRECISION] for group in evaluators]
    return {
        "sampling": {
            key: getattr(sampling, key)
            for key in ("temperature", "top_p", "top_k", "max_new_tokens", "seed")
        },
        "episodes": episodes,
        "samplers": sorted({"/".join(precision) for precision in precisions}),
    }


def _play(
    plan: _Plan, policy: _Loaded, records: EvaluationRecords, console: Console, poll: _Poll
) -> None:
    """Plays the samples that are missing, on services of its own or at the run's addresses.

    What the services leave is taken away, unless an error may be explained by it.
    """
    place = plan.out / SERVICES
    was_killed = (place / RECORD).exists()
    directory = RunDirectory(place, "resume" if was_killed else "new", plan.config.sections)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    try:
        with bar:
            task = bar.add_task("playing", total=records.num_wanted, completed=records.num_scored)
            _with_services(
                plan,
                policy,
                directory,
                poll=poll,
                say=lambda text: console.print(text, markup=False, highlight=False),
                work=lambda client, version, progress: evaluate_missing(
                    client, plan.config.evaluation, records, version=version, progress=progress
                ),
                on_scored=lambda num: bar.update(task, completed=num),
            )
    except KeyboardInterrupt:
        shutil.rmtree(place)
        raise
    finally:
        directory.close()
    shutil.rmtree(place)


def _with_services(
    plan: _Plan,
    policy: _Loaded,
    directory: RunDirectory,
    *,
    poll: _Poll,
    say: Callable[[str], None],
    work: Callable[[RolloutClient, int, Callable[[int], None]], None],
    on_scored: Callable[[int], None],
) -> None:
    """`work` beside services that serve the policy to the evaluation groups."""
    services = Services(plan.config, directory, say=say)
    publisher = Publisher(
        services.addresses.weights,
        services.credentials,
        config=policy.model,
        source=plan.policy.base,
        scratch=directory.path / "export",
    )

    def check() -> None:
        poll()
        services.check()

    def watch(num_scored: int) -> None:
        check()
        on_scored(num_scored)

    try:
        version = services.start_weights(check) + 1
        publisher.submit(version, policy.params)
        publisher.wait(check)
        services.start_fleet(plan.policy.base, check, groups=plan.evaluators)
        client = services.client
        polling(client, lambda progress: work(client, version, progress), watch)
    finally:
        publisher.close()
        services.close()
