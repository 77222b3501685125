"""What sandboxes in containers promise: on stand-ins for the protocol, and on what is there.

Real Docker, Podman and Modal need an image with Python 3.10, bash, git and an empty /testbed, which
MIXED_SAMPLERS_TEST_IMAGE names.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sampler_fleet.episodes.base import Checkout, Judge, SandboxError, Task
from sampler_fleet.episodes.containers import cli, modal_sandbox, program
from sampler_fleet.episodes.containers.base import NoImageError
from sampler_fleet.episodes.containers.grading import GraderByTask
from sampler_fleet.episodes.containers.launch import (
    ARGUMENTS,
    SHELL,
    ContainerLimits,
    SandboxConfig,
)
from sampler_fleet.episodes.containers.modal_sandbox import ModalRuntime
from sampler_fleet.episodes.containers.owner import LABEL, is_orphan, owner
from sampler_fleet.episodes.containers.pool import ContainerPool, SandboxesByTask, find_runtime
from sampler_fleet.episodes.patch import Patch, capture
from sampler_fleet.episodes.tasks.check import Outcome, check_task
from sampler_fleet.episodes.tasks.choose import why_not_here
from tests.sampler_fleet.episodes import fake_docker

IMAGE = os.environ.get("MIXED_SAMPLERS_TEST_IMAGE", "")
WORKDIR = "/testbed"
LIMITS = ContainerLimits(
    memory_bytes=512 << 20,
    num_cpus=1,
    num_processes=64,
    tmp_bytes=32 << 20,
    output_bytes=4 << 20,
    patch_bytes=1 << 20,
)
SETUP = """
set -e
export HOME=/tmp
git config --global user.email a@b.c && git config --global user.name a
git -c init.defaultBranch=main init -q
mkdir -p shop tests && touch shop/__init__.py
printf 'def total(price, count):\\n    return price + count\\n' > shop/cart.py
printf 'kept\\n' > README.md
printf 'old\\n' > old.txt
printf '*.log\\n' > .gitignore
ln -s README.md link
git add -A && git commit -qm base
printf 'def total(price, count):\\n    return price * count\\n' > shop/cart.py
git commit -qam 'the fix of tomorrow'
git reset -q --hard HEAD^
mkdir -p hidden && touch hidden/answer
"""
FIX = """\
--- a/shop/cart.py
+++ b/shop/cart.py
@@ -1,2 +1,2 @@
 def total(price, count):
-    return price + count
+    return price * count
"""
TESTS = """\
--- /dev/null
+++ b/tests/test_cart.py
@@ -0,0 +1,4 @@
+import sys
+sys.path.insert(0, ".")
+from shop import cart
+sys.exit(cart.total(3, 4) != 12)
"""
RUN = "python3 -B tests/test_cart.py"
WRITE_REWARD = f"{RUN}; echo $((1 - $?)) > /logs/verifier/reward.txt"
WRITE_RESULTS = (
    f"{RUN} && s=PASSED || s=FAILED\n"
    """echo '{"tests": [{"name": "t", "status": "'$s'"}]}' > /tmp/output.json"""
)


def a_task(image: str, **changes) -> Task:
    checkout = Checkout(
        image=image,
        workdir=WORKDIR,
        setup=SETUP,
        hidden_paths=(f"{WORKDIR}/hidden",),
        fix_patch=FIX,
        test_patch=TESTS,
        test_command=RUN,
        judge=Judge.EXIT_STATUS,
    )
    return Task(
        task_id="cart",
        split="train",
        template="cart",
        issue="",
        fail_to_pass=("t",),
        pass_to_pass=(),
        checkout=replace(checkout, **changes),
    )


class LocalProcess(modal_sandbox.Process):
    def __init__(self, process: asyncio.subprocess.Process, api: LocalApi, image: str) -> None:
        self.process, self.api, self.image = process, api, image

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def output(self):
        assert self.process.stdout is not None
        while part := await self.process.stdout.read(1000):
            yield part

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def freeze(self) -> str:
        self.api.num_frozen += 1
        return ""

    async def terminate(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class LocalApi(modal_sandbox.Api):
    """Modal's Sandboxes as processes on this machine, where the supervisor is not process 1."""

    def __init__(self) -> None:
        self.num_frozen = 0
        self.running: dict[str, str] = {}
        self.ended: list[str] = []

    async def start(self, image: str, workdir: str) -> LocalProcess:
        arguments = ("run", "--init", "--name", os.urandom(4).hex(), "--label", f"{LABEL}=x")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, fake_docker.__file__, *arguments, "--workdir", workdir),
            *("--entrypoint", SHELL, image, *ARGUMENTS),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return LocalProcess(process, self, image)

    async def owners(self) -> dict[str, str]:
        return self.running

    async def terminate(self, sandbox_id: str) -> None:
        self.ended.append(sandbox_id)


