"""Which tasks a run trains on: splits, shares and subset files of a source."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.errors import BadInputError
from contracts.runfile import validate_section
from sampler_fleet.config import TasksConfig
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.tasks.choose import choose_tasks, heldout_ids, read_ids
from sampler_fleet.episodes.tasks.generate import generate_tasks

DATA = Path(__file__).parents[2] / "data" / "tasks"
LIMIT = 1 << 20


def none_here() -> str:
    return "there is none"


def make_tasks(num: int, **changes: str) -> list[Task]:
    """Tasks of which three each share a template."""
    return [
        Task(
            **{"task_id": f"t{n}", "split": "", "template": f"g{n // 3}", "issue": ""} | changes,
            fail_to_pass=("t.py::t",),
            pass_to_pass=(),
        )
        for n in range(num)
    ]


def chosen(tmp_path: Path, tree_limit: int = LIMIT, **settings) -> dict[str, set[str]]:
    config = TasksConfig(**{"source": str(tmp_path)} | settings)
    splits = choose_tasks(config, tree_limit=tree_limit, no_containers=none_here)
    return {split: {task.task_id for task in tasks} for split, tasks in splits.items()}


@pytest.fixture
def source(tmp_path) -> Path:
    """Twelve tasks in the local format; the first says train, the last heldout."""
    for number in range(12):
        folder = tmp_path / "source" / f"t{number:02}"
        shutil.copytree(DATA / "local" / "shop-wrong-fix", folder)
        split = {0: "train", 11: "heldout"}.get(number)
        if split:
            with (folder / "task.toml").open("a") as file:
                file.write(f'split = "{split}"\n')
    return tmp_path / "source"


ALL = {f"t{number:02}" for number in range(12)}


class TestShare:
    def test_tasks_that_say_their_split_keep_it(self):
        for share in (0.0, 0.9):
            assert not heldout_ids(make_tasks(6, split="train"), share, 0)
            assert len(heldout_ids(make_tasks(6, split="heldout"), share, 0)) == 6

    def test_templates_are_whole_and_the_share_is_reached(self):
        tasks = make_tasks(300)
        for share in (0.0, 0.1, 0.25, 0.5):
            found = heldout_ids(tasks, share, 4)
            assert 300 * share <= len(found) < 300 * share + 3
            assert {task.template for task in tasks if task.task_id in found}.isdisjoint(
                task.template for task in tasks if task.task_id not in found
            )

    def test_the_seed_decides_and_nothing_else(self):
        tasks = make_tasks(300)
        found = heldout_ids(tasks, 0.3, 4)
        assert found == heldout_ids(tasks[::-1], 0.3, 4)
        assert found != heldout_ids(tasks, 0.3, 5)


class TestChoice:
    def test_without_a_source_tasks_are_generated(self):
        config = TasksConfig(num_train=5, num_heldout=2, seed=3)
        assert choose_tasks(config, tree_limit=LIMIT, no_containers=none_here) == {
            "train": generate_tasks("train", 5, 3),
            "heldout": generate_tasks("heldout", 2, 3),
        }

    def test_by_split_and_share(self, source):
        found = chosen(source, heldout_share=0.3)
        assert found["train"] | found["heldout"] == ALL
        assert "t00" in found["train"]
        assert "t11" in found["heldout"]
        assert len(found["heldout"]) == 1 + 3  # 0.3 of ten
        assert chosen(source, heldout_share=0) == {"train": ALL - {"t11"}, "heldout": {"t11"}}

    def test_same_order_for_the_same_seed(self, source):
        first, again, other = (
            choose_tasks(
                TasksConfig(source=str(source), seed=seed),
                tree_limit=LIMIT,
                no_containers=none_here,
            )["train"]
            for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_at_most_so_many(self, source):
        found = chosen(source, num_train=3, num_heldout=1, heldout_share=0.5)
        assert [len(ids) for ids in found.values()] == [3, 1]

    def test_subsets(self, source, tmp_path):
        train, heldout, usable = (tmp_path / name for name in ("train", "heldout", "usable"))
        train.write_text("# easy ones\nt11\n\nt01  \n")
        heldout.write_text("t00\nt02\n")
        usable.write_text('"t00"\n"t02"\n"t05"\n')
        both = chosen(source, train_ids=str(train), heldout_ids=str(heldout))
        assert both == {"train": {"t01", "t11"}, "heldout": {"t00", "t02"}}
        rest = chosen(source, heldout_ids=str(heldout), heldout_share=0.5)
        assert rest == {"train": ALL - {"t00", "t02", "t11"}, "heldout": {"t00", "t02"}}
        rest = chosen(source, train_ids=str(train))
        assert rest == {"train": {"t01", "t11"}, "heldout": ALL - {"t00", "t01", "t11"}}
        some = chosen(source, ids=str(usable), heldout_ids=str(heldout), heldout_share=0)
        assert some == {"train": {"t05"}, "heldout": {"t00", "t02"}}

    def test_wrong_subsets(self, source, tmp_path):
        ids = tmp_path / "ids"
        ids.write_text("t01\nt99\n")
        with pytest.raises(BadInputError, match="ids of tasks in the source, found t99"):
            chosen(source, ids=str(ids))
        ids.write_text("t01\n")
        with pytest.raises(BadInputError, match=r"no id that is in tasks\.train_ids, found t01"):
            chosen(source, train_ids=str(ids), heldout_ids=str(ids))
        ids.write_text('"t01\n')
        with pytest.raises(BadInputError, match="ids, line 1: expected an id"):
            chosen(source, ids=str(ids))
        ids.write_text("")
        with pytest.raises(BadInputError, match="expected tasks to train on"):
            chosen(source, ids=str(ids))
        with pytest.raises(BadInputError, match="expected a source that ids"):
            validate_section(TasksConfig, "tasks", {"ids": str(ids)})

    def test_a_broken_task_matters_only_where_it_is_wanted(self, source, tmp_path):
        (source / "t05" / "task.toml").write_text("")
        good, bad = (tmp_path / name for name in ("good", "bad"))
        good.write_text("t01\nt02\n")
        assert chosen(source, ids=str(good), heldout_share=0)["train"] == {"t01", "t02"}
        bad.write_text("t03\n")
        both = chosen(source, train_ids=str(good), heldout_ids=str(bad))
        assert both == {"train": {"t01", "t02"}, "heldout": {"t03"}}
        bad.write_text("t03\nt05\n")
        for settings in (
            {},
            {"ids": str(bad)},
            {"train_ids": str(good), "heldout_ids": str(bad)},
            {"train_ids": str(good)},  # all else is held out
        ):
            with pytest.raises(BadInputError, match="t05"):
                chosen(source, **settings)

    def test_which_of_two_tasks_is_meant_by_an_id_is_not_guessed(self, tmp_path):
        row = (DATA / "smith.jsonl").read_text().split("\n")[0]
        (tmp_path / "rows.jsonl").write_text(f"{row}\n{row}\n")
        (tmp_path / "ids").write_text(json.loads(row)["instance_id"])
        with pytest.raises(BadInputError, match="a second time"):
            chosen(tmp_path / "rows.jsonl", ids=str(tmp_path / "ids"))

    def test_what_cannot_run_is_said_before_anything_runs(self, source):
        with pytest.raises(BadInputError, match="Corner__shop-8, which needs a con") as error:
            chosen(DATA / "swebench.jsonl", heldout_share=0)
        assert "image swebench/sweb.eval" in str(error.value)
        with pytest.raises(BadInputError, match=r"episodes\.sandbox\.tree_bytes, 50, found"):
            chosen(source, tree_limit=50)


def test_ids_are_plain_or_json(tmp_path):
    ids = ["a__b-1", 'odd "id"', "é"]
    for text in ("\n".join(ids), "\n".join(map(json.dumps, ids)) + "\n"):
        (tmp_path / "ids").write_text(text)
        assert read_ids(tmp_path / "ids") == ids


def start_gateway(tmp_path: Path, source: Path, tokenizer_files: Path) -> subprocess.Popen[str]:
    record = {
        "fleet": {"groups": [{"name": "a", "weight_format": "bf16"}]},
        "tasks": {"source": str(source), "heldout_share": 0.5},
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    command = (sys.executable, "-m", "sampler_fleet", "serve", "--die-with-parent")
    options = ("--config", tmp_path / "run.json", "--checkpoint", tokenizer_files)
    places = ("--state-dir", tmp_path / "state", "--port-file", tmp_path / "port")
    return subprocess.Popen([*command, *options, *places], stderr=subprocess.PIPE, text=True)


def test_the_gateway_takes_its_tasks_from_the_source(source, host, tmp_path, tokenizer_files):
    gateway = start_gateway(tmp_path, source, tokenizer_files)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "port").exists() and gateway.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        gateway.send_signal(signal.SIGTERM)
        _, log = gateway.communicate(timeout=60)
    finally:
        gateway.kill()
        gateway.wait()
    assert gateway.returncode == 0, log
    assert f"tasks of {source}: 6 of 6 train, 6 of 6 heldout" in log


def test_the_gateway_refuses_tasks_in_images_at_once(host, tmp_path, tokenizer_files):
    gateway = start_gateway(tmp_path, DATA / "swe_gym.jsonl", tokenizer_files)
    _, log = gateway.communicate(timeout=60)
    assert gateway.returncode == 2
    assert log.splitlines()[-1].startswith("error: run file, tasks.source: expected tasks that")
