"""The adversarial repository: every class is found by name, and after the scrub none is left."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sampler_fleet.episodes.scrub.audit import Audit
from sampler_fleet.episodes.scrub.clean import scrub
from sampler_fleet.episodes.scrub.findings import Refused, Report, Target
from sampler_fleet.episodes.scrub.gold import Scanner, distinctive
from sampler_fleet.episodes.scrub.policy import CLASSES
from sampler_fleet.episodes.scrub.repository import NEW, OLD, Repository
from sampler_fleet.episodes.scrub.surroundings import environment_leaks, network_leaks
from tests.sampler_fleet.episodes.scrub.adversarial import (
    CHANGELOG,
    FIXED,
    HONEST,
    INSTANCE,
    PATCH,
    TRACKED,
    UNTRACKED,
    Adversary,
    build,
    git,
    write,
    write_tree,
    zipped,
)

# Classes with tests of their own below: a tree can't show them beside the others.
ALONE = {"git-damaged", "applied-fix", "environment", "network"}


@pytest.fixture(scope="module")
def adversary(tmp_path_factory: pytest.TempPathFactory) -> Adversary:
    return build(tmp_path_factory.mktemp("before"))


@pytest.fixture(scope="module")
def before(adversary: Adversary) -> Report:
    return Audit(adversary.target).run()


@pytest.fixture(scope="module")
def scrubbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Adversary, Report]]:
    adversary = build(tmp_path_factory.mktemp("after"))
    yield adversary, scrub(adversary.target)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An honest tree without a repository."""
    root = tmp_path / "tree"
    root.mkdir()
    write_tree(root)
    return root


def target(tree: Path, **changes: object) -> Target:
    return replace(Target(str(tree), PATCH), **changes)


def kinds(report: Report) -> set[tuple[str, str]]:
    return {(leak.kind, leak.path) for leak in report.leaks}


# --- the audit before --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(CLASSES.keys() - ALONE))
def test_every_class_is_found_by_name(adversary: Adversary, before: Report, kind: str):
    planted = {path for planted_kind, path in adversary.planted if planted_kind == kind}
    assert planted, "nothing planted for this class"
    assert planted <= {leak.path for leak in before.leaks if leak.kind == kind}


def test_archives_are_searched_to_their_depths(before: Report):
    assert {
        leak.path[-5:]: leak.member for leak in before.leaks if leak.kind == "gold-archive"
    } == {
        "a.bin": "reading",
        "b.bin": "bz2",
        "c.bin": "xz",
        "d.bin": "gz",
        "e.bin": "code!inner!gz",
        "f.bin": "object",
        "g.bin": "p!object-0",
    }


def test_an_audit_changes_nothing(adversary: Adversary):
    def state() -> list[tuple[str, int, int]]:
        paths = sorted(adversary.root.parent.rglob("*"))
        return [(str(p), p.lstat().st_mtime_ns, p.lstat().st_size) for p in paths]

    there = state()
    Audit(adversary.target).run()
    assert state() == there


def test_the_audit_says_what_it_looked_at(before: Report):
    assert all(before.looked_at.values()), before.looked_at


def test_without_its_needles_the_audit_would_find_less(adversary: Adversary):
    """Negative control: another patch's lines aren't there."""
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1,0 +1,1 @@\n+nothing_of_the(kind, whatsoever)\n"
    found = Counter(leak.kind for leak in Audit(replace(adversary.target, patch=patch)).run().leaks)
    assert not {"gold-text", "gold-archive", "gold-object", "gold-changelog"} & found.keys()


# --- the scrub ---------------------------------------------------------------------------------


def test_nothing_is_left(scrubbed: tuple[Adversary, Report]):
    adversary, report = scrubbed
    assert report.leaks == []
    assert Audit(adversary.target).run().leaks == []
    done = {(leak.kind, leak.path) for leak in report.removed}
    assert set(adversary.planted) <= done | {("telling-times", "CHANGELOG.md")}


