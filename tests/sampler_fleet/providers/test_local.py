"""Local samplers as processes: a stand-in for `sampler_fleet join` that drains when told to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from contracts.errors import BadInputError
from sampler_fleet.providers import local
from sampler_fleet.providers.local import LocalProvider

ROOT = Path(__file__).resolve().parents[3]
# "ready" is printed once it can be told to stop; it then drains until the file STATE/go is there.
SAMPLER = """
import pathlib, signal, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
state = pathlib.Path(options["--state-dir"])
state.mkdir(exist_ok=True)
def drain(*_):
    while not (state / "go").exists():
        time.sleep(0.02)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
print("ready", options["--group"], options["--sampler-id"], flush=True)
time.sleep(600)
"""


class Samplers:
    """A provider of stand-ins, and what they said."""

    def __init__(
        self,
        directory: Path,
        *,
        code: str = SAMPLER,
        drain_s: float = 30.0,
        retry_s: float = local.RETRY_S,
    ) -> None:
        self.directory = directory
        join = (sys.executable, "-c", code)
        self.provider = LocalProvider(directory, join=join, drain_s=drain_s, retry_s=retry_s)

    def said(self, name: str) -> str:
        log = self.directory / "logs" / f"{name}.log"
        return log.read_text() if log.exists() else ""

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.02)

    async def until_held(self, group: str, num: int) -> None:
        async with asyncio.timeout(20):
            while await self.provider.num_held(group) != num:
                await asyncio.sleep(0.02)

    async def ready(self, *names: str) -> None:
        for name in names:
            await self.until(lambda name=name: "ready" in self.said(name))

    def let_go(self, *names: str) -> None:
        for name in names:
            (self.directory / name).mkdir(exist_ok=True)
            (self.directory / name / "go").touch()

    def pids(self) -> dict[str, int]:
        found = {}
        for process in psutil.Process().children():
            line = process.cmdline()
            if "--sampler-id" in line and str(self.directory) in " ".join(line):
                found[line[line.index("--sampler-id") + 1]] = process.pid
        return found


@pytest.fixture
async def samplers(tmp_path: Path):
    samplers = Samplers(tmp_path / "state")
    yield samplers
    samplers.let_go(*(f"{group}-{n}" for group in ("a", "b", "b-1") for n in range(5)))
    await samplers.provider.close()
    assert not samplers.pids()


async def test_samplers_of_a_group_are_started_and_counted(samplers):
    await samplers.provider.scale("b-1", 1)
    await samplers.provider.scale("b", 2)
    await samplers.provider.scale("b", 2)
    await samplers.ready("b-0", "b-1", "b-1-0")
    assert samplers.said("b-1") == "ready b b-1\n"
    assert samplers.said("b-1-0") == "ready b-1 b-1-0\n"
    assert samplers.pids().keys() == {"b-0", "b-1", "b-1-0"}
    assert [await samplers.provider.num_held(group) for group in ("b", "b-1", "c")] == [2, 1, 0]


async def test_the_newest_drain_and_are_held_until_they_are_gone(samplers):
    provider = samplers.provider
    await provider.scale("a", 3)
    await samplers.ready("a-0", "a-1", "a-2")
    await provider.scale("a", 1)
    assert await provider.num_held("a") == 3, "two drain"
    await provider.scale("a", 2)
    await samplers.ready("a-3")
    assert await provider.num_held("a") == 4
    samplers.let_go("a-1", "a-2")
    await samplers.until_held("a", 2)
    assert samplers.pids().keys() == {"a-0", "a-3"}
    await provider.scale("a", 3)
    await samplers.until(lambda: samplers.said("a-1").count("ready") == 2)
    assert samplers.pids().keys() == {"a-0", "a-1", "a-3"}, "the lowest free number"
    samplers.let_go("a-0", "a-1", "a-3")
    await provider.scale("a", 2)
    await samplers.until_held("a", 2)
    assert samplers.pids().keys() == {"a-0", "a-3"}, "a-1 was the newest"
    await provider.scale("a", 0)
    await samplers.until_held("a", 0)


async def test_a_sampler_that_does_not_drain_in_time_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "STOP_S", 0.2)
    samplers = Samplers(tmp_path / "state", drain_s=0.3)
    await samplers.provider.scale("a", 1)
    await samplers.ready("a-0")
    await samplers.provider.scale("a", 0)
    await samplers.until_held("a", 0)
    assert not samplers.pids()
    await samplers.provider.close()


async def test_a_preempted_sampler_is_started_again(samplers):
    await samplers.provider.scale("a", 2)
    await samplers.ready("a-0", "a-1")
    killed = samplers.pids()["a-0"]
    os.kill(killed, signal.SIGKILL)
    await samplers.until(lambda: samplers.said("a-0").count("ready") == 2)
    assert await samplers.provider.num_held("a") == 2
    assert samplers.pids()["a-0"] != killed


async def test_a_group_whose_samplers_all_refuse_their_input_says_so_and_no_other_does(tmp_path):
    refuses = "import sys\nif 'bad' in sys.argv: print('error: disk full'); sys.exit(2)\n"
    samplers = Samplers(tmp_path / "state", code=refuses + SAMPLER)
    provider = samplers.provider
    await provider.scale("bad", 1)
    await provider.scale("a", 1)
    with pytest.raises(BadInputError, match=r"service bad-0: .* disk full"):
        async with asyncio.timeout(20):
            while True:
                await provider.scale("bad", 1)
                await asyncio.sleep(0.02)
    await provider.scale("a", 2)
    await samplers.ready("a-0", "a-1")
    assert [await provider.num_held(group) for group in ("a", "bad")] == [2, 1]
    await provider.scale("bad", 0)
    samplers.let_go("a-0", "a-1")
    await provider.close()


async def test_one_sampler_of_a_group_that_refuses_its_input_is_tried_again(tmp_path):
    refuses = (
        "import pathlib, sys\nstate = pathlib.Path(sys.argv[sys.argv.index('--state-dir') + 1])\n"
        "if state.name == 'a-0' and not (state.parent / 'sound').exists():\n"
        "    print('error: disk full'); sys.exit(2)\n"
    )
    samplers = Samplers(tmp_path / "state", code=refuses + SAMPLER, retry_s=0.1)
    await samplers.provider.scale("a", 2)
    await samplers.ready("a-1")
    await samplers.until(lambda: samplers.said("a-0").count("disk full") > 1)
    await samplers.provider.scale("a", 2)
    (samplers.directory / "sound").touch()
    await samplers.ready("a-0")
    samplers.let_go("a-0", "a-1")
    await samplers.provider.close()


async def test_two_autoscalers_do_not_share_a_directory(samplers, monkeypatch):
    monkeypatch.setattr(local, "LOCK_WAIT_S", 0.1)
    with pytest.raises(BadInputError, match="no sampler of another autoscaler still at work"):
        Samplers(samplers.directory)


async def test_all_end_with_a_killed_autoscaler_before_the_next_one_starts(tmp_path):
    directory = tmp_path / "state"
    script = (
        "import asyncio, pathlib, sys\n"
        "from sampler_fleet.providers.local import LocalProvider\n"
        "async def main():\n"
        f"    provider = LocalProvider(pathlib.Path({str(directory)!r}), drain_s=30.0,\n"
        f"                             join=(sys.executable, '-c', {SAMPLER!r}))\n"
        "    await provider.scale('a', 2)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    logs = [directory / "logs" / f"a-{n}.log" for n in range(2)]
    async with asyncio.timeout(20):
        while not all(log.exists() and log.read_text() for log in logs):
            await asyncio.sleep(0.02)
    children = psutil.Process(parent.pid).children()
    assert len(children) == 2
    parent.kill()
    parent.wait()
    following = Samplers(directory)
    assert not any(child.is_running() and child.status() != "zombie" for child in children)
    await following.provider.close()
