"""Sandboxes on this machine, by bubblewrap: no network, a read-only system, limits, no survivors.

Owns what is mounted and limited, how a sandbox starts and ends, and the pool. The working tree is a
tmpfs inside: the host never opens a path that the policy can write, and when the last process is
gone nothing is left. Must not know what commands mean.

As root, each slot runs under a uid of its own (`uids.py`). Namespaces leave some of the kernel
shared: what of it commands must not use is in `seccomp.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from contracts.errors import BadInputError
from contracts.runfile import Section
from sampler_fleet.episodes import cgroup
from sampler_fleet.episodes.base import SandboxError, SpentError
from sampler_fleet.episodes.seccomp import make_filter
from sampler_fleet.episodes.standalone import standalone
from sampler_fleet.episodes.supervised import GRACE_S, Supervised, encode_path
from sampler_fleet.episodes.uids import FIRST_UID, Uid

_log = logging.getLogger(__name__)

_SUPERVISOR = standalone("wire", "sandbox_supervisor")
_CLOSE_S = 5.0
_ASK_VERSION = """
import os, sys
print(*sys.version_info[:2], sys.base_prefix, os.path.realpath(sys.executable), sep="\\n")
"""
_MIN_PYTHON = (3, 11)
_BIN = "/sandbox/bin"  # inside: `python` and `python3`, whatever they are called outside
_ENVIRONMENT = {
    "PATH": f"{_BIN}:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
}
_STAGE = "/mnt"  # any directory that all can reach; covered in a mount namespace of ours only


class SandboxLimits(Section):
    """What one sandbox may use."""

    memory_bytes: int = Field(default=1 << 30, ge=64 << 20)  # of a process; with cgroups, of all
    disk_bytes: int = Field(default=32 << 20, ge=1 << 20)  # of /work and of /tmp
    num_processes: int = Field(default=64, ge=8)
    num_cpus: float = Field(default=1.0, gt=0)  # of all processes, where there are cgroups
    cpu_seconds: int = Field(default=60, ge=1)  # of a process
    output_bytes: int = Field(default=16 << 20, ge=1 << 10)  # a command that writes more is stopped
    tree_bytes: int = Field(default=8 << 20, ge=1 << 10)  # of a snapshot
    start_seconds: float = Field(default=30.0, gt=0)


_TOLD = set(SandboxLimits.model_fields) - {"start_seconds", "num_cpus"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """What this machine offers to sandboxes."""

    bwrap: str
    python: str  # a real interpreter, as it is called inside
    python_prefix: str | None  # mounted beside /usr; None: it is in /usr
    drop_uid: bool
    stage: bool  # only root can reach python_prefix: bind it where a slot's uid can
    cgroup_parents: tuple[Path, ...]
    limit_processes: bool  # RLIMIT_NPROC counts per sandbox
    refused_calls: bytes  # the filter of system calls


def find_host(pythons: Sequence[str] = ("/usr/bin/python3", sys.executable)) -> Host:
    """Looks for bubblewrap, an interpreter and control groups, and tries them once.

    Raises:
        BadInputError: no bubblewrap, no interpreter, root without setpriv, or the system won't let
            us use namespaces.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise BadInputError(
            "sandbox",
            expected="bubblewrap (Debian, Ubuntu: apt-get install bubblewrap)",
            found="no bwrap on PATH",
        )
    drop_uid = os.geteuid() == 0  # the kernel doesn't limit root's processes
    if drop_uid and shutil.which("setpriv") is None:
        raise BadInputError(
            "sandbox",
            expected="setpriv (of util-linux), to start sandboxes as root",
            found="no setpriv on PATH",
        )
    python, prefix = _find_python(pythons)
    host = Host(
        bwrap=bwrap,
        python=python,
        python_prefix=prefix,
        drop_uid=drop_uid,
        stage=drop_uid and prefix is not None and not _others_reach(Path(prefix)),
        cgroup_parents=cgroup.find_parents(),
        limit_processes=drop_uid or _kernel() >= (5, 14),
        refused_calls=make_filter(),
    )
    if not host.refused_calls:
        _log.warning("sandboxes refuse no system calls: those of this machine aren't known")
    group = _make_group(host, "trial", SandboxLimits())
    if group is not None:
        usable = not _try(host, group)
        group.remove()
        if usable:
            return host
    problem = _try(host, None)
    if problem:
        raise BadInputError(
            "sandbox",
            expected="bubblewrap 0.8 or later on a system that lets it make namespaces",
            found=problem,
        )
    _log.warning(
        "no writable control groups: each process of a sandbox is limited by itself%s",
        "" if host.limit_processes else ", and not how many there are",
    )
    return replace(host, cgroup_parents=())


def _make_group(host: Host, name: str, limits: SandboxLimits) -> cgroup.Group | None:
    return cgroup.make_group(
        host.cgroup_parents,
        name,
        memory_bytes=limits.memory_bytes,
        num_processes=limits.num_processes,
        num_cpus=limits.num_cpus,
    )


