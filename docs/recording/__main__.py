"""``python docs/recording demo|top|page|site``: make the pictures of the docs from the real thing.

``demo`` and ``top`` run on a terminal and become ``docs/pictures/demo-*.svg`` and ``top.svg``; ``docs/demo.md`` says
where and when the demo ran. ``page`` and ``site`` are screenshots by Chromium, of the page on a server's admin port and
of the site that ``make docs`` builds. ``docs/pictures/texts.json`` holds a digest of the text that each of them shows.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import screens

import pensieve
from pensieve.client import AsyncClient
from pensieve.demo.conversations import Conversation, conversations
from pensieve.machine import usable_cores
from pensieve.spawn import ServerProcess

DOCS = Path(__file__).resolve().parents[1]
ACT = re.compile(r"\d\. ")
RECORDED = re.compile(r"(?<=<!-- recorded -->\n).*?(?=<!-- /recorded -->)", re.DOTALL)
DEMO_COLUMNS, TOP_COLUMNS, TOP_ROWS = 80, 100, 26
PEOPLE = ("ada", "bob", "cleo", "dan", "eve", "fay", "gus", "hal", "ivy", "jon", "kim", "lea")
TURNS = 60
WARM_UP_S = 50.0
SMALL = (
    "--model",
    "demo",
    "--store",
    "memory:",
    "--device-cache",
    "2560tokens",
    "--host-cache",
    "1536tokens",
)
"""Tiers far too small for what is said, so that there is something to see."""
CROWD = 60
CLONE_NEWUTS = 0x04000000
PAGE_TEXT, SITE_TEXT = "pensieve/server/page/page.html", "docs/index.md"
SCREENSHOTS = {"page-5.png": PAGE_TEXT, f"page-{CROWD}.png": PAGE_TEXT, "site.png": SITE_TEXT}
"""Screenshot → the file whose text it shows."""


def program() -> str:
    """The command beside the Python that runs this."""
    return str(Path(sys.executable).parent / "pensieve")


def acts(lines: list[str]) -> list[list[str]]:
    """What the demo wrote, act by act; what it ends with belongs to the last one."""
    found: list[list[str]] = []
    for line in lines:
        if ACT.match(screens.plain(line)):
            found.append([])
        if found:
            found[-1].append(line)
    for act in found:
        while not screens.plain(act[-1]).strip():
            act.pop()
    return found


def machine() -> str:
    """What ran, on what."""
    described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.+)$", described, re.MULTILINE)
    processor = re.sub(r"\((?:R|TM)\)", "", name[1]) if name else "an unnamed processor"
    return (
        f"Pensieve {pensieve.__version__}, torch {importlib.metadata.version('torch')}, Python"
        f" {sys.version.split()[0]}, on {usable_cores()} cores of {' '.join(processor.split())} without a GPU"
    )


def record_demo(folder: Path, page: Path) -> None:
    load, began = os.getloadavg()[0], time.monotonic()
    raw = screens.written([program(), "demo"], DEMO_COLUMNS, 40)
    seconds = time.monotonic() - began
    for number, act in enumerate(acts(screens.left_on_screen(raw)), 1):
        svg = screens.picture(act, DEMO_COLUMNS, "pensieve demo")
        (folder / f"demo-{number}.svg").write_text(svg, encoding="utf-8")
    others = f" that had other work as well (load average {load:.1f})" if load >= 0.5 else ""
    told = f"{machine()}{others}: {seconds:.0f} s, on {time.strftime('%Y-%m-%d')}, by `python docs/recording demo`.\n"
    page.write_text(RECORDED.sub(lambda _: told, page.read_text(encoding="utf-8")), encoding="utf-8")


async def record_top(folder: Path) -> None:
    """All of these people talk, each in a session of their own and with pauses, until the picture is taken."""
    with ServerProcess(*SMALL) as server:
        async with AsyncClient(server.target) as client, asyncio.TaskGroup() as group:
            scripts = conversations(len(PEOPLE), TURNS, seed=3)
            talking = [
                group.create_task(talk_alone(client, f"{name}-chat", script))
                for name, script in zip(PEOPLE, scripts, strict=True)
            ]
            await asyncio.sleep(WARM_UP_S)
            command = [program(), "top", "--admin", server.admin, "--interval", "0.5"]
            raw = await asyncio.to_thread(
                screens.written, command, TOP_COLUMNS, TOP_ROWS, keys="q", keys_after_s=6.0
            )
            for one in talking:
                one.cancel()
    frames = screens.frames(raw.replace(socket.gethostname(), "left"))  # the replica's name
    # The newest in which something is computed, for there the most is to be seen.
    busy = [one for one in frames if any(re.match(r"\S+  running", screens.plain(line)) for line in one)]
    svg = screens.picture((busy or frames)[-1], TOP_COLUMNS, "pensieve top")
    (folder / "top.svg").write_text(svg, encoding="utf-8")


async def talk_alone(client: AsyncClient, session_id: str, script: Conversation) -> None:
    pauses = random.Random(session_id)
    session = await client.create_session(session_id=session_id)
    for said in script:
        await session.send(said.text, max_output_tokens=64)
        await asyncio.sleep(pauses.expovariate(1 / 2.0))


def digest(source: Path) -> str:
    """Digest of the words that a page shows: markup, styles and scripts do not count."""
    text = re.sub(
        r"<(script|style)\b.*?</\1>|<[^>]*>", " ", source.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()


def note(folder: Path, *pictures: str) -> None:
    """Write down which text the pictures show."""
    file = folder / "texts.json"
    texts = json.loads(file.read_text()) if file.exists() else {}
    texts |= {name: digest(DOCS.parent / SCREENSHOTS[name]) for name in pictures}
    file.write_text(json.dumps({name: texts[name] for name in SCREENSHOTS if name in texts}, indent=2) + "\n")


def screenshot(url: str, file: Path, width: int, height: int) -> None:
    """Raises CalledProcessError when Chromium fails, TimeoutExpired after two minutes."""
    browser = shutil.which("chromium") or sys.exit("docs: no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-proxy-server", f"--user-data-dir={profile}", f"--window-size={width},{height}",
            "--virtual-time-budget=8000", f"--screenshot={file}", url,
        ]  # fmt: skip
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")  # its sandbox refuses to run as root
        subprocess.run(command, check=True, timeout=120, capture_output=True)


def hide_host_name() -> None:
    """Give this process and its children another host name, which the page shows. Exits unless that is allowed."""
    if ctypes.CDLL(None).unshare(CLONE_NEWUTS) != 0:
        sys.exit("docs: the picture would show this machine's name: run as root")
    socket.sethostname("left")


async def record_page(folder: Path, sessions: int, height: int) -> None:
    """``sessions`` conversations talk on little memory until the picture is taken."""
    with ServerProcess(*SMALL, "--max-wait", "0") as server:
        async with AsyncClient(server.target) as client, asyncio.TaskGroup() as group:
            names = [f"{PEOPLE[number % len(PEOPLE)]}-{number}" for number in range(sessions)]
            scripts = conversations(sessions, TURNS, seed=3)
            talking = [
                group.create_task(talk_alone(client, name, script))
                for name, script in zip(names, scripts, strict=True)
            ]
            await asyncio.sleep(WARM_UP_S)
            file = folder / f"page-{sessions}.png"
            await asyncio.to_thread(screenshot, f"http://{server.admin}/", file, 1200, height)
            for one in talking:
                one.cancel()


def record_site(folder: Path) -> None:
    """The front page of the site, built anew."""
    with tempfile.TemporaryDirectory() as build:
        site, pages = Path(build) / "site", Path(build) / "pages"
        command = [sys.executable, str(DOCS / "site"), "--to", str(site), "--pages", str(pages)]
        subprocess.run(command, check=True, timeout=300)
        screenshot((site / "index.html").as_uri(), folder / "site.png", 1280, 900)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python docs/recording", description=__doc__)
    parser.add_argument("what", choices=("demo", "top", "page", "site"))
    parser.add_argument("--to", type=Path, default=DOCS / "pictures", help="folder of the pictures")
    asked = parser.parse_args()
    if asked.what == "demo":
        record_demo(asked.to, DOCS / "demo.md")
    elif asked.what == "top":
        asyncio.run(record_top(asked.to))
    elif asked.what == "page":
        hide_host_name()
        asyncio.run(record_page(asked.to, 5, 500))
        asyncio.run(record_page(asked.to, CROWD, 960))
        note(asked.to, "page-5.png", f"page-{CROWD}.png")
    else:
        record_site(asked.to)
        note(asked.to, "site.png")


if __name__ == "__main__":
    main()
