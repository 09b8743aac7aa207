"""The recorded pictures of the docs: what a terminal shows in the end is read rightly, and they show today's demo."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.sources import ROOT

PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))
PROGRAM = """
from rich.console import Console
from rich.live import Live
from rich.progress import Progress
console = Console()
input()
with console.status("starting"):
    console.print("[bold]first[/]")
with Live("one\\ntwo", console=console, auto_refresh=False) as live:
    live.update("three\\n[red]four[/]", refresh=True)
with Progress(console=console, transient=True) as progress:
    progress.advance(progress.add_task("turns", total=2))
    progress.refresh()
console.print("width", console.width)
with Live("seen", console=console, screen=True, auto_refresh=False) as live:
    live.update("then\\nseen", refresh=True)
"""


@pytest.fixture(scope="module")
def screens() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recording_screens", ROOT / "docs/recording/screens.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recording() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs/recording")
        spec = importlib.util.spec_from_file_location("recording_main", ROOT / "docs/recording/__main__.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def test_what_is_left_of_a_live_display(screens: ModuleType) -> None:
    raw = screens.written([sys.executable, "-c", PROGRAM], 60, 10, keys="typed\r")
    shown = screens.left_on_screen(raw.partition("\x1b[?1049h")[0])
    left = [line for line in map(screens.plain, shown) if line]
    assert left == ["typed", "first", "three", "four", "width 60"]
    assert any("\x1b[31m" in line for line in shown), "colours stay"
    frames = [[screens.plain(line).rstrip() for line in frame] for frame in screens.frames(raw)]
    assert frames[-1][:2] == ["then", "seen"] and len(frames) >= 2


def test_a_program_that_fails_leaves_no_picture(screens: ModuleType) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        screens.written([sys.executable, "-c", "raise SystemExit(3)"], 60, 10)


def words(picture: Path) -> str:
    """What a picture says."""
    found = re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text(encoding="utf-8"))
    return html.unescape(" ".join(found)).replace("\xa0", " ")


def test_the_pictures_are_of_todays_demo() -> None:
    """Once it says something else: python docs/recording demo."""
    source = (ROOT / "pensieve/demo/run.py").read_text(encoding="utf-8")
    acts = re.findall(r"\[bold\](\d\. .+?)\[/\]", source)
    assert len(acts) == 3
    recorded = [words(path) for path in PICTURES if path.name.startswith("demo-")]
    assert len(recorded) == len(acts)
    for told, shown in zip(acts, recorded, strict=True):
        assert told.replace("{len(scripts)}", "16") in shown
    assert "Every answer is right and every receipt adds up." in recorded[-1]
    page = (ROOT / "docs/demo.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^## \d\. ", page, re.MULTILINE)) == len(acts)
    assert re.search(r"<!-- recorded -->\nPensieve .*`python docs/recording demo`", page)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_pictures_are_small_and_fetch_nothing(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    assert len(text) < 150_000
    assert re.findall(r"https?://[^\"'\s]+", text) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in text and "@import" not in text


def test_screenshots_show_the_present_text(recording: ModuleType) -> None:
    made = json.loads((ROOT / "docs/pictures/texts.json").read_text())
    assert (
        set(made)
        == set(recording.SCREENSHOTS)
        == {path.name for path in (ROOT / "docs/pictures").glob("*.png")}
    )
    old = [
        name
        for name, source in recording.SCREENSHOTS.items()
        if recording.digest(ROOT / source) != made[name]
    ]
    assert old == [], "their text has changed: python docs/recording page, or site"
