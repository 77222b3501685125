"""The page of recorded episodes in a real browser, opened as a file."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.sampler_fleet.web import test_page as live_page
from tests.tools.recorded_run import GROUPS, HOSTILE, make_run
from tools.episodes.content import content_of, read_facts
from tools.episodes.page import render
from trainer_jax.recorded import read_recorded

chromium, tab = live_page.chromium, live_page.tab

ROWS = "[...document.querySelectorAll('#list tbody tr')].filter((row) => !row.hidden)"
LABELS = f"{ROWS}.map((row) => row.cells[0].innerText)"
BACKGROUNDS = """[...document.querySelectorAll('#text .sampled')]
  .map((node) => getComputedStyle(node).backgroundColor)"""
FACTS = """Object.fromEntries([...document.querySelectorAll('#token div')]
  .map((row) => [row.children[0].innerText, row.children[1].innerText]))"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("episodes"))


@pytest.fixture(scope="module")
def page(run) -> str:
    path = run / "episodes.html"
    path.write_text(render(content_of(read_facts(run), read_recorded(run), max_episodes=100)))
    return path.as_uri()


async def opened(tab, page, *, width=1280, scheme="light") -> None:
    await tab.look(width=width, height=1000, scheme=scheme)
    await tab.open(page)
    await tab.until("document.querySelectorAll('#text .token').length > 0")


def choose(name: str, value: str) -> str:
    return f"""((select) => {{
      select.value = {"=" + value if value else ""!r};
      select.dispatchEvent(new Event('change', {{ bubbles: true }}));
    }})(document.getElementById('by-{name}'))"""


def click(selector: str, number: int = 0) -> str:
    return f"document.querySelectorAll({selector!r})[{number}].click()"


async def press(tab, *keys: str) -> None:
    for key in keys:
        for kind in ("keyDown", "keyUp"):
            await tab.call("Input.dispatchKeyEvent", type=kind, key=key)


async def test_episodes_are_filtered(tab, page):
    await opened(tab, page)
    assert await tab.evaluate(LABELS) == ["1.1", "1.2", "1.3", "1.4", "8.1", "8.2", "8.3"]
    assert await tab.text("#shown") == "7 of 7 episodes"
    row = await tab.evaluate(f"{ROWS}[5].innerText")
    assert row.split()[1:7] == ["b300-nvfp4", "0", "format_errors", "3", "3", "21"]
    for name, value, left in (
        ("update", "8", ["8.1", "8.2", "8.3"]),
        ("reward", "0", ["8.2", "8.3"]),
        ("group", "l40-fp8", ["8.3"]),
        ("ending", "submitted", []),
    ):
        await tab.evaluate(choose(name, value))
        assert await tab.evaluate(LABELS) == left
        if left:
            shown = await tab.evaluate("document.querySelector('[aria-current]').innerText")
            assert shown.split()[0] in left, "what is read is in the list"
    assert await tab.text("#none") == "No episode is like that."
    assert not await tab.evaluate("document.getElementById('episode').checkVisibility()")
    for name in ("update", "group", "ending"):
        await tab.evaluate(choose(name, ""))
    await tab.evaluate(choose("reward", "none"))
    assert await tab.evaluate(LABELS) == ["1.4"]
    assert "not trained on" in await tab.text("#facts")
    assert "failure: sandbox gone" in await tab.text("#facts")
    assert tab.complaints == []


async def test_a_tokens_numbers(tab, page, run):
    *_, update = read_recorded(run)
    _, t, trained = list(update.episodes())[1]
    await opened(tab, page)
    await tab.evaluate(click("#list tbody tr", 5))
    assert await tab.text("#episode-title") == "Update 8, <b>task</b> c1"
    (n,) = np.flatnonzero(trained.masked)[:1]
    await tab.evaluate(click("#text .sampled", int(n)))
    facts = await tab.evaluate(FACTS)
    token, position = t.tokens[t.loss_mask][n], np.flatnonzero(t.loss_mask)[n]
    assert facts["Id"] == str(token) and facts["Position"] == str(position)
    p, q = trained.trainer_logp[n], t.sampler_logp[n]
    for name, logp in (("Sampler log-prob", q), ("Trainer log-prob", p)):
        shown, probability = facts[name].rstrip(")").split(" (")
        assert float(shown) == pytest.approx(logp, abs=6e-5)
        assert float(probability) == pytest.approx(math.exp(logp), rel=2e-3)
    assert float(facts["Ratio"]) == pytest.approx(math.exp(p - q), rel=2e-3)
    assert facts["Masked"] == "yes"
    version = int(t.version[n])
    assert facts["Version"].startswith(f"{version} ({update.version - version} version")
    rows = "[...document.querySelectorAll('#candidates tbody tr')]"
    sets = t.candidates
    own = slice(sets.offsets[n], sets.offsets[n + 1])
    shown = await tab.evaluate(f"{rows}.map((row) => Number(row.cells[2].innerText))")
    np.testing.assert_allclose(shown, np.sort(np.exp(sets.logp[own]))[::-1], rtol=2e-3, atol=1e-9)
    ids = await tab.evaluate(f"{rows}.map((row) => Number(row.cells[1].innerText))")
    assert sorted(ids) == sorted(sets.ids[own])
    drawn = await tab.evaluate(f"{rows}.map((row) => row.className === 'drawn')")
    assert ids[drawn.index(True)] == token and sum(drawn) == 1
    names = await tab.evaluate(f"{rows}.map((row) => row.cells[0].innerText)")
    assert names[drawn.index(True)] == await tab.text("#token-title")

    await tab.evaluate(click("#text .token:not(.sampled)"))
    assert await tab.text("#token-title") == "<|im_start|>"
    assert (await tab.evaluate(FACTS))["Origin"].startswith("given")
    assert not await tab.evaluate("document.getElementById('candidates').checkVisibility()")


