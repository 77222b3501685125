"""Diffs of data sets: what git writes is applied exactly, turned around, or refused."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import BadInputError
from sampler_fleet.episodes.tasks.sources.diff import apply_diff, reverse_diff

LINES = st.lists(st.sampled_from(["", "a", "b", "-- c", "++ d", "\\ e", "@@ f", "x\x0cy\r"]))
TEXTS = st.builds(lambda lines, end: "\n".join(lines) + end, LINES, st.sampled_from(["", "\n"]))


def git_diff(tmp, before: dict[str, str], after: dict[str, str], *options: str) -> str:
    """What git says of two trees."""
    for name, tree in (("a", before), ("b", after)):
        shutil.rmtree(tmp / name, ignore_errors=True)
        (tmp / name).mkdir(parents=True)
        for path, text in tree.items():
            file = tmp / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode())
    command = ["git", "diff", "--no-index", "--no-color", "--no-prefix", *options, "a", "b"]
    run = subprocess.run(command, cwd=tmp, capture_output=True, check=False)
    assert run.returncode < 2, run.stderr
    return run.stdout.decode()


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    if shutil.which("git") is None:
        pytest.skip("no git")
    return tmp_path_factory.mktemp("diff")


@given(TEXTS, TEXTS, st.integers(0, 3))
def test_what_git_writes_is_applied_and_undone(tmp, before, after, context):
    text = git_diff(tmp, {"f": before}, {"f": after}, f"-U{context}")
    if before == after:
        assert text == ""
        return
    assert apply_diff(text, {"f": before}) == ({"f": after}, ())
    undo = reverse_diff(text)
    assert apply_diff(undo, {"f": after}) == ({"f": before}, ())
    assert reverse_diff(undo).split("\n")[:3] == text.split("\n")[:3]


def test_git_understands_what_is_turned_around(tmp):
    numbers = "".join(f"{n}\n" for n in range(40))
    before = {"f": numbers, "gone": "x\n", "old": "y\n" * 20}
    changed = numbers.replace("7\n", "7\n8\n").replace("30\n", "")
    after = {"f": changed, "new": "z", "other": "y\n" * 20}
    root = tmp / "repository"
    root.mkdir()

    def git(*arguments: str, stdin: str = "") -> str:
        command = ["git", *arguments]
        run = subprocess.run(command, cwd=root, input=stdin, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def fill(tree: dict[str, str]) -> None:
        for path in root.glob("[a-z]*"):
            path.unlink()
        for path, text in tree.items():
            (root / path).write_text(text)
        git("add", "-A")

    git("init", "-q")
    fill(before)
    start = git("write-tree").strip()
    fill(after)
    text = git("diff", "--cached", "--find-renames", start)
    assert "rename from old\n" in text
    changed, deleted = apply_diff(text, before)
    assert (changed, set(deleted)) == (after, {"gone", "old"})
    git("apply", "--index", "-", stdin=reverse_diff(text))
    assert git("write-tree").strip() == start


HEAD = "--- a/f\n+++ b/f\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "expected changes of files"),
        ("From: somebody\n", "expected changes of files"),
        ("--- a/other\n+++ b/other\n@@ -1 +1 @@\n-1\n+2\n", "expected a file other"),
        (HEAD + "@@ -1 +1 @@\n-2\n+3\n", "at f:1, found '1"),
        (HEAD + "@@ -2 +2 @@\n-1\n+3\n", "expected '1"),
        (HEAD + "@@ -9,0 +9 @@\n+3\n", "within the file"),
        (HEAD + "@@ -1 +1 @@\n-1\n", "expected the rest of"),
        (HEAD + "@@ -1 +1 @@\n\\ No newline at end of file\n", "a line before it"),
        (HEAD + "@@ -1 +1 @@\n-1\n*3\n", "a line with"),
        ("--- f\n+++ f\n@@ -1 +1 @@\n-1\n+2\n", "a path that starts with a/"),
        ("--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+2\n", "expected no file f yet"),
        ("diff --git a/f b/f\nGIT binary patch\nliteral 1\n", "text changes"),
        ('diff --git "a/\\303" "b/\\303"\n', "plain file names"),
    ],
)
def test_what_does_not_fit_is_refused(text, sentence):
    with pytest.raises(BadInputError, match="diff: ") as raised:
        apply_diff(text, {"f": "1\n2\n"})
    assert sentence in str(raised.value)


def test_empty_files_and_modes():
    text = (
        "diff --git a/new b/new\nnew file mode 100644\nindex 0000000..e69de29\n"
        "diff --git a/f b/f\ndeleted file mode 100644\nindex e69de29..0000000\n"
    )
    assert apply_diff(text, {"f": ""}) == ({"new": ""}, ("f",))
    assert apply_diff(reverse_diff(text), {"new": ""}) == ({"f": ""}, ("new",))
