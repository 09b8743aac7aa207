"""``bench/simulated_figures.py``, with figures made small: what it writes is what its recorded commands give."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pensieve.replay.compare_command import compare
from support.replay.benches import load_bench
from support.sources import ROOT

ABSOLUTE = re.compile(r"(?<!\w)/\w+")
"""A path from the root: no word stands before its slash, unlike in ``turns/s``."""
LABELS = ("both tiers", "device tier only")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Figure 10 with its first panel alone and figure 14 with its trace alone, in caches that are too small."""
    found = load_bench("simulated_figures", monkeypatch)
    for name, kept in (("figure10", slice(0, 2)), ("figure14", slice(1, 2))):
        figure = found.FIGURES[name]
        small = tuple(
            replace(
                simulation, sessions=60, rates=(3.0, 6.0), warm_up_s=2.0, policies=simulation.policies[:2],
                memory=found.Memory("6000tokens", "0" if simulation.memory.host == "0" else "9000tokens"),
            )
            for simulation in figure.simulations[kept]
        )  # fmt: skip
        monkeypatch.setitem(found.FIGURES, name, replace(figure, simulations=small))
    return found


@pytest.fixture
def trace(tmp_path: Path, bench: Any) -> Path:
    rows = [
        {"session_id": f"s{session}", "turn": turn, "input_tokens": 200 + 9 * session, "output_tokens": 60}
        for session in range(12)
        for turn in range(1 + session % 5)
    ]
    path: Path = tmp_path / bench.TRACE
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return path


def run(bench: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """As if typed: pages tell the command line."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "simulated_figures.py"), *arguments])
    return CliRunner().invoke(bench.main, list(arguments))


def again(page: str, found: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The reports of the commands on a page. ``found``: where the files are that it has only the names of."""
    reports = []
    for command in re.findall(r"^`(pensieve simulate .*)`$", page, re.MULTILINE):
        words = [str(found.get(word, word)) for word in shlex.split(command)[1:]]
        out = found["folder"] / "again.json"
        subprocess.run(
            [sys.executable, "-P", "-m", "pensieve", *words, "--json", str(out)],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        reports.append(json.loads(out.read_text()))
    return reports


def compared(reports: Mapping[str, dict[str, Any]], folder: Path) -> tuple[dict[str, Any], bytes]:
    """What ``pensieve replay compare`` makes of them: its document and its picture of latencies."""
    files = [folder / f"{name}.json" for name in reports]
    for file, report in zip(files, reports.values(), strict=True):
        file.write_text(json.dumps(report))
    arguments = [*map(str, files), "--json", str(folder / "compared.json"), "--plots", str(folder / "plots")]
    assert CliRunner().invoke(compare, arguments).exit_code == 0
    return json.loads((folder / "compared.json").read_text()), (folder / "plots" / "latency.png").read_bytes()


def table_row(row: Mapping[str, Any]) -> str:
    """A line of a page, from a target of a report."""
    tokens, warm, each = row["tokens"], row["ttft_s"]["warm"], row["normalised_latency_s"]
    history = tokens["gpu_cached"] + tokens["swapped_in"] + tokens["recomputed"]
    shares = [f"{100 * tokens[name] / history:.1f}" for name in ("gpu_cached", "swapped_in", "recomputed")]
    times = [f"{1000 * warm[key]:,.0f}" for key in ("mean", "p90")]
    times += [f"{1000 * each[key]:,.1f}" for key in ("mean", "p90")]
    steady = "yes" if row["window"]["steady"] else "no"
    return f"| {' | '.join((row['target'], format(row['rate'], 'g'), *shares, *times, steady))} |"


def test_numbers_are_those_of_the_recorded_commands(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "out"
    done = run(bench, monkeypatch, "figure10", "--results", str(results))
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in results.iterdir()) == ["figure10.json", "figure10.md", "figure10.png"]
    page, document = ((results / f"figure10.{kind}").read_text() for kind in ("md", "json"))

    reports = again(page, {"folder": tmp_path})
    for report, label in zip(reports, LABELS, strict=True):
        report["targets"] = [row | {"target": label} for row in report["targets"]]
    rows = [row for report in reports for row in report["targets"]]
    begins = tuple(f"| {label} | {rate} |" for label in LABELS for rate in (3, 6))
    assert [line for line in page.splitlines() if line.startswith(begins)] == [table_row(row) for row in rows]
    assert any(row["tokens"]["recomputed"] for row in rows), "nothing was evicted: all lines are the same"

    names = [simulation.name for simulation in bench.FIGURES["figure10"].simulations]
    expected, picture = compared(dict(zip(names, reports, strict=True)), tmp_path)
    assert json.loads(document)["panels"] == expected["panels"]
    assert (results / "figure10.png").read_bytes() == picture
    mean = expected["panels"][0]["ratios"][0]["mean"]
    assert f"| {' | '.join(LABELS)} | {1000 * mean['latency_s']:.1f} | {mean['text']} |" in page


def test_files_of_elsewhere_go_by_their_names(
    bench: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, machine = tmp_path / "out", tmp_path / "other.machine.json"
    machine.write_bytes(bench.MACHINE.read_bytes())
    options = ("--trace", str(trace), "--machine", str(machine), "--results", str(results))
    done = run(bench, monkeypatch, "figure14", *options)
    assert done.exit_code == 0, done.output
    page, document = (results / "figure14.md").read_text(), (results / "figure14.json").read_text()
    for text in (page, document):
        assert not ABSOLUTE.search(text), ABSOLUTE.search(text)
    assert f"bench/simulated_figures.py figure14 --trace {trace.name} --machine {machine.name} --" in page
    (report,) = again(page, {"folder": tmp_path, trace.name: trace, machine.name: machine})
    assert [row["target"] for row in report["targets"]] == ["retention", "gittins"] * 2
    assert all(table_row(row) in page for row in report["targets"])
    told = json.loads(document)["reports"][0]["command"]
    assert f"`{shlex.join(told)}`" in page


@pytest.mark.parametrize("names", [("figure14",), ()])
def test_without_its_trace_nothing_is_begun(
    bench: Any, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(bench, monkeypatch, *names, "--results", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert f"figure14 needs --trace FILE: a sample of ShareGPT, {bench.TRACE}" in done.output
    assert not (tmp_path / "out").exists()


def test_a_simulation_that_fails_leaves_no_figure(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, machine = tmp_path / "out", tmp_path / "machine.json"
    machine.write_text("{}x")
    done = run(bench, monkeypatch, "figure10", "--machine", str(machine), "--results", str(results))
    assert done.exit_code == 1 and "figure10-sharegpt-both: `pensieve simulate` ended with 2" in done.output
    assert not list(results.iterdir())


@pytest.mark.parametrize("name", ["figure10", "figure14", "figure15"])
def test_the_results_in_the_repository_are_of_the_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("simulated_figures", monkeypatch)
    page = (bench.RESULTS / f"{name}.md").read_text()
    commands = [
        shlex.join(["pensieve", *simulation.arguments(simulation.load, bench.told(bench.MACHINE))])
        for simulation in bench.FIGURES[name].simulations
    ]
    assert re.findall(r"^`(pensieve simulate .*)`$", page, re.MULTILINE) == commands
