"""``pensieve replay compare``: several reports in one picture, and the ratios that it states."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pensieve.replay.command import compare
from pensieve.replay.measure import value_at
from pensieve.replay.presentation.curves import SCHEMA
from pensieve.replay.presentation.plots import PlotsMissing, require
from support.replay.page_reader import Page
from support.replay.replay_reports import SYSTEMS, first_version, sweep
from support.sources import ROOT

PLOTS = {"plot-latency", "plot-ttft", "plot-sources", "plot-sessions"}
LINES = {"fast": [(1.0, 0.1), (4.0, 0.4)], "slow": [(1.0, 0.2), (2.0, 0.4), (2.1, 0.8)]}
"""System → (turns/s, mean normalised latency) at rising rates: at 0.2 s the first carries twice as much."""


def measured(lines: dict[str, list[tuple[float, float]]] = LINES) -> dict[str, Any]:
    """A report of such curves; the 90th percentile is twice the mean."""
    systems = {name: 9.0 for name in lines}
    report = sweep(systems, tuple(float(rate + 1) for rate in range(max(map(len, lines.values())))))
    kept = []
    for entry in report["targets"]:
        line = lines[entry["target"]]
        if entry["rate"] <= len(line):
            turns_per_s, mean = line[int(entry["rate"]) - 1]
            kept.append(entry | {"turns_per_s": turns_per_s})
            kept[-1]["normalised_latency_s"] = entry["normalised_latency_s"] | {"mean": mean, "p90": 2 * mean}
    return report | {"targets": kept}


def run_compare(*arguments: object) -> Result:
    return CliRunner().invoke(compare, [str(argument) for argument in arguments])


def written(folder: Path, **reports: dict[str, Any]) -> list[Path]:
    for name, report in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(report))
    return [folder / f"{name}.json" for name in reports]


def test_compare_of_old_and_new(tmp_path: Path) -> None:
    files = written(tmp_path, old=first_version(), new=sweep())
    result = run_compare(*files, "--html", tmp_path / "c.html", "--plots", tmp_path / "plots")
    assert result.exit_code == 0, result.output
    read = Page((tmp_path / "c.html").read_text())
    assert set(read.figures) == PLOTS and "table-facts-1" in read.tables
    systems = [row[0] for row in read.tables["table-systems"].rows[1:]]
    assert systems == ["Pensieve (old)", "Pensieve (new)", *list(SYSTEMS)[1:]]
    assert "Pensieve (old)" in read.figures["plot-latency"]
    assert "Pensieve (old)" in result.output and "Pensieve (new)" in result.output
    assert len(list((tmp_path / "plots").iterdir())) == 8
    old = read.tables["table-speed"].numbers[0]
    assert float(old[1]) == value_at(first_version()["targets"][0], "turns_per_s")


@pytest.mark.usefixtures("no_plots")
def test_compare_tells_files_of_one_name_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = written(tmp_path / "a", r=first_version())
    two = written(tmp_path / "b", r=first_version())
    out = tmp_path / "c.html"
    assert run_compare(*one, *two, "--html", out).exit_code == 0
    systems = [row[0] for row in Page(out.read_text()).tables["table-systems"].rows[1:]]
    assert systems == [f"Pensieve ({one[0]})", f"Pensieve ({two[0]})"]


def test_kept_results_still_compare(tmp_path: Path) -> None:
    kept = sorted((ROOT / "bench/results").glob("replay_sharegpt_cpu_*.json"))
    assert len(kept) == 2
    result = run_compare(*kept, "--html", tmp_path / "c.html")
    assert result.exit_code == 0, result.output
    assert set(Page((tmp_path / "c.html").read_text()).figures) == PLOTS - {"plot-sessions"}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"schema": "other/1", "targets": []}',
        '{"schema": "pensieve.replay/1", "targets": []}',
    ],
)
def test_what_is_no_report(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    result = run_compare(tmp_path / "x.json")
    assert result.exit_code == 1 and "x.json" in result.output
    assert run_compare().exit_code == 2


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(PlotsMissing, match=r"pip install 'pensieve\[plots\]'"):
        require()
    result = run_compare(*written(tmp_path, a=first_version()), "--html", tmp_path / "c.html")
    assert result.exit_code == 2 and "pensieve[plots]" in result.output
    assert not (tmp_path / "c.html").exists()


@pytest.mark.usefixtures("no_plots")
def test_the_ratio_is_told_in_terminal_page_and_json(tmp_path: Path) -> None:
    (file,), page, numbers = written(tmp_path, r=measured()), tmp_path / "c.html", tmp_path / "c.json"
    result = run_compare(file, "--html", page, "--json", numbers)
    assert result.exit_code == 0, result.output
    row = ["fast", "slow", "282.8", "2.00", "565.7", "2.00"]  # √(0.2 × 0.4) s: 2.83 against 1.41 turns/s
    assert Page(page.read_text()).tables["table-ratios"].rows[1] == row
    assert all(cell in result.output for cell in row)
    found = json.loads(numbers.read_text())
    (panel,) = found["panels"]
    assert found["schema"] == SCHEMA and panel["workload"] == "" and found["at_latency_s"] is None
    (pair,) = panel["ratios"]
    assert (pair["system"], pair["against"], pair["mean"]["bound"]) == ("fast", "slow", "equal")
    points = panel["systems"][0]["points"]
    assert [point["turns_per_s"] for point in points] == [1.0, 4.0]
    assert points[1]["normalised_latency_s"] == {"mean": 0.4, "p90": 0.8, "low": None, "high": None}


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("latency_ms", "mean", "p90"),
    [
        ("200", "2.00", "only the first is so fast"),
        ("400", "2.00", "2.00"),
        ("700", "≥ 1.93", "2.00"),
        ("1000", "both are faster", "≥ 1.98"),
        ("50", "neither is so fast", "neither is so fast"),
    ],
)
def test_at_a_given_latency(latency_ms: str, mean: str, p90: str, tmp_path: Path) -> None:
    (file,), page = written(tmp_path, r=measured()), tmp_path / "c.html"
    assert run_compare(file, "--html", page, "--at-latency", latency_ms).exit_code == 0
    _, _, at_mean, times, at_p90, times_p90 = Page(page.read_text()).tables["table-ratios"].rows[1]
    assert at_mean.replace(",", "") == at_p90.replace(",", "") == f"{latency_ms}.0"
    assert (times, times_p90) == (mean, p90)


@pytest.mark.usefixtures("no_plots")
def test_a_void_measurement_is_no_point_of_a_curve(tmp_path: Path) -> None:
    report = measured()
    report["targets"][-1]["valid"] = False
    report |= {"valid": False, "invalid_reasons": ["slow, run 2: too late"]}
    (file,), page, numbers = written(tmp_path, r=report), tmp_path / "c.html", tmp_path / "c.json"
    result = run_compare(file, "--html", page, "--json", numbers)
    assert result.exit_code == 0, result.output
    systems = json.loads(numbers.read_text())["panels"][0]["systems"]
    assert [len(system["points"]) for system in systems] == [2, 2]
    assert "too late" in result.output and "too late" in Page(page.read_text()).problems[0]


def test_workloads_are_panels_of_one_picture(tmp_path: Path) -> None:
    one, other = measured(), measured()
    other["dataset"] = {"name": "ultrachat", "sha256": "1"}
    files, page, numbers = written(tmp_path, a=one, b=other), tmp_path / "c.html", tmp_path / "c.json"
    result = run_compare(*files, "--html", page, "--json", numbers)
    assert result.exit_code == 0, result.output
    read = Page(page.read_text())
    titles = ["chat<b>.json, tiny", "ultrachat, tiny"]
    assert set(read.figures) == PLOTS
    assert all(title in text for title in titles for text in read.figures.values())
    for key in ("systems", "ratios", "speed", "tokens", "sessions", "failures"):
        table = read.tables[f"table-{key}"]
        assert table.heads[:2] == ["workload", "system"]
        assert {row[0] for row in table.rows[1:]} == set(titles)
        assert {len(row) for row in table.rows[1:]} == {len(table.heads)}
    assert [panel["workload"] for panel in json.loads(numbers.read_text())["panels"]] == titles
    assert all(title in result.output for title in titles)


def test_files_of_one_system_each_are_one_picture(tmp_path: Path) -> None:
    whole = measured()
    apart = [copy.deepcopy(whole) for _ in LINES]
    for name, report in zip(LINES, apart, strict=True):
        report["targets"] = [entry for entry in report["targets"] if entry["target"] == name]
    written(tmp_path, whole=whole, one=apart[0], two=apart[1])
    for name, files in (("w", ["whole"]), ("a", ["one", "two"])):
        paths = [tmp_path / f"{file}.json" for file in files]
        assert run_compare(*paths, "--json", tmp_path / f"{name}.out").exit_code == 0
    together, merged = (json.loads((tmp_path / f"{name}.out").read_text())["panels"] for name in "wa")
    for panel in (together[0], merged[0]):
        for system in panel["systems"]:
            del system["reports"]
    assert merged == together


def test_a_system_that_never_came_up_is_told(tmp_path: Path) -> None:
    down = measured() | {"targets": [], "dataset": None, "options": None, "workload": None}
    down["unreached"] = [{"target": "vLLM", "error": "out of memory"}]
    files, page = written(tmp_path, up=measured(), down=down), tmp_path / "c.html"
    result = run_compare(*files, "--html", page, "--json", tmp_path / "c.json")
    assert result.exit_code == 0 and "out of memory" in result.output, result.output
    read = Page(page.read_text())
    assert set(read.figures) == PLOTS and read.title == "Replay: chat<b>.json"
    assert read.problems == ["down: vLLM could not be reached: out of memory"]
    alone = run_compare(files[1])
    assert alone.exit_code == 1 and "no report has a measured target" in alone.output
