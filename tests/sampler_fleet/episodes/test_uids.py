"""Nobody on this machine has a sandbox's user id twice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sampler_fleet.episodes import uids
from sampler_fleet.episodes.uids import Uid

TAKE = "from sampler_fleet.episodes.uids import Uid; uid = Uid(); print(uid.number)"


def test_ids_are_apart_and_come_back():
    first, second = Uid(), Uid()
    assert first.number != second.number
    other = subprocess.run([sys.executable, "-c", TAKE], capture_output=True, check=True)
    assert int(other.stdout) not in (first.number, second.number)
    first.close()
    third = Uid()
    assert third.number <= first.number
    second.close()
    third.close()


def test_all_taken(monkeypatch):
    held = Uid()
    monkeypatch.setattr(uids, "FIRST_UID", held.number)
    monkeypatch.setattr(uids, "_NUM_UIDS", 1)
    with pytest.raises(OSError, match="all 1 user ids"):
        Uid()
    held.close()