@pytest.fixture(params=["stand-in", "modal stand-in", "docker", "podman", "modal"])
async def place(request):
    """(pool, image)"""
    if "stand-in" in request.param:
        request.getfixturevalue("docker")
        config, image = SandboxConfig(runtime="docker", containers=LIMITS), "base"
    else:
        config, image = SandboxConfig(runtime=request.param, containers=LIMITS), IMAGE
        if isinstance(problem := find_runtime(config), str):
            pytest.skip(problem)
        if not IMAGE:
            pytest.skip(f"{request.param} is here, but MIXED_SAMPLERS_TEST_IMAGE names no image")
    if request.param == "modal stand-in":
        pool = ContainerPool(config, 4, find=lambda _: ModalRuntime(LocalApi(), LIMITS))
    else:
        pool = ContainerPool(config, 4)
    yield pool, image
    await pool.close()


@pytest.fixture
async def box(place):
    pool, image = place
    async with SandboxesByTask(None, pool).of(a_task(image)).open({}) as box:  # type: ignore[arg-type]
        yield box


async def run(box, command, **options):
    return await box.exec(command, timeout_s=options.pop("timeout_s", 20), **options)


class TestContract:
    async def test_commands(self, box):
        result = await run(box, "pwd; cat README.md; echo oops >&2; cd shop; export A=1; exit 3")
        assert result.output == f"{WORKDIR}\nkept\noops\n"
        assert (result.returncode, result.timed_out) == (3, False)
        assert (await run(box, "pwd; echo [$A]")).output == f"{WORKDIR}\n[]\n"
        data = os.urandom(300_000)
        assert (await run(box, "wc -c", stdin=data)).output.strip() == "300000"
        assert (await run(box, "echo a\0b")).returncode == 126

        result = await run(box, "seq 100000", max_output=100)
        assert result.output.startswith("1\n2\n3\n")
        assert result.output.endswith("99999\n100000\n")
        assert result.num_bytes == 588895
        assert len(result.output) < 150
        assert (await run(box, "head -c 1000000000 /dev/zero")).returncode == 125

    async def test_timeout_is_an_observation(self, box):
        result = await run(box, "echo before; sleep 60 & sleep 61; echo after", timeout_s=0.5)
        assert (result.returncode, result.timed_out, result.output) == (124, True, "before\n")
        result = await run(box, "(sleep 50; echo late) & yes & echo now")
        assert result.returncode == 0
        assert result.seconds < 10
        assert (await run(box, "echo ok")).output == "ok\n"

    async def test_isolation(self, box):
        code = "import socket; socket.create_connection(('8.8.8.8', 53), 2)"
        result = await run(box, f'python3 -c "{code}"')
        assert result.returncode == 1
        assert "nreachable" in result.output
        assert not (await run(box, "getent hosts example.com")).output
        result = await run(box, "grep -E 'Cap(Prm|Eff)|NoNewPrivs' /proc/self/status")
        assert result.output.split()[1::2] == ["0" * 16, "0" * 16, "1"]
        assert (await run(box, "mount -t tmpfs none /mnt")).returncode != 0

    async def test_files(self, box):
        await box.write("new/deep/file", b"\0\xff" * 1000)
        assert await box.read("new/deep/file") == b"\0\xff" * 1000
        for path in ("../etc/passwd", "/etc/passwd", "link", "missing"):
            with pytest.raises(OSError):
                await box.read(path)

    async def test_patch_is_what_changed(self, box):
        assert not capture({}, await box.snapshot())
        await run(box, "echo 2 > README.md; rm old.txt; echo n > $'n\\xfe'; echo x > run.log")
        await run(box, "echo tmp > .gitignore; git checkout -q .gitignore; touch shop/cart.py")
        await run(box, "git add -A; git commit -qm mine; mkdir empty; ln -s /etc more")
        writer = "(while :; do echo x >> busy; sleep 0.05; done) &"
        await run(box, f"{writer} until [ -s busy ]; do sleep 0.05; done")
        patch = capture({}, await box.snapshot())
        busy = patch.changed["busy"]
        assert patch == Patch(
            changed={"README.md": b"2\n", "n\udcfe": b"n\n", "busy": busy},
            deleted=("old.txt",),
            special=("more",),
        )
        await run(box, "rm -rf .git")
        again = await box.snapshot()
        assert again.files["busy"] == busy, "it stopped"
        assert again.complete
        await run(box, "head -c 3000000 /dev/urandom > big")
        assert not (await box.snapshot()).complete

    async def test_git_of_the_harness_runs_nothing_of_the_policy(self, box):
        """A filter that sleeps would turn a reward of 0 into a failure."""
        await run(box, "echo 2 > README.md; echo '* filter=x' > .gitattributes")
        attack = """
cd /var/tmp/.sandbox-start
for git in . /tmp/other; do
  [ -d $git ] || git init -q --bare $git
  git --git-dir=$git config filter.x.clean "touch /tmp/ran; cat"
  git --git-dir=$git config core.fsmonitor "touch /tmp/ran; :"
  mkdir -p $git/info $git/hooks && echo '* filter=x' > $git/info/attributes
  printf '#!/bin/sh\ntouch /tmp/ran' > $git/hooks/post-index-change
  chmod +x $git/hooks/*
done
echo /tmp/other > commondir
cp -r objects refs /tmp/other
mkdir -p ~/.config/git && cp info/attributes ~/.config/git && cp config ~/.gitconfig
"""
        assert (await run(box, attack)).returncode == 0
        assert set((await box.snapshot()).files) == {"README.md", ".gitattributes"}
        assert (await run(box, "ls /tmp/ran")).returncode == 2

    async def test_the_answer_is_not_there(self, box):
        assert (await run(box, "ls -d hidden")).returncode == 2
        assert (await run(box, "git log --oneline --all | wc -l")).output.strip() == "1"
        assert "tomorrow" not in (await run(box, "git log --all; git reflog")).output
        objects = await run(box, "git cat-file --batch-all-objects --batch | grep -c '[*] count'")
        assert objects.output == "0\n"
        assert (await run(box, "ls /tests")).output in (
            "",
            "ls: cannot access '/tests': No such file or directory\n",
        )

    async def test_end(self, place):
        pool, image = place
        async with pool.open(a_task(image).checkout, hidden=True) as box:
            await run(box, "sleep 500 & :")
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.exec("true", timeout_s=1)


