"""A tab of headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE_S = 60.0


class BrowserTab:
    """``errors``: what the page complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        async with asyncio.timeout(PATIENCE_S):
            answer = await future
        assert "error" not in answer, answer["error"]
        found: dict[str, Any] = answer["result"]
        return found

    async def read(self) -> None:
        """Take in what the browser says, until it ends."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])

    async def open(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.size(width, height)
        await self.scheme(dark=dark)
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === '{url}' && document.readyState === 'complete'")

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def scheme(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, expression: str) -> Any:
        """What an expression is in the page, as JSON has it."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true; returns it."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := await self.value(expression)):
                await asyncio.sleep(0.05)
        return found

    async def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def picture(self) -> bytes:
        """PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@contextlib.asynccontextmanager
async def browser_tab(folder: Path) -> AsyncIterator[BrowserTab]:
    """A browser with a profile of its own below ``folder``."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.fail("no chromium; set PENSIEVE_TEST_WITHOUT_CHROMIUM=1 to skip the tests that need it")
    process = await asyncio.create_subprocess_exec(
        browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--no-proxy-server",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # its sandbox refuses to run as root
        "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", "about:blank",
        stderr=asyncio.subprocess.PIPE, cwd=folder,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        address = None
        async with asyncio.timeout(PATIENCE_S):
            while address is None:
                line = await process.stderr.readline()
                assert line, "chromium has ended"
                address = re.search(rb"DevTools listening on (ws://\S+)", line)
        # What it says from here on is nobody's; a full pipe would stop it.
        drain = asyncio.create_task(process.stderr.read())
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(address[1].decode(), max_msg_size=1 << 26) as socket,
        ):
            tab = BrowserTab(socket)
            reading = asyncio.create_task(tab.read())
            try:
                yield tab
            finally:
                reading.cancel()
        drain.cancel()
    finally:
        process.kill()
        await process.wait()
