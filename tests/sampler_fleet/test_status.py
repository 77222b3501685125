"""The status tables show what the gateway says, and get along with what it does not know."""

from __future__ import annotations

import io

from rich.console import Console

from contracts.pb import fleet_pb2
from sampler_fleet.status import render
from tests.sampler_fleet.web.statuses import ALARM, make_status


def text_of(reply: fleet_pb2.StatusReply) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(reply))
    return console.export_text()


def test_the_tables_show_groups_samplers_costs_and_alarms():
    text = text_of(make_status(3, alarms=(ALARM,)))
    (row,) = [line for line in text.splitlines() if line.startswith("│ h100-fp8 ")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:3] == ["h100-fp8", "train", "1/3"], "one of the three asked for is ready"
    assert cells[-4:] == ["0.00240", "1.20%", "140.05", "620.15"]
    assert f"! {ALARM}" in text
    assert "update 40 made version 41 from tokens 2.7 versions old" in text
    assert "waiting for a place 12" in text


def test_a_gateway_that_knows_nothing_yet_has_a_status():
    group = fleet_pb2.GroupState(group="a", purpose="train")
    text = text_of(fleet_pb2.StatusReply(groups=[group]))
    assert "no update yet" in text
    assert "no counters yet" in text