class TestGrading:
    @pytest.fixture
    def grader(self, place):
        return GraderByTask(None, containers=place[0])

    @pytest.mark.parametrize(
        ("judge", "command"),
        [
            (Judge.EXIT_STATUS, RUN),
            (Judge.REWARD_FILE, WRITE_REWARD),
            (Judge.TESTS, WRITE_RESULTS),
        ],
    )
    async def test_judges(self, place, grader, judge, command):
        task = a_task(place[1], judge=judge, test_command=command)
        wrong = Patch(changed={"shop/cart.py": b"def total(price, count):\n    return 11\n"})
        right = Patch(changed={"shop/cart.py": b"def total(p, c):\n    return p * c\n"})
        assert not (await grader.grade(task, wrong)).passed
        assert (await grader.grade(task, right)).passed
        assert (await grader.grade_fix(task)).passed


@pytest.fixture
async def pool(docker):
    pool = ContainerPool(SandboxConfig(runtime="docker", containers=LIMITS), 2)
    yield pool
    await pool.close()
    assert not list(docker.glob("*.container"))


@pytest.mark.parametrize(
    "output",
    [b"x\0", b"x\0y\0", b"\0\0", b": 1 2 3 M\0\0\0", b"a bD\0\0" * 100_000, b"a b M\0" * 9],
)
def test_comparison_by_a_fake_git_is_incomplete(tmp_path, monkeypatch, output):
    class Faked(program.CheckoutSupervisor):
        def exec(self, command, stdin, timeout_s, max_output):
            return 0, False, len(output), output

        def _kill_all(self):
            """Nothing was started."""

    monkeypatch.setattr(program, "_GIT_DIR", str(tmp_path))
    supervisor = Faked(1 << 20, 1 << 20)
    supervisor._start = b"0" * 40
    *_, complete, _ = supervisor.snapshot()
    assert not complete


