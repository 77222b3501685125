"""The report of a sweep: its statistics, what it says of partial results, how it looks."""

from __future__ import annotations

import json
import re
import statistics as plain
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from scipy import stats

from contracts.errors import BadInputError
from tests.sampler_fleet.web import test_page as live_page
from tests.tools.recorded_run import make_run
from tests.tools.sweep_results import (
    anatomy_row,
    make_results,
    make_sweep,
    windows_of,
    write_result,
)
from tests.trainer_jax.test_sweep import record, write_run
from tools.stability_report import __main__ as command
from tools.stability_report.figures import _points
from tools.stability_report.page import check, pages_of, write
from tools.stability_report.runs import Run, paired, read_scales
from tools.stability_report.statistics import equivalence, interval_of
from tools.stability_report.tables import Cell, Table, tables_of
from trainer_jax.anatomy import anatomy
from trainer_jax.recorded import read_recorded
from trainer_jax.sweep import planned_runs
from trainer_jax.sweep_results import results_file, write_results

chromium, tab = live_page.chromium, live_page.tab

FINDINGS = "## Findings\n\nIt <b>agrees</b>, see `here`.\n"
INDEX, README = Path("index.html"), Path("README.md")


class TestStatistics:
    def test_an_interval_is_students(self):
        values = [0.7, 0.75, 0.71, 0.8]
        found = interval_of(values)
        known = stats.t.interval(0.95, 3, plain.fmean(values), stats.sem(values))
        assert (found.low, found.high) == pytest.approx(known)

    @pytest.mark.parametrize("shift", [0.0, 0.03, -0.04, 0.2])
    def test_equivalence_is_two_one_sided_tests(self, shift):
        differences = [shift + x for x in (0.01, -0.02, 0.0, 0.02, -0.01)]
        found = equivalence(differences, margin=0.05)
        above = stats.ttest_1samp(differences, -0.05, alternative="greater").pvalue
        below = stats.ttest_1samp(differences, 0.05, alternative="less").pvalue
        assert found.p == pytest.approx(max(above, below))
        is_within = found.interval.low > -0.05 and found.interval.high < 0.05
        assert is_within == (found.p < 0.05)

    def test_differences_without_spread(self):
        assert equivalence([0.01, 0.01]).p == 0.0
        assert equivalence([0.06, 0.06]).p == 1.0


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Results of one seed of two, and of nothing of the other scale."""
    sweep = make_sweep(tmp_path_factory.mktemp("sweep"))
    make_results(sweep, seeds=[0])
    return sweep


@pytest.fixture(scope="module")
def scales(sweep):
    return read_scales(sweep, sweep.results)


@pytest.fixture(scope="module")
def pages(scales) -> dict[Path, str]:
    return pages_of(scales, FINDINGS)


@pytest.fixture(scope="module")
def tables(scales) -> dict[str, Table]:
    return {table.title: table for table in tables_of(scales[0])}


def row(table: Table, *names: str) -> dict[str, Cell]:
    """By column; of columns of one name the last."""
    (found,) = (r for r in table.rows if tuple(cell.text for cell in r[: len(names)]) == names)
    return dict(zip(table.columns, found, strict=True))


class TestRuns:
    def test_smoothing_is_over_two_windows_by_their_updates(self):
        windows = [
            {"first": 1, "last": 10, "reward": 0.2},
            {"first": 11, "last": 20, "reward": 0.4},
            {"first": 21, "last": 25, "reward": 1.0},
            {"first": 26, "last": 30, "reward": None},
        ]
        assert Run({}, windows).smoothed("reward") == pytest.approx([0.3, 0.6])
        assert Run({}, windows[:1]).smoothed("reward") == [0.2]
        assert Run({}, windows).smoothed("kl") == []
        assert Run({}, windows).series("reward")[-1] == (25, 1.0)

    def test_pairs_share_seed_and_warm_start(self, scales):
        mixed, other = scales[0].twins[0]
        pairs = paired(scales[0].runs_of(mixed), scales[0].runs_of(other)[1:])
        assert [(a.head["warm_start"], b.head["warm_start"]) for a, b in pairs] == [("two", "two")]
        assert pairs[0][0].head["fleet"] == "mixed" and pairs[0][1].head["fleet"] == "homogeneous"

    def test_results_of_another_declaration_are_refused(self, sweep, tmp_path):
        run = planned_runs(sweep, "small")[0]
        for change, words in (({"digest": "0"}, "as it is declared"), ({"run": "x"}, "declares")):
            write_result(tmp_path, run, **change)
            with pytest.raises(BadInputError, match=words):
                read_scales(sweep, tmp_path)

    def test_a_file_of_something_else_is_refused(self, sweep, tmp_path):
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "x.jsonl").write_text("{}\n")
        with pytest.raises(BadInputError, match="a head and windows"):
            read_scales(sweep, tmp_path)


class TestTables:
    def test_partial_results_are_counted(self, pages, tables):
        text = pages[README]
        assert (
            "**10 of 21 declared runs are in this report: small 10 of 20, still 0 of 1.**" in text
        )
        assert "## Scale still: 0 of 1 runs\n\nNo run is finished yet." in text
        assert row(tables["Reward and held-out tasks"], "grpo mixed")["runs"].text == "2 of 4"

    def test_a_pass_rate_has_an_interval_over_runs(self, tables):
        found = row(tables["Reward and held-out tasks"], "sc+mis+top-p mixed")
        known = interval_of([0.81 + 0.05, 0.83 + 0.05])
        assert found["after"].text == f"{known.mean:.3f}"
        assert found["after"].aside == f"{known.low:.3f} .. {min(1.0, known.high):.3f}"

    def test_a_single_run_keeps_its_own_interval(self, sweep, tmp_path):
        write_result(tmp_path, planned_runs(sweep, "small")[0])
        table = next(iter(tables_of(read_scales(sweep, tmp_path)[0])))
        assert row(table, "grpo mixed")["after"] == Cell("0.360", "0.210 .. 0.410")
        assert row(table, "sc mixed")["runs"].text == "-"

    def test_collapse(self, tables):
        found = row(tables["Collapse"], "grpo homogeneous")
        assert found["collapsed"].text == "2 of 2"
        assert found["at update"] == Cell("110") and found["format errors"] == Cell("-")
        assert found["KL rising"] == Cell("30", "2 of 2")
        assert row(tables["Collapse"], "sc+mis+top-p mixed")["collapsed"].text == "0 of 2"

    def test_extreme_tokens_by_group_are_counted_not_averaged(self, tables, sweep):
        found = row(tables["Sampler groups"], "grpo mixed", "first-nvfp4", "nvfp4, KV fp8")
        assert found["all"].text == "97.5 %"  # 300 * 1.3 of 300 * 1.3 + 100 * 0.1
        windows = [
            window
            for run in planned_runs(sweep, "small")
            if run.arm.name == "grpo mixed" and run.seed == 0
            for window in windows_of(run)
        ]
        own = plain.fmean(w["group/first-nvfp4/share_out_of_reference_band"] for w in windows)
        assert found["own tokens extreme"].text == f"{100 * own:.2f} %"

    def test_mixed_against_homogeneous(self, tables):
        table = tables["Mixed against homogeneous"]
        early = row(table, "sc+mis+top-p", "KL at the start")
        assert early["difference or ratio"].text == "4.00 x" and early["pairs"].text == "2"
        found = row(table, "sc+mis+top-p", "pass@4 after")
        assert found["difference or ratio"] == Cell("+0.010", "+0.010 .. +0.010")
        assert (found["p"].text, found["published"].text) == ("< 0.001", "stays close")

    def test_one_pair_has_no_test(self, sweep, tmp_path):
        for run in planned_runs(sweep, "small")[:4]:
            write_result(tmp_path, run)
        (scale, _) = read_scales(sweep, tmp_path)
        table = {t.title: t for t in tables_of(scale)}["Mixed against homogeneous"]
        found = row(table, "sc+mis+top-p", "pass@4 after")
        assert "fewer than two pairs" in found["difference or ratio"].aside
        assert found["p"].text == "-"

    def test_published_values_stand_beside_asynchronous_runs_alone(self, sweep, tmp_path):
        write_result(tmp_path, planned_runs(sweep, "small")[0])
        write_result(tmp_path, planned_runs(sweep, "still")[0])
        for scale, has in zip(read_scales(sweep, tmp_path), (True, False), strict=True):
            table = {t.title: t for t in tables_of(scale)}["Collapse"]
            assert ("published" in table.columns) == has

    def test_the_anatomy_of_the_first_and_last_record(self, tables):
        first, last = (
            row(tables["What episodes were like"], "grpo mixed", x) for x in ("first", "last")
        )
        assert (first["ended by format errors"].text, last["update"].text) == ("5.0 %", "100")
        assert (last["replies without a call"].text, last["masked"].text) == ("60.0 %", "-")

    def test_bars_in_cells_and_dated_prices(self, pages):
        assert "| B200 | 6.25 | 2026-05-01 | a \\| list |" in pages[README]
        for line in pages[README].splitlines():
            if line.startswith("| ") and "grpo mixed" in line:
                assert line.endswith(" |")


def test_a_run_that_records_keeps_its_anatomy(sweep, tmp_path):
    run = planned_runs(sweep, "small")[0]
    write_run(tmp_path / "bare", [record(1)])
    write_results(tmp_path, run, tmp_path / "bare")
    head = json.loads(results_file(tmp_path, run).read_text().splitlines()[0])
    assert "anatomy" not in head
    recorded = make_run(tmp_path)
    write_run(recorded, [record(1)])
    write_results(tmp_path, run, recorded)
    head = json.loads(results_file(tmp_path, run).read_text().splitlines()[0])
    known = anatomy(read_recorded(recorded))
    assert [row["step"] for row in head["anatomy"]] == [row["step"] for row in known]
    assert head["anatomy"][0]["endings"] == pytest.approx(known[0]["endings"], rel=1e-3)
    assert head["anatomy"][0].keys() == anatomy_row(1, 0.5).keys() | {
        *("version", "num_episodes", "num_replies", "reward")
    }


class TestFigures:
    def test_a_point_is_of_the_runs_that_have_it(self, tmp_path):
        sweep = make_sweep(tmp_path)
        make_results(sweep)
        scale = read_scales(sweep, sweep.results)[0]
        counts = {u: len(x) for u, x in _points(scale.runs_of(scale.arms[0]), "kl").items()}
        assert (counts[10], counts[100], counts[110]) == (4, 4, 2) and 120 not in counts

    def test_files_are_svg_without_dates_links_or_page_colours(self, pages):
        figures = [path for path in pages if path.suffix == ".svg"]
        assert [path.stem for path in figures] == ["small-fleets", "small-arms", "headline"]
        for path in figures:
            ElementTree.fromstring(pages[path])
            assert "#010203" not in pages[path] and "currentColor" not in pages[path]
            assert "<dc:date" not in pages[path]
        assert re.search(r"Gradient norm.*Runs that a point has", pages[figures[0]], re.DOTALL)

    def test_the_same_results_are_the_same_bytes(self, sweep, pages):
        assert pages_of(read_scales(sweep, sweep.results), FINDINGS) == pages


class TestFiles:
    def test_check_names_the_first_file_that_differs(self, pages, tmp_path):
        with pytest.raises(BadInputError, match=r"small-fleets\.svg.*no file"):
            check(tmp_path, pages)
        write(tmp_path, pages)
        check(tmp_path, pages)
        (tmp_path / README).write_text(pages[README].replace("2 of 4", "3 of 4"))
        with pytest.raises(BadInputError, match=r"README\.md.*run python -m tools"):
            check(tmp_path, pages)
        (tmp_path / "figures" / "gone.svg").write_text("<svg/>")
        write(tmp_path, pages)
        check(tmp_path, pages)
        (tmp_path / "figures" / "gone.svg").write_text("<svg/>")
        with pytest.raises(BadInputError, match=r"gone\.svg.*no such figure"):
            check(tmp_path, pages)

    def test_findings_are_included(self, pages):
        assert FINDINGS.strip() in pages[README]
        assert "<h2>Findings</h2>" in pages[INDEX] and "<code>here</code>" in pages[INDEX]
        assert "<b>agrees" not in pages[INDEX], "their HTML is text"

    def test_without_results_the_report_says_so(self, tmp_path, monkeypatch, capsys):
        sweep = make_sweep(tmp_path)
        sweep.results.mkdir()
        (sweep.results / "findings.md").write_text(FINDINGS)

        def tool(*options: str) -> int:
            argv = ["report", str(sweep.results), "--sweep", str(tmp_path / "sweep.toml"), *options]
            monkeypatch.setattr(sys, "argv", argv)
            with pytest.raises(SystemExit) as ended:
                command.main()
            return int(ended.value.code or 0)

        assert tool("--check") == 2
        assert re.fullmatch(r"error: .*README\.md: .*\n", capsys.readouterr().err)
        assert (tool(), tool("--check")) == (0, 0)
        assert "0 of 21 declared runs" in capsys.readouterr().out
        assert not (sweep.results / "figures").exists()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (380, "light")])
async def test_the_page_in_a_browser(tab, pages, tmp_path, width, scheme):
    write(tmp_path, pages)
    await tab.look(width=width, scheme=scheme)
    await tab.open((tmp_path / INDEX).as_uri())
    await tab.until("document.querySelectorAll('table').length > 7")
    assert await tab.evaluate("document.querySelectorAll('svg[role=img]').length") == 2
    assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ids = "[...document.querySelectorAll('[id]')].map((e) => e.id)"
    found = await tab.evaluate(ids)
    assert len(found) == len(set(found))
    least, where = await tab.evaluate(live_page.LEAST_CONTRAST)
    assert least >= 4.5, where
    fetched = "performance.getEntriesByType('resource').map((e) => e.name)"
    assert await tab.evaluate(fetched) == []
    assert tab.complaints == []