def _try(host: Host, group: cgroup.Group | None) -> str:
    """Why a sandbox can't be started like this; "" if it can."""
    with _open_filter(host) as fds:
        command = host_command(host, SandboxLimits(), group=group, filter_fds=fds)
        trial = subprocess.run(
            [*command, host.python, "-I", "-S", "-c", ""],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
            pass_fds=fds,
        )
    if trial.returncode == 0:
        return ""
    return trial.stderr.decode(errors="replace").strip() or f"status {trial.returncode}"


def _find_python(pythons: Sequence[str]) -> tuple[str, str | None]:
    """(interpreter, prefix to mount or None); real ones, asked themselves: no shims, no venvs."""
    for python in pythons:
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            command = [python, "-I", "-c", _ASK_VERSION]
            run = subprocess.run(command, capture_output=True, timeout=60, check=True)
            major, minor, prefix, real = run.stdout.decode().splitlines()
            if (int(major), int(minor)) >= _MIN_PYTHON:
                in_usr = Path(real).is_relative_to("/usr")
                return real, None if in_usr else prefix
    raise BadInputError(
        "sandbox",
        expected=f"Python {'.'.join(map(str, _MIN_PYTHON))} or later",
        found=f"none at {', '.join(pythons)}",
    )


def _others_reach(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


def _kernel() -> tuple[int, ...]:
    release = os.uname().release.split("-")[0].split(".")
    return tuple(int(part) for part in release[:2] if part.isdigit())


@contextlib.contextmanager
def _open_filter(host: Host) -> Iterator[tuple[int, ...]]:
    """The file that bubblewrap reads the filter of system calls from, if there is one."""
    if not host.refused_calls:
        yield ()
        return
    fd = os.memfd_create("refused calls")
    try:
        os.write(fd, host.refused_calls)
        os.lseek(fd, 0, os.SEEK_SET)
        yield (fd,)
    finally:
        os.close(fd)


def host_command(
    host: Host,
    limits: SandboxLimits,
    *,
    uid: int = FIRST_UID,
    group: cgroup.Group | None = None,
    filter_fds: Sequence[int] = (),
) -> list[str]:
    """The command line that runs what follows it in a sandbox; it inherits `filter_fds`."""
    command = []
    steps = [f'echo $$ > "{file}" || exit 1' for file in group.process_files] if group else []
    if host.stage:
        command += ["unshare", "--mount", "--propagation", "private"]
        steps += [f'mount --bind "{host.python_prefix}" {_STAGE} || exit 1']
    if steps:
        command += ["/bin/sh", "-c", "\n".join([*steps, 'exec "$@"']), "sh"]
    if host.drop_uid:
        command += ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
    command += [host.bwrap]
    command += [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts", "cgroup-try")]
    command += ["--disable-userns", "--as-pid-1", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL", "--clearenv"]
    for fd in filter_fds:
        command += ["--seccomp", str(fd)]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64", "lib32"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    command += ["--symlink", host.python, f"{_BIN}/python3"]
    command += ["--symlink", "python3", f"{_BIN}/python"]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp", "/work"):
        command += ["--size", str(limits.disk_bytes), "--tmpfs", folder]
    if host.python_prefix:
        source = _STAGE if host.stage else host.python_prefix
        command += ["--ro-bind", source, host.python_prefix]
    for folder in ("/dev", "/"):
        command += ["--remount-ro", folder]
    return [*command, "--chdir", "/work", "--"]


class BubblewrapSandbox(Supervised):
    """One running sandbox: one bwrap whose pid 1 serves all commands of an episode."""

    def __init__(
        self,
        host: Host,
        limits: SandboxLimits,
        *,
        uid: int = FIRST_UID,
        group: cgroup.Group | None = None,
    ) -> None:
        super().__init__(max_tree_bytes=limits.tree_bytes)
        self._host, self._limits = host, limits
        self._uid, self._group = uid, group
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._errors = -1  # what bwrap and the supervisor complain of
        self._oom_kills = 0  # of the group, up to the last reply

    @property
    def pid(self) -> int:
        """Of the process on the host whose end ends the sandbox."""
        assert self._process is not None
        return self._process.pid

    async def start(self, tree: Mapping[str, bytes]) -> None:
        limits = self._limits.model_dump(include=_TOLD)
        if not self._host.limit_processes:
            limits["num_processes"] = 0
        files = {encode_path(path): data for path, data in tree.items()}
        ours, theirs = socket.socketpair()
        self._errors = os.memfd_create("errors")
        try:
            with _open_filter(self._host) as fds:
                self._process = await asyncio.create_subprocess_exec(
                    *host_command(
                        self._host, self._limits, uid=self._uid, group=self._group, filter_fds=fds
                    ),
                    *(self._host.python, "-I", "-S", "-B", "-c", _SUPERVISOR),
                    stdin=theirs.fileno(),
                    stdout=self._errors,
                    stderr=self._errors,
                    pass_fds=fds,
                )
            self._reader, writer = await asyncio.open_connection(sock=ours)
            self._writer, self._transport = writer, writer.transport
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise SandboxError(f"bubblewrap did not start: {error}") from error
            raise
        finally:
            theirs.close()
        await super().ask(limits, files, timeout_s=self._limits.start_seconds)
        self._oom_kills = self._num_oom_kills()

    async def ask(self, *request: Any, timeout_s: float = GRACE_S) -> Any:
        """As for all; SpentError if commands filled the memory that the supervisor is in, too.

        They are killed before it is. But what the kernel keeps for them, such as the names in a
        tmpfs, stays.
        """
        try:
            result = await super().ask(*request, timeout_s=timeout_s)
        except SandboxError as error:
            if self._num_oom_kills() > self._oom_kills:
                raise SpentError(f"its commands used up its memory: {error}") from error
            raise
        self._oom_kills = self._num_oom_kills()
        return result

    def _num_oom_kills(self) -> int:
        return self._group.num_oom_kills() if self._group else 0

    async def close(self) -> None:
        transport, process, errors = self._transport, self._process, self._errors
        self._broken = self._broken or "it is closed"
        self._writer = self._transport = self._process = None
        self._errors = -1
        if transport is not None:
            # The supervisor ends, and the kernel ends all others before bwrap ends. What a hung
            # one has not read is dropped: waiting for that could take forever.
            transport.abort()
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), _CLOSE_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if errors >= 0:
            os.close(errors)

    def _complaint(self) -> str:
        return os.pread(self._errors, 2000, 0).decode("utf-8", "replace").strip()


class SandboxPool:
    """At most `max_concurrent` sandboxes at once; each opened is closed, whatever happens."""

    def __init__(
        self,
        max_concurrent: int,
        limits: SandboxLimits | None = None,
        *,
        host: Host | None = None,
        attempts: int = 3,
    ) -> None:
        """BadInputError if sandboxes can't run on this machine; see `find_host`."""
        self._limits = limits or SandboxLimits()
        self._host = host or find_host()
        self._attempts = attempts
        self._free = list(reversed(range(max_concurrent)))
        self._room = asyncio.Semaphore(max_concurrent)
        self._open: set[BubblewrapSandbox] = set()
        self._groups: dict[int, cgroup.Group | None] = {}
        self._uids: dict[int, Uid] = {}
        self._name = os.urandom(3).hex()
        cgroup.sweep(self._host.cgroup_parents)

    @contextlib.asynccontextmanager
    async def open(self, tree: Mapping[str, bytes]) -> AsyncIterator[BubblewrapSandbox]:
        async with self._room:
            slot = self._free.pop()
            sandbox = None
            try:
                sandbox = await self._start(slot, tree)
                yield sandbox
            finally:
                if sandbox is not None:
                    await self._close(sandbox)
                self._free.append(slot)

    async def close(self) -> None:
        """Ends all sandboxes that are open still, and removes the control groups."""
        await asyncio.gather(*(self._close(sandbox) for sandbox in list(self._open)))
        for group in self._groups.values():
            if group is not None:
                group.remove()
        self._groups.clear()
        for uid in self._uids.values():
            uid.close()
        self._uids.clear()

    def _uid_of(self, slot: int) -> int:
        if slot not in self._uids and self._host.drop_uid:
            try:
                self._uids[slot] = Uid()
            except OSError as error:
                raise SandboxError(f"no user id for a sandbox: {error}") from error
        return self._uids[slot].number if slot in self._uids else FIRST_UID

    async def _start(self, slot: int, tree: Mapping[str, bytes]) -> BubblewrapSandbox:
        if slot not in self._groups:
            self._groups[slot] = _make_group(self._host, f"{self._name}-{slot}", self._limits)
        for attempt in range(1, self._attempts + 1):
            sandbox = BubblewrapSandbox(
                self._host, self._limits, uid=self._uid_of(slot), group=self._groups[slot]
            )
            self._open.add(sandbox)
            try:
                await sandbox.start(tree)
                return sandbox
            except SandboxError as error:
                await self._close(sandbox)
                if attempt == self._attempts:
                    raise
                _log.warning("sandbox slot %d, attempt %d: %s", slot, attempt, error)
                await asyncio.sleep(0.1 * attempt)
            except BaseException:
                await self._close(sandbox)
                raise
        raise AssertionError("unreachable")

    async def _close(self, sandbox: BubblewrapSandbox) -> None:
        """Returns when it is gone, even if cancelled: its slot may be another's the next moment."""
        closing = asyncio.ensure_future(sandbox.close())
        cancelled = None
        while not closing.done():
            try:
                await asyncio.wait({closing})
            except asyncio.CancelledError as error:
                cancelled = error
        self._open.discard(sandbox)
        if cancelled is not None:
            raise cancelled
        closing.result()
