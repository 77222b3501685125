"""The program inside a sandbox: serves commands as its pid 1, over one socket at fd 0.

Owns limits, command execution, the cut of their output and safe reads of the tree. It holds no
secrets: whoever forged its replies would only describe a tree that is theirs anyway. As pid 1 of
its namespace it can't be killed from inside, and as a process that isn't dumpable it can't be
traced or written to. Runs with a bare interpreter: few imports, all of them cheap.

Messages are those of `wire.py`. The first one is (limits, tree), answered by ("ok", None). Each
later one is (verb, arguments...), answered by ("ok", result) or ("refused", reason).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import stat
import time

from sampler_fleet.episodes.wire import decode, encode, frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PR_SET_DUMPABLE = 4
_SIGKILL = 9
_TIMED_OUT, _FLOODED, _NOT_STARTED = 124, 125, 126
_FULL = (errno.EAGAIN, errno.ENOMEM)  # as many processes, or as much memory, as is allowed
_CHUNK = 1 << 20  # no less than a pipe holds: one read takes all there is
_MAX_ENTRIES = 10_000  # of a tree
SNAPSHOT_S = 120.0  # the host waits longer for one
_MAX_FILES = 256  # open at once, of a process
_NO_FOLLOW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Gone(Exception):
    """The host closed its end."""


def receive() -> Any:
    size = int.from_bytes(_read_exactly(4), "big")
    return decode(_read_exactly(size))


def send(replies: int, *message: Any) -> None:
    view = memoryview(frame(encode(message)))
    while view:
        view = view[os.write(replies, view) :]


def _read_exactly(num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = os.read(0, min(num_bytes, _CHUNK))
        if not part:
            raise Gone
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def limit(limits: dict[str, int]) -> None:
    """Limits of each process, this one and all that come from it; where one is 0, there is none."""
    wanted = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_NPROC: limits["num_processes"],
        resource.RLIMIT_NOFILE: limits.get("num_files", _MAX_FILES),
    }
    wanted = {kind: value for kind, value in wanted.items() if value}
    for kind, value in (*wanted.items(), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


class Output:
    """Head and tail of what a command writes."""

    def __init__(self, max_bytes: int) -> None:
        self.head, self.tail, self.num_bytes = b"", b"", 0
        self.max_head, self.max_tail = max_bytes // 2, max_bytes - max_bytes // 2

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        room = self.max_head - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[room:])[-self.max_tail :] if self.max_tail else b""

    def text(self) -> bytes:
        cut = self.num_bytes - len(self.head) - len(self.tail)
        middle = b"\n[... %d bytes cut ...]\n" % cut if cut else b""
        return self.head + middle + self.tail


class Supervisor:
    """The methods that `verbs` names are what the host may ask for."""

    verbs: tuple[str, ...] = ("exec", "read", "write", "snapshot")

    def __init__(self, max_output_bytes: int, max_tree_bytes: int) -> None:
        self._max_output_bytes, self._max_tree_bytes = max_output_bytes, max_tree_bytes
        # Opened before the process stops being dumpable, which takes the file away from it.
        self._oom_score = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        self._own_score = os.read(self._oom_score, 16)

    def exec(
        self, command: bytes, stdin: bytes, timeout_s: float, max_output: int
    ) -> tuple[int, bool, int, bytes]:
        """(exit status, whether it timed out, bytes written, head and tail of them)."""
        deadline = time.monotonic() + timeout_s
        output = Output(max_output)
        try:
            pid, out = self._spawn(command, stdin)
            code, timed_out = self._watch(pid, out, output, deadline)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", 0) in _FULL:
                self._kill_all()
            output.add(f"bash: cannot start: {error}\n".encode())
            code, timed_out = _NOT_STARTED, False
        return code, timed_out, output.num_bytes, output.text()

    def _spawn(self, command: bytes, stdin: bytes) -> tuple[int, int]:
        """Starts a command in a session of its own: (pid, the end of a pipe with its output)."""
        source = os.memfd_create("stdin")
        out, into = os.pipe()
        try:
            view = memoryview(stdin)
            while view:
                view = view[os.write(source, view) :]
            os.lseek(source, 0, os.SEEK_SET)
            os.write(self._oom_score, b"1000")  # inherited: these go first when memory runs out
            actions = [(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate((source, into, into))]
            pid = os.posix_spawn(
                "/bin/bash",
                [b"bash", b"-c", command],
                os.environ,
                file_actions=actions,
                setsid=True,
            )
        except BaseException:
            os.close(out)
            raise
        finally:
            os.write(self._oom_score, self._own_score)
            os.close(source)
            os.close(into)
        return pid, out

    def _watch(self, pid: int, out: int, output: Output, deadline: float) -> tuple[int, bool]:
        """Reads a command's output until it ends or must be ended: (status, timed out)."""
        os.set_blocking(out, False)
        exited = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(out, select.POLLIN)
        poll.register(exited, select.POLLIN)
        poll.register(0, 0)  # the host hangs up
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0 or output.num_bytes > self._max_output_bytes:
                    os.killpg(pid, _SIGKILL)
                    os.waitpid(pid, 0)
                    return (_TIMED_OUT, True) if left <= 0 else (_FLOODED, False)
                ready = [fd for fd, _ in poll.poll(min(left, 0.25) * 1000)]
                if 0 in ready:
                    raise Gone
                if out in ready and not self._take(out, output):
                    poll.unregister(out)
                status = self._reap(pid)
                if status is not None:
                    self._take(out, output)  # what background processes write later is lost
                    code = os.waitstatus_to_exitcode(status)
                    return (code if code >= 0 else 128 - code), False
        finally:
            os.close(exited)
            os.close(out)

    def _take(self, out: int, output: Output) -> bool:
        """Moves what is there; False at the end of the pipe."""
        try:
            data = os.read(out, _CHUNK)
        except BlockingIOError:
            return True
        output.add(data)
        return bool(data)

    def _reap(self, pid: int = 0) -> int | None:
        """Collects whatever has ended, orphans too; the status of `pid` if it is among them."""
        found = None
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if not ended:
                return found
            if ended == pid:
                found = status

    def _kill_all(self) -> None:
        """Nothing but this process survives."""
        while True:
            try:
                os.kill(-1, _SIGKILL)
            except ProcessLookupError:
                return
            self._reap()

    def read(self, path: bytes) -> bytes:
        fd = _open_beneath(path, os.O_RDONLY)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("not a regular file")
            if info.st_size > self._max_tree_bytes:
                raise ValueError(f"larger than {self._max_tree_bytes} bytes")
            parts = []
            while part := os.read(fd, _CHUNK):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def write(self, path: bytes, data: bytes) -> None:
        fd = _open_beneath(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)

    def snapshot(self) -> tuple[dict[bytes, bytes], list[bytes], bool]:
        """(regular files, other things that are no folders, whether that is all)."""
        self._kill_all()
        files: dict[bytes, bytes] = {}
        special: list[bytes] = []
        folders, num_bytes, num_entries = [b""], 0, 0
        while folders:
            folder = folders.pop()
            try:
                entries = os.scandir(folder or b".")
            except OSError:
                special.append(folder)
                continue
            for entry in entries:  # one by one: all their names may be more than memory holds
                path = folder + b"/" + entry.name if folder else entry.name
                num_entries += 1
                try:
                    num_bytes += len(path) + entry.stat(follow_symlinks=False).st_size
                    if num_entries > _MAX_ENTRIES or num_bytes > self._max_tree_bytes:
                        return files, special, False
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(path)
                    else:
                        files[path] = self.read(path)
                except (OSError, ValueError):  # links, pipes, locked files, endless names
                    special.append(path)
        return files, special, True


