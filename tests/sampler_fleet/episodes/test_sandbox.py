"""What a sandbox promises, held against real bubblewrap."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import BadInputError
from sampler_fleet.episodes import cgroup
from sampler_fleet.episodes.base import SandboxError, Snapshot, SpentError
from sampler_fleet.episodes.sandbox import (
    BubblewrapSandbox,
    Host,
    SandboxLimits,
    SandboxPool,
    find_host,
)
from sampler_fleet.episodes.sandbox_supervisor import SNAPSHOT_S, Supervisor
from sampler_fleet.episodes.supervised import Supervised
from tests.sampler_fleet.episodes.processes import (
    children_of,
    gone,
    is_running,
    processes_of,
    started,
)

LINKS = """python3 -c "
import os
open('{folder}/a', 'w')
for n in range({number}): os.link('{folder}/a', '{folder}/' + str(n).zfill(250))
" """
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

    @pytest.mark.parametrize(
        "command",
        [
            "prlimit --pid 1 --as=1000",
            "prlimit --pid 1 --cpu=1",
            "chrt --idle --pid 0 1",
            "taskset --pid 1 1",
            "renice 19 --pid 1",
            "renice 19 --pgrp 1",
            "renice 19 --user $(id -u)",
        ],
    )
    async def test_server_can_not_be_starved(self, box, command):
        """It has the commands' user id: no signal reaches pid 1, but its limits could be set."""
        result = await run(box, command)
        assert "not permitted" in result.output, result.output
        assert (await run(box, "echo ok")).output == "ok\n"

    async def test_own_limits_and_priorities_are_free(self, box):
        code = "import os; os.nice(5); os.sched_setaffinity(0, {0}); print(os.nice(0))"
        result = await run(box, f"ulimit -n 99; ulimit -n; python3 -c '{code}'; nice -n 3 echo ok")
        assert result.output == "99\n5\nok\n"

    async def test_nothing_of_the_kernel_outlives_it(self, box):
        """Keys stay with a user id, SysV memory with no process."""
        numbers = {"x86_64": (248, 250, 29), "aarch64": (217, 219, 194)}[os.uname().machine]
        code = f"""
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
print(call({numbers[0]}, b"user", b"note", b"x", 1, -4), ctypes.get_errno())
print(call({numbers[1]}, 0, -3, 1), ctypes.get_errno())
print(call({numbers[2]}, 0, 1 << 20, 0o1600), ctypes.get_errno())
"""
        result = await run(box, "python3 -", stdin=code.encode())
        assert result.output == "-1 1\n" * 3

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

    async def test_memory_of_the_supervisor(self, host):
        """No process has names in a tmpfs: when they fill the group, the supervisor is killed."""
        if not host.cgroup_parents:
            pytest.skip("no writable cgroups: names take memory of the machine")
        fill = LINKS.format(folder="/tmp", number=10**9)
        pool = SandboxPool(1, SandboxLimits(memory_bytes=64 << 20), host=host)
        async with pool.open(TREE) as box:
            with pytest.raises(SpentError, match="commands used up its memory"):
                for _ in range(20):
                    await run(box, fill, timeout_s=30, stdin=bytes(4 << 20))
        async with pool.open(TREE) as box:  # that the kernel killed a command is no reason
            one = "import time; x = b'x' * (20 << 20); time.sleep(1); print('done')"
            each = " & ".join([f'python3 -c "{one}"'] * 4)
            assert "Killed" in (await run(box, f"({each}; wait)")).output
            asyncio.get_running_loop().call_later(0.2, os.kill, box.pid, 9)
            with pytest.raises(SandboxError, match="failed") as failure:
                await box.exec("sleep 60", timeout_s=60)
            assert failure.type is SandboxError
        await pool.close()

    async def test_processor_time_of_all_processes(self, host):
        if not any((parent / "cpu.cfs_quota_us").exists() for parent in host.cgroup_parents):
            pytest.skip("no control group for processor time of version 1")
        pool = SandboxPool(1, SandboxLimits(num_cpus=0.25), host=host)
        async with pool.open(TREE):
            (folder,) = host.cgroup_parents[2].glob(f"*-{os.getpid()}-{pool._name}-0")
            assert (folder / "cpu.cfs_quota_us").read_text() == "25000\n"
            assert (folder / "cgroup.procs").read_text().split()
        await pool.close()
        assert not folder.exists()

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

    async def test_names_are_bounded_too(self, box):
        """Or their list would be no message any more: a failure that the policy can make."""
        code = """
import os
for _ in range(15): os.mkdir("d" * 250); os.chdir("d" * 250)
for name in range(9000): os.mkfifo(str(name))
"""
        assert (await run(box, "python3 -", stdin=code.encode())).returncode == 0
        assert not (await box.snapshot()).complete

    async def test_names_are_not_held(self, box):
        """A folder's names and what the supervisor makes of them would not fit into its memory."""
        fill = LINKS.format(folder="/work", number=300_000)
        assert (await run(box, fill, timeout_s=30)).returncode == 0
        assert not (await box.snapshot()).complete

    async def test_deep_folders_are_no_failure(self, box):
        code = "import os\nfor _ in range(3000): os.mkdir('dddd'); os.chdir('dddd')"
        assert (await run(box, f'python3 -c "{code}"')).returncode == 0
        snapshot = await box.snapshot()
        assert snapshot.special or not snapshot.complete


