"""Metrics: what a status and a reading become, and that document and dashboard name just these."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from contracts.pb import fleet_pb2
from contracts.types import Switch
from sampler_fleet.engines.base import EngineLoad
from sampler_fleet.metrics import FleetCollector, SamplerCollector, SamplerReading, expose
from tests.sampler_fleet.web.statuses import HOSTILE, make_sampler, make_status

ROOT = Path(__file__).parents[2]


def reading(switch: Switch | None = None) -> SamplerReading:
    return SamplerReading(
        sampler_id="big-0",
        group="big",
        load=EngineLoad(
            num_running=3, num_waiting=1, tokens_per_second=120.5, kv_used_fraction=0.25
        ),
        version=7,
        num_tokens=4096,
        switch=switch,
    )


SWITCH = Switch(
    version=7,
    base_version=6,
    num_bytes=10**6,
    fetch_s=1.0,
    apply_s=2.0,
    verify_s=0.5,
    load_s=0.75,
    pause_s=0.1,
)


def values(collector) -> dict[tuple[str, ...], float]:
    """Every sample by its name without the prefix and its values in the order of their labels."""
    text = expose(collector)[0].decode()
    return {
        (
            s.name.removeprefix("mixed_samplers_"),
            *(s.labels[label] for label in sorted(s.labels)),
        ): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_a_status_as_metrics():
    status = make_status(40)  # version 42 was made at 30
    found = values(FleetCollector(status))
    assert found["newest_version",] == 42
    assert found["episodes_in_flight",] == 500
    assert found["events_total", "failovers"] == 17
    assert found["samplers", "h100-fp8", "draining"] == 1
    assert found["samplers", "h100-fp8", "lost"] == 1
    assert found["samplers", "a100-bf16", "lost"] == 0
    assert found["samplers_target", "h200-fp8", "train"] == 4
    assert found["tokens_sampled_total", "h200-fp8", "train"] == status.groups[1].tokens_sampled
    assert found["sampler_version_lag", "h100-fp8", "h100-fp8-0"] == 0
    assert found["sampler_version_lag", "h100-fp8", "h100-fp8-1"] == 1
    assert ("sampler_version", "h100-fp8", "h100-fp8-2") not in found, "it is lost"
    assert found["kl_nats", "h100-fp8", "train"] == pytest.approx(0.0024)
    assert found["out_of_band_ratio", "h100-fp8", "train"] == pytest.approx(0.012)
    assert found["gpu_seconds_total", "b300-nvfp4", "train"] == pytest.approx(3600 * (210 + 2 / 3))
    assert found["cost_dollars_total", "b300-nvfp4", "train"] == pytest.approx(932)
    assert ("cost_dollars_total", "a100-bf16", "train") not in found, "it has no price"
    open_now = sum(s.num_sessions for s in status.samplers if s.register.group == "h200-fp8")
    assert found["sessions", "h200-fp8", "train"] == open_now > 0
    assert found["update_staleness_versions",] == pytest.approx(2.74)


def test_what_nobody_knows_has_no_sample():
    group = fleet_pb2.GroupState(group="big", purpose="train", capacity_share=1.0)
    found = values(FleetCollector(fleet_pb2.StatusReply(groups=[group])))
    assert found["newest_version",] == 0 and found["samplers", "big", "ready"] == 0
    names = {name for name, *_ in found}
    assert not names & {"kl_nats", "samplers_target", "gpu_seconds_total", "update_step"}
    assert not names & {"trajectories_taken_per_second", "session_duration_seconds"}


def test_the_trainer_may_be_ahead_of_all_samplers():
    status = make_status()
    status.update.version = 45
    found = values(FleetCollector(status))
    assert found["newest_version",] == 45
    assert found["sampler_version_lag", "b300-nvfp4", "b300-nvfp4-0"] == 4


def test_a_reading_as_metrics():
    found = values(SamplerCollector(reading(SWITCH)))
    of = ("big", "big-0")
    assert found["engine_requests_running", *of] == 3 and found["engine_requests_waiting", *of] == 1
    assert found["engine_tokens_drawn_total", *of] == 4096
    assert found["engine_tokens_per_second", *of] == 120.5
    assert found["engine_kv_used_ratio", *of] == 0.25 and found["engine_version", *of] == 7
    seconds = {key[2]: value for key, value in found.items() if key[0] == "engine_switch_seconds"}
    assert seconds == {"fetch": 1.0, "apply": 2.0, "verify": 0.5, "load": 0.75, "pause": 0.1}
    assert not any("switch" in name for name, *_ in values(SamplerCollector(reading())))


def test_labels_from_outside_are_escaped():
    name = f'{HOSTILE}\n"}}'
    status = make_status()
    status.samplers.append(make_sampler(name, "h200-fp8"))
    assert ("sampler_sessions", "h200-fp8", name) in values(FleetCollector(status))


def test_a_scraper_gets_the_format_it_asks_for():
    body, content_type = expose(FleetCollector(make_status()), "application/openmetrics-text")
    assert content_type.startswith("application/openmetrics-text")
    assert len(list(parse_openmetrics(body.decode()))) > 20


def exported() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and label names of every metric, by its name on the wire."""
    found = {}
    for collector in (FleetCollector(make_status(40)), SamplerCollector(reading(SWITCH))):
        for family in text_string_to_metric_families(expose(collector)[0].decode()):
            suffix = "_total" if family.type == "counter" else ""
            labels = tuple(sorted(family.samples[0].labels)) if family.samples else ()
            found[family.name.removesuffix(suffix) + suffix] = (family.type, labels)
    return found


def test_the_document_lists_every_metric():
    text = (ROOT / "docs" / "observability.md").read_text()
    rows = re.findall(r"^\| `(mixed_samplers_\w+)` \| (\w+) \| ([\w, ]*)\| \w", text, re.MULTILINE)
    listed = {
        name: (kind, tuple(sorted(filter(None, labels.replace(" ", "").split(",")))))
        for name, kind, labels in rows
    }
    assert len(rows) == len(listed) and listed == exported()


def test_every_name_follows_the_conventions_of_prometheus():
    for name, (kind, _) in exported().items():
        assert re.fullmatch(r"mixed_samplers_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter"), name


def test_the_dashboard_names_metrics_that_exist():
    dashboard = json.loads((ROOT / "examples" / "grafana" / "dashboard.json").read_text())
    panels, known = dashboard["panels"], exported()
    used = set()
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            names = set(re.findall(r"mixed_samplers_\w+", target["expr"]))
            assert names and names <= set(known), panel["title"]
            selected = re.findall(r"(mixed_samplers_\w+)(\{[^}]*\})?", target["expr"])
            for name, selector in selected:
                chosen = selector == '{instance="$gateway"}'
                assert chosen != name.startswith("mixed_samplers_engine_"), "another target's"
            by = re.findall(r"(?:by|on) \(([\w, ]+)\)", target["expr"])
            labels = {label for name in names for label in known[name][1]}
            assert set(", ".join(by).split(", ")) - {""} <= labels, panel["title"]
            used |= names
    variable = dashboard["templating"]["list"][1]["query"]["query"]
    assert re.findall(r"mixed_samplers_\w+", variable)[0] in known
    assert {panel["id"] for panel in panels} == set(range(1, len(panels) + 1))
    cells = [
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len(used) >= 20
