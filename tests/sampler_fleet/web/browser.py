"""A headless Chromium for tests, spoken to in the DevTools protocol.

Owns the browser process and one tab at a time. Asserts nothing about pages.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

START_S = 30.0
WAIT_S = 10.0


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextlib.contextmanager
def running_chromium(executable: str, profile: Path) -> Iterator[str]:
    """The address of a browser's DevTools."""
    process = subprocess.Popen(
        [
            executable,
            "--headless=new",
            "--no-sandbox",  # tests run as root
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--ignore-certificate-errors",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + START_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None, "Chromium ended at its start"
            assert time.monotonic() < deadline, "Chromium did not start in time"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().split()[0]}"
    finally:
        process.terminate()
        process.wait(WAIT_S)


class Tab:
    """One page as a reader sees it. `complaints` is what its console said."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []

    async def read(self) -> None:
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                self._answers.pop(content["id"]).set_result(content)
            elif content["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(content["params"]["exceptionDetails"]))
            elif content["method"] == "Log.entryAdded":
                self.complaints.append(content["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(WAIT_S):
            content = await answer
        assert "error" not in content, content["error"]
        return content["result"]

    async def look(self, *, width: int, height: int = 800, scheme: str = "light") -> None:
        """The size of the window, and whether the reader likes it light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited, as JSON."""
        done = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, expression: str, timeout_s: float = WAIT_S) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not await self.evaluate(expression):
            assert time.monotonic() < deadline, f"not in time: {expression}"
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        """What a reader reads there."""
        return await self.evaluate(f"document.querySelector({selector!r}).innerText")

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def opened_tab(devtools: str) -> AsyncIterator[Tab]:
    async with aiohttp.ClientSession() as http:
        async with http.put(f"{devtools}/json/new?about:blank") as answer:
            target = await answer.json()
        async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = Tab(socket)
            reader = asyncio.create_task(tab.read())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            yield tab
            await tab.call("Page.close")
            await socket.close()
            await reader
