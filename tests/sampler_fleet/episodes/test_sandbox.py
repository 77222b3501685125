"""What a sandbox promises, held against real bubblewrap."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import BadInputError
from sampler_fleet.episodes import cgroup
from sampler_fleet.episodes.base import SandboxError
from sampler_fleet.episodes.sandbox import (
    BubblewrapSandbox,
    Host,
    SandboxLimits,
    SandboxPool,
    find_host,
)
from tests.sampler_fleet.episodes.processes import gone, processes_of, started

TREE = {"README.md": b"hello\n", "pkg/__init__.py": b"", "pkg/a.py": b"x = 1\n"}


@pytest.fixture
async def box(pool):
    async with pool.open(TREE) as box:
        yield box


async def run(box, command, **options):
    return await box.exec(command, timeout_s=options.pop("timeout_s", 10), **options)


class TestCommands:
    async def test_run_in_the_tree(self, box):
        result = await run(box, "pwd; cat README.md pkg/a.py; echo oops >&2; exit 3")
        assert result.output == "/work\nhello\nx = 1\noops\n"
        assert result.returncode == 3
        assert not result.timed_out
        assert result.num_bytes == len(result.output)

    async def test_are_fresh_shells_on_one_tree(self, box):
        await run(box, "cd pkg; export A=1; touch made; B=2")
        result = await run(box, "pwd; echo [$A$B]; ls pkg")
        assert result.output == "/work\n[]\n__init__.py\na.py\nmade\n"

    async def test_read_stdin(self, box):
        data = os.urandom(300_000)
        result = await run(box, "md5sum; echo $?", stdin=data)
        assert result.returncode == 0
        assert len(result.output.split()[0]) == 32
        assert (await run(box, "cat")).output == ""

    async def test_have_the_tools(self, box):
        result = await run(box, "sed --version >/dev/null && grep -q hello README.md && python -V")
        assert result.returncode == 0, result.output
        major, minor = map(int, result.output.split()[1].split(".")[:2])
        assert (major, minor) >= (3, 11)

    async def test_signals_are_statuses_as_in_bash(self, box):
        assert (await run(box, "kill -9 $$")).returncode == 137

    async def test_not_utf8_is_replaced(self, box):
        result = await run(box, r"printf 'a\xff\xfeb'")
        assert result.output == "a\ufffd\ufffdb"
        assert result.num_bytes == 4

    async def test_impossible_commands_are_observations(self, box):
        for command in ("echo a\0b", "x" * 300_000):
            result = await run(box, command)
            assert result.returncode == 126
            assert "cannot start" in result.output
        assert (await run(box, "echo ok")).output == "ok\n"

    async def test_output_is_cut_to_head_and_tail(self, box):
        result = await run(box, "seq 100000", max_output=100)
        head, _, tail = result.output.partition("\n[... ")
        assert head.startswith("1\n2\n3\n")
        assert tail.endswith("99999\n100000\n")
        assert "bytes cut ...]" in tail
        assert result.num_bytes == 588895
        assert len(result.output) < 150

    async def test_output_at_the_limit_is_whole(self, box):
        assert (await run(box, "printf 0123456789", max_output=10)).output == "0123456789"

    async def test_flood_is_stopped(self, box):
        start = time.monotonic()
        result = await run(box, "head -c 1000000000 /dev/zero", timeout_s=30)
        assert result.returncode == 125
        assert result.num_bytes < 32 << 20
        assert time.monotonic() - start < 10
        assert (await run(box, "echo ok")).output == "ok\n"

    async def test_timeout_is_an_observation(self, box):
        result = await run(box, "echo before; sleep 60 & sleep 61; echo after", timeout_s=0.3)
        assert (result.returncode, result.timed_out) == (124, True)
        assert result.output == "before\n"
        assert 0.3 <= result.seconds < 5
        left = await run(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "sleep" not in left.output.replace("/proc", "")

    async def test_own_status_124_is_no_timeout(self, box):
        result = await run(box, "exit 124")
        assert (result.returncode, result.timed_out) == (124, False)

    async def test_background_does_not_block(self, box):
        result = await run(box, "(sleep 50; echo late) & echo now")
        assert result.output == "now\n"
        assert result.seconds < 5

    async def test_background_flood_does_not_block(self, box):
        result = await run(box, "yes & echo now")
        assert result.returncode == 0
        assert result.seconds < 5
        assert (await run(box, "echo ok")).output == "ok\n"


class TestIsolation:
    async def test_no_network(self, box):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            for address in ("127.0.0.1", "192.0.2.1", "8.8.8.8"):
                code = f"import socket; socket.create_connection(('{address}', {port}), 2)"
                result = await run(box, f'python3 -c "{code}"')
                assert result.returncode == 1
                assert "refused" in result.output or "unreachable" in result.output
        assert (await run(box, "cat /proc/net/dev | grep -c :")).output == "1\n"

    async def test_system_is_read_only(self, box):
        for path in ("/x", "/usr/x", "/usr/bin/x", "/etc/x", "/dev/x", "/sandbox/x", "/proc/x"):
            assert (await run(box, f"touch {path}")).returncode != 0, path
        assert (await run(box, "cat /etc/shadow; ls /root /home /sys")).returncode != 0

    async def test_no_privileges(self, box):
        result = await run(box, "grep -E 'Cap(Prm|Eff|Bnd)|NoNewPrivs' /proc/self/status")
        assert result.output.split()[1::2] == ["0" * 16, "0" * 16, "0" * 16, "1"]
        assert (await run(box, "unshare --user true")).returncode != 0
        assert (await run(box, "mount -t tmpfs none /tmp")).returncode != 0

    async def test_host_processes_are_out_of_sight(self, box):
        result = await run(box, "ls /proc | grep -c '^[0-9]*$'")
        assert int(result.output) < 8

    async def test_server_is_out_of_reach(self, box):
        await run(box, "sleep 9 & kill -9 1; kill -9 -1")
        for path in ("environ", "mem", "fd/0", "maps"):
            assert (await run(box, f"cat /proc/1/{path}")).returncode != 0
        assert (await run(box, "echo x > /proc/1/fd/0")).returncode != 0
        assert (await run(box, "echo ok")).output == "ok\n"

    async def test_environment_is_bare(self, box, monkeypatch):
        names = (await run(box, "compgen -e")).output.split()
        assert not {"VIRTUAL_ENV", "PYTHONPATH", "USER", "SSH_AUTH_SOCK"} & set(names)


class TestLimits:
    async def test_fork_bomb(self, box):
        result = await run(box, ":(){ :|:& };:; sleep 30", timeout_s=0.5)
        assert result.timed_out
        for _ in range(20):
            if (await run(box, "echo ok")).output == "ok\n":
                break
        else:
            pytest.fail("the sandbox did not recover")

    async def test_processes_are_counted(self, box):
        code = "import os, time\nfor _ in range(200):\n  if not os.fork(): time.sleep(30)"
        result = await run(box, f'python3 -c "{code}"')
        assert "Resource temporarily unavailable" in result.output
        for _ in range(20):
            if (await run(box, "echo ok", timeout_s=3)).output == "ok\n":
                break
        else:
            pytest.fail("the sandbox did not recover")

    async def test_memory(self, box):
        result = await run(box, "python3 -c 'x = bytearray(3 << 30)'")
        assert result.returncode == 1
        assert "MemoryError" in result.output
        assert (await run(box, "echo ok")).output == "ok\n"

    async def test_memory_of_all_processes(self, box, host):
        if not host.cgroup_parents:
            pytest.skip("no writable cgroups: only the memory of each process is limited")
        one = "import time; x = b'x' * (150 << 20); time.sleep(1); print('done')"
        each = " & ".join([f'python3 -c "{one}"'] * 4)
        result = await run(box, f"({each}; wait)", timeout_s=20)
        assert result.output.splitlines().count("done") < 2  # 4 times 150 MiB don't fit into 256
        assert (await run(box, "echo ok")).output == "ok\n"

    @pytest.mark.parametrize("folder", ["/work", "/tmp", "/dev/shm"])
    async def test_disk(self, box, folder):
        result = await run(
            box, f"for i in 1 2 3 4; do head -c 5000000 /dev/zero > {folder}/$i; done"
        )
        assert "No space left" in result.output
        used = await run(box, f"du -sk {folder} | cut -f1; rm -f {folder}/[1-4]; echo ok")
        size, ok = used.output.split()
        assert int(size) <= 8 << 10
        assert ok == "ok"

    async def test_cpu_time_of_a_process(self, pool, host):
        limits = SandboxLimits(cpu_seconds=1)
        box = BubblewrapSandbox(host, limits)
        try:
            await box.start(TREE)
            assert (await run(box, "while :; do :; done", timeout_s=20)).returncode in (137, 152)
        finally:
            await box.close()


class TestFiles:
    async def test_read_and_write(self, box):
        await box.write("new/deep/file", b"\0\xff" * 1000)
        assert await box.read("new/deep/file") == b"\0\xff" * 1000
        assert (await run(box, "wc -c < new/deep/file")).output == "2000\n"

    @pytest.mark.parametrize("path", ["../etc/passwd", "/etc/passwd", "a/../b", "", "pkg//a.py"])
    async def test_paths_outside_are_refused(self, box, path):
        with pytest.raises(OSError, match="below the tree"):
            await box.read(path)

    async def test_links_are_not_followed(self, box):
        await run(box, "ln -s /usr usr; ln -s /proc/self/environ env; ln -s README.md inner")
        await run(box, "mkfifo pipe; ln -s /dev/zero zero")
        for path in ("usr/bin/bash", "env", "inner", "pipe", "zero", "missing"):
            with pytest.raises(OSError):
                await box.read(path)
        with pytest.raises(OSError):
            await box.write("usr/x", b"")
        assert await box.read("README.md") == b"hello\n"

    async def test_snapshot(self, box):
        await run(box, "rm README.md; echo 2 > pkg/a.py; mkdir -p d/e; printf '\\xff' > d/e/f")
        await run(box, "ln -s /etc link; mkfifo pipe; touch $'d/\\xfe'; mkdir empty")
        await run(box, "echo secret > locked; chmod 000 locked")
        snapshot = await box.snapshot()
        assert snapshot.files == {
            "pkg/__init__.py": b"",
            "pkg/a.py": b"2\n",
            "d/e/f": b"\xff",
            "d/\udcfe": b"",
        }
        assert sorted(snapshot.special) == ["link", "locked", "pipe"]
        assert snapshot.complete

    async def test_snapshot_stops_writers(self, box):
        await run(box, "setsid bash -c 'while :; do echo x >> busy; done' &")
        first = await box.snapshot()
        assert (await box.snapshot()).files == first.files

    @pytest.mark.parametrize(
        "command", ["head -c 3000000 /dev/zero > big", "truncate -s 7M a", "touch {1..11000}"]
    )
    async def test_snapshot_is_bounded(self, box, command):
        await run(box, command)
        assert not (await box.snapshot()).complete

    async def test_deep_folders_are_no_failure(self, box):
        code = "import os\nfor _ in range(3000): os.mkdir('dddd'); os.chdir('dddd')"
        assert (await run(box, f'python3 -c "{code}"')).returncode == 0
        snapshot = await box.snapshot()
        assert snapshot.special or not snapshot.complete


class TestLife:
    async def test_close_leaves_nothing(self, pool):
        marker = f"sleep 98{os.getpid()}"
        async with pool.open(TREE) as box:
            await run(box, f"setsid {marker} & {marker} & (trap '' TERM HUP; {marker}) & :")
            assert await started(marker.replace(" ", "\0"), 3)
            assert processes_of("sandbox_supervisor")
            pid = box.pid
        assert await gone(marker.replace(" ", "\0"))
        assert not Path("/proc", str(pid)).exists()
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.exec("true", timeout_s=1)

    async def test_cancelled_command(self, pool):
        marker = f"97{os.getpid()}"
        with pytest.raises(TimeoutError):
            async with pool.open(TREE) as box, asyncio.timeout(0.3):
                await box.exec(f"sleep {marker}", timeout_s=60)
        assert await gone(marker)

    async def test_killed_from_outside(self, pool):
        async with pool.open(TREE) as box:
            asyncio.get_running_loop().call_later(0.2, os.kill, box.pid, 9)
            with pytest.raises(SandboxError, match="failed"):
                await box.exec("sleep 60", timeout_s=60)
            for call in (box.exec("true", timeout_s=1), box.snapshot(), box.read("README.md")):
                with pytest.raises(SandboxError):
                    await call
        async with pool.open(TREE) as box:
            assert (await run(box, "echo ok")).output == "ok\n"

    async def test_pool_waits_for_room(self, host):
        pool = SandboxPool(2, host=host)
        pairs = asyncio.Barrier(2)  # nobody goes on alone: the pool must let two in
        num_open = most = 0

        async def use(number):
            nonlocal num_open, most
            async with pool.open(TREE) as box:
                num_open += 1
                most = max(most, num_open)
                await pairs.wait()
                assert (await run(box, f"echo {number}")).output == f"{number}\n"
                num_open -= 1

        async with asyncio.timeout(60):
            await asyncio.gather(*(use(number) for number in range(6)))
        await pool.close()
        assert most == 2

    async def test_pool_close_ends_what_is_open(self, host):
        pool = SandboxPool(2, host=host)
        async with pool.open(TREE) as box:
            pid = box.pid
            await pool.close()
            assert not Path("/proc", str(pid)).exists()
            with pytest.raises(SandboxError):
                await box.exec("true", timeout_s=1)
        for parent in host.cgroup_parents:
            assert not list(parent.glob(f"*-{os.getpid()}-*"))

    async def test_pool_starts_again(self, host, tmp_path, caplog):
        flaky = tmp_path / "bwrap"
        flag = tmp_path / "failed"
        flaky.write_text(
            f"#!/bin/sh\n[ -e {flag} ] || {{ touch {flag}; echo no luck >&2; exit 1; }}\n"
            f'exec {host.bwrap} "$@"\n'
        )
        flaky.chmod(0o755)
        weak = replace(host, bwrap=str(flaky), drop_uid=False)
        pool = SandboxPool(1, host=weak)
        async with pool.open(TREE) as box:
            assert (await run(box, "echo ok")).output == "ok\n"
        await pool.close()
        assert "no luck" in caplog.text

    async def test_pool_gives_up(self, host):
        pool = SandboxPool(1, host=replace(host, bwrap="/bin/false", drop_uid=False), attempts=2)
        for _ in range(2):  # the slot comes back
            with pytest.raises(SandboxError):
                async with pool.open(TREE):
                    pytest.fail("it started")
        await pool.close()

    async def test_killed_program_takes_its_sandboxes_along(self, host, tmp_path):
        marker = f"96{os.getpid()}"
        program = f"""
