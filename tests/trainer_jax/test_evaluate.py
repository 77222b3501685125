"""Evaluations: the estimate, what is asked for again, the record and its refusals, the reports."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from contracts.errors import BadInputError, RetryError
from contracts.evaluations import EPISODES, read_records
from contracts.types import Ending, EvaluationSample, Patch, Trajectory
from tests.trainer_jax.random_trajectories import random_trajectory
from tests.trainer_jax.test_config import MODEL
from trainer_jax.config import EvaluationSection
from trainer_jax.evaluate import evaluate_missing, pass_at_k, summarize
from trainer_jax.evaluate_records import Episode, EvaluationRecords, Settings
from trainer_jax.evaluate_regrade import by_verdicts, changes, latest
from trainer_jax.evaluate_report import EVALUATION, REPORT, Result, print_result, write_result
from trainer_jax.evaluate_source import Policy, Request, find_policy, find_tasks, read_sections
from trainer_jax.rollouts import RolloutClient

SETTINGS = Settings(
    checkpoint="final",
    source="tasks",
    ids="",
    digests={"a": "1", "b": "2"},
    samples=2,
    same={"weights": "w", "sampling": {"temperature": 1.0, "top_p": 1.0}, "samplers": ["bf16"]},
)


def played(task_id: str, sample: int, reward: float | None, **changes) -> Trajectory:
    rng = np.random.default_rng(sample)
    base = random_trajectory(rng, name=f"{task_id}-{sample}", length=20, reward=reward)
    ending = Ending.FAILURE if reward is None else Ending.SUBMITTED
    patch = None if reward is None else Patch(changed={"x.py": b"1"})
    values = {"task_id": task_id, "sample": sample, "ending": ending, "patch": patch}
    return dataclasses.replace(base, **(values | changes))


@pytest.fixture
def opened(tmp_path):
    """Opens the record of an evaluation again and again."""
    stack = []

    def opened(**changes) -> EvaluationRecords:
        while stack:
            stack.pop().close()
        stack.append(EvaluationRecords(tmp_path / "out", dataclasses.replace(SETTINGS, **changes)))
        return stack[-1]

    yield opened
    while stack:
        stack.pop().close()


class TestEstimate:
    def test_pass_at_k_is_the_share_of_the_subsets_that_have_a_pass(self):
        for num, k in itertools.product(range(1, 6), (1, 2, 4)):
            for passed in range(num + 1 if k <= num else 0):
                outcomes = [True] * passed + [False] * (num - passed)
                subsets = [any(drawn) for drawn in itertools.combinations(outcomes, k)]
                assert pass_at_k(num, passed, k) == pytest.approx(np.mean(subsets))

    def test_each_k_is_over_the_tasks_that_have_so_many(self):
        rewards = {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0], "c": [0.0], "d": []}
        by_task = {
            name: [played(name, n, reward) for n, reward in enumerate(own)]
            for name, own in rewards.items()
        }
        result = summarize(by_task, version=1, num_samples=4, num_failures=3, seconds=1.0)
        assert {k: rate.num_tasks for k, rate in result.pass_at.items()} == {1: 3, 2: 2, 4: 1}
        assert result.pass_at[1].value == pytest.approx((0.25 + 1 + 0) / 3)
        assert result.pass_at[2].value == pytest.approx((0.5 + 1) / 2)
        assert (result.num_tasks, result.missing_samples) == (4, 16 - 7)
        data = result.to_json()
        assert data["pass_at_2_num_tasks"] == 2 and len(data["pass_at_2_interval"]) == 2


class TestRecord:
    def test_what_was_scored_is_not_missing_any_more(self, opened):
        records = opened()
        every = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
        assert [(m.task_id, m.sample) for m in records.missing()] == every
        records.add(played("b", 0, 1.0))
        records.add(played("a", 1, None, failure="away"))
        records.add(played("a", 1, 0.0, patch=None))
        left = [EvaluationSample(task_id="a", sample=0), EvaluationSample(task_id="b", sample=1)]
        for again in (records, opened()):
            assert again.missing() == left
            assert (again.num_scored, again.num_lost, again.num_wanted) == (2, 1, 4)
            rewards = {name: [e.reward for e in own] for name, own in again.by_task().items()}
            assert rewards == {"a": [0.0], "b": [1.0]}

    def test_a_lost_sample_is_another_attempt(self, opened):
        records = opened()
        for _ in range(2):
            records.add(played("a", 0, None))
        wanted = EvaluationSample(task_id="a", sample=0, attempt=2)
        assert records.missing()[0] == opened().missing()[0] == wanted

    def test_a_line_holds_what_happened(self, opened, tmp_path):
        patch = Patch(changed={})  # submitted, with nothing changed: a patch like any other
        trajectory = played("a", 0, 0.0, patch=patch, verdict="nothing changed", num_turns=3)
        opened().add(trajectory)
        (line,) = read_records(tmp_path / "out" / EPISODES)
        assert line["patch"] == {"changed": {}, "deleted": [], "special": [], "complete": True}
        assert (line["reward"], line["ending"], line["verdict"]) == (
            0.0,
            "submitted",
            "nothing changed",
        )
        assert (line["num_tokens"], line["num_turns"], line["weights"]) == (20, 3, "w")
        assert line["num_sampled_tokens"] == trajectory.loss_mask.sum() < 20
        assert line["version"] == 3

    def test_half_a_line_is_played_again(self, opened, tmp_path):
        records = opened()
        records.add(played("a", 0, 1.0))
        records.add(played("b", 0, 1.0))
        path = tmp_path / "out" / EPISODES
        path.write_bytes(path.read_bytes()[:-30])
        records = opened()
        assert ("b", 0) in {(m.task_id, m.sample) for m in records.missing()}
        records.add(played("b", 0, 0.0))
        assert [e.reward for e in opened().episodes] == [1.0, 0.0]

    def test_samples_may_grow(self, opened):
        opened().add(played("a", 0, 1.0))
        assert len(opened(samples=4).missing()) == 7
        with pytest.raises(BadInputError, match="samples: expected at least 4, as recorded"):
            opened(samples=2)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"same": {**SETTINGS.same, "weights": "v"}}, "weights: expected w as recorded"),
            (
                {"same": {**SETTINGS.same, "sampling": {"temperature": 0.5, "top_p": 1.0}}},
                r"sampling\.temperature: expected 1\.0 as recorded .*found 0\.5",
            ),
            (
                {"same": {**SETTINGS.same, "samplers": ["nvfp4"]}},
                r"samplers: expected \['bf16'\] as recorded",
            ),
            ({"digests": {"a": "1"}}, "tasks: expected b as recorded"),
            ({"digests": {"a": "1", "b": "2", "c": "3"}}, "only 2 tasks as recorded .*found c"),
            ({"digests": {"a": "1", "b": "9"}}, "task b: .*found one that has changed since"),
        ],
    )
    def test_other_settings_are_refused(self, opened, changes, sentence, tmp_path):
        opened().add(played("a", 0, 1.0))
        before = (tmp_path / "out" / "settings.json").read_text()
        with pytest.raises(BadInputError, match=sentence):
            opened(**changes)
        assert (tmp_path / "out" / "settings.json").read_text() == before
        names = {"checkpoint": "elsewhere/final", "source": "moved", "ids": "same.txt"}
        assert opened(**names).num_scored == 1, "names of the same things may change"

    def test_damage_is_named(self, opened, tmp_path):
        opened().add(played("a", 0, 1.0))
        path = tmp_path / "out" / EPISODES
        path.write_text(path.read_text().replace('"submitted"', '"somehow"'))
        with pytest.raises(BadInputError, match="line 1: expected an episode"):
            opened()


class Gateway(RolloutClient):
    """Answers from a function of (sample, number of the call); None breaks the stream."""

    def __init__(self, answer: Callable[[EvaluationSample, int], Trajectory | None]) -> None:
        self.calls: list[list[EvaluationSample]] = []
        self._answer = answer

    def evaluate_samples(self, samples, *, min_version, sampling) -> Iterator[Trajectory]:
        assert (min_version, sampling.top_p, sampling.seed) == (5, 1.0, 7)
        self.calls.append(list(samples))
        for sample in samples:
            trajectory = self._answer(sample, len(self.calls))
            if trajectory is None:
                raise RetryError("broken")
            yield trajectory


@pytest.fixture
def play(opened, monkeypatch):
    monkeypatch.setattr("trainer_jax.evaluate.RETRY_S", 0.0)

    def play(answer) -> tuple[EvaluationRecords, Gateway]:
        gateway, records = Gateway(answer), opened()
        section = EvaluationSection(seed=7)
        evaluate_missing(gateway, section, records, version=5)
        return records, gateway

    return play


class TestPlay:
    def test_only_what_is_missing_is_asked_for(self, play):
        def answer(sample, call):
            lost = sample.task_id == "a" and call < 3
            return played(sample.task_id, sample.sample, None if lost else 1.0)

        records, gateway = play(answer)
        assert [len(call) for call in gateway.calls] == [4, 2, 2]
        assert [s.attempt for s in gateway.calls[2]] == [2, 2]
        assert (records.num_scored, records.num_lost, records.missing()) == (4, 4, [])
        _, gateway = play(answer)
        assert gateway.calls == [], "all is there"

    def test_a_sample_is_given_up_after_three_reruns_and_may_be_asked_for_later(self, play):
        def answer(sample, call):
            return played(sample.task_id, sample.sample, None if sample.sample else 0.0)

        records, gateway = play(answer)
        assert Counter(s.sample for call in gateway.calls for s in call) == {0: 2, 1: 8}
        assert [(m.sample, m.attempt) for m in records.missing()] == [(1, 4), (1, 4)]
        records, _ = play(lambda sample, call: played(sample.task_id, sample.sample, 1.0))
        assert records.missing() == []

    def test_a_broken_stream_goes_on_while_it_brings_something(self, play):
        records, gateway = play(
            lambda sample, call: (
                played(sample.task_id, sample.sample, 1.0)
                if sample == gateway_first(sample, call)
                else None
            )
        )
        assert records.missing() == [] and len(gateway.calls) == 4

        _, gateway = play(lambda sample, call: None)
        assert gateway.calls == [], "nothing is missing"

    def test_a_stream_that_brings_nothing_ends_it(self, play):
        records, gateway = play(lambda sample, call: None)
        assert len(gateway.calls) == 4 and records.num_scored == 0


def gateway_first(sample: EvaluationSample, call: int) -> EvaluationSample:
    """The one that a call brings before it breaks: the first of those missing."""
    order = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    task_id, number = order[call - 1]
    return EvaluationSample(task_id=task_id, sample=number)


def result_of(*trajectories: Trajectory, samples: int = 2) -> Result:
    episodes = [Episode.of(trajectory) for trajectory in trajectories]
    settings = dataclasses.replace(SETTINGS, samples=samples)
    by_task = {
        name: [e for e in episodes if e.task_id == name and e.reward is not None]
        for name in settings.digests
    }
    lost = sum(e.reward is None for e in episodes)
    evaluation = summarize(by_task, version=1, num_samples=samples, num_failures=lost, seconds=1.0)
    return Result(evaluation=evaluation, settings=settings, episodes=episodes)


class TestReport:
    def test_tasks_reasons_and_losses_are_told(self, tmp_path):
        result = result_of(
            played("a", 0, 1.0, verdict="3 tests passed", num_turns=2),
            played("a", 1, 0.0, verdict="test_x: <b>a|b</b>", num_turns=4),
            played("b", 0, 0.0, verdict="", ending=Ending.FORMAT_ERRORS, patch=None),
            played("b", 1, None, failure="the sandbox is gone"),
        )
        assert result.incomplete == ["b"]
        write_result(tmp_path, result)
        content = json.loads((tmp_path / EVALUATION).read_text())
        assert content["pass_at_1"] == 0.25 and content["pass_at_2_num_tasks"] == 1
        assert (content["infrastructure_failures"], content["missing_samples"]) == (1, 1)
        assert content["incomplete_tasks"] == ["b"]
        a, b = content["tasks"]["a"], content["tasks"]["b"]
        assert (a["samples"], a["passed"], a["turns"], a["lost"]) == (2, 1, 3.0, 0)
        assert a["reasons"] == {"test_x: <b>a|b</b>": 1}
        assert (b["samples"], b["lost"], b["reasons"]) == (1, 1, {"format errors": 1})
        text = (tmp_path / REPORT).read_text()
        assert "| pass@2 | 1.000 |" in text and "| the sandbox is gone | 1 |" in text
        assert "| a | 2 | 1 | 0.50 | 3.0 | 1 x test_x: &lt;b>a\\|b&lt;/b> | 0 |" in text
        assert "1 samples still missing" in text and "1 tasks lack samples" in text

    def test_the_terminal_shows_the_rates(self, tmp_path):
        console = Console(record=True, width=120, file=(tmp_path / "console").open("w"))
        print_result(console, tmp_path, result_of(played("a", 0, 1.0), played("b", 0, 0.0)))
        console.file.close()
        text = console.export_text()
        assert "pass@1" in text and "0.500" in text and REPORT in text


def verdict(had_passed: bool, passed: bool | None, num_lost: int) -> dict:
    reason, failure = ("", "away") if passed is None else (f"passed: {passed}", "")
    return {
        "had_passed": had_passed,
        "passed": passed,
        "reason": reason,
        "failure": failure,
        "num_lost": num_lost,
    }


VERDICTS = {
    ("a", 0): verdict(True, True, 0),
    ("a", 1): verdict(True, False, 1),
    ("b", 0): verdict(False, None, 4),
}


class TestRegrading:
    def test_changes_are_named(self):
        assert changes(VERDICTS) == [
            ("a", "1", "passed", "failed", "passed: False"),
            ("b", "0", "failed", "not graded", "away"),
        ]

    def test_the_last_verdict_on_a_patch_that_is_there_counts(self):
        keys = [("a", 0), ("a", 0), ("b", 0), ("b", 1), ("b", 2)]
        regraded = [{"task_id": t, "sample": s, "n": n} for n, (t, s) in enumerate(keys)]
        records = [
            {"task_id": "a", "sample": 0, "reward": 1.0, "patch": {}},
            {"task_id": "b", "sample": 0, "reward": None, "patch": {}},  # lost
            {"task_id": "b", "sample": 1, "reward": 0.0, "patch": None},
        ]
        assert latest(regraded, records) == {("a", 0): regraded[1]}

    def test_rates_are_of_the_second_grading(self):
        result = result_of(
            played("a", 0, 1.0), played("a", 1, 1.0), played("b", 0, 0.0),
            played("b", 1, None), played("b", 1, 0.0, patch=None),
        )  # fmt: skip
        again = by_verdicts(result.settings, result.episodes, VERDICTS)
        assert again.pass_at[1].value == pytest.approx((0.5 + 0.0) / 2)
        assert {k: rate.num_tasks for k, rate in again.pass_at.items()} == {1: 2, 2: 1}
        assert (again.missing_samples, again.infrastructure_failures) == (1, 5)


class TestSource:
    def test_a_policy_is_told_by_what_samplers_are_given(self, tmp_path):
        policy = Policy(place=tmp_path, base=tmp_path)
        params = {"a": jnp.linspace(0, 1, 6, dtype=jnp.float32).reshape(2, 3), "b": jnp.ones(2)}
        first = policy.checksum(MODEL, params)
        assert policy.checksum(MODEL, jax.tree.map(np.asarray, params)) == first
        below = params | {"b": params["b"] + 1e-4}  # the same in BF16
        assert policy.checksum(MODEL, below) == first
        for other in (
            params | {"b": params["b"].at[1].set(1 + 2**-7)},
            params | {"a": params["a"].reshape(3, 2)},
            {"a": params["a"], "c": params["b"]},
        ):
            assert policy.checksum(MODEL, other) != first
        assert policy.checksum(dataclasses.replace(MODEL, rope_theta=5.0), params) != first
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
        assert policy.checksum(MODEL, params) != first

    def test_the_policy_is_the_one_named_or_the_newest(self, tmp_path):
        run = tmp_path / "run"
        for step in ("2", "10"):
            (run / "checkpoints" / step).mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"model": {"checkpoint": "start"}}))
        newest = find_policy(Request(run=run))
        assert (newest.place, newest.base) == (run / "checkpoints" / "10", Path("start"))
        assert newest.name == "step-10"
        named = Request(run=run, checkpoint=run / "checkpoints" / "2")
        assert find_policy(named).name == "step-2"
        (run / "final").mkdir()
        (run / "final" / "config.json").write_text("{}")
        final = find_policy(Request(run=run, checkpoint=run / "final"))
        assert (final.place, final.base, final.name) == (run / "final", run / "final", "final")
        for step in ("2", "10"):
            (run / "checkpoints" / step).rmdir()
        assert find_policy(Request(run=run)) == final

    def test_what_cannot_be_is_refused(self, tmp_path):
        run_file = tmp_path / "run.toml"
        run_file.write_text("[run]\n")
        for request, sentence in (
            (Request(run=run_file), "--checkpoint: expected one, or the directory of a run"),
            (Request(run=run_file, checkpoint=tmp_path), "expected a Hugging Face directory"),
            (Request(run=tmp_path), "expected a checkpoint in checkpoints/, found none"),
        ):
            with pytest.raises(BadInputError, match=sentence):
                find_policy(request)
        with pytest.raises(BadInputError, match=r"expected config\.json, found none"):
            read_sections(Request(run=tmp_path))
        with pytest.raises(BadInputError, match="--set: expected a TOML run file"):
            read_sections(Request(run=tmp_path, overrides=["run.name=x"]))
        with pytest.raises(BadInputError, match="--ids: expected --tasks SOURCE"):
            find_tasks(Request(run=run_file, ids=run_file), {}, 0)

    def test_samples_of_the_command_line_win(self, tmp_path):
        run_file = tmp_path / "run.toml"
        run_file.write_text("[evaluation]\nnum_samples = 2\nseed = 3\n")
        sections = read_sections(Request(run=run_file, samples=8))
        assert sections["evaluation"] == {"num_samples": 8, "seed": 3}
        assert read_sections(Request(run=run_file))["evaluation"]["num_samples"] == 2

    def test_tasks_are_all_of_a_source_or_those_of_a_subset_file(self, tmp_path):
        source = Path(__file__).parents[1] / "data" / "tasks" / "local"
        run = tmp_path / "run.toml"
        every = find_tasks(Request(run=run, tasks=source), {}, 1)
        assert set(every) == {folder.name for folder in source.iterdir()}
        ids = tmp_path / "ids.txt"
        ids.write_text("# two\nshop-total\nshop-rename\n")
        some = find_tasks(Request(run=run, tasks=source, ids=ids), {}, 1)
        assert some == {name: every[name] for name in ("shop-total", "shop-rename")}
        ids.write_text("shop-nothing\n")
        with pytest.raises(BadInputError, match="found shop-nothing"):
            find_tasks(Request(run=run, tasks=source, ids=ids), {}, 1)
