"""The page in a real browser: it shows what is cached, moves when that moves, stays small with a thousand sessions."""

from __future__ import annotations

import asyncio
import struct
import time
from pathlib import Path
from random import Random

import pytest

from pensieve.client import AsyncClient
from pensieve.engine.messages import SessionStrip
from pensieve.feed import HttpDoorState
from support.page.browser_tab import BrowserTab, browser_tab
from support.page.page_rig import PageRig, page_rig

pytestmark = pytest.mark.chromium

LOOKED = "window.pensieve && pensieve.looks > 0"
NODES = "document.querySelectorAll('*').length"
INK = """(() => {
  const sheet = document.getElementById("sheet"), c = sheet.getContext("2d"), found = new Set();
  const data = c.getImageData(0, 0, sheet.width, sheet.height).data;
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) found.add(`${data[i]},${data[i+1]},${data[i+2]}`);
  return [...found];
})()"""
DEVICE, HOST = "24,115,184", "230,159,0"
"""The colours of the two tiers, light scheme."""


async def talk(rig: PageRig, sessions: int, turns: int) -> list[str]:
    async with AsyncClient(rig.address) as client:
        chats = [await client.create_session(labels={"title": f"talk {n}"}) for n in range(sessions)]
        for _ in range(turns):
            for chat in chats:
                await chat.send(
                    "an input that takes some chunks of the cache, and some more", max_output_tokens=5
                )
        return [chat.id for chat in chats]


async def shown(tab: BrowserTab) -> dict[str, str]:
    return dict(await tab.value("pensieve.sessions()"))


async def ink(tab: BrowserTab, colour: str) -> None:
    """Wait until a colour is on the sheet."""
    await tab.until(f"({INK}).includes('{colour}')")


async def test_five_sessions_are_shown_and_move(tmp_path: Path) -> None:
    async with page_rig(tmp_path) as rig, browser_tab(tmp_path) as tab:
        ids = await talk(rig, 5, 1)
        await tab.open(rig.url)
        await tab.until(LOOKED)
        before = await shown(tab)
        assert [key.partition("/")[2] for key in before] == ids[::-1]
        assert set("".join(before.values())) <= set("d0123456789"), before
        await ink(tab, DEVICE)
        assert await tab.value("[pensieve.drawn, pensieve.moved, pensieve.view]") == [5, 0, "rows"]
        await talk(rig, 6, 1)  # more than the device holds: some of the first are swapped out
        await tab.until("pensieve.moved > 0")
        await tab.until("pensieve.sessions().some(([, strip]) => /h/.test(strip))")
        await ink(tab, HOST)
        await _open_one(rig, tab)
        assert tab.errors == []
        await _the_door_is_told(rig, tab)
        await _the_memory_is_told(rig, tab)
        await rig.link.stop()
        await tab.until("!document.getElementById('empty').hidden")
        assert tab.errors == [], "an engine that is gone is no error of the page"


async def _the_door_is_told(rig: PageRig, tab: BrowserTab) -> None:
    """Beside the server's own health; nothing of it without one."""
    line = "(d => !d.hidden && d.className + '|' + d.textContent)(document.getElementById('door'))"
    assert await tab.value(line) is False
    rig.door = HttpDoorState("serving", "127.0.0.1:8080", time.time() - 100, 0)
    await tab.until(f"{line} === '|HTTP serving'")
    rig.door = HttpDoorState("hung", "127.0.0.1:8080", time.time() - 4000, 2)
    await tab.until(f"/^bad.HTTP hung for 40\\d\\d s .2 restarts.$/.test({line})")
    rig.door = None
    await tab.until(f"!{line}")