def test_an_independent_look_finds_nothing(scrubbed: tuple[Adversary, Report]):
    """By other means than the audit's: grep, git and the file system."""
    adversary, report = scrubbed
    for place in (adversary.root, adversary.around):
        hits = subprocess.run(["grep", "-rlaE", "calibrate_offset|4711|calibrated", str(place)],
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert hits.stdout == ""
        assert not [path for path in place.rglob("*.git") if path != adversary.root / ".git"]
    root = adversary.root
    assert git(root, "rev-list", "--all", "--count") == "1"
    assert git(root, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(root, "fsck", "--unreachable", "--no-reflogs", "--no-progress") == ""
    assert git(root, "rev-parse", "HEAD") == report.commit
    everything = git(root, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    reachable = git(root, "rev-list", "--objects", "HEAD")
    assert set(everything.split()) == {line.split()[0] for line in reachable.splitlines()}
    assert sorted(os.listdir(root / ".git")) == ["HEAD", "config", "index", "objects", "refs"]


def test_what_the_task_needs_is_kept(scrubbed: tuple[Adversary, Report]):
    root = scrubbed[0].root
    for path, data in {**HONEST, **UNTRACKED}.items():
        assert (root / path).read_bytes() == data, path
    assert (root / "CHANGELOG.md").read_text() == CHANGELOG
    assert (root / "tests/data/sample.zip").read_bytes() == zipped(a=b"honest")
    assert stat.S_IMODE((root / "run.sh").stat().st_mode) == 0o755
    assert os.readlink(root / "docs/latest") == "../gauge"
    assert os.readlink(root / "env/lib64") == "lib"
    assert os.readlink(root / "system") == "/usr/bin/env"
    assert (root / "vendored/library/code.py").read_text() == "x = 1\n"
    tracked = git(root, "-c", "core.quotePath=false", "ls-files").splitlines()
    assert tracked == sorted([*TRACKED, ".gitmodules", "vendored/library/code.py"])
    assert git(root, "ls-files", "--stage", "run.sh").startswith("100755")
    assert git(root, "ls-files", "--stage", "docs/latest").startswith("120000")
    status = git(root, "status", "--porcelain", "--untracked-files=no")
    assert status == ""
    assert len({os.lstat(root / path).st_mtime for path in tracked}) == 1


def test_honest_tests_still_run(scrubbed: tuple[Adversary, Report]):
    command = [sys.executable, "-B", "-m", "unittest", "tests/test_reading.py"]
    run = subprocess.run(command, cwd=scrubbed[0].root, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr


def test_nothing_outside_is_touched(scrubbed: tuple[Adversary, Report]):
    elsewhere = scrubbed[0].elsewhere
    assert (elsewhere / "upstream/reading.py").read_text() == FIXED
    assert (elsewhere / "units.py").read_bytes() == HONEST["gauge/units.py"]
    assert (elsewhere / "units.py").stat().st_nlink == 1
    assert sorted(os.listdir(elsewhere)) == ["units.py", "upstream"]
    assert sorted(os.listdir(elsewhere.parent)) == ["around", "elsewhere", "tree"]


def test_scrubbing_again_changes_nothing(scrubbed: tuple[Adversary, Report]):
    adversary, report = scrubbed
    again = scrub(adversary.target)
    assert again.commit == report.commit
    assert again.removed == again.leaks == []


def test_the_same_tree_gives_the_same_commit(tree: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(tree, other, symlinks=True)
    os.utime(other / "run.sh", (1, 1))
    git(other, "init", "-q")
    git(other, "add", ".")
    git(other, "commit", "-qm", "Whoever", "--date=2001-01-01T00:00:00")
    (tree / "env").rename(tree / "x")  # what is ignored, or not there, in one of them
    shutil.rmtree(tree / "x")
    shutil.rmtree(tree / "node_modules")
    git(other, "rm", "-rqf", "--cached", "env", "node_modules")
    git(other, "commit", "-qm", "Without them")
    git(other, "add", "-f", "tests/data/sample.log")
    git(other, "commit", "-qm", "With it")
    (tree / ".gitignore").chmod(0o600)
    git(tree, "init", "-q")
    git(tree, "add", "-f", "--", *TRACKED)
    git(tree, "commit", "-qm", "Base")
    first, second = scrub(target(tree)), scrub(target(other))
    assert first.clean and second.clean
    assert first.commit == second.commit == git(tree, "rev-parse", "HEAD")
    write(tree / "gauge/units.py", "def scale(value):\n    return 11 * value\n")
    assert scrub(target(tree)).commit != first.commit


def test_a_tree_without_a_repository_gets_one_of_what_is_not_ignored(tree: Path):
    report = scrub(target(tree))
    assert report.clean
    tracked = git(tree, "ls-files").splitlines()
    assert "gauge/units.py" in tracked and "local.cfg" not in tracked


def test_a_linked_working_tree_is_cleaned_with_its_repository(tmp_path: Path, tree: Path):
    main = tmp_path / "main"
    tree.rename(main)
    git(main, "init", "-q")
    git(main, "add", ".")
    git(main, "commit", "-qm", "Base")
    git(main, "worktree", "add", "-q", str(tree))
    with pytest.raises(Refused, match="a part at"):
        scrub(target(tree))
    assert (tree / ".git").is_file()
    assert ("git-worktrees", ".git") in kinds(Audit(target(tree)).run())
    assert scrub(target(tree, extra_roots=(str(main),))).clean
    assert (tree / ".git").is_dir() and not (main / ".git").exists()


# --- interrupted -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "moment"),
    [
        *(("unlink", 1), ("unlink", 30), ("unlink", 200), ("rmdir", 10)),
        *(("replace", 1), ("replace", 2), ("utime", 2), ("utime", 9)),
        *(("rename", 1), ("rename", 2), ("rename", 3), ("rename", 4)),
    ],
)
def test_an_interrupted_scrub_is_finished_by_the_next(
    tmp_path: Path,
    change: str,
    moment: int,
    monkeypatch: pytest.MonkeyPatch,
    scrubbed: tuple[Adversary, Report],
):
    """Killed before its nth removal, replacement, setting of times, or renaming."""
    adversary = build(tmp_path)
    real, left = getattr(os, change), moment

    class Killed(BaseException):
        pass

    def counted(*arguments: object, **options: object) -> object:
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        return real(*arguments, **options)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(os, change, counted)
        scrub(adversary.target)
    report = scrub(adversary.target)
    assert report.clean and report.commit == scrubbed[1].commit
    assert not list(adversary.root.rglob("*scrub-*"))
    assert len({os.lstat(adversary.root / path).st_mtime_ns for path in TRACKED}) == 1
    for path, data in {**HONEST, **UNTRACKED}.items():
        assert (adversary.root / path).read_bytes() == data, path


@pytest.mark.parametrize("whole", [True, False])
def test_the_old_repository_is_back_if_the_new_one_is_not_there(tree: Path, whole: bool):
    git(tree, "init", "-q")
    git(tree, "add", "-f", *TRACKED)
    git(tree, "commit", "-qm", "Base")
    tracked = git(tree, "ls-files")
    (tree / ".git").rename(tree / OLD)
    if whole:
        shutil.copytree(tree / OLD, tree / NEW)
    Repository.recover(str(tree))
    assert git(tree, "ls-files") == tracked
    assert not (tree / OLD).exists() and not (tree / NEW).exists()


# --- classes alone, and what is refused --------------------------------------------------------


def test_a_damaged_repository_is_a_leak_and_is_replaced(tree: Path):
    git(tree, "init", "-q")
    git(tree, "add", "-f", *TRACKED)
    git(tree, "commit", "-qm", "Base")
    blob = git(tree, "rev-parse", "HEAD:gauge/units.py")
    (tree / f".git/objects/{blob[:2]}/{blob[2:]}").unlink()
    assert "git-damaged" in {leak.kind for leak in Audit(target(tree)).run().leaks}
    assert scrub(target(tree)).clean


def test_a_tree_with_the_fix_is_refused(tree: Path):
    write(tree / "gauge/reading.py", FIXED)
    assert ("applied-fix", "gauge/reading.py") in kinds(Audit(target(tree)).run())
    with pytest.raises(Refused, match="without the gold patch"):
        scrub(target(tree))
    assert not (tree / ".git").exists()


def test_variables_that_tell_are_named():
    scanner = Scanner(distinctive(PATCH, []).needles, ())
    environment = {
        "HINT": FIXED,
        "ID": INSTANCE.upper(),
        "https_proxy": "http://proxy:3128",
        "PATH": "/usr/bin",
        "HOME": "/root",
    }
    found = list(environment_leaks(environment, scanner, (INSTANCE,)))
    assert [leak.path for leak in found] == ["HINT", "ID", "https_proxy"]
    assert all(leak.kind == "environment" for leak in found)


def test_a_scrub_says_which_variables_to_unset(tree: Path):
    report = scrub(target(tree, words=(INSTANCE,)), environment={"ID": INSTANCE, "LANG": "C"})
    assert report.unset == ["ID"] and report.clean


def test_a_network_that_answers_is_a_leak():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        found = list(network_leaks([address], ["localhost"]))
        assert [leak.path for leak in found] == [f"127.0.0.1:{address[1]}", "localhost"]
    assert list(network_leaks([address], ["no-such-host.invalid"])) == []


def test_names_that_cannot_change_are_left_and_said(tmp_path: Path):
    root = tmp_path / INSTANCE
    root.mkdir()
    write_tree(root)
    write(root / f"tests/{INSTANCE}.txt", "tracked")
    report = scrub(target(root, words=(INSTANCE,)))
    assert kinds(report) == {("telling-name", "."), ("telling-name", f"tests/{INSTANCE}.txt")}
    assert (root / f"tests/{INSTANCE}.txt").exists() and (root / "local.cfg").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_repository_belongs_to_the_trees_owner(tree: Path):
    os.chown(tree, 12345, 12345)
    scrub(target(tree))
    made = [tree / ".git", *(tree / ".git").rglob("*")]
    assert {path.lstat().st_uid for path in made} == {12345}


def test_a_directory_with_the_tree_in_it_is_never_removed(tmp_path: Path):
    root = tmp_path / f"{INSTANCE}/__pycache__/tree"
    root.mkdir(parents=True)
    write_tree(root)
    write(tmp_path / INSTANCE / "run.log", "x")
    report = scrub(target(root, extra_roots=(str(tmp_path),), words=(INSTANCE,)))
    assert kinds(report) == {("telling-name", str(tmp_path / INSTANCE))}
    assert (root / "gauge/reading.py").exists()
    assert not (tmp_path / INSTANCE / "run.log").exists()


def test_names_with_marks_of_ours_are_no_archives(tree: Path):
    honest = write(tree / "notes", "honest")
    write(tree / "notes!a", FIXED)
    write(tree / "notes!b.zip", zipped(x=FIXED.encode()))
    git(tree, "init", "-q")
    git(tree, "add", "-f", *TRACKED)
    git(tree, "commit", "-qm", "Base")
    assert scrub(target(tree)).clean
    assert honest.exists() and not (tree / "notes!a").exists()


def test_tracked_files_behind_a_link_are_not_the_trees(tree: Path, tmp_path: Path):
    git(tree, "init", "-q")
    git(tree, "add", "-f", *TRACKED)
    git(tree, "commit", "-qm", "Base")
    (tree / "tests").rename(tmp_path / "tests")
    (tree / "tests").symlink_to(tmp_path / "tests")
    assert scrub(target(tree)).clean
    assert (tmp_path / "tests/data/sample.log").read_bytes() == HONEST["tests/data/sample.log"]
    assert not [path for path in git(tree, "ls-files").splitlines() if path.startswith("tests")]


def test_other_packages_may_hold_a_line_by_chance(tree: Path):
    site = tree / "env/lib/python3.11/site-packages/other"
    git(tree, "init", "-q")
    git(tree, "add", "-f", *TRACKED)
    git(tree, "commit", "-qm", "Base")
    write(site / "chance.py", FIXED.splitlines()[-1])
    write(site / "copied.py", FIXED)
    report = scrub(target(tree))
    assert report.clean
    assert [leak.path for leak in report.doubtful] == [str((site / "chance.py").relative_to(tree))]
    assert (site / "chance.py").exists() and not (site / "copied.py").exists()


def test_tracked_files_that_tell_are_removed_and_no_others(tree: Path):
    write(tree / "docs/fix.patch", PATCH)
    write(tree / "docs/fix.zip", zipped(a=FIXED.encode()))
    write(tree / "docs/mentions.md", f"as {INSTANCE} says")
    git(tree, "init", "-q")
    git(tree, "add", "-f", "docs", *TRACKED)
    git(tree, "commit", "-qm", "Base")
    report = scrub(target(tree, words=(INSTANCE,)))
    assert report.clean
    assert not (tree / "docs/fix.patch").exists() and not (tree / "docs/fix.zip").exists()
    assert [leak.path for leak in report.doubtful] == ["docs/mentions.md"]
    assert "docs/mentions.md" in git(tree, "ls-files")


def test_a_link_is_removed_and_not_what_it_leads_to(tree: Path, tmp_path: Path):
    treasure = write(tmp_path / "outside/.pytest_cache/keep", "x")
    (tree / ".pytest_cache").symlink_to(treasure.parent)
    (tree / "build").rename(tree / "old-build")
    (tree / "build").symlink_to(tmp_path / "outside")
    git(tree, "init", "-q")
    git(tree, "add", "-f", "gauge")
    git(tree, "commit", "-qm", "Base")
    assert scrub(target(tree)).clean
    assert treasure.read_text() == "x"
    assert not os.path.lexists(tree / ".pytest_cache") and not os.path.lexists(tree / "build")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"patch": "hello"}, "a unified diff"),
        ({"patch": "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n+y\n"}, "can't be proved"),
        ({"patch": PATCH.replace("b/gauge", "b/../x")}, "below the tree"),
        ({"root": "/no/such/place"}, "a directory"),
        ({"extra_roots": ("/no/such/place",)}, "a directory"),
        ({"extra_roots": ("/",)}, "below /"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(tree: Path, changes: dict[str, str], why: str):
    write(tree / ".pytest_cache/x", "x")
    with pytest.raises(Refused, match=why):
        scrub(target(tree, **changes))
    assert (tree / ".pytest_cache/x").exists() and not (tree / ".git").exists()


def test_the_document_has_the_policy():
    text = (Path(__file__).parents[4] / "docs" / "scrub.md").read_text()
    for kind, leak in CLASSES.items():
        assert f"| `{kind}` | {leak.reason} | {leak.found} | {leak.remedy} |\n" in text
    assert text.count("\n| `") == len(CLASSES)
