"""The audit: every leak that is left in a tree and its extra roots, and what was looked at.

Owns the walk and the judgement of each file, link and directory in it; `repository.py` judges the
git repository, `packages.py` copies of the project, `policy.py` says what the classes are. It only
reads, and follows no links but to look at a file behind one. Runs inside containers too: standard
library of Python 3.9.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from fnmatch import fnmatchcase

from sampler_fleet.episodes.scrub.archives import Budget, Unreadable, expand, kind_of
from sampler_fleet.episodes.scrub.findings import Leak, Refused, Report, Target
from sampler_fleet.episodes.scrub.gold import (
    Needle,
    Scanner,
    already_applied,
    distinctive,
    is_changelog,
    make_needle,
    parse_patch,
)
from sampler_fleet.episodes.scrub.packages import (
    find_project,
    installed_copies,
    is_distribution,
    other_copy,
    stale_egg_info,
)
from sampler_fleet.episodes.scrub.policy import (
    CARRIERS,
    COMPILED,
    ENVIRONMENT_CACHES,
    ENVIRONMENT_MARKS,
    ENVIRONMENTS,
    PATTERNS,
    SYSTEM_ROOTS,
)
from sampler_fleet.episodes.scrub.repository import NEW, OLD, Repository, find_repository
from sampler_fleet.episodes.scrub.surroundings import environment_leaks, network_leaks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BLOCK = 64 << 20  # a file is read in pieces of this size
_OVERLAP = 64 << 10
_WORD_IN_TEXT = 12  # shorter words are looked for in names only
_STRONG = 2  # lines of the patch that a file of another package must hold to be taken for a copy
_NEWER_S = 1.0


class Audit:
    """One look at a target. `leaks` and `report` belong together: a scrub looks several times."""

    def __init__(self, target: Target) -> None:
        """Refused: there is nothing to look at, or nothing to look for."""
        self.target = target = _checked(target)
        self.repository = find_repository(target.root)
        self.tracked = self._find_tracked()
        self.changes = parse_patch(target.patch)
        if not self.changes:
            raise Refused("the gold patch", "a unified diff", "no file in it")
        for change in self.changes:
            if change.path.startswith("/") or ".." in change.path.split("/"):
                raise Refused("the gold patch", "paths below the tree", change.path)
        self.project = find_project(target.root, [c.path for c in self.changes])
        self.applied = [
            change.path
            for change in self.changes
            if not is_changelog(change.path) and already_applied(change, self._content(change.path))
        ]
        self.gold = distinctive(target.patch, self._base())
        if not (self.gold.needles or self.applied):
            raise Refused(
                "the gold patch",
                "at least one line that tells it from the tree",
                "none: its absence can't be proved",
            )
        told = [make_needle(word) for word in target.words if len(word) >= _WORD_IN_TEXT]
        needles = [*self.gold.needles, *filter(None, told)]
        self.scanner = Scanner(needles, self.gold.names)
        self._folders = {
            path[: match.start()] for path in self.tracked for match in re.finditer("/", path)
        }
        self._words = tuple(word.lower() for word in target.words)
        self._nodes: dict[tuple[int, int], list[str]] = {}  # tracked files with several names
        self.report = Report()

    def run(self, *, environment: Mapping[str, str] | None = None, network: bool = False) -> Report:
        """Looks at everything. The environment and the network only where they are the task's."""
        self.report = report = Report()
        names = ("files", "bytes", "links", "objects", "archives", "members", "distinctive_lines")
        report.looked_at = dict.fromkeys(names, 0)
        report.looked_at["distinctive_lines"] = len(self.gold.needles)
        self._nodes.clear()
        found = [Leak("applied-fix", path) for path in self.applied]
        if self.repository is not None:
            found += self.repository.leaks()
            scanner = Scanner(self.gold.needles, ())
            found += self.repository.scan(scanner, report.looked_at)
            if self.repository.git_dir != os.path.join(self.target.root, ".git"):
                found.append(Leak("git-worktrees", ".git", "it is elsewhere"))
        if any(word in os.path.basename(self.target.root).lower() for word in self._words):
            found.append(Leak("telling-name", ".", "the tree's own directory"))
        for root in (self.target.root, *self.target.extra_roots):
            outside = root != self.target.root
            found += self._folder(root, root, outside and _in_environment(root))
        found += self._hard_links()
        found += self._times()
        if environment is not None:
            found += environment_leaks(environment, self.scanner, self.target.words)
        if network:
            found += network_leaks()
        report.leaks = found
        return report

    # --- what is where -------------------------------------------------------------------------

    def _find_tracked(self) -> set[str]:
        if self.repository is not None:
            return self.repository.tracked()
        return unversioned_files(self.target.root)

    def _content(self, path: str) -> bytes | None:
        full = os.path.join(self.target.root, path)
        if os.path.islink(full) or not os.path.isfile(full):
            return None
        with open(full, "rb") as file:
            return file.read()

    def _base(self) -> Iterator[bytes]:
        """The tracked files that show what the base tree holds."""
        for path in sorted(self.tracked):
            carrier = is_changelog(path) or _any_match(os.path.basename(path), CARRIERS)
            if not carrier:
                data = self._content(path)
                if data is not None and not kind_of(data):
                    yield data

    def _stat(self, path: str) -> os.stat_result:
        return os.lstat(os.path.join(self.target.root, path))

    def shown(self, path: str) -> str:
        """A path as reports name it."""
        relative = os.path.relpath(path, self.target.root)
        return path if relative.startswith("..") else relative

    # --- the walk ------------------------------------------------------------------------------

    def _folder(self, root: str, folder: str, in_environment: bool) -> Iterator[Leak]:
        names = sorted(os.listdir(folder))
        in_environment = in_environment or any(name in names for name in ENVIRONMENT_MARKS)
        in_environment = in_environment or _any_match(os.path.basename(folder), ENVIRONMENTS)
        copies: set[str] = set()
        if _any_match(os.path.basename(folder), ("site-packages", "dist-packages", "node_modules")):
            for path, why in installed_copies(self.project, folder):
                copies.add(path)
                yield Leak("installed-copy", self.shown(path), why)
        for name in names:
            path = os.path.join(folder, name)
            if path in copies or (folder == self.target.root and name == ".git"):
                continue
            if root != self.target.root and _below(path, self.target.root):
                continue
            yield from self._entry(root, path, in_environment)

    def _entry(self, root: str, path: str, in_environment: bool) -> Iterator[Leak]:
        info = os.lstat(path)
        relative = os.path.relpath(path, root)
        shown = self.shown(path)
        tracked = root == self.target.root and relative in self.tracked
        name = os.path.basename(path)
        if not tracked and not self.holds_task(path):
            kind, why = self._by_name(relative, path, info, in_environment)
            if kind:
                yield Leak(kind, shown, why)
                return
        elif any(word in name.lower() for word in self._words):
            yield Leak("telling-name", shown, "the task needs it")
        if stat.S_ISLNK(info.st_mode):
            self.report.looked_at["links"] += 1
            yield from self._link(path, shown)
        elif stat.S_ISDIR(info.st_mode):
            if name == ".git":
                yield Leak("nested-repository", shown)
            else:
                yield from self._folder(root, path, in_environment)
        elif stat.S_ISREG(info.st_mode):
            if name == ".git":
                yield Leak("nested-repository", shown)
                return
            if tracked and info.st_nlink > 1:
                self._nodes.setdefault((info.st_dev, info.st_ino), []).append(relative)
            yield from self._file(path, shown, tracked, in_environment)

    def holds_task(self, path: str) -> bool:
        """Whether a path is a directory of tracked files, or one that the tree is in."""
        relative = os.path.relpath(path, self.target.root)
        return relative in self._folders or _below(self.target.root, path)

    def _by_name(
        self, relative: str, path: str, info: os.stat_result, in_environment: bool
    ) -> tuple[str, str]:
        """The class of an untracked path that its name alone gives away, and why."""
        name = os.path.basename(path)
        if any(word in name.lower() for word in self._words):
            return "telling-name", ""
        if is_distribution(self.project, name):
            return "distribution", ""
        if in_environment:
            if any(_matches(relative, pattern) for pattern in ENVIRONMENT_CACHES):
                return "tool-cache", ""
            return self._bytecode_of_touched(path)
        for kind, patterns in PATTERNS.items():
            if any(_matches(relative, pattern) for pattern in patterns):
                return kind, ""
        if name.endswith(".egg-info"):
            why = stale_egg_info(self.project, path)
            if why:
                return "egg-info", why
        if stat.S_ISDIR(info.st_mode) and {"HEAD", "objects", "refs"} <= set(os.listdir(path)):
            return "nested-repository", "bare"
        touched = other_copy(self.project, relative, path)
        return ("other-copy", f"of {touched}") if touched else ("", "")

    def _bytecode_of_touched(self, path: str) -> tuple[str, str]:
        name = os.path.basename(path)
        if not name.endswith((".pyc", ".pyo")):
            return "", ""
        folder = os.path.dirname(path)
        if os.path.basename(folder) == "__pycache__":
            folder = os.path.dirname(folder)
        source = f"{folder}/{name.split('.')[0]}.py"
        for imported, touched in self.project.modules:
            if source.endswith(f"/{imported}"):
                return "bytecode", f"of {touched}"
        return "", ""

    # --- files and links -----------------------------------------------------------------------

    def _file(self, path: str, shown: str, tracked: bool, in_environment: bool) -> Iterator[Leak]:
        self.report.looked_at["files"] += 1
        compiled = not tracked and _any_match(os.path.basename(path), COMPILED)
        needles: list[Needle] = []
        first = b""
        for block in _blocks(path):
            first = first or block
            self.report.looked_at["bytes"] += len(block)
            needles += self.scanner.lines(block)
            if compiled and not in_environment:
                names = self.scanner.names(block)
                if names:
                    kind = "bytecode" if shown.endswith((".pyc", ".pyo")) else "build-output"
                    yield Leak(kind, shown, f"names {names[0].decode()}")
                    return
        if tracked and needles and not set(needles) & set(self.gold.needles):
            self.report.doubtful.append(Leak("gold-text", shown, f"tracked: {needles[0].text}"))
        elif needles:
            kind = "gold-changelog" if tracked and is_changelog(shown) else "gold-text"
            yield from self._judge(Leak(kind, shown, needles[0].text), needles, in_environment)
            return
        kind = kind_of(first)
        if not tracked and kind in ("bundle", "pack"):
            yield Leak("git-bundle" if kind == "bundle" else "stray-pack", shown)
        elif not tracked and b"<testsuite" in first[:500]:
            yield Leak("test-report", shown)
        elif kind:
            yield from self._archive(path, shown, tracked, in_environment)

    def _archive(
        self, path: str, shown: str, tracked: bool, in_environment: bool
    ) -> Iterator[Leak]:
        self.report.looked_at["archives"] += 1
        try:
            with open(path, "rb") as file:
                data = file.read()
            for name, content in expand(data, Budget()):
                self.report.looked_at["members"] += 1
                self.report.looked_at["bytes"] += len(content)
                needles = self.scanner.lines(content)
                if needles:
                    leak = Leak("gold-archive", shown, needles[0].text, name)
                    yield from self._judge(leak, needles, in_environment)
                    return
                names = self.scanner.names(content) if _any_match(name, COMPILED) else []
                if names and not in_environment:
                    yield Leak("gold-archive", shown, f"names {names[0].decode()}", name)
                    return
        except Unreadable as error:
            leak = Leak("unread-archive", shown, str(error))
            if tracked or in_environment:
                self.report.doubtful.append(leak)
            else:
                yield leak

    def _judge(self, leak: Leak, needles: list[Needle], in_environment: bool) -> Iterator[Leak]:
        """Other packages may hold a line of the patch by chance, but not several."""
        distinct = len({needle.canonical for needle in needles})
        if in_environment and distinct < min(_STRONG, len(self.gold.needles)):
            self.report.doubtful.append(leak)
        else:
            yield leak

    def _link(self, path: str, shown: str) -> Iterator[Leak]:
        """A link out of the tree may lead to the system's files, and to harmless ones."""
        real = os.path.realpath(path)
        cleaned = (self.target.root, *self.target.extra_roots)
        if any(_below(real, root) for root in cleaned) or not os.path.exists(real):
            return
        if os.path.isfile(real):
            found = [needle for block in _blocks(real) for needle in self.scanner.lines(block)]
            if found or self._archive_leaks(real):
                yield Leak("outward-link", shown, f"to {real}, which holds the patch")
        elif not any(_below(real, root) for root in SYSTEM_ROOTS):
            yield Leak("outward-link", shown, f"to {real}")

    def _archive_leaks(self, path: str) -> bool:
        with open(path, "rb") as file:
            kind = kind_of(file.read(1024))
        return bool(kind) and any(True for _ in self._archive(path, path, False, False))

    def _hard_links(self) -> Iterator[Leak]:
        for paths in self._nodes.values():
            if self._stat(paths[0]).st_nlink > len(paths):
                yield from (Leak("hard-link", path) for path in paths)

    def _times(self) -> Iterator[Leak]:
        touched = {change.path for change in self.changes} & self.tracked
        others = [self._stat(path).st_mtime for path in self.tracked - touched]
        times = [self._stat(path).st_mtime for path in touched]
        if times and others and min(times) > max(others) + _NEWER_S:
            yield Leak("telling-times", sorted(touched)[0], "newer than all other tracked files")


