"""Conversions that a kill interrupts: continued by the same command, never mixed with another's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import BadInputError, ConflictError
from contracts.types import WeightFormat
from tests.weight_sync import tiny_moe
from weight_sync import journal
from weight_sync.convert import Options, convert_directory, convert_resumably
from weight_sync.journal import Journal, resuming
from weight_sync.safetensors_file import Checkpoint, Writer, read_headers

OPTIONS = Options(format=WeightFormat.NVFP4)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_moe.write(tmp_path / "source")


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def expected(source: Path, options: Options = OPTIONS) -> dict[str, bytes]:
    target = source.with_name("expected")
    convert_directory(source, target, options)
    return content(target)


def interrupt(source: Path, target: Path, options: Options = OPTIONS, *, after: int = 9) -> None:
    """Stops like a crash after some actions, with all of them journalled."""
    heard: list[int] = []

    def on_progress(num_bytes: int) -> None:
        heard.append(num_bytes)
        if len(heard) == after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_FLUSH_EVERY_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            convert_resumably(source, target, options, on_progress=on_progress)


def done_before(source: Path, target: Path, options: Options = OPTIONS) -> int:
    """Bytes that a conversion finds done when it starts; it runs to its end."""
    started: list[int] = []
    convert_resumably(source, target, options, on_start=started.append)
    return started[0]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_an_undisturbed_conversion_gives_the_same_and_leaves_nothing(source, tmp_path):
    assert done_before(source, tmp_path / "out") == 0
    assert names(tmp_path) == {"source", "out"}
    assert content(tmp_path / "out") == expected(source)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_conversion_continues(source, tmp_path, threads):
    options = Options(format=WeightFormat.NVFP4, threads=threads)
    interrupt(source, tmp_path / "out", options)
    assert names(tmp_path) == {"source", ".out.partial"}
    assert done_before(source, tmp_path / "out") > 0  # with one thread, which changes no byte
    assert content(tmp_path / "out") == expected(source)
    assert names(tmp_path) == {"source", "out", "expected"}


def test_what_is_journalled_is_not_done_again(source, tmp_path, monkeypatch):
    interrupt(source, tmp_path / "out", after=9)
    written: list[str] = []
    write = Writer.write

    def counting(self: Writer, name: str, array: np.ndarray) -> None:
        written.append(name)
        write(self, name, array)

    monkeypatch.setattr(Writer, "write", counting)
    convert_resumably(source, tmp_path / "out", OPTIONS)
    resumed = set(written)
    written.clear()
    convert_directory(source, tmp_path / "whole", OPTIONS)
    assert resumed < set(written)


@pytest.mark.parametrize(
    "other",
    [
        Options(format=WeightFormat.FP8_BLOCK),
        Options(format=WeightFormat.NVFP4, recipe="te"),
        Options(format=WeightFormat.NVFP4, ignore=("model.layers.0.*",)),
    ],
)
def test_another_command_starts_anew(source, tmp_path, other):
    interrupt(source, tmp_path / "out")
    assert done_before(source, tmp_path / "out", other) == 0
    assert content(tmp_path / "out") == expected(source, other)


def test_a_source_that_changed_starts_anew(source, tmp_path):
    interrupt(source, tmp_path / "out")
    tiny_moe.write(source, seed=1)
    os.utime(source / "model.safetensors", ns=(0, 0))
    assert done_before(source, tmp_path / "out") == 0
    assert content(tmp_path / "out") == expected(source)


def test_a_source_whose_bytes_changed_but_not_its_times_starts_anew(source, tmp_path):
    interrupt(source, tmp_path / "out")
    path = source / "model.safetensors"
    before = path.stat()
    tiny_moe.write_corrupt(path, Checkpoint(source).tensors["model.norm.weight"].start)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert done_before(source, tmp_path / "out") == 0
    assert content(tmp_path / "out") == expected(source)


def test_another_file_of_the_same_name_and_times_starts_anew(source, tmp_path):
    interrupt(source, tmp_path / "out")
    shutil.copytree(source, tmp_path / "copy")
    for path in source.iterdir():
        assert (tmp_path / "copy" / path.name).stat().st_mtime_ns == path.stat().st_mtime_ns
    shutil.rmtree(source)
    os.rename(tmp_path / "copy", source)
    assert done_before(source, tmp_path / "out") == 0


def spoil_length(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def spoil_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 64)


@pytest.mark.parametrize("spoil", [Path.unlink, spoil_length, spoil_header])
def test_a_shard_that_is_not_as_it_was_left_starts_anew(tmp_path, spoil):
    source = tiny_moe.write_sharded(tmp_path / "source", tiny_moe.tensors())
    interrupt(source, tmp_path / "out")
    spoil(tmp_path / ".out.partial" / "checkpoint" / "model-00001-of-00002.safetensors")
    assert done_before(source, tmp_path / "out") == 0
    assert content(tmp_path / "out") == expected(source)


def test_a_journal_without_its_checkpoint_starts_anew(source, tmp_path):
    interrupt(source, tmp_path / "out")
    os.rename(tmp_path / ".out.partial" / "checkpoint", tmp_path / "moved")
    assert done_before(source, tmp_path / "out") == 0
    assert content(tmp_path / "out") == expected(source)


def end_after_the_rename(source: Path, target: Path) -> None:
    def die(final: Path) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "discard", die)
        with pytest.raises(KeyboardInterrupt):
            convert_resumably(source, target, OPTIONS)
    assert names(target.parent) == {"source", "out", ".out.partial"}


def test_a_run_that_ended_after_the_rename_is_finished_by_the_same_command(source, tmp_path):
    end_after_the_rename(source, tmp_path / "out")
    checked: list[Path] = []
    started: list[int] = []
    convert_resumably(
        source, tmp_path / "out", OPTIONS, on_start=started.append, check=checked.append
    )
    assert names(tmp_path) == {"source", "out"}
    assert content(tmp_path / "out") == expected(source)
    assert started == [sum(array.nbytes for array in tiny_moe.tensors().values())]
    assert checked == [tmp_path / "out"]
    with pytest.raises(BadInputError, match="it exists"):
        convert_resumably(source, tmp_path / "out", OPTIONS)


def test_what_another_conversion_made_is_not_taken_for_ours(source, tmp_path):
    end_after_the_rename(source, tmp_path / "out")
    with pytest.raises(BadInputError, match="it exists"):
        convert_resumably(source, tmp_path / "out", Options(format=WeightFormat.FP8_BLOCK))
    spoil_length(tmp_path / "out" / "model.safetensors")
    with pytest.raises(BadInputError, match="it exists"):
        convert_resumably(source, tmp_path / "out", OPTIONS)


def test_a_result_appears_only_when_it_is_checked(source, tmp_path):
    """A kill meanwhile loses nothing; a result that is refused is made anew."""

    def killed(directory: Path) -> None:
        assert directory.is_relative_to(tmp_path / ".out.partial")
        assert read_headers(directory / "model.safetensors")
        raise KeyboardInterrupt

    def refused(directory: Path) -> None:
        raise BadInputError("tensor w", expected="another", found="this")

    with pytest.raises(KeyboardInterrupt):
        convert_resumably(source, tmp_path / "out", OPTIONS, check=killed)
    assert names(tmp_path) == {"source", ".out.partial"}
    started: list[int] = []
    with pytest.raises(BadInputError, match="tensor w"):
        convert_resumably(source, tmp_path / "out", OPTIONS, on_start=started.append, check=refused)
    assert started == [sum(array.nbytes for array in tiny_moe.tensors().values())]
    assert names(tmp_path) == {"source"}


def test_a_line_that_a_kill_cut_off_does_not_count(tmp_path):
    def read() -> set[int]:
        with resuming(tmp_path / "out", "f") as (_, log):
            return set(log.done)

    assert read() == set()
    path = tmp_path / ".out.partial" / "journal"
    path.write_text("f\n3\n17\n1")
    assert read() == {3, 17}
    path.write_bytes(b"f\n3\n\x00\x00\x00\n5\n")
    assert read() == {3}
    path.write_text("f")
    assert read() == set()
    path.write_text("g\n3\n")
    assert read() == set()


def test_bytes_are_flushed_before_the_line_that_vouches_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_FLUSH_EVERY_S", 0.0)
    log = Journal(tmp_path / "journal", "f", {1})
    seen: list[str] = []
    log.add(2, lambda: seen.append((tmp_path / "journal").read_text()))
    assert seen == ["f\n1\n"]
    assert (tmp_path / "journal").read_text() == "f\n1\n2\n"
    log.close()


def test_a_second_conversion_to_the_same_place_is_refused(source, tmp_path):
    with (
        resuming(tmp_path / "out", "f"),
        pytest.raises(ConflictError, match="another conversion is writing it"),
    ):
        convert_resumably(source, tmp_path / "out", OPTIONS)
    assert done_before(source, tmp_path / "out") == 0


def test_a_source_at_fault_leaves_nothing(tmp_path):
    arrays = tiny_moe.tensors()
    arrays["model.layers.1.mlp.experts.2.up_proj.weight"][0, 0] = np.inf
    source = tiny_moe.write(tmp_path / "source", arrays)
    with pytest.raises(BadInputError, match="1 NaN or infinite"):
        convert_resumably(source, tmp_path / "out", OPTIONS)
    assert names(tmp_path) == {"source"}


def test_a_full_disk_keeps_what_was_done(source, tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_FLUSH_EVERY_S", 0.0)
    write = Writer.write

    def full(self: Writer, name: str, array: np.ndarray) -> None:
        if "layers.1.mlp.experts.2" in name:
            raise OSError(28, "No space left on device")
        write(self, name, array)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", full)
        with pytest.raises(OSError, match="No space left"):
            convert_resumably(source, tmp_path / "out", OPTIONS)
    assert done_before(source, tmp_path / "out") > 0
    assert content(tmp_path / "out") == expected(source)


def test_too_little_room_is_told_before_anything_is_lost(source, tmp_path, monkeypatch):
    interrupt(source, tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(OSError, match=r"MB needed, 0\.0 MB free"):
            convert_resumably(source, tmp_path / "out", OPTIONS)
    assert done_before(source, tmp_path / "out") > 0


@pytest.mark.slow
def test_kill_9_of_the_tool_and_the_same_command_again(tmp_path):
    source = tiny_moe.write(tmp_path / "source", tiny_moe.tensors(E=700))
    options = Options(format=WeightFormat.NVFP4, recipe="4over6")
    tool = [sys.executable, "-m", "tools.convert_checkpoint", source, tmp_path / "out"]
    tool += ["--format", "nvfp4", "--recipe", "4over6"]
    lines = tmp_path / ".out.partial" / "journal"
    process = subprocess.Popen(tool, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not lines.exists() or lines.read_text().count("\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert names(tmp_path) == {"source", ".out.partial"}
    again = subprocess.run(tool, capture_output=True, text=True, check=True)
    assert "continuing an interrupted run" in again.stdout
    assert content(tmp_path / "out") == expected(source, options)
    assert names(tmp_path) == {"source", "out", "expected"}
