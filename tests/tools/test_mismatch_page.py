"""How a mismatch report is shown: names are text, groups are told apart, nothing is fetched."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from contracts.types import Trajectory
from tests.tools.mismatch_fixtures import groups_of, make_params, rounded, sample, save_model
from tools.mismatch_report.page import render, shades, visible
from tools.mismatch_report.report import build_report
from tools.mismatch_report.source import Source, read_checkpoint
from tools.mismatch_report.tables import show
from tools.mismatch_report.tokens import Setup
from trainer_jax.loss_config import LossConfig

HOSTILE = "a[/b]<script>$x^$\x1b[2J\\"
NUM_EXTREMES = 2


def built(checkpoint: Path, parts: list[list[Trajectory]], **known: Any) -> dict[str, Any]:
    source = Source(path=Path("groups.pb"), groups=groups_of(*parts), **known)
    names = tuple(sorted({part[0].group for part in parts}))
    setup = Setup(
        group_names=names,
        log_bands_Gx2=source.loss.log_bands(names),
        temperature=1.0,
        replay=True,
        truncates=True,
        compute=source.compute,
    )
    return build_report(
        source, setup, read_checkpoint(checkpoint), others=[], num_extremes=NUM_EXTREMES
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy") / "model", make_params(0))


@pytest.fixture(scope="module")
def parts() -> list[list[Trajectory]]:
    """A sound group, and a hostile name on other weights."""
    own, other = (rounded(make_params(seed), "bf16") for seed in (0, 9))
    sound = [raw.trajectory for raw in sample(own, group="bf16", sampler="bf16-0", seed=1)]
    sick = [raw.trajectory for raw in sample(other, sampler="x", seed=2, version=2)]
    return [sound, [replace(t, group=HOSTILE, session_id="[/s]<b>") for t in sick]]


@pytest.fixture(scope="module")
def report(checkpoint, parts) -> dict[str, Any]:
    bands = LossConfig.model_validate({"bands": {"bf16": {"ratio_low": 0.5, "ratio_high": 2}}})
    return built(checkpoint, parts, loss=bands, precision={"bf16": "bf16 weights"})


def test_names_in_the_terminal_are_text(report):
    file = io.StringIO()
    show(Console(file=file, width=250), report)
    shown = file.getvalue()
    assert "a[/b]<script>$x^$\ufffd[2J\\" in shown and "\x1b" not in shown
    assert "[/s]<b>" in shown
    assert re.search(r"bf16 .* 0\.5 \.\. 2 ", shown), "the group's band"
    assert "-> Replace the sampler, and compare" in shown
    assert "log-probs" not in shown.split("LIKELY CAUSE")[0]
    x = next(x for x in report["extremes"] if x["group"] == "bf16")
    for value in (x["sampler"], f"{x['trainer_logp']:.2f}", f"{x['sampler_logp']:.2f}"):
        assert value in shown


def test_one_sick_group_leaves_room_for_the_others(report):
    names = [x["group"] for x in report["extremes"]]
    assert names == [HOSTILE] * NUM_EXTREMES + ["bf16"] * NUM_EXTREMES


def test_the_page_is_self_contained_and_escaped(report):
    html = render(report)
    assert html.count("<svg") == 2 and "<script" not in html and "<b>" not in html
    assert "http://" not in html.replace("http://www.w3.org", "") and "src=" not in html
    assert "a[/b]&lt;script&gt;$x^$" in html, "dollars are no formula"
    assert '<p class="remedy">Replace the sampler' in html
    assert "<small>band 0.5 .. 2</small>" in html and "<small>bf16 weights</small>" in html
    ticks = re.findall(r"<text[^>]*>([^<]*)</text>", html.split("KL by version")[-1])
    assert ticks[:3] == ["1", "2", "version"], "versions are whole"
    for title in ("max", "right", "sigma"):
        assert f"<dt>{title}</dt><dd>" in html


def test_a_page_shows_nothing_that_it_lacks(checkpoint, parts):
    found = built(checkpoint, parts[:1])
    html = render(found | {"extremes": []})
    assert "<svg" not in html, "one group and one version leave nothing to compare"
    assert "precision" not in html.split("</style>")[1] and "Most extreme" not in html
    assert "No fault found: " in html


def test_many_versions_are_cut(report):
    rows = {str(v): report["overall"] for v in range(40)}
    html = render(report | {"by_version": rows})
    assert "The last 12 of 40." in html
    assert '<td class="name">28</td>' in html and '<td class="name">27</td>' not in html


def test_shares_and_signs():
    assert shades({"ratio_histogram": [0, 1, 3]}) == [("", 0), ("25.00", 30), ("75.00", 52)]
    assert visible("a\n\tb\x1b") == "a\u23ce\u21e5b\ufffd"