class TestPool:
    @pytest.mark.parametrize(
        "command", ["prlimit --pid 1 --as=1", "taskset --pid 1 1", "renice 19 --pid 1"]
    )
    async def test_supervisor_can_not_be_starved(self, pool, command):
        """It is process 1 and has the commands' user id."""
        async with pool.open(a_task("base").checkout, hidden=False) as box:
            result = await run(box, command)
            assert "not permitted" in result.output, result.output
            assert (await run(box, "ipcmk -M 4096")).returncode == 0  # PostgreSQL uses that

    async def test_no_image_is_no_second_try(self, pool, docker):
        task = a_task("registry.example/none:1")
        with pytest.raises(NoImageError, match=r"none:1 can't be pulled: .*manifest unknown"):
            async with pool.open(task.checkout, hidden=True):
                pytest.fail("it started")
        grader = GraderByTask(None, containers=pool)
        finding = await check_task(task, grader, pool.missing)
        assert finding.outcome == Outcome.SKIPPED
        assert "registry.example/none:1" in finding.reason

    async def test_failing_setup_is_infrastructure(self, pool, monkeypatch):
        task = a_task("base", setup="echo no luck; exit 7")
        with pytest.raises(SandboxError, match="setup script ended with status 7: no luck"):
            async with pool.open(task.checkout, hidden=True):
                pytest.fail("it started")

    async def test_leftovers_of_killed_processes_are_removed(self, pool, docker):
        """Of this host, and gone: not those of others."""
        child = await asyncio.create_subprocess_exec("true")
        await child.wait()
        gone = f"{os.uname().nodename}/{child.pid}/1"
        others = (f"elsewhere/{child.pid}/1", owner(os.getppid()), "")
        for number, label in enumerate((gone, *others)):
            file = docker / f"left{number}.container"
            file.write_text(json.dumps({"pid": 1 << 30, "label": label}))
        async with pool.open(a_task("base").checkout, hidden=False):
            left = {file.stem for file in docker.glob("left*")}
        assert left == {"left1", "left2", "left3"}
        for file in docker.glob("left*"):
            file.unlink()

    async def test_killed_client(self, pool, docker):
        async with pool.open(a_task("base").checkout, hidden=False) as box:
            (record,) = docker.glob("mixed-samplers-*")
            os.kill(json.loads(record.read_text())["pid"], 9)
            with pytest.raises(SandboxError, match="failed"):
                await box.exec("sleep 5", timeout_s=10)
        async with pool.open(a_task("base").checkout, hidden=False) as box:
            assert (await run(box, "echo ok")).output == "ok\n"

    async def test_modal_starts_from_what_is_ready(self, docker, tmp_path):
        class Freezing(LocalProcess):
            async def freeze(self) -> str:
                frozen = f"frozen{self.api.num_frozen}"
                self.api.num_frozen += 1
                ready = docker / f"{frozen}.image"
                shutil.copytree(
                    f"/proc/{await inner_pid(self.process.pid)}/cwd", ready, symlinks=True
                )
                return frozen

        class FreezingApi(LocalApi):
            async def start(self, image: str, workdir: str) -> LocalProcess:
                images.append(image)
                process = await super().start(image, workdir)
                return Freezing(process.process, self, image)

        images: list[str] = []
        api = FreezingApi()
        api.running = {"sb-1": f"{os.uname().nodename}/999999999/1", "sb-2": owner(os.getpid())}
        pool = ContainerPool(SandboxConfig(), 2, find=lambda _: ModalRuntime(api, LIMITS))
        for _ in range(3):
            async with pool.open(a_task("base").checkout, hidden=True) as box:
                await run(box, "echo 2 > README.md")
                assert set((await box.snapshot()).files) == {"README.md"}
        assert images == ["base", "frozen0", "frozen0"]
        assert api.ended == ["sb-1"]
        await pool.close()


