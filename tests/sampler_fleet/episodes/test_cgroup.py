"""Where groups can be made and what is written there, on directories that look like a hierarchy.

Real groups are in test_sandbox.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sampler_fleet.episodes import cgroup

ONE = {"memory_bytes": 1, "num_processes": 1, "num_cpus": 1.0}


def own_group(root: Path) -> Path:
    """This process's group below a false hierarchy."""
    own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    folder = root / own
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").touch()
    return folder


def test_v2(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    folder = own_group(tmp_path)
    control = folder / "cgroup.subtree_control"
    control.write_text("cpu memory pids\n")
    assert cgroup.find_parents(tmp_path) == (folder,)
    assert control.read_text() == "cpu memory pids\n"


def test_v2_is_told_to_hand_on(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    control = own_group(tmp_path) / "cgroup.subtree_control"
    control.write_text("memory pids\n")
    assert cgroup.find_parents(tmp_path)
    assert control.read_text() == "+cpu"


def test_v2_above_a_group_with_processes(tmp_path, monkeypatch):
    """As under systemd: our own service's group may not hand on, the slice's does."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    service = tmp_path / "system.slice" / "gateway.service"
    service.mkdir(parents=True)
    real = Path.read_text

    def read_text(path, *args, **kwargs):
        if path == Path("/proc/self/cgroup"):
            return "0::/system.slice/gateway.service\n"
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    (service.parent / "cgroup.procs").touch()
    (service.parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert cgroup.find_parents(tmp_path) == (service.parent,)


def test_v1(tmp_path):
    assert cgroup.find_parents(tmp_path) == ()
    for name in ("memory", "pids"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    assert cgroup.find_parents(tmp_path) == (tmp_path / "memory", tmp_path / "pids")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cgroup.procs").touch()
    assert cgroup.find_parents(tmp_path)[2:] == (tmp_path / "cpu",)


def test_group_and_removal(tmp_path):
    group = cgroup.make_group((tmp_path,), "x", **ONE)
    assert group is not None
    assert [file.parent.parent for file in group.process_files] == [tmp_path]
    group.remove()
    assert not list(tmp_path.iterdir())
    assert cgroup.make_group((), "x", **ONE) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_processes_killed_for_memory(tmp_path, file, text):
    for name in ("pids", "memory"):
        (tmp_path / name).mkdir()
    group = cgroup.make_group((tmp_path / "pids", tmp_path / "memory"), "x", **ONE)
    assert group is not None
    assert group.num_oom_kills() == 0
    (group.folders[1] / file).write_text(text)
    assert group.num_oom_kills() == 2


@pytest.mark.parametrize(
    ("files", "written"),
    [
        (
            ("memory.max", "memory.swap.max", "pids.max", "cpu.max"),
            ["1048576", "0", "11", "150000 100000"],
        ),
        (("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), ["1048576"] * 2),
        (("cpu.cfs_period_us", "cpu.cfs_quota_us"), ["100000", "150000"]),
    ],
)
def test_limits_of_both_versions(tmp_path, files, written):
    folder = tmp_path / f"mixed-samplers-{os.getpid()}-x"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    cgroup.make_group((tmp_path,), "x", memory_bytes=1 << 20, num_processes=7, num_cpus=1.5)
    assert [(folder / name).read_text() for name in files] == written