async def test_a_token_under_the_pointer_is_described(tab, page):
    await opened(tab, page)
    box = await tab.evaluate(
        """(({ x, y, width, height }) => [x + width / 2, y + height / 2])(
          document.querySelectorAll('#text .sampled')[3].getBoundingClientRect())"""
    )
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    await tab.until("document.getElementById('token-title').innerText === 'shop'")
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    await tab.until("document.getElementById('token-title').innerText === '<tool_call>'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_colours(tab, page, run, scheme):
    """Each has a legend, given tokens have none, and every text can be read on it."""
    await opened(tab, page, scheme=scheme)
    await tab.evaluate(click("#list tbody tr", 1))
    seen = {}
    for name, legend in (
        ("ratio", "ratio 1"),
        ("probability", "probability 1"),
        ("group", "\n".join(sorted(GROUPS))),
        ("version", "version 3\nversion 4"),
    ):
        await tab.evaluate(click(f"input[value={name}]"))
        assert legend in await tab.text("#legend")
        assert (await tab.text("#legend")).endswith("given\nmasked")
        seen[name] = await tab.evaluate(BACKGROUNDS)
        contrast, text = await tab.evaluate(live_page.LEAST_CONTRAST)
        assert contrast >= 4.5, (name, text)
    assert len(set(seen["group"])) == 1
    assert len(set(seen["version"])) == 2, "the weights were switched in the first reply"
    assert len(set(seen["ratio"])) > 10
    assert seen["ratio"] != seen["probability"]
    plain = await tab.evaluate(
        "getComputedStyle(document.querySelector('.token:not(.sampled)')).backgroundColor"
    )
    assert plain == "rgba(0, 0, 0, 0)"
    masked = await tab.evaluate(
        "[...document.querySelectorAll('.sampled')].map((e) => e.classList.contains('masked'))"
    )
    want = list(next(read_recorded(run)).episodes())[1][2]
    assert masked == want.masked.tolist()


async def test_keys_alone_suffice(tab, page):
    await opened(tab, page)
    await tab.evaluate("document.querySelector('#list button[tabindex=\"0\"]').focus()")
    await press(tab, "ArrowDown", "ArrowDown", "ArrowUp")
    assert await tab.evaluate("document.activeElement.innerText") == "1.2"
    assert "a1" in await tab.text("#episode-title")
    await press(tab, "End")
    assert "c2" in await tab.text("#episode-title")
    await tab.evaluate("document.getElementById('text').focus()")
    active = "document.getElementById('text').getAttribute('aria-activedescendant')"
    start = await tab.evaluate(active)
    await press(tab, "ArrowRight", "ArrowRight")
    assert await tab.evaluate(active) == f"at-{int(start[3:]) + 2}"
    await press(tab, "ArrowDown")
    second = await tab.evaluate(active)
    assert await tab.text("#token-title") == "<tool_call>" and int(second[3:]) > int(start[3:]) + 2
    await press(tab, "ArrowUp")
    assert await tab.evaluate(active) == start
    await press(tab, "Home", "ArrowLeft")
    assert await tab.evaluate(active) == "at-0"
    focusable = "[...document.querySelectorAll('button')].filter((e) => e.tabIndex === 0).length"
    assert await tab.evaluate(focusable) == 1, "one stop for the whole list"


async def test_sampled_markup_is_text(tab, page):
    await opened(tab, page)
    await tab.evaluate(click("#list tbody tr", 4))
    await tab.evaluate(click("#text .sampled", 2))
    assert HOSTILE in await tab.text("#text")
    assert (await tab.text("#token-title")).replace("\u2423", " ") == HOSTILE
    assert await tab.evaluate("document.title") == "Episodes of tiny"
    assert await tab.evaluate("document.querySelectorAll('img, b, script:not([id])').length") == 1
    assert tab.complaints == []


@pytest.mark.parametrize("width", [1280, 380])
async def test_nothing_reaches_beyond_the_window(tab, page, width):
    await opened(tab, page, width=width)
    await tab.evaluate(click("#list tbody tr", 4))
    assert await tab.evaluate("document.documentElement.scrollWidth") <= width
