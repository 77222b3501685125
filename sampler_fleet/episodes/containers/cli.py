"""Containers by the command line of Docker or Podman: one `run` per sandbox.

Owns the flags that isolate and limit, the labels by which leftovers are found, and the removal. The
container's process is the supervisor, spoken to over the client's stdin and stdout: nothing of the
host is mounted, and when the client goes, so does the container. Must not know tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence

from sampler_fleet.episodes.base import SandboxError
from sampler_fleet.episodes.containers.base import Container, NoImageError, Runtime
from sampler_fleet.episodes.containers.launch import ARGUMENTS, ENVIRONMENT, SHELL, ContainerLimits
from sampler_fleet.episodes.containers.owner import LABEL, is_orphan, owner
from sampler_fleet.episodes.supervised import encode_path
from sampler_fleet.episodes.wire import encode, frame

_CLOSE_S = 2.0  # Podman 4.3 may not notice that its container ended
_CALL_S = 60.0


def why_not(name: str) -> str:
    """Why `docker` or `podman` can't run containers here; "" if it can."""
    try:
        trial = subprocess.run(
            [name, "ps", "--quiet"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
    except OSError:
        return f"no {name} on PATH"
    except subprocess.TimeoutExpired:
        return f"{name} does not answer"
    words = trial.stderr.decode(errors="replace").split()
    return "" if trial.returncode == 0 else f"{name}: {' '.join(words)[:200]}"


class CliRuntime(Runtime):
    """`name` is the program: docker or podman."""

    def __init__(self, name: str, limits: ContainerLimits) -> None:
        self.name = name
        self._limits = limits
        self._owner = owner(os.getpid())

    def container(self, image: str, workdir: str) -> CliContainer:
        name = f"mixed-samplers-{secrets.token_hex(6)}"  # tells the policy nothing
        return CliContainer(
            run_command(self.name, name, self._owner, image, workdir, self._limits),
            ends=((self.name, "kill", name), (self.name, "rm", "--force", "--volumes", name)),
            limits=self._limits,
        )

    async def fetch(self, image: str) -> None:
        if (await self._call("image", "inspect", "--format", "{{.Id}}", image))[0] == 0:
            return
        status, _, complaint = await self._call("pull", image, seconds=self._limits.pull_seconds)
        if status:
            raise NoImageError(f"image {image} can't be pulled: {complaint}")

    async def sweep(self) -> None:
        filters = ("--all", "--filter", f"label={LABEL}", "--format", "{{.ID}}")
        status, listing, complaint = await self._call("ps", *filters)
        if status:
            raise SandboxError(f"{self.name} can't list containers: {complaint}")
        template = f'{{{{index .Config.Labels "{LABEL}"}}}}'
        for container in listing.split():
            _, found, _ = await self._call("inspect", "--format", template, container)
            if is_orphan(found.strip()):
                await self._call("rm", "--force", "--volumes", container)

    async def close(self) -> None:
        """Containers are closed one by one; there is no connection."""

    async def _call(self, *arguments: str, seconds: float = _CALL_S) -> tuple[int, str, str]:
        """(status, stdout, what it complained of)."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(self.name, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise SandboxError(f"{self.name} did not start: {error}") from error
        try:
            async with asyncio.timeout(seconds):
                out, err = await process.communicate()
        except BaseException as error:
            await _kill(process)
            if isinstance(error, TimeoutError):
                raise SandboxError(f"{self.name} {arguments[0]}: no answer in time") from error
            raise
        complaint = " ".join(err.decode(errors="replace").split())[-500:]
        return process.returncode or 0, out.decode(errors="replace"), complaint


def run_command(
    program: str, name: str, owner: str, image: str, workdir: str, limits: ContainerLimits
) -> list[str]:
    """The command line of one sandbox."""
    command = [program, "run", "--rm", "--interactive", "--pull", "never", "--name", name]
    command += ["--label", f"{LABEL}={owner}", "--hostname", "sandbox", "--log-driver", "none"]
    command += ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    command += ["--pids-limit", str(limits.num_processes), "--cpus", f"{limits.num_cpus:g}"]
    for flag in ("--memory", "--memory-swap"):  # the same: no swap
        command += [flag, str(limits.memory_bytes)]
    command += ["--tmpfs", f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={limits.tmp_bytes}"]
    for folder in ("/tests", "/logs"):  # for graders: root without capabilities can't make them
        command += ["--tmpfs", f"{folder}:rw,exec,nosuid,nodev,mode=755,size={limits.tmp_bytes}"]
    command += ["--shm-size", str(limits.tmp_bytes)]
    for key, value in ENVIRONMENT.items():
        command += ["--env", f"{key}={value}"]
    if workdir:
        command += ["--workdir", workdir]
    return [*command, "--entrypoint", SHELL, image, *ARGUMENTS]


class CliContainer(Container):
    """One `docker run`."""

    def __init__(
        self, command: Sequence[str], *, ends: Sequence[Sequence[str]], limits: ContainerLimits
    ) -> None:
        super().__init__(max_tree_bytes=max(limits.patch_bytes, limits.output_bytes))
        self._command, self._ends, self._limits = command, ends, limits
        self._process: asyncio.subprocess.Process | None = None
        self._errors = -1

    async def start(self, tree: Mapping[str, bytes]) -> None:
        self._errors = os.memfd_create("errors")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # a Ctrl-C is for us: we end it in order
            )
        except OSError as error:
            raise SandboxError(f"{self._command[0]} did not start: {error}") from error
        self._reader, self._writer = self._process.stdout, self._process.stdin
        files = {encode_path(path): data for path, data in tree.items()}
        await self.ask(self._limits.told(), files, timeout_s=self._limits.start_seconds)

    async def close(self) -> None:
        writer, process, errors = self._writer, self._process, self._errors
        self._broken = self._broken or "it is closed"
        self._writer = self._process = None
        self._errors = -1
        if writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write(frame(encode(("end",))))
            writer.close()  # the supervisor ends, and the container with it
        if process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _CLOSE_S)
            if process.returncode != 0:
                await self._remove(process)
        if errors >= 0:
            os.close(errors)

    async def _remove(self, process: asyncio.subprocess.Process) -> None:
        """Ends what did not end by itself: a container may outlive its client."""
        for command in self._ends:  # `rm` alone asks first, and process 1 need not listen
            end = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _CALL_S)
            await _kill(end)
        await _kill(process)

    def _complaint(self) -> str:
        if self._errors < 0:
            return ""
        return os.pread(self._errors, 2000, 0).decode("utf-8", "replace").strip()


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
