"""The live page in a real browser: what a reader sees, wide and narrow, light and dark."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from contracts.credentials import Token
from contracts.errors import BadInputError
from contracts.pb import fleet_pb2
from sampler_fleet.web.app import SNAPSHOT_S, fleet_app
from sampler_fleet.web.server import serving
from tests.sampler_fleet.web.browser import Tab, find_chromium, opened_tab, running_chromium
from tests.sampler_fleet.web.statuses import ALARM, HOSTILE, make_sampler, make_status

TOKEN = "a-token-that-the-page-must-not-show"
LOOKS = [(1200, "light"), (1200, "dark"), (380, "light"), (380, "dark")]

# The least contrast of any text that is shown, by WCAG's formula, and where it is.
LEAST_CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = rgba(getComputedStyle(node).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { data, parentElement: node } = texts.currentNode;
    if (!data.trim() || !node.checkVisibility() || node.closest("script, noscript")) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(ground(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < least[0]) least = [contrast, data];
  }
  return least;
})()"""
HEIGHTS = """[...document.querySelectorAll("header, section, .tile, tr, details")]
  .map((e) => e.offsetHeight).join()"""
NAMES = """[...document.querySelectorAll('#samplers tbody tr')].slice(0, 12)
  .map((row) => row.cells[0].innerText)"""
ROW = "document.querySelector('#samplers tbody tr:nth-child({}) {}')"
FILL = "((e, v) => (e.value = v))(document.getElementById('token'), {!r})"


@dataclass
class Site:
    """A gateway that can go away and come back, in front of a status that a test sets."""

    status: fleet_pb2.StatusReply = field(default_factory=make_status)
    drained: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def drain(self, sampler_id: str) -> None:
        for sampler in self.status.samplers:
            if sampler.register.sampler_id == sampler_id:
                sampler.state = "draining"
                self.drained.append(sampler_id)
                return
        raise BadInputError("sampler id", expected="a live sampler", found=sampler_id)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        app = fleet_app(lambda: self.status, self.drain, Token(TOKEN))
        async with serving(app, f"127.0.0.1:{self.port}", None) as self.port:
            yield


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    executable = find_chromium()
    if executable is None:
        assert not os.environ.get("CI"), "tools/browser.sh brings Chromium"
        pytest.skip("needs Chromium")
    with running_chromium(executable, tmp_path_factory.mktemp("chromium")) as devtools:
        yield devtools


@pytest.fixture
async def tab(chromium) -> AsyncIterator[Tab]:
    async with opened_tab(chromium) as tab:
        yield tab


@contextlib.asynccontextmanager
async def opened(tab: Tab, site: Site, *, width: int = 1200, scheme: str = "light"):
    """The page, once it shows the status."""
    async with site.up():
        await tab.look(width=width, scheme=scheme)
        await tab.open(site.url)
        await tab.until("document.getElementById('link')?.dataset.state === 'live'")
        yield
    assert tab.complaints == []