import asyncio
from sampler_fleet.episodes.sandbox import SandboxPool
async def main():
    pool = SandboxPool(1)
    async with pool.open({{}}) as box:
        await box.exec("setsid sleep {marker} & sleep {marker}", timeout_s=60)
asyncio.run(main())
"""
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
        async with asyncio.timeout(30):
            while len(processes_of(f"sleep\0{marker}")) < 2:
                assert child.returncode is None
                await asyncio.sleep(0.05)
        child.kill()
        await child.wait()
        assert await gone(f"sleep\0{marker}")
        for parent in host.cgroup_parents:
            for _ in range(40):  # a group is busy until the kernel is done with its processes
                cgroup.sweep((parent,))
                if not list(parent.glob(f"*-{child.pid}-*")):
                    break
                await asyncio.sleep(0.05)
            assert not list(parent.glob(f"*-{child.pid}-*"))


class TestCgroups:
    """Where groups can be made, on directories that look like a hierarchy."""

    def test_v2(self, tmp_path):
        (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        folder = tmp_path / own
        folder.mkdir(parents=True, exist_ok=True)
        control = folder / "cgroup.subtree_control"
        control.write_text("cpu\n")
        assert cgroup.find_parents(tmp_path) == (folder,)
        assert control.read_text() == "+memory +pids"
        control.write_text("cpu memory pids\n")
        assert cgroup.find_parents(tmp_path) == (folder,)
        assert control.read_text() == "cpu memory pids\n"

    def test_v1(self, tmp_path):
        assert cgroup.find_parents(tmp_path) == ()
        for name in ("memory", "pids"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "cgroup.procs").touch()
        assert cgroup.find_parents(tmp_path) == (tmp_path / "memory", tmp_path / "pids")

    def test_group_and_removal(self, tmp_path):
        group = cgroup.make_group((tmp_path,), "x", memory_bytes=1, num_processes=1)
        assert group is not None
        assert [file.parent.parent for file in group.process_files] == [tmp_path]
        group.remove()
        assert not list(tmp_path.iterdir())
        assert cgroup.make_group((), "x", memory_bytes=1, num_processes=1) is None


class TestHost:
    def test_missing_bubblewrap(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(BadInputError, match="apt-get install bubblewrap"):
            find_host()

    def test_namespaces_refused(self, monkeypatch, tmp_path):
        fake = tmp_path / "bwrap"
        fake.write_text("#!/bin/sh\necho No permissions to create new namespace >&2; exit 1\n")
        fake.chmod(0o755)
        monkeypatch.setattr("shutil.which", lambda name: str(fake) if name == "bwrap" else None)
        with pytest.raises(BadInputError, match="No permissions"):
            find_host()

    def test_no_interpreter(self, host):
        with pytest.raises(BadInputError, match=r"Python 3.11 or later, found none at /bin/false"):
            find_host(["/bin/false", "/nowhere/python3"])

    async def test_interpreter_outside_usr(self, host):
        """The one of this process, even if only root can reach it."""
        private = find_host([sys.executable])
        box = BubblewrapSandbox(private, SandboxLimits())
        try:
            await box.start(TREE)
            result = await run(box, "python3 -c 'import sys, json; print(sys.version)'")
            assert result.output.strip() == sys.version.replace("\n", "")
        finally:
            await box.close()

    async def test_without_own_uid_and_cgroups(self, host):
        bare: Host = replace(host, drop_uid=False, cgroup_parents=(), limit_processes=False)
        box = BubblewrapSandbox(bare, SandboxLimits())
        try:
            await box.start(TREE)
            assert (await run(box, "cat README.md; touch /usr/x")).output.startswith("hello\n")
            assert (await run(box, "touch /usr/x")).returncode == 1
        finally:
            await box.close()
