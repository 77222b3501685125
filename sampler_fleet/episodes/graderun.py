"""The trusted test runner inside a grading sandbox: hidden tests here, the policy's code elsewhere.

Owns the run and its report. The process forks a worker before it reads any secret; the worker
imports and runs the modules of the graded tree. Tests, expected values, the nonce and the pipe of
the report are only in this process, which can't be traced and whose memory and files can't be
opened by its own user. Runs with a bare interpreter: few imports, all of them cheap.

Input: (nonce, top-level modules of the tree, {path: source} of the tests, names, seconds), encoded
by `wire.py`. Output: lines `NONCE ready`, then `NONCE passed|failed NUMBER WHY` each, where NUMBER
is the name's place among the names, `NONCE done`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from sampler_fleet.episodes.remote import Tests, Worker
from sampler_fleet.episodes.wire import decode

_PR_SET_DUMPABLE = 4
_MAX_REASON = 200


def run_tests(sources: dict[str, str], names: list[str]) -> dict[str, str]:
    """{name: "" or why it failed} of tests named `path::function` or `path::Class::method`."""
    loaded, results = {}, {}
    for name in names:
        path, *parts = name.split("::")
        try:
            if path not in loaded:
                loaded[path] = module = type(sys)("hidden")
                exec(compile(sources[path], path, "exec"), module.__dict__)
            found = loaded[path]
            for part in parts:
                found = getattr(found() if isinstance(found, type) else found, part)
            found()
            results[name] = ""
        except BaseException as error:  # whatever it was, the test did not pass
            results[name] = f"{type(error).__name__}: {error}"[:_MAX_REASON]
    return results


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    (their_input, our_output), (our_input, their_output) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(our_input)
        os.close(our_output)
        _work(their_input, their_output)
    os.close(their_input)
    os.close(their_output)
    with open(0, "rb", closefd=False) as stdin:
        nonce, modules, sources, names, seconds = decode(stdin.read())
    report = os.dup(1)
    _close_streams()
    os.write(report, f"{nonce} ready\n".encode())
    deadline = time.monotonic() + seconds
    tests = Tests(our_input, our_output, deadline=deadline, modules=modules)
    sys.meta_path.insert(0, tests)  # type: ignore[arg-type]
    lines = [
        f"{nonce} {'failed' if why else 'passed'} {number} {why!a}\n"
        for number, why in enumerate(run_tests(sources, names).values())
    ]
    for line in (*lines, f"{nonce} done\n"):
        os.write(report, line.encode())
    os._exit(0)


def _work(read_fd: int, write_fd: int) -> None:
    """The worker's whole life."""
    try:
        _close_streams()
        sys.path.insert(0, os.getcwd())
        worker = Worker(read_fd, write_fd)
        while True:
            kind, *rest = worker.receive()
            if kind == "ask":
                worker.answer(*rest)
    finally:
        os._exit(1)


def _close_streams() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
