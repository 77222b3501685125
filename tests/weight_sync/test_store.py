"""The version store: what is visible when, and after an interruption at every step."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import BadInputError, ConflictError
from contracts.types import FileEntry, WeightFormat
from tests.weight_sync import tiny_moe
from weight_sync import durable
from weight_sync.convert import Options, convert_directory
from weight_sync.manifest import (
    CorruptError,
    checkpoint_files,
    describe_directory,
    read_manifest,
    verify_directory,
)
from weight_sync.store import VersionStore

BF16, NVFP4 = WeightFormat.BF16, WeightFormat.NVFP4


@pytest.fixture(scope="module")
def contents(tmp_path_factory) -> dict[int, Path]:
    """A different checkpoint per seed."""
    root = tmp_path_factory.mktemp("contents")
    return {seed: tiny_moe.write(root / str(seed), seed=seed) for seed in (1, 2)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionStore]:
    store = VersionStore(tmp_path / "store")
    yield store
    store.close()


def entries(directory: Path) -> list[FileEntry]:
    return list(describe_directory(directory, version=1, format=BF16, recipe="").files)


def stage(store: VersionStore, source: Path) -> Path:
    staged = store.stage()
    for path in checkpoint_files(source):
        shutil.copyfile(path, staged / path.name)
    return staged


def publish(store: VersionStore, version: int, source: Path) -> None:
    store.commit(stage(store, source), version, entries(source))


def reopen(store: VersionStore, root: Path) -> VersionStore:
    store.close()
    return VersionStore(root)


def test_a_published_version_is_whole(store, contents):
    assert (store.latest, store.versions()) == (0, [])
    publish(store, 3, contents[1])
    assert (store.latest, store.versions(), store.formats(3)) == (3, [3], [BF16])
    directory = store.directory(3, BF16)
    assert store.manifest(3, BF16) == read_manifest(directory)
    verify_directory(directory, store.manifest(3, BF16))
    tensor = next(t for t in store.manifest(3, BF16).tensors if t.name == "lm_head.weight")
    stored = (directory / tensor.file).read_bytes()[tensor.start : tensor.end]
    assert stored == tiny_moe.tensors(seed=1)["lm_head.weight"].tobytes()
    assert tensor.checksum == durable.checksum(stored)


def test_the_same_content_again_changes_nothing(store, contents):
    publish(store, 3, contents[1])
    before = (store.directory(3, BF16) / "model.safetensors").stat()
    publish(store, 3, contents[1])
    assert (store.directory(3, BF16) / "model.safetensors").stat() == before


def test_other_content_under_a_version_is_a_conflict(store, contents):
    publish(store, 3, contents[1])
    with pytest.raises(ConflictError, match="version 3 is already published"):
        publish(store, 3, contents[2])
    assert store.manifest(3, BF16).files == tuple(entries(contents[1]))


def test_versions_only_grow(store, contents):
    publish(store, 3, contents[1])
    with pytest.raises(ConflictError, match="below the newest, 3"):
        publish(store, 2, contents[2])
    assert store.versions() == [3]


def test_bytes_that_are_not_those_announced_are_refused(store, contents):
    staged = stage(store, contents[1])
    tiny_moe.write_corrupt(staged / "model.safetensors")
    with pytest.raises(CorruptError, match=r"model\.safetensors did not arrive"):
        store.commit(staged, 1, entries(contents[1]))
    assert store.latest == 0


def test_two_publishers_of_one_version_have_one_winner(store, contents):
    staged = {seed: stage(store, contents[seed]) for seed in (1, 2)}
    outcomes: dict[int, Exception | None] = {}

    def run(seed: int) -> None:
        try:
            store.commit(staged[seed], 7, entries(contents[seed]))
            outcomes[seed] = None
        except ConflictError as error:
            outcomes[seed] = error

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [seed for seed, error in outcomes.items() if error is None]
    assert store.manifest(7, BF16).files == tuple(entries(contents[winner]))


def test_the_pointer_moves_only_from_where_it_was_seen(store, contents):
    publish(store, 3, contents[1])
    with pytest.raises(ConflictError, match="expected it at 2, found it at 3"):
        store.advance(2, 4)
    with pytest.raises(ConflictError, match="pointer to version 3"):
        store.advance(3, 3)
    assert store.latest == 3


def test_a_second_process_is_refused(store, tmp_path):
    with pytest.raises(BadInputError, match="it is in use"):
        VersionStore(tmp_path / "store")


def test_a_stop_before_the_rename_leaves_the_old_state(store, contents, tmp_path):
    root = tmp_path / "store"
    publish(store, 1, contents[1])
    stage(store, contents[2])
    (root / ".LATEST.1234abcd").write_text("2\n")
    store = reopen(store, root)
    assert (store.latest, store.versions()) == (1, [1])
    assert not list((root / "staging").iterdir())
    assert not list(root.glob(".LATEST*"))
    publish(store, 2, contents[2])
    store.close()


def test_a_stop_between_rename_and_pointer_leaves_the_old_state(
    store, contents, tmp_path, monkeypatch
):
    root = tmp_path / "store"
    publish(store, 1, contents[1])

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "advance", die)
        with pytest.raises(KeyboardInterrupt):
            publish(store, 2, contents[2])
    assert (root / "versions" / "2").exists()
    assert store.versions() == [1]
    with pytest.raises(FileNotFoundError):
        store.directory(2, BF16)
    publish(store, 2, contents[1])  # also without a restart, and with other content
    assert store.manifest(2, BF16).files == tuple(entries(contents[1]))
    shutil.copytree(root / "versions" / "2", root / "versions" / "9")
    store = reopen(store, root)
    assert store.versions() == [1, 2]
    assert not (root / "versions" / "9").exists()
    store.close()


def test_a_stop_while_removing_is_finished_on_opening(store, contents, tmp_path):
    root = tmp_path / "store"
    publish(store, 5, contents[1])
    for path in (root / "versions" / ".doomed-1", root / "versions" / "5" / ".doomed-2"):
        path.mkdir()
        (path / "part").write_text("x")
    store = reopen(store, root)
    assert [p.name for p in (root / "versions").iterdir()] == ["5"]
    assert sorted(p.name for p in (root / "versions" / "5").iterdir()) == ["bf16", "published"]
    store.close()


def test_a_store_whose_newest_version_was_taken_away_is_refused(store, contents, tmp_path):
    publish(store, 1, contents[1])
    shutil.rmtree(tmp_path / "store" / "versions" / "1")
    store.close()
    with pytest.raises(BadInputError, match="version 1 in bf16, found it is gone"):
        VersionStore(tmp_path / "store")


def test_a_converted_format_appears_whole_and_can_be_made_again(store, contents):
    publish(store, 1, contents[1])
    for _ in range(2):
        manifest = store.add_format(stage(store, contents[1]), 1, NVFP4, recipe="modelopt")
        assert store.formats(1) == [BF16, NVFP4]
        assert store.manifest(1, NVFP4) == manifest == read_manifest(store.directory(1, NVFP4))
        assert manifest.recipe == "modelopt"
    store.discard(1, NVFP4)
    assert store.formats(1) == [BF16]
    with pytest.raises(FileNotFoundError):
        store.manifest(1, NVFP4)


def test_retention_keeps_the_newest_and_the_used(store, contents):
    for version in range(1, 7):
        publish(store, version, contents[1])
    open_file = (store.directory(3, BF16) / "config.json").open()
    assert store.collect(2, in_use={2}) == [1, 3, 4]
    assert store.versions() == [2, 5, 6]
    with open_file:
        assert open_file.read()
    assert store.collect(2) == [2]
    assert store.collect(0) == [5]
    assert store.versions() == [6]
    with pytest.raises(FileNotFoundError):
        store.manifest(5, BF16)


def test_a_collected_version_cannot_come_back(store, contents):
    for version in (1, 2):
        publish(store, version, contents[1])
    store.collect(1)
    with pytest.raises(ConflictError, match="versions only grow"):
        publish(store, 1, contents[1])


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*.*")}


@pytest.mark.parametrize("damage", ["remove", "empty", "other", *range(8)])
def test_a_lost_pointer_costs_no_version(store, contents, tmp_path, damage):
    """Whichever bit of it flips: marks in the versions tell what was acknowledged."""
    root = tmp_path / "store"
    for version in (1, 2):
        publish(store, version, contents[version])
    before = files_below(root / "versions")
    pointer = root / "LATEST"
    if damage == "remove":
        pointer.unlink()
    elif damage == "empty":
        pointer.write_text("")
    elif damage == "other":
        pointer.write_text("1\n")
    else:
        pointer.write_bytes(bytes([pointer.read_bytes()[0] ^ 1 << damage]) + b" x\n")
    shutil.copytree(root / "versions" / "2", root / "versions" / "3")  # never acknowledged
    store = reopen(store, root)
    assert (store.latest, store.versions()) == (2, [1, 2])
    assert files_below(root / "versions") == before
    publish(store, 3, contents[1])
    store.close()


def test_a_pointer_that_went_back_costs_no_version(store, contents, tmp_path):
    root = tmp_path / "store"
    publish(store, 1, contents[1])
    old = (root / "LATEST").read_bytes()
    publish(store, 2, contents[2])
    (root / "LATEST").write_bytes(old)
    store = reopen(store, root)
    assert store.versions() == [1, 2]
    store.close()


def test_without_pointer_and_marks_nothing_is_removed(store, contents, tmp_path):
    root = tmp_path / "store"
    publish(store, 1, contents[1])
    store.close()
    before = files_below(root / "versions")
    (root / "LATEST").unlink()
    (root / "versions" / "1" / "published").unlink()
    for _ in range(2):
        with pytest.raises(BadInputError, match=r"checksum, found none, while versions/ holds 1"):
            VersionStore(root)
    assert files_below(root / "versions") == before


def test_a_stop_before_the_mark_keeps_the_version(store, contents, tmp_path):
    root = tmp_path / "store"
    publish(store, 1, contents[1])
    mark = root / "versions" / "1" / "published"
    mark.unlink()
    store = reopen(store, root)
    assert store.versions() == [1] and mark.exists()
    store.close()


def test_what_is_not_ours_in_the_store_stays(store, contents, tmp_path):
    root = tmp_path / "store"
    publish(store, 1, contents[1])
    for name in ("٣", "007", "notes"):
        (root / "versions" / name).mkdir()
    (root / "versions" / "12").write_text("a file above the pointer")
    store = reopen(store, root)
    assert store.versions() == [1]
    assert {p.name for p in (root / "versions").iterdir()} == {"1", "٣", "007", "notes"}
    store.close()


def test_only_the_newest_version_can_be_withdrawn(store, contents, tmp_path):
    root = tmp_path / "store"
    publish(store, 1, contents[1])
    publish(store, 2**63 - 1, contents[2])
    with pytest.raises(ConflictError, match="version 1: expected it to be the newest"):
        store.withdraw(1)
    assert store.withdraw(2**63 - 1) == 1
    assert (store.latest, store.versions()) == (1, [1])
    with pytest.raises(FileNotFoundError):
        store.manifest(2**63 - 1, BF16)
    store = reopen(store, root)
    assert store.versions() == [1]
    publish(store, 2, contents[2])
    assert [store.withdraw(2), store.withdraw(1)] == [1, 0]
    with pytest.raises(ConflictError, match="found 0"):
        store.withdraw(0)
    store.close()


def test_a_manifest_of_another_version_counts_as_none(store, contents, tmp_path):
    root = tmp_path / "store"
    for version in (1, 2):
        publish(store, version, contents[version])
    store.add_format(stage(store, contents[1]), 1, NVFP4, recipe="")
    shutil.copytree(store.directory(1, NVFP4), root / "versions" / "2" / "nvfp4")
    store = reopen(store, root)
    assert (store.formats(1), store.formats(2)) == ([BF16, NVFP4], [BF16])
    with pytest.raises(CorruptError, match="has the manifest of version 1"):
        store.manifest(2, NVFP4)
    store.close()


@pytest.mark.parametrize("damage", ["remove", "json", "digit", "not utf-8"])
def test_a_format_counts_only_with_an_intact_manifest(store, contents, tmp_path, damage):
    root = tmp_path / "store"
    publish(store, 1, contents[1])
    for format in (NVFP4, BF16):
        if format == NVFP4:
            store.add_format(stage(store, contents[1]), 1, format, recipe="")
        path = store.directory(1, format) / "manifest.json"
        text = path.read_bytes()
        if damage == "remove":
            path.unlink()
        elif damage == "json":
            path.write_bytes(b"[" + text[1:])
        elif damage == "digit":
            at = text.rindex(b'"') - 1
            path.write_bytes(
                text[:at] + (b"1" if text[at : at + 1] != b"1" else b"2") + text[at + 1 :]
            )
        else:
            path.write_bytes(text[:60] + b"\xff" + text[61:])
        store = reopen(store, root)
        assert store.formats(1) == ([BF16] if format == NVFP4 else [])
    with pytest.raises(ConflictError, match="version 1"):
        publish(store, 1, contents[1])
    publish(store, 2, contents[2])  # which helps
    assert store.formats(2) == [BF16]
    store.close()


def unusable(directory: Path, what: str) -> None:
    arrays = tiny_moe.tensors()
    if what in ("nan", "infinity"):
        weights = arrays["model.layers.1.mlp.experts.2.up_proj.weight"]
        weights[3, 5] = float("nan") if what == "nan" else -float("inf")
        tiny_moe.write(directory, arrays)
    elif what == "shard":
        tiny_moe.write_sharded(directory, arrays)
        (directory / "model-00002-of-00002.safetensors").unlink()
    elif what == "no index":
        tiny_moe.write_sharded(directory, arrays)
        (directory / "model.safetensors.index.json").unlink()
    elif what == "stray":
        tiny_moe.write_sharded(directory, arrays)
        shutil.copyfile(
            directory / "model-00002-of-00002.safetensors", directory / "model-9.safetensors"
        )
    elif what == "config":
        (tiny_moe.write(directory, arrays) / "config.json").write_text("{")
    else:
        source = tiny_moe.write(directory.parent / "plain", arrays)
        convert_directory(source, directory, Options(format=NVFP4))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", r"experts\.2\.up_proj\.weight: expected finite weights"),
        ("infinity", "expected finite weights"),
        ("shard", "no model-00002-of-00002"),
        ("no index", "shards alone"),
        ("stray", "names each shard, found .*model-9"),
        ("config", r"config\.json: expected JSON"),
        ("quantized", "expected bf16, found nvfp4"),
    ],
)
def test_what_is_no_bf16_version_is_refused(store, tmp_path, what, message):
    unusable(tmp_path / "source", what)
    with pytest.raises(BadInputError, match=message):
        publish(store, 1, tmp_path / "source")
    assert (store.latest, store.versions()) == (0, [])


def test_bits_that_flipped_on_the_way_are_no_bad_input(store, contents):
    """Whatever they made of the file: it is sent again."""
    for offset in (3, 20, -1):
        staged = stage(store, contents[1])
        tiny_moe.write_corrupt(staged / "model.safetensors", offset)
        with pytest.raises(CorruptError, match="did not arrive as announced"):
            store.commit(staged, 1, entries(contents[1]))


def test_remove_tree_takes_whatever_has_the_name(tmp_path):
    (tmp_path / "directory" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("directory", "file", "link", "broken", "missing"):
        durable.remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "header"])
def test_verification_finds_any_damage(contents, tmp_path, damage):
    directory = tmp_path / "copy"
    shutil.copytree(contents[1], directory)
    manifest = describe_directory(directory, version=1, format=BF16, recipe="")
    verify_directory(directory, manifest)
    path = directory / "model.safetensors"
    if damage == "flip":
        tensor = next(t for t in manifest.tensors if t.name == "model.norm.weight")
        tiny_moe.write_corrupt(path, tensor.end - 1)
        expected = r"tensor model\.norm\.weight is not the one announced"
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
        expected = "whole safetensors file"
    elif damage == "remove":
        path.unlink()
        expected = "is missing"
    else:
        tiny_moe.write_corrupt(path, 12)
        expected = "version 1"
    with pytest.raises(CorruptError, match=expected):
        verify_directory(directory, manifest)


def test_a_manifest_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 1}')
    with pytest.raises(CorruptError, match="not those of its checksum"):
        read_manifest(tmp_path / "manifest.json")
