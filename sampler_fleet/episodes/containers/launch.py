"""How the supervisor comes into a container, and what it is told.

Owns the program as it is shipped and the shell that starts it with the environment of a login
shell, as images of data sets expect it. Must not know which runtime runs the container.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from contracts.runfile import Section
from sampler_fleet.episodes.sandbox import SandboxLimits
from sampler_fleet.episodes.standalone import standalone

PROGRAM = standalone("wire", "sandbox_supervisor", "seccomp", "containers.program")
ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "TERM": "dumb", "LANG": "C.UTF-8"}
# Only the supervisor has the streams of the protocol: what a profile prints would break it.
_LAUNCH = r"""
exec 3<&0 4>&1 </dev/null >&2
exec bash -lc '
for python in python3 /usr/bin/python3 /usr/local/bin/python3 /opt/miniconda3/bin/python3 \
    /opt/conda/bin/python3; do
  if "$python" -I -S -c "import ctypes, sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null
  then exec "$python" -I -S -B -c "$0" <&3 >&4 3<&- 4>&-
  fi
done
echo "no Python 3.10 or later in the image" >&2
exit 127' "$0"
"""
SHELL = "/bin/sh"
ARGUMENTS = ("-c", _LAUNCH, PROGRAM)  # of the shell


class ModalSettings(Section):
    """Sandboxes on Modal: the app that holds them."""

    app: str = "mixed-samplers-sandboxes"
    environment: str = ""  # Modal's default


class ContainerLimits(Section):
    """What one container may use."""

    memory_bytes: int = Field(default=8 << 30, ge=64 << 20)
    num_cpus: float = Field(default=2.0, gt=0)
    num_processes: int = Field(default=1024, ge=16)
    tmp_bytes: int = Field(default=1 << 30, ge=1 << 20)  # of /tmp, and of /dev/shm
    file_bytes: int = Field(default=4 << 30, ge=1 << 20)  # of one file
    output_bytes: int = Field(default=16 << 20, ge=1 << 10)  # a command that writes more is stopped
    patch_bytes: int = Field(default=8 << 20, ge=1 << 10)  # of the files that an episode changes
    start_seconds: float = Field(default=120.0, gt=0)  # until the supervisor answers
    pull_seconds: float = Field(default=1800.0, gt=0)  # of an image
    setup_seconds: float = Field(default=600.0, gt=0)  # of a task's setup script, and of the scrub
    test_seconds: float = Field(default=1800.0, gt=0)  # of tests that don't say it themselves
    life_seconds: int = Field(default=4 * 3600, ge=60)  # on Modal, which ends it then

    def told(self) -> dict[str, int]:
        """What the supervisor limits itself; the runtime does the rest."""
        return {
            "memory_bytes": 0,
            "disk_bytes": self.file_bytes,
            "num_processes": 0,
            "cpu_seconds": 0,
            "num_files": 4096,
            "output_bytes": self.output_bytes,
            "tree_bytes": self.patch_bytes,
        }


class SandboxConfig(SandboxLimits):
    """[episodes.sandbox]: limits of sandboxes on this machine, and where containers run."""

    runtime: Literal["auto", "docker", "podman", "modal"] = "auto"
    containers: ContainerLimits = ContainerLimits()
    modal: ModalSettings = ModalSettings()
