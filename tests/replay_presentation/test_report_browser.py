"""The HTML page in a real browser."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pensieve.replay.presentation.html import page
from support.replay.browser import browse, measured
from support.replay.page_reader import Page
from support.replay.replay_reports import SYSTEMS, sweep

pytestmark = pytest.mark.chromium


def test_every_plot_and_table_is_laid_out(sweep_page: str, tmp_path: Path) -> None:
    expected = Page(sweep_page)
    light = measured(sweep_page, tmp_path, "--window-size=1200,900")
    assert [name for name, _, _ in light["figures"]] == list(expected.figures)
    assert [name for name, _, _ in light["tables"]] == list(expected.tables)
    for name, width, height in light["figures"] + light["tables"]:
        assert width > 200 and height > 20, name
    assert all(width > 200 for width in light["drawn"]), light["drawn"]
    assert len(light["curves"]) == len(SYSTEMS) and all(length > 50 for length in light["curves"]), light[
        "curves"
    ]
    assert light["overflow"] == 0 and light["beyond"] == []
    half = measured(sweep_page, tmp_path, "--window-size=800,900")
    assert half["overflow"] == 0 and half["beyond"] == [], "all columns are in sight"
    narrow = measured(sweep_page, tmp_path, "--window-size=500,900")
    assert narrow["overflow"] == 0, "wide tables scroll inside themselves"
    dark = measured(sweep_page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light["paper"] == "rgb(255, 255, 255)" and dark["paper"] != light["paper"]
    assert dark["ink"] != light["ink"], "the plots' text follows the page"


def test_no_errors_and_a_screenshot(sweep_page: str, tmp_path: Path) -> None:
    file, image = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(sweep_page)
    result = browse(tmp_path, file, f"--screenshot={image}", "--window-size=1000,1400")
    assert "CONSOLE" not in result.stderr, result.stderr
    data = image.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (1000, 1400)
    assert len(data) > 20_000, "an empty page is smaller"


def test_errors_would_be_seen(sweep_page: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(sweep_page.replace("</body>", '<img src="x.png"><script>oops()</script></body>'))
    result = browse(tmp_path, file, "--dump-dom")
    assert result.stderr.count("CONSOLE") >= 2, "the page's own policy refuses both"


def test_a_comparison_at_one_load(tmp_path: Path) -> None:
    """Bars instead of curves of one dot; all columns are in sight here as well."""
    found = measured(page([sweep(rates=(1.0,))]), tmp_path, "--window-size=800,900")
    assert len(found["curves"]) == len(SYSTEMS) and found["beyond"] == []