async def inner_pid(pid: int) -> int:
    """The supervisor that a stand-in's process runs."""
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            return pid
        pid = int(children[0])


class TestVerdicts:
    @pytest.fixture
    def grader(self, pool):
        return GraderByTask(None, containers=pool)

    async def test_check(self, pool, grader):
        assert (await check_task(a_task("base"), grader, pool.missing)).outcome == Outcome.USABLE

    async def test_tests_of_the_patch_do_not_count(self, grader):
        patch = Patch(changed={"tests/test_cart.py": b"", "tests/conftest.py": b"", "a.py": b""})
        verdict = await grader.grade(a_task("base"), patch)
        assert verdict.reason == "the tests ended with status 1"

    async def test_what_no_patch_may_do(self, grader):
        task = a_task("base")
        for patch, reason in (
            (Patch(changed={".git/config": b""}), "belongs to git"),
            (Patch(changed={"../x": b""}), "outside the tree"),
            (Patch(changed={"link/x": b""}), "does not fit the tree"),
            (Patch(changed={}, special=("x",)), "no regular file"),
            (Patch(changed={}), "nothing changed"),
        ):
            verdict = await grader.grade(task, patch)
            assert not verdict.passed
            assert reason in verdict.reason

    async def test_no_time_is_a_verdict_and_no_reward_is_none(self, grader):
        patch = Patch(changed={"a.py": b""}, deleted=("old.txt",))
        slow = replace(a_task("base", test_command="sleep 30"), test_seconds=0.3)
        assert (await grader.grade(slow, patch)).reason == "the tests took too long"
        silent = a_task("base", test_command="true", judge=Judge.REWARD_FILE)
        with pytest.raises(SandboxError, match="no reward"):
            await grader.grade(silent, patch)
        gone = a_task("base", test_command="test ! -e old.txt -a -e hidden/answer -a -e a.py")
        assert (await grader.grade(gone, patch)).passed


def test_isolation_is_asked_for():
    command = cli.run_command("podman", "n", "o", "image:1", "/w", ContainerLimits())
    text = " ".join(command)
    for flags in (
        "podman run --rm --interactive --pull never",
        "--network none --cap-drop ALL --security-opt no-new-privileges",
        "--pids-limit 1024 --cpus 2 --memory 8589934592 --memory-swap 8589934592",
        f"--label {LABEL}=o",
        "--workdir /w --entrypoint /bin/sh image:1 -c",
    ):
        assert flags in text
    assert not {"-v", "--volume", "--mount", "--privileged"} & set(command)


def test_owners():
    assert not is_orphan(owner(os.getpid()))
    assert is_orphan(owner(os.getpid()) + "0"), "a later process with the same pid"
    assert not is_orphan("nonsense")


def test_why_not_here(docker, monkeypatch):
    here = a_task("base")
    pool = ContainerPool(SandboxConfig(runtime="docker"), 1)
    assert why_not_here(here, pool.missing) == ""
    for changes, words in (
        ({"image": "", "build_dir": "/x"}, "still to be built in /x"),
        ({"test_command": ""}, "own harness"),
    ):
        task = replace(here, checkout=replace(here.checkout, **changes))
        assert words in why_not_here(task, pool.missing)
    monkeypatch.setenv("PATH", str(docker))
    nothing = ContainerPool(SandboxConfig(), 1)
    assert why_not_here(here, nothing.missing) == (
        "needs a container (image base): no docker on PATH; no podman on PATH"
    )
