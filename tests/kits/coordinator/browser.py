"""A headless Chromium for tests, driven over its own protocol (CDP), as a person would use it.

Only what the tests need: a page of a given size, what stands in it, keys, pictures, and what it
complained about. Where no Chromium is installed (`tools/install_chromium.sh` does) the test is
skipped with that reason.
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio_websocket import WebSocketConnection, open_websocket_url

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("there is no Chromium here; sh tools/install_chromium.sh installs one (as root)")


class Page:
    def __init__(self, socket: WebSocketConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        """What the console said: errors, and breaches of the content security policy."""
        self.requested: list[str] = []
        """Every address that the page asked for."""

    async def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_message(
            json.dumps({"id": number, "method": method, "params": parameters})
        )
        while True:
            message = json.loads(await self._socket.get_message())
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message.get("method"):
            case "Log.entryAdded":
                if told["entry"]["level"] == "error":
                    self.complaints.append(told["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["exceptionDetails"])[:2000])
            case "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])

    async def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.do(f"{domain}.enable")
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        await self.do(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        await self.do("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        done = await self.do(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, expression: str) -> None:
        """Until the page makes the expression true; the test's own time limit ends a vain wait."""
        while not await self.evaluate(f"Boolean({expression})"):
            await trio.sleep(0.05)

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def picture(self, path: Path) -> None:
        size = await self.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        done = await self.do(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1},
        )  # fmt: skip
        path.write_bytes(base64.b64decode(done["data"]))


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    """One page of one Chromium, which ends with the block."""
    process = await trio.lowlevel.open_process(
        [
            chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking",
            "--disable-component-update", "--remote-debugging-port=0",
            "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = profile / "DevToolsActivePort"
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None, "Chromium ended before it could be spoken to"
            await trio.sleep(0.05)
        port, path = port_file.read_text().split()
        async with open_websocket_url(f"ws://127.0.0.1:{port}{path}") as whole:
            made = await Page(whole).do("Target.createTarget", url="about:blank")
        page_url = f"ws://127.0.0.1:{port}/devtools/page/{made['targetId']}"
        async with open_websocket_url(page_url, max_message_size=64 * 2**20) as socket:
            yield Page(socket)
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
