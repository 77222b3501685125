"""Task sources: every format from rows written by its documented fields, and what is wrong rows."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pyarrow as arrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Judge, Task
from sampler_fleet.episodes.tasks.sources import read_tasks
from sampler_fleet.episodes.tasks.sources.diff import apply_diff
from sampler_fleet.episodes.tasks.sources.row import Row

DATA = Path(__file__).parents[2] / "data" / "tasks"
BEFORE = {"shop/cart.py": "def total(price, count):\n    return price + count\n"}
AFTER = {"shop/cart.py": "def total(price, count):\n    return price * count\n"}
F2P = ("tests/test_cart.py::test_total",)
P2P = ("tests/test_cart.py::test_label[it's]", 'tests/test_cart.py::test_label["q"]')


def read_one(path: str) -> Task:
    (task,) = read_tasks(DATA / path)
    return task


def first_row(path: str) -> dict:
    return json.loads((DATA / path).read_text().split("\n")[0])


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestFormats:
    """In all of them the fix is the same."""

    @pytest.mark.parametrize(
        ("path", "dataset", "image"),
        [
            ("swe_gym.jsonl", "SWE-Gym", "xingyaoww/sweb.eval.x86_64.corner_s_shop-7:latest"),
            ("swe_rebench.jsonl", "SWE-bench's fields", "registry.example/rebench:shop-7"),
            ("pro_v1", "SWE-bench Pro V1", "jefzda/sweap-images:corner.shop-corner__shop-7"),
            (
                "smith.jsonl",
                "SWE-smith",
                "registry.example/swesmith.x86_64.corner_1776_shop.0a1b2c3d",
            ),
            (
                "harbor/pro_v2",
                "swebench-pro",
                "registry.example/pro-v2:instance_corner__shop-7",
            ),
        ],
    )
    def test_those_with_test_ids(self, path, dataset, image):
        task = read_one(path)
        assert task.checkout
        assert (task.dataset, task.checkout.image) == (dataset, image)
        assert (task.fail_to_pass, task.pass_to_pass) == (F2P, P2P)
        assert apply_diff(task.checkout.fix_patch, BEFORE) == (AFTER, ())
        assert not (task.tree or task.hidden_tests or task.fix)
        assert task.split == ""
        assert task.language == "python"

    def test_swebench(self):
        task, verified = read_tasks(DATA / "swebench.jsonl")
        assert (task.task_id, task.dataset) == ("corner__shop-7", "SWE-bench")
        assert (task.fail_to_pass, task.pass_to_pass) == (F2P, P2P)
        assert task.template == "corner/shop"
        assert task.checkout
        assert task.checkout.workdir == "/testbed"
        assert task.checkout.version == "1.2"
        assert task.checkout.base_commit.endswith("7")
        assert task.checkout.judge == Judge.WITNESS
        assert task.checkout.test_command.endswith(" tests/test_cart.py")
        assert apply_diff(task.checkout.fix_patch, BEFORE) == (AFTER, ())
        assert "tests/test_cart.py" in apply_diff(task.checkout.test_patch, {})[0]
        assert verified.dataset == "SWE-bench Verified"
        assert verified.pass_to_pass == ()
        assert verified.checkout
        image = "swebench/sweb.eval.x86_64.corner_1776_shop-8:latest"  # all in lower case
        assert verified.checkout.image == image

    def test_pro_v1_runs_the_scripts_beside_it(self, tmp_path):
        task = read_one("pro_v1")
        assert "Requirements:\n- total must multiply" in task.issue
        assert task.checkout
        assert task.checkout.setup == "git reset --hard 07\ngit clean -fd\ngit checkout 07\n"
        assert set(task.checkout.test_files) == {"run_script.sh", "parser.py"}
        checkout, run, _ = task.checkout.test_command.split("\n")
        assert checkout == "git checkout 08 -- tests/test_cart.py"
        assert "run_script.sh 'tests/test_cart.py,tests/test label.py' >" in run
        shutil.copy(DATA / "pro_v1" / "rows.jsonl", tmp_path)
        (without,) = read_tasks(tmp_path)
        assert without.checkout
        assert (without.checkout.test_files, without.checkout.test_command) == ({}, "")

    def test_pro_v1_tag_as_docker_hub_has_it(self, tmp_path):
        row = first_row("pro_v1/rows.jsonl") | {"dockerhub_tag": f"{'x' * 140}-vnan"}
        (task,) = read_tasks(write_rows(tmp_path / "rows", row))
        assert task.checkout
        assert task.checkout.image == f"jefzda/sweap-images:{'x' * 128}"

    def test_r2e(self):
        task = read_one("r2e.jsonl")
        assert task.task_id == f"shop__{'a' * 40}"
        assert task.issue == "total(2, 5) is 7."
        assert task.checkout
        assert task.checkout.judge == Judge.STATUSES
        assert task.checkout.expected["test_cart.py::test_old"] == "FAILED"
        assert "/r2e_tests" in task.checkout.hidden_paths
        open_end = {"shop/cart.py": BEFORE["shop/cart.py"].removesuffix("\n")}
        with pytest.raises(BadInputError):  # the note belongs to the line that was added
            apply_diff(task.checkout.fix_patch, open_end)
        changed, _ = apply_diff(task.checkout.fix_patch, BEFORE)
        assert changed == {
            "shop/cart.py": AFTER["shop/cart.py"].removesuffix("\n"),
            "shop/price.py": "TAX = 0\n",
        }

    def test_smith_has_the_bug_as_its_patch(self):
        task = read_one("smith.jsonl")
        assert task.checkout
        bug = task.checkout.setup.split("\n", 1)[1].split("END OF THE PATCH")[0]
        assert apply_diff(bug, AFTER) == (BEFORE, ())
        assert task.checkout.hidden_paths == ("/testbed/tests/test_cart.py",)

    def test_mimo(self, tmp_path):
        task = read_one("mimo")
        assert read_one("mimo/code.jsonl") == task
        assert (task.task_id, task.issue) == ("code-task-000007", "total(2, 5) is 7.")
        assert task.checkout
        assert task.checkout.image == "registry.example/mimo:code-task-000007"
        assert task.checkout.workdir == "/testbed"
        assert task.checkout.test_command == "bash test_command.sh"
        assert task.checkout.judge == Judge.EXIT_STATUS
        assert task.test_seconds == 1800
        row = first_row("mimo/code.jsonl")
        instance = json.loads(row["extra_info"]["instance_json"])
        instance["task_id"] = instance.pop("instance_id")
        del instance["problem_statement"]
        row["extra_info"] = json.dumps({"instance_json": instance})
        (other,) = read_tasks(write_rows(tmp_path / "rows", row))
        assert (other.task_id, other.issue) == (task.task_id, task.issue)
        assert other.checkout
        assert other.checkout.image == "code-task-000007:latest"  # no mapping here

    def test_harbor(self):
        pro = read_one("harbor/pro_v2")
        assert pro.task_id == "instance_corner__shop-7"
        assert pro.test_seconds == 3000
        assert pro.checkout
        assert pro.checkout.episode_seconds == 2400
        assert pro.checkout.workdir == "/app"
        assert pro.checkout.fix_script == ""
        assert "tests/test_cart.py" in apply_diff(pro.checkout.test_patch, {})[0]
        bench = read_one("harbor/terminal_bench")
        assert (bench.dataset, bench.language) == ("Harbor", "")
        assert bench.checkout
        assert bench.checkout.image == ""
        assert bench.checkout.build_dir.endswith("count-lines/environment")
        assert bench.checkout.test_files["expected.bin"] == b"\0\xff"
        assert "wc -l" in bench.checkout.fix_script
        assert bench.checkout.judge == Judge.REWARD_FILE

    def test_local(self):
        tasks = {task.task_id: task for task in read_tasks(DATA / "local")}
        task = tasks["shop-total"]
        assert task.checkout is None
        assert (task.split, task.template, task.license) == ("train", "total", "Apache-2.0")
        assert task.tree["shop/cart.py"] == BEFORE["shop/cart.py"]
        assert task.hidden_tests.keys() == {"tests/test_cart.py"}
        assert (task.fix, task.fix_deletes) == (AFTER, ())
        assert task.test_seconds == 10
        renamed = tasks["shop-rename"]
        assert renamed.fix == {"shop/basket.py": AFTER["shop/cart.py"]}
        assert renamed.fix_deletes == ("shop/cart.py",)
        assert read_tasks(DATA / "local" / "shop-total") == [task]

    @pytest.mark.parametrize("path", ["swebench", "swe_gym", "r2e", "smith", "mimo/code"])
    def test_parquet_holds_the_same(self, path, tmp_path):
        source = DATA / f"{path}.jsonl"
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        copy = tmp_path / "data" / "train-00000-of-00001.parquet"
        copy.parent.mkdir()
        parquet.write_table(arrow.Table.from_pylist(rows), copy)
        mapping = DATA / "mimo" / "image-mapping.jsonl"
        shutil.copy(mapping, copy.parent)
        assert read_tasks(tmp_path) == read_tasks(copy) == read_tasks(source)

    def test_parquet_without_pyarrow_says_what_to_do(self, tmp_path, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        (tmp_path / "rows.parquet").write_bytes(b"PAR1....PAR1")
        with pytest.raises(BadInputError, match="pip install pyarrow") as raised:
            read_tasks(tmp_path)
        assert "JSON lines" in str(raised.value)


IDS = st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True).map(tuple)


class TestEncodings:
    @staticmethod
    def row(value: object) -> Row:
        return Row(fields={"fail_to_pass": value}, where="rows, line 3, x-1", folder=Path())

    @given(IDS)
    def test_one_list_in_all_its_forms(self, ids):
        forms = (list(ids), json.dumps(ids), json.dumps(ids, ensure_ascii=False), repr(list(ids)))
        for form in (*forms, f" {ids!r}\n", [*ids, *ids]):
            assert self.row(form).texts("fail_to_pass") == ids

    @given(st.text(max_size=40) | st.integers() | st.dictionaries(st.text(), st.text()))
    def test_nothing_else_is_a_list(self, value):
        try:
            found = self.row(value).texts("fail_to_pass")
        except BadInputError as error:
            assert "rows, line 3, x-1: fail_to_pass" in str(error)
        else:
            assert isinstance(value, str)
            assert value.strip()[0] in "[("  # a text that does hold a list
            assert all(isinstance(item, str) for item in found)

    @pytest.mark.parametrize(
        "value",
        ["", "[1]", '["a", null]', "tests/a.py::b", "__import__('os')", "[" * 9999, [b"a"], "'ab'"],
    )
    def test_nearly_lists(self, value):
        with pytest.raises(BadInputError, match="JSON or as a Python literal"):
            self.row(value).texts("fail_to_pass")

    @pytest.mark.parametrize("value", [True, "3", 0, -1, float("nan")])
    def test_seconds_are_numbers(self, value):
        with pytest.raises(BadInputError, match="seconds above 0"):
            self.row(value).seconds("fail_to_pass")

    @pytest.mark.parametrize("path", ["swebench.jsonl", "pro_v1/rows.jsonl", "smith.jsonl"])
    def test_keys_in_either_case(self, path, tmp_path):
        source = DATA / path
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        for change in (str.upper, str.lower):
            renamed = [{change(key): value for key, value in row.items()} for row in rows]
            found = read_tasks(write_rows(tmp_path / "rows", *renamed))
            assert [task.fail_to_pass for task in found] == [F2P] * len(rows)


class TestWrong:
    def test_unknown_shape_names_what_the_nearest_format_has(self, tmp_path):
        for path, key, name in (
            ("swebench.jsonl", "test_patch", "SWE-bench"),
            ("r2e.jsonl", "expected_output_json", "R2E-Gym"),
            ("smith.jsonl", "problem_statement", "SWE-smith"),
        ):
            row = first_row(path)
            del row[key]
            source = write_rows(tmp_path / "rows", row)
            with pytest.raises(BadInputError, match=f"nearest is {name}, which has also {key}"):
                read_tasks(source)
        source = write_rows(tmp_path / "rows", {"prompt": "x", "extra_info": {"index": 1}})
        with pytest.raises(BadInputError, match=r"only extra_info, extra_info\.index, prompt"):
            read_tasks(source)

    @pytest.mark.parametrize(
        ("path", "changes", "sentence"),
        [
            ("swebench.jsonl", {"FAIL_TO_PASS": "x"}, "corner__shop-7: fail_to_pass: expected a"),
            ("swebench.jsonl", {"FAIL_TO_PASS": "[]"}, "fail_to_pass: expected at least one"),
            ("swebench.jsonl", {"patch": None}, "corner__shop-7: patch: expected a text, found no"),
            ("swebench.jsonl", {"base_commit": 7}, "base_commit: expected a text, found 7"),
            ("smith.jsonl", {"patch": "GIT binary patch"}, "patch: expected text changes"),
            ("r2e.jsonl", {"expected_output_json": "[]"}, "expected a JSON object"),
            ("r2e.jsonl", {"expected_output_json": "{}"}, "expected a status per test"),
            (
                "r2e.jsonl",
                {"parsed_commit_content": '{"file_diffs": [{"hunks": []}]}'},
                "a change without 'header'",
            ),
            (
                "mimo/code.jsonl",
                {
                    "prompt": [{"role": "user", "content": [{"type": "text", "text": "Fix it."}]}],
                    "extra_info": {"instance_json": '{"instance_id": "c-7", "docker_image": "i"}'},
                },
                "prompt: expected a user's message whose content is a text, found [{",
            ),
            (
                "mimo/code.jsonl",
                {"extra_info": {"instance_json": '{"instance_id": "c-7", "docker_image": "i"}'}},
                "c-7: cwd: expected a text, found nothing",
            ),
        ],
    )
    def test_broken_row_names_file_line_and_instance(self, path, changes, sentence, tmp_path):
        good = first_row(path)
        source = write_rows(tmp_path / "rows", good, good | changes)
        with pytest.raises(BadInputError) as raised:
            read_tasks(source)
        assert sentence in str(raised.value)
        assert f"{source}, line 2" in str(raised.value)
        broken: list[BadInputError] = []
        assert len(read_tasks(source, lambda _, error: broken.append(error))) == 1
        assert [str(error) for error in broken] == [str(raised.value)]

    def test_ids_differ(self, tmp_path):
        row = first_row("smith.jsonl")
        with pytest.raises(BadInputError, match=r"line 2, .*: expected ids that differ"):
            read_tasks(write_rows(tmp_path / "rows", row, row))

    def test_files_that_are_no_rows(self, tmp_path):
        for text in ("", "[]", "{\n}", "{'a': 1}\n", "\x89PNG", '{"a":' * 100_000):
            (tmp_path / "file.jsonl").write_text(text)
            with pytest.raises(BadInputError, match="expected Parquet, or JSON lines"):
                read_tasks(tmp_path / "file.jsonl")
            with pytest.raises(BadInputError, match="found neither"):
                read_tasks(tmp_path)
        (tmp_path / "file.jsonl").write_text('{"a": 1}\n{"a": \n')
        with pytest.raises(BadInputError, match="a known format"):
            read_tasks(tmp_path)
        with pytest.raises(FileNotFoundError):
            read_tasks(tmp_path / "none")

    @pytest.mark.parametrize("line", ['{"a": ', '{"a":' * 100_000, "1" * 5000])
    def test_torn_line(self, line, tmp_path):
        source = tmp_path / "rows"
        source.write_text((DATA / "smith.jsonl").read_text() + line)
        with pytest.raises(BadInputError, match="rows, line 2: expected JSON"):
            read_tasks(source)

    @pytest.mark.parametrize("start", ["\ufeff", "\n \n", "\ufeff\r\n"])
    @pytest.mark.parametrize("path", ["smith.jsonl", "mimo"])
    def test_an_empty_line_or_a_mark_before_the_rows(self, path, start, tmp_path):
        for name in ("code.jsonl", "image-mapping.jsonl") if path == "mimo" else ("",):
            copy = tmp_path / (name or path)
            copy.write_text(start + (DATA / path / name).read_text())
        assert read_tasks(tmp_path) == read_tasks(DATA / path)

    def test_facts_of_a_data_set_beside_its_rows(self, tmp_path):
        shutil.copy(DATA / "smith.jsonl", tmp_path)
        infos = tmp_path / "dataset_infos.json"
        infos.write_text('{"default": {"features": {"patch": {"dtype": "string"}}}}')
        assert read_tasks(tmp_path) == read_tasks(DATA / "smith.jsonl")
        for text in ('{"x": 1}\n{"y": 2}\n', '{"x": 1, "patch": ""}'):
            infos.write_text(text)  # rows of a format that nobody knows
            with pytest.raises(BadInputError, match="a known format"):
                read_tasks(tmp_path)

    def test_what_is_no_regular_file_is_passed_over(self, tmp_path):
        shutil.copy(DATA / "smith.jsonl", tmp_path / ".blob")
        (tmp_path / "rows.jsonl").symlink_to(".blob")  # as caches of data sets have them
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "dangling").symlink_to("nothing")
        assert read_tasks(tmp_path) == read_tasks(DATA / "smith.jsonl")

    def test_a_name_of_an_image_that_is_none(self, tmp_path):
        shutil.copy(DATA / "mimo" / "code.jsonl", tmp_path)
        good = first_row("mimo/image-mapping.jsonl")
        for bad in ({"dataset_image": "a"}, good | {"dockerhub_image": 7}):
            write_rows(tmp_path / "image-mapping.jsonl", good, bad)
            with pytest.raises(BadInputError, match=r"line 2: dockerhub_image: expected a text"):
                read_tasks(tmp_path)

    def test_both_kinds_in_a_directory(self, tmp_path):
        shutil.copytree(DATA / "local", tmp_path / "local")
        shutil.copy(DATA / "smith.jsonl", tmp_path)
        with pytest.raises(BadInputError, match="found both: name one of them"):
            read_tasks(tmp_path)


class TestWrongDirectories:
    @pytest.fixture
    def folder(self, tmp_path):
        return Path(shutil.copytree(DATA / "local" / "shop-total", tmp_path / "shop-total"))

    def refuses(self, folder: Path, sentence: str) -> None:
        with pytest.raises(BadInputError) as raised:
            read_tasks(folder)
        assert sentence in str(raised.value)
        assert folder.name in str(raised.value)

    @pytest.mark.parametrize(
        ("old", "new", "sentence"),
        [
            ('license = "', 'licence = "', "licence: expected one of issue, fail_to_pass"),
            ("issue =", "issue", "expected valid TOML"),
            ('split = "train"', 'split = "test"', "split: expected train or heldout, found test"),
            *(
                ("test_seconds = 10", f"test_seconds = {wrong}", "expected a number of seconds")
                for wrong in ("true", "0", "-1", "inf", "nan", "1e300")
            ),
            ("::test_total", "", "tests/FILE.py::NAME"),
            ("tests/test_cart.py::test_label", "tests/other.py::x", "found tests/other.py::x"),
            ('["tests/test_cart.py::test_total"]', "[]", "expected at least one"),
        ],
    )
    def test_task_file(self, folder, old, new, sentence):
        file = folder / "task.toml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        self.refuses(folder, sentence)

    def test_tree(self, folder):
        (folder / "tree" / "link").symlink_to("/etc/passwd")
        self.refuses(folder, "expected a regular file, found a link")
        (folder / "tree" / "link").unlink()
        (folder / "tree" / "outside").symlink_to("/etc", target_is_directory=True)
        self.refuses(folder, "expected a regular file, found a link")
        (folder / "tree" / "outside").unlink()
        (folder / "tree" / ".git").mkdir()
        (folder / "tree" / ".git" / "HEAD").write_text("x")
        self.refuses(folder, "expected no history")
        shutil.move(folder / "tree" / ".git", folder / "tree" / "shop" / ".git")
        self.refuses(folder, "expected no history, found shop/.git/HEAD")
        shutil.rmtree(folder / "tree")
        self.refuses(folder, "expected tree/ (local format) or instruction.md (Harbor)")
        (folder / "tree").mkdir()
        self.refuses(folder, "expected Python modules")

    def test_what_is_no_text_stays_as_it_is(self, folder):
        data = bytes(range(256))
        (folder / "tree" / "logo.png").write_bytes(data)
        (folder / "tree" / "shop" / "__pycache__").mkdir()
        (folder / "tree" / "shop" / "__pycache__" / "cart.pyc").write_bytes(b"fixed")
        (task,) = read_tasks(folder)
        assert task.tree["logo.png"].encode("utf-8", "surrogateescape") == data
        assert set(task.tree) == {
            "logo.png",
            *(f"shop/{n}.py" for n in ("__init__", "cart", "text")),
        }
        (folder / "tests" / "test_cart.py").write_bytes(b"\xff")
        self.refuses(folder, "expected UTF-8")

    def test_fix(self, folder):
        text = (folder / "fix.patch").read_text()
        (folder / "fix.patch").write_text(text.replace("-    return price", "-    return 1"))
        self.refuses(folder, "fix.patch: expected a diff that fits tree/")
        (folder / "fix.patch").unlink()
        (task,) = read_tasks(folder)
        assert task.fix == {}

    def test_harbor(self, tmp_path):
        folder = tmp_path / "count-lines"
        shutil.copytree(DATA / "harbor" / "terminal_bench" / "count-lines", folder)
        for text in ("{", "[" * 100_000):
            (folder / "tests" / "config.json").write_text(text)
            self.refuses(folder, "config.json: expected JSON")
        (folder / "tests" / "test.sh").unlink()
        self.refuses(folder, "expected tests/test.sh")
        (folder / "environment" / "Dockerfile").unlink()
        self.refuses(folder, "expected docker_image, or environment/Dockerfile")
        (folder / "task.toml").write_text("environment = 3\n")
        self.refuses(folder, "environment: expected a JSON object, found 3")
        for text in (f"a = {'[' * 100_000}", f"a = {'1' * 5000}"):
            (folder / "task.toml").write_text(text)
            self.refuses(folder, "task.toml: expected valid TOML")
        (folder / "task.toml").unlink()
        os.mkfifo(folder / "task.toml")
        self.refuses(folder, "task.toml: expected a regular file")
        (folder / "task.toml").unlink()
        (folder / "task.toml").symlink_to("nothing")
        self.refuses(folder, "task.toml: expected a regular file")

    @pytest.mark.parametrize(
        ("verifier", "environment", "may"),
        [
            ("", "", True),
            ('network_mode = "public"', "", True),
            ('network_mode = "no-network"', "", False),
            ("", 'network_mode = "no-network"', False),
            ("", "allow_internet = false", False),
            ('network_mode = "allowlist"', 'network_mode = "no-network"', True),
        ],
    )
    def test_whether_a_verifier_of_harbor_may_use_the_network(
        self, verifier, environment, may, tmp_path
    ):
        folder = self.harbor(tmp_path, f"[verifier]\n{verifier}\n[environment]\n{environment}\n")
        (task,) = read_tasks(folder)
        assert task.checkout
        assert task.checkout.may_use_network == may

    def test_what_the_environment_of_a_verifier_of_harbor_has(self, tmp_path):
        folder = self.harbor(tmp_path, "[verifier.env]\nMode = \"it's\"\nN = '1'\n")
        (task,) = read_tasks(folder)
        assert task.checkout
        command = task.checkout.test_command.replace("bash /tests/test.sh", 'echo "$Mode $N"')
        assert subprocess.check_output(["bash", "-c", command], text=True) == "it's 1\n"
        for env in ("KEY = '${OPENAI_API_KEY}'", "N = 1", "'a b' = 'c'"):
            (folder / "task.toml").write_text(f"[verifier.env]\n{env}\n")
            self.refuses(folder, "[verifier] env: expected variables and their texts")

    def harbor(self, tmp_path: Path, task_file: str) -> Path:
        folder = tmp_path / "count-lines"
        shutil.copytree(DATA / "harbor" / "terminal_bench" / "count-lines", folder)
        (folder / "task.toml").write_text(task_file)
        return folder