class Full(Supervisor):
    """Out of memory right after a command was started."""

    is_cleared = False

    def _watch(self, pid, out, output, deadline):
        os.waitpid(pid, 0)
        os.close(out)
        raise OSError(errno.ENOMEM, "no memory")

    def _kill_all(self):
        self.is_cleared = True


def test_no_memory_for_a_command_is_an_observation():
    supervisor = Full(1000, 1000)
    code, timed_out, _, output = supervisor.exec(b"true", b"", 5.0, 1000)
    assert (code, timed_out) == (126, False)
    assert b"no memory" in output
    assert supervisor.is_cleared


class Refusing(Supervised):
    async def ask(self, *request, timeout_s=0.0):
        assert timeout_s > SNAPSHOT_S, "the supervisor gives up before the host does"
        raise OSError("no")


async def test_what_can_not_be_read_is_incomplete():
    """A tree that nobody can read is the policy's doing, not a failure."""
    snapshot = await Refusing(max_tree_bytes=1).snapshot()
    assert snapshot == Snapshot(files={}, special=(), complete=False)


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

    async def test_hung_supervisor_is_ended(self, pool, monkeypatch):
        """Even one that hung before it had read its tree."""
        monkeypatch.setattr("sampler_fleet.episodes.sandbox._CLOSE_S", 0.3)
        async with pool.open(TREE) as box:
            (pid,) = children_of(box.pid)
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(SandboxError, match="no answer in time"):
                await box.ask("exec", b"cat", bytes(4 << 20), 1.0, 100, timeout_s=0.3)
        for _ in range(100):
            if not is_running(pid):
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail(f"it is still there: {Path(f'/proc/{pid}/status').read_text()}")

    async def test_slots_have_user_ids_of_their_own(self, host):
        """In all pools: the kernel counts some things by user, whoever started them."""
        if not host.drop_uid:
            pytest.skip("only root can give a sandbox another user id")
        pools = [SandboxPool(2, host=host) for _ in range(2)]
        async with contextlib.AsyncExitStack() as opened:
            boxes = [
                await opened.enter_async_context(pool.open(TREE)) for pool in pools for _ in "ab"
            ]
            pids = [box.pid for box in boxes]
            uids = {os.stat(f"/proc/{pid}").st_uid for pid in pids}
            assert len(uids) == 4
            assert os.geteuid() not in uids
        for pool in pools:
            await pool.close()
        pool = SandboxPool(1, host=host)
        async with pool.open(TREE) as box:
            assert os.stat(f"/proc/{box.pid}").st_uid in uids  # they come back
        await pool.close()

    async def test_nothing_is_left_for_the_next_in_a_slot(self, host):
        pool = SandboxPool(1, host=host)
        leave = (
            "for d in /work /tmp /dev/shm; do mkdir $d/x && echo secret > $d/x/y; done; ipcmk -Q"
        )
        look = (
            "find /work /tmp /dev/shm -mindepth 1; ipcs | grep -c 0x; ls /proc | grep -c '^[0-9]'"
        )
        found = []
        for _ in range(2):
            async with pool.open({}) as box:
                found.append((await run(box, look)).output)
                assert (await run(box, leave)).returncode == 0
        await pool.close()
        assert found[0] == found[1]
        assert found[0].startswith("0\n")

    async def test_a_cancelled_close_is_finished(self, host):
        """The slot is free when the sandbox is gone, not when somebody stopped waiting for that."""
        pool = SandboxPool(1, host=host)
        opened = asyncio.Event()

        async def use():
            async with pool.open(TREE) as box:
                pids.append(box.pid)
                opened.set()

        pids: list[int] = []
        user = asyncio.create_task(use())
        await opened.wait()
        await asyncio.sleep(0)
        user.cancel()
        await asyncio.gather(user, return_exceptions=True)
        assert not Path("/proc", str(pids[0])).exists()
        assert not pool._open
        await pool.close()

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


class TestHost:
    def test_missing_bubblewrap(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(BadInputError, match="apt-get install bubblewrap"):
            find_host()

    def test_root_without_setpriv(self, monkeypatch):
        monkeypatch.setattr("os.geteuid", lambda: 0)
        monkeypatch.setattr("shutil.which", lambda name: None if name == "setpriv" else name)
        with pytest.raises(BadInputError, match="no setpriv on PATH"):
            find_host()

    def test_namespaces_refused(self, monkeypatch):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)  # for a slot's user id
            fake = Path(folder, "bwrap")
            fake.write_text("#!/bin/sh\necho No permissions to create new namespace >&2; exit 1\n")
            fake.chmod(0o755)
            monkeypatch.setattr("shutil.which", lambda name: str(fake))
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
