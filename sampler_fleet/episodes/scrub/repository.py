"""The tree's git repository: what it holds beyond one commit, and the fresh one in its place.

Owns every call of git. The old repository is only read, with its hooks, file monitors and
replacements off; it may be damaged. Runs inside containers too: standard library of Python 3.9.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from fnmatch import fnmatchcase

from sampler_fleet.episodes.scrub.findings import Leak, Refused
from sampler_fleet.episodes.scrub.policy import GIT_ENTRIES, GIT_FRESH, GIT_SETTINGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sampler_fleet.episodes.scrub.gold import Scanner

NEW, OLD = ".scrub-new.git", ".scrub-old.git"
_CONFIG = """\
[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = false
"""
_WHO = {"NAME": "task", "EMAIL": "task@localhost", "DATE": "2000-01-01T00:00:00+0000"}
_MESSAGE = "The task's tree"
_BRANCH = "refs/heads/main"
_SAFE = (
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.fileMode=true"),
    *("-c", "core.symlinks=true", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false"),
    *("-c", "core.attributesFile=/dev/null", "-c", "core.excludesFile=/dev/null"),
    *("-c", "core.ignoreCase=false", "-c", "gc.auto=0"),
)
_LOOSE = re.compile(r"[0-9a-f]{2}/([0-9a-f]{38}|[0-9a-f]{62})")
_REF_KINDS = {"refs/notes/": "git-notes", "refs/stash": "git-stash", "refs/replace/": "git-replace"}


class GitFailed(OSError):
    """Git can't do that here."""


class Repository:
    """One git directory and the working tree it is for."""

    def __init__(self, root: str, git_dir: str) -> None:
        self.root, self.git_dir = root, git_dir

    def git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Its output. GitFailed with what git said."""
        run = subprocess.run(
            ["git", *_SAFE, *arguments],
            input=stdin,
            capture_output=True,
            env=self._environment(),
            cwd=self.root,
            check=False,
        )
        if run.returncode:
            said = run.stderr.decode(errors="replace").strip().split("\n")[0]
            raise GitFailed(said or f"git {arguments[0]} ended with {run.returncode}")
        return run.stdout

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": "/nonexistent",
            "LC_ALL": "C",
            "GIT_DIR": self.git_dir,
            "GIT_WORK_TREE": self.root,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_ALLOW_PROTOCOL": "none",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_DEFAULT_HASH": "sha1",
            **{f"GIT_{role}_{key}": _WHO[key] for role in ("AUTHOR", "COMMITTER") for key in _WHO},
        }

    def tracked(self) -> set[str]:
        """Paths of HEAD's tree, or of the index where there is no HEAD, that the tree has."""
        try:
            listed = self.git("ls-tree", "-r", "-z", "HEAD")
        except GitFailed:
            try:
                listed = self.git("ls-files", "-z", "--stage")
            except GitFailed as error:
                raise Refused(
                    "the tree's repository", "a readable HEAD or index", str(error)
                ) from error
        paths = set()
        for line in listed.split(b"\0")[:-1]:
            path = os.fsdecode(line.partition(b"\t")[2])
            if line.startswith(b"160000"):  # a submodule: its files become the tree's own
                paths.update(files_below(self.root, path))
            elif not is_folder(os.path.join(self.root, path)):
                paths.add(path)
        return {path for path in paths if self._has(path)}

    def _has(self, path: str) -> bool:
        """Whether the tree itself has it: not somewhere that a link to a directory leads to."""
        full = os.path.join(self.root, path)
        folder = os.path.dirname(full)
        return os.path.lexists(full) and os.path.realpath(folder) == folder

    def unignored(self) -> set[str]:
        """Paths that `git add` would take, where there is no repository to ask."""
        listed = self.git("ls-files", "-z", "--others", "--exclude-standard")
        paths: set[str] = set()
        for name in listed.split(b"\0")[:-1]:
            path = os.fsdecode(name)
            nested = path.endswith("/")
            paths.update(files_below(self.root, path.rstrip("/")) if nested else (path,))
        return paths

    # --- what is there -------------------------------------------------------------------------

    def leaks(self) -> Iterator[Leak]:
        """Whatever a fresh repository of one commit lacks."""
        yield from self._entries()
        for what in (self._settings, self._refs, self._history, self._index, self._objects):
            try:
                yield from what()
            except GitFailed as error:
                yield Leak("git-damaged", ".git", str(error))

    def _entries(self) -> Iterator[Leak]:
        for name in sorted(os.listdir(self.git_dir)):
            if name in GIT_FRESH:
                continue
            if name == "info":
                yield from (
                    Leak("git-shallow" if inner == "grafts" else "git-other", f".git/info/{inner}")
                    for inner in os.listdir(os.path.join(self.git_dir, name))
                )
                continue
            kind = next(
                (
                    kind
                    for kind, patterns in GIT_ENTRIES.items()
                    if any(fnmatchcase(name, pattern) for pattern in patterns)
                ),
                "git-other",
            )
            yield Leak(kind, f".git/{name}")
        objects = os.path.join(self.git_dir, "objects")
        for name in _listed(os.path.join(objects, "info")):
            kind = "git-alternates" if "alternates" in name else "git-other"
            yield Leak(kind, f".git/objects/info/{name}")
        packs = set(_listed(os.path.join(objects, "pack")))
        for name in sorted(packs):
            stem, ending = os.path.splitext(name)
            whole = {f"{stem}.pack", f"{stem}.idx"} <= packs
            if ending not in (".pack", ".idx", ".rev", ".bitmap", ".mtimes") or not whole:
                yield Leak("git-packs", f".git/objects/pack/{name}")
        for name in _listed(objects):
            if name in ("info", "pack"):
                continue
            inner = files_below(objects, name) if is_folder(os.path.join(objects, name)) else [name]
            for path in inner:
                if not _LOOSE.fullmatch(path):
                    yield Leak("git-other", f".git/objects/{path}")

    def _settings(self) -> Iterator[Leak]:
        for name in self.git("config", "--local", "--list", "--name-only", "-z").split(b"\0")[:-1]:
            setting = name.decode(errors="replace")
            if setting.lower() not in GIT_SETTINGS:
                yield Leak("git-config", ".git/config", setting)

    def _refs(self) -> Iterator[Leak]:
        try:
            head = self.git("symbolic-ref", "-q", "HEAD").decode().strip()
        except GitFailed:
            head = ""
        refs = set(self.git("for-each-ref", "--format=%(refname)").decode().split())
        if is_folder(os.path.join(self.git_dir, "refs")):
            refs.update(files_below(self.git_dir, "refs"))  # git says nothing of broken ones
        for line in sorted(refs):
            if line != head:
                kind = next((k for start, k in _REF_KINDS.items() if line.startswith(start)), "")
                yield Leak(kind or "git-refs", f".git/{line}")

    def _history(self) -> Iterator[Leak]:
        number = int(self.git("rev-list", "--count", "HEAD"))
        if number != 1:
            yield Leak("git-history", ".git", f"{number} commits")

    def _index(self) -> Iterator[Leak]:
        for path in self.git("diff-index", "--cached", "--name-only", "-z", "HEAD").split(b"\0"):
            if path:
                yield Leak("git-index", os.fsdecode(path), "staged")

    def _objects(self) -> Iterator[Leak]:
        listed = self.git("rev-list", "--objects", "HEAD").splitlines()
        reachable = {line.split()[0] for line in listed}
        unreachable = sorted(self.object_ids() - reachable)
        if unreachable:
            first = unreachable[0].decode()
            yield Leak("git-objects", ".git", f"{len(unreachable)} not needed by HEAD, as {first}")
        fsck = self.git("fsck", "--unreachable", "--no-reflogs", "--no-progress", "HEAD")
        if fsck and not unreachable:
            yield Leak("git-objects", ".git", fsck.decode(errors="replace").split("\n")[0])

    def object_ids(self) -> set[bytes]:
        """Of all objects, however they are stored."""
        listed = self.git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
        return set(listed.split())

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """(id, content) of all objects, borrowed ones too."""
        command = ["git", *_SAFE, "cat-file", "--batch-all-objects", "--batch", "--buffer"]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment(),
            cwd=self.root,
        ) as process:
            assert process.stdout is not None
            while header := process.stdout.readline():
                name, _, *size = header.split()
                if size:
                    yield name.decode(), process.stdout.read(int(size[0]) + 1)[:-1]

    def scan(self, scanner: Scanner, looked_at: dict[str, int]) -> Iterator[Leak]:
        """Objects that hold distinctive lines, and the few files that aren't objects."""
        for name in sorted(GIT_FRESH):
            path = os.path.join(self.git_dir, name)
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    found = scanner.lines(file.read())
                if found:
                    yield Leak("gold-object", f".git/{name}", found[0].text)
        for name, data in self.objects():
            looked_at["objects"] += 1
            looked_at["bytes"] += len(data)
            found = scanner.lines(data)
            if found:
                yield Leak("gold-object", f".git object {name}", found[0].text)

    def elsewhere(self) -> Iterator[str]:
        """Places outside the tree that this repository reads or names."""
        yield self.git_dir
        common = os.path.join(self.git_dir, "commondir")
        if os.path.exists(common):
            yield os.path.join(self.git_dir, _text(common))
        files = [os.path.join(self.git_dir, "objects", "info", "alternates")]
        for name in _listed(os.path.join(self.git_dir, "worktrees")):
            files.append(os.path.join(self.git_dir, "worktrees", name, "gitdir"))
        for file in filter(os.path.exists, files):
            for line in _text(file).split("\n"):
                yield os.path.join(self.git_dir, "objects", line)
        try:
            urls = self.git("config", "--local", "-z", "--get-regexp", r"^remote\..*\.url$")
        except GitFailed:
            return
        for pair in urls.decode(errors="replace").split("\0")[:-1]:
            url = pair.partition("\n")[2]
            path = url[len("file://") :] if url.startswith("file://") else url
            if path.startswith("/"):
                yield path

    # --- a fresh one ---------------------------------------------------------------------------

    @staticmethod
    def recover(root: str) -> None:
        """After an interrupted swap: the old repository is back, or the new one is whole."""
        current, new, old = (os.path.join(root, name) for name in (".git", NEW, OLD))
        if os.path.lexists(old) and not os.path.lexists(current):
            os.rename(old, current)
        for path in (old, new):
            remove(path)

    @staticmethod
    def fresh(root: str, tracked: Iterable[str]) -> str:
        """Puts a repository with one commit of `tracked` in place of `.git`: the commit's id.

        Author, date and message are constant, so the same files give the same id everywhere.
        """
        current, new, old = (os.path.join(root, name) for name in (".git", NEW, OLD))
        made = Repository(root, new)
        made.git("init", "-q", "--template=")
        with open(os.path.join(new, "config"), "w") as file:
            file.write(_CONFIG)
        names = b"".join(os.fsencode(path) + b"\0" for path in sorted(tracked))
        made.git("update-index", "-z", "--add", "--stdin", stdin=names)
        tree = made.git("write-tree").decode().strip()
        commit = made.git("commit-tree", tree, "-m", _MESSAGE).decode().strip()
        made.git("update-ref", _BRANCH, commit)
        made.git("symbolic-ref", "HEAD", _BRANCH)
        for name in ("info", "branches", "hooks", "description"):
            remove(os.path.join(new, name))
        _give(new, os.lstat(root))
        if os.path.lexists(current):
            os.rename(current, old)
        os.rename(new, current)
        remove(old)
        return commit


