"""Three systems, one command, one report: a sweep as its users run it, its page in a real browser, the picture kept.

``build/replay_report.*`` are the page, its numbers and its screenshot; a CI run keeps that folder.
"""

from __future__ import annotations

import json
import shlex
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pensieve.demo import MODEL_DIR
from support.lengths import at_length
from support.replay import openai_stub
from support.replay.browser import browse, measured
from support.replay.page_reader import Page
from support.sources import ROOT

pytestmark = pytest.mark.timeout(400)
SYSTEMS = ("Pensieve", "Pensieve, stateless", "transformers, stateless")
RATES = (8.0, 48.0)
CONVERSATIONS, TURNS, OUTPUT = 6, 5, at_length(6, 12)
SERVE = ("--model", "demo", "--store", "memory:", "--threads", "1")
PICTURE = (1200, 1500)


@dataclass(frozen=True)
class Sweep:
    status: int
    said: str
    report: dict[str, Any]
    page: str


@pytest.fixture(scope="module")
def artefacts() -> Path:
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def sweep(artefacts: Path) -> Sweep:
    """``pensieve replay`` of three servers that it starts itself, one after the other."""
    pensieve = [sys.executable, "-P", "-m", "pensieve"]
    serve = [*pensieve, "serve", *SERVE, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stub = [sys.executable, openai_stub.__file__, str(MODEL_DIR), "--port", str(port)]
    starts = (
        shlex.join(serve),
        shlex.join([*serve, "--stateless"]),
        f"http://127.0.0.1:{port} {shlex.join(stub)}",
    )
    numbers, page = artefacts / "replay_report.json", artefacts / "replay_report.html"
    command = [
        *pensieve, "replay", "sharegpt-long", "--conversations", str(CONVERSATIONS), "--max-turns", str(TURNS),
        "--max-output-tokens", str(OUTPUT), "--rates", ",".join(f"{rate:g}" for rate in RATES),
        *(word for start in starts for word in ("--start", start)),
        *(word for name in SYSTEMS for word in ("--name", name)),
        # Servers need not be asked for these first, which would start them twice; a busy machine voids no run.
        "--vocab-size", "1536", "--context-limit", "2048", "--max-lag", "60",
        "--json", str(numbers), "--html", str(page),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert numbers.exists(), done.stderr
    return Sweep(
        done.returncode, done.stdout + done.stderr, json.loads(numbers.read_text()), page.read_text()
    )


def test_every_turn_of_every_system_is_served(sweep: Sweep) -> None:
    assert sweep.status == 0, sweep.said
    found = [(entry["target"], entry["rate"]) for entry in sweep.report["targets"]]
    assert sorted(found) == sorted((name, rate) for name in SYSTEMS for rate in RATES)
    work = sweep.report["workload"]
    for entry in sweep.report["targets"]:
        assert entry["turns"] == {"completed": work["turns"], "failed": 0, "skipped": 0}
        assert entry["tokens"]["output"] == work["output_tokens"], "lengths are forced"
        assert entry["receipts"]["checked"] == work["turns"] and entry["receipts"]["violations"] == 0
        history = entry["tokens"]["context"] - entry["tokens"]["new"]
        from_cache = entry["tokens"]["gpu_cached"] + entry["tokens"]["swapped_in"]
        assert from_cache == (history - entry["tokens"]["recomputed"] if entry["target"] == "Pensieve" else 0)
        assert entry["target"] != "Pensieve" or from_cache > 0


def test_one_page_has_it_all(sweep: Sweep) -> None:
    read = Page(sweep.page)
    assert set(read.figures) == {"plot-latency", "plot-ttft", "plot-sources", "plot-sessions"}
    assert [row[0] for row in read.tables["table-systems"].rows[1:]] == list(SYSTEMS)
    pairs = [tuple(row[:2]) for row in read.tables["table-ratios"].rows[1:]]
    assert pairs == [(SYSTEMS[0], SYSTEMS[1]), (SYSTEMS[0], SYSTEMS[2]), (SYSTEMS[1], SYSTEMS[2])]
    assert all(any(letter.isdigit() for letter in row[3]) for row in read.tables["table-ratios"].rows[1:])
    assert all(name in read.figures["plot-latency"] for name in SYSTEMS)
    facts = dict(row[:2] for row in read.tables["table-facts-0"].rows if row)
    assert facts["machine: cores"] == str(sweep.report["machine"]["cores"])
    assert {"versions: torch", "options: arrivals: rate", "dataset: sha256"} <= facts.keys()
    assert read.reports == [sweep.report]
    assert "Throughput at equal normalised latency" in sweep.said


@pytest.mark.chromium
def test_a_browser_shows_it(sweep: Sweep, artefacts: Path, tmp_path: Path) -> None:
    shown = measured(sweep.page, tmp_path, f"--window-size={PICTURE[0]},{PICTURE[1]}")
    # Not how long: a system that carries no more at the higher rate has a short curve.
    assert len(shown["curves"]) == len(SYSTEMS) and all(shown["curves"]), shown["curves"]
    assert all(width > 300 and height > 200 for _, width, height in shown["figures"]), shown["figures"]
    assert all(width > 200 and height > 20 for _, width, height in shown["tables"]), shown["tables"]
    assert shown["overflow"] == 0
    image = artefacts / "replay_report.png"
    image.unlink(missing_ok=True)
    size = f"--window-size={PICTURE[0]},{PICTURE[1]}"
    result = browse(tmp_path, artefacts / "replay_report.html", f"--screenshot={image}", size)
    assert "CONSOLE" not in result.stderr, result.stderr
    data = image.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == PICTURE
    assert len(data) > 50_000, "an empty page is smaller"
