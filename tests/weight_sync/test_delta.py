"""Deltas between real files: exact, small, and never applied to what they don't fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.weight_sync.tiny_moe import write_corrupt
from weight_sync import delta
from weight_sync.delta import DeltaError, apply_delta, write_delta, write_deltas

DTYPES = (np.uint16, np.uint8, np.float32)


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    save_file(arrays, path)
    return path


def changed(old: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A copy in which about `share` of the elements have other bits."""
    bits = old.copy().reshape(-1).view(f"u{old.dtype.itemsize}")
    where = np.flatnonzero(rng.random(bits.size) < share)
    bits[where] += rng.integers(1, 256, len(where)).astype(bits.dtype)
    return bits.view(old.dtype).reshape(old.shape)


def make(rng: np.random.Generator, *sizes: int) -> dict[str, np.ndarray]:
    return {
        f"{name}.{dtype.__name__}": rng.integers(0, 250, size).astype(dtype)
        for dtype in DTYPES
        for name, size in enumerate(sizes)
    }


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.9, 1.0]),
    run=st.sampled_from([7, 64, 1 << 24]),
    seed=st.integers(0, 99),
)
def test_the_new_file_comes_out(tmp_path_factory, sizes, share, run, seed):
    folder = tmp_path_factory.mktemp("delta")
    rng = np.random.default_rng(seed)
    arrays = make(rng, *sizes)
    old = write(folder / "old", arrays)
    new = write(folder / "new", {k: changed(v, share, rng) for k, v in arrays.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_RUN", run)
        size = write_delta(old, new, folder / "delta")
    assert size == (folder / "delta").stat().st_size
    apply_delta(folder / "delta", old)
    assert old.read_bytes() == new.read_bytes()


def test_a_change_in_two_hundred_costs_less_than_a_hundredth(tmp_path):
    """One unit in the last place of 0.5 % of BF16 weights, as a small learning rate moves them."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, 1 << 20).astype(np.uint16)
    step = (rng.random(old.size) < 0.005) * rng.choice([1, 65535], old.size)
    new = old + step.astype(np.uint16)
    files = [write(tmp_path / name, {"w": w}) for name, w in (("old", old), ("new", new))]
    size = write_delta(*files, tmp_path / "delta")
    assert size is not None and size < old.nbytes / 100


def test_when_everything_changes_the_delta_is_hardly_larger_than_the_tensor(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 1 << 16, 1 << 16).astype(np.uint16) for _ in range(2)]
    files = [write(tmp_path / str(i), {"w": w}) for i, w in enumerate(arrays)]
    size = write_delta(*files, tmp_path / "delta")
    assert size is not None and size < arrays[0].nbytes * 1.01 + 500


def test_no_change_costs_an_index(tmp_path):
    file = write(tmp_path / "a", {"w": np.arange(1000, dtype=np.uint16)})
    size = write_delta(file, file, tmp_path / "delta")
    assert size is not None and size < 200
    before = file.read_bytes()
    apply_delta(tmp_path / "delta", file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        {"w": np.zeros(4, np.uint16), "v": np.zeros(4, np.uint16)},
        {"w": np.zeros((2, 4), np.uint16)},
        {"w": np.zeros(8, np.int16)},
        {"u": np.zeros(8, np.uint16)},
    ],
    ids=["another tensor", "another shape", "another dtype", "another name"],
)
def test_files_of_other_tensors_have_no_delta(tmp_path, other):
    one = write(tmp_path / "one", {"w": np.zeros(8, np.uint16)})
    two = write(tmp_path / "two", other)
    assert write_delta(one, two, tmp_path / "delta") is None
    assert not (tmp_path / "delta").exists()
    write_delta(one, one, tmp_path / "delta")
    with pytest.raises(DeltaError, match="other tensors"):
        apply_delta(tmp_path / "delta", two)


def test_a_directory_with_another_shard_has_no_deltas(tmp_path):
    old, new, out = (tmp_path / name for name in ("old", "new", "out"))
    for folder in (old, new, out):
        folder.mkdir()
    for folder in (old, new):
        write(folder / "a.safetensors", {"w": np.arange(8, dtype=np.uint16)})
    assert write_deltas(old, new, out) == (out / "a.safetensors.delta").stat().st_size
    shutil.rmtree(out)
    out.mkdir()
    write(new / "b.safetensors", {"v": np.arange(8, dtype=np.uint16)})
    assert write_deltas(old, new, out) is None


def test_any_flipped_bit_is_an_error_or_does_not_matter(tmp_path):
    """The caller checks the result: no damage may end the process or write elsewhere."""
    rng = np.random.default_rng(0)
    arrays = make(rng, 200)
    old = write(tmp_path / "old", arrays)
    new = write(tmp_path / "new", {k: changed(v, 0.1, rng) for k, v in arrays.items()})
    write_delta(old, new, tmp_path / "delta")
    refused = 0
    size = old.stat().st_size
    for offset in range((tmp_path / "delta").stat().st_size):
        for name in ("old", "delta"):
            shutil.copyfile(tmp_path / name, tmp_path / f"{name}.copy")
        write_corrupt(tmp_path / "delta.copy", offset)
        try:
            apply_delta(tmp_path / "delta.copy", tmp_path / "old.copy")
        except DeltaError:
            refused += 1
        assert (tmp_path / "old.copy").stat().st_size == size
    assert refused


def test_a_cut_delta_is_refused(tmp_path):
    file = write(tmp_path / "a", {"w": np.arange(100, dtype=np.uint16)})
    write_delta(file, file, tmp_path / "delta")
    whole = (tmp_path / "delta").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length] or b"\0")
        with pytest.raises(DeltaError):
            apply_delta(tmp_path / "cut", file)