def find_repository(root: str) -> Repository | None:
    """The tree's own, never one of a directory above it."""
    path = os.path.join(root, ".git")
    if os.path.isdir(path) and not os.path.islink(path):
        return Repository(root, path)
    if not os.path.lexists(path):
        return None
    text = os.readlink(path) if os.path.islink(path) else _text(path)
    target = os.path.join(root, text.replace("gitdir:", "", 1).strip())
    if not os.path.isdir(target):
        raise Refused("the tree's .git", "a directory, or a file that names one", repr(text[:80]))
    return Repository(root, os.path.realpath(target))


def files_below(root: str, path: str) -> Iterator[str]:
    """Files and links below a directory of the tree, without repositories; follows no links."""
    folders = [path]
    while folders:
        folder = folders.pop()
        for entry in os.scandir(os.path.join(root, folder)):
            inner = f"{folder}/{entry.name}"
            if entry.name == ".git":
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(inner)
            else:
                yield inner


def is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def remove(path: str) -> None:
    """A file, link or directory, if it is there. Never what a link points to."""
    if not is_folder(path):
        if os.path.lexists(path):
            os.unlink(path)
        return
    for folder, _, _ in os.walk(path):  # caches of packages have directories nobody may write
        os.chmod(folder, stat.S_IMODE(os.lstat(folder).st_mode) | stat.S_IRWXU)
    shutil.rmtree(path)


def _give(path: str, owner: os.stat_result) -> None:
    """What root makes in somebody's tree is theirs: git refuses repositories of others."""
    if os.geteuid() != 0 or owner.st_uid == 0:
        return
    for folder, _, names in os.walk(path):
        for inner in (folder, *(os.path.join(folder, name) for name in names)):
            os.lchown(inner, owner.st_uid, owner.st_gid)


def _listed(path: str) -> list[str]:
    return sorted(os.listdir(path)) if is_folder(path) else []


def _text(path: str) -> str:
    with open(path, "rb") as file:
        return os.fsdecode(file.read(4096)).strip()