async def _the_memory_is_told(rig: PageRig, tab: BrowserTab) -> None:
    """The bytes of a tier that grows and shrinks are shown; one size is not."""
    line = "(d => !d.hidden && d.textContent)(document.getElementById('device-memory'))"
    assert await tab.value(line) is False
    gib = 1 << 30
    rig.link.memory_sizes = (9 * gib, 6 * gib, gib // 2, 60 * gib)
    await tab.until(f"{line} === 'holds 9.0 GiB, wanted 6.0 GiB, range 512.0 MiB to 60.0 GiB'")
    rig.link.memory_sizes = (gib, gib, gib, gib)
    await tab.until(f"!{line}")


async def _open_one(rig: PageRig, tab: BrowserTab) -> None:
    """A click on the first strip shows its turns and receipts, and no text."""
    box = await tab.value("(r => [r.left, r.top])(document.getElementById('sheet').getBoundingClientRect())")
    await tab.click(box[0] + 60, box[1] + 14)
    text = await tab.until("(t => /tokens in/.test(t) && t)(document.getElementById('panel').textContent)")
    assert "Turns, the latest first" in text and "--page-text" in text and "an input" not in text
    turns = await tab.value("document.querySelectorAll('.turn .bar').length")
    async with AsyncClient(rig.address) as client:
        name = (await tab.value("pensieve.sessions()[0][0]")).partition("/")[2]
        await client.session(name).send("one more", max_output_tokens=3)
    await tab.until(f"document.querySelectorAll('.turn .bar').length === {turns + 1}")
    await tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
    await tab.until("document.getElementById('panel').hidden")


async def test_a_thousand_sessions_are_drawn_on_one_sheet(tmp_path: Path) -> None:
    async with page_rig(tmp_path) as rig, browser_tab(tmp_path) as tab:
        rig.link.strips = crowd(1000)
        await tab.open(rig.url)
        await tab.until(LOOKED)
        assert await tab.value("pensieve.view") == "grid"
        few = await tab.value("pensieve.drawn") or await tab.until("pensieve.drawn")
        assert 0 < few < 600, "what is out of sight is not drawn"
        nodes = await tab.value(NODES)
        assert nodes < 250, "no element for a chunk, or for a session"
        await tab.value("document.getElementById('scroll').scrollTop = 1e6")
        rig.link.strips = crowd(1000, seed=1)
        await tab.until("pensieve.moved > 100")
        assert await tab.value(NODES) <= nodes + 5
        sheet = await tab.value("(s => [s.width, s.height])(document.getElementById('sheet'))")
        assert sheet[0] <= 1280 and sheet[1] <= 800, "the sheet is as large as what is seen"
        assert tab.errors == []


async def test_other_windows_and_what_breaks(tmp_path: Path) -> None:
    async with page_rig(tmp_path) as rig, browser_tab(tmp_path) as tab:
        rig.link.strips = crowd(40)
        await tab.open(rig.url, dark=True)
        await tab.until(f"{LOOKED} && pensieve.drawn > 0")
        for width, height, dark in ((1280, 800, True), (400, 760, False)):
            await tab.size(width, height)
            await tab.scheme(dark=dark)
            await tab.until(f"document.getElementById('sheet').clientWidth <= {width}")
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await tab.value(overflow) <= 0
            paper = await tab.value("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(251, 251, 250)") != dark
            picture = await tab.picture()
            assert struct.unpack(">II", picture[16:24]) == (width, height) and len(picture) > 10_000
        assert tab.errors == []
        await tab.value(
            "(i => { i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i) })(document.createElement('img')),"
            "setTimeout(() => oops(), 0), 0"
        )
        async with asyncio.timeout(30):
            while len(tab.errors) < 2:
                await asyncio.sleep(0.05)
        found = " ".join(tab.errors)
        assert "oops" in found and "Content Security Policy" in found, "errors would be seen"


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nid = "ops"\ntenant = "ops"\nsha256 = "{SECRET_SHA256}"\nscopes = ["admin"]\n')
    keys.chmod(0o600)
    async with page_rig(tmp_path, keys=keys) as rig, browser_tab(tmp_path) as tab:
        await talk(rig, 2, 1)
        await tab.open(rig.url)
        await tab.until("!document.getElementById('key').hidden")
        assert await tab.value("pensieve.looks") == 0
        await tab.value(
            "document.getElementById('secret').value = 'ck_ops_s3cret'; document.getElementById('key').requestSubmit()"
        )
        await tab.until(LOOKED)
        assert len(await shown(tab)) == 2


SECRET_SHA256 = "1ec1c26b50d5d3c58d9583181af8076655fe00756bf7285940ba3670f99fcba0"
"""Of ``s3cret``."""


def crowd(count: int, seed: int = 0) -> list[SessionStrip]:
    """Sessions of two hundred chunks."""
    rng = Random(seed)
    strips = []
    for number in range(count):
        dropped, host, both = (rng.randrange(60) for _ in range(3))
        strip = f"D7x{dropped + 1}h{host + 1}b{both + 1}d{190 - dropped - host - both}"
        running = number < 8
        strips.append(
            SessionStrip(
                f"acme/talk-{number:04}", 6400, strip, 0.0 if running else number, running, False, False
            )
        )
    return strips
