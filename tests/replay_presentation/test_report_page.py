"""The HTML page and the plots."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pensieve.replay.presentation.html import page
from pensieve.replay.presentation.plots import write_plots
from pensieve.replay.presentation.table import (
    BY_TURN,
    FAILURES,
    FIRST_TOKEN,
    LATENESS,
    SESSIONS,
    SPEED,
    TOKENS,
    print_report,
)
from support.replay.page_reader import Page
from support.replay.replay_reports import RATES, SYSTEMS, first_version, sweep
from support.sources import ROOT

PLOTS = {"plot-latency", "plot-ttft", "plot-sources", "plot-sessions"}
TABLES = {"table-systems", "table-speed", "table-tokens", "table-sessions", "table-failures", "table-facts-0"}


def value_at(reports: list[dict[str, Any]], path: str) -> Any:
    value: Any = reports
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value.get(key)
        if value is None:
            return None
    return value


def test_the_page_of_a_sweep(sweep_page: str) -> None:
    read = Page(sweep_page)
    assert set(read.figures) == PLOTS
    assert set(read.tables) >= TABLES | {"table-ratios"}
    by_turn = [name for name in read.tables if name.startswith("table-turns-")]
    assert len(by_turn) == len(SYSTEMS) * len(RATES) == len(read.tables["table-speed"].rows) - 1
    for table in read.tables.values():
        widths = {len(row) for row in table.rows if row}
        assert widths == {len(table.heads) or 2}, "every row has a cell under every head"
    assert [row[0] for row in read.tables["table-systems"].rows[1:]] == list(SYSTEMS)
    assert [row[:2] for row in read.tables["table-ratios"].rows[1:]], "curves that meet are compared"
    for text in read.figures.values():
        assert not re.search(r"\\\$|\bnan\b", text)
    for name in SYSTEMS:
        assert name in read.figures["plot-latency"] and name in read.figures["plot-ttft"]
    assert not read.problems


@pytest.mark.usefixtures("no_plots")
def test_numbers_on_the_page_are_those_of_the_report() -> None:
    report = json.loads(json.dumps(sweep(seeds=(0, 1))))
    read = Page(page([report]))
    assert read.reports == [report]
    seen = set()
    every = (*SPEED, *FIRST_TOKEN, *TOKENS, *SESSIONS, *FAILURES, *LATENESS)
    columns = {column.path: column for column in (*every, *BY_TURN)}
    for table in read.tables.values():
        for path, exact, text in table.numbers:
            value = value_at([report], path)
            assert exact == ("" if value is None else str(value)), path
            field = re.sub(r"^0\.targets\.\d+\.(by_turn\.\d+\.)?", "", path)
            seen.add(field)
            if value is not None and field != "active_sessions.largest_within_limit" and field in columns:
                exactly = value * 1000 if columns[field].title.endswith(("[ms]", "[ms/token]")) else value
                places = len(text.partition(".")[2])
                assert float(text.replace(",", "")) == pytest.approx(exactly, abs=0.51 * 10**-places), path
    assert seen >= {column.path for column in every}
    assert "swap.in_bytes" in seen
    limits = [cell for cell in read.tables["table-sessions"].numbers if cell[0].endswith("within_limit")]
    assert len(limits) == len(report["targets"])
    for path, exact, text in limits:
        assert float(text.removeprefix("≥ ")) == pytest.approx(float(exact), abs=0.06), path


@pytest.mark.usefixtures("no_plots")
def test_turns_that_were_cut_short_are_told() -> None:
    report = sweep({"Pensieve": 8.0}, (1.0,))
    report["targets"][0]["window"] = {"steady": True, "cut_short": 3}
    table = Page(page([report])).tables["table-failures"]
    assert dict(zip(table.heads, table.rows[1], strict=True))["cut short"] == "3"


@pytest.mark.parametrize("reports", [1, 2])
def test_the_page_needs_nothing_from_outside(reports: int, sweep_page: str) -> None:
    text = sweep_page if reports == 1 else page([sweep({"One": 5.0}, (1.0,)), first_version()])
    read = Page(text)
    assert not {"link", "img", "iframe", "object", "image"} & {tag for tag, _ in read.tags}
    for tag, attributes in read.tags:
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
        if tag == "script":
            assert attributes == {"type": "application/json", "id": "reports"}, "data, not a program"
    visible = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?://|@import|url\((?!#)", visible)
    assert "prefers-color-scheme: dark" in text
    assert [name for name, count in Counter(read.ids).items() if count > 1] == []
    referred = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
    assert referred and {one or other for one, other in referred} <= set(read.ids)


def test_names_cannot_break_out() -> None:
    report = sweep({"<script>alert(1)</script>": 5.0}, (1.0, 2.0))
    report["targets"][0]["errors"] = {"<i>BAD</i>": 2}
    read = Page(page([report]))
    assert [a for tag, a in read.tags if tag == "script"] == [{"type": "application/json", "id": "reports"}]
    assert read.title == "Replay: chat<b>.json"
    assert read.problems == ["<script>alert(1)</script>, 1 turns/s: 2 turns failed with <i>BAD</i>"]


@pytest.mark.usefixtures("no_plots")
def test_what_forbids_belief_is_on_top() -> None:
    report = sweep({"Pensieve": 8.0}, (1.0,))
    report["invalid_reasons"] = ["the client was 300 ms late"]
    report["unreached"] = [{"target": "http://x", "error": "refused"}]
    report["targets"][0]["window"] = {"steady": False}
    report["targets"][0]["receipts"] |= {"violations": 1, "examples": ["turn 3 lies"]}
    first, second, third, fourth = Page(page([report])).problems
    assert "300 ms late" in first and "refused" in second and "turn 3 lies" in third and "steady" in fourth
    console = Console(width=140, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_report(report, console)
    text = console.export_text()
    assert "300 ms late" in text and "refused" in text and "turn 3 lies" in text
    assert "Pensieve, 1 turns/s: the load was not steady" in text


@pytest.mark.usefixtures("no_plots")
def test_a_simulation_names_the_machine_that_it_is_of() -> None:
    report = sweep({"lru": 8.0}, (1.0,))
    report["simulation"] = {"machine": {"name": "a big one"}, "settings": {"replicas": 4}}
    text = page([report])
    subtitle = text[text.index("<header>") : text.index("</header>")]
    assert "simulated machine: 4 × a big one" in subtitle and report["machine"]["cpu"] not in subtitle
    report["simulation"]["settings"]["replicas"] = 1
    assert "simulated machine: a big one" in page([report])
    del report["simulation"]
    assert report["machine"]["cpu"] in page([report])


@pytest.mark.parametrize(
    ("report", "names"),
    [
        (sweep(), {"latency", "ttft", "sources", "sessions"}),
        (sweep(rates=(1.0,)), {"latency", "ttft", "sources", "sessions"}),
        (sweep({"One": 5.0}, (1.0,)), {"ttft", "sources", "sessions"}),
        (first_version(), {"ttft", "sources"}),
    ],
    ids=["several", "one-load", "one", "first-version"],
)
def test_plots(report: dict[str, Any], names: set[str], tmp_path: Path) -> None:
    written = write_plots([report], tmp_path / "new" / "folder")
    assert {path.name for path in written} == {f"{n}.{s}" for n in names for s in ("png", "svg")}
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml") and len(data) > 5000
    if len(report["targets"]) == len(SYSTEMS):
        again = write_plots([report], tmp_path / "again")
        assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_a_target_without_receipts_has_no_sources() -> None:
    report = sweep({"stub": 5.0}, (1.0,))
    for row in report["targets"][0]["by_turn"]:
        row["tokens"] |= {"context": 0, "gpu_cached": 0, "swapped_in": 0, "recomputed": 0, "new": 0}
    assert "plot-sources" not in Page(page([report])).figures


def test_nothing_completed_is_still_a_page() -> None:
    report = sweep({"down": 5.0}, (1.0,))
    summary = report["targets"][0]
    nothing = {"count": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None, "max": None}
    summary |= {
        "turns_per_s": None, "output_tokens_per_s": None, "normalised_latency_s": nothing, "inter_token_s": nothing,
        "ttft_s": {"cold": nothing, "warm": nothing}, "ttft_quantiles_s": {"cold": None, "warm": None}, "by_turn": [],
        "active_sessions": {}, "client_lag_s": nothing,
    }  # fmt: skip
    read = Page(page([report]))
    assert read.figures == {} and "–" in read.tables["table-speed"].rows[1]


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, pensieve.replay.command; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_the_template_is_packaged() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert packaged["pensieve.replay.presentation"] == ["templates/*"]
    assert (ROOT / "pensieve/replay/presentation/templates/report.html.jinja").is_file()
