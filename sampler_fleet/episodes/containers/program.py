"""The supervisor of a container: that of `sandbox_supervisor.py` in an image's own tree.

Owns what differs there. The tree is a repository too large to be handed over, so what the patch is
compared with is recorded inside, by git, in a repository of its own; whoever tampers with it, or
with git, only spoils their own patch: what can't be compared is incomplete. Replies go to fd 1, and
this process need not be pid 1. Needs Python 3.10, bash and git in the image.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
import time

from sampler_fleet.episodes.sandbox_supervisor import SNAPSHOT_S, Gone, Supervisor, serve
from sampler_fleet.episodes.seccomp import make_filter

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SIGKILL = 9
_KILL_S = 10.0
_MAX_LIST = 4 << 20  # bytes of names of changed files
_MAX_HEADER = 16  # of a value in a message
_MAX_REPORT = 8 << 20
_LINK, _REPOSITORY = b"120000", b"160000"
_GIT_DIR = "/var/tmp/.sandbox-start"
_PREPARE = f"""
unset -f git; unset ${{!GIT_@}} XDG_CONFIG_HOME
export GIT_DIR={_GIT_DIR} GIT_WORK_TREE=$PWD HOME=/dev/null
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1
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
git config core.hooksPath /dev/null
git add -A --ignore-errors . 2>/dev/null || :
type -P git
git write-tree
"""
)
_COMPARE = (
    _PREPARE
    + """
export GIT_COMMON_DIR=$GIT_DIR  # or a file names another, with another configuration
rm -rf "$GIT_DIR/info"
'%s' add -A --ignore-errors . >/dev/null 2>&1
'%s' diff-index --cached --raw -z --no-renames --no-abbrev %s 2>/dev/null
"""
)


class CheckoutSupervisor(Supervisor):
    """Also `record`, before the policy works, `examine` after it, `unset` and `end`."""

    verbs = (*Supervisor.verbs, "record", "examine", "unset", "end")

    def __init__(self, max_output_bytes: int, max_tree_bytes: int) -> None:
        super().__init__(max_output_bytes, max_tree_bytes)
        self._is_init = os.getpid() == 1
        if self._is_init:
            _refuse_calls()
        else:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._start = b""  # the tree that git recorded
        self._git, self._config = b"", b""  # its program, and the configuration it had then

    def unset(self, names: list[str]) -> None:
        """Takes variables away from all commands to come."""
        for name in names:
            os.environ.pop(name, None)

    def end(self) -> None:
        """Ends this process: not every runtime hands on that the host closed its end."""
        raise Gone

    def record(self) -> None:
        """Remembers the tree as it is now: what `snapshot` compares with."""
        code, _, _, output = self.exec(_RECORD.encode(), b"", SNAPSHOT_S, 4096)
        *_, git, tree = (b"", *output.strip().split(b"\n"))
        if code or len(tree) not in (40, 64):
            raise ValueError("git can't record the tree: " + output.decode(errors="replace"))
        with open(f"{_GIT_DIR}/config", "rb") as file:
            self._config = file.read()
        self._git, self._start = git, tree

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
        try:
            return self._compare()
        except (OSError, ValueError, LookupError):  # git, and what it keeps, may be the policy's
            return {}, [], False, []

    def _compare(self) -> tuple[dict[bytes, bytes], list[bytes], bool, list[bytes]]:
        files: dict[bytes, bytes] = {}
        special: list[bytes] = []
        deleted: list[bytes] = []
        try:  # noqa: SIM105 (contextlib is slow to import)
            os.unlink(f"{_GIT_DIR}/config")
        except FileNotFoundError:
            pass
        with open(f"{_GIT_DIR}/config", "xb") as file:  # it names programs: filters, monitors
            file.write(self._config)
        command = _COMPARE.encode() % (self._git, self._git, self._start)
        code, _, num_bytes, output = self.exec(command, b"", SNAPSHOT_S, _MAX_LIST)
        self._kill_all()
        if not self._start or code or num_bytes > _MAX_LIST:
            return files, special, False, deleted
        fields, left = output.split(b"\0")[:-1], self._max_tree_bytes
        for what, path in zip(fields[::2], fields[1::2], strict=True):
            mode = what.split()[1]
            left -= len(path) + _MAX_HEADER
            if left < 0:
                return files, special, False, deleted
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


def _refuse_calls() -> None:
    """Installs the filter of system calls, for all commands to come; a kernel may refuse it."""
    instructions = make_filter(shared_memory=True)
    buffer = ctypes.create_string_buffer(instructions, len(instructions) or 1)
    filter = struct.pack("HP", len(instructions) // 8, ctypes.addressof(buffer))  # sock_fprog
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter, 0, 0)


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
