"""Held-out pass rates: which trajectories count, the estimate, its uncertainty.

Owns the evaluation of one policy version through the gateway's evaluation group (BF16 weights and
KV cache, full vocabulary) and the estimator of pass@k. Must not start services or train.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from contracts.errors import BadInputError, RetryError
from contracts.files import replacing
from contracts.types import Ending, EvaluationSample, SamplingParams, Trajectory
from trainer_jax.config import EvaluationSection
from trainer_jax.rollouts import RolloutClient

log = logging.getLogger(__name__)

NUM_RESAMPLES = 2000
RETRY_S = 1.0
POLL_S = 0.1
KS = (1, 2, 4)


T = TypeVar("T")


class Scored(Protocol):
    """What the estimate needs of an episode; a trajectory is one."""

    @property
    def reward(self) -> float | None: ...
    @property
    def ending(self) -> Ending: ...
    @property
    def num_turns(self) -> int: ...
    @property
    def num_format_errors(self) -> int: ...


class Ledger(Protocol):
    """Where an evaluation's samples are kept: `trainer_jax.evaluate_records`."""

    def missing(self) -> Sequence[EvaluationSample]: ...
    def add(self, trajectory: Trajectory) -> None: ...
    @property
    def num_scored(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A rate in [0, 1] with its standard error over tasks and a 95 % bootstrap interval."""

    value: float
    standard_error: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One policy version on the held-out tasks."""

    version: int
    num_tasks: int
    num_samples: int  # per task
    pass_at: dict[int, Estimate]  # by k; k up to num_samples
    endings: dict[str, float]  # shares
    format_error_share: float  # of turns
    episode_turns: float
    infrastructure_failures: int  # episodes lost and run again
    missing_samples: int  # still lost after the last rerun
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """JSON values; `pass_at_1` is a number, `pass_at_1_interval` its 95 % interval."""
        data = asdict(self)
        for k, estimate in data.pop("pass_at").items():
            data[f"pass_at_{k}"] = estimate["value"]
            data[f"pass_at_{k}_interval"] = [estimate["low"], estimate["high"]]
            data[f"pass_at_{k}_standard_error"] = estimate["standard_error"]
            data[f"pass_at_{k}_num_tasks"] = estimate["num_tasks"]  # that have k samples
        return data


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased chance that at least one of k samples passes (Chen et al. 2021, equation 1)."""
    if not 1 <= k <= num_samples:
        raise BadInputError("pass@k", expected=f"1 <= k <= {num_samples} samples", found=k)
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def estimate(per_task: Sequence[float], *, seed: int = 0) -> Estimate:
    """Mean over tasks, its standard error, and a percentile bootstrap over tasks."""
    values = np.asarray(per_task, np.float64)
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (NUM_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(
        value=float(values.mean()),
        standard_error=float(error),
        low=float(low),
        high=float(high),
        num_tasks=len(values),
    )


def summarize(
    by_task: Mapping[str, Sequence[Scored]],
    *,
    version: int,
    num_samples: int,
    num_failures: int,
    seconds: float,
) -> Evaluation:
    """Pass rates of scored episodes by task id; a task may have none.

    Raises:
        RetryError: no task has a scored trajectory.
    """
    scored = [t for trajectories in by_task.values() for t in trajectories]
    if not scored:
        raise RetryError(
            f"evaluation of version {version}: expected scored episodes, found none "
            f"({num_failures} lost to the infrastructure)"
        )
    passed = {task: sum((t.reward or 0) > 0 for t in ts) for task, ts in by_task.items() if ts}
    pass_at = {}
    for k in KS:
        rates = [
            pass_at_k(len(by_task[task]), num, k)
            for task, num in sorted(passed.items())
            if len(by_task[task]) >= k
        ]
        if rates:
            pass_at[k] = estimate(rates)
    endings = Counter(t.ending for t in scored)
    return Evaluation(
        version=version,
        num_tasks=len(by_task),
        num_samples=num_samples,
        pass_at=pass_at,
        endings={str(e): endings[e] / len(scored) for e in Ending if e != Ending.FAILURE},
        format_error_share=sum(t.num_format_errors for t in scored)
        / max(1, sum(t.num_turns for t in scored)),
        episode_turns=float(np.mean([t.num_turns for t in scored])),
        infrastructure_failures=num_failures,
        missing_samples=num_samples * len(by_task) - len(scored),
        seconds=seconds,
    )


def evaluate(
    client: RolloutClient,
    section: EvaluationSection,
    *,
    version: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Runs the held-out tasks on weights of at least `version`.

    Episodes lost to the infrastructure, or with a broken stream, are run again up to
    `max_reruns` times; what was scored is kept. `progress` gets the number of scored episodes.
    """
    start = time.monotonic()
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    num_failures = 0
    for attempt in range(section.max_reruns + 1):
        complete = True
        for trajectory in _episodes(client, section, version=version, attempt=attempt):
            if trajectory is None:
                complete = False
                continue
            own = by_task[trajectory.task_id]
            if trajectory.reward is None:
                num_failures += 1
            elif len(own) < section.num_samples:
                own.append(trajectory)
                progress(sum(map(len, by_task.values())))
        if complete and all(len(own) >= section.num_samples for own in by_task.values()):
            break
        log.warning("evaluation of version %d: some episodes were lost, running again", version)
    return summarize(
        by_task,
        version=version,
        num_samples=section.num_samples,
        num_failures=num_failures,
        seconds=time.monotonic() - start,
    )


def evaluate_missing(
    client: RolloutClient,
    section: EvaluationSection,
    ledger: Ledger,
    *,
    version: int,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Plays what the ledger has not, on weights of at least `version`, and keeps it there.

    A sample lost to the infrastructure is played again up to `max_reruns` times. So often in a row
    may the stream break without bringing anything.
    """
    num_lost: Counter[tuple[str, int]] = Counter()
    num_broken = 0
    while num_broken <= section.max_reruns:
        wanted = [
            sample
            for sample in ledger.missing()
            if num_lost[sample.task_id, sample.sample] <= section.max_reruns
        ]
        if not wanted:
            return
        stream = client.evaluate_samples(
            wanted, min_version=version, sampling=sampling_of(section, section.seed)
        )
        for trajectory in _until_broken(stream):
            if trajectory is None:
                num_broken += 1
                continue
            num_broken = 0
            ledger.add(trajectory)
            if trajectory.reward is None:
                num_lost[trajectory.task_id, trajectory.sample] += 1
            progress(ledger.num_scored)


def evaluate_while(
    client: RolloutClient,
    section: EvaluationSection,
    *,
    version: int,
    poll: Callable[[int], None],
) -> Evaluation:
    """`evaluate` in a thread, as `polling` does it."""
    return polling(
        client,
        lambda progress: evaluate(client, section, version=version, progress=progress),
        poll,
    )


def polling(
    client: RolloutClient, work: Callable[[Callable[[int], None]], T], poll: Callable[[int], None]
) -> T:
    """`work` in a thread. What it tells its argument, the number of scored episodes, is what `poll`
    gets again and again.

    When `poll` raises, the client is closed and the exception goes on.
    """
    num_scored = 0

    def progress(num: int) -> None:
        nonlocal num_scored
        num_scored = num

    with ThreadPoolExecutor(1, thread_name_prefix="evaluate") as pool:
        running = pool.submit(work, progress)
        try:
            while not running.done():
                poll(num_scored)
                time.sleep(POLL_S)
        except BaseException:
            client.close()  # ends the stream that the thread waits on
            raise
    return running.result()


def _episodes(
    client: RolloutClient, section: EvaluationSection, *, version: int, attempt: int
) -> Iterator[Trajectory | None]:
    """One pass over the tasks; a final None says that the stream broke."""
    return _until_broken(
        client.evaluate(
            num_tasks=section.num_tasks,
            num_samples=section.num_samples,
            min_version=version,
            sampling=sampling_of(section, section.seed + attempt),
        )
    )


def sampling_of(section: EvaluationSection, seed: int) -> SamplingParams:
    """Over the full vocabulary."""
    return SamplingParams(
        temperature=section.temperature,
        max_new_tokens=section.max_new_tokens,
        num_candidates=1,  # nothing is trained on these
        seed=seed,
    )


def _until_broken(stream: Iterator[Trajectory]) -> Iterator[Trajectory | None]:
    try:
        yield from stream
    except RetryError as error:
        log.warning("evaluation stream lost: %s", error)
        time.sleep(RETRY_S)
        yield None


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Atomically, so that a resumed run finds it whole or not at all."""
    with replacing(path) as aside:
        aside.write_text(json.dumps(evaluation.to_json(), indent=2, sort_keys=True) + "\n")
