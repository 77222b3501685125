"""Copies of a project in other versions, told from those that the task's tests need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sampler_fleet.episodes.scrub.packages import (
    Project,
    find_project,
    installed_copies,
    is_distribution,
    other_copy,
    stale_egg_info,
)
from tests.sampler_fleet.episodes.scrub.adversarial import write

CODE = "src/gauge/reading.py"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "tree"
    write(root / "src/gauge/__init__.py", "")
    write(root / CODE, "x = 1\n")
    text = (
        '[tool.other]\nname = "no"\nversion = "9"\n[project]\nname = "Gauge_Kit"\nversion = "1.4"\n'
    )
    write(root / "pyproject.toml", text)
    return find_project(str(root), [CODE, "tests/test_reading.py"])


def copies(project: Project, folder: Path) -> set[str]:
    return {Path(path).name for path, _ in installed_copies(project, str(folder))}


def test_metadata_says_whose_tree_it_is(project: Project, tmp_path: Path):
    assert project.names == {"gauge-kit"} and project.version == "1.4"
    assert project.modules == (("gauge/reading.py", CODE),)
    write(tmp_path / "js/package.json", '{\n  "name": "left-pad",\n  "version": "2.0.1"\n}\n')
    write(tmp_path / "cfg/setup.cfg", "[metadata]\nname = old\nversion = 3\n")
    found = [find_project(str(tmp_path / name), []) for name in ("js", "cfg")]
    assert [(one.names, one.version) for one in found] == [
        ({"left-pad"}, "2.0.1"),
        ({"old"}, "3"),
    ]


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("gauge_kit-1.5-py3-none-any.whl", True),
        ("gauge-kit-1.4.tar.gz", True),
        ("Gauge.Kit-2.0.zip", True),
        ("gauge_kit_extras-1.0.tar.gz", False),
        ("gauge-1.0.tar.gz", False),
        ("gauge-kit-notes.txt", False),
    ],
)
def test_distributions_are_known_by_name(project: Project, name: str, is_ours: bool):
    assert is_distribution(project, name) is is_ours


def test_a_copy_of_the_base_stays_and_a_later_one_goes(project: Project, tmp_path: Path):
    site = tmp_path / "site-packages"
    write(site / "gauge/reading.py", "x = 1\n")
    write(site / "gauge_kit-1.4+g12.dist-info/METADATA", "")
    write(site / "tests/test_reading.py", "of somebody else")
    write(site / "other-2.0.dist-info/METADATA", "")
    assert copies(project, site) == set()
    write(site / "gauge/reading.py", "x = 2\n")
    assert copies(project, site) == {"gauge", "gauge_kit-1.4+g12.dist-info"}


def test_metadata_of_a_later_version_is_enough(project: Project, tmp_path: Path):
    site = tmp_path / "site-packages"
    write(site / "gauge_kit-1.5.dist-info/METADATA", "")
    write(site / "gauge/elsewhere.py", "")
    assert copies(project, site) == {"gauge", "gauge_kit-1.5.dist-info"}


def test_an_editable_install_stays(project: Project, tmp_path: Path):
    site = tmp_path / "site-packages"
    text = json.dumps({"url": "file:///testbed", "dir_info": {"editable": True}})
    write(site / "gauge_kit-1.5.dist-info/direct_url.json", text)
    assert copies(project, site) == set()


def test_a_file_that_only_the_fix_adds_betrays_a_copy(tmp_path: Path):
    write(tmp_path / "tree/gauge/__init__.py", "")
    project = find_project(str(tmp_path / "tree"), ["gauge/drift.py"])
    site = tmp_path / "site-packages"
    write(site / "gauge/drift.py", "")
    assert copies(project, site) == {"gauge"}
    info = tmp_path / "tree/gauge.egg-info"
    write(info / "SOURCES.txt", "setup.py\ngauge/drift.py\n")
    assert stale_egg_info(project, str(info)) == "lists gauge/drift.py"
    write(info / "SOURCES.txt", "setup.py\n")
    assert stale_egg_info(project, str(info)) == ""


def test_metadata_beside_the_sources_goes_only_if_later(project: Project, tmp_path: Path):
    info = tmp_path / "tree/gauge_kit.egg-info"
    write(info / "PKG-INFO", "Name: gauge-kit\nVersion: 1.4\n")
    assert stale_egg_info(project, str(info)) == ""
    write(info / "PKG-INFO", "Name: gauge-kit\nVersion: 1.5\n")
    assert stale_egg_info(project, str(info)) == "version 1.5"


def test_packages_of_node_too(tmp_path: Path):
    write(tmp_path / "tree/package.json", '{\n  "name": "left-pad",\n  "version": "2.0.1"\n}\n')
    project = find_project(str(tmp_path / "tree"), ["index.js"])
    modules = tmp_path / "node_modules"
    write(modules / "left-pad/package.json", '{"name": "left-pad", "version": "2.0.2"}')
    write(modules / "right-pad/package.json", '{"name": "right-pad", "version": "9.0.0"}')
    assert copies(project, modules) == {"left-pad"}


def test_other_copies_are_of_the_same_path_and_differ(project: Project, tmp_path: Path):
    same = write(tmp_path / "tree/build/gauge/reading.py", "x = 1\n")
    later = write(tmp_path / "tree/saved/src/gauge/reading.py", "x = 2\n")
    name = write(tmp_path / "tree/saved/reading.py", "x = 2\n")
    found = [
        other_copy(project, str(path.relative_to(tmp_path / "tree")), str(path))
        for path in (same, later, name)
    ]
    assert found == ["", CODE, ""]