async def test_a_reader_sees_the_fleet_and_how_it_goes_on(tab):
    site = Site()
    async with opened(tab, site):
        tiles = await tab.text("#tiles")
        for title, value in (
            ("Newest version", "41"),
            ("Updates", "40"),
            ("Episodes in flight", "300"),
            ("Groups waiting", "6"),
            ("Staleness", "2.74"),
            ("Tokens/s", "k"),
            ("Cost so far", "$2,635"),
            ("Cost per update", "$65.88"),
        ):
            assert value in tiles.split(title)[1].split("\n")[1], title
        assert "dollars leave out a100-bf16: no price" in await tab.text("#update")
        group = (await tab.text("#groups tbody tr:nth-child(3)")).split()
        for text in ("h100-fp8", "1", "/", "3", "short", "20.0", "0.0024", "1.20"):
            assert text in group, text
        rows = (await tab.text("#samplers details:nth-child(3)")).split("Sampler\t")[1]
        assert [line for line in ("draining", "ready", "lost") if line in rows] == [
            "draining",
            "ready",
            "lost",
        ]
        assert "1 behind" in rows and "delta, 412 MB" in rows and "paused 0.21 s" in rows
        assert await tab.text("#alarms") == "No alarms"

        heights = await tab.evaluate(HEIGHTS)
        for t in (31, 32, 33):
            site.status = make_status(t)
            shown = f"{round(300 + 5 * t)}"
            await tab.until(f"document.getElementById('tiles').innerText.includes('{shown}')")
        assert "42" in await tab.text("#tiles .tile")
        points = "document.querySelector('.spark .line').getAttribute('d').split('L').length"
        assert await tab.evaluate(points) >= 4, "one for each value seen"
        assert await tab.evaluate(HEIGHTS) == heights, "numbers change, nothing moves"

        site.status = make_status(33, alarms=(ALARM, HOSTILE))
        await tab.until("document.querySelectorAll('#alarms .alarm').length === 2")
        assert await tab.text("#alarms") == f"{ALARM}\n{HOSTILE}"
        assert await tab.text("#alarms-title") == "2 alarms"


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
async def test_it_can_be_read_on_any_screen(tab, width, scheme):
    site = Site(make_status(alarms=(ALARM,)))
    site.status.samplers[0].register.sampler_id = "a-name-without-a-break-" * 6
    async with opened(tab, site, width=width, scheme=scheme):
        await tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        await tab.until("document.querySelectorAll('#samplers tbody tr').length === 12")
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        contrast, text = await tab.evaluate(LEAST_CONTRAST)
        assert contrast >= 4.5, text
        dark = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(15, 19, 23)") == (scheme == "dark")
        for selector in ("#groups", "#samplers details:first-child"):
            for text in ("Share of sessions", "KL") if selector == "#groups" else ("KV used",):
                label = f"document.querySelector('{selector} td[data-label=\"{text}\"]')"
                shown = await tab.evaluate(f"getComputedStyle({label}, '::before').content")
                assert (shown == f'"{text}"') == (width < 500), "a card says what its values are"
        tree = await tab.call("Accessibility.getFullAXTree")
        roles = [node["role"]["value"] for node in tree["nodes"] if not node["ignored"]]
        assert roles.count("table") == 5 and roles.count("columnheader") >= 8
        assert roles.count("rowheader") == 4 + 12


async def test_names_from_outside_are_text(tab):
    site = Site()
    site.status.samplers.append(make_sampler(HOSTILE, "h200-fp8"))
    site.status.samplers[0].register.accelerator = HOSTILE
    site.status.counters[HOSTILE] = 1
    async with opened(tab, site):
        assert HOSTILE in await tab.text("#samplers")
        assert HOSTILE in await tab.text("#groups")
        assert HOSTILE.replace("_", " ") in await tab.text("#counters")
        assert await tab.evaluate("document.querySelectorAll('img').length") == 0
        assert await tab.evaluate("document.title") == "Sampler fleet"
        refused = (
            "(() => { try { document.body.innerHTML = '<b>'; } catch { return 'refused'; } })()"
        )
        assert await tab.evaluate(refused) == "refused", "the policy forbids making markup of text"
        tab.complaints.clear()  # of that


@pytest.mark.parametrize("width", [1200, 380])
async def test_a_gateway_that_is_away_is_said_to_be(tab, width):
    site = Site()
    async with opened(tab, site, width=width):
        pass
    await tab.until("document.getElementById('link').dataset.state === 'away'")
    assert await tab.text("#link") == "Gateway away, figures old"
    await tab.until("/^[1-9]\\d* s old/.test(document.getElementById('age').innerText)")
    await tab.until("document.getElementById('age').innerText.includes('retry in')")
    assert "300" in await tab.text("#tiles"), "what was known stays"
    assert await tab.text("#alarms") == "No alarms when last heard"
    cut = "[...document.querySelectorAll('header > *')].some((e) => e.scrollWidth > e.clientWidth)"
    assert not await tab.evaluate(cut)
    assert await tab.evaluate("document.documentElement.scrollWidth") <= width
    site.status = make_status(1)
    async with site.up():
        await tab.until("document.getElementById('link').dataset.state === 'live'", 20)
        assert "305" in await tab.text("#tiles")
    assert all("ERR_CONNECTION_REFUSED" in complaint for complaint in tab.complaints)


