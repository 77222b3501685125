"""What counts as a change, and which changes are graded."""

from __future__ import annotations

import pytest

from sampler_fleet.episodes.base import Snapshot
from sampler_fleet.episodes.patch import Patch, apply, capture, diff, screen

START = {"README.md": b"hi\n", "pkg/a.py": b"x = 1\n", "pkg/b.py": b"y = 2\n", "tests/t.py": b""}


def snapshot(files, special=(), complete=True):
    return Snapshot(files=files, special=tuple(special), complete=complete)


def changes(*paths, data=b"z = 3\n"):
    return Patch(changed=dict.fromkeys(paths, data))


class TestCapture:
    def test_nothing(self):
        patch = capture(START, snapshot(dict(START)))
        assert not patch
        assert diff(START, patch) == ""

    def test_every_kind(self):
        end = {"README.md": b"hi\n", "pkg/a.py": b"x = 2\n", "new.py": b"", "tests/t.py": b""}
        patch = capture(START, snapshot(end, special=["link"]))
        assert patch.changed == {"new.py": b"", "pkg/a.py": b"x = 2\n"}
        assert patch.deleted == ("pkg/b.py",)
        assert patch.special == ("link",)
        assert patch
        assert apply(START, patch) == end

    def test_file_that_became_a_link(self):
        end = {path: data for path, data in START.items() if path != "pkg/a.py"}
        patch = capture(START, snapshot(end, special=["pkg/a.py"]))
        assert "no regular file" in screen(patch, START).refused

    def test_oversized_tree(self):
        patch = capture(START, snapshot(dict(START), complete=False))
        assert patch
        assert "larger than allowed" in screen(patch, START).refused

    def test_diff_is_for_people(self):
        end = {**START, "pkg/a.py": b"x = 2\n", "blob": b"\0\1", "new.py": b"n = 1\n"}
        del end["pkg/b.py"]
        text = diff(START, capture(START, snapshot(end)))
        assert "--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2" in text
        assert "--- /dev/null\n+++ b/new.py" in text
        assert "+++ /dev/null" in text
        assert "binary file 'blob' differs" in text


class TestScreen:
    @pytest.mark.parametrize("path", ["pkg/a.py", "new/deep/x.py", "notes.txt", "testing.py"])
    def test_source_is_kept(self, path):
        screened = screen(changes(path), START)
        assert not screened.refused
        assert list(screened.patch.changed) == [path]
        assert not screened.dropped

    @pytest.mark.parametrize(
        "path",
        [
            *("../x.py", "/etc/x", "a/../../x", "a//x", "./x", "", "a/", "pkg/..", "..", "a/./b"),
            *(".git/config", "sub/.git/hooks/x", ".GIT/x", "a\nb", "a\0b", "a\\b", "x\udcff"),
            "x" * 2000,
        ],
    )
    def test_hostile_paths_are_refused(self, path):
        assert screen(changes("pkg/a.py", path), START).refused
        assert screen(Patch(changed={}, deleted=(path,)), START).refused

    @pytest.mark.parametrize(
        "path",
        [
            *("tests/test_x.py", "tests/t.py", "pkg/tests/data.json", "test_x.py", "pkg/x_test.py"),
            *("conftest.py", "pkg/conftest.py", "pytest.ini", "pyproject.toml", "setup.cfg"),
            *("tox.ini", "x.pth", "sitecustomize.py", "usercustomize.py", "a.pyc", "setup.py"),
            *("pkg/__pycache__/a.cpython-311.pyc", "evil.dist-info/entry_points.txt"),
            *("Tests/x.py", "CONFTEST.PY"),
        ],
    )
    def test_what_steers_tests_is_dropped(self, path):
        for patch in (changes("pkg/a.py", path), Patch(changed={}, deleted=(path,))):
            screened = screen(patch, START)
            assert not screened.refused
            assert screened.dropped == (path,)
            assert path not in screened.patch.changed
            assert not screened.patch.deleted
        assert not screen(changes(path), START).patch

    def test_protected_paths_are_dropped(self):
        screened = screen(
            changes("pkg/a.py", "checks/hidden.py"), START, protected=["checks/hidden.py"]
        )
        assert screened.dropped == ("checks/hidden.py",)

    def test_sizes(self):
        assert screen(changes("a.bin", data=bytes(65 << 10)), START).refused
        assert not screen(changes("a.bin", data=bytes(60 << 10)), START).refused
        assert screen(changes("a.py", data=b"#" * (1 << 20) + b"#"), START).refused
        assert screen(changes(*(f"{n}.py" for n in range(201))), START).refused
        assert screen(changes(*(f"{n}.py" for n in range(9)), data=b"#" * (1 << 19)), START).refused

    def test_what_is_dropped_has_no_size(self):
        """A fix after which Python or a test run left its byte code is a fix."""
        code = {"pkg/__pycache__/a.cpython-311.pyc": bytes(163 << 10)}
        many = {f"pkg/__pycache__/{n}.cpython-311.pyc": bytes(40 << 10) for n in range(201)}
        for left in (code, many):
            screened = screen(Patch(changed={"pkg/a.py": b"x = 2\n", **left}), START)
            assert not screened.refused
            assert screened.patch.changed == {"pkg/a.py": b"x = 2\n"}
        deleted = Patch(changed={"pkg/a.py": b"x = 2\n"}, deleted=tuple(many))
        assert not screen(deleted, START).refused

    @pytest.mark.parametrize("path", ["tests/../../x.pyc", "tests/.git/x.pyc", "tests/a\nb.pyc"])
    def test_what_is_dropped_has_a_name(self, path):
        assert screen(changes("pkg/a.py", path), START).refused

    def test_file_and_folder_of_one_name(self):
        assert "below another file" in screen(changes("pkg/a.py/x"), START).refused
        assert "below another file" in screen(changes("pkg"), START).refused
        moved = Patch(changed={"pkg/a.py/x": b""}, deleted=("pkg/a.py",))
        assert not screen(moved, START).refused
