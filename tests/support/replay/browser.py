"""Pages in headless Chromium: what it lays out, what it complains about, what it looks like."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

MEASURE = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [e.id, r.width, r.height]; };
document.querySelectorAll("details").forEach(e => e.open = true);
const found = {
  figures: [...document.querySelectorAll("figure")].map(box),
  drawn: [...document.querySelectorAll("figure svg")].map(e => e.getBBox().width),
  curves: [...document.querySelectorAll("[id^=latency-mean-] > path")].map(e => e.getTotalLength()),
  tables: [...document.querySelectorAll("table")].map(box),
  beyond: [...document.querySelectorAll(".scroll")].map(
    e => [e.firstElementChild.id, e.scrollWidth - e.clientWidth]).filter(pair => pair[1] > 0),
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
