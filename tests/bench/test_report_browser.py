"""The HTML page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from pensieve.replay.html import page
from support.page_reader import Page
from support.replay_reports import sweep

pytestmark = pytest.mark.chromium

MEASURE = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [e.id, r.width, r.height]; };
document.querySelectorAll("details").forEach(e => e.open = true);
const found = {
  figures: [...document.querySelectorAll("figure")].map(box),
  drawn: [...document.querySelectorAll("figure svg")].map(e => e.getBBox().width),
  tables: [...document.querySelectorAll("table")].map(box),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  paper: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.querySelector("#plot-latency svg text")).fill,
};
const out = document.createElement("pre");
out.id = "measured"; out.textContent = JSON.stringify(found); document.body.append(out);
</script></body>"""


def browse(folder: Path, file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run headless on a page with a profile of its own; fails when there is no browser, or it hangs."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.fail("no chromium; set PENSIEVE_TEST_WITHOUT_CHROMIUM=1 to skip the tests that need it")
    command = [
        browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--no-proxy-server", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", *arguments,
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # its sandbox refuses to run as root
    return subprocess.run(
        [*command, file.as_uri()], capture_output=True, text=True, timeout=100, check=True, cwd=folder
    )


def measured(text: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """What the browser laid out, from a copy that may run a script; the page itself forbids any."""
    assert text.count("default-src 'none'") == 1
    copy = text.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    (folder / "copy.html").write_text(copy.replace("</body>", MEASURE))
    dom = browse(folder, folder / "copy.html", "--dump-dom", *arguments).stdout
    match = re.search(r'<pre id="measured">(.*?)</pre>', dom)
    assert match is not None, "the script did not run"
    found: dict[str, Any] = json.loads(unescape(match[1]))
    return found


def test_every_plot_and_table_is_laid_out(tmp_path: Path) -> None:
    text = page([sweep()])
    expected = Page(text)
    light = measured(text, tmp_path, "--window-size=1200,900")
    assert [name for name, _, _ in light["figures"]] == list(expected.figures)
    assert [name for name, _, _ in light["tables"]] == list(expected.tables)
    for name, width, height in light["figures"] + light["tables"]:
        assert width > 200 and height > 20, name
    assert all(width > 200 for width in light["drawn"]), light["drawn"]
    assert light["overflow"] == 0, "wide tables scroll inside themselves"
    narrow = measured(text, tmp_path, "--window-size=500,900")
    assert narrow["overflow"] == 0
    dark = measured(text, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light["paper"] == "rgb(255, 255, 255)" and dark["paper"] != light["paper"]
    assert dark["ink"] != light["ink"], "the plots' text follows the page"


def test_no_errors_and_a_screenshot(tmp_path: Path) -> None:
    file, image = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page([sweep()]))
    result = browse(tmp_path, file, f"--screenshot={image}", "--window-size=1000,1400")
    assert "CONSOLE" not in result.stderr, result.stderr
    data = image.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (1000, 1400)
    assert len(data) > 20_000, "an empty page is smaller"


def test_errors_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(page([sweep()]).replace("</body>", '<img src="x.png"><script>oops()</script></body>'))
    result = browse(tmp_path, file, "--dump-dom")
    assert result.stderr.count("CONSOLE") >= 2, "the page's own policy refuses both"