def _open_beneath(path: bytes, flags: int) -> int:
    """Opens a file of the tree without following a link at any level."""
    *parents, name = path.split(b"/")
    for part in (*parents, name):
        if part in (b"", b".", b".."):
            raise ValueError("not a relative path below the tree")
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        for part in parents:
            if flags & os.O_CREAT:
                try:  # noqa: SIM105 (contextlib is slow to import)
                    os.mkdir(part, dir_fd=folder)
                except FileExistsError:
                    pass
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | _NO_FOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(name, flags | _NO_FOLLOW, 0o644, dir_fd=folder)
    finally:
        os.close(folder)


def serve(kind: type[Supervisor], replies: int) -> None:
    """Answers on the file descriptor `replies` until the host closes its end of fd 0."""
    try:
        limits, tree = receive()
        supervisor = kind(limits["output_bytes"], limits["tree_bytes"])
        limit(limits)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        for path, data in tree.items():
            supervisor.write(path, data)
        send(replies, "ok", None)
        verbs = {verb: getattr(supervisor, verb) for verb in supervisor.verbs}
        while True:
            verb, *arguments = receive()
            try:
                result = verbs[verb](*arguments)
            except (OSError, ValueError) as error:
                send(replies, "refused", str(error))
            else:
                send(replies, "ok", result)
    except Gone:
        pass


def main() -> None:
    serve(Supervisor, 0)
