"""What distinctive means, and that a line is found however it is written down."""

from __future__ import annotations

import html
import json

import pytest

from sampler_fleet.episodes.scrub.gold import (
    MAX_NEEDLES,
    Scanner,
    already_applied,
    canonical,
    distinctive,
    is_boilerplate,
    is_changelog,
    parse_patch,
)


def patch_of(*lines: str, path: str = "pkg/code.py", before: int = 0, after: int = 0) -> str:
    body = "\n".join(lines)
    return f"--- a/{path}\n+++ b/{path}\n@@ -1,{before} +1,{after} @@\n{body}\n"


def texts(patch: str, *base: str) -> list[str]:
    return [needle.text for needle in distinctive(patch, [one.encode() for one in base]).needles]


LINE = 'total = sum(entry.weight for entry in basket) + "é\\t" + tail'


@pytest.mark.parametrize(
    "line",
    [
        "",
        "    }",
        "x = 1",
        "import collections.abc",
        "from collections import OrderedDict",
        "raise NotImplementedError()",
        'if __name__ == "__main__":',
        "def __init__(self):",
        "return None",
        "@functools.lru_cache()",
        "# -*- coding: utf-8 -*-",
        "if value is not None:",
        "public static final void",
    ],
)
def test_lines_that_any_program_may_hold_are_boilerplate(line: str):
    assert is_boilerplate(line)


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        "if value is not None and cutoff > limit:",
        "return normalise_locale(x)",
        "    self.weights_of_entries()",
    ],
)
def test_lines_with_words_of_their_own_are_not(line: str):
    assert not is_boilerplate(line)


def test_an_added_line_is_distinctive_unless_the_base_has_it():
    patch = patch_of(" a", f"+    {LINE}", "+import os", " b", before=2, after=4)
    assert texts(patch, "a\nb\n") == [LINE]
    assert texts(patch, f"a\n{LINE}\nb\n") != [LINE]


def test_base_lines_count_wherever_and_however_indented():
    patch = patch_of(f"+{LINE}", "+other_thing(first, second)", before=0, after=2)
    assert texts(patch, f"class A:\n        {LINE}  # as ever\n") == ["other_thing(first, second)"]


def test_a_run_without_a_distinctive_line_is_known_by_its_neighbours():
    hunk = (
        " def limit(values):",
        "-    return values[:-1]",
        "+    return values",
        " ",
        " last = 1",
    )
    patch = patch_of(*hunk, before=4, after=4)
    base = "def limit(values):\n    return values[:-1]\n\nlast = 1\nreturn values\n"
    fixed = "def limit(values):\n    return values\n\nlast = 1"
    assert texts(patch, base) == [fixed, "-    return values[:-1]\n+    return values"]
    scanner = Scanner(distinctive(patch, [base.encode()]).needles, ())
    assert scanner.lines(fixed.replace("    ", "\t").encode())
    assert scanner.lines(patch.encode())
    assert not scanner.lines(base.encode())


def test_removed_lines_are_known_by_what_is_left():
    hunk = (" first_step(alpha)", "-second_step(beta)", " third_step(gamma)")
    base = "first_step(alpha)\nsecond_step(beta)\nthird_step(gamma)\n"
    assert texts(patch_of(*hunk, before=3, after=2), base) == [
        "first_step(alpha)\nthird_step(gamma)",
        "-second_step(beta)",
    ]


def test_of_a_changelog_sentences_count_even_where_the_base_has_them():
    line = "- The basket weighs what its entries weigh"
    patch = patch_of("+Bug fixes and more", f"+{line}", path="CHANGES.rst", before=0, after=2)
    assert texts(patch) == [line]


def test_few_needles_of_many_lines_come_from_every_file():
    many = "".join(
        patch_of(
            *(f"+call_number_{file}_{n}(argument)" for n in range(100)),
            path=f"f{file}.py",
            after=100,
        )
        for file in range(2)
    )
    found = texts(many)
    assert len(found) == MAX_NEEDLES
    assert sum("call_number_0" in text for text in found) == MAX_NEEDLES // 2


def test_names_that_the_base_lacks_are_kept_for_compiled_files():
    patch = patch_of('+plain = normalise_locale(known_name, "a new message here")', after=1)
    names = distinctive(patch, [b"known_name"]).names
    assert names == (b"anewmessagehere", b"normalise_locale")


@pytest.mark.parametrize(
    "written",
    [
        LINE.encode(),
        f"+\t{LINE}\r\n".encode(),
        json.dumps({"patch": f"+{LINE}\n"}).encode(),
        json.dumps(json.dumps(LINE)).encode(),
        html.escape(LINE).encode(),
        repr(LINE).encode(),
        LINE.replace(" ", "\n    ").encode(),
        LINE.encode("utf-16-le"),
        LINE.encode("utf-16-be"),
        b"\0\xff" * 9 + LINE.encode() + b"\xff\0",
    ],
)
def test_a_line_is_found_however_it_is_written(written: bytes):
    gold = distinctive(patch_of(f"+{LINE}", after=1), [])
    scanner = Scanner(gold.needles, gold.names)
    assert [needle.text for needle in scanner.lines(written)] == [LINE]
    assert scanner.lines(written.replace(b"w", b"v")) == []


def test_canonical_form_forgets_only_how_a_line_is_written():
    assert canonical(b'a  = "b"\n') == canonical(b"a='b'") == b"a=b"
    assert canonical(b"a = 1") != canonical(b"a = 2")
    assert canonical(b"a &lt; b &amp;&#38; c") == b"a<b&c"


def test_patches_of_every_kind_are_read():
    patch = """\
diff --git a/new.py b/new.py
new file mode 100644
--- /dev/null
+++ b/new.py
@@ -0,0 +1,2 @@
+--- not a header
+++ nor this
diff --git a/gone.py b/gone.py
deleted file mode 100644
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-x
diff --git a/pic.png b/pic.png
GIT binary patch
literal 3
Kc

diff --git "a/caf\\303\\251.py" "b/caf\\303\\251.py"
--- "a/caf\\303\\251.py"
+++ "b/caf\\303\\251.py"
@@ -1 +1 @@
-a
+b
\\ No newline at end of file
"""
    changes = parse_patch(patch)
    assert [change.path for change in changes] == ["new.py", "gone.py", "pic.png", "café.py"]
    assert [change.is_new for change in changes] == [True, False, False, False]
    assert changes[0].hunks == (("+--- not a header", "+++ nor this"),)
    assert changes[3].hunks == (("-a", "+b"),)
    plain = patch_of("-a", "+b", before=1, after=1) + patch_of(
        "-c", "+d", path="z.py", before=1, after=1
    )
    assert [change.path for change in parse_patch(plain)] == ["pkg/code.py", "z.py"]
    assert parse_patch("no patch at all") == ()


def test_an_applied_patch_is_seen():
    change, new = parse_patch(
        patch_of(" a = 1", "-b = 2", "+b = 3", before=2, after=2)
        + "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x\n"
    )
    assert already_applied(change, b"a = 1\nb = 3\n")
    assert not already_applied(change, b"a = 1\nb = 2\n")
    assert not already_applied(change, None)
    assert already_applied(new, b"anything") and not already_applied(new, None)


def test_changelogs_are_told_from_sources():
    assert all(
        map(is_changelog, ("CHANGELOG.md", "NEWS", "docs/releases/3.1.txt", "changes/1.rst"))
    )
    assert not any(map(is_changelog, ("history.py", "src/changes.ts", "news/views.py", "a.md")))
