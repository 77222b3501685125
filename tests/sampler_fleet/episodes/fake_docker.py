"""A stand-in for `docker`: `run` starts the container's program on this machine, by bubblewrap.

An image is this system, read-only, and a directory whose copy becomes the working directory; a
directory `IMAGE.opt` is its /opt. It
knows what `CliRuntime` asks for, and fails on anything else. `FAKE_DOCKER` names a directory with
`IMAGE.image` directories, a + for each /, and a file per container.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n'


def main(arguments: list[str]) -> int:
    state = Path(os.environ["FAKE_DOCKER"])
    verb, *rest = arguments
    if verb == "run":
        return run(state, rest)
    if verb == "ps":
        sys.stdout.write("".join(f"{file.stem}\n" for file in state.glob("*.container")))
        return 0
    if verb == "inspect":
        sys.stdout.write(json.loads((state / f"{rest[-1]}.container").read_text())["label"] + "\n")
        return 0
    if verb in ("kill", "rm"):
        return remove(state / f"{rest[-1]}.container")
    if verb in ("image", "pull"):
        known = (state / f"{rest[-1].replace('/', '+')}.image").exists()
        sys.stderr.write("" if known else "Error response from daemon: manifest unknown\n")
        return 0 if known else 1
    sys.stderr.write(f"unknown command {arguments}\n")
    return 125


def run(state: Path, rest: list[str]) -> int:
    flags: dict[str, str] = {}
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
    while rest[0].startswith("--"):
        name = rest.pop(0)
        flags[name] = "" if name in ("--rm", "--interactive", "--init") else rest.pop(0)
        if name == "--env":
            key, _, text = flags[name].partition("=")
            environment[key] = text
    image, *command = rest
    tree = state / f"{image.replace('/', '+')}.image"
    if not tree.exists():
        sys.stderr.write(f"Unable to find image '{image}' locally\n")
        return 125
    shell = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-ipc"]
    shell += ["--die-with-parent", "--cap-drop", "ALL", "--clearenv"]
    if "--init" not in flags:  # else bubblewrap is process 1
        shell += ["--as-pid-1"]
    for key, text in environment.items():
        shell += ["--setenv", key, text]
    shell += ["--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/lib", "/lib64", "/sbin"):
        shell += ["--symlink", f"usr{folder}", folder]
    shell += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"]
    shell += ["--dir", "/root", "--tmpfs", "/etc", "--tmpfs", "/logs", "--tmpfs", "/tests"]
    if (opt := tree.with_suffix(".opt")).exists():
        shell += ["--ro-bind", str(opt), "/opt"]
    workdir = flags.get("--workdir", "/testbed")
    shell += ["--tmpfs", workdir, "--ro-bind", str(tree), "/image", "--chdir", workdir, "--"]
    copy = f'cp -a /image/. {workdir} && exec {flags["--entrypoint"]} "$@"'
    child = subprocess.Popen([*shell, "/bin/sh", "-c", copy, "sh", *command])
    record = state / f"{flags['--name']}.container"
    label = flags["--label"].partition("=")[2]
    record.write_text(json.dumps({"pid": child.pid, "label": label}))
    status = child.wait()
    record.unlink(missing_ok=True)
    return status if status >= 0 else 128 - status


def remove(record: Path) -> int:
    if not record.exists():
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    record.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