def unversioned_files(root: str) -> set[str]:
    """What would be tracked in a tree without a repository: all that isn't ignored."""
    with tempfile.TemporaryDirectory() as place:
        probe = Repository(root, place)
        probe.git("init", "-q", "--template=")
        found = probe.unignored()
    return {path for path in found if path.split("/")[0] not in (NEW, OLD)}


def _checked(target: Target) -> Target:
    """The target with real, absolute paths."""
    roots = []
    for path in (target.root, *target.extra_roots):
        if not os.path.isdir(path):
            raise Refused(path, "a directory", "none")
        real = os.path.realpath(path)
        if real == "/":
            raise Refused(path, "a directory below /", "the whole system")
        roots.append(real)
    words = tuple(word for word in target.words if word)
    return Target(roots[0], target.patch, tuple(roots[1:]), words)


def _blocks(path: str) -> Iterator[bytes]:
    """A file in pieces that overlap, so that no line is cut in two."""
    with open(path, "rb") as file:
        tail = b""
        while block := file.read(_BLOCK):
            yield tail + block
            tail = block[-_OVERLAP:]


def _in_environment(path: str) -> bool:
    return any(_any_match(part, ENVIRONMENTS) for part in path.split("/"))


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _any_match(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)


def _matches(relative: str, pattern: str) -> bool:
    path = relative.lower()
    if "/" in pattern:
        return fnmatchcase(path, pattern) or fnmatchcase(path, f"*/{pattern}")
    return fnmatchcase(os.path.basename(path), pattern)
