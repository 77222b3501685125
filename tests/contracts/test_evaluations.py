"""Records of an evaluation: what is added stays, what a kill leaves of a line goes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import BadInputError
from contracts.evaluations import (
    RecordFile,
    lock_evaluation,
    patch_from_json,
    patch_to_json,
    read_records,
)
from contracts.types import Patch

paths = st.text(st.characters(exclude_categories=()), min_size=1)  # lone surrogates as well


@given(
    st.builds(
        Patch,
        changed=st.dictionaries(paths, st.binary(max_size=64)),
        deleted=st.lists(paths).map(tuple),
        special=st.lists(paths).map(tuple),
        complete=st.booleans(),
    )
)
def test_a_patch_comes_back_from_a_file(patch):
    assert patch_from_json(json.loads(json.dumps(patch_to_json(patch)))) == patch


@pytest.mark.parametrize("left", ["", '{"n": ', '{"n": 3}', "\x00\x00"])
def test_a_line_without_an_end_is_taken_away(tmp_path, left):
    path = tmp_path / "records.jsonl"
    path.write_text('{"n": 1}\n' + left)
    assert read_records(path) == [{"n": 1}]
    file = RecordFile(path)
    assert file.records == [{"n": 1}]
    file.add({"n": 2})
    file.close()
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n'


def test_there_need_be_no_file(tmp_path):
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    file = RecordFile(path)
    file.add({"name": "a\nb"})
    assert read_records(path) == [{"name": "a\nb"}], "on the disk while it is open"
    file.close()


@pytest.mark.parametrize("line", ["{", "[1]", "\x00"])
def test_damage_in_the_middle_is_refused(tmp_path, line):
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"n": 1}}\n{line}\n{{"n": 2}}\n')
    with pytest.raises(BadInputError, match="line 2: expected"):
        read_records(path)


def test_one_at_a_time(tmp_path):
    with lock_evaluation(tmp_path), pytest.raises(BadInputError, match="one at work"):
        lock_evaluation(tmp_path)
    lock_evaluation(tmp_path).close()
