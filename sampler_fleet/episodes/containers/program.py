"""The supervisor of a container: that of `sandbox_supervisor.py` in an image's own tree.

Owns what differs there. The tree is a repository too large to be handed over, so what the patch is
compared with is recorded inside, by git, in a repository of its own; whoever tampers with it only
spoils their own patch. Replies go to fd 1, and this process need not be pid 1. Needs Python 3.10,
bash and git in the image.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import time

from sampler_fleet.episodes.sandbox_supervisor import Gone, Supervisor, serve

_PR_SET_CHILD_SUBREAPER = 36
_SIGKILL = 9
_KILL_S = 10.0
_GIT_S = 120.0
_MAX_LIST = 4 << 20  # bytes of names of changed files
_MAX_REPORT = 8 << 20
_LINK, _REPOSITORY = b"120000", b"160000"
_PREPARE = """
export GIT_DIR=/var/tmp/.sandbox-start GIT_WORK_TREE=$PWD
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES
"""
_RECORD = (
    _PREPARE
    + """
set -e
umask 077
rm -rf "$GIT_DIR"
git -c init.defaultBranch=main init -q
if [ -f .git/index ]; then  # tracked files count even where .gitignore names them
    cp -rl .git/objects "$GIT_DIR" 2>/dev/null || cp -r .git/objects "$GIT_DIR"
    cp .git/index "$GIT_DIR/index"
fi
git config core.fileMode false
git config core.looseCompression 0
git add -A --ignore-errors . 2>/dev/null || :
git write-tree
"""
)
_COMPARE = (
    _PREPARE
    + """
git add -A --ignore-errors . >/dev/null 2>&1
git diff-index --cached --raw -z --no-renames --no-abbrev %s 2>/dev/null
"""
)


class CheckoutSupervisor(Supervisor):
    """Also `record`, before the policy works, `examine` after it, `unset` and `end`."""

    verbs = (*Supervisor.verbs, "record", "examine", "unset", "end")

    def __init__(self, max_output_bytes: int, max_tree_bytes: int) -> None:
        super().__init__(max_output_bytes, max_tree_bytes)
        self._is_init = os.getpid() == 1
        if not self._is_init:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._start = b""  # the tree that git recorded

    def unset(self, names: list[str]) -> None:
        """Takes variables away from all commands to come."""
        for name in names:
            os.environ.pop(name, None)

    def end(self) -> None:
        """Ends this process: not every runtime hands on that the host closed its end."""
        raise Gone

    def record(self) -> None:
        """Remembers the tree as it is now: what `snapshot` compares with."""
        code, _, _, output = self.exec(_RECORD.encode(), b"", _GIT_S, 4096)
        tree = output.strip().rpartition(b"\n")[2]
        if code or len(tree) not in (40, 64):
            raise ValueError("git can't record the tree: " + output.decode(errors="replace"))
        self._start = tree

    def examine(
        self,
        command: bytes,
        timeout_s: float,
        max_output: int,
        witness: bytes,
        channel: list,
        results: list[bytes],
    ) -> tuple[int, bool, int, bytes, bytes, bytes, dict[bytes, bytes]]:
        """(as `exec`, what the witness reported, keys that nobody took, files) of a test command.

        Only what the command starts runs meanwhile, and none of it afterwards. pytest loads the
        witness by itself; `channel` is the keys and the two numbers by which it knows its files.
        Of `results`, paths, this process reads what is there at the end: by then any other program
        may be a fake.
        """
        self._kill_all()
        folder, name = "/var/tmp/" + os.urandom(8).hex(), "t" + os.urandom(8).hex()
        os.mkdir(folder, 0o700)
        with open(f"{folder}/{name}.py", "wb") as file:
            file.write(witness)
        more = {
            "PYTHONPATH": ":".join([folder, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTEST_ADDOPTS": f"-p {name} {os.environ.get('PYTEST_ADDOPTS', '')}".strip(),
            "WITNESS": f"{folder}/{name}.py",
        }
        keys, keys_fd, report_fd = channel
        taken, given = os.pipe()
        report = os.memfd_create("report")
        before = {key: os.environ.get(key) for key in more}
        try:
            os.set_blocking(given, False)
            if os.write(given, keys) != len(keys):
                raise OSError("a pipe takes too little")
            os.close(given)
            fcntl.fcntl(report, fcntl.F_SETFL, os.O_APPEND)
            os.dup2(taken, keys_fd)  # from now on new processes have them
            os.dup2(report, report_fd)
            os.environ.update(more)
            result = self.exec(command, b"", timeout_s, max_output)
            self._kill_all()
            os.set_blocking(taken, False)
            try:
                left = os.read(taken, 2 * len(keys))
            except BlockingIOError:  # somebody opened the other end, and nothing is there
                left = b""
            found = {path: data for path in results if (data := _read_result(path)) is not None}
            return (*result, os.pread(report, _MAX_REPORT, 0), left, found)
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
            for fd in (taken, report, keys_fd, report_fd):
                try:  # noqa: SIM105 (contextlib is slow to import)
                    os.close(fd)
                except OSError:
                    pass

    def snapshot(self) -> tuple[dict[bytes, bytes], list[bytes], bool, list[bytes]]:  # type: ignore[override]
        """(changed files, changed things that are no files, whether that is all, what is gone)."""
        self._kill_all()
        files: dict[bytes, bytes] = {}
        special: list[bytes] = []
        deleted: list[bytes] = []
        code, _, num_bytes, output = self.exec(
            _COMPARE.encode() % self._start, b"", _GIT_S, _MAX_LIST
        )
        if not self._start or code or num_bytes > _MAX_LIST:
            return files, special, False, deleted
        fields, left = output.split(b"\0")[:-1], self._max_tree_bytes
        for what, path in zip(fields[::2], fields[1::2], strict=True):
            mode = what.split()[1]
            if what.endswith(b"D"):
                deleted.append(path)
            elif mode in (_LINK, _REPOSITORY):
                special.append(path)
            else:
                try:
                    left -= os.lstat(path).st_size
                    if left < 0:
                        return files, special, False, deleted
                    files[path] = self.read(path)
                except (OSError, ValueError):
                    special.append(path)
        return files, special, True, deleted

    def _kill_all(self) -> None:
        """Nothing that commands started survives. As pid 1 that is everything."""
        if self._is_init:
            super()._kill_all()
            return
        deadline = time.monotonic() + _KILL_S
        while (pids := _descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in pids:
                try:  # noqa: SIM105 (contextlib is slow to import)
                    os.kill(pid, _SIGKILL)
                except ProcessLookupError:
                    pass
            self._reap()


def _read_result(path: bytes) -> bytes | None:
    """A regular file; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        return file.read(_MAX_REPORT) if stat.S_ISREG(os.fstat(fd).st_mode) else None


def _descendants(root: int) -> set[int]:
    """Pids of all that came from a process; orphans among them count while it is a subreaper."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
    found: set[int] = set()
    while True:
        more = {pid for pid, parent in parents.items() if parent in found or parent == root} - found
        if not more:
            return found
        found |= more


def main() -> None:
    serve(CheckoutSupervisor, 1)
