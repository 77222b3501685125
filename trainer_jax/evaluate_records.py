"""What an evaluation has played: its settings, and a line per episode as it ends.

Owns settings.json and episodes.jsonl of an evaluation's directory, which samples are missing, and
the refusal of a directory that was begun otherwise. Must not play nor estimate anything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError
from contracts.evaluations import EPISODES, SETTINGS, Record, RecordFile, patch_to_json
from contracts.files import replacing
from contracts.types import Ending, EvaluationSample, Trajectory
from trainer_jax.run_directory import flat

_ONLY_ON_DISK = ("weights", "patch")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is evaluated, and how. All must be as it was when an evaluation goes on, except that
    `samples` may grow, and the names of things that are the same."""

    checkpoint: str  # where it was
    source: str  # of the tasks
    ids: str  # subset file; "": all
    digests: Mapping[str, str]  # of the tasks by id, in order
    samples: int  # per task
    same: Mapping[str, Any]  # by dotted name: weights, sampling, what an episode may do


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode of an evaluation, without its tokens and patch."""

    task_id: str
    sample: int
    session_id: str
    version: int  # newest that a token was drawn from, in the numbers of its services
    reward: float | None  # None: lost to the infrastructure
    ending: Ending
    verdict: str  # the grader's reason
    failure: str
    num_turns: int
    num_format_errors: int
    num_tokens: int
    num_sampled_tokens: int
    seconds: float
    group: str
    sampler_ids: tuple[str, ...]

    @staticmethod
    def of(trajectory: Trajectory) -> Episode:
        return Episode(
            task_id=trajectory.task_id,
            sample=trajectory.sample,
            session_id=trajectory.session_id,
            version=max((span.version for span in trajectory.spans), default=0),
            reward=trajectory.reward,
            ending=trajectory.ending,
            verdict=trajectory.verdict,
            failure=trajectory.failure,
            num_turns=trajectory.num_turns,
            num_format_errors=trajectory.num_format_errors,
            num_tokens=len(trajectory.tokens),
            num_sampled_tokens=int(trajectory.loss_mask.sum()),
            seconds=round(trajectory.seconds, 3),
            group=trajectory.group,
            sampler_ids=trajectory.sampler_ids,
        )


class EvaluationRecords:
    """The open record of an evaluation; its directory is locked by the caller."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        """Goes on with what is there.

        Raises:
            BadInputError: it was begun with other settings, or is damaged.
        """
        self.settings = settings
        check_settings(directory, settings)
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(directory / SETTINGS) as aside:
            aside.write_text(json.dumps(asdict(settings), indent=2) + "\n")
        self._file = RecordFile(directory / EPISODES)
        self.episodes: list[Episode] = []  # in the order they ended, lost ones too
        self._scored: set[tuple[str, int]] = set()
        self._num_lost: Counter[tuple[str, int]] = Counter()
        for number, record in enumerate(self._file.records, 1):
            self._count(_episode(record, f"{directory / EPISODES}, line {number}"))

    def missing(self) -> list[EvaluationSample]:
        """Samples without a score: sample by sample, so that all tasks get their first ones."""
        wanted = (
            (task_id, sample)
            for sample in range(self.settings.samples)
            for task_id in self.settings.digests
        )
        return [
            EvaluationSample(
                task_id=task_id, sample=sample, attempt=self._num_lost[task_id, sample]
            )
            for task_id, sample in wanted
            if (task_id, sample) not in self._scored
        ]

    def add(self, trajectory: Trajectory) -> None:
        """Returns when it is on the disk."""
        episode = Episode.of(trajectory)
        key = (episode.task_id, episode.sample)
        assert episode.task_id in self.settings.digests and key not in self._scored, key
        patch = None if trajectory.patch is None else patch_to_json(trajectory.patch)
        weights = self.settings.same["weights"]
        self._file.add({**asdict(episode), "weights": weights, "patch": patch})
        self._count(episode)

    @property
    def num_scored(self) -> int:
        return len(self._scored)

    @property
    def num_wanted(self) -> int:
        return len(self.settings.digests) * self.settings.samples

    @property
    def num_lost(self) -> int:
        """Episodes that the infrastructure lost."""
        return self._num_lost.total()

    def by_task(self) -> dict[str, list[Episode]]:
        """Scored episodes of every task, in the order of the settings."""
        by_task: dict[str, list[Episode]] = {task_id: [] for task_id in self.settings.digests}
        for episode in self.episodes:
            if episode.reward is not None:
                by_task[episode.task_id].append(episode)
        return by_task

    def _count(self, episode: Episode) -> None:
        self.episodes.append(episode)
        key = (episode.task_id, episode.sample)
        if episode.reward is None:
            self._num_lost[key] += 1
        else:
            self._scored.add(key)

    def close(self) -> None:
        self._file.close()


def check_settings(directory: Path, settings: Settings) -> None:
    """Whether an evaluation in `directory`, if there is one, is this one.

    Raises:
        BadInputError: the first difference, or settings that can't be read.
    """
    if not (directory / SETTINGS).exists():
        return
    recorded = read_settings(directory)
    was, now = dict(flat("", dict(recorded.same))), dict(flat("", json_form(settings.same)))
    for key in sorted(was.keys() | now.keys()):
        before, found = was.get(key, "nothing"), now.get(key, "nothing")
        if before != found:
            _refuse(directory, key, before, found)
    if gone := _first(recorded.digests.keys() - settings.digests.keys()):
        _refuse(directory, "tasks", gone, f"{len(settings.digests)} tasks without it")
    for task_id, digest in settings.digests.items():
        if task_id not in recorded.digests:
            _refuse(directory, "tasks", f"only {len(recorded.digests)} tasks", task_id)
        if recorded.digests[task_id] != digest:
            _refuse(directory, f"task {task_id}", "the task", "one that has changed since")
    if settings.samples < recorded.samples:
        raise BadInputError(
            f"evaluation in {directory}, samples",
            expected=f"at least {recorded.samples}, as recorded",
            found=settings.samples,
        )


def read_settings(directory: Path) -> Settings:
    """The settings of an evaluation. Raises BadInputError: there are none."""
    path = directory / SETTINGS
    try:
        return Settings(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise BadInputError(
            str(directory), expected=f"an evaluation, with {SETTINGS}", found="none"
        ) from None
    except (ValueError, TypeError) as error:
        raise BadInputError(
            str(path), expected="settings of an evaluation", found=str(error)
        ) from None


def read_episodes(directory: Path, records: Sequence[Record]) -> list[Episode]:
    """Raises BadInputError: a line that is no episode."""
    return [
        _episode(record, f"{directory / EPISODES}, line {number}")
        for number, record in enumerate(records, 1)
    ]


def json_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from a file."""
    return json.loads(json.dumps(dict(values)))


def _episode(record: Record, where: str) -> Episode:
    try:
        fields = {name: value for name, value in record.items() if name not in _ONLY_ON_DISK}
        ending, samplers = Ending(fields["ending"]), tuple(fields["sampler_ids"])
        return Episode(**(fields | {"ending": ending, "sampler_ids": samplers}))
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(where, expected="an episode", found=repr(error)) from None


def _first(names: set[str]) -> str:
    return min(names, default="")


def _refuse(directory: Path, key: str, was: object, found: object) -> None:
    raise BadInputError(
        f"evaluation in {directory}, {key}",
        expected=f"{was} as recorded (--out names another directory)",
        found=found,
    )