async def test_a_tab_that_slept_says_that_its_figures_are_old(tab):
    async with opened(tab, Site()):
        await tab.evaluate(
            "(Date.now = ((now) => () => now() + 60000)(Date.now.bind(Date)), busy = true)"
        )
        await tab.until("document.getElementById('link').dataset.state === 'stale'")
        assert await tab.text("#link") == "Figures are old"
        assert (await tab.text("#age")).startswith("1 min old")


async def test_draining_takes_the_right_token(tab):
    site = Site()
    async with opened(tab, site):
        await tab.evaluate(ROW.format(1, "button") + ".click()")
        assert await tab.text("#drain-title") == "Drain b300-nvfp4-0?"
        kind = "document.activeElement.type + ' ' + document.activeElement.autocomplete"
        assert await tab.evaluate(kind) == "password off"
        for token, said in (("a wrong one", "brought another token"), (TOKEN, "")):
            await tab.evaluate(FILL.format(token))
            await tab.evaluate("document.getElementById('drain-go').click()")
            if said:
                await tab.until(
                    f"document.getElementById('drain-said').innerText.includes('{said}')"
                )
                assert site.drained == []
        await tab.until(ROW.format(1, ".state") + ".innerText === 'draining'")
        assert site.drained == ["b300-nvfp4-0"]
        assert not await tab.evaluate("document.getElementById('drain').open")

        await tab.evaluate(ROW.format(2, "button") + ".click()")
        assert await tab.text("#drain-name") == "b300-nvfp4-1"
        assert not await tab.evaluate("document.getElementById('token').checkVisibility()")
        await tab.evaluate("document.getElementById('drain-go').click()")
        await tab.until(ROW.format(2, ".state") + ".innerText === 'draining'")
        kept = await tab.evaluate(
            "[document.documentElement.outerHTML, document.cookie, JSON.stringify(localStorage),"
            " JSON.stringify(sessionStorage), location.href].join()"
        )
        assert (
            TOKEN not in kept and await tab.evaluate("document.getElementById('token').value") == ""
        )
        tab.complaints = [c for c in tab.complaints if "401" not in c]


CHANGES = """(async () => {
  const seen = new Set();
  const watch = new MutationObserver((found) => found.forEach(({ target }) => seen.add(
    (target.nodeType === 3 ? target.parentElement : target).closest("#samplers tr"))));
  const all = { subtree: true, childList: true, characterData: true, attributes: true };
  watch.observe(document.body, all);
  await poll();
  await new Promise(requestAnimationFrame);
  watch.disconnect();
  seen.delete(null);
  return [...seen].map((row) => row.cells[0].innerText);
})()"""


async def test_five_hundred_samplers_stay_smooth(tab):
    """Groups are closed at first, open ones are in order, and only what changed is touched."""
    site = Site(make_status(num_samplers=504))
    async with opened(tab, site):
        assert await tab.evaluate("document.querySelectorAll('#samplers tbody tr').length") == 0
        await tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        await tab.until("document.querySelectorAll('#samplers tbody tr').length === 504")
        assert await tab.evaluate(NAMES) == [f"b300-nvfp4-{k}" for k in range(12)], "by number"
        await tab.until("!busy && (clearTimeout(timer), true)")
        await asyncio.sleep(2 * SNAPSHOT_S)
        site.status.samplers[200].heartbeat.num_running += 1
        changed = site.status.samplers[200].register.sampler_id
        assert await tab.evaluate(CHANGES) == [changed]
